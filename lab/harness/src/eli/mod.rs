//! `exitless-lab eli` (`make eli`): exits of an assigned device's interrupts under `exitless-hv`, mode by mode, and attacks on it.
//!
//! The hypervisor is a machine's own, so each run boots QEMU with it instead of a kernel (`machine`). `modes` boots Debian's kernel
//! and reads; `churn` moves vectors about; `refusals` is what it cannot do; `attacks` runs the hostile guest. Counts come from the hypervisor's log, and are held
//! against what the guest counted: its interrupts, and what it read.
//!
//! Left out: time. What the thesis measures in time (Table 3.2, Figure 3.4, throughput) an emulator cannot show.

mod attacks;
mod churn;
mod figures;
mod machine;
mod modes;
mod refusals;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use lab::packages::Version;

use attacks::{ATTACKS, Attack, CONFORMANCE, Outcome, Way};
use figures::{Figures, round};
use machine::Machine;
use modes::{Mode, Work};

/// Arguments of `exitless-lab eli`.
#[derive(clap::Args)]
#[command(after_long_help = "\
Boots a stock Debian kernel with an NVMe controller under the micro-hypervisor exitless-hv, in QEMU, and counts what exits while it \
reads: without ELI, with delivery, with completion, and with the local APIC's timer the guest's own. Needs no KVM.

Examples:
  The four modes, 2,000 reads each:
    exitless-lab eli
  One of them:
    exitless-lab eli --mode eli
  Both kernels, rates, what moves vectors about, and the attacks (`make eli`):
    exitless-lab eli --all --reads 20000
  The attacks alone, each 5 times without its defence and 5 times with it:
    exitless-lab eli --attacks")]
pub struct EliArgs {
    /// Only these modes.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with_all = ["attacks", "soak"])]
    mode: Vec<Mode>,
    /// Everything: Linux 6.12 as well, exits by rate, interrupts to oneself, unbinding, resets, attacks.
    #[arg(long)]
    all: bool,
    /// The attacks alone.
    #[arg(long, conflicts_with = "all")]
    attacks: bool,
    /// Modes, three attacks and what is refused, shortly: what `make test` runs.
    #[arg(long, conflicts_with_all = ["all", "attacks"])]
    quick: bool,
    /// Twenty rounds of the modes and of three attacks, and 200,000 interrupts: what `make eli-soak` runs.
    #[arg(long, conflicts_with_all = ["all", "attacks", "quick"])]
    soak: bool,
    /// Verified reads of 4 KiB in each mode.
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(100..=200_000))]
    reads: u64,
    /// How often each attack is run, with its defence and without.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    times: u32,
    /// Series of the guest's kernel, for example 6.12 [default: the distribution's]
    #[arg(long, value_name = "SERIES")]
    kernel: Option<Version>,
    /// The hypervisor [default: the exitless-hv beside this program]
    #[arg(long, value_name = "IMAGE")]
    hypervisor: Option<PathBuf>,
    /// Where the figures go, as one JSON object.
    #[arg(long, value_name = "FILE", default_value = "target/report/eli.json")]
    pub report: PathBuf,
}

/// The second kernel of `--all`.
const OTHER: Version = Version::new(6, 12);
/// Attacks of `--quick` and `--soak`.
const QUICK: [&str; 3] = ["e3", "e6", "gate"];
/// Its reads: so many that what is caught behind ticks, some 600 interrupts, is a matter of the mode and not of luck.
const QUICK_READS: u64 = 10_000;
/// Computed before each read, µs: points of the thesis's Figures 3.5 and 3.6.
const RATES: [u64; 4] = [0, 300, 1000, 3000];

/// Runs what was asked for; the status is 1 when something did not hold.
pub fn main(args: &EliArgs) -> Result<u8> {
    let start = Instant::now();
    let reads = if args.quick { QUICK_READS } else { args.reads };
    let most = if args.soak { 200_000 } else { reads };
    let machine = Machine::new(
        args.hypervisor.as_deref(),
        args.kernel,
        modes::disk_bytes(most),
    )?;
    let mut figures = Figures::new(&machine);
    if args.soak {
        soak(&machine, &mut figures)?;
    } else {
        if !args.attacks {
            table(&machine, args, reads, "", &mut figures);
        }
        if args.all {
            let other = Machine::new(
                args.hypervisor.as_deref(),
                Some(OTHER),
                modes::disk_bytes(reads),
            )?;
            table(&other, args, reads, "_linux_6_12", &mut figures);
            rates(&machine, &mut figures);
            churn(&machine, &mut figures);
        }
        if args.all || args.quick {
            refusals(&machine, &mut figures);
        }
        if args.all || args.attacks || args.quick {
            conformance(&machine, &mut figures);
        }
        if args.all || args.attacks {
            attack(&machine, &ATTACKS, args.times, &mut figures);
        }
        if args.quick {
            let some: Vec<&Attack> = ATTACKS
                .iter()
                .filter(|one| QUICK.contains(&one.name))
                .collect();
            attack(&machine, some, 1, &mut figures);
        }
    }
    figures.end(&args.report, start.elapsed())
}

/// The modes on one kernel.
fn table(machine: &Machine, args: &EliArgs, reads: u64, suffix: &str, figures: &mut Figures) {
    let wanted = |mode: &Mode| args.mode.is_empty() || args.mode.contains(mode);
    let mut runs = Vec::new();
    for mode in Mode::ALL.into_iter().filter(wanted) {
        eprintln!(
            "eli: Linux {}, {reads} reads, {}",
            machine.kernel(),
            mode.option()
        );
        let work = Work {
            reads,
            pause_us: 0,
            kernel: "",
        };
        let what = format!("{reads} verified reads in mode {}{suffix}", mode.option());
        runs.extend(figures.claim_ok(&what, modes::reads(machine, mode, &work)));
    }
    figures.modes(machine.kernel(), suffix, &runs);
}

/// Exits by the rate of interrupts, and for interrupts that the guest sends itself.
fn rates(machine: &Machine, figures: &mut Figures) {
    const READS: u64 = 1000;
    figures.say("\nexits per 1,000 interrupts by what is computed before each read, all of them (with ticks)");
    for mode in [Mode::Baseline, Mode::Delivery, Mode::Eli] {
        let mut line = format!("  {:<12}", mode.option());
        for pause_us in RATES {
            eprintln!(
                "eli: {READS} reads, {pause_us} us before each, {}",
                mode.option()
            );
            let work = Work {
                reads: READS,
                pause_us,
                kernel: "",
            };
            let what = format!(
                "reads with {pause_us} us before each, mode {}",
                mode.option()
            );
            if let Some(run) = figures.claim_ok(&what, modes::reads(machine, mode, &work)) {
                let all = run.exits as f64 * 1000.0 / READS as f64;
                line.push_str(&format!("{all:>10.0} at {pause_us} us"));
                figures.set(
                    &format!("exits_per_1000_{}_{pause_us}us", mode.key()),
                    round(all),
                );
                figures.set(
                    &format!("interrupts_per_s_{}_{pause_us}us", mode.key()),
                    (READS * 1000 / run.ms.max(1)) as f64,
                );
            }
        }
        figures.say(&line);
    }
    figures
        .say("\nexits per 1,000 interrupts to oneself: the command itself, delivery, completion");
    for mode in [Mode::Baseline, Mode::Eli] {
        let ran = attacks::run(machine, "e1", Way::On, mode.option())
            .and_then(|ran| ran.report("window"));
        if let Some(window) = figures.claim_ok(&format!("e1 in mode {}", mode.option()), ran) {
            let exits = window.sum_of("guest") - 1;
            figures.say(&format!("  {:<12}{exits:>10}", mode.option()));
            figures.set(
                &format!("self_ipi_exits_per_1000_{}", mode.key()),
                exits as f64,
            );
        }
    }
}

/// What moves vectors about.
fn churn(machine: &Machine, figures: &mut Figures) {
    for (churn, mode) in churn::all() {
        eprintln!("eli: {}, {}", churn.name, mode.option());
        figures.claim_ok(
            &format!("{}, mode {}", churn.name, mode.option()),
            churn::run(machine, &churn, mode),
        );
    }
}

/// What it cannot do it refuses.
fn refusals(machine: &Machine, figures: &mut Figures) {
    for refusal in &refusals::REFUSALS {
        eprintln!("eli: {}", refusal.what);
        let checked = refusals::check(machine, refusal);
        figures.claim_ok(&format!("{} is refused", refusal.what), checked);
    }
    let ran = refusals::without_device(machine);
    figures.claim_ok("without a device there is injection", ran);
}

/// An honest guest gets what it is due.
fn conformance(machine: &Machine, figures: &mut Figures) {
    for payload in CONFORMANCE {
        let ran = attacks::run(machine, payload, Way::On, "eli");
        if let Some(ran) = figures.claim_ok(&format!("{payload} ran"), ran) {
            let conforms = attacks::conforms(&ran, payload);
            if !conforms {
                println!("{}", ran.tail());
            }
            figures.claim(&format!("{payload} conforms"), conforms);
        }
    }
}

/// Attacks, `times` without and with the defences, and once calm.
fn attack<'a>(
    machine: &Machine,
    attacks: impl IntoIterator<Item = &'a Attack>,
    times: u32,
    figures: &mut Figures,
) {
    figures.say(&format!(
        "\nattacks of a hostile guest, each {times} times (payloads of one attack together)"
    ));
    let (mut total, mut contained) = (0, 0);
    for attack in attacks {
        let mut counts = [0; 3];
        let mut wanted = 0;
        for payload in attack.payloads {
            wanted += times;
            for (way, expected) in [
                (Way::Off, Outcome::Succeeded),
                (Way::On, Outcome::Contained),
                (Way::Calm, Outcome::Contained),
            ] {
                let rounds = if way == Way::Calm { 1 } else { times };
                for _ in 0..rounds {
                    eprintln!("eli: attack {payload}, {way:?}");
                    let is_right = |ran: &machine::Ran| match way {
                        Way::Calm => attacks::is_done(ran),
                        _ => attacks::judge(ran, payload) == expected,
                    };
                    match attacks::run(machine, payload, way, "eli") {
                        Ok(ran) if is_right(&ran) => counts[way as usize] += 1,
                        Ok(ran) => println!("{payload}, {way:?}: not {expected:?}\n{}", ran.tail()),
                        Err(error) => println!("{payload}, {way:?}: {error:#}"),
                    }
                }
            }
        }
        let [off, on, calm] = counts;
        total += 1;
        let calm_wanted = attack.payloads.len() as u32;
        let holds = off == wanted && on == wanted && calm == calm_wanted;
        contained += u32::from(holds);
        figures.say(&format!(
            "  {:<6}{off:>3} of {wanted} succeeded undefended, {on:>3} of {wanted} contained: {}",
            attack.name, attack.what
        ));
        figures.set(&format!("attack_{}_off", attack.name), f64::from(off));
        figures.set(&format!("attack_{}_on", attack.name), f64::from(on));
        figures.claim(
            &format!(
                "attack {}: undefended it succeeds, defended it does not, calm it ends",
                attack.name
            ),
            holds,
        );
    }
    figures.set("attacks_total", f64::from(total));
    figures.set("attacks_contained", f64::from(contained));
}

/// Twenty rounds, and 200,000 interrupts in one.
fn soak(machine: &Machine, figures: &mut Figures) -> Result<()> {
    const ROUNDS: u32 = 20;
    for round in 1..=ROUNDS {
        eprintln!("eli: round {round} of {ROUNDS}");
        let work = Work {
            reads: 2000,
            pause_us: 0,
            kernel: "",
        };
        let runs: Vec<_> = Mode::ALL
            .into_iter()
            .filter_map(|mode| {
                let what = format!("round {round}: 2,000 reads in mode {}", mode.option());
                figures.claim_ok(&what, modes::reads(machine, mode, &work))
            })
            .collect();
        figures.modes(machine.kernel(), &format!("_round_{round}"), &runs);
        let some: Vec<&Attack> = ATTACKS
            .iter()
            .filter(|one| QUICK.contains(&one.name))
            .collect();
        attack(machine, some, 1, figures);
    }
    let long = Work {
        reads: 200_000,
        pause_us: 0,
        kernel: "",
    };
    let runs: Vec<_> = figures
        .claim_ok(
            "200,000 reads in mode eli",
            modes::reads(machine, Mode::Eli, &long),
        )
        .into_iter()
        .collect();
    figures.modes(machine.kernel(), "_long", &runs);
    Ok(())
}
