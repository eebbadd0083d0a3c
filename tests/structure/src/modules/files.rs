//! Files that a crate's sources name, and those that no source names.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

use crate::tokens::{after_group, is_attribute, lex, text_of};

/// The sources below `folder` that no other one there names as a module, and that are none of
/// `roots`: they are not compiled.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn strays(folder: &Path, roots: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let files = sources(folder)?;
    let mut named = BTreeSet::new();
    let mut led_to = BTreeSet::new();
    for file in &files {
        let words = lex(&read(file)?);
        let modules = words.windows(2).filter(|words| words[0] == "mod");
        named.extend(modules.map(|words| words[1].clone()));
        led_to.extend(
            leads(&words)
                .into_iter()
                .map(|lead| lead.from(file, folder)),
        );
    }
    let is_named = |file: &PathBuf| {
        let own = file.with_extension("");
        let own = match own.file_name() {
            Some(name) if name == "mod" => own.parent().and_then(Path::file_name),
            name => name,
        };
        led_to.contains(file) || own.is_some_and(|name| named.contains(&*name.to_string_lossy()))
    };
    let is_stray = |file: &PathBuf| !roots.contains(file) && !is_named(file);
    Ok(files.into_iter().filter(is_stray).collect())
}

/// The files of other packages, or of none, that sources of the package in `folder` compile, by the
/// `path` of a module or by `include!`, `include_str!` and `include_bytes!`: the source, and the
/// file. `folders` has those of all packages, which may lie in each other.
///
/// Not seen: a file that a macro is given as `$path`, and one that assembler text includes.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn foreign_paths(folder: &Path, folders: &[PathBuf]) -> Result<Vec<(PathBuf, PathBuf)>> {
    let mut foreign = Vec::new();
    for file in sources(folder)? {
        if !is_in(&file, folder, folders) {
            continue;
        }
        for lead in leads(&lex(&read(&file)?)) {
            let to = lead.from(&file, folder);
            if !is_in(&to, folder, folders) {
                foreign.push((file.clone(), to));
            }
        }
    }
    Ok(foreign)
}

/// Names of the functions in sources below `folder`, those of its tests among them.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn functions(folder: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for file in sources(folder)? {
        let words = lex(&read(&file)?);
        let functions = words.windows(2).filter(|words| words[0] == "fn");
        found.extend(functions.map(|words| words[1].clone()));
    }
    Ok(found)
}

/// Whether a file is of the package in `folder`: the innermost of `folders` that it lies in.
#[must_use]
pub fn is_in(file: &Path, folder: &Path, folders: &[PathBuf]) -> bool {
    let around = folders.iter().filter(|around| file.starts_with(around));
    let innermost = around.max_by_key(|around| around.components().count());
    innermost.is_some_and(|innermost| innermost == folder)
}

/// Rust files below `folder`, but for build outputs.
fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            if !path.ends_with("target") {
                files.extend(sources(&path)?);
            }
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

pub(super) fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| file.display().to_string())
}

/// The same path without `.` and `..`, by its words alone.
pub(super) fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}

/// The name of a file in a source.
enum Lead {
    /// From the folder of the source.
    Source(String),
    /// From the folder of the package.
    Package(String),
}

impl Lead {
    fn from(&self, source: &Path, package: &Path) -> PathBuf {
        match self {
            Self::Source(name) => plain(&source.with_file_name("").join(name)),
            Self::Package(name) => plain(&package.join(name.trim_start_matches('/'))),
        }
    }
}

/// The files that a source names: in attributes, and to be included.
fn leads(tokens: &[String]) -> Vec<Lead> {
    let mut found = Vec::new();
    for at in 0..tokens.len() {
        if is_attribute(tokens, at) {
            let attribute = &tokens[at + 2..after_group(tokens, at + 1)];
            found.extend(path_of(attribute).map(|(path, _)| Lead::Source(path)));
        }
        let includes = ["include", "include_str", "include_bytes"];
        let is_macro = tokens.get(at + 1).is_some_and(|sign| sign == "!");
        if includes.contains(&tokens[at].as_str()) && is_macro {
            let given = &tokens[at + 2..after_group(tokens, at + 2)];
            found.extend(included(given));
        }
    }
    found
}

/// The file that is included by a macro that is given this. What is built into `OUT_DIR` is the
/// package's own.
fn included(given: &[String]) -> Option<Lead> {
    let texts: Vec<_> = given.iter().filter_map(|token| text_of(token)).collect();
    match &texts[..] {
        ["OUT_DIR", ..] | [] => None,
        ["CARGO_MANIFEST_DIR", rest @ ..] => Some(Lead::Package(rest.concat())),
        parts => Some(Lead::Source(parts.concat())),
    }
}

/// The `path = "…"` of an attribute, and whether it holds under a condition only.
pub(super) fn path_of(attribute: &[String]) -> Option<(String, bool)> {
    let is_conditional = match attribute.first()?.as_str() {
        "path" => false,
        "cfg_attr" => true,
        _ => return None,
    };
    let named = attribute.windows(3).find_map(|words| match words {
        [path, is, name] if path == "path" && is == "=" => text_of(name),
        _ => None,
    });
    Some((named?.to_owned(), is_conditional))
}
