//! The hostile guest: each attack with the defences off, where it must succeed, on, where it must not, and calm, where the same
//! payload must end well. A hang alone proves nothing.

use std::time::Duration;

use anyhow::Result;

use super::machine::{CPU, Guest, Machine, Ran, Report, Run};

/// An attack, and the payloads that make it.
pub struct Attack {
    /// Its name in figures.
    pub name: &'static str,
    /// What it does, for people.
    pub what: &'static str,
    /// Payloads of `eli-attacks`.
    pub payloads: &'static [&'static str],
}

/// The nine.
pub const ATTACKS: [Attack; 9] = [
    Attack {
        name: "e2",
        what: "masks interrupts and spins",
        payloads: &["e2", "e2shadow"],
    },
    Attack {
        name: "e3",
        what: "maps another table over its own, without LIDT",
        payloads: &["e3"],
    },
    Attack {
        name: "e4",
        what: "never ends an assigned interrupt: lower classes are blocked",
        payloads: &["e4"],
    },
    Attack {
        name: "e6",
        what: "INT of the host's vector",
        payloads: &["e6"],
    },
    Attack {
        name: "e7",
        what: "raises its task priority over the host's class",
        payloads: &["e7", "e7tpr"],
    },
    Attack {
        name: "gate",
        what: "its own gate of an assigned vector is absent",
        payloads: &["gate"],
    },
    Attack {
        name: "e8",
        what: "INIT and NMI to another core",
        payloads: &["e8init", "e8nmi", "e8memory"],
    },
    Attack {
        name: "e9",
        what: "LINT0 as NMI, the timer with the host's vector",
        payloads: &["e9lint0", "e9timer"],
    },
    Attack {
        name: "e10",
        what: "a message with the host's vector, or to another core",
        payloads: &["e10vector", "e10cpu"],
    },
];

/// What must hold for an honest guest.
pub const CONFORMANCE: [&str; 3] = ["e1", "e5", "moved"];

/// How a payload is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Nothing contains it.
    Off,
    /// Everything does.
    On,
    /// It does not attack.
    Calm,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The attack did what it was made for.
    Succeeded,
    /// It did not, and all is well.
    Contained,
    /// Neither.
    Unclear,
}

/// The host's tick, ms.
const TICK: u64 = 5;
/// A run that does not end by itself ends then, ms.
const UNTIL: u64 = 6000;

/// Runs a payload.
pub fn run(machine: &Machine, payload: &str, way: Way, mode: &str) -> Result<Ran> {
    let defend = if way == Way::Off { "off" } else { "on" };
    let line = if way == Way::Calm {
        format!("{payload} calm")
    } else {
        payload.to_owned()
    };
    machine.run(&Run {
        options: format!("mode={mode} tick={TICK} assign=31,41,61 defend={defend} until={UNTIL}"),
        guest: Guest::Attack(&line),
        cpu: CPU,
        nvme: payload.starts_with("e10"),
        cpus: 2,
        limit: Duration::from_secs(40),
    })
}

/// A number that the payload printed.
pub fn said(ran: &Ran, key: &str) -> Option<String> {
    let words = ran
        .console
        .lines()
        .filter(|line| line.starts_with("attack "))
        .flat_map(str::split_whitespace);
    let mut values = words.filter_map(|word| word.split_once('='));
    values
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value.to_owned())
}

/// Whether it ended as a payload does.
pub fn is_done(ran: &Ran) -> bool {
    ran.ended
        && ran
            .console
            .lines()
            .any(|line| line.starts_with("attack ") && line.ends_with(": done"))
}

/// What came of a run, by what the guest said and what the host saw.
pub fn judge(ran: &Ran, payload: &str) -> Outcome {
    let number = |key: &str| said(ran, key).and_then(|text| text.parse::<u64>().ok());
    let last = |kind| ran.report(kind).ok();
    let (window, end) = (last("window"), last("end"));
    let done = is_done(ran);
    // Ticks of the host's that it handled, and those made; a busy machine merges some, and a short window has few.
    let ticks = |report: &Option<Report>| {
        report
            .as_ref()
            .map(|report| (report.count("host_ticks"), report.count("host_ticks_made")))
    };
    let alive = |report: &Option<Report>| {
        ticks(report).is_some_and(|(seen, made)| seen * 2 + 4 >= made && seen <= made + 1)
    };
    let forged =
        |report: &Option<Report>| ticks(report).is_some_and(|(seen, made)| seen > made + 1);
    let of = |key: &str| end.as_ref().map_or(0, |report| report.count(key));
    let (succeeded, contained) = match payload {
        "e2" | "e2shadow" => {
            let time = last("time");
            (last("lost").is_some(), time.is_some() && alive(&time))
        }
        "e3" => (
            number("stolen") > Some(0),
            number("stolen") == Some(0) && alive(&window) && done,
        ),
        "e4" => {
            // The lower vector, which goes to the guest by the host if it can be acknowledged at all. That the guest does not get it,
            // whose own higher one is in service as far as it goes, is its own affair.
            let reached = window
                .as_ref()
                .is_some_and(|window| window.count("intr_guest") > 0);
            let forced = of("total_forced") > 0;
            (
                !reached && !forced && done,
                reached && forced && alive(&window),
            )
        }
        "e6" => (
            forged(&window),
            alive(&window) && number("ran") == Some(100),
        ),
        "e7" | "e7tpr" => {
            let starved = ticks(&window).is_some_and(|(seen, made)| made > 50 && seen <= 2);
            let right = number("early") == Some(0) && number("late") == Some(1);
            (starved, alive(&window) && right)
        }
        "gate" => {
            let circles = last("stopped").is_some() && ran.log.contains("own absent gate");
            (
                circles,
                number("faults") == Some(1) && number("recovered") == Some(1),
            )
        }
        "e8init" => {
            // A beat is 2 ms.
            let (beats, ms) = (of("core1_beats"), of("ms"));
            (done && beats * 8 < ms, done && beats * 4 >= ms)
        }
        "e8nmi" | "e8memory" => (of("core1_nmis") > 0, done && of("core1_nmis") == 0),
        "e9lint0" => {
            // Without defences there is no watchdog, and so no NMI but the guest's; with them, one every 20 ms.
            let is_off = ran.log.contains("defences off");
            let nmis = of("nmis");
            (
                is_off && nmis > 0,
                !is_off && nmis <= of("ms") / 20 + 2 && of("refused") > 0,
            )
        }
        "e9timer" => (
            forged(&window),
            alive(&window) && number("ran") > Some(0) && of("total_relocated") > 0,
        ),
        "e10vector" => (
            forged(&window),
            alive(&window) && number("ran") > Some(0) && of("total_relocated") > 0,
        ),
        "e10cpu" => (
            of("core1_foreign") > 0,
            done && of("core1_foreign") == 0 && of("refused") > 0,
        ),
        _ => (false, false),
    };
    match (succeeded, contained && (done || payload.starts_with("e2"))) {
        (true, _) => Outcome::Succeeded,
        (false, true) => Outcome::Contained,
        _ => Outcome::Unclear,
    }
}

/// Whether an honest guest got what it is due.
pub fn conforms(ran: &Ran, payload: &str) -> bool {
    let is = |key: &str, value: &str| said(ran, key).as_deref() == Some(value);
    is_done(ran)
        && match payload {
            "e1" => is("delivered", "1000"),
            "e5" => is("order", "41,61,31"),
            "moved" => is("ran", "100"),
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(console: &str, log: &str) -> Ran {
        Ran {
            console: console.into(),
            log: log.into(),
            ended: true,
        }
    }

    fn window(ticks: u64, made: u64) -> String {
        format!(
            "hv: x\n{{\"report\":\"window\",\"host_ticks\":{ticks},\"host_ticks_made\":{made}}}\n"
        )
    }

    #[test]
    fn a_stolen_tick_a_starved_host_and_a_forged_tick_are_told_from_a_healthy_run() {
        let e3 = |stolen, ticks| {
            let console = format!("attack e3: stolen={stolen} own=100\nattack e3: done\n");
            judge(&ran(&console, &window(ticks, 200)), "e3")
        };
        assert_eq!(e3(190, 0), Outcome::Succeeded);
        assert_eq!(e3(0, 198), Outcome::Contained);
        // Nothing was stolen, but nothing reached the host either.
        assert_eq!(e3(0, 0), Outcome::Unclear);
        let e6 = |ticks| {
            let console = "attack e6: ran=100\nattack e6: done\n";
            judge(&ran(console, &window(ticks, 2)), "e6")
        };
        assert_eq!(e6(102), Outcome::Succeeded);
        assert_eq!(e6(2), Outcome::Contained);
    }

    #[test]
    fn a_hang_proves_nothing() {
        // The machine is gone, and nobody saw why.
        let mut hung = ran("attack e2: spinning\n", "hv: entering the guest\n");
        hung.ended = false;
        assert_eq!(judge(&hung, "e2"), Outcome::Unclear);
        let lost = ran(
            "attack e2: spinning\n",
            "{\"report\":\"lost\",\"exits\":23}\n",
        );
        assert_eq!(judge(&lost, "e2"), Outcome::Succeeded);
        assert!(!is_done(&lost));
    }

    #[test]
    fn counts_are_summed_by_cause() {
        let line = "{\"report\":\"window\",\"intr_device\":3,\"eoi_device\":4,\"eoi_timer\":9,\"odd_device\":5}\n";
        let report = ran("", line).report("window").unwrap();
        assert_eq!((report.sum_of("device"), report.sum_of("timer")), (7, 9));
        assert!(ran("", line).report("end").is_err());
    }
}
