//! A quiet port, and a quiet disk, beside a port that floods the same core.
//!
//! The quiet one has one frame or request under way; its latency is at the 99th percentile, beside
//! the flood and without it, in turns. The client polls both from one thread: part of what is added
//! beside the flood is its own burst of 32.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use report::{Measured, clock::Clock};
use vhost_blk::client::Client as Disk;
use vhost_blk::queue::{Extent, Op, Queue, Status};
use vhost_net::drive::{DriveError, Driver, Load, PortSpec};
use vhost_net::frame::MIN_FRAME;
use vhost_net::hist::Histogram;
use vhost_net::host;
use vhost_net::{Options, ceiling};

use super::Bench;
use super::server::{self, Behind, Offer, Peer, Server};

const FLOOD: Load = Load::Window(ceiling::WINDOW);
/// The quiet disk: nothing is read or written, so that what is measured is the core.
const DISK: &str = "null:1G";
/// Bytes of its reads.
const BLOCK: u32 = 4096;
/// Blocks of it that are read.
const BLOCKS: u64 = 1024;

/// The section.
pub fn quiet(bench: &mut Bench) -> Result<()> {
    bench.record.section(
        "One frame of 64 bytes, or one read of a null disk, under way beside a flooding port: p99 beside it / without it",
    );
    for peer in Peer::ALL {
        let suffix = if peer == Peer::Ours { "" } else { "_dpdk" };
        let key = format!("quiet_port_p99_vs_alone{suffix}");
        let outcome = port(bench, peer);
        note(bench, &key, outcome);
    }
    let outcome = disk(bench);
    note(bench, "disk_p99_vs_alone", outcome);
    Ok(())
}

/// Latencies at p99, beside the flood and without it, and the ratio, each of rounds.
struct Outcome {
    beside: Measured,
    alone: Measured,
    ratio: Measured,
}

impl Outcome {
    fn of(rounds: &[(f64, f64)]) -> Option<Self> {
        Some(Self {
            beside: Measured::of(rounds.iter().map(|round| round.0))?,
            alone: Measured::of(rounds.iter().map(|round| round.1))?,
            ratio: Measured::of(rounds.iter().map(|round| round.0 / round.1))?,
        })
    }
}

fn note(bench: &mut Bench, key: &str, outcome: Result<Outcome>) {
    match outcome {
        Ok(Outcome {
            beside,
            alone,
            ratio,
        }) => {
            bench.record.measured(key, ratio);
            bench
                .record
                .number(&format!("{key}_alone_ns"), alone.median);
            bench
                .record
                .number(&format!("{key}_beside_ns"), beside.median);
            println!(
                "{key:34} {:.2} ({:.2} to {:.2}): {:.1} µs for {:.1}",
                ratio.median,
                ratio.min,
                ratio.max,
                beside.median / 1e3,
                alone.median / 1e3
            );
        }
        Err(error) => println!("{key:34} not measured: {error:#}"),
    }
}

fn port(bench: &mut Bench, peer: Peer) -> Result<Outcome> {
    let specs = |_, sockets: &[PathBuf]| {
        let port =
            |socket: &PathBuf, load| PortSpec::looped(socket, Options::new(), load, MIN_FRAME);
        vec![port(&sockets[0], Load::Window(1)), port(&sockets[1], FLOOD)]
    };
    let mut contender = bench.contend(peer, &Offer::new(Behind::Loop, 2), &specs)?;
    let mut rounds = Vec::new();
    for _ in 0..bench.settings.rounds {
        let mut p99 = |load| {
            contender.driver.set_load(1, load);
            bench.turn(&mut contender)?;
            let report = contender.reports.pop().context("no window")?;
            let latency = &report.ports[0].latency;
            Ok::<_, anyhow::Error>(latency.quantile(0.99) as f64)
        };
        rounds.push((p99(FLOOD)?, p99(Load::Silent)?));
    }
    Outcome::of(&rounds).context("no rounds")
}

/// One read after the other on a disk, without waiting.
struct Reads {
    disk: Disk,
    clock: Clock,
    latency: Histogram,
    next: u64,
}

impl Reads {
    fn connect(server: &Server) -> Result<Self> {
        let socket = server.sockets().last().context("no disk")?;
        Ok(Self {
            disk: Disk::connect(socket, vhost_blk::Options::new(1, BLOCK))?,
            clock: Clock::new(),
            latency: Histogram::default(),
            next: 0,
        })
    }

    /// Takes down a read that ended, and submits the next.
    fn poll(&mut self, is_measured: bool) -> Result<()> {
        let (memory, layout, queues) = self.disk.parts();
        let queue: &mut Queue = &mut queues[0];
        if queue.outstanding() > 0 {
            let Some(done) = queue.complete(memory, layout)? else {
                return Ok(());
            };
            queue.release(done.slot);
            if done.status != Status::Ok {
                bail!("a read ended with {:?}", done.status);
            }
            if is_measured {
                let now = self.clock.now();
                self.latency.record(now.saturating_sub(done.since));
            }
        }
        let slot = queue.take_slot().context("nothing is outstanding")?;
        let extent = Extent {
            sector: self.next * u64::from(BLOCK / 512),
            bytes: BLOCK,
        };
        self.next = (self.next + 1) % BLOCKS;
        queue.submit(memory, layout, slot, Op::Read, extent, self.clock.now());
        queue.publish(memory);
        Ok(())
    }
}

fn disk(bench: &mut Bench) -> Result<Outcome> {
    let offer = Offer {
        disk: Some(DISK.to_owned()),
        ..Offer::new(Behind::Loop, 1)
    };
    let server = server::start(&bench.settings, Peer::Ours, &offer)?;
    host::pin(bench.settings.client_cpu)?;
    let spec = PortSpec::looped(&server.sockets()[0], Options::new(), FLOOD, MIN_FRAME);
    let mut driver = Driver::connect(&[spec])?;
    let mut reads = Reads::connect(&server)?;
    let window = bench.settings.window;
    let mut rounds = Vec::new();
    for _ in 0..bench.settings.rounds {
        let mut p99 = |load| {
            driver.set_load(0, load);
            reads.latency.clear();
            driver.measure_beside(window / 4, window, None, |_, is_measured| {
                let outcome = reads.poll(is_measured);
                outcome.map_err(|error| DriveError::Host(std::io::Error::other(error)))
            })?;
            Ok::<_, anyhow::Error>(reads.latency.quantile(0.99) as f64)
        };
        rounds.push((p99(FLOOD)?, p99(Load::Silent)?));
    }
    Outcome::of(&rounds).context("no rounds")
}
