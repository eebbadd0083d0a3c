//! Journal of a soak: the cases that it has passed, so that an interrupted soak continues.
//!
//! There is a file for each set of options. Its first line identifies the programs (a hash of their
//! files) and the tree (`EXITLESS_SOAK_KEY`, if `scripts/soak.sh` set it): a journal of another
//! program or tree is ignored. A soak that has passed removes it.

use std::collections::HashSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::system::programs::Programs;

/// Folder of journals.
const FOLDER: &str = "target/soak";

/// Names of passed cases, in memory and in a file.
pub struct Journal {
    path: PathBuf,
    names: HashSet<String>,
}

impl Journal {
    /// Reads the cases that an interrupted soak with these options, by this program, has passed;
    /// none if it is to start from the beginning.
    pub fn open(options: &str, restart: bool) -> Result<Self> {
        let programs = Programs::find()?;
        let read =
            |path: &Path| fs::read(path).with_context(|| format!("reading {}", path.display()));
        let program = [read(&programs.exitless)?, read(&programs.exitless_lab)?].concat();
        let tree = std::env::var("EXITLESS_SOAK_KEY").unwrap_or_default();
        let key = format!("program {:016x} tree {tree} {options}", hash(&program));
        let name = format!("selftest-{:016x}.journal", hash(options.as_bytes()));
        Self::at(&Path::new(FOLDER).join(name), &key, restart)
    }

    /// Returns the journal at `path`, of the soak that `key` identifies in one line.
    fn at(path: &Path, key: &str, restart: bool) -> Result<Self> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).context(format!("reading {}", path.display())),
        };
        let mut lines = text.lines();
        let is_own = lines.next() == Some(key) && !restart;
        if !is_own {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)
                    .with_context(|| format!("making {}", folder.display()))?;
            }
            fs::write(path, format!("{key}\n"))
                .with_context(|| format!("writing {}", path.display()))?;
        }
        let names = lines.filter(|_| is_own).map(str::to_owned).collect();
        let path = path.to_owned();
        Ok(Self { path, names })
    }

    /// Returns the number of cases that have passed.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Returns whether the case has passed.
    pub fn contains(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Notes that a case has passed.
    pub fn add(&mut self, name: &str) -> Result<()> {
        self.names.insert(name.to_owned());
        let file = fs::File::options().append(true).open(&self.path);
        file.and_then(|mut file| writeln!(file, "{name}"))
            .with_context(|| format!("writing {}", self.path.display()))
    }

    /// Removes all: the next soak starts from the beginning.
    pub fn clear(&self) -> Result<()> {
        fs::remove_file(&self.path).with_context(|| format!("removing {}", self.path.display()))
    }
}

/// Returns a hash that is stable for one build of this program.
fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_cases_count_for_the_same_soak_alone_and_not_once_all_have_passed() {
        let folder = std::env::temp_dir().join(format!("soak-journal-{}", std::process::id()));
        let path = folder.join("journal");
        let passed = |key: &str, restart| {
            let journal = Journal::at(&path, key, restart).expect("a journal");
            let mut names: Vec<_> = journal.names.into_iter().collect();
            names.sort();
            names
        };
        let mut journal = Journal::at(&path, "program 1 seed 1", false).expect("a journal");
        journal.add("boot: trap").expect("writable");
        journal.add("boot: logged").expect("writable");
        // It was interrupted, and continues.
        assert_eq!(
            passed("program 1 seed 1", false),
            ["boot: logged", "boot: trap"]
        );
        // Another program's soak, or one with other options, starts from the beginning.
        assert!(passed("program 2 seed 1", false).is_empty());
        assert!(passed("program 1 seed 1", false).is_empty());
        let mut journal = Journal::at(&path, "program 1 seed 1", false).expect("a journal");
        journal.add("boot: trap").expect("writable");
        assert!(passed("program 1 seed 2", false).is_empty());
        // So does a soak that is asked to, and one after a soak that passed.
        for is_anew in [true, false] {
            let mut journal = Journal::at(&path, "program 1 seed 1", false).expect("a journal");
            journal.add("boot: trap").expect("writable");
            if !is_anew {
                journal.clear().expect("there");
            }
            assert!(passed("program 1 seed 1", is_anew).is_empty());
        }
        fs::remove_dir_all(folder).expect("ours");
    }
}
