//! The targets, which of them are met, and the remarks on those that are not.

use report::Object;

use super::{Page, remarks, strings};
use crate::record::or_dash;

/// What a key should be.
pub enum Goal {
    /// At most.
    Most(f64),
    /// At least.
    Least(f64),
    /// A control, which stands beside the target before it and decides nothing.
    Control,
}

/// Keys, what they are, goals; a control follows what it controls.
pub const GOALS: [(&str, &str, Goal); 26] = [
    ("a1_ns", "a-1, one thread, ns", Goal::Most(6.0)),
    ("c1_ns", "c-1, one thread, ns", Goal::Most(6.0)),
    ("a1_2thr_ratio", "a-1, two threads / one", Goal::Most(1.05)),
    (
        "a1_2thr_vs_separate",
        "– two of one space / two with a space each",
        Goal::Control,
    ),
    ("c1_2thr_ratio", "c-1, two threads / one", Goal::Most(1.05)),
    (
        "c1_2thr_vs_separate",
        "– two of one space / two with a space each",
        Goal::Control,
    ),
    ("b32_ns", "b-32 net of its control, ns", Goal::Most(8.0)),
    (
        "slow_65536_ns",
        "a-1 with 65,536 ranges, ns",
        Goal::Most(100.0),
    ),
    (
        "slow_2thr_ratio",
        "the same, throughput of two threads / one",
        Goal::Least(1.8),
    ),
    (
        "slow_2thr_vs_separate",
        "– two of one space / two with a space each",
        Goal::Control,
    ),
    ("map_unmap_ns", "p-256, ns", Goal::Most(16.0)),
    (
        "map_unmap_2thr_ratio",
        "p-256 with allocated pages, two threads / one",
        Goal::Most(1.1),
    ),
    (
        "map_unmap_2thr_vs_separate",
        "– two of one space / two with a space each",
        Goal::Control,
    ),
    ("deferred_ns", "d-def, no flush cost, ns", Goal::Most(12.0)),
    (
        "strict_2thr_500ns_vs_lock",
        "strict / spin-lock strict, 500 ns, two threads",
        Goal::Least(0.95),
    ),
    (
        "combining_2thr_500ns_vs_lock",
        "combining (gathers for 0.5 µs at most) / spin-lock strict, 500 ns, two threads",
        Goal::Least(1.25),
    ),
    (
        "combining_2thr_500ns_mps",
        "combining without a gather delay, 500 ns, two threads, M/s",
        Goal::Least(1.8),
    ),
    (
        "combining_gather_2thr_500ns_mps",
        "– with it, M/s",
        Goal::Control,
    ),
    (
        "combining_no_gather_2thr_500ns_vs_lock",
        "– without it / spin-lock strict",
        Goal::Control,
    ),
    (
        "leaf_tables_c1",
        "leaf tables after c-1, one core",
        Goal::Most(16.0),
    ),
    (
        "leaf_tables_c1_2thr",
        "leaf tables after c-1, two cores",
        Goal::Most(32.0),
    ),
    (
        "leaf_tables_after_epoch",
        "leaf tables after everything is freed and an epoch, one core, six classes",
        Goal::Most(6.0),
    ),
    (
        "opt4096_share",
        "optimistic(4096), share of `off`, recorded reuse",
        Goal::Least(0.95),
    ),
    (
        "deferred_share",
        "deferred, share of `off`",
        Goal::Least(0.9),
    ),
    (
        "strict_stale_max",
        "stale mappings of strict",
        Goal::Most(0.0),
    ),
    (
        "strict_combining_stale_max",
        "stale mappings of strict-combining",
        Goal::Most(0.0),
    ),
];

impl Goal {
    /// Whether a value meets it; `None` of a control.
    fn is_met(&self, value: f64) -> Option<bool> {
        match *self {
            Self::Most(most) => Some(value <= most),
            Self::Least(least) => Some(value >= least),
            Self::Control => None,
        }
    }
}

/// Whether a key's target was missed: not where it was not measured.
fn is_missed(figures: &Object, key: &str) -> bool {
    let goal = GOALS.iter().find(|(of, ..)| *of == key);
    let met = goal.zip(figures.get(key));
    met.and_then(|((.., goal), value)| goal.is_met(value)) == Some(false)
}

/// The table of targets, and the remarks.
pub fn goals(page: &mut Page, figures: &Object) {
    page.line("\n## Targets");
    let rows = GOALS.iter().map(|(key, name, goal)| {
        let value = figures.get(key);
        let text = match goal {
            Goal::Most(most) => format!("≤ {most}"),
            Goal::Least(least) => format!("≥ {least}"),
            Goal::Control => String::new(),
        };
        let verdict = match (value, value.and_then(|value| goal.is_met(value))) {
            (None, _) => "not measured",
            (_, None) => "(control)",
            (_, Some(true)) => "met",
            (_, Some(false)) => "**missed**",
        };
        // So that 1.054 does not read as the 1.05 that it misses.
        let digits = if value.is_some_and(|of| of < 10.0) {
            3
        } else {
            2
        };
        vec![
            (*name).to_owned(),
            or_dash(value, digits),
            or_dash(figures.get(&format!("{key}_raw")), digits),
            text,
            verdict.to_owned(),
        ]
    });
    page.table(&strings(&["", "scaled", "raw", "goal", ""]), rows);
    page.line("\nA processor of this machine may be half of a core whose other half is ours or somebody else's: then threads that");
    page.line("share nothing slow each other down, and the ratio of random numbers, by which the targets are divided, does not");
    page.line("show it. The control does: the same two threads with a space each, in turns with those of one space.");
    let missed: Vec<_> = GOALS
        .iter()
        .map(|(key, ..)| *key)
        .filter(|key| is_missed(figures, key))
        .collect();
    remarks::write(page, figures, &missed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_is_never_missed() {
        let mut figures = Object::default();
        figures.number("a1_2thr_ratio", 1.06);
        figures.number("a1_2thr_vs_separate", 9.0);
        assert!(is_missed(&figures, "a1_2thr_ratio"));
        assert!(!is_missed(&figures, "a1_2thr_vs_separate"));
        assert!(!is_missed(&figures, "c1_2thr_ratio"));
    }
}
