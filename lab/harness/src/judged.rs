//! Figures that are judged: each key of a report that has a bar, and the value found.

use report::Object;

/// Bound of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bar {
    /// It is no more than this.
    AtMost(f64),
    /// It is no less than this.
    AtLeast(f64),
}

impl Bar {
    /// Returns whether a figure is within it.
    pub fn holds(self, found: f64) -> bool {
        match self {
            Self::AtMost(most) => found <= most,
            Self::AtLeast(least) => found >= least,
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtMost(most) => format!("at most {most}"),
            Self::AtLeast(least) => format!("at least {least}"),
        }
    }
}

/// Returns the figures that miss their bars, and a line for every bar with the figure found. A
/// figure that was not measured does not miss its bar.
pub fn judge<K: AsRef<str>>(
    object: &Object,
    bars: impl IntoIterator<Item = (K, Bar)>,
) -> (Vec<String>, Vec<String>) {
    let (mut missed, mut judged) = (Vec::new(), Vec::new());
    for (key, bar) in bars {
        let key = key.as_ref();
        let Some(found) = object.get(key) else {
            judged.push(format!("{key}: not measured ({})", bar.text()));
            continue;
        };
        let holds = bar.holds(found);
        let verdict = if holds { "met" } else { "missed" };
        judged.push(format!("{key}: {found} ({}): {verdict}", bar.text()));
        if !holds {
            missed.push(key.to_owned());
        }
    }
    (missed, judged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_meets_its_bar_misses_it_or_was_not_measured() {
        let mut object = Object::default();
        object.number("few", 2.0);
        object.number("many", 9.5);
        let bars = [
            ("few", Bar::AtMost(2.0)),
            ("few", Bar::AtLeast(2.5)),
            ("many", Bar::AtMost(9.0)),
            ("none", Bar::AtMost(0.0)),
        ];
        let (missed, judged) = judge(&object, bars);
        assert_eq!(missed, ["few", "many"]);
        assert_eq!(
            judged,
            [
                "few: 2 (at most 2): met",
                "few: 2 (at least 2.5): missed",
                "many: 9.5 (at most 9): missed",
                "none: not measured (at most 0)",
            ]
        );
    }
}
