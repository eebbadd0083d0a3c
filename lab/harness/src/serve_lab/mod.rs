//! `exitless-lab serve-lab` (`make bench-serve-lab`): exits per request of stock guests whose disks
//! one sidecore of another process serves, by cause, polling against notifying, for 1, 2, 4 and 7
//! guests.
//!
//! Each round starts a daemon with a RAM disk for each guest, boots the guests one after the other,
//! stops each (SIGSTOP) when it is ready, and resumes all at once, so that their measured reads run
//! side by side. Each guest then checks the data that it wrote before. Exits are from each guest's
//! own ledger; interrupts, the timer's among them, have a column of their own: the device does not
//! influence them. The daemon's counters of kicks and calls cover its whole run, boots included.
//!
//! Counts only: time in the lab is not meaningful.

mod figures;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::demo::PerIo;
use crate::system::daemon::{DaemonPlan, Totals};
use crate::system::guest::{Guest, Mode, RunningGuest};
use crate::system::host::Host;
use figures::{Figures, Round};

/// Arguments of `exitless-lab serve-lab`.
#[derive(clap::Args)]
pub struct ServeLabArgs {
    /// Where the figures go, as one JSON object.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/serve-lab.json"
    )]
    pub report: PathBuf,
    /// Number of guests that share the sidecore, a round for each number.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 7],
          value_parser = clap::value_parser!(u32).range(1..=7))]
    guests: Vec<u32>,
    /// Measured reads of each guest; 100 more come before them to warm up.
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    reads: u32,
}

/// Policies of an idle daemon, by the values of its `--idle`: keep polling, or sleep at once and be
/// notified.
const POLICIES: [&str; 2] = ["poll", "sleep"];
/// Memory of the emulated host: seven guests touch about 100 MiB each.
const LAB_MEMORY_MIB: u32 = 4096;
/// Bytes of a disk that its guest writes and checks.
const PATTERN: u32 = 1 << 20;
const READY: &str = "ready for the window";

/// Runs all rounds; the status is 1 if a guest read wrong data.
pub fn main(args: &ServeLabArgs) -> Result<u8> {
    let start = Instant::now();
    let mut figures = None;
    for guests in &args.guests {
        // A lab for each, so that leftovers of a round (translated code, memory) do not affect the
        // next one.
        let host = Host::start_with_memory(LAB_MEMORY_MIB)?;
        let figures = match &mut figures {
            Some(figures) => figures,
            None => figures.insert(Figures::new(&host, args.reads)?),
        };
        for idle in POLICIES {
            eprintln!("serve-lab: {guests} guests, the sidecore's idle policy is {idle}");
            let round = round(&host, idle, *guests, args.reads)
                .with_context(|| format!("{guests} guests, --idle {idle}"))?;
            figures.add(idle, *guests, &round);
        }
        host.shutdown()?;
        // Figures measured so far are kept if a later round fails.
        figures.set("wall_s", start.elapsed().as_secs_f64().round());
        figures.write(&args.report)?;
    }
    let figures = figures.context("no number of guests")?;
    print!("{}", figures.table());
    println!("\nfigures: {}", args.report.display());
    Ok(0)
}

fn round(host: &Host, idle: &'static str, guests: u32, reads: u32) -> Result<Round> {
    let limit = Duration::from_secs(240 + 60 * u64::from(guests));
    let plan = DaemonPlan {
        disks: vec!["path=ram:8M".to_owned(); guests as usize],
        nets: Vec::new(),
        idle,
        limit,
    };
    let daemon = plan.start(host)?;
    let windows = side_by_side(host, guests, reads, limit);
    let (stats, said) = daemon.end()?;
    let windows = windows.with_context(|| format!("the daemon said: {said}"))?;
    Ok(Round {
        windows,
        served: Totals::of(&stats),
    })
}

/// Returns the measured windows of this number of guests.
fn side_by_side(host: &Host, guests: u32, reads: u32, limit: Duration) -> Result<Vec<PerIo>> {
    let mut running: Vec<RunningGuest<'_>> = Vec::new();
    for index in 0..guests {
        let mut guest = guest(host, index, reads, limit).spawn(host)?;
        guest.wait_for(READY)?;
        guest.pause()?;
        running.push(guest);
    }
    for guest in &running {
        guest.resume()?;
    }
    let mut windows = Vec::new();
    for guest in running {
        let outcome = guest.wait()?;
        outcome.check()?;
        let window: &Value = outcome.windows().first().context("no window")?;
        ensure!(
            window["histograms"].as_bool() == Some(true),
            "no exit histograms: tracefs is not available to `exitless run` on this host"
        );
        windows.push(PerIo::of(window, reads));
    }
    Ok(windows)
}

fn guest(host: &Host, index: u32, reads: u32, limit: Duration) -> Guest {
    // Each has data of its own, so that one guest's data in another's disk would be detected.
    let seed = 100 + index;
    let pattern = format!("/dev/vda --bytes {PATTERN} --seed {seed}");
    // When it is resumed, its clock has gone on: the sleep is over.
    let script = format!(
        "workload write-pattern {pattern} && echo {READY} && sleep 2 && \
         workload reads /dev/vda --count {reads} --warmup 100 && workload check-pattern {pattern}"
    );
    let mut guest = Guest::new(Mode::None, script);
    guest.name = format!("-{index}");
    // Its own sidecore has nothing to poll.
    guest.idle = "sleep";
    guest.limit = limit;
    if matches!(host, Host::Lab(_)) {
        guest.pin = Some("0,1".into());
    }
    let socket = host.path(&DaemonPlan::socket(index as usize));
    guest.disks.push(format!("socket={socket}"));
    guest
}
