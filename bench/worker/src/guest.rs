//! A guest with one disk: memory, a driver that keeps a given number of requests in flight, and the
//! device, which is polled by the same thread.
//!
//! The driver writes its descriptor chains (header, data, status) once for each load. For a request
//! it stores only a sector number, a ring entry and the available index. There is no IOMMU; memory
//! is still looked up page by page, as in a machine without one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_mem::{Gpa, GuestRam, Iova, NoIommu, PhysMem, SourceId, View};
use seeded::Random;
use vio::blk::request::{HEADER_LEN, STATUS_OK, feature as blk_feature, kind};
use vio::{Device, DeviceClass, Interrupt, QueueConfig, QueueDevice, feature};

use crate::counted::Counted;
use crate::process::{Counts, Watched, own_time};

/// Bytes of the disk.
pub const CAPACITY: u64 = 64 << 20;
/// Greatest number of data bytes of a request.
pub const LONGEST: u32 = 64 << 10;
/// Greatest number of requests in flight.
pub const DEEPEST: u16 = 32;

/// Number of ring entries, of which a request takes three.
const SIZE: u16 = 128;
const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
/// Header and status of each request, 64 bytes apart.
const HEADERS: u64 = 0x4000;
const STATUS: u64 = 32;
const DATA: u64 = 0x10_0000;
const RAM: u64 = 4 << 20;
const DEVICE: SourceId = SourceId::new(0, 1, 0);

const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Flag of the available ring, VIRTQ_AVAIL_F_NO_INTERRUPT: the driver polls.
const NO_INTERRUPT: u16 = 1;

/// Number of requests before a window begins.
const WARM_UP: u64 = 100;
/// Longest time without a completion before the guest gives up.
const PATIENCE: Duration = Duration::from_secs(20);

/// Requests of a driver, all alike except for their position on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Bytes of data, a multiple of 512, at most [`LONGEST`].
    pub len: u32,
    /// Number of requests in flight, 1 to [`DEEPEST`].
    pub depth: u16,
    /// Writes, not reads.
    pub is_write: bool,
}

/// Figures of one window. Those of processor time and wake-ups include the warm-up requests before
/// it, since they are read while the worker sleeps.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Requests a second.
    pub iops: f64,
    /// Processor time per request of the owner's process (driver and device), in ns.
    pub owner_ns: f64,
    /// Processor time per request of the worker's process, in ns; 0 if there is no worker.
    pub worker_ns: f64,
    /// Share of the time in which the owner ran on a CPU; if the worker polls, the lesser of both
    /// shares. 0 to 1, or slightly more.
    pub share: f64,
    /// Times that the worker went to sleep, per 1000 requests.
    pub sleeps: f64,
    /// Times that the worker was kicked, per 1000 requests.
    pub kicks: f64,
}

/// Interrupts that are dropped: the driver polls.
struct Quiet;

impl Interrupt for Quiet {
    fn queue(&mut self, _queue: u16) {}
    fn config(&mut self) {}
}

/// A guest whose disk is measured.
pub trait Subject {
    /// Keeps `load` up for `time`.
    ///
    /// # Errors
    /// A request fails, or does not end.
    fn window(&mut self, load: Load, time: Duration) -> Result<Sample>;

    /// Returns the bytes that the owner copies between guest memory and other memory, per byte of
    /// data of `load`.
    ///
    /// # Errors
    /// As [`window`](Self::window).
    fn copies(&mut self, load: Load) -> Result<f64>;

    /// Writes to the disk, and reads the same blocks back.
    ///
    /// # Errors
    /// The data differ, or as for [`window`](Self::window).
    fn verify(&mut self) -> Result<()>;
}

/// A guest with a disk of class `C`.
pub struct Guest<C: DeviceClass> {
    ram: GuestRam,
    iommu: NoIommu,
    device: Device<C>,
    worker: Option<Watched>,
    random: Random,
    load: Load,
    /// Sector of a request; `None`: at random.
    sector: Option<u64>,
    /// Next index of the available ring, and of the used ring.
    avail: u16,
    used: u16,
}

impl<C: DeviceClass> Guest<C> {
    /// Starts the driver of `device`, whose model is in the process `worker` if there is one.
    ///
    /// # Errors
    /// No memory, or the device refuses its driver.
    pub fn new(mut device: Device<C>, worker: Option<Watched>) -> Result<Self> {
        let ram = GuestRam::new(&[(Gpa::new(0), RAM)])?;
        let queue = QueueConfig {
            index: 0,
            size: SIZE,
            desc: Iova::new(DESC),
            avail: Iova::new(AVAIL),
            used: Iova::new(USED),
        };
        // With VIRTIO_BLK_F_FLUSH: without it each write would have to be stable.
        let features = feature::VERSION_1 | blk_feature::FLUSH;
        device.activate(features, &[queue], ram.keep_alive())?;
        let mut guest = Self {
            ram,
            iommu: NoIommu::new(1024),
            device,
            worker,
            random: Random::new(1),
            load: Load {
                len: 0,
                depth: 0,
                is_write: false,
            },
            sector: None,
            avail: 0,
            used: 0,
        };
        guest.put(AVAIL, &NO_INTERRUPT.to_le_bytes());
        Ok(guest)
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        let written = self.ram.write(Gpa::new(at), bytes);
        written.expect("inside RAM");
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.ram.read(Gpa::new(at), &mut bytes).expect("inside RAM");
        bytes
    }

    /// Writes the descriptor chains of `load`. No request is in flight.
    fn prepare(&mut self, load: Load) {
        let kind = if load.is_write { kind::OUT } else { kind::IN };
        let data_flags = if load.is_write { 0 } else { WRITE };
        for place in 0..DEEPEST {
            let header = HEADERS + 64 * u64::from(place);
            let data = DATA + u64::from(LONGEST) * u64::from(place);
            self.put(header, &kind.to_le_bytes());
            let first = 3 * place;
            let chain = [
                (header, HEADER_LEN, NEXT, first + 1),
                (data, load.len, NEXT | data_flags, first + 2),
                (header + STATUS, 1, WRITE, 0),
            ];
            for ((addr, len, flags, next), index) in chain.into_iter().zip(first..) {
                let word = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
                let at = DESC + 16 * u64::from(index);
                self.put(at, &addr.to_le_bytes());
                self.put(at + 8, &word.to_le_bytes());
            }
        }
        self.load = load;
    }

    /// Adds the request of slot `place` to the available ring, without publishing it.
    fn make(&mut self, place: u16) {
        let len = u64::from(self.load.len);
        let sector = match self.sector {
            Some(sector) => sector,
            None => self.random.below(CAPACITY / len) * (len / 512),
        };
        let header = HEADERS + 64 * u64::from(place);
        self.put(header + 8, &sector.to_le_bytes());
        let at = AVAIL + 4 + 2 * u64::from(self.avail % SIZE);
        self.put(at, &(3 * place).to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
    }

    fn publish(&mut self) {
        let avail = self.avail.to_le_bytes();
        self.put(AVAIL + 2, &avail);
    }

    /// Processes the used ring: calls `each` with the slot of each completed request. Returns their
    /// number.
    fn take_used(&mut self, mut each: impl FnMut(&mut Self, u16)) -> Result<u64> {
        let index = u16::from_le_bytes(self.get(USED + 2));
        let mut count = 0;
        while self.used != index {
            let at = USED + 4 + 8 * u64::from(self.used % SIZE);
            let head = u32::from_le_bytes(self.get(at));
            let place = (head / 3) as u16;
            self.used = self.used.wrapping_add(1);
            let [status] = self.get(HEADERS + 64 * u64::from(place) + STATUS);
            ensure!(status == STATUS_OK, "a request has ended with {status}");
            each(self, place);
            count += 1;
        }
        Ok(count)
    }

    fn poll(&mut self) {
        let mut view = View::new(&mut self.iommu, &self.ram, DEVICE);
        let _ = self.device.poll(&mut view, &mut Quiet, 0);
    }

    /// Makes requests until `goes_on` returns false, then waits for the last. Returns their number.
    /// `goes_on` receives the number of completed requests.
    fn run(&mut self, goes_on: impl FnMut(u64) -> bool) -> Result<u64> {
        self.run_polled(Self::poll, goes_on)
    }

    /// Does the same as [`run`](Self::run), with the device polled by `poll`.
    fn run_polled(
        &mut self,
        mut poll: impl FnMut(&mut Self),
        mut goes_on: impl FnMut(u64) -> bool,
    ) -> Result<u64> {
        let depth = self.load.depth;
        for place in 0..depth {
            self.make(place);
        }
        self.publish();
        let (mut over, mut out) = (0, u64::from(depth));
        let (mut since, mut seen) = (Instant::now(), over);
        let mut polls = 0_u32;
        while out > 0 {
            poll(self);
            // Rarely: reading the clock takes as long as a poll.
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(1 << 16) {
                if seen != over {
                    (since, seen) = (Instant::now(), over);
                }
                ensure!(since.elapsed() < PATIENCE, "a request does not end");
            }
            let is_on = goes_on(over);
            let count = self.take_used(|guest, place| {
                if is_on {
                    guest.make(place);
                }
            })?;
            if count == 0 {
                // Like a sidecore: it may share its core with the worker.
                std::hint::spin_loop();
                continue;
            }
            over += count;
            match is_on {
                true => self.publish(),
                false => out -= count,
            }
        }
        Ok(over)
    }

    /// Returns the worker's counts once it sleeps; 0 if there is no worker.
    fn counts(&self) -> Result<Counts> {
        self.worker
            .as_ref()
            .map_or(Ok(Counts::default()), Watched::counts)
    }

    /// Makes one request of `load` in the first slot, at sector 0.
    fn once(&mut self, load: Load) -> Result<()> {
        self.sector = Some(0);
        self.prepare(Load { depth: 1, ..load });
        let ran = self.run(|_| false);
        self.sector = None;
        ran.map(drop)
    }
}

impl<C: DeviceClass> Subject for Guest<C> {
    fn window(&mut self, load: Load, time: Duration) -> Result<Sample> {
        self.prepare(load);
        let (before, own) = (self.counts()?, own_time()?);
        let begun = Instant::now();
        let warm_up = self.run(|over| over < WARM_UP)?;
        let start = Instant::now();
        let mut is_on = true;
        let mut polls = 0_u32;
        let over = self.run(|_| {
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(16) {
                is_on = start.elapsed() < time;
            }
            is_on
        })?;
        let (seconds, all_seconds) = (start.elapsed(), begun.elapsed());
        let own = own_time()? - own;
        let after = self.counts()?;
        let worker = after.time - before.time;
        let polling = self.worker.as_ref().filter(|worker| worker.polls);
        let least = polling.map_or(own, |_| own.min(worker));
        let all = (warm_up + over) as f64;
        let each = |time: Duration| time.as_nanos() as f64 / all;
        let of_1000 = |count: u64| count as f64 * 1000.0 / all;
        Ok(Sample {
            iops: over as f64 / seconds.as_secs_f64(),
            owner_ns: each(own),
            worker_ns: each(worker),
            share: least.as_secs_f64() / all_seconds.as_secs_f64(),
            sleeps: of_1000(after.sleeps - before.sleeps),
            kicks: of_1000(after.kicks - before.kicks),
        })
    }

    fn copies(&mut self, load: Load) -> Result<f64> {
        const REQUESTS: u64 = 500;
        self.prepare(load);
        let mut copied = 0;
        let poll = |guest: &mut Self| {
            let view = View::new(&mut guest.iommu, &guest.ram, DEVICE);
            let mut view = Counted::new(view, DATA..RAM);
            let _ = guest.device.poll(&mut view, &mut Quiet, 0);
            copied += view.copied;
        };
        let over = self.run_polled(poll, |over| over < REQUESTS)?;
        Ok(copied as f64 / (over * u64::from(load.len)) as f64)
    }

    fn verify(&mut self) -> Result<()> {
        for len in [4096, LONGEST] {
            let mut load = Load {
                len,
                depth: 1,
                is_write: true,
            };
            let mut bytes = vec![0; len as usize];
            self.random.fill(&mut bytes);
            self.put(DATA, &bytes);
            self.once(load)?;
            self.put(DATA, &vec![0; len as usize]);
            load.is_write = false;
            self.once(load)?;
            let mut back = vec![0; len as usize];
            let read = self.ram.read(Gpa::new(DATA), &mut back);
            read.ok().context("the guest's memory")?;
            ensure!(back == bytes, "{len} bytes come back as others");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk, Transfer};

    use super::*;
    use crate::null::Null;

    fn guest(io: Box<dyn BlockIo>) -> impl Subject {
        let device = Blk::new(BlkConfig::default(), io).expect("a device");
        Guest::new(device, None).expect("a guest")
    }

    #[test]
    fn data_are_copied_once_through_a_buffer_and_never_in_place() {
        for (transfer, copies) in [(Transfer::Direct, 0.0), (Transfer::Bounce, 1.0)] {
            let mut guest = guest(Box::new(Null::new(CAPACITY, transfer)));
            for is_write in [false, true] {
                for depth in [1, DEEPEST] {
                    let load = Load {
                        len: LONGEST,
                        depth,
                        is_write,
                    };
                    let counted = guest.copies(load).expect("requests end well");
                    assert_eq!(counted, copies, "{transfer:?}, {load:?}");
                }
            }
        }
    }

    #[test]
    fn written_bytes_come_back_and_other_ones_are_found_out() {
        let disk = MemDisk::new(vec![0; CAPACITY as usize], 256, false);
        guest(Box::new(disk)).verify().expect("the same bytes");
        let forgets = Null::new(CAPACITY, Transfer::Bounce);
        // A bounce buffer still holds the data that were written; a disk that works in place leaves
        // the zeroes.
        guest(Box::new(forgets)).verify().expect("its own buffer");
        let forgets = Null::new(CAPACITY, Transfer::Direct);
        guest(Box::new(forgets)).verify().expect_err("zeroes");
    }
}
