//! A front end behind an IOMMU that never answers for a translation, and a neighbour on the same
//! core.
//!
//! Time is taken from when the miss has come, to when the ring's error descriptor says that the
//! device needs a reset. Meanwhile the neighbour has one frame under way; its latency at the 99th
//! percentile is compared with that of a window without the other one, in the same round.

use std::hint::spin_loop;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use report::{Measured, object};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use vhost_client::areas::{self, Areas, FIRST, user};
use vhost_client::link::{Link, Wanted};
use vhost_client::memory::Memory;
use vhost_client::notifiers::Notifiers;
use vhost_client::ring::{Ring, Segment, feature};
use vhost_net::drive::{Load, PortSpec};
use vhost_net::frame::{HEADER_LEN, MIN_FRAME};
use vhost_net::{Options, host};
use vhost_user::frontend::{self, BackEndChannel, Connection};
use vhost_user::wire::{
    BackendRequest, IotlbAccess, IotlbMessage, IotlbRange, ProtocolFeatures, Request,
    feature as vhost_feature,
};

use super::Bench;
use super::server::{Behind, Offer, Peer, Server};

/// IOVA of the memory's first byte: far from its guest-physical and user addresses.
const IOVA: u64 = 0x10_0000;
const PAGE: usize = 4096;
const RING_SIZE: u16 = 64;
/// Queues of the one pair.
const QUEUES: u16 = 2;
const TRANSMIT: u16 = 1;
/// Longest measured part of a miss, which lasts 900 ms.
const LONGEST: Duration = Duration::from_millis(500);
/// The miss has come, or been given up, by then.
const PATIENCE: Duration = Duration::from_secs(5);

/// The section.
pub fn unanswered(bench: &mut Bench) -> Result<()> {
    bench.record.section(
        "A miss of another port's front end that is never answered: until its device needs a \
         reset; a looped port's p99 meanwhile / without it",
    );
    match measure(bench) {
        Ok((took, ratio)) => {
            let key = "miss_unanswered_ms";
            // The bound is for each.
            bench.record.number(key, object::round(took.max, 1));
            println!("{key:34} {:.1} ({:.1} at least)", took.max, took.min);
            let key = "miss_neighbour_p99_vs_alone";
            bench.record.measured(key, ratio);
            println!(
                "{key:34} {:.2} ({:.2} to {:.2})",
                ratio.median, ratio.min, ratio.max
            );
        }
        Err(error) => println!("miss_unanswered_ms: not measured: {error:#}"),
    }
    Ok(())
}

/// Milliseconds, and the neighbour's ratio.
fn measure(bench: &mut Bench) -> Result<(Measured, Measured)> {
    let specs = |_, sockets: &[PathBuf]| {
        let options = Options::new();
        vec![PortSpec::looped(
            &sockets[0],
            options,
            Load::Window(1),
            MIN_FRAME,
        )]
    };
    let mut contender = bench.contend(Peer::Ours, &Offer::new(Behind::Loop, 2), &specs)?;
    let (mut times, mut ratios) = (Vec::new(), Vec::new());
    for _ in 0..bench.settings.rounds {
        let server: &Server = &contender.server;
        server.resume()?;
        let time = bench.settings.window.min(LONGEST);
        let mut p99 = || {
            let report = contender.driver.measure(time / 4, time, None)?;
            ensure!(report.lost() == 0, "{} frames were lost", report.lost());
            Ok(report.ports[0].latency.quantile(0.99) as f64)
        };
        let alone = p99()?;
        let mut silent = Silent::connect(&server.sockets()[1])?;
        let since = silent.miss()?;
        let beside = p99()?;
        ensure!(
            !silent.needs_reset(),
            "it was given up while it was measured"
        );
        while !silent.needs_reset() {
            ensure!(since.elapsed() < PATIENCE, "nothing comes of the miss");
            spin_loop();
        }
        times.push(since.elapsed().as_secs_f64() * 1e3);
        ratios.push(beside / alone);
        drop(silent);
        contender.server.pause()?;
    }
    host::pin(bench.settings.client_cpu)?;
    let figures = (Measured::of(times), Measured::of(ratios));
    figures.0.zip(figures.1).context("no rounds")
}

/// A front end whose driver's rings are mapped and whose buffers are not.
struct Silent {
    /// Closed with it.
    connection: Connection,
    channel: BackEndChannel,
    memory: Memory,
    notifiers: Vec<Notifiers>,
    errors: Vec<OwnedFd>,
    ring: Ring,
    /// Offset of the frame.
    frame: usize,
}

impl Silent {
    fn connect(path: &Path) -> Result<Self> {
        let features =
            feature::VERSION_1 | vhost_feature::PROTOCOL_FEATURES | vhost_feature::ACCESS_PLATFORM;
        let protocol = ProtocolFeatures::REPLY_ACK | ProtocolFeatures::BACKEND_REQ;
        let link = Link::open(
            path,
            &Wanted {
                // Bit 33 is offered behind these two.
                features: features & !vhost_feature::ACCESS_PLATFORM,
                protocol,
                required: (feature::VERSION_1, protocol),
                timeout: PATIENCE,
            },
        )?;
        let mut connection = link.connection;
        let offered = connection.value(Request::GetFeatures)?;
        ensure!(
            offered & features == features,
            "no device behind an IOMMU is offered: {offered:#x}"
        );
        let channel = connection.open_channel()?;
        connection.set_features(features)?;
        let areas = Areas::new(RING_SIZE, false);
        let frame = areas.len(QUEUES);
        let memory = Memory::create(frame + PAGE)?;
        let region = areas::region(FIRST, 0, memory.len());
        connection.share_memory(&[region], memory.file())?;
        let range = IotlbRange {
            first: IOVA,
            last: IOVA + frame as u64 - 1,
        };
        connection.call(Request::Iotlb(IotlbMessage::Update {
            range,
            user_addr: user(0),
            access: IotlbAccess::ReadWrite,
        }))?;
        let mut own = Self {
            connection,
            channel,
            memory,
            notifiers: Vec::new(),
            errors: Vec::new(),
            ring: Ring::new(RING_SIZE, areas.places(TRANSMIT), features),
            frame,
        };
        own.start(&areas)?;
        Ok(own)
    }

    fn start(&mut self, areas: &Areas) -> Result<()> {
        for _ in 0..QUEUES {
            self.notifiers.push(Notifiers::new()?);
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            self.errors.push(eventfd(0, flags)?);
        }
        let rings = (0..QUEUES).map(|queue| {
            let at = usize::from(queue);
            let iova = |offset: usize| IOVA + offset as u64;
            let places = areas.places(queue);
            frontend::Ring {
                desc: iova(places.desc),
                avail: iova(places.driver),
                used: iova(places.device),
                err: Some(self.errors[at].as_fd()),
                ..areas.described(queue as u8, 0, &self.notifiers[at])
            }
        });
        let rings: Vec<_> = rings.collect();
        Ok(self.connection.start_rings(&rings)?)
    }

    /// Sends a frame, and answers when its miss came.
    fn miss(&mut self) -> Result<Instant> {
        let frame = Segment {
            addr: IOVA + self.frame as u64,
            len: HEADER_LEN + MIN_FRAME,
            is_writable: false,
        };
        ensure!(self.ring.add(&self.memory, 0, &[frame], None), "no room");
        self.ring.publish(&self.memory);
        self.notifiers[usize::from(TRANSMIT)].kick();
        let start = Instant::now();
        loop {
            match self.channel.receive()? {
                Some((BackendRequest::Iotlb(IotlbMessage::Miss { iova, .. }), true)) => {
                    ensure!(iova / PAGE as u64 == frame.addr / PAGE as u64, "{iova:#x}");
                    return Ok(Instant::now());
                }
                Some((request, _)) => bail!("{request:?} where a miss was expected"),
                None => ensure!(start.elapsed() < PATIENCE, "nothing is asked for"),
            }
            spin_loop();
        }
    }

    fn needs_reset(&self) -> bool {
        let mut errors = self.errors.iter();
        errors.any(|error| rustix::io::read(error, &mut [0; 8]).is_ok())
    }
}
