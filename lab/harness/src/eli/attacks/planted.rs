//! Bad runs that each judge must refuse, made by hand: a good run of the payload with one error in
//! it.
//!
//! They show that a judge can fail. `exitless-lab eli --attacks` applies the judges to them before
//! anything else, and so do this crate's tests.

use std::collections::BTreeMap;

use super::judge::{Outcome, honest, judge};
use super::table::{ATTACKS, Attack, HONEST, Honest, Sign};
use crate::eli::machine::Ran;

/// Output of a run, before it is rendered.
#[derive(Clone)]
struct Made {
    console: Vec<String>,
    reports: Vec<(&'static str, BTreeMap<String, u64>)>,
    log: String,
    ended: bool,
    failure: Option<String>,
}

impl Made {
    fn ran(&self) -> Ran {
        let mut log = self.log.clone();
        for (kind, counts) in &self.reports {
            let counts: String = counts
                .iter()
                .map(|(key, value)| format!(",\"{key}\":{value}"))
                .collect();
            log.push_str(&format!("{{\"report\":\"{kind}\"{counts}}}\n"));
        }
        Ran {
            console: self.console.join("\n") + "\n",
            log,
            ended: self.ended,
            failure: self.failure.clone(),
            waited: 0.0,
        }
    }

    /// Sets a count in every report.
    fn set(mut self, key: &str, value: u64) -> Self {
        for (_, counts) in &mut self.reports {
            counts.insert(key.to_owned(), value);
        }
        self
    }

    fn without(mut self, key: &str) -> Self {
        for (_, counts) in &mut self.reports {
            counts.remove(key);
        }
        self
    }

    fn without_report(mut self, kind: &str) -> Self {
        self.reports.retain(|(known, _)| *known != kind);
        self
    }

    fn with_report(mut self, kind: &'static str) -> Self {
        self.reports.push((kind, BTreeMap::new()));
        self
    }

    fn says(mut self, line: &str) -> Self {
        self.console.insert(0, line.to_owned());
        self
    }

    fn not_done(mut self) -> Self {
        self.console.retain(|line| !line.ends_with(": done"));
        self
    }
}

/// Returns the counts of a healthy window of 1,100 ms.
fn healthy() -> BTreeMap<String, u64> {
    [
        ("ms", 1100),
        ("host_ticks", 215),
        ("host_ticks_made", 220),
        ("nmis", 55),
        ("tick_gap_us_max", 21_000),
        ("core1_foreign", 0),
        ("core1_nmis", 0),
        ("core1_beats", 500),
        ("core1_beats_extra", 0),
        ("canary_lost", 0),
        ("dma_faults", 10),
        ("irq_blocked", 10),
        ("exits", 1400),
        ("intr_guest", 5),
        ("msr_guest", 100),
        ("other_guest", 200),
        ("apic_guest", 1000),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

fn calm(name: &str) -> Made {
    Made {
        console: vec![format!("attack {name}: done")],
        reports: vec![("window", healthy()), ("end", healthy())],
        log: "hv: mode eli, defences on\n".to_owned(),
        ended: true,
        failure: None,
    }
}

/// Returns a run of the attack that is contained.
fn good(attack: &Attack) -> Made {
    let mut made = calm(attack.name);
    let line = match attack.name {
        "e7" | "e7tpr" => "early=0 late=1",
        "gate" => "faults=1 recovered=1",
        _ => match attack.sign {
            Sign::Reached(_) => "times=100 refused=100",
            Sign::Said("stolen") => "stolen=0",
            _ => "going",
        },
    };
    made.console
        .insert(0, format!("attack {}: {line}", attack.name));
    if attack.ends {
        made = made.not_done().without_report("window");
        // The other core's beats are counted from the start of the run.
        let mut after = healthy();
        after.insert("core1_beats".to_owned(), 1000);
        made.reports.push(("after", after));
    } else if attack.spins {
        made = made.not_done();
        made.reports = vec![("time", healthy())];
    }
    made
}

/// Returns the good run with one error, each with a description of it.
fn bad(attack: &Attack) -> Vec<(&'static str, Made)> {
    let good = || good(attack);
    let mut all = vec![
        (
            "a gap of three periods",
            good().set("tick_gap_us_max", 60_000),
        ),
        ("four fifths of the ticks", good().set("host_ticks", 172)),
        ("no tick", good().set("host_ticks", 0)),
        ("more ticks than made", good().set("host_ticks", 320)),
        ("more NMIs than the watchdog's", good().set("nmis", 155)),
        ("no NMI", good().set("nmis", 0)),
        (
            "an interrupt on the other core",
            good().set("core1_foreign", 1),
        ),
        ("an NMI on the other core", good().set("core1_nmis", 1)),
        ("beats that are none", good().set("core1_beats_extra", 3)),
        ("the other core stopped", good().set("core1_beats", 40)),
        ("the hypervisor's page lost", good().set("canary_lost", 1)),
        ("no word of that page", good().without("canary_lost")),
        ("a short window", good().set("ms", 54)),
        ("no gap said", good().without("tick_gap_us_max")),
        (
            "no count of the other core",
            good().without("core1_beats_extra"),
        ),
        ("the first core lost", good().with_report("lost")),
        ("the watchdog lost", good().with_report("watchdog_lost")),
        ("the hypervisor stopped", good().with_report("stopped")),
        (
            "a machine that hangs",
            Made {
                ended: false,
                ..good()
            },
        ),
        (
            "an emulator that ended",
            Made {
                failure: Some("signal: 6".to_owned()),
                ..good()
            },
        ),
        (
            "no account",
            Made {
                reports: Vec::new(),
                ..good()
            },
        ),
        (
            "nothing counted",
            Made {
                reports: good()
                    .reports
                    .into_iter()
                    .map(|(kind, counts)| (kind, counts.into_keys().map(|key| (key, 0)).collect()))
                    .collect(),
                ..good()
            },
        ),
    ];
    all.push((
        "no end that was said",
        good()
            .not_done()
            .without_report("after")
            .without_report("time"),
    ));
    match attack.sign {
        Sign::Said(key) => {
            all.push(("its own sign", good().says(&format!("attack x: {key}=1"))));
        }
        Sign::Reached(kind) => {
            all.push(("its own sign", good().set(&format!("{kind}_guest"), 99)));
        }
        Sign::Repeated(exits) => all.push(("its own sign", good().set(exits, 8000))),
        Sign::Blocked => all.push(("its own sign", good().without("intr_guest"))),
        // Their runs are above.
        Sign::Starved(_)
        | Sign::Gone
        | Sign::Emulator
        | Sign::Lost
        | Sign::Stopped(_)
        | Sign::Forged
        | Sign::ForgedNmi
        | Sign::OtherCore
        | Sign::OtherCoreStopped
        | Sign::Overwritten
        | Sign::Ended => {}
    }
    match attack.name {
        "e11" => all.push(("nothing blocked", good().set("dma_faults", 0))),
        "e12" => all.push(("nothing blocked", good().set("irq_blocked", 0))),
        _ => {}
    }
    all
}

/// Returns bad runs of an honest payload.
fn dishonest(payload: &Honest) -> Vec<(&'static str, Made)> {
    let good = || honest_run(payload);
    let mut all = vec![
        ("no end", good().not_done()),
        (
            "a machine that hangs",
            Made {
                ended: false,
                ..good()
            },
        ),
        (
            "another result",
            Made {
                console: vec![format!("attack {}: done", payload.name)],
                ..good()
            },
        ),
    ];
    if payload.returns {
        all.push(("injection for good", good().set("apic_guest", 3000)));
        all.push(("one window", good().without_report("window")));
    }
    all
}

fn honest_run(payload: &Honest) -> Made {
    let mut made = calm(payload.name);
    made.reports.insert(0, ("window", healthy()));
    made.says(&format!("attack {}: {}", payload.name, payload.says))
}

/// Judges the planted runs. Returns their number, the number of refused ones, and descriptions of
/// those that were not refused. A good run that is refused is among the last.
pub fn check() -> (u32, u32, Vec<String>) {
    let (mut planted, mut refused, mut wrong) = (0, 0, Vec::new());
    let mut count = |name: &str, what: &str, is_refused: bool| {
        planted += 1;
        refused += u32::from(is_refused);
        if !is_refused {
            wrong.push(format!("{name}: {what}"));
        }
    };
    let mut good_refused = Vec::new();
    for attack in ATTACKS {
        let calm = calm(attack.name).ran();
        let verdict = judge(attack, &good(attack).ran(), &calm);
        if verdict.outcome != Outcome::Contained {
            good_refused.push(format!("{}: a good run: {}", attack.name, verdict.why));
        }
        for (what, made) in bad(attack) {
            let outcome = judge(attack, &made.ran(), &calm).outcome;
            count(attack.name, what, outcome != Outcome::Contained);
        }
        // A calm run without counts is no reference: zero must not be compared with zero.
        for (what, made) in [
            (
                "a calm run without a tick",
                self::calm(attack.name).set("host_ticks", 0),
            ),
            (
                "a calm run of no length",
                self::calm(attack.name).set("ms", 3),
            ),
            (
                "a calm run without a watchdog",
                self::calm(attack.name).set("nmis", 0),
            ),
        ] {
            let outcome = judge(attack, &good(attack).ran(), &made.ran()).outcome;
            count(attack.name, what, outcome == Outcome::Unclear);
        }
    }
    for payload in HONEST {
        let calm = honest_run(payload).ran();
        if let Err(why) = honest(payload, &honest_run(payload).ran(), Some(&calm)) {
            good_refused.push(format!("{}: a good run: {why}", payload.name));
        }
        for (what, made) in dishonest(payload) {
            count(
                payload.name,
                what,
                honest(payload, &made.ran(), Some(&calm)).is_err(),
            );
        }
    }
    wrong.extend(good_refused);
    (planted, refused, wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_judge_refuses_every_planted_run_and_takes_a_good_one() {
        let (planted, refused, wrong) = check();
        assert!(wrong.is_empty(), "{wrong:#?}");
        assert_eq!(planted, refused);
        assert!(planted > 20 * ATTACKS.len() as u32);
    }

    #[test]
    fn a_contained_run_has_not_succeeded_and_a_hang_proves_nothing() {
        for attack in ATTACKS {
            let calm = calm(attack.name).ran();
            let outcome = |made: Made| judge(attack, &made.ran(), &calm).outcome;
            let hung = Made {
                ended: false,
                reports: Vec::new(),
                ..good(attack).not_done()
            };
            assert_eq!(outcome(hung), Outcome::Unclear, "{}", attack.name);
        }
    }
}
