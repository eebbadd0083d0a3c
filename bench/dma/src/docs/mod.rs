//! The results page, from the figures of one run and the [`remarks`] on them: figures that were not
//! measured are a dash, those that missed their target are marked.

mod card;
mod goals;
mod loops;
mod remarks;

use std::fmt::Write as _;

use report::Object;

use crate::record::{ns_text, or_dash};

/// The page; `plots` are the names of the plots that were drawn.
pub fn page(figures: &Object, plots: &[&str]) -> String {
    let mut page = Page(String::new());
    head(&mut page, figures);
    card::first(&mut page, figures);
    goals::goals(&mut page, figures);
    loops::beside_linux(&mut page, figures);
    loops::allocation(&mut page, figures);
    loops::doubled(&mut page, figures);
    loops::tables(&mut page, figures);
    loops::deferred(&mut page, figures);
    card::card(&mut page, figures);
    card::reuse(&mut page, figures);
    card::memory(&mut page, figures);
    card::cores(&mut page, figures);
    page.line(
        "\n## Plots\n\
         Drawn by the same run, under `target/report/dma/` (not kept with the sources):",
    );
    for plot in plots {
        page.line(&format!("- `{plot}`"));
    }
    page.0
}

struct Page(String);

impl Page {
    fn line(&mut self, text: &str) {
        let _ = writeln!(self.0, "{text}");
    }

    fn table(&mut self, head: &[String], rows: impl IntoIterator<Item = Vec<String>>) {
        self.line(&format!("\n| {} |", head.join(" | ")));
        self.line(&format!("|{}", "---|".repeat(head.len())));
        for row in rows {
            self.line(&format!("| {} |", row.join(" | ")));
        }
    }
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

/// A row's nanoseconds and half their spread; a dagger where all of its runs were disturbed.
fn ns(figures: &Object, key: &str) -> String {
    let Some(median) = figures.get(key) else {
        return "–".to_owned();
    };
    let row = key.strip_suffix("_ns").unwrap_or(key);
    let of = |suffix: &str| figures.get(&format!("{row}_{suffix}"));
    let is_disturbed = of("runs").is_some() && of("runs") == of("disturbed");
    let dagger = if is_disturbed { " †" } else { "" };
    let spread = figures.get(&format!("{key}_spread"));
    let spread = spread.map_or_else(String::new, |of| format!(" ± {}", ns_text(of / 2.0)));
    format!("{}{spread}{dagger}", ns_text(median))
}

fn head(page: &mut Page, figures: &Object) {
    page.line("# IOVA allocation and DMA mapping: results\n");
    page.line(
        "Made by `make bench-dma-docs` from the figures of one run of `make bench-dma`; do \
         not edit. What the loops are: `bench/dma`.",
    );
    page.line(
        "Headlines are ratios of what ran in turns in the same run; nanoseconds beside them \
         are as measured, medians ± half the distance of",
    );
    page.line("the extremes, and belong to this machine.\n");
    page.line(
        "A turn, and a run that is repeated, waits up to 0.3 s for CPUs that are 90 % idle. \
         A run of two threads counts if both ran for 98.5 % of it, and",
    );
    page.line(
        "has three attempts. What was disturbed in all three is left out where the row has \
         other runs; where it has none, the",
    );
    page.line("figure bears a †.\n");
    for (key, name) in [
        ("machine", "machine"),
        ("kernel", "kernel"),
        ("mode", "mode"),
        ("commit", "commit"),
        ("linux_version", "Linux beside ours (empty: void)"),
    ] {
        page.line(&format!("- {name}: {}", figures.text(key)));
    }
    for (key, name, digits) in [
        ("load_average", "load of others at the start", 2),
        ("floor_ns", "floor (owner-only pop and push), ns", 2),
        ("lock_ns", "lock and unlock, ns", 2),
        ("rtt_ns", "cache line there and back, ns", 0),
    ] {
        page.line(&format!("- {name}: {}", or_dash(figures.get(key), digits)));
    }
    let sum = |suffix: &str| -> f64 {
        let keys = figures.keys().iter();
        keys.filter(|(key, _)| key.ends_with(suffix))
            .filter_map(|(_, value)| value.as_f64())
            .sum()
    };
    page.line(&format!(
        "- two-thread runs that were disturbed: {:.0} of {:.0}",
        sum("2thr_disturbed"),
        sum("2thr_runs")
    ));
    page.line(&format!(
        "- turns and repeated runs that did not find the CPUs idle: {}",
        or_dash(figures.get("busy_turns"), 0)
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_nothing_says_that_nothing_was_measured() {
        let page = page(&Object::default(), &[]);
        let said = page.matches("| not measured |").count() + page.matches("| void |\n").count();
        assert!(said >= goals::GOALS.len(), "{said}");
        assert!(!page.contains("NaN") && !page.contains("**missed**"));
        assert!(!page.contains("| met |"));
    }

    #[test]
    fn a_missed_target_is_said_to_be() {
        let mut figures = Object::default();
        figures.number("linux_a1_ratio", 0.7);
        figures.number("linux_b32_ratio", 0.4);
        let page = page(&figures, &[]);
        assert_eq!(page.matches("**missed**").count(), 1);
        assert_eq!(page.matches("| met |").count(), 1);
    }

    #[test]
    fn a_simpler_policy_that_wins_is_said_first() {
        let mut figures = Object::default();
        figures.number("nic_1500_deferred_1thr_share", 0.921);
        figures.number("nic_1500_optimistic4096_1thr_share", 0.894);
        let wins = page(&figures, &[]);
        let (first, targets) = (wins.find("Where a simpler"), wins.find("## Targets"));
        assert!(first.is_some() && first < targets);
        figures.number("nic_1500_optimistic4096_1thr_share", 0.99);
        assert!(!page(&figures, &[]).contains("Where a simpler"));
    }

    #[test]
    fn a_row_of_which_every_run_was_disturbed_has_a_dagger() {
        let mut figures = Object::default();
        figures.number("row_2thr_ns", 7.0);
        figures.number("row_2thr_ns_spread", 2.0);
        figures.number("row_2thr_runs", 5.0);
        for (disturbed, text) in [(4.0, "7.00 ± 1.00"), (5.0, "7.00 ± 1.00 †")] {
            figures.number("row_2thr_disturbed", disturbed);
            assert_eq!(ns(&figures, "row_2thr_ns"), text);
        }
    }
}
