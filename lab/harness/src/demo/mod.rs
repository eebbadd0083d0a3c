//! `exitless demo`: the main job, shown. A stock Debian kernel boots with a disk and a network card behind an
//! emulated VT-d; the same workload runs with no IOMMU and in the three register modes, and its exits
//! stand side by side.
//!
//! Figures are counts per 4 KiB direct read (strict unmapping, one request at a time), medians over
//! rounds in which the four modes take turns. The report is printed and written as one flat JSON object.

mod figures;
mod report;
mod scenarios;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;

use crate::system::host::Host;

pub use figures::{CAUSES, PerRead, median, round as rounded};

/// Arguments of `exitless demo`.
#[derive(clap::Args)]
#[command(after_help = "\
Runs on this machine's KVM if it can boot a kernel, else in the lab (an emulated AMD host). The first
start fetches QEMU, a Debian kernel and busybox as packages; `exitless lab --help` says where to.

  exitless demo
  exitless demo --rounds 1 --report /tmp/demo.json")]
pub struct DemoArgs {
    /// Where the figures go, as one JSON object.
    #[arg(long, value_name = "FILE", default_value = "target/report/demo.json")]
    pub report: PathBuf,
    /// Rounds in which all four modes take turns, a window each; the table shows medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Measured reads in each window; 100 more come before them to warm up.
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    reads: u32,
    /// Use the lab even where this machine's KVM would do.
    #[arg(long)]
    lab: bool,
}

/// Runs the demo; the status is 1 when a claim it makes did not hold.
pub fn main(args: &DemoArgs) -> Result<u8> {
    let start = Instant::now();
    say("starting the host that runs the guests …");
    let host = if args.lab {
        Host::lab()?
    } else {
        Host::start()?
    };
    say(&format!("host: {}", host.label()));
    let mut figures = figures::Figures::new(&host, args.rounds, args.reads)?;
    scenarios::windows(&host, args, &mut figures)?;
    scenarios::adaptive(&host, args, &mut figures)?;
    host.shutdown()?;
    figures.set("wall_s", start.elapsed().as_secs_f64().round());
    report::write(&args.report, &figures)?;
    print!("{}", report::table(&figures));
    println!("\nfigures: {}", args.report.display());
    Ok(u8::from(!figures.holds()))
}

/// Progress goes to standard error, so that the table can be piped.
fn say(text: &str) {
    eprintln!("demo: {text}");
}
