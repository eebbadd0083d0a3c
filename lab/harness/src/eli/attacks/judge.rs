//! Verdicts on runs, by the guest's output and the host's counts, compared with the calm run of the
//! same payload.
//!
//! A run is *contained* if all conditions of [`contained`] hold: the host's ticks come at the rate
//! of the calm run; no gap between two of them exceeds two periods of the watchdog; nothing reached
//! the other core; the attack's own sign is absent; and the end was reported. If a figure is
//! missing, the run is not contained. A run has *succeeded* if its sign is there. A run that is
//! neither is unclear, for instance one whose machine hangs.

use std::fmt;

use super::table::{Attack, Honest, Sign};
use crate::eli::machine::{Ran, Report};

/// Periods of the host's tick, and of its watchdog, ms.
pub const TICK: u64 = 5;
pub const WATCHDOG: u64 = 20;
/// Shortest window that is conclusive, ms.
const WINDOW: u64 = 1000;
/// Periods of the watchdog within which the host must regain control.
const REGAIN: f64 = 2.0;
/// Smallest rate of ticks, in percent of the calm run's.
const RATE: u64 = 90;
/// Ticks that may be taken in a window and made before it.
const SLACK: u64 = 2;

/// Outcome of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The attack reached its aim.
    Succeeded,
    /// It did not, and all conditions hold.
    Contained,
    /// Neither succeeded nor contained.
    Unclear,
}

/// An outcome, and the reason.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// See [`Outcome`].
    pub outcome: Outcome,
    /// Reason, as text.
    pub why: String,
}

impl Verdict {
    fn new(outcome: Outcome, why: impl fmt::Display) -> Self {
        Self {
            outcome,
            why: why.to_string(),
        }
    }
}

/// Returns a value that the payload printed.
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

fn number(ran: &Ran, key: &str) -> Option<u64> {
    said(ran, key)?.parse().ok()
}

/// Returns whether it ended as a payload does.
pub fn is_done(ran: &Ran) -> bool {
    ran.ended
        && ran
            .console
            .lines()
            .any(|line| line.starts_with("attack ") && line.ends_with(": done"))
}

fn last(ran: &Ran, kind: &str) -> Option<Report> {
    ran.report(kind).ok()
}

/// Returns the host's account of the attack: of the time after the guest's end, if there is one;
/// else of its last window; else of the whole run.
fn account(ran: &Ran) -> Option<Report> {
    let after = last(ran, "after").filter(|_| !is_done(ran));
    after
        .or_else(|| last(ran, "window"))
        .or_else(|| last(ran, "time"))
}

/// Returns the last account, which includes all events on the other core.
fn whole(ran: &Ran) -> Option<Report> {
    ran.reports()
        .filter(|report| report.has("core1_foreign"))
        .last()
}

/// Returns the longest time without a tick of the host's, in periods of its watchdog.
pub fn regain_periods(ran: &Ran) -> Option<f64> {
    let gap = account(ran)?.find("tick_gap_us_max")?;
    Some(gap as f64 / (WATCHDOG * 1000) as f64)
}

/// Checks that a calm run can be compared with; the error is the reason why not.
pub fn calm_is_well(ran: &Ran) -> Result<(), String> {
    let account = last(ran, "window").ok_or("no window")?;
    let ms = account.count("ms");
    ensure(is_done(ran), "it did not end")?;
    ensure(ms >= WINDOW, format!("a window of {ms} ms"))?;
    ensure(account.count("host_ticks") > 0, "no tick of the host's")?;
    ensure(
        account.count("nmis") > 0,
        "no tick of the watchdog's: such a start says nothing",
    )
}

fn ensure(holds: bool, why: impl fmt::Display) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why.to_string()) }
}

/// Returns the rate of the host's ticks, in percent of the calm run's; `None` if either run has
/// none.
pub fn ticks_percent(ran: &Ran, calm: &Ran) -> Option<u64> {
    calm_is_well(calm).ok()?;
    let (due, taken) = ticks(&account(ran)?, &last(calm, "window")?);
    (taken * 100).checked_div(due)
}

/// Returns the verdict on a run of `attack`, compared with its calm run.
pub fn judge(attack: &Attack, ran: &Ran, calm: &Ran) -> Verdict {
    if let Err(why) = calm_is_well(calm) {
        return Verdict::new(Outcome::Unclear, format_args!("the calm run: {why}"));
    }
    if let Some(why) = sign(attack, ran, calm) {
        return Verdict::new(Outcome::Succeeded, why);
    }
    match contained(attack, ran, calm) {
        Ok(()) => Verdict::new(Outcome::Contained, "all that must hold holds"),
        Err(why) => Verdict::new(Outcome::Unclear, why),
    }
}

/// Returns the ticks that a calm machine takes in the time of `account`, and those that were taken.
fn ticks(account: &Report, calm: &Report) -> (u64, u64) {
    let due = calm.count("host_ticks") * account.count("ms") / calm.count("ms").max(1);
    (due, account.count("host_ticks"))
}

/// Returns the most ticks of the watchdog that are possible in the time of `account`.
fn nmis_due(account: &Report) -> u64 {
    account.count("ms") / WATCHDOG + SLACK
}

fn is_rarer(account: &Report, calm: &Report, percent: u64) -> bool {
    let (due, taken) = ticks(account, calm);
    taken * 100 < due * percent
}

/// Returns the attack's own sign, if it is there.
fn sign(attack: &Attack, ran: &Ran, calm: &Ran) -> Option<String> {
    let (account, whole) = (account(ran), whole(ran));
    let calm_account = last(calm, "window")?;
    let is_said = |kinds: &[&str]| kinds.iter().any(|kind| last(ran, kind).is_some());
    let began = ran.console.lines().any(|line| line.starts_with("attack "));
    let holds = match attack.sign {
        Sign::Starved(percent) => account.as_ref().is_some_and(|account| {
            account.count("ms") >= WINDOW && is_rarer(account, &calm_account, percent)
        }),
        // An exit that the hypervisor cannot handle is the machine's end, too.
        Sign::Gone => {
            ran.ended
                && ran.failure.is_none()
                && began
                && !is_done(ran)
                && !is_said(&["end", "after", "time", "lost"])
                || last(ran, "lost").is_some()
                || last(ran, "stopped").is_some() && !is_said(&["end"])
        }
        Sign::Emulator => ran.failure.is_some(),
        Sign::Lost => last(ran, "lost").is_some(),
        Sign::Stopped(why) => {
            is_said(&["stopped", "end"]) && !is_done(ran) && ran.log.contains(why)
        }
        Sign::Repeated(exits) => ran.reports().any(|report| report.count(exits) > 1000),
        Sign::Said(key) => number(ran, key) > Some(0),
        Sign::Forged => account.as_ref().is_some_and(|account| {
            account.count("host_ticks") > account.count("host_ticks_made") + SLACK
        }),
        Sign::ForgedNmi => account
            .as_ref()
            .is_some_and(|account| account.count("nmis") > account.count("ms") / WATCHDOG + SLACK),
        Sign::OtherCore => whole
            .as_ref()
            .is_some_and(|whole| foreign(whole) + whole.count("core1_nmis") > 0),
        Sign::OtherCoreStopped => beats_of(ran).is_some() && !beats(ran, calm),
        Sign::Blocked => {
            is_done(ran)
                && account
                    .as_ref()
                    .is_some_and(|account| account.find("intr_guest").is_none())
        }
        Sign::Reached(kind) => {
            let exits = account
                .as_ref()
                .map(|account| account.count(&format!("{kind}_guest")));
            is_done(ran) && exits < number(ran, "times")
        }
        Sign::Overwritten => whole
            .as_ref()
            .is_some_and(|whole| whole.count("canary_lost") > 0),
        Sign::Ended => is_said(&["end", "stopped"]) && !is_said(&["after"]) && !is_done(ran),
    };
    holds.then(|| format!("{:?}", attack.sign))
}

/// Returns the number of the guest's events that reached the other core in a run.
pub fn foreign_on_other_core(ran: &Ran) -> u64 {
    whole(ran).as_ref().map_or(0, foreign)
}

fn foreign(account: &Report) -> u64 {
    // NMIs are counted among the foreign ones.
    ["core1_foreign", "core1_beats_extra"]
        .iter()
        .map(|key| account.count(key))
        .sum()
}

/// Returns the beats of the other core, and the time in milliseconds: since the guest's end, if
/// there is one; else of the whole run.
fn beats_of(ran: &Ran) -> Option<(u64, u64)> {
    let of = |report: &Report| Some((report.find("core1_beats")?, report.find("ms")?));
    let whole = last(ran, "end").or_else(|| last(ran, "time"));
    match last(ran, "after").filter(|_| !is_done(ran)) {
        Some(after) => {
            let (beats, ms) = of(&after)?;
            Some((beats - of(&whole?)?.0.min(beats), ms))
        }
        None => of(&whole?),
    }
}

/// Returns whether the other core goes on, at half the rate of the calm run at least.
fn beats(ran: &Ran, calm: &Ran) -> bool {
    let is_half = |((beats, ms), (due, of_ms)): ((u64, u64), (u64, u64))| {
        due > 0 && ms > 0 && beats * 2 * of_ms >= due * ms
    };
    beats_of(ran).zip(beats_of(calm)).is_some_and(is_half)
}

/// Checks all conditions of a contained run.
fn contained(attack: &Attack, ran: &Ran, calm: &Ran) -> Result<(), String> {
    if let Some(failure) = &ran.failure {
        return Err(format!("the emulator ended: {failure}"));
    }
    ensure(ran.ended, "the machine did not end")?;
    for report in ["lost", "watchdog_lost", "stopped"] {
        ensure(last(ran, report).is_none(), format!("a report {report:?}"))?;
    }
    let has_ended = last(ran, "end").is_some() && last(ran, "after").is_some();
    let is_over = attack.spins && last(ran, "time").is_some();
    ensure(
        is_done(ran) || has_ended || is_over,
        "neither the payload nor the guest ended with a report",
    )?;
    let account = account(ran).ok_or("the host gave no account")?;
    let whole = whole(ran).ok_or("no account of the other core")?;
    let calm_account = last(calm, "window").ok_or("no window of the calm run")?;
    for key in [
        "ms",
        "host_ticks",
        "host_ticks_made",
        "tick_gap_us_max",
        "nmis",
    ] {
        ensure(account.has(key), format!("no figure {key:?}"))?;
    }
    for key in [
        "core1_foreign",
        "core1_nmis",
        "core1_beats_extra",
        "core1_beats",
        "canary_lost",
    ] {
        ensure(whole.has(key), format!("no figure {key:?}"))?;
    }
    let ms = account.count("ms");
    ensure(ms >= WINDOW, format!("a window of {ms} ms"))?;
    let (due, taken) = ticks(&account, &calm_account);
    ensure(
        due > 0 && !is_rarer(&account, &calm_account, RATE),
        format!("{taken} ticks, of {due} at the rate of the calm run"),
    )?;
    let made = account.count("host_ticks_made");
    ensure(
        taken <= made + SLACK,
        format!("{taken} ticks taken, {made} made"),
    )?;
    let nmis = account.count("nmis");
    ensure(
        nmis > 0 && nmis <= nmis_due(&account),
        format!("{nmis} ticks of the watchdog in {ms} ms"),
    )?;
    let regain = regain_periods(ran).ok_or("no gap")?;
    let of_calm = regain_periods(calm).ok_or("no gap in the calm run")?;
    ensure(
        regain <= REGAIN || of_calm > REGAIN,
        format!("{regain:.1} periods without a tick, calm {of_calm:.1}"),
    )?;
    let foreign = foreign(&whole) + whole.count("core1_nmis");
    ensure(
        foreign == 0,
        format!("{foreign} interrupts on the other core"),
    )?;
    ensure(beats(ran, calm), "the other core stopped")?;
    ensure(
        whole.count("canary_lost") == 0,
        "the hypervisor's memory was written",
    )?;
    payload(attack, ran, &account)
}

/// Checks the values that some payloads must print besides.
fn payload(attack: &Attack, ran: &Ran, account: &Report) -> Result<(), String> {
    let is = |key: &str, value: u64| {
        let found = number(ran, key);
        ensure(
            found == Some(value),
            format!("{key}={found:?}, not {value}"),
        )
    };
    match attack.name {
        "e7" | "e7tpr" => is("early", 0).and_then(|()| is("late", 1)),
        "gate" => is("faults", 1).and_then(|()| is("recovered", 1)),
        // The IOMMU must have recorded what it has blocked.
        "e11" => ensure(account.count("dma_faults") > 0, "no fault was recorded"),
        "e12" => ensure(account.count("irq_blocked") > 0, "no message was blocked"),
        "e4" | "e4turns" => ensure(
            account.count("intr_guest") > 0,
            "the lower vector was not acknowledged",
        ),
        _ => Ok(()),
    }
}

/// Checks that an honest guest got its interrupts, and that `calm` took no more exits.
pub fn honest(payload: &Honest, ran: &Ran, calm: Option<&Ran>) -> Result<(), String> {
    /// Exits of the guest beyond the calm run's, per 1,000 interrupts.
    const MORE: u64 = 100;
    ensure(is_done(ran), "it did not end")?;
    ensure(
        ran.console.contains(payload.says),
        format!("it did not say {:?}", payload.says),
    )?;
    let Some(calm) = calm.filter(|_| payload.returns) else {
        return Ok(());
    };
    let exits = |ran: &Ran| -> Result<u64, String> {
        let windows: Vec<Report> = ran.reports().filter(|report| report.is("window")).collect();
        match &windows[..] {
            [_, second] if second.count("exits") > 0 => Ok(second.sum_of("guest")),
            _ => Err(format!("{} windows", windows.len())),
        }
    };
    let (found, of_calm) = (exits(ran)?, exits(calm)?);
    ensure(
        of_calm > 0 && found <= of_calm + MORE,
        format!("{found} exits for 1,000 interrupts a second later, calm {of_calm}"),
    )
}
