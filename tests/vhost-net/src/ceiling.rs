//! This client's own ceiling: its results when the server costs next to nothing.
//!
//! A [`Loopback`] server on another CPU returns transmitted buffers unread (`Sink`), writes a
//! header and no frame into receive buffers (`Source`), or copies frames from the one to the other
//! (`Loop`: sums must hold, and one copy is the least that any server makes). It never kicks, calls
//! or checks. What the client reaches against it is the most it could ever show of a server; a
//! result close to it says more of the client than of the server.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use vhost_user::backend::{Config, RingBase, RingConfig, RingLayout};
use vhost_user::wire::ProtocolFeatures;

use crate::client::{Options, feature as net};
use crate::drive::{DriveError, Driver, Load, PortSpec, Report};
use crate::frame::HEADER_LEN;
use crate::loopback::{Guest, Loopback, Next, Service};
use crate::memory::Memory;
use crate::ring::feature;

/// Frames per visit and pair.
const BATCH: usize = 32;
/// Bytes copied at a time.
const PIECE: usize = 2048;
/// VIRTQ_DESC_F_AVAIL and VIRTQ_DESC_F_USED.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// VRING_USED_F_NO_NOTIFY, and RING_EVENT_FLAGS_DISABLE.
const NO_EVENTS: u16 = 1;
/// Frames under way in a loop.
pub const WINDOW: u64 = 128;

/// Treatment of frames by the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Returns what is sent, unread.
    Sink,
    /// Fills receive buffers with frames of so many bytes, of which it writes the header only.
    Source(u32),
    /// Sends them back.
    Loop,
}

/// One ring, its buffers being single descriptors in the order they were made available.
struct Ring {
    layout: RingLayout,
    size: u16,
    /// User addresses of the three areas.
    areas: [u64; 3],
    next_avail: u16,
    avail_wrap: bool,
    seen: u16,
    next_used: u16,
    used_wrap: bool,
}

/// A buffer of the driver.
#[derive(Clone, Copy)]
struct Buffer {
    id: u16,
    addr: u64,
    len: u32,
}

impl Ring {
    fn new(guest: &Guest, ring: &RingConfig) -> Self {
        // No kicks: no thread sleeps here.
        if let Some((memory, device)) = guest.user(ring.used, 4) {
            match ring.layout {
                RingLayout::Split => memory.store_u16(device, NO_EVENTS, Relaxed),
                RingLayout::Packed => memory.store_u16(device + 2, NO_EVENTS, Relaxed),
            }
        }
        Self {
            layout: ring.layout,
            size: ring.size,
            areas: [ring.desc, ring.avail, ring.used],
            next_avail: 0,
            avail_wrap: true,
            seen: 0,
            next_used: 0,
            used_wrap: true,
        }
    }

    /// One region holds all three areas, as our own client's layout has it.
    #[inline]
    fn find<'a>(&self, guest: &'a Guest) -> Option<(&'a Memory, [usize; 3])> {
        let [desc, driver, device] = self.areas;
        let (memory, at) = guest.user(desc, 16)?;
        let offset = |addr: u64| at + (addr - desc) as usize;
        Some((memory, [at, offset(driver), offset(device)]))
    }

    #[inline]
    fn take(&mut self, memory: &Memory, [desc, driver, _]: [usize; 3]) -> Option<Buffer> {
        let (at, id) = match self.layout {
            RingLayout::Split => {
                if self.seen == self.next_avail {
                    self.seen = memory.load_u16(driver + 2, Acquire);
                    if self.seen == self.next_avail {
                        return None;
                    }
                }
                let slot = usize::from(self.next_avail & (self.size - 1));
                let head = memory.load_u16(driver + 4 + 2 * slot, Relaxed);
                self.next_avail = self.next_avail.wrapping_add(1);
                (desc + 16 * usize::from(head), head)
            }
            RingLayout::Packed => {
                let at = desc + 16 * usize::from(self.next_avail);
                let flags = memory.load_u16(at + 14, Acquire);
                let (avail, used) = (flags & AVAIL != 0, flags & USED != 0);
                if avail != self.avail_wrap || used == self.avail_wrap {
                    return None;
                }
                step(&mut self.next_avail, &mut self.avail_wrap, self.size);
                (at, memory.load_u16(at + 12, Relaxed))
            }
        };
        Some(Buffer {
            id,
            addr: memory.load_u64(at, Relaxed),
            len: memory.load_u32(at + 8, Relaxed),
        })
    }

    #[inline]
    fn give(&mut self, memory: &Memory, [desc, _, device]: [usize; 3], id: u16, len: u32) {
        match self.layout {
            RingLayout::Split => {
                let slot = usize::from(self.next_used & (self.size - 1));
                memory.store_u32(device + 4 + 8 * slot, id.into(), Relaxed);
                memory.store_u32(device + 8 + 8 * slot, len, Relaxed);
                self.next_used = self.next_used.wrapping_add(1);
            }
            RingLayout::Packed => {
                let at = desc + 16 * usize::from(self.next_used);
                memory.store_u32(at + 8, len, Relaxed);
                memory.store_u16(at + 12, id, Relaxed);
                let flags = if self.used_wrap { AVAIL | USED } else { 0 };
                memory.store_u16(at + 14, flags, Release);
                step(&mut self.next_used, &mut self.used_wrap, self.size);
            }
        }
    }

    #[inline]
    fn publish(&self, memory: &Memory, [_, _, device]: [usize; 3]) {
        if self.layout == RingLayout::Split {
            memory.store_u16(device + 2, self.next_used, Release);
        }
    }

    fn base(&self) -> RingBase {
        match self.layout {
            RingLayout::Split => RingBase::Split(self.next_avail),
            RingLayout::Packed => RingBase::Packed {
                avail: self.next_avail,
                avail_wrap: self.avail_wrap,
                used: self.next_used,
                used_wrap: self.used_wrap,
                is_fresh: false,
            },
        }
    }
}

fn step(at: &mut u16, wrap: &mut bool, size: u16) {
    *at += 1;
    if *at == size {
        *at = 0;
        *wrap = !*wrap;
    }
}

/// The service: rings by their number.
struct Mover {
    kind: Kind,
    rings: Vec<Option<Ring>>,
}

impl Service for Mover {
    fn start(&mut self, guest: &Guest, ring: &RingConfig) {
        let index = usize::from(ring.index);
        let len = self.rings.len().max(index + 1).next_multiple_of(2);
        self.rings.resize_with(len, || None);
        self.rings[index] = Some(Ring::new(guest, ring));
    }

    fn stop(&mut self, _: &Guest, index: u8) -> RingBase {
        let ring = self
            .rings
            .get_mut(usize::from(index))
            .and_then(Option::take);
        ring.expect("the session stops running rings only").base()
    }

    fn poll(&mut self, guest: &Guest) -> Next {
        for pair in self.rings.chunks_exact_mut(2) {
            if let [Some(receive), Some(transmit)] = pair {
                // `None`: memory that the front end took away, and nothing to do.
                let _ = serve(self.kind, guest, receive, transmit);
            }
        }
        Next::Again
    }

    fn reset(&mut self) {
        self.rings.clear();
    }
}

/// One visit of a pair.
#[inline]
fn serve(kind: Kind, guest: &Guest, receive: &mut Ring, transmit: &mut Ring) -> Option<()> {
    let (memory, receive_at) = receive.find(guest)?;
    let (_, transmit_at) = transmit.find(guest)?;
    for _ in 0..BATCH {
        let (sent, room) = match kind {
            Kind::Sink => (Some(transmit.take(memory, transmit_at)?), None),
            Kind::Source(_) => (None, Some(receive.take(memory, receive_at)?)),
            Kind::Loop => {
                let sent = transmit.take(memory, transmit_at)?;
                // Its windows are smaller than its rings.
                (Some(sent), Some(receive.take(memory, receive_at)?))
            }
        };
        let len = match (kind, sent) {
            (Kind::Source(len), _) => len + HEADER_LEN,
            (_, Some(sent)) => sent.len,
            _ => HEADER_LEN,
        };
        if let Some(room) = room {
            let (memory, at) = guest.gpa(room.addr, len.into())?;
            for word in 0..2 {
                memory.store_u32(at + 4 * word, 0, Relaxed);
            }
            memory.store_u32(at + 8, 1 << 16, Relaxed);
            if let Some(sent) = sent {
                let (from, from_at) = guest.gpa(sent.addr, len.into())?;
                let header = HEADER_LEN as usize;
                copy(
                    from,
                    from_at + header,
                    memory,
                    at + header,
                    len as usize - header,
                );
            }
            receive.give(memory, receive_at, room.id, len);
            receive.publish(memory, receive_at);
        }
        if let Some(sent) = sent {
            transmit.give(memory, transmit_at, sent.id, 0);
            transmit.publish(memory, transmit_at);
        }
    }
    Some(())
}

#[inline]
fn copy(from: &Memory, from_at: usize, to: &Memory, to_at: usize, len: usize) {
    let mut piece = [0; PIECE];
    for start in (0..len).step_by(PIECE) {
        let piece = &mut piece[..PIECE.min(len - start)];
        from.read(from_at + start, piece);
        to.write(to_at + start, piece);
    }
}

/// Loads it from this thread, on the other CPU, by one port of one pair.
///
/// # Errors
/// The server cannot be started, or the CPUs not used.
pub fn measure(
    (server_cpu, client_cpu): (usize, usize),
    options: &Options,
    kind: Kind,
    frame_len: u32,
    seconds: Duration,
) -> Result<Report, DriveError> {
    let socket = std::env::temp_dir().join(format!("vhost-net-{}.sock", std::process::id()));
    // Left behind by a run that was killed.
    let _ = std::fs::remove_file(&socket);
    let before = rustix::thread::sched_getaffinity(None).map_err(io::Error::from)?;
    let server = serve_on(&socket, Some(server_cpu), kind)?;
    crate::host::pin(client_cpu)?;
    let options = options.clone();
    let spec = match kind {
        Kind::Sink => PortSpec::to_sink(&socket, options, Load::Flood, frame_len),
        Kind::Source(len) => PortSpec::from_source(&socket, options, len),
        Kind::Loop => PortSpec::looped(&socket, options, Load::Window(WINDOW), frame_len),
    };
    let report =
        Driver::connect(&[spec]).and_then(|mut driver| driver.measure(seconds / 4, seconds, None));
    drop(server);
    // Whether or not it is still there.
    let _ = std::fs::remove_file(&socket);
    rustix::thread::sched_setaffinity(None, &before).map_err(io::Error::from)?;
    report
}

/// Starts the server on `path`; its thread runs on `cpu`.
///
/// # Errors
/// The path cannot be listened on.
pub fn serve_on(path: &Path, cpu: Option<usize>, kind: Kind) -> io::Result<Loopback> {
    let config = Config {
        features: feature::VERSION_1
            | feature::PACKED
            | feature::IN_ORDER
            | net::MRG_RXBUF
            | net::MQ
            | net::CTRL_VQ,
        protocol: ProtocolFeatures::MQ | ProtocolFeatures::REPLY_ACK,
        queues: 64,
        rings_per_queue: 2,
        max_ring_size: 32768,
        max_regions: 8,
    };
    let mover = Mover {
        kind,
        rings: Vec::new(),
    };
    Loopback::start(path, config, mover, move || {
        if let Some(cpu) = cpu
            && let Err(error) = crate::host::pin(cpu)
        {
            eprintln!("loopback: cannot run on CPU {cpu}: {error}");
        }
    })
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::drive::Patience;

    #[test]
    fn every_kind_moves_frames_over_every_kind_of_ring_and_none_is_wrong() {
        for features in [
            0,
            feature::PACKED,
            feature::IN_ORDER,
            feature::PACKED | feature::IN_ORDER,
        ] {
            for kind in [Kind::Sink, Kind::Source(64), Kind::Loop] {
                let directory = TempDir::new().unwrap();
                let socket = directory.path().join("s");
                let _server = serve_on(&socket, None, kind).unwrap();
                let options = Options::new().require(features);
                let spec = match kind {
                    Kind::Sink => PortSpec::to_sink(&socket, options, Load::Flood, 64),
                    Kind::Source(len) => PortSpec::from_source(&socket, options, len),
                    Kind::Loop => PortSpec::looped(&socket, options, Load::Window(8), 1518),
                };
                let mut driver = Driver::connect(&[spec]).unwrap();
                // The server has no CPU of its own here.
                let long = Duration::from_secs(10);
                driver.set_patience(Patience {
                    silence: long,
                    drain: long,
                });
                let time = Duration::from_millis(50);
                let report = driver.measure(Duration::ZERO, time, None).unwrap();
                let port = &report.ports[0];
                let moved = match kind {
                    Kind::Sink => port.taken_per_s,
                    _ => port.received_per_s,
                };
                assert!(moved > 0.0, "{features:#x} {kind:?}");
                assert_eq!(
                    (report.wrong(), report.lost()),
                    (0, 0),
                    "{features:#x} {kind:?}"
                );
                assert_eq!(kind == Kind::Loop, port.latency.quantile(0.5) > 0);
            }
        }
    }
}
