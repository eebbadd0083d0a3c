//! `vhost-blk serve-bench`: our server and its peers in one run, on the same CPUs, under the same
//! client.
//!
//! Server and client have a CPU each. Every measurement starts its server anew, warms up, and is
//! repeated with the servers taking turns, so that a machine that gets slower does so for all;
//! tables hold medians, and the spread is beside them. Spinners of the idle class keep both CPUs
//! out of HLT unless a row says otherwise.
//!
//! | section | what |
//! |---|---|
//! | `machine` | cache-line round trip, this client's ceiling |
//! | `disks` | null, RAM and tmpfs disks at depth 1 and 32, polling and sleeping guests |
//! | `calls` | a sleeping guest at depth 1, by whether its processor halts; beside a server that does nothing |
//! | `files` | files on a disk, through the page cache and past it: reads, mixed, flushes |
//! | `vms` | 1 to 256 disks on one core |
//! | `open` | p50 and CPU by offered rate, bursts, a step |
//! | `idle` | CPU and memory of connected disks without load |
//! | `fair` | Jain's index, weights, quiet disks beside a loud one |
//! | `sleeps` | wake-ups, a million times |
//! | `policies` | the adaptive idle policy against fixed ones |
//! | `default` | the default idle policy beside a core that polls: guests that sleep, 20,000 requests a second, prices |
//! | `pairs` | this build and another of ours in turns, if there is one |
//!
//! qemu-storage-daemon reads files by io_uring (`qsd`) and by threads (`qsdthr`); `…_vs_qsd`
//! compares with the better of them in that row. SPDK's vhost target stands beside them where a
//! build of it is given. A peer that is missing leaves its rows empty and its keys null; nothing is
//! measured against a guess. What other people's programs reached on the machine of our notes is
//! printed as quoted, and never a key.

mod calls;
mod default;
mod disks;
mod fair;
mod files;
mod idle;
mod open;
mod pairs;
mod plots;
mod policies;
mod prices;
mod record;
mod server;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use report::short;

use vhost_blk::client::Options;
use vhost_blk::drive::{Run, drive};
use vhost_blk::host::{self, Priority, Spinners};
use vhost_blk::load::{Mix, Mode, VmSpec};
use vhost_blk::stats::{Report, VmReport};
use vhost_blk::{ceiling, ring};

pub use record::{Record, Summary};
pub use server::{Aio, Disk, Kind, Peer, Server};

/// The sections, in their order.
pub const SECTIONS: [&str; 12] = [
    "machine", "disks", "calls", "files", "vms", "open", "idle", "fair", "sleeps", "policies",
    "default", "pairs",
];

/// Settings of a measurement.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Our server's command line, with `{blocks}`, `{cpu}` and `{idle}` in it.
    pub ours: String,
    /// Another build's, to be measured beside ours.
    pub beside: Option<String>,
    /// Our server's idle policy, where the row is not about policies.
    pub idle: String,
    /// qemu-storage-daemon: the program.
    pub qsd: String,
    /// A directory with a build of SPDK, if there is one.
    pub spdk: Option<PathBuf>,
    /// Directory of the files that are not in memory.
    pub files: PathBuf,
    /// The server's CPU.
    pub server_cpu: usize,
    /// The client's CPU.
    pub client_cpu: usize,
    /// Measured per repetition.
    pub seconds: f64,
    /// Repetitions.
    pub repetitions: usize,
    /// The priority of server and client, from -20 to 19, as far as it is allowed.
    pub nice: i32,
    /// Whether both CPUs are kept out of HLT.
    pub spinners: bool,
    /// Forced sleeps to make in all.
    pub sleeps: u64,
    /// Only these sections.
    pub only: Vec<String>,
    /// File for the figures; plots lie beside it.
    pub report: PathBuf,
}

impl Settings {
    /// SPDK's vhost target.
    fn spdk_vhost(&self) -> Option<PathBuf> {
        Some(self.spdk.as_ref()?.join("build/bin/vhost"))
    }
}

/// A measuring run.
pub struct Bench {
    settings: Settings,
    record: Record,
    spinners: Option<Spinners>,
}

type Section = fn(&mut Bench) -> Result<()>;

/// Measures, prints, and writes the report.
///
/// # Errors
/// The report cannot be written or the CPUs not used. A server that fails is a row that says so.
pub fn run(settings: Settings) -> Result<()> {
    if settings.beside.is_none() && settings.only.iter().any(|name| name == "pairs") {
        bail!("section pairs measures this build beside another: say which by --beside");
    }
    let mut bench = Bench {
        record: Record::new(&settings),
        spinners: None,
        settings,
    };
    let priority = Priority::set(bench.settings.nice);
    if let Err(error) = &priority {
        println!(
            "priority {}: {error}; measured without",
            bench.settings.nice
        );
    }
    bench.keep_awake(true)?;
    bench.record.heading();
    let sections: [(&str, Section); SECTIONS.len()] = [
        ("machine", machine),
        ("disks", disks::disks),
        ("calls", calls::calls),
        ("files", files::files),
        ("vms", disks::vms),
        ("open", open::open),
        ("idle", idle::idle),
        ("fair", fair::fair),
        ("sleeps", idle::sleeps),
        ("policies", policies::policies),
        ("default", default::default),
        ("pairs", pairs::pairs),
    ];
    for (name, section) in sections {
        let is_wanted =
            bench.settings.only.is_empty() || bench.settings.only.iter().any(|only| only == name);
        if is_wanted {
            let start = Instant::now();
            section(&mut bench).with_context(|| format!("section {name}"))?;
            // What is there is not lost if a later section fails.
            bench.record.write(&bench.settings.report)?;
            println!("({name}: {:.0} s)", start.elapsed().as_secs_f64());
        }
    }
    bench.record.finish(&bench.settings.report)
}

/// The machine itself.
fn machine(bench: &mut Bench) -> Result<()> {
    let (server, client) = (bench.settings.server_cpu, bench.settings.client_cpu);
    let rtt = host::round_trip(client, server)?;
    bench.record.number("rtt_ns", rtt.median);
    println!(
        "cache-line round trip between CPUs {client} and {server}: {:.0} ns (fastest {:.0})",
        rtt.median, rtt.min
    );
    for (name, features) in [("split", 0), ("packed", ring::feature::PACKED)] {
        for depth in [1, 32] {
            let seconds = Duration::from_secs_f64(bench.settings.seconds);
            let report = ceiling::measure((server, client), features, depth, true, seconds)?;
            bench
                .record
                .number(&format!("ceiling_{name}_d{depth}_iops"), report.iops);
            println!(
                "this client's ceiling, {name}, depth {depth}: {} IOPS, p50 {} ns",
                short(report.iops),
                report.latency.p50_ns
            );
        }
    }
    Ok(())
}

impl Bench {
    /// Starts or ends the spinners, as far as they are wanted at all.
    fn keep_awake(&mut self, wanted: bool) -> Result<()> {
        self.spinners = None;
        if wanted && self.settings.spinners {
            let cpus = [self.settings.server_cpu, self.settings.client_cpu];
            self.spinners = Some(Spinners::start(&cpus)?);
        }
        Ok(())
    }

    /// Returns the servers that are measured on such a disk: ours first, then qemu-storage-daemon
    /// in each way, then SPDK if there is a build of it.
    fn peers(&self, kind: Kind) -> Vec<Peer> {
        let spdk = self.settings.spdk.is_some().then_some(Peer::Spdk);
        let others = kind.qsds().iter().cloned().chain(spdk);
        [Peer::Ours].into_iter().chain(others).collect()
    }

    /// A load of random 4 KiB reads on all disks of a server.
    fn load(&self, server: &Server, vms: Vec<VmSpec>, mode: Mode) -> Run {
        let seconds = Duration::from_secs_f64(self.settings.seconds);
        Run {
            vms,
            options: Options::new(1, 4096),
            mix: Mix::READS,
            sectors: None,
            mode,
            warm_up: seconds.mul_f64(0.3),
            measure: seconds,
            seed: 1,
            server: Some(server.pid()),
        }
    }

    /// Measures one row: the servers take turns, each run with a fresh one.
    fn row(
        &mut self,
        name: &str,
        peers: &[Peer],
        disks: &[Disk],
        load: impl Fn(&Bench, &Server) -> Run,
    ) -> Result<Vec<Option<Summary>>> {
        let names = vec![name.to_owned(); peers.len()];
        self.rows(&names, peers, disks, self.settings.repetitions, load)
    }

    /// The same with a name for each server, and so many repetitions.
    fn rows(
        &mut self,
        names: &[String],
        peers: &[Peer],
        disks: &[Disk],
        repetitions: usize,
        load: impl Fn(&Bench, &Server) -> Run,
    ) -> Result<Vec<Option<Summary>>> {
        let mut reports: Vec<Result<Vec<Report>>> = peers.iter().map(|_| Ok(Vec::new())).collect();
        for _ in 0..repetitions {
            for (peer, reports) in peers.iter().zip(&mut reports) {
                if let Ok(so_far) = reports {
                    match self.once(peer, disks, &load) {
                        Ok(report) => so_far.push(report),
                        // One failure is enough: the row says so.
                        Err(error) => *reports = Err(error),
                    }
                }
            }
        }
        let mut summaries = Vec::new();
        for ((name, peer), reports) in names.iter().zip(peers).zip(reports) {
            summaries.push(match reports {
                Ok(reports) => {
                    let summary = Summary::of(&reports);
                    self.record.row(name, peer, &summary);
                    Some(summary)
                }
                Err(error) => {
                    self.record.failed_row(name, peer, &error);
                    None
                }
            });
        }
        Ok(summaries)
    }

    /// IOPS of two servers, round by round. Each goes first in every other round, so that what the
    /// machine does meanwhile falls on both.
    fn in_turns(
        &mut self,
        peers: &[Peer; 2],
        disks: &[Disk],
        load: &impl Fn(&Bench, &Server) -> Run,
        rounds: usize,
    ) -> Result<[Vec<f64>; 2]> {
        let mut iops = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            for at in [round % 2, 1 - round % 2] {
                let report = self.once(&peers[at], disks, load);
                iops[at].push(report.with_context(|| peers[at].name())?.iops);
            }
        }
        Ok(iops)
    }

    /// One repetition.
    fn once(
        &mut self,
        peer: &Peer,
        disks: &[Disk],
        load: &impl Fn(&Bench, &Server) -> Run,
    ) -> Result<Report> {
        let mut reports = self.several(peer, disks, load, 1)?;
        reports.pop().context("measured nothing")
    }

    /// So many loads after each other on one server. Requests that failed are no measurement: a
    /// server may fail faster than it serves.
    fn several(
        &mut self,
        peer: &Peer,
        disks: &[Disk],
        load: &impl Fn(&Bench, &Server) -> Run,
        times: usize,
    ) -> Result<Vec<Report>> {
        if let Some(missing) = peer.missing(&self.settings) {
            bail!("{missing}");
        }
        let server = server::start(&self.settings, peer, disks)?;
        host::pin(self.settings.client_cpu)?;
        let mut run = load(self, &server);
        if let Some(Kind::Ram(mib)) = disks.first().map(|disk| disk.kind)
            && peer.is_ours()
        {
            fill(&run, mib).context("filling the disks")?;
        }
        run.server = Some(server.pid());
        let mut reports = Vec::new();
        for _ in 0..times {
            let report = drive(&run).with_context(|| server.last_words())?;
            if peer.is_ours() {
                self.record.lost(report.lost_wakeups);
            }
            none_failed(&report)?;
            reports.push(report);
        }
        Ok(reports)
    }
}

fn none_failed(report: &Report) -> Result<()> {
    match report.errors.total() {
        0 => Ok(()),
        failed => bail!("{failed} requests failed"),
    }
}

/// Writes RAM disks of `mib` MiB to their ends, so that reads do not all copy the same page of
/// zeroes.
fn fill(run: &Run, mib: u32) -> Result<()> {
    let mut fill = run.clone();
    for vm in &mut fill.vms {
        let socket = vm.socket.clone();
        *vm = VmSpec::closed(socket, 8, 65536);
    }
    fill.mix = Mix {
        read: 0,
        flush: 0,
        is_sequential: true,
    };
    fill.mode = Mode::Poll;
    fill.warm_up = Duration::ZERO;
    for millis in [400, 1600, 6400] {
        fill.measure = Duration::from_millis(millis);
        let report = drive(&fill)?;
        none_failed(&report)?;
        let written = |vm: &VmReport| vm.iops * report.seconds * f64::from(vm.block);
        if report
            .vms
            .iter()
            .all(|vm| written(vm) >= f64::from(mib) * f64::from(1 << 20))
        {
            return Ok(());
        }
    }
    bail!("not all of {mib} MiB is written after several seconds");
}

/// Disks in a closed loop on all sockets of a server.
fn all(server: &Server, depth: u16) -> Vec<VmSpec> {
    let closed = |socket: &PathBuf| VmSpec::closed(socket.clone(), depth, 4096);
    server.sockets().iter().map(closed).collect()
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_disk_that_fails_its_writes_is_not_taken_for_a_full_one() {
        for (writes_status, is_full) in [(true, true), (false, false)] {
            let directory = TempDir::new().unwrap();
            let socket = directory.path().join("s");
            let _server = ceiling::serve(&socket, None, writes_status).unwrap();
            let run = Run {
                vms: vec![VmSpec::closed(socket, 1, 4096)],
                options: Options::new(1, 4096),
                mix: Mix::READS,
                sectors: None,
                mode: Mode::Poll,
                warm_up: Duration::ZERO,
                measure: Duration::ZERO,
                seed: 1,
                server: None,
            };
            let outcome = fill(&run, 1);
            assert_eq!(outcome.is_ok(), is_full, "{outcome:?}");
        }
    }
}
