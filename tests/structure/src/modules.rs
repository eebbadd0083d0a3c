//! The top-level modules of a crate.
//!
//! A module names another by a path that starts with `crate` or with enough of `super`, or by what the root takes from that
//! other (`pub use other::Thing` in `lib.rs`, then `crate::Thing`). Paths inside one top-level module do not matter here, nor what
//! the root itself names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::graph::Graph;
use crate::tokens::{lex, without_tests};

/// Which top-level module of the crate whose root is `root` names which.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn of_crate(root: &Path) -> Result<Graph> {
    let mut found = Found::default();
    let dir = root.parent().context("a file in a folder")?;
    found.read(root, dir, &mut Vec::new())?;
    Ok(found.graph())
}

/// The sources below `folder` that no other one there names as a module, and that are none of `roots`: nobody compiles them.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn strays(folder: &Path, roots: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let files = sources(folder)?;
    let mut named = BTreeSet::new();
    for file in &files {
        let source = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let words = lex(&source);
        let modules = words.windows(2).filter(|words| words[0] == "mod");
        named.extend(modules.map(|words| words[1].clone()));
    }
    let is_named = |file: &PathBuf| {
        let own = file.with_extension("");
        let own = match own.file_name() {
            Some(name) if name == "mod" => own.parent().and_then(Path::file_name),
            name => name,
        };
        own.is_some_and(|name| named.contains(&*name.to_string_lossy()))
    };
    let is_stray = |file: &PathBuf| !roots.contains(file) && !is_named(file);
    Ok(files.into_iter().filter(is_stray).collect())
}

/// Whether a crate whose root is `root` holds tests in its own sources.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn has_tests(root: &Path) -> Result<bool> {
    let mut found = Found::default();
    let dir = root.parent().context("a file in a folder")?;
    found.read(root, dir, &mut Vec::new())?;
    Ok(found.has_tests)
}

/// Rust files below `folder`.
fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(sources(&path)?);
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

/// What the sources say.
#[derive(Default)]
struct Found {
    /// Something in them is only for tests.
    has_tests: bool,
    /// Top-level modules.
    modules: BTreeSet<String>,
    /// In the root: a name, and the first word of the path that it stands for.
    taken: BTreeMap<String, String>,
    /// From a top-level module to the first word of a path from the root.
    names: BTreeSet<(String, String)>,
}

impl Found {
    /// Reads one file, which is module `path`, and the files of the modules in it, which lie in `dir`.
    fn read(&mut self, file: &Path, dir: &Path, path: &mut Vec<String>) -> Result<()> {
        let source = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let all = lex(&source);
        let tokens = without_tests(&all);
        self.has_tests |= tokens.len() < all.len();
        self.walk(&tokens, dir, path)
    }

    fn walk(&mut self, tokens: &[String], dir: &Path, path: &mut Vec<String>) -> Result<()> {
        // Ends of inline modules.
        let depth_of_file = path.len();
        let mut depth = 0;
        let mut inline: Vec<usize> = Vec::new();
        let mut at = 0;
        let word = |at: usize| tokens.get(at).map_or("", String::as_str);
        while at < tokens.len() {
            match word(at) {
                "mod" if word(at + 2) == ";" && is_elsewhere(tokens, at) => {
                    self.note_module(word(at + 1), path);
                }
                "mod" if word(at + 2) == ";" => {
                    let name = word(at + 1).to_owned();
                    let dir = path[depth_of_file..]
                        .iter()
                        .fold(dir.to_owned(), |dir, name| dir.join(name));
                    self.note_module(&name, path);
                    let file = file_of(&dir, &name)?;
                    path.push(name.clone());
                    self.read(&file, &dir.join(&name), path)?;
                    path.pop();
                    at += 3;
                    continue;
                }
                "mod" if word(at + 2) == "{" => {
                    self.note_module(word(at + 1), path);
                    path.push(word(at + 1).to_owned());
                    inline.push(depth);
                    depth += 1;
                    at += 3;
                    continue;
                }
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    if inline.last() == Some(&depth) {
                        inline.pop();
                        path.pop();
                    }
                }
                "use" if path.is_empty() => self.note_taken(&tokens[at + 1..]),
                "crate" | "super" | "self" if word(at + 1) == "::" && !is_continued(tokens, at) => {
                    self.note_path(&tokens[at..], path);
                }
                _ => {}
            }
            at += 1;
        }
        Ok(())
    }

    fn note_module(&mut self, name: &str, path: &[String]) {
        if path.is_empty() {
            self.modules.insert(name.to_owned());
        }
    }

    /// A path in module `path` that starts with `crate`, `super` or `self`.
    fn note_path(&mut self, tokens: &[String], path: &[String]) {
        let Some(from) = path.first() else {
            return;
        };
        let mut above = path.len();
        let mut rest = tokens;
        while let [word, colons, after @ ..] = rest
            && colons == "::"
        {
            match word.as_str() {
                "crate" => above = 0,
                "super" => above = above.saturating_sub(1),
                "self" => {}
                _ => break,
            }
            rest = after;
        }
        if above == 0 {
            for (name, _) in branches(rest) {
                self.names.insert((from.clone(), name));
            }
        }
    }

    /// A `use` of the root: which module each name comes from.
    fn note_taken(&mut self, tokens: &[String]) {
        for (first, branch) in branches(tokens) {
            let (first, branch) = match first.as_str() {
                "crate" | "self" => {
                    match branches(branch.get(2..).unwrap_or(&[])).into_iter().next() {
                        Some(next) => next,
                        None => continue,
                    }
                }
                _ => (first, branch),
            };
            // Every word of it may be a name; the others are nobody's to name from the root.
            for name in branch {
                self.taken.insert(name.clone(), first.clone());
            }
        }
    }

    fn graph(&self) -> Graph {
        let mut graph = Graph::default();
        for (from, name) in &self.names {
            let to = match self.modules.contains(name) {
                true => Some(name),
                false => self
                    .taken
                    .get(name)
                    .filter(|module| self.modules.contains(*module)),
            };
            if let Some(to) = to {
                graph.add(from, to);
            }
        }
        graph
    }
}

/// Whether the module declared at `at` lies where a `#[path = "…"]` says: another crate's file, which is read there.
fn is_elsewhere(tokens: &[String], at: usize) -> bool {
    let mut from = at;
    if tokens[..from].last().is_some_and(|word| word == "pub") {
        from -= 1;
    }
    tokens[..from].ends_with(&["path", "=", "]"].map(String::from))
}

/// Whether the word at `at` goes on with a path before it.
fn is_continued(tokens: &[String], at: usize) -> bool {
    at > 0 && tokens[at - 1] == "::"
}

/// The branches of a tree of paths at the start (`a::b`, `{a::b, c}`): the first word of each, and the whole of it.
fn branches(tokens: &[String]) -> Vec<(String, &[String])> {
    let is_word = |word: &str| word.starts_with(|c: char| c.is_alphabetic() || c == '_');
    let mut found = Vec::new();
    let is_group = tokens.first().is_some_and(|sign| sign == "{");
    let (mut depth, mut start) = (0, usize::from(is_group));
    for (at, token) in tokens.iter().enumerate().skip(start) {
        let ends = match token.as_str() {
            "{" | "(" | "[" => {
                depth += 1;
                false
            }
            "}" | ")" | "]" if depth == 0 => true,
            "}" | ")" | "]" => {
                depth -= 1;
                false
            }
            ";" => true,
            "," => depth == 0,
            _ => false,
        };
        if !ends {
            continue;
        }
        if tokens.get(start).is_some_and(|word| is_word(word)) {
            found.push((tokens[start].clone(), &tokens[start..at]));
        }
        if !is_group || token != "," {
            return found;
        }
        start = at + 1;
    }
    if tokens.get(start).is_some_and(|word| is_word(word)) {
        found.push((tokens[start].clone(), &tokens[start..]));
    }
    found
}

fn file_of(dir: &Path, name: &str) -> Result<PathBuf> {
    let files = [
        dir.join(format!("{name}.rs")),
        dir.join(name).join("mod.rs"),
    ];
    match files.into_iter().find(|file| file.exists()) {
        Some(file) => Ok(file),
        None => bail!("no file of module {name} in {}", dir.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cycles of a crate of these files, each as its way round.
    fn rounds(files: &[(&str, &str)]) -> Vec<String> {
        let dir = tempfile::tempdir().expect("a folder");
        for (name, source) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().expect("in the folder")).expect("a folder");
            fs::write(path, source).expect("a file");
        }
        let graph = of_crate(&dir.path().join("lib.rs")).expect("a crate");
        let cycles = graph.cycles();
        cycles.iter().map(|cycle| graph.round(cycle)).collect()
    }

    #[test]
    fn a_tree_of_modules_is_none() {
        let files = [
            (
                "lib.rs",
                "//! mod c;\n#[path = \"../x.rs\"] mod x; mod a; pub mod b; pub use a::{A, inner::C}; fn f() { b::f() }",
            ),
            (
                "a.rs",
                "pub mod inner; use self::inner::C; // crate::b::B\npub struct A;",
            ),
            (
                "a/inner.rs",
                "use super::A; use crate::a::A as B; const S: &str = \"crate::b\"; #[cfg(test)] mod tests { use crate::b; }",
            ),
            ("b/mod.rs", "use crate::{A, a::inner::C};"),
        ];
        assert_eq!(rounds(&files), [""; 0]);
    }

    #[test]
    fn a_cycle_is_found_however_it_is_written() {
        let ways = [
            "use crate::b;",
            "use crate::{A, b::{B, D}};",
            "use super::b::B;",
            "fn f() { crate::b::f::<u8>() }",
            "mod inner { use super::super::b; }",
            "pub(in crate::b) struct A;",
            // What the root takes from it.
            "use crate::B;",
            "use crate::{A, Renamed};",
            "#[cfg(not(test))] use crate::b;",
        ];
        for way in ways {
            let files = [
                (
                    "lib.rs",
                    "mod a; mod b; pub use a::A; pub use b::{B, D as Renamed};",
                ),
                ("a.rs", way),
                ("b.rs", "use crate::a;"),
            ];
            assert_eq!(rounds(&files), ["a → b → a"], "{way}");
        }
    }

    #[test]
    fn files_below_modules_count_as_theirs() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod deep { mod deeper; }"),
            ("a/deep/deeper.rs", "use super::super::super::b;"),
            ("b.rs", "use crate::a;"),
        ];
        assert_eq!(rounds(&files), ["a → b → a"]);
    }
}
