//! Making a patch file of a mistake that stands in the sources.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::mutant::{FOLDER, Mutant, path_of, split};
use crate::patch::Patch;
use crate::tree::git;

/// Lines of context tried in turn, the fewest that fit one place each.
const CONTEXT: std::ops::RangeInclusive<usize> = 1..=8;

const NEW_HEAD: &str = "\
WHAT THE MISTAKE IS, IN ONE LINE.

package: PACKAGE
target: lib
test: WHOLE NAME OF THE TEST THAT FINDS IT
cfg: none
says: WHAT THE FAILING TEST PRINTS

";

/// Writes the difference between the sources and Git's index as the patch of this name: under the
/// head that it has, or, for a new one, under one to be filled in. What to do next.
///
/// # Errors
/// There is no difference, or no patch can be made of it.
pub fn record(tree: &Path, name: &str) -> Result<String> {
    let is_name = |part: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        !part.is_empty() && part.chars().all(is_plain)
    };
    let is_named = name.contains('/') && name.split('/').all(is_name);
    ensure!(is_named, "{name}: not CRATE/NAME");
    let (diff, files) = CONTEXT
        .map(|context| diff(tree, context))
        .find(|found| !matches!(found, Ok(None)))
        .transpose()?
        .flatten()
        .context("lines of it stand at several places of a file, whatever their context")?;
    let path = path_of(tree, name);
    let known = fs::read_to_string(&path).ok();
    let head = known.as_deref().map_or(NEW_HEAD, |text| split(text).0);
    let text = format!("{head}{diff}");
    fs::create_dir_all(path.parent().context("a file is in a folder")?)?;
    fs::write(&path, &text)?;
    if known.is_some() {
        Mutant::parse(name, &text)?;
    }
    Ok(format!(
        "wrote {FOLDER}/{name}.patch{}; undo the mistake: git checkout -- {}",
        if known.is_some() {
            ""
        } else {
            ": fill in its head"
        },
        files.join(" ")
    ))
}

/// The difference with so much context, and its files; `None` where its lines stand at several
/// places.
fn diff(tree: &Path, context: usize) -> Result<Option<(String, Vec<String>)>> {
    let context = format!("--unified={context}");
    let others = format!(":(exclude){FOLDER}");
    let diff = git(
        tree,
        &[
            "-c",
            "core.quotePath=off",
            "diff",
            "--no-color",
            "--no-ext-diff",
            "--no-renames",
            "--src-prefix=a/",
            "--dst-prefix=b/",
            &context,
            "--",
            ".",
            &others,
        ],
    )?;
    ensure!(
        !diff.is_empty(),
        "no difference: make the mistake in the sources first (what is to stay, stage with git add)"
    );
    let patch = Patch::parse(&diff)?;
    for file in &patch.files {
        let text = git(tree, &["show", &format!(":{}", file.path)])?;
        match file.apply(&text) {
            Ok(_) => {}
            Err(misfit) if misfit.places > 1 => return Ok(None),
            Err(misfit) => bail!(misfit),
        }
    }
    let lines = diff.lines();
    let is_kept = |line: &&str| !line.starts_with("diff --git ") && !line.starts_with("index ");
    let diff = lines.filter(is_kept).map(|line| format!("{line}\n"));
    let files = patch.files.into_iter().map(|file| file.path);
    Ok(Some((diff.collect(), files.collect())))
}
