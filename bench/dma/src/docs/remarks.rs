//! Remarks written by hand, beside the figures they are about: `bench/dma/remarks.md`.
//!
//! A section of that file begins with a line `## missed: KEY, KEY` and stands on the page if one of
//! these targets was missed, or with `## always`. `{KEY}` in its text becomes that figure of the
//! run, so that a remark never contradicts the table above it. The text before the first section is
//! for those who edit the file.

use std::fmt::Write as _;

use report::Object;

use super::Page;

/// The file.
const REMARKS: &str = include_str!("../../remarks.md");

/// A section.
struct Remark<'a> {
    /// Keys of targets; `None` for what always stands there.
    of: Option<Vec<&'a str>>,
    text: &'a str,
}

fn parse(file: &str) -> Vec<Remark<'_>> {
    let section = |section| {
        let (head, text): (&str, &str) = str::split_once(section, '\n').unwrap_or((section, ""));
        let keys = head.strip_prefix("missed:");
        Remark {
            of: keys.map(|keys| keys.split(',').map(str::trim).collect()),
            text: text.trim(),
        }
    };
    let mut parts = file.split("\n## ");
    parts.next();
    parts.map(section).collect()
}

/// The text with figures in the place of `{KEY}`.
fn fill(text: &str, figures: &Object) -> String {
    let mut filled = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        let Some((key, after)) = after.split_once('}') else {
            break;
        };
        filled.push_str(before);
        let _ = match figures.get(key) {
            Some(value) if value.fract() == 0.0 => write!(filled, "{value:.0}"),
            Some(value) => write!(filled, "{value:.2}"),
            None => write!(filled, "–"),
        };
        rest = after;
    }
    filled + rest
}

/// Writes the remarks on what was missed, and says for which targets there is none.
pub fn write(page: &mut Page, figures: &Object, missed: &[&str]) {
    let remarks = parse(REMARKS);
    let is_about = |remark: &Remark<'_>, key: &str| {
        let keys = remark.of.as_ref();
        keys.is_some_and(|keys| keys.contains(&key))
    };
    let shown: Vec<_> = remarks
        .iter()
        .filter(|remark| remark.of.is_none() || missed.iter().any(|key| is_about(remark, key)))
        .collect();
    let bare: Vec<_> = missed
        .iter()
        .filter(|key| !remarks.iter().any(|remark| is_about(remark, key)))
        .map(|key| format!("`{key}`"))
        .collect();
    if shown.is_empty() && bare.is_empty() {
        return;
    }
    page.line(
        "\n### Remarks\n\
         Written by hand (`bench/dma/remarks.md`); the numbers in them are this run's unless they \
         say otherwise.",
    );
    for remark in shown {
        page.line(&format!("\n{}", fill(remark.text, figures)));
    }
    if !bare.is_empty() {
        page.line(&format!("\nMissed without a remark: {}.", bare.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use super::super::goals::GOALS;
    use super::*;

    #[test]
    fn the_file_speaks_of_targets_that_there_are() {
        for remark in parse(REMARKS) {
            assert!(!remark.text.is_empty());
            for key in remark.of.into_iter().flatten() {
                assert!(GOALS.iter().any(|(of, ..)| *of == key), "{key}");
            }
        }
    }

    #[test]
    fn sections_have_their_keys_and_figures_their_place() {
        let file = "For editors.\n\n## missed: a1_ns, c1_ns\nIt takes {a1_ns} of {none}.\n\n\
             ## always\nSo it is.\n";
        let remarks = parse(file);
        assert_eq!(remarks.len(), 2);
        assert_eq!(remarks[0].of, Some(vec!["a1_ns", "c1_ns"]));
        assert_eq!((&remarks[1].of, remarks[1].text), (&None, "So it is."));
        let mut figures = Object::default();
        figures.number("a1_ns", 7.256);
        assert_eq!(fill(remarks[0].text, &figures), "It takes 7.26 of –.");
        assert_eq!(fill("an open { stays", &figures), "an open { stays");
    }

    #[test]
    fn missed_target_without_a_remark_is_named() {
        let mut page = Page(String::new());
        write(&mut page, &Object::default(), &["no_such_target"]);
        assert!(
            page.0
                .contains("Missed without a remark: `no_such_target`.")
        );
    }
}
