//! Sampling of mutants: a different order for each commit.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Time assumed for a mutant that was never run, and additional time of the first build of its
/// package with its cfg.
pub const UNKNOWN: Duration = Duration::from_secs(30);
const FIRST_BUILD: Duration = Duration::from_secs(60);

/// Returns the names in an order that depends on the commit.
#[must_use]
pub fn order(commit: &str, mut names: Vec<String>) -> Vec<String> {
    names.sort_by_cached_key(|name| (hash(commit, name), name.clone()));
    names
}

/// Hashes both by FNV-1a, with a final mix so that the last letters affect the highest bits. The
/// function is fixed, so that a commit has the same sample on every machine.
fn hash(commit: &str, name: &str) -> u64 {
    let bytes = commit.bytes().chain([0]).chain(name.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let hash = (hash ^ hash >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ hash >> 33
}

/// Time that each mutant took when it was last run, build and test together.
#[derive(Debug, Default)]
pub struct Took(BTreeMap<String, u64>);

impl Took {
    /// Reads the file of earlier runs. Each line has a name, a tab and seconds.
    #[must_use]
    pub fn read(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap_or_default();
        let pairs = text.lines().filter_map(|line| {
            let (name, seconds) = line.split_once('\t')?;
            Some((name.to_string(), seconds.parse().ok()?))
        });
        Self(pairs.collect())
    }

    /// Records a mutant's time, rounded up.
    pub fn note(&mut self, name: &str, took: Duration) {
        self.0.insert(name.to_string(), took.as_secs() + 1);
    }

    /// Writes the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, file: &Path) -> std::io::Result<()> {
        let lines = self
            .0
            .iter()
            .map(|(name, seconds)| format!("{name}\t{seconds}\n"));
        fs::write(file, lines.collect::<String>())
    }

    /// Returns the time expected for a mutant, depending on whether its package was built with its
    /// cfg before.
    #[must_use]
    pub fn expected(&self, name: &str, has_built: bool) -> Duration {
        let known = self.0.get(name).copied().map(Duration::from_secs);
        match has_built {
            true => known.unwrap_or(UNKNOWN),
            false => known.unwrap_or(UNKNOWN) + FIRST_BUILD,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        (0..40).map(|at| format!("crate/mutant-{at}")).collect()
    }

    #[test]
    fn each_commit_has_an_order_of_its_own_and_none_is_left_out_for_ever() {
        let firsts = |commits: u32| {
            let mut firsts = Vec::new();
            for commit in 0..commits {
                let commit = format!("{commit:040x}");
                let ordered = order(&commit, names());
                assert_eq!(ordered, order(&commit, names()));
                firsts.extend_from_slice(&ordered[..4]);
                let (mut sorted, mut all) = (ordered, names());
                sorted.sort();
                all.sort();
                assert_eq!(sorted, all);
            }
            firsts.sort();
            firsts.dedup();
            firsts.len()
        };
        assert_eq!(firsts(1), 4);
        assert!(firsts(10) > 20);
        assert_eq!(firsts(100), 40);
    }

    #[test]
    fn times_are_known_to_the_next_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("took");
        let mut took = Took::read(&file);
        assert_eq!(took.expected("a/b", true), UNKNOWN);
        took.note("a/b", Duration::from_millis(4200));
        took.write(&file).expect("written");
        let took = Took::read(&file);
        let five = Duration::from_secs(5);
        assert_eq!(took.expected("a/b", true), five);
        assert_eq!(took.expected("a/b", false), five + FIRST_BUILD);
        assert_eq!(took.expected("a/c", false), UNKNOWN + FIRST_BUILD);
    }
}
