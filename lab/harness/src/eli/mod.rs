//! `exitless-lab eli` (`make eli`): exits of an assigned device's interrupts under `exitless-hv`,
//! mode by mode, and attacks on it.
//!
//! The hypervisor takes a whole machine, so each run boots QEMU with it instead of a kernel
//! (`machine`). `modes` boots Debian's kernel and reads; `churn` changes vectors; `refusals` has
//! the configurations that it refuses; `attacks` runs the hostile guest. Counts come from the
//! hypervisor's log, and are compared with the guest's own counts: its interrupts, and its reads.
//!
//! Left out: time. The thesis's measurements of time (Table 3.2, Figure 3.4, throughput) are not
//! possible on an emulator.

mod attacks;
mod churn;
mod figures;
mod machine;
mod modes;
mod polling;
mod refusals;

use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};
use lab::packages::Version;

use churn::Churn;
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
  Two processors, and the device's interrupt moved from one to the other:
    exitless-lab eli --cpus 2
  Both kernels, rates, what moves vectors about, and the attacks (`make eli`):
    exitless-lab eli --all --reads 20000
  The four modes behind an IOMMU, beside them without:
    exitless-lab eli --iommu --reads 20000
  The attacks alone, in each mode without their defences, with them, and calm:
    exitless-lab eli --attacks
  One of them:
    exitless-lab eli --attacks --attack e3 --mode eli")]
pub struct EliArgs {
    /// The guest's processors, each on a core, and each making its part of the reads.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2), conflicts_with_all = ["attacks", "quick", "soak"])]
    cpus: u32,
    /// Only these modes.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "soak")]
    mode: Vec<Mode>,
    /// Everything: Linux 6.12 as well, exits by rate, interrupts to oneself, unbinding, resets,
    /// attacks.
    #[arg(long)]
    all: bool,
    /// The attacks alone.
    #[arg(long, conflicts_with = "all")]
    attacks: bool,
    /// The modes with the controller behind an IOMMU, and at the same time without.
    #[arg(long, conflicts_with_all = ["mode", "all", "attacks", "quick", "soak"])]
    iommu: bool,
    /// Only these of them.
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "attacks",
        value_parser = clap::builder::PossibleValuesParser::new(attacks::names()))]
    attack: Vec<String>,
    /// Modes, four attacks and what is refused, shortly: what `make test` runs.
    #[arg(long, conflicts_with_all = ["all", "attacks"])]
    quick: bool,
    /// Twenty rounds of the modes, each attack five times, and 200,000 interrupts: what
    /// `make eli-soak` runs.
    #[arg(long, conflicts_with_all = ["all", "attacks", "quick"])]
    soak: bool,
    /// Verified reads of 4 KiB in each mode.
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(100..=200_000))]
    reads: u64,
    /// Number of times that each attack is run in each mode, without its defences, with them, and
    /// calm.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
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
/// Attacks of `--quick`, in mode `eli`.
const QUICK: [&str; 4] = ["e1stack", "e3", "e2turns", "broadcast_pin"];
/// Suffix of the keys of runs with two processors, and the most reads of these that `--all` makes.
const TWO: &str = "_2cpu";
const TWO_READS: u64 = 6000;
/// Number of times that `--soak` runs each attack.
const SOAK_TIMES: u32 = 5;
/// Reads of `--soak`: so many that the share of interrupts caught behind ticks, some 600, depends
/// on the mode and not on chance.
const QUICK_READS: u64 = 10_000;
/// Pairs of runs in mode `eli` with an IOMMU and without.
const ELI_ROUNDS: u32 = 5;
/// Reads of the block function.
const POLLING_READS: u64 = 1000;
/// Computation before each read, µs: points of the thesis's Figures 3.5 and 3.6.
const RATES: [u64; 4] = [0, 300, 1000, 3000];

/// Runs what the arguments ask for; the status is 1 if a claim did not hold.
pub fn main(args: &EliArgs) -> Result<u8> {
    let start = Instant::now();
    let reads = if args.quick { QUICK_READS } else { args.reads };
    let most = if args.soak {
        200_000
    } else {
        reads.max(churn::MOVED_READS)
    };
    let machine = Machine::new(
        args.hypervisor.as_deref(),
        args.kernel,
        modes::disk_bytes(most),
    )?;
    let mut figures = Figures::new(&machine);
    if args.soak {
        soak(&machine, &mut figures)?;
    } else if args.iommu {
        beside_iommu(&machine, reads, &mut figures);
    } else {
        let polls = |mode: &Mode| Mode::POLLING.contains(mode);
        if !args.attacks && args.mode.iter().any(polls) {
            polling::compare(&machine, reads, &mut figures);
        }
        let assigns = args.mode.is_empty() || !args.mode.iter().all(polls);
        if !args.attacks && assigns {
            let suffix = if args.cpus == 1 { "" } else { TWO };
            table(&machine, args, reads, (suffix, args.cpus), &mut figures);
            if args.cpus > 1 {
                moved(&machine, args, &mut figures);
                if !args.all {
                    churn(&machine, args.cpus, &mut figures);
                }
            }
        }
        if args.all {
            let other = Machine::new(
                args.hypervisor.as_deref(),
                Some(OTHER),
                modes::disk_bytes(reads),
            )?;
            table(&other, args, reads, ("_linux_6_12", 1), &mut figures);
            beside_iommu(&machine, reads, &mut figures);
            if args.cpus == 1 {
                let reads = reads.min(TWO_READS);
                table(&machine, args, reads, (TWO, 2), &mut figures);
                moved(&machine, args, &mut figures);
            }
            rates(&machine, &mut figures);
            churn(&machine, 1, &mut figures);
            polling::compare(&machine, reads, &mut figures);
        }
        if args.all || args.quick {
            refusals(&machine, &mut figures);
        }
        if args.all || args.attacks || args.quick {
            attacks::check_judges(&mut figures);
        }
        if args.all || args.attacks {
            // Payloads that drive the block function have their own modes.
            let is_wanted = |mode: &Mode| args.mode.is_empty() || args.mode.contains(mode);
            let modes: Vec<Mode> = Mode::ALL.into_iter().filter(is_wanted).collect();
            let names: Vec<&str> = args.attack.iter().map(String::as_str).collect();
            attacks::honest(&machine, &names, &modes, &mut figures);
            attacks::attack(&machine, &names, &modes, args.times, &mut figures);
            if modes.contains(&Mode::Eli) {
                attacks::critical(&machine, &names, &mut figures);
            }
        }
        if args.quick {
            polling::compare(&machine, POLLING_READS, &mut figures);
            attacks::honest(&machine, &[], &[Mode::Eli], &mut figures);
            attacks::attack(&machine, &QUICK, &[Mode::Eli], 1, &mut figures);
        }
    }
    figures.end(&args.report, start.elapsed())
}

/// Measures the modes on one kernel.
fn table(
    machine: &Machine,
    args: &EliArgs,
    reads: u64,
    (suffix, cpus): (&str, u32),
    figures: &mut Figures,
) {
    let wanted = |mode: &Mode| args.mode.is_empty() || args.mode.contains(mode);
    let mut runs = Vec::new();
    for mode in Mode::ALL.into_iter().filter(wanted) {
        eprintln!(
            "eli: Linux {}, {reads} reads, {}{suffix}",
            machine.kernel(),
            mode.option()
        );
        let work = Work {
            reads,
            pause_us: 0,
            kernel: "",
            iommu: false,
            cpus,
        };
        let what = format!("{reads} verified reads in mode {}{suffix}", mode.option());
        runs.extend(figures.claim_ok(&what, modes::reads(machine, mode, &work)));
    }
    figures.modes(machine.kernel(), suffix, &runs);
}

/// Measures the modes with the controller behind an IOMMU, each at the same time as without:
/// effects of time are then the same.
fn beside_iommu(machine: &Machine, reads: u64, figures: &mut Figures) {
    const WITH: &str = "_iommu";
    const WITHOUT: &str = "_beside_iommu";
    let work = |iommu| Work {
        reads,
        pause_us: 0,
        kernel: "",
        iommu,
        cpus: 1,
    };
    let [mut with_iommu, mut beside] = [Vec::new(), Vec::new()];
    for mode in Mode::ALL {
        // If the remaining exits depend on phases, more than one run.
        let rounds = if mode == Mode::Eli { ELI_ROUNDS } else { 1 };
        let mut runs = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            eprintln!(
                "eli: {reads} reads, {}, with an IOMMU and without",
                mode.option()
            );
            let pair = thread::scope(|scope| {
                let without = scope.spawn(move || modes::reads(machine, mode, &work(false)));
                let with = modes::reads(machine, mode, &work(true));
                let without = without.join().unwrap_or_else(|_| bail!("it panicked"));
                [(WITH, with), (WITHOUT, without)]
            });
            for (runs, (suffix, run)) in runs.iter_mut().zip(pair) {
                let what = format!("{reads} verified reads in mode {}{suffix}", mode.option());
                runs.extend(figures.claim_ok(&what, run));
            }
        }
        let [with, without] = &runs;
        if let Some([run, other]) = figures.compare((WITH, with), (WITHOUT, without)) {
            with_iommu.push(run);
            beside.push(other);
        }
    }
    figures.modes(machine.kernel(), WITH, &with_iommu);
    figures.modes(machine.kernel(), WITHOUT, &beside);
}

/// Measures exits by the rate of interrupts, and for interrupts that the guest sends itself.
fn rates(machine: &Machine, figures: &mut Figures) {
    const READS: u64 = 1000;
    figures.say(
        "\nexits per 1,000 interrupts by what is computed before each read, all of them \
         (with ticks)",
    );
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
                iommu: false,
                cpus: 1,
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
        let exits = attacks::self_ipi_exits(machine, mode);
        if let Some(exits) = figures.claim_ok(&format!("e1 in mode {}", mode.option()), exits) {
            figures.say(&format!("  {:<12}{exits:>10}", mode.option()));
            figures.set(
                &format!("self_ipi_exits_per_1000_{}", mode.key()),
                exits as f64,
            );
        }
    }
}

/// Runs the operations that change vectors, in guests with at least `least_cpus` processors, two at
/// a time: no result depends on time.
fn churn(machine: &Machine, least_cpus: u32, figures: &mut Figures) {
    let all = churn::all().into_iter();
    let all: Vec<_> = all.filter(|(churn, _)| churn.cpus >= least_cpus).collect();
    for pair in all.chunks(2) {
        let results: Vec<_> = thread::scope(|scope| {
            let start = |(churn, mode): &(Churn, Mode)| {
                eprintln!("eli: {}, {}", churn.name, mode.option());
                let (churn, mode) = (*churn, *mode);
                scope.spawn(move || churn::run(machine, &churn, mode))
            };
            let threads: Vec<_> = pair.iter().map(start).collect();
            let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
            joined
                .map(|result| result.unwrap_or_else(|_| bail!("it panicked")))
                .collect()
        });
        for ((churn, mode), result) in pair.iter().zip(results) {
            figures.claim_ok(&format!("{}, mode {}", churn.name, mode.option()), result);
        }
    }
}

/// Checks moves of the device's interrupt from one of two processors to the other.
fn moved(machine: &Machine, args: &EliArgs, figures: &mut Figures) {
    let wanted = |mode: &Mode| args.mode.is_empty() || args.mode.contains(mode);
    let (mut lost, mut moves) = (0, 0);
    for mode in Mode::ALL.into_iter().filter(wanted) {
        let iommu = mode == Mode::Eli;
        eprintln!("eli: affinity moved under load, {}", mode.option());
        let what = format!(
            "the device's interrupt moved {} times or more under load, mode {}",
            churn::MOVES,
            mode.option()
        );
        if let Some(moved) = figures.claim_ok(&what, churn::moved(machine, mode, iommu)) {
            figures.say(&format!(
                "  affinity moved {} times in mode {}: {:?} interrupts by processor, {} lost or \
                 double",
                moved.moves,
                mode.option(),
                moved.by_cpu,
                moved.lost_or_double
            ));
            figures.claim(
                &format!("{what}: none is lost or double"),
                moved.lost_or_double == 0,
            );
            lost += moved.lost_or_double;
            moves += moved.moves;
        }
    }
    figures.set("affinity_moves", moves as f64);
    figures.set("affinity_lost_or_double", lost as f64);
}

/// Checks that the hypervisor refuses what it does not support.
fn refusals(machine: &Machine, figures: &mut Figures) {
    for refusal in &refusals::REFUSALS {
        eprintln!("eli: {}", refusal.what);
        let checked = refusals::check(machine, refusal);
        figures.claim_ok(&format!("{} is refused", refusal.what), checked);
    }
    let ran = refusals::without_device(machine);
    figures.claim_ok("without a device there is injection", ran);
}

/// Runs twenty rounds, and 200,000 interrupts in one.
fn soak(machine: &Machine, figures: &mut Figures) -> Result<()> {
    const ROUNDS: u32 = 20;
    for round in 1..=ROUNDS {
        eprintln!("eli: round {round} of {ROUNDS}");
        let work = Work {
            reads: 2000,
            pause_us: 0,
            kernel: "",
            iommu: false,
            cpus: 1,
        };
        let runs: Vec<_> = Mode::ALL
            .into_iter()
            .filter_map(|mode| {
                let what = format!("round {round}: 2,000 reads in mode {}", mode.option());
                figures.claim_ok(&what, modes::reads(machine, mode, &work))
            })
            .collect();
        figures.modes(machine.kernel(), &format!("_round_{round}"), &runs);
    }
    attacks::check_judges(figures);
    attacks::honest(machine, &[], &Mode::ALL, figures);
    attacks::attack(machine, &[], &Mode::ALL, SOAK_TIMES, figures);
    attacks::critical(machine, &[], figures);
    let long = Work {
        reads: 200_000,
        pause_us: 0,
        kernel: "",
        iommu: false,
        cpus: 1,
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
