//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use report::short;
use rustix::process::{Resource, getrlimit, setrlimit};
use vhost_blk::client::Options;
use vhost_blk::killer::Killer;
use vhost_blk::load::{Mix, Mode, Pacing, VmSpec};
use vhost_blk::ring::feature;
use vhost_blk::stats::micros;
use vhost_blk::verify::{Verify, verify};
use vhost_blk::{Run, ceiling, drive, host};
use vhost_user::wire::ProtocolFeatures;

use crate::bench;

/// A vhost-user-blk front end without a VM.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Load disks and measure them.
    Load(Load),
    /// Write, read and compare, also while the server is killed and restarted.
    Verify(VerifyArgs),
    /// Compare our server with its peers: tables, a report and plots.
    ServeBench(ServeBench),
    /// Measure this client itself: a server that does nothing, on another CPU.
    Ceiling(Ceiling),
    /// A cache line's round trip between two CPUs.
    Rtt(Cpus),
}

#[derive(Args)]
struct VerifyArgs {
    /// Disks: sockets.
    #[arg(required = true, value_name = "SOCKET")]
    disks: Vec<PathBuf>,
    #[command(flatten)]
    connect: Connect,
    /// Requests outstanding per queue.
    #[arg(short = 'q', long = "qd", default_value_t = 16)]
    depth: u16,
    /// Bytes per request.
    #[arg(short, long = "bs", default_value_t = 4096)]
    block: u32,
    /// Blocks of each disk used.
    #[arg(long, default_value_t = 4096)]
    blocks: usize,
    /// Seconds of requests before the final reading.
    #[arg(short, long, default_value_t = 5.0)]
    seconds: f64,
    /// Poll instead of sleeping on calls.
    #[arg(long)]
    poll: bool,
    /// Discards and zeroes too.
    #[arg(long)]
    zeroes: bool,
    /// Read and write journals at FILE.0, FILE.1, …
    #[arg(long, value_name = "FILE")]
    journal: Option<PathBuf>,
    /// Only compare what the journals know.
    #[arg(long, requires = "journal")]
    only_check: bool,
    /// The first disk's number in what is written.
    #[arg(long, default_value_t = 1)]
    first_client: u32,
    /// Start the server by this shell command, and kill it as often as --kills says.
    #[arg(long, value_name = "COMMAND")]
    server: Option<String>,
    /// Kills (SIGKILL) of the server.
    #[arg(long, default_value_t = 0, requires = "server")]
    kills: u32,
    /// Milliseconds between kills, at random between the two.
    #[arg(long, value_name = "FROM,TO", default_value = "200,1000", value_parser = numbers::<2>)]
    kill_every: [f64; 2],
    /// For the random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl VerifyArgs {
    fn run(&self) -> Result<()> {
        let mut options = self.connect.options();
        (options.depth, options.block) = (self.depth, self.block);
        let killer = match (&self.server, self.kill_every) {
            (Some(command), [from, to]) => {
                // A socket of an earlier run would be mistaken for the new server's.
                for socket in &self.disks {
                    let _ = std::fs::remove_file(socket);
                }
                let millis = |ms: f64| Duration::from_secs_f64(ms.clamp(0.0, 1e9) / 1e3);
                let between = (millis(from), millis(to));
                let started = Killer::start(command, self.kills, between);
                Some(started.with_context(|| command.clone())?)
            }
            _ => None,
        };
        let verdict = verify(
            &Verify {
                sockets: self.disks.clone(),
                options,
                first_client: self.first_client,
                blocks: self.blocks,
                duration: Duration::from_secs_f64(self.seconds),
                sleeps: !self.poll,
                zeroes: self.zeroes,
                journal: self.journal.clone(),
                only_check: self.only_check,
                seed: self.seed,
            },
            killer,
        )?;
        if self.json {
            println!("{}", serde_json::to_string(&verdict)?);
        } else {
            println!("{verdict}");
        }
        if !verdict.is_good() {
            bail!("verification failed");
        }
        Ok(())
    }
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

#[derive(Args)]
struct ServeBench {
    /// Our server's command line; {blocks}, {cpu} and {idle} are filled in.
    #[arg(
        long,
        default_value = "target/release/exitless serve {blocks} --cpu {cpu} --idle {idle}"
    )]
    ours: String,
    /// Another build's command line, as ours: measured beside it, in turns (section `pairs`).
    #[arg(long, value_name = "COMMAND")]
    beside: Option<String>,
    /// Our server's idle policy where the row is not about policies.
    #[arg(long, default_value = "adaptive")]
    idle: String,
    /// qemu-storage-daemon: another program than the one on PATH.
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-storage-daemon")]
    qsd: String,
    /// A directory with a build of SPDK: its `build/bin/vhost` is measured, too.
    #[arg(long, value_name = "DIRECTORY")]
    spdk: Option<PathBuf>,
    /// Where files lie that are not in memory: on the file system that is to be measured.
    #[arg(long, value_name = "DIRECTORY", default_value = "target/bench")]
    files: PathBuf,
    #[command(flatten)]
    cpus: Cpus,
    /// Seconds per repetition.
    #[arg(short, long, default_value_t = 1.0)]
    seconds: f64,
    /// Repetitions.
    #[arg(short, long, default_value_t = 5)]
    repetitions: usize,
    /// Forced sleeps to make in all.
    #[arg(long, default_value_t = 1_000_000)]
    sleeps: u64,
    /// Priority of server and client, as far as it is allowed.
    #[arg(long, default_value_t = -20, allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-20..=19))]
    nice: i32,
    /// Let the CPUs halt.
    #[arg(long)]
    no_spinners: bool,
    /// Only these sections.
    #[arg(long, value_delimiter = ',', value_parser = bench::SECTIONS)]
    only: Vec<String>,
    /// Where the figures go, as one JSON object; plots lie beside it.
    #[arg(long, value_name = "FILE", default_value = "target/report/serve.json")]
    report: PathBuf,
}

impl ServeBench {
    fn run(self) -> Result<()> {
        bench::run(bench::Settings {
            ours: self.ours,
            beside: self.beside,
            idle: self.idle,
            qsd: self.qsd,
            spdk: self.spdk,
            files: self.files,
            server_cpu: self.cpus.server_cpu,
            client_cpu: self.cpus.client_cpu,
            seconds: self.seconds,
            repetitions: self.repetitions.max(1),
            nice: self.nice,
            spinners: !self.no_spinners,
            sleeps: self.sleeps,
            only: self.only,
            report: self.report,
        })
    }
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
        for (name, status) in [("indices only", false), ("with a status", true)] {
            for (ring, packed) in [("split", 0), ("packed", feature::PACKED)] {
                for depth in [1, 4, 32, 128] {
                    let report = ceiling::measure(
                        (self.cpus.server_cpu, self.cpus.client_cpu),
                        packed,
                        depth,
                        status,
                        Duration::from_secs_f64(self.seconds),
                    )?;
                    println!(
                        "{name:14} {ring:6} depth {depth:3}: {:>8} IOPS, p50 {:>6} µs",
                        short(report.iops),
                        micros(report.latency.p50_ns)
                    );
                }
            }
        }
        Ok(())
    }
}

/// So many numbers with commas between.
fn numbers<const N: usize>(text: &str) -> Result<[f64; N], String> {
    let numbers: Result<Vec<f64>, _> = text.split(',').map(str::parse).collect();
    let numbers = numbers.ok().and_then(|numbers| numbers.try_into().ok());
    let numbers = numbers.filter(|numbers: &[f64; N]| numbers.iter().all(|n| n.abs() < 1e9));
    numbers.ok_or_else(|| format!("`{text}` is not {N} numbers with commas between"))
}

/// How to connect.
#[derive(Args, Clone)]
struct Connect {
    /// Queues per disk.
    #[arg(long, default_value_t = 1)]
    queues: u16,
    /// Entries per ring [default: 256, or what the depth needs].
    #[arg(long)]
    ring_size: Option<u16>,
    /// Take packed rings.
    #[arg(long)]
    packed: bool,
    /// Take VIRTIO_F_IN_ORDER.
    #[arg(long)]
    in_order: bool,
    /// Take and use indirect descriptors.
    #[arg(long)]
    indirect: bool,
    /// Leave EVENT_IDX alone.
    #[arg(long)]
    no_event_idx: bool,
    /// Ask for an inflight region.
    #[arg(long)]
    inflight: bool,
    /// Leave CONFIGURE_MEM_SLOTS alone (SET_MEM_TABLE).
    #[arg(long)]
    no_mem_slots: bool,
    /// Leave REPLY_ACK alone.
    #[arg(long)]
    no_reply_ack: bool,
    /// Tell the memory as two regions.
    #[arg(long)]
    two_regions: bool,
    /// Seconds to wait for a listener, and for each reply.
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS")]
    timeout: f64,
}

impl Connect {
    fn options(&self) -> Options {
        let mut options = Options::new(1, 4096);
        let features = [
            (self.packed, feature::PACKED),
            (self.in_order, feature::IN_ORDER),
            (self.indirect, feature::INDIRECT),
        ];
        for (_, bit) in features.iter().filter(|(wanted, _)| *wanted) {
            options.require(*bit);
        }
        if self.no_event_idx {
            options.features &= !feature::EVENT_IDX;
        }
        if self.inflight {
            options.require_protocol(ProtocolFeatures::INFLIGHT_SHMFD);
        }
        let without = [
            (self.no_mem_slots, ProtocolFeatures::CONFIGURE_MEM_SLOTS),
            (self.no_reply_ack, ProtocolFeatures::REPLY_ACK),
        ];
        for (_, bit) in without.iter().filter(|(unwanted, _)| *unwanted) {
            options.protocol = options.protocol.without(*bit);
        }
        options.queues = self.queues;
        options.ring_size = self.ring_size;
        options.two_regions = self.two_regions;
        options.timeout = Duration::from_secs_f64(self.timeout);
        options
    }
}

#[derive(Args)]
struct Load {
    /// Disks: SOCKET[,qd=N][,bs=N][,weight=W][,rate=R].
    #[arg(required = true, value_name = "DISK")]
    disks: Vec<String>,
    #[command(flatten)]
    connect: Connect,
    /// Requests outstanding per queue.
    #[arg(short = 'q', long = "qd", default_value_t = 1)]
    depth: u16,
    /// Bytes per request.
    #[arg(short, long = "bs", default_value_t = 4096)]
    block: u32,
    /// Reads in percent; the rest are writes.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u8).range(0..=100))]
    read: u8,
    /// Flushes in percent.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    flush: u8,
    /// One request after the other on the disk, not random.
    #[arg(long)]
    sequential: bool,
    /// Only the first MiB of each disk.
    #[arg(long, value_name = "MIB")]
    region: Option<u64>,
    /// How completions are learnt of: poll, event or spin:MICROSECONDS.
    #[arg(short, long, default_value = "poll")]
    mode: Mode,
    /// Open loop: requests per second and disk, at random times.
    #[arg(long)]
    rate: Option<f64>,
    /// With --rate: at equal distances.
    #[arg(long, requires = "rate")]
    uniform: bool,
    /// Open loop in bursts: milliseconds on, milliseconds off, requests per second while on.
    #[arg(long, value_name = "ON,OFF,RATE", conflicts_with = "rate", value_parser = numbers::<3>)]
    burst: Option<[f64; 3]>,
    /// Open loop whose rate changes in the middle.
    #[arg(long, value_name = "FROM,TO", conflicts_with_all = ["rate", "burst"], value_parser = numbers::<2>)]
    step: Option<[f64; 2]>,
    /// Seconds measured.
    #[arg(short, long, default_value_t = 2.0)]
    seconds: f64,
    /// Seconds before that.
    #[arg(long, default_value_t = 0.5)]
    warm_up: f64,
    /// The CPU to run on.
    #[arg(long)]
    cpu: Option<usize>,
    /// For the random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The server's process, for its CPU time.
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Load {
    fn pacing(&self) -> Result<Pacing> {
        Ok(match (self.rate, self.burst, self.step) {
            (Some(rate), _, _) if rate > 0.0 && self.uniform => Pacing::Uniform(rate),
            (Some(rate), _, _) if rate > 0.0 => Pacing::Poisson(rate),
            (_, Some([on, off, rate]), _) if on >= 1e-6 && off >= 0.0 && rate > 0.0 => {
                Pacing::Burst {
                    on_ns: (on * 1e6) as u64,
                    off_ns: (off * 1e6) as u64,
                    rate,
                }
            }
            (_, _, Some([from, to])) if from > 0.0 && to > 0.0 => Pacing::Step { from, to },
            (None, None, None) => Pacing::Closed,
            _ => bail!("rates and times are positive numbers"),
        })
    }

    fn run(&self) -> Result<()> {
        let default = VmSpec {
            pacing: self.pacing()?,
            ..VmSpec::closed(PathBuf::new(), self.depth, self.block)
        };
        let vms = self
            .disks
            .iter()
            .map(|disk| VmSpec::parse(disk, &default))
            .collect::<Result<_, _>>()
            .map_err(anyhow::Error::msg)?;
        if let Some(cpu) = self.cpu {
            host::pin(cpu).with_context(|| format!("CPU {cpu}"))?;
        }
        let report = drive(&Run {
            vms,
            options: self.connect.options(),
            mix: Mix {
                read: self.read,
                flush: self.flush,
                is_sequential: self.sequential,
            },
            sectors: self.region.map(|mib| mib * 2048),
            mode: self.mode,
            warm_up: Duration::from_secs_f64(self.warm_up),
            measure: Duration::from_secs_f64(self.seconds),
            seed: self.seed,
            server: self.server_pid,
        })?;
        match self.json {
            true => println!("{}", serde_json::to_string(&report)?),
            false => println!("{report}"),
        }
        Ok(())
    }
}

/// Four descriptors a disk, here and more so in servers started from here: 1,024 is no limit for
/// 256 disks.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(errno) = setrlimit(Resource::Nofile, limit) {
        eprintln!("the limit of open files stays as it is: {errno}");
    }
}

/// Reads the command line and does what it says.
pub fn run() -> Result<()> {
    raise_descriptor_limit();
    match Cli::parse().command {
        Command::Load(load) => load.run(),
        Command::Verify(verify) => verify.run(),
        Command::ServeBench(bench) => bench.run(),
        Command::Ceiling(ceiling) => ceiling.run(),
        Command::Rtt(cpus) => {
            let rtt = host::round_trip(cpus.client_cpu, cpus.server_cpu)?;
            println!(
                "cache-line round trip: {:.0} ns, fastest {:.0} ns",
                rtt.median, rtt.min
            );
            Ok(())
        }
    }
}
