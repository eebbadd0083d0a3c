//! The modules of a crate, at every depth.
//!
//! Modules with the same parent are *siblings*. One names another if anything in it, however deep,
//! has a path to anything in the other: a path that starts with `crate`, `super` or `self`; or a
//! name that the parent, or a module on the way, has taken from there by `use` (`pub use
//! other::Thing`, then `super::Thing`), a glob among them; or it calls `self.name(…)` or names
//! `Self::name` in an `impl` of a type that has `name` from an `impl` in the other. Paths between a
//! module and its own parent do not matter, nor what the parent names.
//!
//! Left out: methods of values other than `self` (a field's, an argument's), which need types, and
//! those of traits; macros by their textual scope; paths inside literals.

mod files;
mod methods;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::graph::Graph;
use crate::paths::{Use, path_at, uses};
use crate::tokens::{after_group, lex, without_tests};

pub use files::{foreign_paths, functions, is_in, strays};
use files::{path_of, plain, read};
use methods::{impl_at, own_at};

/// Returns the siblings that each module names, in the crate whose root is `root`: by the path of
/// their parent, such as `ring::packed`; empty for the top-level modules.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn of_crate(root: &Path) -> Result<BTreeMap<String, Graph>> {
    Ok(Crate::of(root)?.graphs())
}

/// Whether a crate whose root is `root` holds tests in its own sources.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn has_tests(root: &Path) -> Result<bool> {
    Ok(Crate::of(root)?.has_tests)
}

/// Whether two texts of a source differ in more than comments and what is compiled for tests alone.
#[must_use]
pub fn differ(one: &str, other: &str) -> bool {
    let [one, other] = [one, other].map(|text| without_tests(&lex(text)));
    one != other
}

/// The files of the crate whose root is `root`, but for those that only its tests have.
///
/// # Errors
/// A source that is not there or not UTF-8.
pub fn files(root: &Path) -> Result<BTreeSet<PathBuf>> {
    Ok(Crate::of(root)?.files)
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
    /// Names that modules define for types, in blocks that are of no trait.
    defined: BTreeSet<Method>,
    /// Names that modules use of the type whose block they are in.
    called: BTreeSet<Method>,
    /// Files read.
    files: BTreeSet<PathBuf>,
}

/// A name of a type, in a block of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Method {
    /// The module that has the block.
    place: Place,
    /// The type, as that module names it.
    of: Vec<String>,
    name: String,
}

/// A source, while it is read.
struct Source<'a> {
    file: &'a Path,
    /// Directory of the files of its modules.
    dir: &'a Path,
    tokens: &'a [String],
}

impl Crate {
    fn of(root: &Path) -> Result<Self> {
        let dir = root.parent().context("a file in a folder")?;
        let mut found = Self::default();
        found.read(root, dir, &mut Vec::new())?;
        Ok(found)
    }

    /// Reads one file, which is the module at `place`, and the files of its children, which lie in
    /// `dir`.
    fn read(&mut self, file: &Path, dir: &Path, place: &mut Place) -> Result<()> {
        let all = lex(&read(file)?);
        let tokens = without_tests(&all);
        self.has_tests |= tokens.len() < all.len();
        self.files.insert(file.to_owned());
        let source = Source {
            file,
            dir,
            tokens: &tokens,
        };
        self.walk(&source, place)
    }

    fn walk(&mut self, source: &Source<'_>, place: &mut Place) -> Result<()> {
        let tokens = source.tokens;
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
                    let inside = place[words_of_file..].to_vec();
                    place.push(name.clone());
                    self.modules.entry(place.clone()).or_default();
                    if word(at + 2) == "{" {
                        inline.push(depth);
                        depth += 1;
                    } else {
                        for (file, dir) in files_of(source, at, &inside)? {
                            self.read(&file, &dir, place)?;
                        }
                        place.pop();
                    }
                    at += 3;
                    continue;
                }
                "impl" => self.note_impl(tokens, at, place),
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

    /// Notes the names that a block defines for its type, and those that it uses of it.
    fn note_impl(&mut self, tokens: &[String], at: usize, place: &Place) {
        let Some(block) = impl_at(tokens, at) else {
            return;
        };
        let method = |name: &str| Method {
            place: place.clone(),
            of: block.of.clone(),
            name: name.to_owned(),
        };
        let end = after_group(tokens, block.open);
        let (mut depth, mut at) = (0, block.open);
        while at < end {
            match tokens[at].as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                "fn" | "const" if depth == 1 && block.is_inherent => {
                    self.defined
                        .extend(tokens.get(at + 1).map(|name| method(name)));
                }
                // `self` is another one there.
                "impl" => {
                    if let Some(inner) = impl_at(tokens, at) {
                        at = after_group(tokens, inner.open);
                        continue;
                    }
                }
                _ => self.called.extend(own_at(&tokens[at..]).map(method)),
            }
            at += 1;
        }
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

    /// Adds what `path` goes through; `seen` has the names that were replaced on the way. The item
    /// or module that it leads to, by its own path.
    fn follow(
        &self,
        path: &[String],
        through: &mut Vec<Place>,
        seen: &mut BTreeSet<Place>,
    ) -> Option<Place> {
        let mut place = Place::new();
        for (at, word) in path.iter().enumerate() {
            let names = self.modules.get(&place)?;
            if names.children.contains(word) {
                place.push(word.clone());
                continue;
            }
            through.push(place.clone());
            let name = [&place[..], std::slice::from_ref(word)].concat();
            if names.items.contains(word) {
                return Some(name);
            }
            if !seen.insert(name) {
                return None;
            }
            let rest = &path[at + 1..];
            if let Some(taken) = names.taken.get(word) {
                return self.follow(&[&taken[..], rest].concat(), through, seen);
            }
            return names.globs.iter().find_map(|glob| {
                let mut further = Vec::new();
                let path = [&glob[..], &path[at..]].concat();
                let item = self.follow(&path, &mut further, seen)?;
                through.append(&mut further);
                Some(item)
            });
        }
        through.push(place.clone());
        Some(place)
    }

    /// The paths from the root that a path in `from` may stand for. A name stands for the path that
    /// was taken; one by a glob may come from each of them.
    fn meanings(&self, from: &Place, path: &[String]) -> Vec<Place> {
        if let Some(path) = absolute(path, from) {
            return vec![path];
        }
        let names = &self.modules[from];
        let [first, rest @ ..] = path else {
            return Vec::new();
        };
        if names.items.contains(first) || names.children.contains(first) {
            return vec![[from, path].concat()];
        }
        if let Some(taken) = names.taken.get(first) {
            return vec![[taken, rest].concat()];
        }
        let globs = names.globs.iter();
        globs.map(|glob| [glob, path].concat()).collect()
    }

    /// The type that a method is of, and its name.
    fn resolved(&self, method: &Method) -> Option<(Place, String)> {
        let mut meanings = self.meanings(&method.place, &method.of).into_iter();
        let of = meanings.find_map(|path| self.follow(&path, &mut vec![], &mut BTreeSet::new()));
        Some((of?, method.name.clone()))
    }

    fn graphs(&self) -> BTreeMap<String, Graph> {
        let mut graphs = BTreeMap::new();
        let scoped = self.scoped.iter().flat_map(|(from, path)| {
            let meanings = self.meanings(from, path).into_iter();
            meanings.map(move |path| (from, path))
        });
        let paths = self.paths.iter().map(|(from, path)| (from, path.clone()));
        for (from, path) in paths.chain(scoped) {
            for to in self.through(&path) {
                note(from, &to, &mut graphs);
            }
        }
        let mut definers: BTreeMap<_, BTreeSet<&Place>> = BTreeMap::new();
        for method in &self.defined {
            if let Some(resolved) = self.resolved(method) {
                definers.entry(resolved).or_default().insert(&method.place);
            }
        }
        for call in &self.called {
            let Some(there) = self.resolved(call).and_then(|name| definers.get(&name)) else {
                continue;
            };
            // One of its own is meant, also where others have it under another cfg.
            if !there.contains(&call.place) {
                there
                    .iter()
                    .for_each(|to| note(&call.place, to, &mut graphs));
            }
        }
        graphs
    }
}

/// Adds that something in `from` names something in `to`, to the graph of the siblings that lie
/// apart.
fn note(from: &Place, to: &Place, graphs: &mut BTreeMap<String, Graph>) {
    let common = from.iter().zip(to).take_while(|(a, b)| a == b).count();
    if let (Some(sibling), Some(other)) = (from.get(common), to.get(common)) {
        let parent = from[..common].join("::");
        graphs.entry(parent).or_default().add(sibling, other);
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

/// The file of the module that is declared at `at`, inside inline modules of these names, and where
/// its own modules lie; two, where a `cfg_attr` has a `path` and both are there.
fn files_of(source: &Source<'_>, at: usize, inside: &[String]) -> Result<Vec<(PathBuf, PathBuf)>> {
    let (tokens, name) = (source.tokens, &source.tokens[at + 1]);
    let dir: PathBuf = [source.dir.to_owned()]
        .into_iter()
        .chain(inside.iter().map(PathBuf::from))
        .collect();
    // A `path` starts from the source's own folder, or from where inline modules have theirs.
    let base = match inside {
        [] => source.file.with_file_name(""),
        _ => dir.clone(),
    };
    let led_to = attributes_before(tokens, at).into_iter().find_map(path_of);
    let led_to = led_to.map(|(path, is_conditional)| (plain(&base.join(path)), is_conditional));
    match led_to {
        Some((file, false)) => Ok(vec![(file.clone(), file.with_file_name(""))]),
        Some((file, true)) => {
            let usual = file_of(&dir, name).map(|file| (file, dir.join(name)));
            let other = Some((file.clone(), file.with_file_name("")));
            let both = other
                .filter(|_| file.exists())
                .into_iter()
                .chain(usual.ok());
            Ok(both.collect())
        }
        None => Ok(vec![(file_of(&dir, name)?, dir.join(name))]),
    }
}

/// The attributes of the item whose keyword is at `at`, nearest first, each without its brackets.
fn attributes_before(tokens: &[String], at: usize) -> Vec<&[String]> {
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
    let mut attributes = Vec::new();
    while before.last().is_some_and(|sign| sign == "]") {
        let start = (0..before.len()).rev();
        let mut start = start.filter(|&at| before[at] == "#");
        let Some(start) = start.find(|&at| after_group(before, at + 1) == before.len()) else {
            break;
        };
        attributes.push(&before[start + 2..before.len() - 1]);
        before = &before[..start];
    }
    attributes
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
