//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use report::short;
use vhost_net::client::feature as net;
use vhost_net::drive::{Driver, Load, PortReport, PortSpec};
use vhost_net::frame::{MIN_FRAME, mac};
use vhost_net::ring::feature;
use vhost_net::{Options, ceiling, host};

use crate::bench;

/// A vhost-user-net front end without a VM.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Loads ports and prints what arrived.
    Load(LoadArgs),
    /// Our server beside DPDK's vhost.
    ServeBench(Box<ServeBench>),
    /// The page of results, from the figures of an earlier run.
    Docs(Docs),
    /// The rate that this client reaches against a server that does next to nothing.
    Ceiling(Ceiling),
}

/// The CPUs of a measurement.
#[derive(Args, Clone, Copy)]
struct Cpus {
    /// The server's CPU.
    #[arg(long, default_value_t = 0)]
    server_cpu: usize,
    /// The client's CPU.
    #[arg(long, default_value_t = 1)]
    client_cpu: usize,
}

/// Direction of the traffic of ports.
#[derive(Clone, Copy, ValueEnum)]
enum Traffic {
    /// Send to a server that discards.
    Sink,
    /// Receive from a server that makes frames.
    Source,
    /// Send to a server that returns each frame to its port.
    Loop,
    /// Send from each port to the next, and from the last to the first.
    Ring,
}

#[derive(Args)]
struct LoadArgs {
    /// Sockets of the ports.
    #[arg(required = true, value_name = "SOCKET")]
    ports: Vec<PathBuf>,
    /// Device behind the ports.
    #[arg(short, long, default_value = "loop")]
    traffic: Traffic,
    /// Bytes of a frame.
    #[arg(short, long, default_value_t = 64)]
    len: u32,
    /// Frames under way per pair; 1: there and back, with latencies. Not with a sink.
    #[arg(short, long, default_value_t = ceiling::WINDOW)]
    window: u64,
    /// Frames per second and pair, at equal distances.
    #[arg(long)]
    rate: Option<f64>,
    /// Queue pairs per port.
    #[arg(long, default_value_t = 1)]
    pairs: u16,
    /// Entries per ring.
    #[arg(long, default_value_t = 256)]
    ring_size: u16,
    /// Take packed rings.
    #[arg(long)]
    packed: bool,
    /// Take VIRTIO_F_IN_ORDER.
    #[arg(long)]
    in_order: bool,
    /// Leave MRG_RXBUF alone.
    #[arg(long)]
    single: bool,
    /// Bytes of a receive buffer with its header; fewer than a frame make servers merge.
    #[arg(long, default_value_t = 1530)]
    buffer: u32,
    /// Seconds measured.
    #[arg(short, long, default_value_t = 2.0)]
    seconds: f64,
    /// Seconds before that.
    #[arg(long, default_value_t = 0.5)]
    warm_up: f64,
    /// The CPU to run on.
    #[arg(long)]
    cpu: Option<usize>,
}

impl LoadArgs {
    fn spec(&self, at: usize) -> PortSpec {
        let features = [
            (self.packed, feature::PACKED),
            (self.in_order, feature::IN_ORDER),
        ];
        let wanted = features.iter().filter(|(wanted, _)| *wanted);
        let mut options = Options::new()
            .require(wanted.fold(0, |bits, (_, bit)| bits | bit))
            .pairs(self.pairs);
        if self.single {
            options = options.without(net::MRG_RXBUF);
        }
        (options.ring_size, options.buffer_len) = (self.ring_size, self.buffer);
        let load = match (self.rate, self.traffic) {
            (Some(rate), _) => Load::Rate(rate),
            (None, Traffic::Sink) => Load::Flood,
            (None, _) => Load::Window(self.window),
        };
        let next = (at + 1) % self.ports.len();
        let socket = &self.ports[at];
        match self.traffic {
            Traffic::Sink => PortSpec::to_sink(socket, options, load, self.len),
            Traffic::Source => PortSpec::from_source(socket, options, self.len),
            Traffic::Loop => PortSpec::looped(socket, options, load, self.len),
            Traffic::Ring => PortSpec {
                addresses: (mac(1 + next as u8), mac(1 + at as u8)),
                ..PortSpec::looped(socket, options, load, self.len)
            },
        }
    }

    fn run(&self) -> Result<()> {
        if self.len < MIN_FRAME || self.buffer < MIN_FRAME + 12 || self.ports.len() > 200 {
            bail!(
                "frames have at least {MIN_FRAME} bytes, buffers 12 more, and there are at most \
                 200 ports"
            );
        }
        if !(self.rate.is_none_or(|rate| rate > 0.0) && self.pairs > 0 && self.seconds > 0.0) {
            bail!("rates, pairs and times are positive");
        }
        if let Some(cpu) = self.cpu {
            host::pin(cpu).with_context(|| format!("CPU {cpu}"))?;
        }
        let specs: Vec<_> = (0..self.ports.len()).map(|at| self.spec(at)).collect();
        let mut driver = Driver::connect(&specs)?;
        let seconds = |seconds: f64| Duration::from_secs_f64(seconds.clamp(0.0, 1e6));
        let report = driver.measure(seconds(self.warm_up), seconds(self.seconds), None)?;
        for (port, report) in self.ports.iter().zip(&report.ports) {
            println!("{}: {}", port.display(), line(report));
        }
        if report.lost() + report.wrong() > 0 && !matches!(self.traffic, Traffic::Sink) {
            bail!("{} lost, {} wrong", report.lost(), report.wrong());
        }
        Ok(())
    }
}

fn line(port: &PortReport) -> String {
    let latency = match port.latency.quantile(0.5) {
        0 => String::new(),
        p50 => format!(", p50 {p50} ns, p99 {} ns", port.latency.quantile(0.99)),
    };
    format!(
        "{} frames/s received ({:.2} Gb/s), {} taken{latency}; {} lost of {}, {} late, {:?}, {} \
         checked, {} foreign, {} kicks, {} calls",
        short(port.received_per_s),
        port.bytes_per_s * 8.0 / 1e9,
        short(port.taken_per_s),
        port.counts.lost(),
        port.counts.sent,
        port.counts.late,
        port.wrong,
        port.checked,
        port.foreign,
        port.kicks,
        port.calls
    )
}

#[derive(Args)]
struct ServeBench {
    /// Our server's command line; {devices}, {cpu} and {idle} are filled in.
    #[arg(
        long,
        default_value = "target/release/exitless serve {devices} --cpu {cpu} --idle {idle}"
    )]
    ours: String,
    /// Our source, as a device of the command line; {len} is a frame's bytes.
    #[arg(long, default_value = "source,frame={len}")]
    source: String,
    /// Our server's idle policy.
    #[arg(long, default_value = "adaptive")]
    idle: String,
    /// DPDK's testpmd: another program than the one on PATH.
    #[arg(long, value_name = "PROGRAM", default_value = "dpdk-testpmd")]
    testpmd: String,
    #[command(flatten)]
    cpus: Cpus,
    /// Milliseconds of a window.
    #[arg(short, long, default_value_t = 200)]
    window: u64,
    /// Rounds of windows.
    #[arg(short, long, default_value_t = 9)]
    rounds: usize,
    /// Priority of server and client, as far as it is allowed.
    #[arg(long, default_value_t = -20, allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-20..=19))]
    nice: i32,
    /// Only these sections; the report keeps its figures of the others.
    #[arg(long, value_delimiter = ',', value_parser = bench::SECTIONS)]
    only: Vec<String>,
    /// Where the figures go, as one JSON object.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/serve-net.json"
    )]
    report: PathBuf,
    /// Where a page made from them goes.
    #[arg(long, value_name = "FILE")]
    docs: Option<PathBuf>,
}

impl ServeBench {
    fn run(self) -> Result<()> {
        bench::run(bench::Settings {
            ours: self.ours,
            source: self.source,
            idle: self.idle,
            testpmd: self.testpmd,
            server_cpu: self.cpus.server_cpu,
            client_cpu: self.cpus.client_cpu,
            window: Duration::from_millis(self.window.max(1)),
            rounds: self.rounds.max(1),
            nice: self.nice,
            only: self.only,
            report: self.report,
            docs: self.docs,
        })
    }
}

#[derive(Args)]
struct Docs {
    /// The figures.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/serve-net.json"
    )]
    report: PathBuf,
    /// The page.
    #[arg(long, value_name = "FILE", default_value = "docs/serve-net-results.md")]
    docs: PathBuf,
}

#[derive(Args)]
struct Ceiling {
    #[command(flatten)]
    cpus: Cpus,
    /// Seconds per row.
    #[arg(short, long, default_value_t = 1.0)]
    seconds: f64,
}

impl Ceiling {
    fn run(&self) -> Result<()> {
        let cpus = (self.cpus.server_cpu, self.cpus.client_cpu);
        for len in [64, 1518] {
            for (ring, features) in [
                ("split", 0),
                ("split, in order", feature::IN_ORDER),
                ("packed", feature::PACKED),
                ("packed, in order", feature::PACKED | feature::IN_ORDER),
            ] {
                for kind in [
                    ceiling::Kind::Sink,
                    ceiling::Kind::Source(len),
                    ceiling::Kind::Loop,
                ] {
                    let seconds = Duration::from_secs_f64(self.seconds.clamp(0.01, 1e6));
                    let options = Options::new().require(features);
                    let report = ceiling::measure(cpus, &options, kind, len, seconds)?;
                    let rate = match kind {
                        ceiling::Kind::Sink => report.sum(|port| port.taken_per_s),
                        _ => report.sum(|port| port.received_per_s),
                    };
                    let wrong = report.wrong() + report.lost();
                    let kind = format!("{kind:?}");
                    let rate = short(rate);
                    println!(
                        "{kind:12} {ring:17} {len:4} bytes: {rate:>8} frames/s, {wrong} wrong or \
                         lost"
                    );
                }
            }
        }
        Ok(())
    }
}

/// Parses the command line and runs the subcommand.
pub fn run() -> Result<()> {
    match Cli::parse().command {
        Command::Load(load) => load.run(),
        Command::ServeBench(bench) => bench.run(),
        Command::Docs(docs) => bench::page(&docs.report, &docs.docs),
        Command::Ceiling(ceiling) => ceiling.run(),
    }
}
