//! The modules of a crate, at every depth.
//!
//! Modules with the same parent are *siblings*. One names another if anything in it, however deep,
//! has a path to anything in the other: a path that starts with `crate`, `super` or `self`; or a
//! name that the parent, or a module on the way, has taken from there by `use` (`pub use
//! other::Thing`, then `super::Thing`), a glob among them. Paths between a module and its own
//! parent do not matter, nor what the parent names. Left out: macros by their textual scope, and
//! paths inside literals.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::graph::Graph;
use crate::paths::{Use, path_at, uses};
use crate::tokens::{lex, without_tests};

/// Which siblings name which, in the crate whose root is `root`: by the path of their parent, such
/// as `ring::packed`; empty for the top-level modules.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn of_crate(root: &Path) -> Result<BTreeMap<String, Graph>> {
    let dir = root.parent().context("a file in a folder")?;
    let mut found = Crate::default();
    found.read(root, dir, &mut Vec::new())?;
    Ok(found.graphs())
}

/// The sources below `folder` that no other one there names as a module, and that are none of
/// `roots`: they are not compiled.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn strays(folder: &Path, roots: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let files = sources(folder)?;
    let mut named = BTreeSet::new();
    for file in &files {
        let words = lex(&read(file)?);
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

/// The `#[path = "…"]` of sources below `folder` that lead out of it: the source, and where it
/// leads.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn foreign_paths(folder: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
    let mut foreign = Vec::new();
    for file in sources(folder)? {
        let source = read(&file)?;
        let lines = source.lines().map(str::trim_start);
        let leads = lines.filter_map(|line| line.strip_prefix("#[path"));
        for lead in leads.filter_map(|rest| rest.split('"').nth(1)) {
            let to = plain(&file.with_file_name("").join(lead));
            if !to.starts_with(plain(folder)) {
                foreign.push((file.clone(), to));
            }
        }
    }
    Ok(foreign)
}

/// Whether a crate whose root is `root` holds tests in its own sources.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn has_tests(root: &Path) -> Result<bool> {
    let dir = root.parent().context("a file in a folder")?;
    let mut found = Crate::default();
    found.read(root, dir, &mut Vec::new())?;
    Ok(found.has_tests)
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

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| file.display().to_string())
}

/// The same path without `.` and `..`, by its words alone.
fn plain(path: &Path) -> PathBuf {
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

/// Path of a module from the root of its crate.
type Place = Vec<String>;

/// A module's names, apart from those of its children.
#[derive(Default)]
struct Names {
    children: BTreeSet<String>,
    /// Items that it defines.
    items: BTreeSet<String>,
    /// Names that a `use` of its own brings in, and the path each stands for, from the root or
    /// outside of the crate.
    taken: BTreeMap<String, Place>,
    /// Paths of which it takes everything.
    globs: BTreeSet<Place>,
}

/// The sources of a crate.
#[derive(Default)]
struct Crate {
    /// Something in them is only for tests.
    has_tests: bool,
    modules: BTreeMap<Place, Names>,
    /// From a module, a path from the root.
    paths: BTreeSet<(Place, Place)>,
    /// From a module, paths that begin with a name in its scope.
    scoped: BTreeSet<(Place, Vec<String>)>,
}

impl Crate {
    /// Reads one file, which is the module at `place`, and the files of its children, which lie in
    /// `dir`.
    fn read(&mut self, file: &Path, dir: &Path, place: &mut Place) -> Result<()> {
        let all = lex(&read(file)?);
        let tokens = without_tests(&all);
        self.has_tests |= tokens.len() < all.len();
        self.walk(&tokens, dir, place)
    }

    fn walk(&mut self, tokens: &[String], dir: &Path, place: &mut Place) -> Result<()> {
        let words_of_file = place.len();
        self.modules.entry(place.clone()).or_default();
        // Brackets around the token, and around the bodies of the inline modules that it is in.
        let mut depth = 0;
        let mut inline: Vec<usize> = Vec::new();
        let mut at = 0;
        let word = |at: usize| tokens.get(at).map_or("", String::as_str);
        while at < tokens.len() {
            let is_of_module = depth == inline.last().map_or(0, |around| around + 1);
            match word(at) {
                "mod" if [";", "{"].contains(&word(at + 2)) => {
                    let name = word(at + 1).to_owned();
                    self.names(place).children.insert(name.clone());
                    let inside = &place[words_of_file..];
                    let dir = inside
                        .iter()
                        .fold(dir.to_owned(), |dir, name| dir.join(name));
                    place.push(name.clone());
                    self.modules.entry(place.clone()).or_default();
                    if word(at + 2) == "{" {
                        inline.push(depth);
                        depth += 1;
                    } else {
                        if !is_elsewhere(tokens, at) {
                            self.read(&file_of(&dir, &name)?, &dir.join(&name), place)?;
                        }
                        place.pop();
                    }
                    at += 3;
                    continue;
                }
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    if inline.last() == Some(&depth) {
                        inline.pop();
                        place.pop();
                    }
                }
                "use" => self.note_use(&tokens[at + 1..], place, is_of_module),
                "crate" | "super" | "self" if word(at + 1) == "::" && !is_continued(tokens, at) => {
                    let path = path_at(&tokens[at..]);
                    self.note_path(&path, place);
                }
                "struct" | "enum" | "trait" | "fn" | "type" | "const" | "static" | "union"
                    if is_of_module =>
                {
                    let name = if word(at + 1) == "mut" {
                        at + 2
                    } else {
                        at + 1
                    };
                    let name = word(name).to_owned();
                    self.names(place).items.insert(name);
                }
                "macro_rules" => {
                    let name = word(at + 2).to_owned();
                    self.names(place).items.insert(name);
                }
                _ if is_name(tokens, at) => {
                    let path = path_at(&tokens[at..]);
                    self.scoped.insert((place.clone(), path));
                }
                _ => {}
            }
            at += 1;
        }
        Ok(())
    }

    fn names(&mut self, place: &Place) -> &mut Names {
        self.modules.entry(place.clone()).or_default()
    }

    /// A path in the module at `place`, if it starts from the crate's root, from `place` or from
    /// one above.
    fn note_path(&mut self, path: &[String], place: &Place) {
        if let Some(path) = absolute(path, place) {
            self.paths.insert((place.clone(), path));
        }
    }

    /// A `use` of the module at `place`, or of a function in it.
    fn note_use(&mut self, tokens: &[String], place: &Place, is_of_module: bool) {
        for Use { path, name } in uses(tokens) {
            self.note_path(&path, place);
            if !is_of_module && name.is_some() {
                continue;
            }
            // Otherwise relative to the module itself, or another crate's: a child decides.
            let path = absolute(&path, place).unwrap_or_else(|| [&place[..], &path].concat());
            let names = self.names(place);
            match name {
                Some(name) => _ = names.taken.insert(name, path),
                None => _ = names.globs.insert(path),
            }
        }
    }

    /// The modules that a path from the root goes through, the last of which has what it names.
    fn through(&self, path: &[String]) -> Vec<Place> {
        let mut through = Vec::new();
        self.follow(path, &mut through, &mut BTreeSet::new());
        through
    }

    /// Adds what `path` goes through; `seen` has the names that were replaced on the way. Whether
    /// it leads to something.
    fn follow(
        &self,
        path: &[String],
        through: &mut Vec<Place>,
        seen: &mut BTreeSet<Place>,
    ) -> bool {
        let mut place = Place::new();
        for (at, word) in path.iter().enumerate() {
            let Some(names) = self.modules.get(&place) else {
                return false;
            };
            if names.children.contains(word) {
                place.push(word.clone());
                continue;
            }
            through.push(place.clone());
            if names.items.contains(word) {
                return true;
            }
            let name = [&place[..], std::slice::from_ref(word)].concat();
            if !seen.insert(name) {
                return false;
            }
            let rest = &path[at + 1..];
            if let Some(taken) = names.taken.get(word) {
                return self.follow(&[&taken[..], rest].concat(), through, seen);
            }
            return names.globs.iter().any(|glob| {
                let mut further = Vec::new();
                let path = [&glob[..], &path[at..]].concat();
                let is_there = self.follow(&path, &mut further, seen);
                if is_there {
                    through.append(&mut further);
                }
                is_there
            });
        }
        through.push(place);
        true
    }

    fn graphs(&self) -> BTreeMap<String, Graph> {
        let mut graphs = BTreeMap::new();
        for (from, path) in &self.paths {
            self.note(from, path, &mut graphs);
        }
        for (from, path) in &self.scoped {
            let names = &self.modules[from];
            let [first, rest @ ..] = &path[..] else {
                continue;
            };
            if names.items.contains(first) || names.children.contains(first) {
                continue;
            }
            // A name stands for the path that was taken; one by a glob may come from each of them.
            if let Some(taken) = names.taken.get(first) {
                self.note(from, &[&taken[..], rest].concat(), &mut graphs);
                continue;
            }
            for glob in &names.globs {
                self.note(from, &[&glob[..], path].concat(), &mut graphs);
            }
        }
        graphs
    }

    /// Adds that something in `from` names `path`, to the graph of the siblings that lie apart.
    fn note(&self, from: &Place, path: &[String], graphs: &mut BTreeMap<String, Graph>) {
        for to in self.through(path) {
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if let (Some(sibling), Some(other)) = (from.get(common), to.get(common)) {
                let parent = from[..common].join("::");
                graphs.entry(parent).or_default().add(sibling, other);
            }
        }
    }
}

/// The same path from the root, if `path` says where it starts; from a module at `place`.
fn absolute(path: &[String], place: &Place) -> Option<Place> {
    let mut above = None;
    let mut rest = path;
    while let [word, after @ ..] = rest {
        above = match word.as_str() {
            "crate" => Some(0),
            "self" => above.or(Some(place.len())),
            "super" => Some(above.unwrap_or(place.len()).saturating_sub(1)),
            _ => break,
        };
        rest = after;
    }
    above.map(|above| [&place[..above], rest].concat())
}

/// Whether the module declared at `at` lies where a `#[path = "…"]` says.
fn is_elsewhere(tokens: &[String], at: usize) -> bool {
    let mut before = &tokens[..at];
    if before.last().is_some_and(|sign| sign == ")") {
        let open = before.iter().rposition(|sign| sign == "(");
        before = &before[..open.unwrap_or(0)];
    }
    if let [rest @ .., word] = before
        && word == "pub"
    {
        before = rest;
    }
    before.ends_with(&["path", "=", "]"].map(String::from))
}

/// Whether the word at `at` goes on with a path before it.
fn is_continued(tokens: &[String], at: usize) -> bool {
    at > 0 && tokens[at - 1] == "::"
}

/// Whether the word at `at` may be the name of an item in scope: a type or constant by its capital,
/// or what is called, or the start of a path.
fn is_name(tokens: &[String], at: usize) -> bool {
    let before = at.checked_sub(1).map_or("", |at| &tokens[at]);
    let after = tokens.get(at + 1).map_or("", String::as_str);
    let has_capital = tokens[at].starts_with(char::is_uppercase);
    let starts = has_capital || ["::", "(", "!"].contains(&after);
    let is_word = tokens[at].starts_with(|c: char| c.is_alphabetic() || c == '_');
    is_word && starts && !["::", "."].contains(&before)
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
mod tests;
