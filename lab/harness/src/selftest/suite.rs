//! `exitless-lab selftest`: whole guests, in as many labs side by side as this machine has room
//! for.
//!
//! Each lab has a thread, which takes the next case when it has finished one: a guest's boot keeps
//! one emulated processor busy, so a single lab would leave the other processors of this machine
//! idle. Cases that measure time run alone, at the end. Clients of the daemon need no lab, and a
//! Debian has one of its own; any free thread runs them.
//!
//! A soak can be interrupted: cases that passed are written to a [journal](super::journal), by
//! name, and are not run again by the same program with the same options, until all have passed.

use std::collections::VecDeque;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow, bail};
use clap::ValueEnum;
use lab::LabError;
use lab::packages::{Debian, Version};

use super::case::Case;
use super::cases;
use super::clients::{self, Client, Ran};
use super::debian::{self, DebianCase};
use super::episodes;
use super::journal::Journal;
use super::payload;
use super::payload::RegisterMode;
use super::verdicts::Verdicts;
use crate::system::host::{Host, Kernels};

/// Memory that a lab needs here, KiB: its own, and QEMU's for translated code.
const LAB_KIB: usize = 4 << 20;

/// Number of cases after which a lab is replaced: about those of one self-test, of up to three
/// guests each. QEMU then need not discard translated code while a guest runs, which may break the
/// guest (lab/README.md). This machine's own KVM is not replaced.
const LAB_CASES: usize = 10;

/// Number of cases for each one that may be [repeated](Tally::may_repeat), after the first.
const CASES_PER_REPEAT: usize = 25;

/// Arguments of `exitless-lab selftest`.
#[derive(clap::Args)]
#[command(after_long_help = "\
Boots stock guests on this machine's KVM if it can boot a kernel, else in the lab, and prints one line for each case and a closing \
line `N passed, N failed`.

Examples:
  All short cases:
    exitless-lab selftest
  Cases whose name contains `shared`, and which there are:
    exitless-lab selftest --only shared
    exitless-lab selftest --list
  In a lab whose host and guests run Linux 6.12:
    exitless-lab selftest --kernel 6.12
  The long run, which goes on where it was interrupted:
    exitless-lab selftest --soak
  A stock Debian in place of all others; with --soak, oftener:
    exitless-lab selftest --debian
  Other people's programs on `exitless serve`, all of them, with what was verified as a file:
    exitless-lab selftest --clients --report clients.json
  Storage that misbehaves, at random, in place of all others; and the boot of one seed again:
    exitless-lab selftest --episodes 50
    exitless-lab selftest --episodes 1 --seed 17")]
pub struct SelftestArgs {
    /// Run the long cases: twenty times all of the short ones, long I/O, 100,000 forced sleeps in
    /// each mode.
    #[arg(long)]
    soak: bool,
    /// Run the cases of a stock Debian 12 and no others: systemd, the generic kernel, its root on a
    /// disk behind VT-d or a virtio-iommu. The root is made once, of the machine's own Debian
    /// packages (scripts/setup.sh debian; 2 GB in the lab's cache)
    #[arg(long, conflicts_with = "kernel")]
    debian: bool,
    /// Run other people's programs on `exitless serve` and no other cases: those of --soak but for
    /// the longest
    #[arg(long, conflicts_with_all = ["debian", "episodes", "soak", "kernel"])]
    clients: bool,
    /// Write what came of such programs: verdicts, reasons, pings lost and other figures (JSON)
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Run so many random episodes of storage that misbehaves (in the lab), a few in each boot of a
    /// guest, and no other cases
    #[arg(long, value_name = "N", conflicts_with = "debian",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1_000_000))]
    episodes: Option<usize>,
    /// The first boot's seed; each boot has the next one
    #[arg(long, value_name = "S", default_value_t = 1, requires = "episodes")]
    seed: u64,
    /// Run only cases whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Take TEXT for a whole name.
    #[arg(long, requires = "only")]
    exact: bool,
    /// Forget what an interrupted soak has passed.
    #[arg(long)]
    restart: bool,
    /// List the cases and run none.
    #[arg(long)]
    list: bool,
    /// Run in labs whose kernel, and their guests', is of this series, for example 6.12 [default:
    /// this machine's KVM, or a lab with the distribution's kernel]
    #[arg(long, value_name = "SERIES")]
    kernel: Option<Version>,
    /// Labs at once [default: one for each processor, as far as memory goes, 4 at most]
    #[arg(long, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=16))]
    jobs: Option<usize>,
    /// Forced sleeps of the native payload in a soak, in each mode.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    sleeps: u64,
}

impl SelftestArgs {
    /// Returns the options that decide which cases a soak has, and how each of them runs.
    fn soak_options(&self) -> String {
        format!(
            "debian {} episodes {:?} seed {} only {:?} exact {} kernel {:?} sleeps {}",
            self.debian, self.episodes, self.seed, self.only, self.exact, self.kernel, self.sleeps
        )
    }
}

/// Runs the cases; the status is 1 if one failed.
pub fn main(args: &SelftestArgs) -> Result<u8> {
    let boots = args.episodes.map(|count| episodes::plans(args.seed, count));
    let (all, clients, debians) = match (args.debian, args.soak) {
        _ if boots.is_some() => (
            episodes::cases(boots.as_deref().unwrap_or_default()),
            Vec::new(),
            Vec::new(),
        ),
        _ if args.clients => (Vec::new(), clients::verified(), Vec::new()),
        (true, true) => (Vec::new(), Vec::new(), debian::soak()),
        (true, false) => (Vec::new(), Vec::new(), debian::quick()),
        (false, true) => (cases::soak(), clients::soak(), Vec::new()),
        (false, false) => (cases::quick(), clients::quick(), Vec::new()),
    };
    let all = all.into_iter().map(|case| case.on(args.kernel));
    let wanted = |name: &str| {
        args.only.as_ref().is_none_or(|text| match args.exact {
            true => name == text,
            false => name.contains(text.as_str()),
        })
    };
    let jobs = clients
        .into_iter()
        .map(Job::Client)
        .chain(debians.into_iter().map(Job::Debian))
        .chain(all.map(Job::Case));
    let (jobs, others): (Vec<Job>, Vec<Job>) = jobs.partition(|job| wanted(job.name()));
    let native = match args.soak && !args.debian && boots.is_none() {
        true => native_names(args.sleeps),
        false => Vec::new(),
    };
    let is_native = native.iter().any(|(_, name)| wanted(name));
    if jobs.is_empty() && !is_native {
        let text = args.only.as_deref().unwrap_or_default();
        let natives = native.iter().map(|(_, name)| name.as_str());
        return Err(nothing_selected(
            text,
            natives.chain(others.iter().map(Job::name)),
        ));
    }
    if args.list {
        for (_, name) in native.iter().filter(|(_, name)| wanted(name)) {
            println!("{name}");
        }
        for job in &jobs {
            println!("{}", job.name());
        }
        return Ok(0);
    }
    let mut tally = Tally::open(args)?;
    native_payloads(&native, args.sleeps, &wanted, &mut tally)?;
    let jobs: Vec<Job> = jobs
        .into_iter()
        .filter(|job| !tally.has_passed(job.name()))
        .collect();
    let tally = Mutex::new(tally);
    if !jobs.is_empty() {
        run(jobs, args, &tally)?;
    }
    let tally = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(boots) = &boots {
        println!("{}", episodes::tally(boots));
    }
    if let Some(summary) = tally.verdicts.summary() {
        println!("{summary}");
    }
    if let Some(path) = &args.report {
        tally.verdicts.write(path)?;
        println!("written: {}", path.display());
    }
    tally.close()?;
    if !tally.repeated.is_empty() {
        let names = tally.repeated.join("; ");
        println!("run again, since the emulator may have ended them: {names}");
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(u8::from(tally.failed > 0))
}

/// Returns the error of a selection that matches no name.
fn nothing_selected<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> anyhow::Error {
    let names: Vec<&str> = names.collect();
    anyhow!(
        "--only {text:?} selects no case (--soak, --debian and --episodes have others); there \
         are\n  {}",
        names.join("\n  ")
    )
}

/// Job that a thread takes.
enum Job {
    Client(Client),
    Debian(DebianCase),
    Case(Case),
}

impl Job {
    fn name(&self) -> &str {
        match self {
            Self::Client(client) => &client.name,
            Self::Debian(debian) => &debian.name,
            Self::Case(case) => &case.name,
        }
    }

    fn is_alone(&self) -> bool {
        matches!(self, Self::Case(case) if case.is_alone)
    }

    fn is_long(&self) -> bool {
        matches!(self, Self::Case(case) if case.is_long)
    }
}

/// Returns the number of labs at the same time: one for each processor, 4 at most, and as many as
/// there is memory for.
fn room(kernel: Option<Version>) -> usize {
    if kernel.is_none() && !Host::is_lab() {
        // Guests share one directory, where their files have the same names.
        return 1;
    }
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok())
        .unwrap_or(0);
    let processors = thread::available_parallelism().map_or(1, usize::from);
    processors.min(kib / LAB_KIB).clamp(1, 4)
}

fn run(jobs: Vec<Job>, args: &SelftestArgs, tally: &Mutex<Tally>) -> Result<()> {
    let threads = args.jobs.unwrap_or_else(|| room(args.kernel));
    let (alone, mut together): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(Job::is_alone);
    // Stable: the others keep their order.
    together.sort_by_key(|job| !job.is_long());
    let shared = Shared {
        jobs: Mutex::new(together.into()),
        guest_files: OnceLock::new(),
        debian: OnceLock::new(),
        kernel: args.kernel,
        tally,
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| scope.spawn(|| shared.work()))
            .collect();
        workers.into_iter().try_for_each(|worker| {
            let ended = worker.join();
            ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    *locked(&shared.jobs) = alone.into();
    shared.work()
}

/// State shared by the threads. No lock is held while another is taken, nor while a job runs.
struct Shared<'a> {
    jobs: Mutex<VecDeque<Job>>,
    /// Files that clients boot; made by the first that needs them.
    guest_files: OnceLock<Result<PathBuf, String>>,
    /// Root that cases of Debian copy; likewise.
    debian: OnceLock<Result<Debian, LabError>>,
    /// Kernel series of labs and their guests, if not the distribution's.
    kernel: Option<Version>,
    tally: &'a Mutex<Tally>,
}

impl Shared<'_> {
    /// Runs jobs until there are none, [`LAB_CASES`] in a lab unless one fails.
    fn work(&self) -> Result<()> {
        let mut host: Option<Host> = None;
        let mut kernels = Kernels::default();
        let mut cases = 0;
        loop {
            let job = locked(&self.jobs).pop_front();
            let start = Instant::now();
            match job {
                None => break,
                Some(Job::Client(client)) => {
                    let files = self.guest_files.get_or_init(clients::guest_files);
                    let ran = clients::run(&client, files.as_ref());
                    let seconds = start.elapsed().as_secs_f64();
                    locked(self.tally).verdicts.add(&client.name, &ran, seconds);
                    self.note(&client.name, ran, start)?;
                }
                Some(Job::Debian(debian)) => {
                    let root = self.debian.get_or_init(debian::root);
                    let ran = match root {
                        Ok(root) => debian.run(root),
                        Err(error) => Err(anyhow!("{error}")),
                    };
                    self.note(&debian.name, ran, start)?;
                }
                Some(Job::Case(case)) => {
                    let wanted = case.kernels(self.kernel);
                    if wanted != kernels
                        && let Some(lab) = host.take()
                    {
                        lab.shutdown()?;
                    }
                    kernels = wanted;
                    let lab = match host.take() {
                        Some(lab) => lab,
                        None => {
                            let lab = Host::start_with_kernels(wanted)?;
                            lab.note_shutdowns()?;
                            cases = 0;
                            lab
                        }
                    };
                    cases += 1;
                    let outcome = match case.run(&lab) {
                        Ok(seen) => {
                            if cases == LAB_CASES && matches!(lab, Host::Lab(_)) {
                                lab.shutdown()?;
                            } else {
                                host = Some(lab);
                            }
                            Ok(seen)
                        }
                        Err(error) => {
                            let noted = lab.noted();
                            // A guest that hung may have left the lab in any state, or it may be
                            // dead.
                            let _ = lab.shutdown();
                            let error = anyhow!("{error:#}\n{}", noted.text);
                            if let Some(suspicion) = noted.suspicion
                                && locked(self.tally).may_repeat(&case.name)
                            {
                                println!(
                                    "again   {}: {suspicion}, which may be the emulator's doing\n\
                                     {error:#}",
                                    case.name
                                );
                                locked(&self.jobs).push_front(Job::Case(case));
                                continue;
                            }
                            Err(error)
                        }
                    };
                    self.record(&case.name, outcome, start)?;
                }
            }
        }
        host.map_or(Ok(()), Host::shutdown)
    }

    /// Records a job that ran, and prints the error of one that could not.
    fn note(&self, name: &str, ran: Result<Ran>, start: Instant) -> Result<()> {
        let outcome = match ran {
            Ok(Ran::Skipped(reason)) => {
                println!("skipped {name}: {reason}");
                return Ok(());
            }
            Ok(Ran::Passed(seen)) => Ok(seen),
            Err(error) => Err(error),
        };
        self.record(name, outcome, start)
    }

    fn record(&self, name: &str, outcome: Result<String>, start: Instant) -> Result<()> {
        locked(self.tally).record(name, outcome, start)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves its value whole, even if it panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the names of the payloads that run on this machine's KVM.
fn native_names(sleeps: u64) -> Vec<(RegisterMode, String)> {
    let modes = RegisterMode::value_variants().iter();
    modes
        .map(|mode| {
            let word = format!("{mode:?}").to_lowercase();
            let name = format!("{sleeps} forced sleeps natively lose no wake-up: {word}");
            (*mode, name)
        })
        .collect()
}

fn native_payloads(
    names: &[(RegisterMode, String)],
    sleeps: u64,
    wanted: &dyn Fn(&str) -> bool,
    tally: &mut Tally,
) -> Result<()> {
    for (mode, name) in names {
        if !wanted(name) || tally.has_passed(name) {
            continue;
        }
        if let Err(reason) = payload::supported(*mode) {
            println!("skipped {name}: {:#}", anyhow::Error::from(reason));
            continue;
        }
        let start = Instant::now();
        let outcome = payload::run(*mode, sleeps).and_then(|report| {
            if report.lost > 0 {
                bail!("a wake-up was lost\n{report}");
            }
            Ok(report.to_string())
        });
        tally.record(name, outcome, start)?;
    }
    Ok(())
}

/// Counts of passed and failed cases, and the journal of a soak.
struct Tally {
    passed: usize,
    failed: usize,
    /// Cases that were run a second time.
    repeated: Vec<String>,
    /// Verdicts on clients of the daemon.
    verdicts: Verdicts,
    journal: Option<Journal>,
}

impl Tally {
    fn open(args: &SelftestArgs) -> Result<Self> {
        let journal = match args.soak {
            true => Some(Journal::open(&args.soak_options(), args.restart)?),
            false => None,
        };
        let passed = journal.as_ref().map_or(0, Journal::len);
        if passed > 0 {
            println!("soak: {passed} cases passed before; --restart forgets them");
        }
        Ok(Self {
            passed,
            failed: 0,
            repeated: Vec::new(),
            verdicts: Verdicts::default(),
            journal,
        })
    }

    /// Returns whether a case is run once more whose guest ended in the way in which the emulator
    /// occasionally ends guests: no case twice, and no more than one in [`CASES_PER_REPEAT`], which
    /// exceeds the emulator's rate. A fault of the product with the same symptom is reported by the
    /// next such case.
    fn may_repeat(&mut self, name: &str) -> bool {
        let ended = self.passed + self.failed;
        let may = self.repeated.len() <= ended / CASES_PER_REPEAT
            && !self.repeated.iter().any(|other| other == name);
        if may {
            self.repeated.push(name.to_owned());
        }
        may
    }

    /// Returns whether an interrupted soak has passed it.
    fn has_passed(&self, name: &str) -> bool {
        let journal = self.journal.as_ref();
        journal.is_some_and(|journal| journal.contains(name))
    }

    /// Notes that all cases have run. The next soak starts from the beginning if none failed.
    fn close(&self) -> Result<()> {
        match &self.journal {
            Some(journal) if self.failed == 0 => journal.clear(),
            _ => Ok(()),
        }
    }

    /// Counts and prints an outcome; adds a soak's passed case to the journal.
    fn record(&mut self, name: &str, outcome: Result<String>, start: Instant) -> Result<()> {
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(seen) => {
                println!("ok      {name} ({seconds:.1} s) {seen}");
                self.passed += 1;
                if let Some(journal) = &mut self.journal {
                    journal.add(name)?;
                }
            }
            Err(error) => {
                println!("FAILED  {name} ({seconds:.1} s)\n{error:#}");
                self.failed += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_run_again_once_and_few_are() {
        let mut tally = Tally {
            passed: 0,
            failed: 0,
            repeated: Vec::new(),
            verdicts: Verdicts::default(),
            journal: None,
        };
        assert!(tally.may_repeat("one"), "the first");
        assert!(!tally.may_repeat("one"), "it has been");
        assert!(!tally.may_repeat("two"), "too many");
        (tally.passed, tally.failed) = (CASES_PER_REPEAT - 1, 1);
        assert!(!tally.may_repeat("one"), "it has been");
        assert!(tally.may_repeat("two"));
        assert!(!tally.may_repeat("three"), "too many");
    }

    /// Renamed cases, found an hour into a soak otherwise.
    #[test]
    fn names_selected_by_the_soak_exist() {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/soak.sh");
        let script = fs::read_to_string(script).expect("the script is there");
        let selections = script.split("--only '").skip(1);
        let selections: Vec<_> = selections
            .filter_map(|rest| rest.split('\'').next())
            .collect();
        assert!(selections.len() >= 2, "{selections:?}");
        let cases = cases::soak();
        for text in selections {
            let is_there = cases.iter().any(|case| case.name.contains(text));
            assert!(is_there, "no case of the soak is named {text:?}");
        }
    }
}
