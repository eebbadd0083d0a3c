//! `doctor`: facilities of this host for virtual machines, why they matter, what to do next.
//!
//! `probe` collects `Facts` from files and a few harmless system calls; `assess` turns facts into
//! findings and a verdict without access to the machine, so that tests can give it the facts of
//! machines that they do not have. Changes nothing on the host.
//!
//! A program may add another host, on which guests run where they do not on this one.
//!
//! Exit status: 0 when guests run here or on the other host, 1 when they run on neither.

mod assess;
mod assignment;
mod facts;
mod files;
mod finding;
mod probe;

use std::io::{self, IsTerminal, Write};

use assess::{Report, Verdict};

pub use assess::OtherHost;
pub use finding::{Finding, State};

/// Arguments of `doctor`.
#[derive(clap::Args, Debug)]
pub struct DoctorArgs {
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// Runs `doctor`, of a program that has this other host, by the MiB of memory available here.
///
/// # Errors
/// None.
pub fn main(args: &DoctorArgs, other: impl FnOnce(u64) -> Option<OtherHost>) -> anyhow::Result<u8> {
    let facts = probe::facts();
    let other = other(facts.memory.available_mib);
    let report = assess::assess(&facts, other.as_ref());
    let text = if args.json {
        format!("{:#}\n", json(&report, other.as_ref()))
    } else {
        table(&report, io::stdout().is_terminal())
    };
    // A reader that closed the pipe has seen enough.
    let _ = io::stdout().write_all(text.as_bytes());
    Ok(u8::from(report.verdict == Verdict::Neither))
}

fn table(report: &Report, colour: bool) -> String {
    let mut out = String::new();
    for finding in &report.findings {
        let (word, code) = match finding.state {
            State::Good => ("good", 32),
            State::Limited => ("limited", 33),
            State::Missing => ("missing", 31),
        };
        let mark = format!("{word:<8}");
        let mark = if colour {
            format!("\u{1b}[{code}m{mark}\u{1b}[0m")
        } else {
            mark
        };
        out.push_str(&format!("{mark} {:<19} {}\n", finding.name, finding.value));
        if finding.state != State::Good {
            out.push_str(&format!("{:28} why it matters: {}\n", "", finding.why));
            if !finding.next.is_empty() {
                out.push_str(&format!("{:28} what to do:     {}\n", "", finding.next));
            }
        }
    }
    out.push_str(&assignment::table(&report.groups));
    out.push_str(&format!("\n{}\n", report.summary));
    out
}

fn json(report: &Report, other: Option<&OtherHost>) -> serde_json::Value {
    let findings = report.findings.iter().map(|finding| {
        let state = match finding.state {
            State::Good => "good",
            State::Limited => "limited",
            State::Missing => "missing",
        };
        let body = serde_json::json!({
            "state": state,
            "value": finding.value,
            "why": finding.why,
            "next": finding.next,
        });
        (finding.key.to_owned(), body)
    });
    let verdict = match (report.verdict, other) {
        (Verdict::Native, _) => "native",
        (Verdict::Other, Some(other)) => other.finding.key,
        (_, Some(_)) => "neither",
        (_, None) => "none",
    };
    serde_json::json!({
        "verdict": verdict,
        "summary": report.summary,
        "findings": findings.collect::<serde_json::Map<_, _>>(),
        "groups": assignment::json(&report.groups),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use facts::Facts;

    #[test]
    fn the_table_explains_only_what_is_not_good() {
        let text = table(&assess::assess(&Facts::default(), None), false);
        assert!(text.contains("missing  KVM"), "{text}");
        assert!(text.contains("what to do:"), "{text}");
        let good = text.lines().skip_while(|l| !l.starts_with("good")).nth(1);
        assert!(
            good.is_none_or(|line| !line.contains("why it matters")),
            "{text}"
        );
    }

    #[test]
    fn json_has_a_verdict_and_every_finding_once() {
        let report = assess::assess(&Facts::default(), None);
        let value = json(&report, None);
        assert_eq!(value["verdict"], "none");
        assert_eq!(
            value["findings"].as_object().unwrap().len(),
            report.findings.len()
        );
        assert_eq!(value["findings"]["kvm"]["state"], "missing");
    }
}
