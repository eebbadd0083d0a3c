//! A front end of one disk, beside a naive model of the disk's bytes.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use vhost_blk::client::feature;
use vhost_blk::queue::{Extent, Op, Status};
use vhost_blk::ring::Segment;
use vhost_blk::{Client, Options};

/// Bytes of a sector, the unit of the protocol.
pub const SECTOR: usize = 512;
/// Requests outstanding.
const DEPTH: u16 = 24;
/// Bytes of the longest read or write: more than the device does in one part.
const LONGEST: u32 = 5 << 20;
/// Far longer than a request takes on a machine that is not stuck.
const LONG: Duration = Duration::from_secs(60);
/// Sectors before and behind a range that must not change: more than a block of 4096 bytes has.
const AROUND: usize = 9;

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    /// Write-zeroes whose blocks stay reserved.
    Zero,
    /// Write-zeroes whose blocks may be given back.
    ZeroUnmap,
    Discard,
}

/// A request of so many sectors. Its data, if any, lie in the buffer from this byte on, in two
/// pieces if that is not 0.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub kind: Kind,
    pub sector: usize,
    pub sectors: usize,
    pub skew: usize,
}

impl Request {
    pub const fn new(kind: Kind, sector: usize, sectors: usize) -> Self {
        Self {
            kind,
            sector,
            sectors,
            skew: 0,
        }
    }

    const fn bytes(&self) -> std::ops::Range<usize> {
        self.sector * SECTOR..(self.sector + self.sectors) * SECTOR
    }
}

/// A disk, connected, and what it must hold.
pub struct Disk {
    client: Client,
    /// Printed where a check fails.
    name: String,
    model: Vec<u8>,
    /// State of a generator of contents.
    seed: u64,
}

impl Disk {
    /// Connects to a disk of so many bytes of zeroes.
    pub fn connect(socket: &Path, name: String, bytes: usize) -> Self {
        let mut options = Options::new(DEPTH, LONGEST + 4096);
        options.timeout = LONG;
        let client = Client::connect(socket, options).unwrap();
        assert_eq!(client.config().capacity as usize * SECTOR, bytes, "{name}");
        Self {
            client,
            name,
            model: vec![0; bytes],
            seed: 1,
        }
    }

    pub fn offers(&self, kind: Kind) -> bool {
        let needed = match kind {
            Kind::Read | Kind::Write => 0,
            Kind::Zero | Kind::ZeroUnmap => feature::WRITE_ZEROES,
            Kind::Discard => feature::DISCARD,
        };
        self.client.features() & needed == needed
    }

    pub fn sectors(&self) -> usize {
        self.model.len() / SECTOR
    }

    pub fn model(&self) -> &[u8] {
        &self.model
    }

    /// Bytes of which no two sectors are alike, and none is zero.
    fn pattern(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            self.seed = self
                .seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            bytes.extend((self.seed | 0x0101_0101_0101_0101).to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Makes requests all at once, no two of which touch one sector, and waits for them. Every one
    /// must end as the model does.
    pub fn make(&mut self, requests: &[Request]) {
        assert!(requests.len() <= DEPTH.into());
        let written = requests.iter().map(|request| match request.kind {
            Kind::Write => self.pattern(request.bytes().len()),
            _ => Vec::new(),
        });
        let written: Vec<_> = written.collect();
        let slots: Vec<_> = requests
            .iter()
            .zip(&written)
            .map(|(request, data)| self.submit(*request, data))
            .collect();
        let statuses = self.wait(requests.len());
        for ((request, slot), data) in requests.iter().zip(slots).zip(written) {
            let status = statuses.iter().find(|(at, _)| *at == slot).unwrap().1;
            self.check(*request, slot, status, &data);
            let queue = &mut self.client.parts().2[0];
            queue.release(slot);
        }
    }

    fn submit(&mut self, request: Request, data: &[u8]) -> u16 {
        let (memory, layout, queues) = self.client.parts();
        let queue = &mut queues[0];
        let slot = queue.take_slot().unwrap();
        let at = layout.data(0, slot) + request.skew;
        memory.write(at, data);
        let (op, flags) = match request.kind {
            Kind::Read => (Op::Read, 0),
            Kind::Write => (Op::Write, 0),
            Kind::Zero => (Op::WriteZeroes, 0),
            Kind::ZeroUnmap => (Op::WriteZeroes, 1_u64),
            Kind::Discard => (Op::Discard, 0),
        };
        let len = request.bytes().len() as u32;
        let extent = Extent {
            sector: request.sector as u64,
            bytes: len,
        };
        if request.skew == 0 {
            assert!(queue.submit(memory, layout, slot, op, extent, 0));
            if flags != 0 {
                let sectors = request.sectors as u64;
                memory.store_u64(layout.range(0, slot) + 8, sectors | flags << 32, Relaxed);
            }
            return slot;
        }
        let header = layout.header(0, slot);
        let status = layout.status(0, slot);
        memory.store_u64(header, op as u32 as u64, Relaxed);
        memory.store_u64(header + 8, extent.sector, Relaxed);
        memory.store_u8(status, 0xff, Relaxed);
        let segment = |at, len, is_writable| Segment {
            addr: layout.gpa(at),
            len,
            is_writable,
        };
        let is_read = request.kind == Kind::Read;
        let first = len / 2 - 3;
        let segments = [
            segment(header, 16, false),
            segment(at, first, is_read),
            segment(at + first as usize, len - first, is_read),
            segment(status, 1, true),
        ];
        assert!(queue.ring().add(memory, slot, &segments, None));
        slot
    }

    /// Publishes what was submitted, and waits for `count` ends.
    fn wait(&mut self, count: usize) -> Vec<(u16, Status)> {
        let (memory, layout, queues) = self.client.parts();
        let queue = &mut queues[0];
        queue.publish(memory);
        let start = Instant::now();
        let mut ended = Vec::new();
        while ended.len() < count {
            match queue.complete(memory, layout).unwrap() {
                Some(done) => ended.push((done.slot, done.status)),
                None => thread::yield_now(),
            }
            assert!(start.elapsed() < LONG, "{}: no answer", self.name);
        }
        ended
    }

    /// Compares an answer with the model, which does the same.
    fn check(&mut self, request: Request, slot: u16, status: Status, written: &[u8]) {
        let what = format!("{}: {request:?}", self.name);
        let range = request.bytes();
        if !self.offers(request.kind) {
            assert_eq!(status, Status::Unsupported, "{what}");
            return;
        }
        assert_eq!(status, Status::Ok, "{what}");
        match request.kind {
            Kind::Read => {
                let (memory, layout, _) = self.client.parts();
                let mut data = vec![0; range.len()];
                memory.read(layout.data(0, slot) + request.skew, &mut data);
                self.same(&what, range.start, &data);
            }
            Kind::Write => self.model[range].copy_from_slice(written),
            Kind::Zero | Kind::ZeroUnmap => self.model[range].fill(0),
            // A sector's content is right if it is the former one, or zeroes: `read_back` finds
            // out.
            Kind::Discard => {}
        }
    }

    /// Fails unless these bytes are the model's from `offset` on.
    fn same(&self, what: &str, offset: usize, data: &[u8]) {
        let model = &self.model[offset..offset + data.len()];
        if let Some(at) = data.iter().zip(model).position(|(own, model)| own != model) {
            let sector = (offset + at) / SECTOR;
            panic!("{what}: sector {sector} holds other bytes than were written");
        }
    }

    /// Fills the range with a pattern, and what is around it.
    pub fn fill(&mut self, sector: usize, sectors: usize) {
        self.around(Kind::Write, sector, sectors);
    }

    /// Reads the range, and what is around it.
    pub fn read_back(&mut self, sector: usize, sectors: usize) {
        self.around(Kind::Read, sector, sectors);
    }

    /// After a discard: reads the range, of which each sector holds what it held or zeroes, and
    /// what is around it.
    pub fn read_discarded(&mut self, sector: usize, sectors: usize) {
        let mut at = sector;
        while at < sector + sectors {
            let step = (sector + sectors - at).min(LONGEST as usize / SECTOR);
            let request = Request::new(Kind::Read, at, step);
            let slot = self.submit(request, &[]);
            assert_eq!(
                self.wait(1),
                [(slot, Status::Ok)],
                "{}: {request:?}",
                self.name
            );
            let (memory, layout, queues) = self.client.parts();
            let mut data = vec![0; step * SECTOR];
            memory.read(layout.data(0, slot), &mut data);
            queues[0].release(slot);
            let model = self.model[request.bytes()].chunks_exact_mut(SECTOR);
            for (own, model) in data.chunks_exact(SECTOR).zip(model) {
                if own.iter().all(|byte| *byte == 0) {
                    model.fill(0);
                }
            }
            at += step;
        }
        self.read_back(sector, sectors);
    }

    fn around(&mut self, kind: Kind, sector: usize, sectors: usize) {
        let end = (sector + sectors + AROUND).min(self.sectors());
        let mut at = sector.saturating_sub(AROUND);
        while at < end {
            let step = (end - at).min(LONGEST as usize / SECTOR);
            self.make(&[Request::new(kind, at, step)]);
            at += step;
        }
    }

    /// Makes everything stable.
    pub fn flush(&mut self) {
        let extent = Extent {
            sector: 0,
            bytes: 0,
        };
        let status = self.client.request(Op::Flush, extent, &mut []).unwrap();
        assert_eq!(status, Some(Status::Ok), "{}: flush", self.name);
    }
}
