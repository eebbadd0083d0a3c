//! Output of the module, and its comparison with the rules.
//!
//! A case's line is `iommu-cases: end NUMBER NAME STEP STEP …`, a step `NAME=VALUE`; see the
//! module's README. A rule has the same steps with a pattern for each value; see [`is_met`].

use std::collections::BTreeMap;
use std::fmt;

/// Prefix of all lines of the module, behind the kernel's time.
const PREFIX: &str = "iommu-cases: ";

/// Result of a case in which the device hangs.
pub const HANGS: &str = "hangs";
/// Result of a case that this device does not support.
const NOT_APPLICABLE: &str = "n/a";

/// Statuses by their names (§5.13.6).
const STATUSES: [(&str, u8); 9] = [
    ("OK", 0),
    ("IOERR", 1),
    ("UNSUPP", 2),
    ("DEVERR", 3),
    ("INVAL", 4),
    ("RANGE", 5),
    ("NOENT", 6),
    ("FAULT", 7),
    ("NOMEM", 8),
];

/// Lines of one boot, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaseLog {
    /// Steps that each case has printed, by its name.
    pub steps: BTreeMap<String, String>,
    /// Number and name of the case that was begun last and has not ended.
    pub unfinished: Option<(usize, String)>,
    /// Whether the list has come to its end.
    pub is_done: bool,
    /// Number of lines of the module.
    pub lines: usize,
}

impl CaseLog {
    /// Parses a console. A last line that is incomplete does not count.
    pub fn of(console: &str) -> Self {
        let mut seen = Self::default();
        let whole = console.rfind('\n').map_or("", |end| &console[..end]);
        for line in whole.lines() {
            if let Some((_, said)) = line.split_once(PREFIX) {
                seen.lines += 1;
                seen.hear(said.trim_end());
            }
        }
        seen
    }

    fn hear(&mut self, said: &str) {
        let (word, rest) = said.split_once(' ').unwrap_or((said, ""));
        let (number, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        match (word, number.parse()) {
            ("begin", Ok(number)) => self.unfinished = Some((number, rest.to_owned())),
            ("end", Ok(_)) => {
                let (name, steps) = rest.split_once(' ').unwrap_or((rest, ""));
                self.steps.insert(name.to_owned(), steps.to_owned());
                self.unfinished = None;
            }
            ("done,", _) => self.is_done = true,
            _ => {}
        }
    }

    /// Adds the output of a later boot.
    pub fn add(&mut self, later: Self) {
        self.steps.extend(later.steps);
        self.unfinished = later.unfinished;
        self.is_done = later.is_done;
        self.lines += later.lines;
    }
}

/// Verdict on a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As the rule expects.
    Passed,
    /// The device does not support the case.
    NotApplicable,
    /// Not as the rule expects; these are the steps.
    Failed(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("ok"),
            Self::NotApplicable => f.write_str(NOT_APPLICABLE),
            Self::Failed(seen) => f.write_str(seen),
        }
    }
}

/// Compares the steps of a case with a rule's.
pub fn judge(expected: &str, steps: &str) -> Verdict {
    if steps == NOT_APPLICABLE {
        return Verdict::NotApplicable;
    }
    let expected: Vec<&str> = expected.split(' ').collect();
    let seen: Vec<&str> = steps.split(' ').collect();
    let is_as_expected = expected.len() == seen.len()
        && expected.iter().zip(&seen).all(|(expected, seen)| {
            let parts = expected.split_once('=').zip(seen.split_once('='));
            parts.is_some_and(|((name, may), (own, value))| {
                name == own && may.split('|').any(|may| is_met(name, may, value))
            })
        });
    match is_as_expected {
        true => Verdict::Passed,
        false => Verdict::Failed(named(steps)),
    }
}

/// Returns whether a step's value matches a pattern:
///
/// - of a request, `STATUS/LENGTH`: a status by its name, `refused` (any but OK), `any`, or `-`
///   (nothing was written, and the used length says so). A status that the used length leaves out
///   is none.
/// - `fault`, `REASON/FLAGS/ADDRESS`: `REASON@ADDRESS`, or `REASON` alone. The device may leave out
///   the address; it has no flags but those of the specification.
/// - of anything else, the value itself.
fn is_met(name: &str, may: &str, value: &str) -> bool {
    match (name, value.split_once('/')) {
        ("fault", Some((reason, rest))) => is_report(may, reason, rest),
        (_, Some((status, len))) => {
            let is_written = len.parse().is_ok_and(|len: u32| len >= 4);
            match (may, status.parse::<u8>()) {
                ("-", _) => status == "-" && len == "0",
                (_, Err(_)) => false,
                ("any", Ok(_)) => is_written,
                ("refused", Ok(status)) => is_written && status != 0,
                (_, Ok(status)) => is_written && STATUSES.contains(&(may, status)),
            }
        }
        (_, None) => may == value,
    }
}

/// Returns whether a report, `FLAGS/ADDRESS` behind its reason, matches.
fn is_report(may: &str, reason: &str, rest: &str) -> bool {
    const HAS_ADDRESS: u32 = 1 << 8;
    const KNOWN: u32 = HAS_ADDRESS | 3;
    let (may_reason, may_address) = match may.split_once('@') {
        Some((reason, address)) => (reason, Some(address)),
        None => (may, None),
    };
    let Some((flags, address)) = rest.split_once('/') else {
        return false;
    };
    let Ok(flags) = u32::from_str_radix(flags, 16) else {
        return false;
    };
    let is_elsewhere = |may: &str| flags & HAS_ADDRESS != 0 && may != address;
    reason == may_reason && flags & !KNOWN == 0 && !may_address.is_some_and(is_elsewhere)
}

/// Returns the same steps with statuses by their names, as in rules.
fn named(steps: &str) -> String {
    let name = |step: &str| {
        let (name, value) = step.split_once('=')?;
        let (status, len) = value.split_once('/').filter(|_| name != "fault")?;
        let status: u8 = status.parse().ok()?;
        let &(word, _) = STATUSES.iter().find(|&&(_, own)| own == status)?;
        // The usual length of an answer is omitted.
        Some(match len {
            "4" => format!("{name}={word}"),
            len => format!("{name}={word}/{len}"),
        })
    };
    let words = steps
        .split(' ')
        .map(|step| name(step).unwrap_or_else(|| step.to_owned()));
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes(expected: &str, steps: &str) -> bool {
        judge(expected, steps) == Verdict::Passed
    }

    #[test]
    fn lines_are_found_among_those_of_the_kernel() {
        let console = "[    0.1] random: crng init done\r\n\
            [    1.0] iommu-cases: endpoint 24 probe=0/516, input to 0x7f\r\n\
            [    1.1] iommu-cases: begin 0 first\r\n\
            [    1.2] iommu-cases: end 0 first map=0/4 dma=none\r\n\
            [    1.3] iommu-cases: begin 1 second\r\n[    1.4] iommu-cases: end 1 second map=0";
        let seen = CaseLog::of(console);
        assert_eq!(seen.steps.len(), 1);
        assert_eq!(seen.steps["first"], "map=0/4 dma=none");
        // The last line is cut off.
        assert_eq!(seen.unfinished, Some((1, "second".into())));
        assert!(!seen.is_done);
        let whole = format!("{console}/4\r\n[    1.5] iommu-cases: done, 2 cases\r\n");
        let seen = CaseLog::of(&whole);
        assert_eq!(seen.unfinished, None);
        assert!(seen.is_done && seen.steps["second"] == "map=0/4");
    }

    #[test]
    fn a_status_is_one_that_was_written_and_is_counted() {
        assert!(passes("map=INVAL", "map=4/4"));
        assert!(!passes("map=INVAL", "map=5/4"));
        assert!(!passes("map=INVAL", "map=4/0"), "written, and not counted");
        assert!(!passes("map=INVAL", "map=-/0") && !passes("map=INVAL", "map=silent"));
        assert!(passes("map=-", "map=-/0"));
        assert!(!passes("map=-", "map=-/4"), "counted, and not written");
        assert!(!passes("map=-", "map=2/4") && !passes("map=-", "map=broken"));
        assert!(passes("map=INVAL|-", "map=4/4") && passes("map=INVAL|-", "map=-/0"));
        assert!(passes("map=refused", "map=8/4") && !passes("map=refused", "map=0/4"));
        assert!(passes("map=any", "map=0/4") && passes("map=any", "map=7/4"));
        assert!(!passes("map=any", "map=silent") && !passes("map=any", HANGS));
        assert!(passes("probe=OK", "probe=0/68"));
    }

    #[test]
    fn every_step_counts_and_no_others() {
        assert!(passes(
            "open=ok map=OK dma=2.000",
            "open=ok map=0/4 dma=2.000"
        ));
        assert!(!passes(
            "open=ok map=OK dma=2.000",
            "open=ok map=0/4 dma=2.000,3.000"
        ));
        assert!(!passes("open=ok map=OK dma=2.000", "open=ok map=0/4"));
        assert!(!passes("open=ok map=OK", "open=failed map=0/4"));
        assert!(!passes("map=OK", "map=0/4 dma=none"));
        assert!(!passes("map=OK", "unmap=0/4"));
        assert!(!passes("map=OK", ""));
        assert!(passes("dma=none|8.fff", "dma=8.fff"));
        assert_eq!(judge("map=OK", "n/a"), Verdict::NotApplicable);
    }

    #[test]
    fn a_report_may_leave_out_the_address_and_not_name_another() {
        assert!(passes("fault=2@100000123", "fault=2/102/100000123"));
        assert!(passes("fault=2@100000123", "fault=2/2/eeee"));
        assert!(!passes("fault=2@100000123", "fault=2/100/100000000"));
        assert!(!passes("fault=2@100000123", "fault=1/100/100000123"));
        assert!(!passes("fault=2", "fault=2/200/0"), "no such flag");
        assert!(!passes("fault=2", "fault=none") && !passes("fault=2", "fault=cut/8"));
        assert!(passes("fault=1|0", "fault=0/0/0"));
    }

    #[test]
    fn failed_steps_are_reported_with_the_names_of_rules() {
        let Verdict::Failed(said) = judge("map=RANGE", "map=0/4 probe=0/516 dma=2.000 fault=2/0/0")
        else {
            panic!("it is not as expected");
        };
        assert_eq!(said, "map=OK probe=OK/516 dma=2.000 fault=2/0/0");
    }
}
