//! Cycles between modules beside a list of those that are known, which can only shrink.

use std::collections::BTreeSet;
use std::fmt;

/// Modules of one parent each of which reaches all others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cycle {
    /// Crate.
    pub package: String,
    /// Path of the parent; empty for top-level modules.
    pub parent: String,
    /// The modules.
    pub modules: BTreeSet<String>,
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let modules: Vec<_> = self.modules.iter().map(String::as_str).collect();
        write!(
            f,
            "{} {}: {}",
            self.package,
            self.parent,
            modules.join(", ")
        )
    }
}

/// A known cycle: crate, parent, modules, and why it is still there.
pub type Listed = (
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static str,
);

fn cycle(known: &Listed) -> Cycle {
    let (package, parent, modules, _) = known;
    Cycle {
        package: (*package).into(),
        parent: (*parent).into(),
        modules: modules.iter().map(|name| (*name).into()).collect(),
    }
}

/// Cycles that are not listed, each with its way round, and listed ones that are not found as they
/// are listed; in words.
pub fn differences(found: &[(Cycle, String)], known: &[Listed]) -> Vec<String> {
    let listed: BTreeSet<Cycle> = known.iter().map(cycle).collect();
    let new = found.iter().filter(|(cycle, _)| !listed.contains(cycle));
    let new = new.map(|(cycle, round)| format!("{cycle}; {round}"));
    let is_gone = |known: &&Cycle| found.iter().all(|(cycle, _)| cycle != *known);
    let gone = listed.iter().filter(is_gone);
    let gone = gone.map(|cycle| format!("gone, or another now, and still in the list: {cycle}"));
    new.chain(gone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: [Listed; 1] = [("crate", "m", &["a", "b", "c"], "for now")];

    fn found(parent: &str, modules: &[&str]) -> (Cycle, String) {
        let modules = modules.iter().map(|name| (*name).into()).collect();
        let cycle = Cycle {
            package: "crate".into(),
            parent: parent.into(),
            modules,
        };
        (cycle, "a → b → a".into())
    }

    #[test]
    fn only_what_is_listed_as_it_is_passes() {
        assert!(differences(&[found("m", &["a", "b", "c"])], &LISTED).is_empty());
        assert!(differences(&[], &[]).is_empty());
        for (found, differ) in [
            // One more, one elsewhere, one that grew, one that shrank, one that is gone.
            (
                vec![found("m", &["a", "b", "c"]), found("m", &["x", "y"])],
                1,
            ),
            (vec![found("n", &["a", "b", "c"])], 2),
            (vec![found("m", &["a", "b", "c", "d"])], 2),
            (vec![found("m", &["a", "b"])], 2),
            (vec![], 1),
        ] {
            let differences = differences(&found, &LISTED);
            assert_eq!(differences.len(), differ, "{differences:?}");
        }
    }
}
