//! A quiet port, and a quiet disk, beside a port that floods the same core.
//!
//! The quiet one has one frame or request under way; its latency is at the 99th percentile, beside
//! the flood and without it, in turns. The client drives both from one thread, which is no part of
//! what is measured: a frame that has come would wait for the end of the client's own burst, 32
//! frames in and 32 out, longer than for the server. So it looks at the quiet one every
//! [`CLIENT_BURST`] frames, with either server; the time between two looks stands beside the
//! latencies, and so does the flood's rate, which the server's ring is kept full for all the same.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use report::{Measured, clock::Clock, object};
use vhost_blk::client::Client as Disk;
use vhost_blk::queue::{Extent, Op, Queue, Status};
use vhost_net::drive::{DriveError, Driver, Load, PortReport, PortSpec};
use vhost_net::frame::MIN_FRAME;
use vhost_net::hist::Histogram;
use vhost_net::host;
use vhost_net::{Options, ceiling};

use super::Bench;
use super::server::{self, Behind, Offer, Peer, Server};

const FLOOD: Load = Load::Window(ceiling::WINDOW);
/// Frames of the flood that the client takes or sends between two looks at the quiet one.
const CLIENT_BURST: usize = 4;
/// The quiet disk: nothing is read or written, so that what is measured is the core.
const DISK: &str = "null:1G";
/// Bytes of its reads.
const BLOCK: u32 = 4096;
/// Blocks of it that are read.
const BLOCKS: u64 = 1024;

/// The section.
pub fn quiet(bench: &mut Bench) -> Result<()> {
    bench.record.section(
        "One frame of 64 bytes, or one read of a null disk, under way beside a flooding port: p99 \
         beside it / without it",
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

/// One window: nanoseconds at p99, of latencies at p50 too, and frames of the flood per second.
#[derive(Clone, Copy, Debug)]
struct Window {
    latency: f64,
    median: f64,
    look: f64,
    flood: f64,
}

impl Window {
    fn of(latency: &Histogram, looks: &Histogram, flood: &PortReport) -> Self {
        Self {
            latency: latency.quantile(0.99) as f64,
            median: latency.quantile(0.5) as f64,
            look: looks.quantile(0.99) as f64,
            flood: flood.received_per_s,
        }
    }
}

/// Windows beside the flood and without it, by rounds.
struct Outcome(Vec<(Window, Window)>);

impl Outcome {
    fn measured(&self, of: impl Fn(&(Window, Window)) -> f64) -> Result<Measured> {
        Measured::of(self.0.iter().map(of)).context("no rounds")
    }
}

fn note(bench: &mut Bench, key: &str, outcome: Result<Outcome>) {
    let told = outcome.and_then(|outcome| {
        let ratio = outcome.measured(|(beside, alone)| beside.latency / alone.latency)?;
        bench.record.measured(key, ratio);
        let mut number = |name: &str, of: fn(&(Window, Window)) -> f64| {
            let median = outcome.measured(of)?.median;
            bench.record.number(&format!("{key}_{name}"), median);
            Ok::<_, anyhow::Error>(median)
        };
        let alone = number("alone_ns", |(_, alone)| alone.latency)? / 1e3;
        let beside = number("beside_ns", |(beside, _)| beside.latency)? / 1e3;
        let alone_p50 = number("alone_p50_ns", |(_, alone)| alone.median)? / 1e3;
        let beside_p50 = number("beside_p50_ns", |(beside, _)| beside.median)? / 1e3;
        let look = number("client_look_ns", |(beside, _)| beside.look)? / 1e3;
        let flood = number("flood_mpps", |(beside, _)| {
            object::round(beside.flood / 1e6, 3)
        })?;
        println!(
            "{key:34} {:.2} ({:.2} to {:.2}): {beside:.1} µs for {alone:.1}; p50 {beside_p50:.1} \
             for {alone_p50:.1}; \
             the client looks every {look:.1} µs (p99), the flood gets {flood:.2} M frames/s",
            ratio.median, ratio.min, ratio.max,
        );
        Ok(())
    });
    if let Err(error) = told {
        println!("{key:34} not measured: {error:#}");
    }
}

fn port(bench: &mut Bench, peer: Peer) -> Result<Outcome> {
    let specs = |_, sockets: &[PathBuf]| {
        let port =
            |socket: &PathBuf, load| PortSpec::looped(socket, Options::new(), load, MIN_FRAME);
        vec![port(&sockets[0], Load::Window(1)), port(&sockets[1], FLOOD)]
    };
    let mut contender = bench.contend(peer, &Offer::new(Behind::Loop, 2), &specs)?;
    contender.driver.set_burst(CLIENT_BURST);
    let mut rounds = Vec::new();
    for _ in 0..bench.settings.rounds {
        let mut window = |load| {
            contender.driver.set_load(1, load);
            bench.turn(&mut contender)?;
            let report = contender.reports.pop().context("no window")?;
            let [quiet, flood] = &report.ports[..] else {
                bail!("two ports have two reports");
            };
            Ok(Window::of(&quiet.latency, &quiet.looks, flood))
        };
        rounds.push((window(FLOOD)?, window(Load::Silent)?));
    }
    Ok(Outcome(rounds))
}

/// One read after the other on a disk, without waiting.
struct Reads {
    disk: Disk,
    clock: Clock,
    latency: Histogram,
    looked_at: u64,
    looks: Histogram,
    next: u64,
}

impl Reads {
    fn connect(server: &Server) -> Result<Self> {
        let socket = server.sockets().last().context("no disk")?;
        Ok(Self {
            disk: Disk::connect(socket, vhost_blk::Options::new(1, BLOCK))?,
            clock: Clock::new(),
            latency: Histogram::default(),
            looked_at: 0,
            looks: Histogram::default(),
            next: 0,
        })
    }

    /// Takes down a read that ended, and submits the next.
    fn poll(&mut self, now: u64, is_measured: bool) -> Result<()> {
        let since = now.saturating_sub(std::mem::replace(&mut self.looked_at, now));
        if is_measured {
            self.looks.record(since);
        }
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
    driver.set_burst(CLIENT_BURST);
    let mut reads = Reads::connect(&server)?;
    let window = bench.settings.window;
    let mut rounds = Vec::new();
    for _ in 0..bench.settings.rounds {
        let mut measure = |load| {
            driver.set_load(0, load);
            reads.latency.clear();
            reads.looks.clear();
            let report = driver.measure_beside(window / 4, window, None, |now, is_measured| {
                let outcome = reads.poll(now, is_measured);
                outcome.map_err(|error| DriveError::Host(std::io::Error::other(error)))
            })?;
            let flood = report.ports.first().context("one port has one report")?;
            Ok::<_, anyhow::Error>(Window::of(&reads.latency, &reads.looks, flood))
        };
        rounds.push((measure(FLOOD)?, measure(Load::Silent)?));
    }
    Ok(Outcome(rounds))
}
