//! A mutant: the head of a patch file, its diff, and the list of all of them.
//!
//! ```text
//! A core that finds no room leaves alone what others keep.
//!
//! package: iova
//! target: lib
//! test: chunk::model::a_core_without_room_takes_what_another_does_not_use
//! cfg: loom
//! says: a chunk is unused
//!
//! --- a/libs/iova/src/chunk/search.rs
//! +++ b/libs/iova/src/chunk/search.rs
//! @@ …
//! ```
//! First the mistake, in words. Then the keys, each on a line of its own; those with a default may
//! be left out.
//!
//! | key | value |
//! |---|---|
//! | `package` | the package whose test it is |
//! | `target` | `lib`, or the name of one in `tests/` |
//! | `test` | the test's whole name, as `cargo test` lists it; once per test, where each of several must find it |
//! | `cfg` | `none` (the default), `loom` or `shuttle` |
//! | `says` | part of the failing test's output, in words of the assertion that finds it |
//! | `env` | `NAME=VALUE`, once per variable: wider bounds, where the usual ones do not find it |
//! | `expect` | `red` (the default), or `green` for an edit that the test cannot notice; it has no `says` |
//!
//! A good `says` is printed for this mistake and for few others: «before its own invalidation», or
//! the case of a table, «Pausing and Poll». Words of any panic («index out of bounds», «assertion»)
//! let a test pass for one that finds a mistake which it merely stumbles over; `tests/patches.rs`
//! refuses them. If a test finds no better words, it lacks an assertion.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::patch::Patch;

/// Folder of the mutants, from the root of the tree.
pub const FOLDER: &str = "tests/mutants";

/// A mistake, and the test that must find it.
#[derive(Debug)]
pub struct Mutant {
    /// `CRATE/NAME`.
    pub name: String,
    /// The head of its file.
    pub head: Head,
    /// The mistake.
    pub patch: Patch,
}

/// The head of a patch file.
#[derive(Debug, PartialEq, Eq)]
pub struct Head {
    /// The mistake, in words.
    pub what: String,
    /// The package that has the tests.
    pub package: String,
    /// The target that has them.
    pub target: Target,
    /// Whole names of the tests, of which there is one at least: each must find it.
    pub tests: Vec<String>,
    /// The cfg of the build.
    pub cfg: Cfg,
    /// Environment variables of the tests.
    pub env: Vec<(String, String)>,
    /// The outcome that passes.
    pub expect: Expect,
}

/// A part of a package that has tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Unit tests of the library.
    Lib,
    /// One of `tests/`.
    Test(String),
}

/// The cfg of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cfg {
    /// No cfg.
    None,
    /// `--cfg loom`.
    Loom,
    /// `--cfg shuttle`.
    Shuttle,
}

impl Cfg {
    /// Its name in a patch file.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Loom => "loom",
            Self::Shuttle => "shuttle",
        }
    }
}

/// The outcome of a mutant that passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Each test fails, and this is part of its output.
    Red(String),
    /// Each test passes.
    Green,
}

impl Mutant {
    /// Reads `FOLDER/name.patch` in a tree.
    ///
    /// # Errors
    /// It cannot be read, or says something that it must not.
    pub fn read(root: &Path, name: &str) -> Result<Self> {
        let path = path_of(root, name);
        let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        Self::parse(name, &text).with_context(|| format!("{FOLDER}/{name}.patch"))
    }

    /// Reads the text of a patch file.
    ///
    /// # Errors
    /// It says something that it must not.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let (head, diff) = split(text);
        Ok(Self {
            name: name.to_string(),
            head: Head::parse(head)?,
            patch: Patch::parse(diff)?,
        })
    }
}

/// The file of a mutant of this name.
#[must_use]
pub fn path_of(root: &Path, name: &str) -> PathBuf {
    root.join(FOLDER).join(format!("{name}.patch"))
}

/// Head and diff of a patch file.
#[must_use]
pub fn split(text: &str) -> (&str, &str) {
    let starts = |line: &&str| line.starts_with("--- ") || line.starts_with("diff --git ");
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if starts(&line) {
            break;
        }
        at += line.len();
    }
    text.split_at(at)
}

/// The names of all mutants of a tree, in order.
///
/// # Errors
/// The folder cannot be read.
pub fn names(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut folders = vec![root.join(FOLDER)];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "patch") {
                let name = path.strip_prefix(root.join(FOLDER))?.with_extension("");
                names.push(name.to_str().context("a name that is no text")?.to_string());
            }
        }
    }
    names.sort();
    Ok(names)
}

impl Head {
    fn parse(text: &str) -> Result<Self> {
        let text = text.trim();
        let (what, keys) = text
            .split_once("\n\n")
            .context("its head is not: what the mistake is, an empty line, keys")?;
        let mut keys = Keys::parse(keys)?;
        let cfg = match keys.take("cfg")?.as_deref() {
            None | Some("none") => Cfg::None,
            Some("loom") => Cfg::Loom,
            Some("shuttle") => Cfg::Shuttle,
            Some(other) => bail!("cfg: {other}: not none, loom or shuttle"),
        };
        let expect = match (keys.take("expect")?.as_deref(), keys.take("says")?) {
            (None | Some("red"), Some(says)) => Expect::Red(says),
            (None | Some("red"), None) => bail!("no says: what does the failing test print?"),
            (Some("green"), None) => Expect::Green,
            (Some("green"), Some(_)) => bail!("says, of a test that passes"),
            (Some(other), _) => bail!("expect: {other}: not red or green"),
        };
        let target = match keys.required("target")?.as_str() {
            "lib" => Target::Lib,
            name => Target::Test(name.to_string()),
        };
        let env = keys.take_all("env").into_iter().map(|pair| {
            let (name, value) = pair.split_once('=').context("env: not NAME=VALUE")?;
            Ok((name.to_string(), value.to_string()))
        });
        let env = env.collect::<Result<_>>()?;
        let tests = keys.take_all("test");
        ensure!(!tests.is_empty(), "no test");
        let head = Self {
            what: what.to_string(),
            package: keys.required("package")?,
            target,
            tests,
            cfg,
            env,
            expect,
        };
        if let Some((key, _)) = keys.0.first() {
            bail!("{key}: no such key");
        }
        Ok(head)
    }
}

/// `key: value`, in the order of the lines.
struct Keys(Vec<(String, String)>);

impl Keys {
    fn parse(text: &str) -> Result<Self> {
        let pairs = text.lines().map(|line| {
            let (key, value) = line
                .split_once(':')
                .with_context(|| format!("«{line}» in its head is no «key: value»"))?;
            let value = value.trim();
            ensure!(!value.is_empty(), "{key}: says nothing");
            Ok((key.to_string(), value.to_string()))
        });
        pairs.collect::<Result<_>>().map(Self)
    }

    fn take_all(&mut self, key: &str) -> Vec<String> {
        let meant = self.0.extract_if(.., |(name, _)| name == key);
        meant.map(|(_, value)| value).collect()
    }

    fn take(&mut self, key: &str) -> Result<Option<String>> {
        let mut values = self.take_all(key);
        ensure!(values.len() < 2, "{key}: said twice");
        Ok(values.pop())
    }

    fn required(&mut self, key: &str) -> Result<String> {
        self.take(key)?.with_context(|| format!("no {key}"))
    }
}

#[cfg(test)]
mod tests;
