//! `exitless doctor`: what this host offers to virtual machines, why it matters, what to do next.
//!
//! [`probe`] collects [`Facts`](facts::Facts) from files and a few harmless system calls; [`assess`]
//! turns facts into findings and a verdict without looking at the machine again, so that tests can
//! feed it the facts of machines they do not have. Changes nothing on the host.
//!
//! Exit status: 0 when `exitless run` works here or in the lab, 1 when neither does.

mod assess;
mod facts;
mod probe;

use std::io::{self, IsTerminal, Write};

use assess::{Report, State, Verdict};

/// Arguments of `exitless doctor`.
#[derive(clap::Args)]
#[command(after_long_help = "\
Examples:
  For people:
    exitless doctor
  For programs:
    exitless doctor --json

Exit status:
  0  Guests run here, or in the lab.
  1  They run in neither.")]
pub struct DoctorArgs {
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// Runs `exitless doctor`.
pub fn main(args: &DoctorArgs) -> anyhow::Result<u8> {
    let report = assess::assess(&probe::facts());
    let text = if args.json {
        format!("{:#}\n", json(&report))
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
        out.push_str(&format!("{mark} {:<18} {}\n", finding.name, finding.value));
        if finding.state != State::Good {
            out.push_str(&format!("{:27} why it matters: {}\n", "", finding.why));
            if !finding.next.is_empty() {
                out.push_str(&format!("{:27} what to do:     {}\n", "", finding.next));
            }
        }
    }
    out.push_str(&format!("\n{}\n", report.summary));
    out
}

fn json(report: &Report) -> serde_json::Value {
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
    let verdict = match report.verdict {
        Verdict::Native => "native",
        Verdict::Lab => "lab",
        Verdict::Neither => "neither",
    };
    serde_json::json!({
        "verdict": verdict,
        "summary": report.summary,
        "findings": findings.collect::<serde_json::Map<_, _>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use facts::Facts;

    #[test]
    fn the_table_explains_only_what_is_not_good() {
        let text = table(&assess::assess(&Facts::default()), false);
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
        let report = assess::assess(&Facts::default());
        let value = json(&report);
        assert_eq!(value["verdict"], "neither");
        assert_eq!(
            value["findings"].as_object().unwrap().len(),
            report.findings.len()
        );
        assert_eq!(value["findings"]["kvm"]["state"], "missing");
    }
}
