//! Files that a crate's sources refer to, and sources that no source refers to.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

use crate::tokens::{after_group, is_attribute, lex, text_of};

/// Returns the sources below `folder` that no other source there names as a module and that are not
/// among `roots`: they are not compiled.
///
/// # Errors
/// A source that does not exist or is not UTF-8.
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

/// Returns the files outside this package that its sources include, by the `path` attribute of a
/// module or by `include!`, `include_str!` and `include_bytes!`: pairs of the source and the file.
/// `folders` lists those of all packages, which may be nested.
///
/// Not detected: a file that is passed to a macro as `$path`, and one that assembler text includes.
///
/// # Errors
/// A source that does not exist or is not UTF-8.
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

/// Returns the names of the functions in sources below `folder`, those of tests included.
///
/// # Errors
/// A source that does not exist or is not UTF-8.
pub fn functions(folder: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for file in sources(folder)? {
        let words = lex(&read(&file)?);
        let functions = words.windows(2).filter(|words| words[0] == "fn");
        found.extend(functions.map(|words| words[1].clone()));
    }
    Ok(found)
}

/// Returns whether a file belongs to the package in `folder`: whether that is the innermost of
/// `folders` that contains the file.
#[must_use]
pub fn is_in(file: &Path, folder: &Path, folders: &[PathBuf]) -> bool {
    let around = folders.iter().filter(|around| file.starts_with(around));
    let innermost = around.max_by_key(|around| around.components().count());
    innermost.is_some_and(|innermost| innermost == folder)
}

/// Returns the Rust files below `folder`, without build outputs.
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

/// Returns the path without `.` and `..`, resolved textually.
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

/// A reference to a file in a source.
enum Lead {
    /// Relative to the folder of the source.
    Source(String),
    /// Relative to the folder of the package.
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

/// Returns the files that a source refers to, in attributes and in include macros.
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

/// Returns the file that an include macro with these tokens refers to. Files in `OUT_DIR` are the
/// package's own.
fn included(given: &[String]) -> Option<Lead> {
    let texts: Vec<_> = given.iter().filter_map(|token| text_of(token)).collect();
    match &texts[..] {
        ["OUT_DIR", ..] | [] => None,
        ["CARGO_MANIFEST_DIR", rest @ ..] => Some(Lead::Package(rest.concat())),
        parts => Some(Lead::Source(parts.concat())),
    }
}

/// Returns the path in an attribute `path = "…"`, and whether it is conditional (`cfg_attr`).
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
