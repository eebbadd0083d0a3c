//! `exitless-lab demo --wide`: cases that single reads of a slow disk do not cover. Requests are
//! answered while the guest is awake: a disk that takes 100 µs is read and written 32 deep, and UDP
//! datagrams are echoed, one at a time and 32 in flight.
//!
//! A guest for each column runs all of it, window after window; the columns follow one another. In
//! the lab the guest is slow, so that such a disk is a fast one for it. No claim is made on the
//! totals: where shared registers cost more, the table shows it.

use anyhow::{Context, Result};

use super::column::Column;
use super::figures::Figures;
use super::report;
use super::scenarios::windows_of;
use super::windows::ColumnWindows;
use super::{DemoArgs, Table, say};
use crate::system::guest::{Guest, Outcome};
use crate::system::host::Host;
use crate::system::workloads::{self, DISK_BYTES};

/// Latency of both disks, µs: each answer takes that long, and up to two thirds longer.
const LATENCY_US: u32 = 100;
/// Requests in flight.
const DEPTH: u32 = 32;
const SEED_READ: u64 = 31;
const SEED_WRITTEN: u64 = 32;
/// Number of the disk that is written; the disk before it is read.
const WRITTEN: usize = 1;

/// Workload that is counted.
#[derive(Clone, Copy)]
struct Workload {
    /// Prefix of the names of its figures.
    name: &'static str,
    title: &'static str,
    /// Unit that exits are divided by: `io` or `packet`.
    per: &'static str,
    /// Units of one request: an echo is a packet out and one in.
    each: u32,
    /// Command of the program, without the windows.
    command: fn() -> String,
}

const WORKLOADS: [Workload; 4] = [
    Workload {
        name: "fast_disk_d32",
        title: "4 KiB reads, 32 in flight",
        per: "io",
        each: 1,
        command: || format!("deep /dev/vda --seed {SEED_READ} --depth {DEPTH}"),
    },
    Workload {
        name: "fast_disk_d32_write",
        title: "4 KiB writes, 32 in flight",
        per: "io",
        each: 1,
        command: || format!("deep /dev/vdb --write --seed {SEED_WRITTEN} --depth {DEPTH}"),
    },
    Workload {
        name: "net_udp_d1",
        title: "UDP echoes, one at a time",
        per: "packet",
        each: 2,
        command: || format!("udp-echo {} --depth 1", workloads::ECHO),
    },
    Workload {
        name: "net_udp_d32",
        title: "UDP echoes, 32 in flight",
        per: "packet",
        each: 2,
        command: || format!("udp-echo {} --depth {DEPTH}", workloads::ECHO),
    },
];

/// Runs a guest of each column. Returns the function that renders the tables.
pub fn run(host: &Host, args: &DemoArgs, figures: &mut Figures) -> Result<Table> {
    let longest = LATENCY_US * 5 / 3;
    figures.set(
        "mode",
        format!("disk latency {LATENCY_US} to {longest} µs; datagrams of 8 to 1,400 bytes"),
    );
    figures.set("requests_per_window", args.reads());
    let mut of: [ColumnWindows; WORKLOADS.len()] =
        WORKLOADS.map(|_| ColumnWindows::new(&Column::ALL));
    let mut wrong = None;
    for column in Column::ALL {
        say(&format!("{}: reads, writes, UDP", column.name()));
        let outcome = guest(host, args, column)?.run(host)?;
        column.check(&outcome)?;
        let found = take(&outcome, args, column, &mut of);
        found.with_context(|| format!("{}\n{}", column.name(), outcome.tail()))?;
        if column == Column::Default {
            figures.set_defaults(&outcome);
        }
        let content = workloads::disk_content(host, WRITTEN)?;
        let first = workload::pattern::first_difference(SEED_WRITTEN, 0, &content[..written(args)]);
        wrong = wrong.or(first.map(|at| format!("{}: byte {at} on the host", column.name())));
    }
    // The guest compares all data read and echoed, and fails if any is wrong.
    figures.claim("data_verified", wrong.is_none(), || {
        wrong.unwrap_or_default()
    });
    for (workload, windows) in WORKLOADS.iter().zip(&of) {
        summarize(figures, workload, windows);
    }
    Ok(Box::new(move |figures| table(figures, &of)))
}

/// Returns a guest of `column` that runs all workloads.
fn guest(host: &Host, args: &DemoArgs, column: Column) -> Result<Guest> {
    let cut = format!(
        "--count {} --warmup {} --windows {}",
        args.reads(),
        args.warmup(),
        args.rounds
    );
    // Consecutive blocks: merged by the guest's kernel, two of its requests would be one of the
    // disk's.
    let mut script = format!(
        "echo 2 > /sys/block/vda/queue/nomerges && echo 2 > /sys/block/vdb/queue/nomerges && {}",
        workloads::network_up()
    );
    for workload in WORKLOADS {
        script.push_str(&format!(" && workload {} {cut}", (workload.command)()));
    }
    let mut guest = column.guest(&script);
    guest.pin = host.quiet_pin().map(str::to_owned);
    guest.limit *= 1 + args.rounds;
    for (number, options) in [",readonly=on", ""].into_iter().enumerate() {
        workloads::add_disk(&mut guest, host, SEED_READ, options)?;
        let fault = format!("disk{number}:latency={LATENCY_US}");
        guest.faults.push(fault);
    }
    workloads::add_network(&mut guest);
    Ok(guest)
}

/// Returns the bytes of the written disk that have been written at least once: blocks are taken in
/// their order.
fn written(args: &DemoArgs) -> usize {
    let blocks = u64::from(args.rounds) * u64::from(args.reads() + args.warmup());
    usize::try_from(blocks * workload::BLOCK as u64)
        .map_or(DISK_BYTES, |bytes| bytes.min(DISK_BYTES))
}

/// Distributes a guest's windows: those of one workload follow each other.
fn take(
    outcome: &Outcome,
    args: &DemoArgs,
    column: Column,
    of: &mut [ColumnWindows; WORKLOADS.len()],
) -> Result<()> {
    let mut rest = outcome.windows();
    for (workload, windows) in WORKLOADS.iter().zip(of) {
        for window in windows_of(rest, args.rounds, args.reads() * workload.each)? {
            windows.add(column, window);
        }
        rest = &rest[args.rounds as usize..];
    }
    Ok(())
}

/// Sets the figures of a workload, and the claim that shared registers took no exit in it.
fn summarize(figures: &mut Figures, workload: &Workload, windows: &ColumnWindows) {
    let Workload { name, per, .. } = *workload;
    windows.set(figures, |column| format!("{name}_{}", column.name()), per);
    let iommu = windows.median(Column::Shared, |window| window.cause("iommu"));
    let key = format!("{name}_shared_has_no_iommu_exits");
    figures.claim(&key, iommu == 0.0, || format!("{iommu} per {per}"));
}

fn table(figures: &Figures, of: &[ColumnWindows; WORKLOADS.len()]) -> String {
    let mut text = format!(
        "\nExits of requests that meet a guest awake: {} requests a window, medians of {} windows\n\
         {}",
        figures.number("requests_per_window"),
        figures.number("windows"),
        report::conditions(figures),
    );
    for (workload, windows) in WORKLOADS.iter().zip(of) {
        text.push_str(&format!("\n{}", workload.title));
        let what = match workload.per {
            "packet" => "exits a packet",
            _ => "exits a request",
        };
        windows.table(&mut text, &report::title(figures, what), &[]);
    }
    text.push_str(&format!(
        "\n  {}\n  data verified in both directions   {}\n  wall clock                         {} \
         s\n",
        report::defaults(figures),
        report::yes(figures, "data_verified"),
        figures.number("wall_s"),
    ));
    report::failures(figures, &mut text);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::demo::per_io::PerIo;

    fn args(words: &[&str]) -> DemoArgs {
        use clap::Parser;
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            demo: DemoArgs,
        }
        Cli::parse_from(std::iter::once(&"demo").chain(words)).demo
    }

    fn outcome(totals: &[u64]) -> Outcome {
        let window = |total: &u64| json!({ "exits": { "total": total }, "histograms": true });
        let windows: Vec<Value> = totals.iter().map(window).collect();
        Outcome {
            exit: 0,
            script: Some(0),
            console: String::new(),
            log: String::new(),
            ledger: json!({ "windows": windows }),
        }
    }

    #[test]
    fn windows_go_to_their_workload_and_an_echo_is_two_packets() {
        let args = args(&["--wide", "--rounds", "2", "--reads", "100"]);
        let mut of = WORKLOADS.map(|_| ColumnWindows::new(&Column::ALL));
        let all = outcome(&[100, 200, 300, 400, 500, 600, 700, 800]);
        take(&all, &args, Column::Trap, &mut of).unwrap();
        let medians = of.map(|windows| windows.median(Column::Trap, |w| w.total));
        assert_eq!(medians, [1.5, 3.5, 2.75, 3.75]);
        let mut of = WORKLOADS.map(|_| ColumnWindows::new(&Column::ALL));
        let one_less = outcome(&[100, 200, 300, 400, 500, 600, 700]);
        assert!(take(&one_less, &args, Column::Trap, &mut of).is_err());
    }

    #[test]
    fn each_workload_has_the_totals_of_each_column_in_the_report() {
        let mut figures = Figures::default();
        let mut of = WORKLOADS.map(|_| ColumnWindows::new(&Column::ALL));
        for (at, windows) in of.iter_mut().enumerate() {
            for column in Column::ALL {
                windows.add(
                    column,
                    PerIo {
                        total: (10 * at + column as usize) as f64,
                        ..PerIo::default()
                    },
                );
            }
            summarize(&mut figures, &WORKLOADS[at], windows);
        }
        for (key, total) in [
            ("fast_disk_d32_none_total_exits_per_io", 0.0),
            ("fast_disk_d32_shared_total_exits_per_io", 3.0),
            ("fast_disk_d32_write_trap_total_exits_per_io", 11.0),
            ("net_udp_d1_default_total_exits_per_packet", 26.0),
            ("net_udp_d32_lazy_shared_total_exits_per_packet", 35.0),
        ] {
            assert_eq!(figures.number(key), total, "{key}");
        }
        assert!(figures.holds(), "{:?}", figures.failed());
        let text = table(&figures, &of);
        for workload in WORKLOADS {
            assert!(text.contains(workload.title), "{text}");
        }
    }

    #[test]
    fn an_exit_at_a_shared_register_is_no_success() {
        let mut windows = ColumnWindows::new(&Column::ALL);
        let mut window = PerIo::default();
        window.causes[0] = 0.001;
        windows.add(Column::Shared, window);
        let mut figures = Figures::default();
        summarize(&mut figures, &WORKLOADS[2], &windows);
        assert!(figures.failed()[0].starts_with("net_udp_d1_shared_has_no_iommu_exits"));
    }

    #[test]
    fn only_what_was_written_is_compared() {
        assert_eq!(written(&args(&["--wide"])), DISK_BYTES);
        let few = args(&["--wide", "--rounds", "2", "--reads", "100"]);
        assert_eq!(written(&few), 2 * 125 * workload::BLOCK);
    }
}
