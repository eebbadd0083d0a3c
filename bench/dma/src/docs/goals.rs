//! The targets, which of them are met, and the remarks on those that are not.

use report::Object;

use super::{Page, remarks, strings};
use crate::record::or_dash;

/// Target of a key.
pub enum Goal {
    /// At most.
    Most(f64),
    /// At least.
    Least(f64),
    /// Shown, and not judged.
    None,
}

/// Keys, what they are, goals. «÷ Linux»: ours behind one call / Linux's code in the same run.
#[rustfmt::skip]
pub const GOALS: [(&str, &str, Goal); 24] = [
    ("linux_a1_ratio", "1 page, 256 live, random, ÷ Linux", Goal::Most(0.6)),
    ("linux_b32_ratio", "bursts of 32 of 65,536 live, ÷ Linux", Goal::Most(0.5)),
    ("linux_burst4096_ratio", "bursts of 4,096, ÷ Linux", Goal::Most(1.0)),
    ("linux_fifo4096_ratio", "1-16 pages, the oldest of 4,096, ÷ Linux", Goal::Most(1.0)),
    ("linux_random_65536_ratio", "1 page, 65,536 live, random, ÷ Linux", Goal::Most(1.0)),
    ("linux_mask32_ratio", "1 page below 4 GiB, ÷ Linux", Goal::Most(0.7)),
    ("linux_512p_ratio", "512 pages, 256 live, ÷ Linux", Goal::Most(0.3)),
    ("linux_xcore_ratio", "from core to core, batches of 32, ÷ Linux", Goal::Most(1.0)),
    ("map_unmap_linux_ratio", "map + unmap 4 KiB, strict, ÷ Linux", Goal::Most(0.35)),
    ("map_unmap_2mib_linux_ratio", "map + unmap 2 MiB, strict, tables given back, ÷ \
         Linux", Goal::Most(1.0)),
    ("failing_alloc_ns", "an allocation that fails, ns", Goal::Most(2000.0)),
    ("exhaustion_neighbour_ratio", "a-1 beside a core that gets nothing / beside a quiet \
         one", Goal::Most(1.2)),
    ("tables_after_park_512k", "table pages after 512,000 pages and a park", Goal::Most(10.0)),
    ("a1_2thr_vs_separate", "a-1, two threads of one space / with a space each", Goal::Most(1.05)),
    ("c1_2thr_vs_separate", "c-1, the same", Goal::Most(1.05)),
    ("map_unmap_2thr_vs_separate", "map + unmap of allocated pages, the same", Goal::Most(1.1)),
    ("combining_2thr_500ns_vs_lock", "throughput of combining / strict behind a lock, every \
         command 500 ns", Goal::Least(1.25)),
    ("combining_true_costs_vs_strict", "throughput of combining / strict, 500 ns for pages, 1 µs \
         for a domain", Goal::None),
    ("leaf_tables_c1", "leaf tables after c-1, one core", Goal::Most(16.0)),
    ("leaf_tables_c1_2thr", "leaf tables after c-1, two cores", Goal::Most(32.0)),
    ("leaf_tables_after_epoch", "leaf tables after everything is freed and an epoch, one core, six \
         classes", Goal::Most(6.0)),
    ("opt4096_share", "optimistic(4096), share of `off`, 1,500 B", Goal::None),
    ("deferred_share", "deferred, share of `off`, 1,500 B", Goal::None),
    ("strict_share", "strict, share of `off`, 1,500 B", Goal::None),
];

impl Goal {
    /// Whether a value meets it; `None` where there is no goal.
    fn is_met(&self, value: f64) -> Option<bool> {
        match *self {
            Self::Most(most) => Some(value <= most),
            Self::Least(least) => Some(value >= least),
            Self::None => None,
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
    page.line(
        "\n## Targets\n\
         Medians, and the distance of the extremes of this run's turns. Void: Linux's code could \
         not be built.",
    );
    let rows = GOALS.iter().map(|(key, name, goal)| {
        let value = figures.get(key);
        let text = match goal {
            Goal::Most(most) => format!("≤ {most}"),
            Goal::Least(least) => format!("≥ {least}"),
            Goal::None => String::new(),
        };
        let verdict = match (value, value.and_then(|value| goal.is_met(value))) {
            (None, _) if key.contains("linux") => "void",
            (None, _) => "not measured",
            (_, None) => "",
            (_, Some(true)) => "met",
            (_, Some(false)) => "**missed**",
        };
        // So that 1.054 does not read as the 1.05 that it misses.
        let digits = if value.is_some_and(|of| of < 10.0) {
            3
        } else {
            0
        };
        vec![
            (*name).to_owned(),
            or_dash(value, digits),
            or_dash(figures.get(&format!("{key}_spread")), digits),
            text,
            verdict.to_owned(),
        ]
    });
    page.table(&strings(&["", "median", "spread", "goal", ""]), rows);
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
    fn key_without_a_goal_is_never_missed() {
        let mut figures = Object::default();
        figures.number("a1_2thr_vs_separate", 1.06);
        figures.number("opt4096_share", 0.1);
        assert!(is_missed(&figures, "a1_2thr_vs_separate"));
        assert!(!is_missed(&figures, "opt4096_share"));
        assert!(!is_missed(&figures, "c1_2thr_vs_separate"));
    }

    #[test]
    fn every_target_is_a_key_that_is_always_there() {
        let (mut goals, mut keys) = (GOALS.map(|(key, ..)| key), crate::record::KEYS);
        goals.sort_unstable();
        keys.sort_unstable();
        assert_eq!(goals, keys);
    }
}
