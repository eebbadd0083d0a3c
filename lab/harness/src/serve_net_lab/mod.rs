//! `exitless-lab serve-net-lab` (`make bench-serve-net-lab`): exits per packet, by cause, of stock
//! guests whose network is served by one core of another process: polling, notified, adaptive, and
//! the kernel's vhost-net, for 1, 2, 4 and 7 guests.
//!
//! | module | |
//! |---|---|
//! | `plan` | movers of frames, and the guests' work |
//! | `network` | TAP interfaces, addresses, and the peer behind them |
//! | `round` | a number of guests under one mover after the other; a bulk transfer |
//! | `viommu` | pings from behind a guest's own IOMMU |
//! | `figures` | bars, and the report |
//! | `results` | tables, and `docs/serve-net-lab-results.md` |
//!
//! A round has a lab of its own, so that leftovers of the one before (translated code, memory) do
//! not affect it. Its guests boot once, and take steps: the daemon is ended and started with
//! another policy, which their network devices survive, and each guest has a second card behind
//! vhost-net. In a step all guests do the same at once; the guest marks its windows, and prints its
//! kernel's counts of the card in them. Counts only: time in the lab is not meaningful.

mod figures;
pub mod network;
mod plan;
mod results;
mod round;
mod viommu;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::system::guest::Mode;
use crate::system::host::Host;
use figures::{Figures, GUESTS};

pub use figures::cell;
pub use plan::{Amount, Mover, Work};
pub use round::{Plan, Round, run};
pub use viommu::ping;

/// Arguments of `exitless-lab serve-net-lab`.
#[derive(clap::Args)]
pub struct ServeNetLabArgs {
    /// Where the figures go, as one JSON object.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/serve-net-lab.json"
    )]
    pub report: PathBuf,
    /// Number of guests that share the core, a round for each number.
    #[arg(long, value_delimiter = ',', default_values_t = GUESTS,
          value_parser = clap::value_parser!(u32).range(1..=7))]
    guests: Vec<u32>,
    /// Writes of 64 bytes in each window; an eighth as many come before them to warm up.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    writes: u32,
    /// Datagrams and their answers in each window; 50 more come before them.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    datagrams: u32,
    /// Windows of each guest, work and mover.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=20))]
    windows: u32,
    /// Pings from behind a guest's own IOMMU; 0: none.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pings: u32,
    /// Goes on with the report, if it is of this commit and these numbers: rounds that are there
    /// are not run again.
    #[arg(long)]
    resume: bool,
    /// A page of results to be written.
    #[arg(long, value_name = "FILE")]
    docs: Option<PathBuf>,
    /// Writes the page from the figures of an earlier run, and measures nothing.
    #[arg(long, requires = "docs")]
    again: bool,
}

/// Memory of the emulated host: seven guests touch about 100 MiB each.
const LAB_MEMORY_MIB: u32 = 4096;

/// Runs all rounds; the status is 1 if one failed, or a figure does not meet its bar.
pub fn main(args: &ServeNetLabArgs) -> Result<u8> {
    let read = || {
        report::Object::read(&args.report)
            .with_context(|| format!("reading {}", args.report.display()))
    };
    if args.again {
        write_docs(args, &read()?)?;
        return Ok(0);
    }
    let amount = Amount {
        writes: args.writes,
        datagrams: args.datagrams,
        windows: args.windows,
    };
    let earlier = match args.resume && args.report.exists() {
        true => Some(read()?),
        false => None,
    };
    let start = Instant::now();
    let say = |text: &str| eprintln!("serve-net-lab: {} s: {text}", start.elapsed().as_secs());
    let new_figures = |host: &Host| -> Result<Figures> {
        let figures = Figures::new(host, &amount)?;
        Ok(match &earlier {
            Some(earlier) => figures.resume(earlier),
            None => figures,
        })
    };
    let mut figures = None;
    for guests in args.guests.iter().copied() {
        say(&format!(
            "{guests} guests: starting the host that runs them …"
        ));
        // A lab for each, so that leftovers of a round (translated code, memory) do not affect the
        // next one.
        let host = Host::start_with_memory(LAB_MEMORY_MIB)?;
        let figures = match &mut figures {
            Some(figures) => figures,
            None => figures.insert(new_figures(&host)?),
        };
        if figures.has_round(guests) {
            say("it is in the report");
        } else {
            let movers = movers(&host, figures)?;
            let plan = Plan {
                guests,
                amount,
                movers,
                works: Work::ALL.to_vec(),
                has_bulk: guests == 1,
            };
            match run(&host, &plan, &say) {
                Ok(round) => figures.add(&round),
                Err(error) => figures.failed(&format!("round of {guests}"), &error),
            }
        }
        // Figures measured so far are kept if the rest fails.
        write(args, figures, start)?;
        if guests == args.guests[0] && args.pings > 0 && !figures.has_pings() {
            say(&format!("{} pings behind an IOMMU", args.pings));
            figures.pinged(ping(&host, Mode::Logged, args.pings));
        }
        // The error of a lab that has died has been printed.
        let ended = host.shutdown();
        if let Err(error) = ended {
            figures.failed(&format!("the lab of {guests}"), &error);
        }
        write(args, figures, start)?;
    }
    let mut figures = figures.context("no number of guests")?;
    let object = write(args, &mut figures, start)?;
    print!("{}", results::tables(&object));
    println!("\nfigures: {}", args.report.display());
    Ok(u8::from(!figures.holds()))
}

/// Returns the movers of frames on this host: vhost-net only if it is available.
fn movers(host: &Host, figures: &mut Figures) -> Result<Vec<Mover>> {
    match network::has_vhost(host)? {
        None => {
            figures.without_vhost("");
            Ok(Mover::ALL.to_vec())
        }
        Some(reason) => {
            eprintln!("serve-net-lab: without vhost-net: {reason}");
            figures.without_vhost(&reason);
            Ok(Mover::SERVE.to_vec())
        }
    }
}

/// Writes the report and the page, with the figures so far.
fn write(args: &ServeNetLabArgs, figures: &mut Figures, start: Instant) -> Result<report::Object> {
    let object = figures.write(&args.report, start.elapsed())?;
    write_docs(args, &object)?;
    Ok(object)
}

fn write_docs(args: &ServeNetLabArgs, object: &report::Object) -> Result<()> {
    let Some(docs) = &args.docs else {
        return Ok(());
    };
    std::fs::write(docs, results::page(object))
        .with_context(|| format!("writing {}", docs.display()))
}
