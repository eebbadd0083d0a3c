//! A copy of the tree, in which mistakes are made.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::patch::{Misfit, Patch};

/// A copy of what a commit of the tree would have.
#[derive(Debug)]
pub struct Copy {
    root: PathBuf,
}

impl Copy {
    /// Makes the copy what the tree is now: files are written where their content differs, and
    /// removed where the tree has none.
    ///
    /// # Errors
    /// The tree is no Git repository, or a file cannot be read or written.
    pub fn of(tree: &Path, root: PathBuf) -> Result<Self> {
        let files = files(tree)?;
        fs::create_dir_all(&root)?;
        for file in &files {
            copy(&tree.join(file), &root.join(file)).with_context(|| file.clone())?;
        }
        let known: BTreeSet<PathBuf> = files.iter().map(|file| root.join(file)).collect();
        remove_others(&root, &known)?;
        Ok(Self { root })
    }

    /// Returns its root.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Makes the mistakes of a patch: all of them or none. They last until [`Applied::undo`].
    ///
    /// # Errors
    /// A hunk does not fit ([`Misfit`]), or a file cannot be read or written.
    pub fn apply(&self, patch: &Patch) -> Result<Applied> {
        let mut changes = Vec::new();
        for file in &patch.files {
            let path = self.root.join(&file.path);
            let sound = fs::read_to_string(&path).with_context(|| file.path.clone())?;
            let mutated = file.apply(&sound)?;
            changes.push((path, sound, mutated));
        }
        let applied = Applied {
            sound: changes
                .iter()
                .map(|(path, sound, _)| (path.clone(), sound.clone()))
                .collect(),
        };
        for (path, _, mutated) in changes {
            fs::write(path, mutated)?;
        }
        Ok(applied)
    }
}

/// Files that a patch has changed, as they were.
#[derive(Debug)]
pub struct Applied {
    sound: Vec<(PathBuf, String)>,
}

impl Applied {
    /// Puts back what was there, with the time of now: a build of the mistake is older.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn undo(self) -> io::Result<()> {
        self.sound
            .into_iter()
            .try_for_each(|(path, text)| fs::write(path, text))
    }
}

/// Whether a patch fits the tree itself.
///
/// # Errors
/// [`Misfit`], or a file that cannot be read.
pub fn check(tree: &Path, patch: &Patch) -> Result<()> {
    for file in &patch.files {
        let text = fs::read_to_string(tree.join(&file.path)).with_context(|| file.path.clone())?;
        file.apply(&text)?;
    }
    Ok(())
}

/// Whether this is an error of a patch that does not fit (any more).
#[must_use]
pub fn is_misfit(error: &anyhow::Error) -> bool {
    let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    error.downcast_ref::<Misfit>().is_some() || error.downcast_ref().is_some_and(is_missing)
}

/// Runs `git`, and returns its output.
///
/// # Errors
/// It is not there, or fails.
pub fn git(tree: &Path, args: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(tree)
        .args(args)
        .output()
        .context("git")?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("git {}: {}", args.join(" "), error.trim());
    }
    String::from_utf8(output.stdout).context("git prints no text")
}

/// Tracked files, and those that a commit of everything would add.
fn files(tree: &Path) -> Result<Vec<String>> {
    let all = [
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ];
    let names = git(tree, &all)?;
    let names = names.split('\0').filter(|name| !name.is_empty());
    // Files that are deleted, and whose deletion is not committed, are listed as well.
    let exists = |name: &&str| tree.join(name).symlink_metadata().is_ok();
    Ok(names.filter(exists).map(str::to_string).collect())
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if from.is_symlink() {
        let target = fs::read_link(from)?;
        if fs::read_link(to).is_ok_and(|known| known == target) {
            return Ok(());
        }
        make_way(to)?;
        return std::os::unix::fs::symlink(target, to);
    }
    let (content, permissions) = (fs::read(from)?, fs::metadata(from)?.permissions());
    let is_known = !to.is_symlink()
        && fs::metadata(to)
            .is_ok_and(|known| known.is_file() && known.permissions() == permissions)
        && fs::read(to)? == content;
    if is_known {
        return Ok(());
    }
    make_way(to)?;
    fs::write(to, content)?;
    fs::set_permissions(to, permissions)
}

/// The folder is there, and nothing in the file's place.
fn make_way(to: &Path) -> io::Result<()> {
    let folder = to.parent().expect("a file of the copy is in a folder");
    fs::create_dir_all(folder)?;
    match to.symlink_metadata() {
        Ok(found) if found.is_dir() => fs::remove_dir_all(to),
        Ok(_) => fs::remove_file(to),
        Err(_) => Ok(()),
    }
}

fn remove_others(folder: &Path, known: &BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            remove_others(&path, known)?;
            // Fails where it is not empty. An empty one would be taken for a crate without a
            // manifest.
            let _ = fs::remove_dir(&path);
        } else if !known.contains(&path) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}
