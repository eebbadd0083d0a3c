//! `exitless selftest`: whole guests, one case after the other, in one lab.
//!
//! A soak can be interrupted: what has passed is written to a journal beside the report, by name, and is not
//! run again until `--restart`, not even by a newer program: restart after a change that matters.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use super::cases::{self, Case};
use super::clients::{self, Client};
use super::payload;
use crate::run::args::IommuMode;
use crate::system::host::Host;

/// Where a soak's journal lies.
const JOURNAL: &str = "target/report/soak.journal";

/// Arguments of `exitless selftest`.
#[derive(clap::Args)]
#[command(after_help = "\
Boots stock guests on this machine's KVM if it can boot a kernel, else in the lab, and prints one line
for each case and a closing line `N passed, N failed`.

  exitless selftest
  exitless selftest --only shared        cases whose name contains `shared`
  exitless selftest --soak               the long run; goes on where it was interrupted")]
pub struct SelftestArgs {
    /// Run the long cases: the boot matrix twenty times, long I/O, 100,000 forced sleeps in each mode.
    #[arg(long)]
    soak: bool,
    /// Run only cases whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Forget what an interrupted soak has passed.
    #[arg(long)]
    restart: bool,
    /// List the cases and run none.
    #[arg(long)]
    list: bool,
    /// Forced sleeps of the native payload in a soak, in each mode.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    sleeps: u64,
}

/// Runs the cases; the status is 1 when one failed.
pub fn main(args: &SelftestArgs) -> Result<u8> {
    let (all, clients) = if args.soak {
        (cases::soak(), clients::soak())
    } else {
        (cases::quick(), clients::quick())
    };
    let wanted = |name: &str| {
        args.only
            .as_ref()
            .is_none_or(|text| name.contains(text.as_str()))
    };
    let cases: Vec<Case> = all.into_iter().filter(|case| wanted(&case.name)).collect();
    let clients: Vec<Client> = clients
        .into_iter()
        .filter(|client| wanted(&client.name))
        .collect();
    if args.list {
        for client in &clients {
            println!("{}", client.name);
        }
        for case in &cases {
            println!("{}", case.name);
        }
        return Ok(0);
    }
    let mut tally = Tally::open(args.soak, args.restart)?;
    if args.soak {
        native_payloads(args.sleeps, &wanted, &mut tally)?;
    }
    clients::run(&clients, &mut tally)?;
    let left: Vec<&Case> = cases
        .iter()
        .filter(|case| !tally.has_passed(&case.name))
        .collect();
    if !left.is_empty() {
        run(&left, &mut tally)?;
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(u8::from(tally.failed > 0))
}

fn run(cases: &[&Case], tally: &mut Tally) -> Result<()> {
    let mut host = Host::start()?;
    println!("host: {}", host.label());
    // The emulated host itself fails now and then (a vCPU's triple fault under QEMU's SVM). One case of a whole
    // run may be tried again there, and the first failure is printed; a second one fails the run.
    let mut may_retry = matches!(host, Host::Lab(_));
    for case in cases {
        let start = Instant::now();
        let mut outcome = case.run(&host);
        if let Err(error) = &outcome {
            // A guest that hung may have left the host in any state.
            let retries = std::mem::take(&mut may_retry);
            println!(
                "failed  {}{}\n{error:#}",
                case.name,
                if retries { ", once" } else { "" }
            );
            let _ = host.shutdown();
            host = Host::start()?;
            if retries {
                outcome = case
                    .run(&host)
                    .map(|seen| format!("{seen} SECOND TRY, the first failed as printed above"));
            }
        }
        tally.record(&case.name, outcome, start)?;
    }
    host.shutdown()
}

fn native_payloads(sleeps: u64, wanted: &dyn Fn(&str) -> bool, tally: &mut Tally) -> Result<()> {
    for mode in IommuMode::value_variants() {
        let mode_name = format!("{mode:?}").to_lowercase();
        let name = format!("{sleeps} forced sleeps natively lose no wake-up: {mode_name}");
        if !wanted(&name) || tally.has_passed(&name) {
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
        tally.record(&name, outcome, start)?;
    }
    Ok(())
}

/// What has passed and failed, and the journal of a soak.
pub(super) struct Tally {
    passed: usize,
    failed: usize,
    before: HashSet<String>,
    journal: Option<PathBuf>,
}

impl Tally {
    fn open(soak: bool, restart: bool) -> Result<Self> {
        let journal = soak.then(|| PathBuf::from(JOURNAL));
        let mut before = HashSet::new();
        if let Some(path) = &journal {
            if restart {
                let _ = fs::remove_file(path);
            }
            before = fs::read_to_string(path)
                .unwrap_or_default()
                .lines()
                .map(str::to_owned)
                .collect();
            if !before.is_empty() {
                println!(
                    "soak: {} cases passed before; --restart forgets them",
                    before.len()
                );
            }
        }
        Ok(Self {
            passed: before.len(),
            failed: 0,
            before,
            journal,
        })
    }

    /// Whether a soak that was interrupted has passed it.
    pub(super) fn has_passed(&self, name: &str) -> bool {
        self.before.contains(name)
    }

    /// Counts and prints; remembers what a soak has passed.
    pub(super) fn record(
        &mut self,
        name: &str,
        outcome: Result<String>,
        start: Instant,
    ) -> Result<()> {
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(seen) => {
                println!("ok      {name} ({seconds:.1} s) {seen}");
                self.passed += 1;
                if let Some(path) = &self.journal {
                    append(path, name)?;
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

fn append(path: &Path, line: &str) -> Result<()> {
    use std::io::Write;
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    }
    let mut file = fs::File::options()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("writing {}", path.display()))?;
    writeln!(file, "{line}").with_context(|| format!("writing {}", path.display()))
}
