//! The hostile guest: each attack without its defences, where it must succeed; with them, where it
//! must not; and calm; in all modes.
//!
//! `table` lists the payloads, `judge` gives verdicts on runs, and `planted` has the bad runs that
//! each judge must refuse.

mod judge;
mod planted;
mod table;

use std::fmt;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use eli::surface;

use super::figures::{Figures, round};
use super::machine::{CPU, Guest, Machine, Ran, Run};
use super::modes::Mode;
use judge::{Outcome, TICK, WATCHDOG, regain_periods};
use table::{ATTACKS, Attack, HONEST, Honest};

/// Returns the names of all payloads.
pub fn names() -> impl Iterator<Item = &'static str> {
    let attacks = ATTACKS.iter().map(|attack| attack.name);
    attacks.chain(HONEST.iter().map(|payload| payload.name))
}

/// Variant of a payload's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttackVariant {
    /// Its own defences are left out.
    Off,
    /// All are on.
    On,
    /// All are on, and it does not attack.
    Calm,
}

/// One run.
struct Case<'a> {
    payload: &'a str,
    way: AttackVariant,
    mode: Mode,
    /// Value of the switch of the defences.
    defend: String,
    nvme: bool,
    ram_disk: bool,
    iommu: bool,
    /// Number of the guest's processors.
    cpus: u32,
    /// Policy that keeps the host's tick apart from the guest.
    critical: &'static str,
}

impl fmt::Display for Case<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            payload, way, mode, ..
        } = self;
        write!(f, "{payload}, {way:?}, mode {}", mode.option())
    }
}

/// Time after which a run that does not end by itself is ended, ms: more than two windows, and the
/// start.
const UNTIL: u64 = 4500;
/// The same for payloads that spin: more than one window.
const SPINNING: u64 = 2000;
/// Time for which the host goes on after the guest's end, ms: a window.
const LINGER: u64 = 1100;

/// Policy of the host's tick in all runs but those of [`critical`].
const LIMIT: &str = "limit";

/// Part of its time for which a run may wait for a processor, and the number of tries.
const WAITED: f64 = 0.1;
const TRIES: u32 = 2;

impl Case<'_> {
    /// Runs it. A run that this machine kept waiting for too long is repeated, and counted: its
    /// result would show this machine's load.
    fn run(&self, machine: &Machine, busy: &mut u32) -> Result<Ran> {
        for _ in 1..TRIES {
            let ran = self.run_once(machine)?;
            if ran.waited < WAITED {
                return Ok(ran);
            }
            self.say_again(&ran, busy);
        }
        self.run_once(machine)
    }

    fn say_again(&self, ran: &Ran, busy: &mut u32) {
        eprintln!(
            "eli: {self}: this machine kept it waiting for {:.0} % of its time: again",
            ran.waited * 100.0
        );
        *busy += 1;
    }

    fn run_once(&self, machine: &Machine) -> Result<Ran> {
        eprintln!("eli: {self}");
        let line = match self.way {
            AttackVariant::Calm => format!("{} calm", self.payload),
            AttackVariant::Off | AttackVariant::On => self.payload.to_owned(),
        };
        let attack = ATTACKS
            .iter()
            .find(|attack| attack.name == self.payload && self.way != AttackVariant::Calm);
        // Without its defence, a guest that should end may go on for ever.
        let (ends, spins) = attack.map_or((false, false), |attack| {
            (attack.ends, attack.spins || attack.ends)
        });
        // If the payload ends by itself, the host need not linger.
        let linger = if ends { LINGER } else { 0 };
        let until = if spins { SPINNING + linger } else { UNTIL };
        machine.run(&Run {
            options: format!(
                "mode={} tick={TICK} watchdog={WATCHDOG} assign=31,41,61 defend={} linger={linger} \
                 until={until} critical={} cpus={}",
                self.mode.option(),
                self.defend,
                self.critical,
                self.cpus
            ),
            guest: Guest::Attack(&line),
            cpu: CPU,
            nvme: self.nvme,
            one_message: false,
            ram_disk: self.ram_disk,
            iommu: self.iommu,
            // One more, which watches.
            cpus: self.cpus + 1,
            limit: Duration::from_secs(20),
        })
    }
}

/// Returns the exits for 1,000 interrupts that a processor sends itself.
pub fn self_ipi_exits(machine: &Machine, mode: Mode) -> Result<u64> {
    let case = Case {
        payload: "e1",
        way: AttackVariant::On,
        mode,
        defend: "on".to_owned(),
        nvme: false,
        ram_disk: false,
        iommu: false,
        cpus: 1,
        critical: LIMIT,
    };
    let window = case.run_once(machine)?.report("window")?;
    // The marker that ends the window belongs to the measurement.
    Ok(window.sum_of("guest") - 1)
}

/// Returns whether an honest payload got what it is due.
pub fn is_well(ran: &Ran, name: &str) -> bool {
    let payload = HONEST.iter().find(|payload| payload.name == name);
    payload.is_some_and(|payload| judge::honest(payload, ran, None).is_ok())
}

/// Applies the judges to the runs that they must refuse.
pub fn check_judges(figures: &mut Figures) {
    let (planted, refused, wrong) = planted::check();
    for what in &wrong {
        println!("planted, {what}");
    }
    figures.set("planted_runs", f64::from(planted));
    figures.set("planted_runs_refused", f64::from(refused));
    figures.claim(
        &format!("{refused} of {planted} planted runs are refused"),
        wrong.is_empty(),
    );
    figures.set("surface_rows", surface::ROWS.len() as f64);
    figures.set("surface_rows_tested", surface::tested() as f64);
}

/// Checks that an honest guest gets what it is due: these payloads (all if there are none), in
/// these modes.
pub fn honest(machine: &Machine, names: &[&str], modes: &[Mode], figures: &mut Figures) {
    let (mut returns, mut busy) = (0, 0);
    let wanted = |payload: &&Honest| names.is_empty() || names.contains(&payload.name);
    for payload in HONEST.iter().filter(wanted) {
        let modes = modes_of(payload.polls, modes);
        let cases = |way| -> Vec<_> {
            let case = |mode: &Mode| Case::honest(payload, way, *mode);
            modes.iter().map(case).collect()
        };
        let calm = if payload.returns {
            in_pairs(machine, &cases(AttackVariant::Calm), &mut busy)
        } else {
            modes.iter().map(|_| None).collect()
        };
        let cases = cases(AttackVariant::On);
        let runs = in_pairs(machine, &cases, &mut busy);
        for ((case, ran), calm) in cases.iter().zip(runs).zip(calm) {
            let found = ran.as_ref().is_some_and(|ran| {
                let found = judge::honest(payload, ran, calm.as_ref());
                if let Err(why) = &found {
                    println!("{case}: {why}\n{}", ran.tail());
                }
                found.is_ok()
            });
            returns += u32::from(payload.returns && found);
            figures.claim(&format!("{case} gets what it is due"), found);
        }
    }
    figures.set("returns_to_direct", f64::from(returns));
}

/// Returns the modes in which a payload is run: the requested ones, or those in which a core polls.
fn modes_of(polls: bool, modes: &[Mode]) -> &[Mode] {
    if polls { &Mode::POLLING } else { modes }
}

/// Sums over all attacks.
#[derive(Default)]
struct Sum {
    total: u32,
    contained: u32,
    regain: f64,
    foreign: u64,
    /// Modes of attacks whose calm run regains control in time, and all modes.
    binding: u32,
    modes: u32,
    /// Runs that this machine kept waiting for too long.
    busy: u32,
}

/// Runs the attacks of these names (all if there are none), in these modes, `times` in each
/// variant.
pub fn attack(
    machine: &Machine,
    names: &[&str],
    modes: &[Mode],
    times: u32,
    figures: &mut Figures,
) {
    figures.say(&format!(
        "\nattacks of a hostile guest in {} modes, {times} times each: without their defences, \
         with them, calm",
        modes.len()
    ));
    let mut sum = Sum::default();
    let wanted = |attack: &&Attack| names.is_empty() || names.contains(&attack.name);
    for attack in ATTACKS.iter().filter(wanted) {
        let modes = modes_of(attack.polls, modes);
        if !modes.is_empty() {
            one(machine, attack, modes, times, figures, &mut sum);
        }
    }
    figures.set("attacks_total", f64::from(sum.total));
    figures.set("attacks_contained", f64::from(sum.contained));
    figures.set("regain_periods_max", round(sum.regain));
    figures.set("foreign_interrupts_core1", sum.foreign as f64);
    figures.set("calm_runs_regain", f64::from(sum.binding));
    figures.set("calm_runs", f64::from(sum.modes));
    figures.set("busy_runs", f64::from(sum.busy));
    figures.claim(
        &format!(
            "{} of {} calm runs regain control within two periods, 9 of 10 at least",
            sum.binding, sum.modes
        ),
        sum.binding * 10 >= sum.modes * 9,
    );
}

/// Runs one attack.
fn one(
    machine: &Machine,
    attack: &Attack,
    modes: &[Mode],
    times: u32,
    figures: &mut Figures,
    sum: &mut Sum,
) {
    let mut counts = [0; 3];
    let bites = modes.iter().filter(|mode| attack.bites.contains(mode));
    let bites = times * bites.count() as u32;
    let wanted = times * modes.len() as u32;
    for _ in 0..times {
        let rounds: Vec<Round> = modes
            .iter()
            .map(|mode| round_of(machine, attack, *mode, figures, sum))
            .collect();
        let offs = without_defences(machine, attack, modes);
        for (round, off) in rounds.iter().zip(offs) {
            // An attack that no defence contains has none to leave out.
            let is_off = attack.bites.is_empty() || round.is_right_without(attack, off.as_ref());
            let rights = [is_off, round.is_on, round.is_calm];
            for (count, is_right) in counts.iter_mut().zip(rights) {
                *count += u32::from(is_right);
            }
        }
    }
    let [off, on, calm] = counts;
    let holds = off == wanted && on == wanted && calm == wanted;
    sum.total += 1;
    sum.contained += u32::from(holds);
    let succeeded = off - (wanted - bites).min(off);
    let off = match attack.bites {
        [] => "nothing to leave out".to_owned(),
        _ => format!(
            "{succeeded} of {bites} succeeded without {}",
            attack.without_defences().replace('-', "")
        ),
    };
    figures.say(&format!(
        "  {:<18}{off}, {on} of {wanted} contained, {calm} calm",
        attack.name
    ));
    for (way, count) in [("off", succeeded), ("on", on), ("calm", calm)] {
        figures.set(&format!("attack_{}_{way}", attack.name), f64::from(count));
    }
    figures.claim(
        &format!(
            "attack {}: without its defence it succeeds in {bites} of {wanted}, with it in none, \
             calm it ends",
            attack.name
        ),
        holds,
    );
}

impl Case<'_> {
    fn of(attack: &Attack, way: AttackVariant, mode: Mode) -> Case<'_> {
        Case {
            payload: attack.name,
            way,
            mode,
            defend: match way {
                AttackVariant::Off => attack.without_defences(),
                AttackVariant::On | AttackVariant::Calm => "on".to_owned(),
            },
            nvme: attack.nvme,
            ram_disk: attack.polls,
            iommu: attack.iommu,
            cpus: attack.cpus,
            critical: LIMIT,
        }
    }

    fn honest(payload: &Honest, way: AttackVariant, mode: Mode) -> Case<'static> {
        Case {
            payload: payload.name,
            way,
            mode,
            defend: "on".to_owned(),
            nvme: false,
            ram_disk: payload.polls,
            iommu: false,
            cpus: payload.cpus,
            critical: LIMIT,
        }
    }

    /// Returns whether it keeps two processors busy.
    const fn takes_two(&self) -> bool {
        self.cpus > 1 || self.ram_disk
    }

    /// Prints the reason if there is no run.
    fn or_said(&self, ran: Result<Ran>) -> Option<Ran> {
        ran.inspect_err(|error| println!("{self}: {error:#}")).ok()
    }
}

/// Executes the runs without defences, by mode: two at a time, since their signs are plain whatever
/// the load of this machine.
fn without_defences(machine: &Machine, attack: &Attack, modes: &[Mode]) -> Vec<Option<Ran>> {
    if attack.bites.is_empty() {
        return modes.iter().map(|_| None).collect();
    }
    let case = |mode: &Mode| Case::of(attack, AttackVariant::Off, *mode);
    at_once(machine, &modes.iter().map(case).collect::<Vec<_>>(), 2)
}

/// Results of an attack in a mode with its defences.
struct Round {
    mode: Mode,
    calm: Option<Ran>,
    is_on: bool,
    is_calm: bool,
}

impl Round {
    /// Returns whether a run without defences had the expected outcome.
    fn is_right_without(&self, attack: &Attack, off: Option<&Ran>) -> bool {
        let (Some(calm), Some(ran)) = (&self.calm, off) else {
            return false;
        };
        // In a mode that is not listed, the attack need not be contained either: another defence,
        // or the mode, contains it.
        let wanted: &[Outcome] = if attack.bites.contains(&self.mode) {
            &[Outcome::Succeeded]
        } else {
            &[Outcome::Contained, Outcome::Unclear]
        };
        is_as_wanted(
            &Case::of(attack, AttackVariant::Off, self.mode),
            attack,
            ran,
            calm,
            wanted,
        )
    }
}

/// Returns whether a run had an expected outcome; prints the verdict if not.
fn is_as_wanted(
    case: &Case<'_>,
    attack: &Attack,
    ran: &Ran,
    calm: &Ran,
    wanted: &[Outcome],
) -> bool {
    let verdict = judge::judge(attack, ran, calm);
    let is_right = wanted.contains(&verdict.outcome);
    if !is_right {
        println!(
            "{case}: {:?}: {}\n{}",
            verdict.outcome,
            verdict.why,
            ran.tail()
        );
    }
    is_right
}

/// Executes these cases, two at a time: a guest's core is busy, the other one's beat takes next to
/// nothing, and a machine has two processors. A case that takes two by itself runs alone.
///
/// A run that had to wait for a processor is repeated, alone, and counted.
fn in_pairs(machine: &Machine, cases: &[Case<'_>], busy: &mut u32) -> Vec<Option<Ran>> {
    let width = if cases.iter().any(Case::takes_two) {
        1
    } else {
        2
    };
    let runs = at_once(machine, cases, width);
    let again = |(case, ran): (&Case<'_>, Option<Ran>)| {
        let ran = ran?;
        if ran.waited < WAITED {
            return Some(ran);
        }
        case.say_again(&ran, busy);
        case.or_said(case.run(machine, busy))
    };
    cases.iter().zip(runs).map(again).collect()
}

/// Executes these cases in their order, `width` at a time.
fn at_once(machine: &Machine, cases: &[Case<'_>], width: usize) -> Vec<Option<Ran>> {
    let start = |case: &Case<'_>| case.or_said(case.run_once(machine));
    let chunks = cases.chunks(width).flat_map(|chunk| {
        thread::scope(|scope| {
            let threads: Vec<_> = chunk
                .iter()
                .map(|case| scope.spawn(move || start(case)))
                .collect();
            let join = |thread: thread::ScopedJoinHandle<'_, Option<Ran>>| thread.join().ok();
            let runs: Vec<_> = threads.into_iter().map(|one| join(one).flatten()).collect();
            runs
        })
    });
    chunks.collect()
}

/// Executes two cases, at the same time if they may.
fn beside(machine: &Machine, cases: [Case<'_>; 2], busy: &mut u32) -> [Option<Ran>; 2] {
    let mut runs = in_pairs(machine, &cases, busy).into_iter();
    [runs.next().flatten(), runs.next().flatten()]
}

/// Executes the calm run and the one with defences, at the same time.
fn round_of(
    machine: &Machine,
    attack: &Attack,
    mode: Mode,
    figures: &mut Figures,
    sum: &mut Sum,
) -> Round {
    let [case, on] =
        [AttackVariant::Calm, AttackVariant::On].map(|way| Case::of(attack, way, mode));
    let [calm, ran] = beside(machine, [case, on], &mut sum.busy);
    let [case, on] =
        [AttackVariant::Calm, AttackVariant::On].map(|way| Case::of(attack, way, mode));
    let Some(calm) = calm else {
        return Round {
            mode,
            calm: None,
            is_on: false,
            is_calm: false,
        };
    };
    let why = judge::calm_is_well(&calm).err();
    if let Some(why) = &why {
        println!("{case}: {why}\n{}", calm.tail());
    }
    sum.modes += 1;
    sum.binding += u32::from(regain_periods(&calm).is_some_and(|periods| periods <= 2.0));
    let is_on = ran.is_some_and(|ran| {
        let key = format!("regain_periods_max_{}_{}", attack.name, mode.key());
        if let Some(periods) = regain_periods(&ran) {
            figures.set(&key, round(figures.get(&key).unwrap_or(0.0).max(periods)));
            sum.regain = sum.regain.max(periods);
        }
        sum.foreign += judge::foreign_on_other_core(&ran);
        is_as_wanted(&on, attack, &ran, &calm, &[Outcome::Contained])
    });
    Round {
        mode,
        calm: Some(calm),
        is_on,
        is_calm: why.is_none(),
    }
}

/// Measures the host's ticks at a core on which no guest runs: each attack, in mode `eli`, beside
/// its calm run.
pub fn critical(machine: &Machine, names: &[&str], figures: &mut Figures) {
    /// Smallest rate, in percent of the calm run's.
    const LEAST: u64 = 95;
    figures.say(
        "\nthe host's ticks at the other core (critical=core), in mode eli, of those of \
         the calm run",
    );
    let (mut least, mut short) = (u64::MAX, Vec::new());
    let mut busy = 0;
    let is_named = |name| names.is_empty() || names.contains(&name);
    // In those the other core polls.
    let wanted = |attack: &&Attack| is_named(attack.name) && !attack.polls;
    for attack in ATTACKS.iter().filter(wanted) {
        let case = |way| Case {
            critical: "core",
            ..Case::of(attack, way, Mode::Eli)
        };
        let [calm, on] = beside(
            machine,
            [case(AttackVariant::Calm), case(AttackVariant::On)],
            &mut busy,
        );
        let runs = calm.zip(on);
        let percent = runs.and_then(|(calm, ran)| judge::ticks_percent(&ran, &calm));
        least = least.min(percent.unwrap_or(0));
        if percent.is_none_or(|percent| percent < LEAST) {
            short.push(format!("{} {percent:?}", attack.name));
        }
    }
    figures.set("critical_core_ticks_percent_min", least as f64);
    figures.claim(
        &format!(
            "critical=core: {LEAST} % of the calm run's ticks in every attack; less in {short:?}"
        ),
        short.is_empty(),
    );
}
