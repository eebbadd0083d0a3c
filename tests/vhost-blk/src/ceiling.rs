//! This client's own ceiling: its results when the server costs next to nothing.
//!
//! A [`Loopback`] server on another CPU returns requests without looking at them: it copies heads
//! from the available to the used ring (split), or turns descriptors around where they stand
//! (packed), and writes no status unless asked to. A driver that sleeps is called, on a split ring,
//! by the write of its eventfd. What the client reaches against it is the most it could ever show
//! of a server; a result close to it says more of the client than of the server.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;
use std::time::Duration;

use vhost_user::backend::{Config, RingBase, RingConfig, RingLayout};

use crate::client::Options;
use crate::drive::{Run, RunError, drive};
use crate::load::{Mix, Mode, VmSpec};
use crate::loopback::{Guest, Loopback, Next, Service};
use crate::memory::Memory;
use crate::ring::feature;
use crate::stats::Report;

/// Sectors of the disk that is not there: 1 GiB.
const SECTORS: u64 = 2 << 20;
/// Requests per visit and ring.
const BATCH: u16 = 32;
/// VIRTQ_DESC_F_AVAIL, VIRTQ_DESC_F_USED, VIRTQ_DESC_F_NEXT.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
const NEXT: u16 = 1;
/// VIRTQ_AVAIL_F_NO_INTERRUPT.
const NO_EVENTS: u16 = 1;

/// One ring: offsets are in the region that holds all rings.
struct Mover {
    index: u8,
    layout: RingLayout,
    size: u16,
    /// User addresses of the three areas.
    areas: [u64; 3],
    next: u16,
    wrap: bool,
    /// Written when the driver asks for it, as the fewest instructions have it.
    call: Option<OwnedFd>,
    has_event_idx: bool,
}

/// The service: moves indices.
struct Movers {
    rings: Vec<Mover>,
    writes_status: bool,
    features: u64,
}

impl Service for Movers {
    fn config(&self) -> [u8; 60] {
        let mut config = [0; 60];
        config[..8].copy_from_slice(&SECTORS.to_le_bytes());
        config
    }

    fn features(&mut self, features: u64) {
        self.features = features;
    }

    fn start(&mut self, guest: &Guest, ring: &RingConfig) {
        self.rings.push(Mover {
            index: ring.index,
            layout: ring.layout,
            size: ring.size,
            areas: [ring.desc, ring.avail, ring.used],
            next: 0,
            wrap: true,
            call: ring.call.as_ref().and_then(|fd| fd.try_clone().ok()),
            has_event_idx: self.features & feature::EVENT_IDX != 0,
        });
        // No kicks: the server never sleeps.
        if let Some((memory, device)) = guest.user(ring.used, 4) {
            match ring.layout {
                RingLayout::Split => memory.store_u16(device, 1, Relaxed),
                RingLayout::Packed => memory.store_u16(device + 2, 1, Relaxed),
            }
        }
    }

    fn stop(&mut self, _: &Guest, index: u8) -> RingBase {
        let at = self.rings.iter().position(|ring| ring.index == index);
        let ring = self
            .rings
            .swap_remove(at.expect("the session stops running rings only"));
        match ring.layout {
            RingLayout::Split => RingBase::Split(ring.next),
            RingLayout::Packed => RingBase::Packed {
                avail: ring.next,
                avail_wrap: ring.wrap,
                used: ring.next,
                used_wrap: ring.wrap,
                is_fresh: false,
            },
        }
    }

    fn poll(&mut self, guest: &Guest) -> Next {
        for ring in &mut self.rings {
            let [desc, driver, device] = ring.areas;
            // One region holds all three, as our own client's layout has it.
            let Some((memory, at)) = guest.user(desc, 16) else {
                continue;
            };
            let offset = |addr: u64| at + (addr - desc) as usize;
            match ring.layout {
                RingLayout::Split => {
                    ring.move_split(
                        guest,
                        memory,
                        at,
                        offset(driver),
                        offset(device),
                        self.writes_status,
                    );
                }
                RingLayout::Packed => ring.move_packed(guest, memory, at, self.writes_status),
            }
        }
        Next::Again
    }

    fn reset(&mut self) {
        self.rings.clear();
    }
}

/// Writes a good status: behind the header, as our own client's layout has it.
#[inline]
fn write_status(guest: &Guest, memory: &Memory, desc: usize) {
    let header = memory.load_u64(desc, Relaxed);
    if let Some((memory, header)) = guest.gpa(header, 17) {
        memory.store_u8(header + 16, 0, Relaxed);
    }
}

impl Mover {
    #[inline]
    fn move_split(
        &mut self,
        guest: &Guest,
        memory: &Memory,
        desc: usize,
        avail: usize,
        used: usize,
        writes_status: bool,
    ) {
        let available = memory.load_u16(avail + 2, Acquire).wrapping_sub(self.next);
        if available == 0 {
            return;
        }
        for _ in 0..available.min(BATCH) {
            let slot = usize::from(self.next & (self.size - 1));
            let head = memory.load_u16(avail + 4 + 2 * slot, Relaxed);
            if writes_status {
                write_status(guest, memory, desc + 16 * usize::from(head));
            }
            memory.store_u32(used + 4 + 8 * slot, head.into(), Relaxed);
            memory.store_u32(used + 8 + 8 * slot, 1, Relaxed);
            self.next = self.next.wrapping_add(1);
        }
        memory.store_u16(used + 2, self.next, Release);
        // Pairs with the driver's fence between asking for a call and looking at the index again.
        fence(SeqCst);
        let is_wanted = match self.has_event_idx {
            true => {
                let event = memory.load_u16(avail + 4 + 2 * usize::from(self.size), Relaxed);
                self.next.wrapping_sub(event).wrapping_sub(1) < available.min(BATCH)
            }
            false => memory.load_u16(avail, Relaxed) & NO_EVENTS == 0,
        };
        if is_wanted {
            self.call();
        }
    }

    fn call(&self) {
        if let Some(call) = &self.call {
            // Ours is not full.
            let _ = rustix::io::write(call, &1_u64.to_ne_bytes());
        }
    }

    #[inline]
    fn move_packed(&mut self, guest: &Guest, memory: &Memory, desc: usize, writes_status: bool) {
        for _ in 0..BATCH {
            let head = desc + 16 * usize::from(self.next);
            let flags = memory.load_u16(head + 14, Acquire);
            let (avail, used) = (flags & AVAIL != 0, flags & USED != 0);
            if avail != self.wrap || used == self.wrap {
                return;
            }
            if writes_status {
                write_status(guest, memory, head);
            }
            let returned = if self.wrap { AVAIL | USED } else { 0 };
            let mut has_more = flags & NEXT != 0;
            self.step();
            // No chain is longer than the ring.
            for _ in 0..self.size {
                if !has_more {
                    break;
                }
                let at = desc + 16 * usize::from(self.next);
                has_more = memory.load_u16(at + 14, Relaxed) & NEXT != 0;
                self.step();
            }
            memory.store_u16(head + 14, returned, Release);
        }
    }

    fn step(&mut self) {
        self.next += 1;
        if self.next == self.size {
            self.next = 0;
            self.wrap = !self.wrap;
        }
    }
}

/// Loads it from this thread, on the other CPU, with one disk at this depth. Without a status every
/// request is an error in the report, which says nothing here.
///
/// # Errors
/// The server cannot be started, or the CPUs not used.
pub fn measure(
    (server_cpu, client_cpu): (usize, usize),
    ring_features: u64,
    depth: u16,
    writes_status: bool,
    seconds: Duration,
) -> Result<Report, RunError> {
    let socket = std::env::temp_dir().join(format!("vhost-blk-{}.sock", std::process::id()));
    // Left behind by a run that was killed.
    let _ = std::fs::remove_file(&socket);
    let before = rustix::thread::sched_getaffinity(None).map_err(io::Error::from)?;
    let server = serve(&socket, Some(server_cpu), writes_status)?;
    crate::host::pin(client_cpu)?;
    let mut options = Options::new(depth, 4096);
    options.require(ring_features);
    let run = Run {
        vms: vec![VmSpec::closed(socket.clone(), depth, 4096)],
        options,
        mix: Mix::READS,
        sectors: None,
        mode: Mode::Poll,
        warm_up: seconds / 4,
        measure: seconds,
        seed: 1,
        server: None,
    };
    let report = drive(&run);
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
pub fn serve(path: &Path, cpu: Option<usize>, writes_status: bool) -> io::Result<Loopback> {
    let config = Config {
        features: feature::VERSION_1 | feature::PACKED | feature::EVENT_IDX,
        protocol: vhost_user::wire::ProtocolFeatures::CONFIG
            | vhost_user::wire::ProtocolFeatures::MQ
            | vhost_user::wire::ProtocolFeatures::REPLY_ACK,
        queues: 64,
        rings_per_queue: 1,
        max_ring_size: 32768,
        max_regions: 8,
    };
    let movers = Movers {
        rings: Vec::new(),
        writes_status,
        features: 0,
    };
    Loopback::start(path, config, movers, move || {
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

    #[test]
    fn a_driver_that_sleeps_is_called_with_an_event_index_and_without() {
        for features in [feature::EVENT_IDX, 0] {
            let directory = TempDir::new().unwrap();
            let socket = directory.path().join("s");
            let _server = serve(&socket, None, true).unwrap();
            let mut options = Options::new(1, 4096);
            options.features = options.features & !feature::EVENT_IDX | features;
            let report = drive(&Run {
                vms: vec![VmSpec::closed(socket, 1, 4096)],
                options,
                mix: Mix::READS,
                sectors: None,
                mode: Mode::Event,
                warm_up: Duration::ZERO,
                measure: Duration::from_millis(100),
                seed: 1,
                server: None,
            })
            .unwrap();
            assert!(report.requests > 0 && report.calls > 0, "{report:?}");
            assert_eq!((report.lost_wakeups, report.errors.total()), (0, 0));
        }
    }
}
