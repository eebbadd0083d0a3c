//! The network behind the paravirtual IOMMU, by policy: TCP streams both ways, requests of one
//! byte, a web-like server.
//!
//! One boot for each row, of Debian's 6.12 with one vCPU, the sidecore polling; a TAP interface,
//! behind which a peer in the host's kernel answers. Each window is warmed up by its own process
//! over the same sockets. Streams are counted by the MiB, other work by the transaction, requests
//! by the host.
//!
//! The guest of each of our module's policies traces its kernel's DMA calls from its boot on (the
//! events `dma:*`), with the markers of the windows, and reads its disk in two more windows.
//! `dma-bench --replay` replays such a trace on the policies' models and compares the requests that
//! they remove: `policy_vs_model_points`. A traced call costs the guest time, and no request.
//!
//! Time is the lab's, where a guest does little in a second: `residency_ms` is a minute, so that a
//! policy's removals are due to its quota. The cycles of `rtc` are ten seconds as by default, and
//! one second in a row of its own.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::figures::{Figures, Window};
use crate::serve_net_lab::network::{self, Link};
use crate::system::guest::{Driver, Guest, Mode, Outcome};
use crate::system::host::Host;
use crate::system::steps::{SCRIPT, Steps};
use crate::system::workloads;

/// A guest that is measured.
struct Row {
    /// Name in keys and in the table.
    name: &'static str,
    mode: Mode,
    driver: Driver,
}

/// Rows that are measured, in this order.
const ROWS: [Row; 6] = {
    const fn ours(name: &'static str, parameters: &'static [&'static str]) -> Row {
        Row {
            name,
            mode: Mode::Virtio,
            driver: Driver::Module(parameters),
        }
    }
    [
        Row {
            name: "net_no_iommu",
            mode: Mode::None,
            driver: Driver::Stock,
        },
        ours(NONE, &[]),
        ours("net_shared", &["reuse=shared"]),
        ours(
            "net_optimistic",
            &["reuse=optimistic", "residency_ms=60000"],
        ),
        ours("net_rtc", &["reuse=rtc"]),
        ours("net_rtc_1s", &["reuse=rtc", "ttl_ms=1000", "cycles=3"]),
    ]
};

/// Row that others are compared with.
const NONE: &str = "net_none";

/// A workload of a guest: one window.
struct Work {
    /// Name in keys and in the table.
    name: &'static str,
    /// Name of the operation that is counted.
    operation: &'static str,
    /// Number of operations in the window.
    operations: u32,
    /// Command of `workload`, without the peer and the common options.
    command: fn(disk: &str, peer: &str) -> String,
}

/// MiB of a stream's window.
const STREAM_MIB: u32 = 4;
/// MiB before it: twice the largest size of a socket's receive buffer in Linux (6 MiB), so that
/// each of its pages has been used once.
const STREAM_WARMUP_MIB: u32 = 12;
/// Datagrams of a window, each of which is echoed.
const DATAGRAMS: u32 = 1000;
/// Transactions of a window of requests, and of one of connections.
const RR: u32 = 400;
const WEB: u32 = 300;

/// The workloads of the network, in this order.
const NETWORK: [Work; 6] = [
    Work {
        name: "tcp_receive",
        operation: "mib",
        operations: STREAM_MIB,
        command: |_, peer| stream(peer, "--receive"),
    },
    Work {
        name: "tcp_send",
        operation: "mib",
        operations: STREAM_MIB,
        command: |_, peer| stream(peer, ""),
    },
    Work {
        name: "tcp_rr",
        operation: "transaction",
        operations: RR,
        command: |_, peer| format!("rr {peer} --count {RR} --warmup {RR}"),
    },
    Work {
        name: "udp_rr",
        operation: "transaction",
        operations: RR,
        command: |_, peer| format!("rr {peer} --udp --count {RR} --warmup {RR}"),
    },
    Work {
        name: "udp_stream",
        operation: "datagram",
        operations: DATAGRAMS,
        command: |_, peer| {
            format!(
                "udp-echo {peer} --depth 16 --bytes 1400 --count {DATAGRAMS} --warmup {DATAGRAMS}"
            )
        },
    },
    Work {
        name: "web",
        operation: "transaction",
        operations: WEB,
        command: |_, peer| format!("web {peer} --connections 100 --count {WEB} --warmup {WEB}"),
    },
];

/// Reads into one page, and into many: only in guests that are traced.
const READS: u32 = 512;
const DISK: [Work; 2] = [
    Work {
        name: "read",
        operation: "read",
        operations: READS,
        command: |disk, _| format!("reads {disk} --in-place --count {READS} --warmup 200"),
    },
    Work {
        name: "read512",
        operation: "read",
        operations: READS,
        command: |disk, _| {
            format!("reads {disk} --in-place --count {READS} --warmup 1024 --buffers 512")
        },
    },
];

fn stream(peer: &str, direction: &str) -> String {
    let pieces = STREAM_MIB * 16;
    let warmup = STREAM_WARMUP_MIB * 16;
    format!("tcp-stream {peer} --bytes 65536 --count {pieces} --warmup {warmup} {direction}")
}

/// Kernel options that trace DMA calls, from the boot on.
const TRACE_OPTIONS: &str = "trace_event=dma:* trace_buf_size=24M";
/// Bytes of the disk to which a guest writes its trace.
const TRACE_BYTES: usize = 32 << 20;
/// That disk's file.
const TRACE_FILE: &str = "trace.img";
/// Number of that disk.
const TRACE_DISK: usize = 1;

impl Row {
    fn is_traced(&self) -> bool {
        matches!(self.driver, Driver::Module(_))
    }

    fn works(&self) -> impl Iterator<Item = &'static Work> {
        let disk = if self.is_traced() { &DISK[..] } else { &[] };
        disk.iter().chain(&NETWORK)
    }

    fn guest(&self, host: &Host) -> Result<Guest> {
        let mut guest = Guest::new(self.mode, SCRIPT);
        guest.driver = self.driver;
        guest.limit = Duration::from_secs(1800);
        guest.name = format!("-{}", self.name);
        super::pin(&mut guest, host);
        guest.nets.push(format!("tap={}", LINK.tap()));
        if self.is_traced() {
            guest.kernel_options = TRACE_OPTIONS.into();
            workloads::add_disk(&mut guest, host, 1, "")?;
            let path = host.path(TRACE_FILE);
            host.script(&format!("rm -f {path} && truncate -s {TRACE_BYTES} {path}"))?;
            guest.disks.push(format!("path={path}"));
        }
        Ok(guest)
    }
}

/// The guest's network.
const LINK: Link = Link { guest: 0, card: 0 };

/// Returns the file of a row's trace, beside the report.
fn trace_file(report: &Path, row: &str) -> PathBuf {
    report.with_extension("traces").join(format!("{row}.txt"))
}

/// Returns the names of the rows.
pub fn names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|row| row.name)
}

/// A row that was measured.
type Measured = (&'static str, Vec<(&'static Work, Window)>);

/// Measures the rows whose names are wanted, writes the report after each of them, and returns
/// their table.
///
/// # Errors
/// A guest or the peer failed; a file cannot be written.
pub fn measure(
    host: &Host,
    report: &Path,
    figures: &mut Figures,
    wants: &dyn Fn(&str) -> bool,
) -> Result<String> {
    let mut rows: Vec<Measured> = Vec::new();
    for row in ROWS.iter().filter(|row| wants(row.name)) {
        eprintln!("pviommu-lab: {}", row.name);
        let measured = run(host, row, report).with_context(|| row.name)?;
        for (work, window) in &measured {
            let name = format!("{}_{}", row.name, work.name);
            figures.insert_window(&name, work.operation, window);
        }
        rows.push((row.name, measured));
        for (key, value) in removed(&rows) {
            figures.insert(key, value);
        }
        figures.write(report)?;
    }
    Ok(match rows.is_empty() {
        true => String::new(),
        false => table(&rows),
    })
}

/// Boots the guest of a row. Returns its windows.
fn run(host: &Host, row: &Row, report: &Path) -> Result<Vec<(&'static Work, Window)>> {
    LINK.make(host)?;
    network::start_peer(host)?;
    let mut guest = Steps::begin(host, &row.guest(host)?)?;
    let disk = workloads::disk_node(row.mode, 0);
    let trace = match row.is_traced() {
        true => {
            guest.run(
                "mount -t tracefs t /sys/kernel/tracing; mount -t debugfs d /sys/kernel/debug",
            )?;
            "--trace"
        }
        false => "",
    };
    guest.run(&format!("{} && {}", LINK.up(), LINK.settle()))?;
    for work in row.works() {
        let command = (work.command)(&disk, &LINK.peer());
        let wait = match command.starts_with("reads") {
            true => "",
            false => "--wait-ms 60000",
        };
        let step = guest.run(&format!("workload {command} {wait} {trace}"));
        step.with_context(|| work.name)?;
        if row.is_traced() {
            let counts = guest.run(
                "grep -E '^(stale|evic|expi|live|hits|shared|misses)' \
                 /sys/kernel/debug/exitless-iommu/stats",
            )?;
            eprintln!(
                "pviommu-lab: {}, {}: {}",
                row.name,
                work.name,
                counts.split_whitespace().collect::<Vec<_>>().join(" ")
            );
        }
    }
    if row.is_traced() {
        // Off first: writing the trace would be traced too.
        let disk = workloads::disk_node(row.mode, TRACE_DISK);
        guest.run(&format!(
            "cd /sys/kernel/tracing && echo 0 > tracing_on && cat trace > {disk} && sync"
        ))?;
    }
    let outcome = guest.end()?;
    outcome.check()?;
    let complaints = network::complaints(host)?;
    ensure!(complaints.is_empty(), "the peer: {complaints}");
    let windows = windows(row, &outcome)?;
    if let Driver::Module(parameters) = row.driver {
        let mut head = format!("# exitless policy: {}\n", parameters.join(" "));
        for ((work, _), window) in windows.iter().zip(outcome.windows()) {
            let requests = window["paravirtual"]["requests"].as_u64();
            let requests = requests.context("no count of requests in the ledger")?;
            let _ = writeln!(head, "# exitless window: {} {requests}", work.name);
        }
        save_trace(host, &head, &trace_file(report, row.name))?;
    }
    Ok(windows)
}

/// Returns the ledger's windows, one for each workload.
fn windows(row: &Row, outcome: &Outcome) -> Result<Vec<(&'static Work, Window)>> {
    let works: Vec<_> = row.works().collect();
    let windows = outcome.windows();
    ensure!(
        windows.len() == works.len(),
        "{} windows of {} in the ledger",
        windows.len(),
        works.len()
    );
    let windows = works.into_iter().zip(windows);
    Ok(windows
        .map(|(work, window)| (work, Window::of(window, work.operations)))
        .collect())
}

/// Stores the trace that a guest has written to its disk, behind a head with the counts.
fn save_trace(host: &Host, head: &str, file: &Path) -> Result<()> {
    let text = "trace.txt";
    let (from, to) = (host.path(TRACE_FILE), host.path(text));
    // Behind the text the disk holds zeroes, which need not leave the host.
    host.script(&format!("tr -d '\\000' < {from} > {to}"))?;
    let trace = host.get(text)?;
    ensure!(
        !trace.is_empty() && trace.len() < TRACE_BYTES && trace.ends_with(b"\n"),
        "a trace of {} bytes, of at most {TRACE_BYTES}, is not whole",
        trace.len()
    );
    let folder = file.parent().context("a file has a folder")?;
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(file, [head.as_bytes(), &trace].concat()));
    written.with_context(|| format!("writing {}", file.display()))
}

/// Returns the requests that each policy has removed, in percent of those without a policy.
fn removed(rows: &[Measured]) -> Vec<(String, f64)> {
    let requests = |row: &str, work: &str| {
        let (_, windows) = rows.iter().find(|(name, _)| *name == row)?;
        let mut windows = windows.iter();
        let (_, window) = windows.find(|(own, _)| own.name == work)?;
        Some(window.requests())
    };
    let mut removed = Vec::new();
    for work in DISK.iter().chain(&NETWORK) {
        for row in &ROWS {
            let pair = requests(NONE, work.name).zip(requests(row.name, work.name));
            if row.name == NONE || !row.is_traced() {
                continue;
            }
            if let Some((none, policy)) = pair {
                let percent = 100.0 * (1.0 - policy / none);
                let name = row.name;
                removed.push((format!("{name}_{}_removed_percent", work.name), percent));
                if (name, work.name) == ("net_optimistic", "tcp_receive") {
                    removed.push(("tcp_removed_percent".into(), percent));
                }
            }
        }
    }
    removed
}

/// Renders requests, kicks and exits, a line for each workload and row.
fn table(rows: &[Measured]) -> String {
    let removed = removed(rows);
    let mut text = format!(
        "\nfor each MiB of a stream, each read, each transaction of the others\n  \
         {:<12}{:<16}{:>9}{:>9}{:>9}{:>9}{:>11}\n",
        "", "", "map", "unmap", "kicks", "exits *", "removed, %"
    );
    for work in DISK.iter().chain(&NETWORK) {
        for (row, windows) in rows {
            let Some((_, window)) = windows.iter().find(|(own, _)| own.name == work.name) else {
                continue;
            };
            let [maps, unmaps, kicks, exits] = window.columns();
            let key = format!("{row}_{}_removed_percent", work.name);
            let percent = removed.iter().find(|(own, _)| *own == key);
            let percent = percent.map_or(String::new(), |(_, percent)| format!("{percent:.1}"));
            let _ = writeln!(
                text,
                "  {:<12}{row:<16}{maps:>9.3}{unmaps:>9.3}{kicks:>9.3}{exits:>9.3}{percent:>11}",
                work.name
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn window(requests: u32) -> Window {
        let window = json!({ "paravirtual": { "requests": requests, "maps": 0, "unmaps": 0 } });
        Window::of(&window, 1)
    }

    #[test]
    fn removed_requests_are_relative_to_the_row_without_policy() {
        let row = |name, receive, send| -> Measured {
            let windows = vec![(&NETWORK[0], window(receive)), (&NETWORK[1], window(send))];
            (name, windows)
        };
        // Nothing to compare with.
        assert_eq!(removed(&[row("net_optimistic", 4, 1)]), []);
        let rows = [
            row("net_no_iommu", 0, 0),
            row(NONE, 100, 200),
            row("net_optimistic", 4, 100),
        ];
        let expected = [
            ("net_optimistic_tcp_receive_removed_percent", 96.0),
            ("tcp_removed_percent", 96.0),
            ("net_optimistic_tcp_send_removed_percent", 50.0),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value));
        assert_eq!(removed(&rows), expected);
        assert!(table(&rows).contains("96.0"));
    }
}
