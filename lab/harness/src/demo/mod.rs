//! `exitless-lab demo`: the program's main job, shown. A stock Debian kernel boots with a disk and
//! a network card behind an emulated VT-d; the same workload runs in guests that differ in their
//! registers, in their kernels' unmap policy and in the sidecore's idle policy (`column`), and
//! their exits are listed side by side.
//!
//! Figures are counts per 4 KiB direct read, one request at a time, medians over rounds in which
//! the guests take turns. With `--wide` (`wide`) they are those of many requests at once: reads and
//! writes of a fast disk, and packets. The report is printed and written as one flat JSON object.

mod claims;
mod column;
mod figures;
mod per_io;
mod report;
mod scenarios;
mod wide;
mod windows;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::builder::ArgPredicate;

use crate::report_file;
use crate::system::host::Host;

pub use per_io::{CAUSES, PerIo, median, round as rounded};

/// Arguments of `exitless-lab demo`.
#[derive(clap::Args)]
#[command(after_long_help = "\
Runs on this machine's KVM if it can boot a kernel, else in the lab (an emulated AMD host). The first start fetches QEMU, a Debian \
kernel and busybox as packages; `exitless-lab lab --help` says where to.

Examples:
  A stock guest's exits, side by side:
    exitless-lab demo
  Of requests that meet a guest awake:
    exitless-lab demo --wide
  Shortly, with the figures elsewhere:
    exitless-lab demo --rounds 1 --report /tmp/demo.json")]
pub struct DemoArgs {
    /// Where the figures go, as one JSON object; with --wide to demo-wide.json beside that.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/demo.json",
        default_value_if("wide", ArgPredicate::IsPresent, "target/report/demo-wide.json")
    )]
    pub report: PathBuf,
    /// Rounds in which the guests take turns, a window each; the table shows medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Measured reads in each window (120); with --wide requests, or echoes (500). A twentieth as
    /// many, and 20 more, come before them to warm up.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    reads: Option<u32>,
    /// Many requests at once: a disk that takes 100 µs, read and written 32 deep, and UDP, one at a
    /// time and 32.
    #[arg(long)]
    wide: bool,
    /// Use the lab even where this machine's KVM would do.
    #[arg(long)]
    lab: bool,
}

impl DemoArgs {
    /// Returns the measured requests in each window.
    fn reads(&self) -> u32 {
        self.reads.unwrap_or(if self.wide { 500 } else { 120 })
    }

    /// Returns the requests before each window.
    fn warmup(&self) -> u32 {
        self.reads() / 20 + 20
    }
}

/// Runs the demo; the status is 1 if a claim did not hold.
pub fn main(args: &DemoArgs) -> Result<u8> {
    let start = Instant::now();
    say("starting the host that runs the guests …");
    let host = if args.lab {
        Host::lab()?
    } else {
        Host::start()?
    };
    say(&format!("host: {}", host.label()));
    let mut figures = figures::Figures::new(&host)?;
    figures.set("windows", args.rounds);
    let run = if args.wide { wide::run } else { scenarios::run };
    let table = run(&host, args, &mut figures)?;
    host.shutdown()?;
    figures.set("wall_s", start.elapsed().as_secs_f64().round());
    report_file::write(&args.report, &figures.json())?;
    print!("{}", table(&figures));
    println!("\nfigures: {}", args.report.display());
    Ok(u8::from(!figures.holds()))
}

/// Function that renders the tables once all figures are set.
type Table = Box<dyn FnOnce(&figures::Figures) -> String>;

/// Progress goes to standard error, so that the table can be piped.
fn say(text: &str) {
    eprintln!("demo: {text}");
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        demo: DemoArgs,
    }

    fn parse(words: &[&str]) -> DemoArgs {
        let words = std::iter::once(&"demo").chain(words);
        Cli::try_parse_from(words).expect("good arguments").demo
    }

    #[test]
    fn the_wide_table_does_not_overwrite_the_other_ones_report() {
        let report = |words: &[&str]| parse(words).report.display().to_string();
        assert_eq!(report(&[]), "target/report/demo.json");
        assert_eq!(report(&["--wide"]), "target/report/demo-wide.json");
        assert_eq!(report(&["--wide", "--report", "x"]), "x");
    }

    #[test]
    fn windows_are_as_long_as_their_requests_are_short() {
        let reads = |words: &[&str]| (parse(words).reads(), parse(words).warmup());
        assert_eq!(reads(&[]), (120, 26));
        assert_eq!(reads(&["--wide"]), (500, 45));
        assert_eq!(reads(&["--wide", "--reads", "7"]), (7, 20));
    }
}
