//! Files in memory that stop at the k-th write of all of them, and that distinguish durable from
//! cached content.
//!
//! A write that has ended is in the cache, from which all reads are answered. A flush makes the
//! writes durable that had ended when it was requested. Operations end in any order, and late:
//! their memory is read when they end. At the crash each write that is under way is there wholly,
//! partly, or not at all. A killed process leaves the cache; a power failure leaves the durable
//! contents, and of each sector any later one or none.

use std::os::fd::RawFd;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};

use guest_mem::{Gpa, GuestRam, KeepAlive, PhysMem};
use seeded::Random;
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece, Transfer};

use crate::oracle::SECTOR;

/// A sector that is in the cache and may be lost.
struct Unflushed {
    /// Time at which it came there.
    at: u64,
    sector: usize,
    bytes: [u8; SECTOR],
}

/// One file.
struct CachedFile {
    cache: Vec<u8>,
    durable: Vec<u8>,
    /// In the order in which they came.
    unflushed: Vec<Unflushed>,
}

impl CachedFile {
    fn new(len: usize) -> Self {
        Self {
            cache: vec![0; len],
            durable: vec![0; len],
            unflushed: Vec::new(),
        }
    }

    fn put(&mut self, at: u64, offset: u64, data: &[u8]) {
        for (sector, bytes) in (offset as usize / SECTOR..).zip(data.chunks(SECTOR)) {
            self.cache[sector * SECTOR..][..SECTOR].copy_from_slice(bytes);
            let bytes = bytes.try_into().expect("whole sectors");
            self.unflushed.push(Unflushed { at, sector, bytes });
        }
    }

    /// Makes the sectors durable that came before `end` and for which `is_meant` is true.
    fn settle(&mut self, end: u64, is_meant: impl Fn(usize) -> bool) {
        let Self {
            durable, unflushed, ..
        } = self;
        unflushed.retain(|one| {
            let settles = one.at < end && is_meant(one.sector);
            if settles {
                durable[one.sector * SECTOR..][..SECTOR].copy_from_slice(&one.bytes);
            }
            !settles
        });
    }
}

/// A request that is under way.
struct Pending {
    /// Number of the disk's I/O.
    io: usize,
    slot: u32,
    op: Op,
    pieces: Vec<Piece>,
    file: usize,
    /// Position in the order of requests.
    at: u64,
}

/// Content of a file after a crash.
pub struct Left {
    /// After a kill.
    pub killed: Vec<u8>,
    /// After a power failure.
    pub powered_off: Vec<u8>,
}

struct State {
    files: Vec<CachedFile>,
    pending: Vec<Pending>,
    ios: usize,
    random: Random,
    /// Number of operations that have begun or ended.
    now: u64,
    /// Number of writes until the crash.
    left: u64,
    crash: Option<Vec<Left>>,
    tell: Sender<()>,
}

/// All files of a machine.
#[derive(Clone)]
pub struct Media(Arc<Mutex<State>>);

impl Media {
    /// Creates files of these lengths that stop at the `stop_at`-th write, and then send a message.
    pub fn new(lengths: &[usize], seed: u64, stop_at: u64, tell: Sender<()>) -> Self {
        Self(Arc::new(Mutex::new(State {
            files: lengths.iter().map(|len| CachedFile::new(*len)).collect(),
            pending: Vec::new(),
            ios: 0,
            random: Random::new(seed),
            now: 0,
            left: stop_at,
            crash: None,
            tell,
        })))
    }

    /// Opens a back end on file `file`, for memory `ram`.
    pub fn open(&self, file: usize, ram: &GuestRam) -> Box<dyn BlockIo> {
        let mut state = self.state();
        state.ios += 1;
        Box::new(MediaIo {
            io: state.ios,
            capacity: state.files[file].cache.len() as u64,
            media: self.clone(),
            ram: ram.clone(),
            file,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no back end has failed")
    }

    /// Returns whether the crash has come, after which nothing reaches the media.
    pub fn has_crashed(&self) -> bool {
        self.state().crash.is_some()
    }

    /// Returns the durable content of a file at present.
    pub fn durable(&self, file: usize) -> Vec<u8> {
        self.state().files[file].durable.clone()
    }

    /// Returns the content of a file's cache.
    pub fn cached(&self, file: usize) -> Vec<u8> {
        self.state().files[file].cache.clone()
    }

    /// Takes the contents after the crash, if there was one.
    pub fn take_left(&self) -> Option<Vec<Left>> {
        self.state().crash.take()
    }
}

impl State {
    /// Returns the offset and data of a write that is under way.
    fn data(one: &Pending, ram: &GuestRam) -> (u64, Vec<u8>) {
        match one.op {
            Op::Write { offset, .. } => {
                let mut data = Vec::new();
                for piece in &one.pieces {
                    let from = data.len();
                    data.resize(from + piece.len as usize, 0);
                    let read = ram.read(gpa(ram, piece), &mut data[from..]);
                    read.expect("it is all there");
                }
                (offset, data)
            }
            Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => {
                (offset, vec![0; len as usize])
            }
            Op::Read { .. } | Op::Flush => (0, Vec::new()),
        }
    }

    fn end(&mut self, one: &Pending, ram: &GuestRam) {
        self.now += 1;
        let file = &mut self.files[one.file];
        match one.op {
            Op::Read { offset, .. } => {
                let mut at = offset as usize;
                for piece in &one.pieces {
                    let end = at + piece.len as usize;
                    let written = ram.write(gpa(ram, piece), &file.cache[at..end]);
                    written.expect("it is all there");
                    at = end;
                }
            }
            Op::Flush => file.settle(one.at, |_| true),
            op => {
                let (offset, data) = Self::data(one, ram);
                file.put(self.now, offset, &data);
                if matches!(op, Op::Write { durable: true, .. }) {
                    let first = offset as usize / SECTOR;
                    let own = first..first + data.len() / SECTOR;
                    file.settle(u64::MAX, |sector| own.contains(&sector));
                }
            }
        }
    }

    /// Stops everything: nothing ends and nothing is written from now on.
    fn crash(&mut self, ram: &GuestRam) {
        let mut left: Vec<Left> = Vec::new();
        for file in &self.files {
            let mut powered_off = file.durable.clone();
            for one in &file.unflushed {
                if self.random.chance(0.5) {
                    powered_off[one.sector * SECTOR..][..SECTOR].copy_from_slice(&one.bytes);
                }
            }
            left.push(Left {
                killed: file.cache.clone(),
                powered_off,
            });
        }
        for one in &self.pending {
            let (offset, data) = Self::data(one, ram);
            let part = [0.0, 0.5, 1.0][self.random.below(3) as usize];
            let Left {
                killed,
                powered_off,
            } = &mut left[one.file];
            for image in [killed, powered_off] {
                for (sector, bytes) in (offset as usize / SECTOR..).zip(data.chunks(SECTOR)) {
                    if self.random.chance(part) {
                        image[sector * SECTOR..][..SECTOR].copy_from_slice(bytes);
                    }
                }
            }
        }
        self.crash = Some(left);
        // A test that has ended has dropped its receiver.
        let _ = self.tell.send(());
    }
}

fn gpa(ram: &GuestRam, piece: &Piece) -> Gpa {
    let region = &ram.regions()[0];
    Gpa::new(region.gpa.raw() + (piece.hva.raw() - region.hva.raw()))
}

struct MediaIo {
    media: Media,
    io: usize,
    file: usize,
    capacity: u64,
    ram: GuestRam,
}

impl BlockIo for MediaIo {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn depth(&self) -> u32 {
        64
    }

    fn transfer(&self) -> Transfer {
        Transfer::Direct
    }

    fn attach(&mut self, _keep: KeepAlive) {}

    fn detach(&mut self) {}

    fn reserve(&mut self, _slot: u32, _len: u32) -> bool {
        unreachable!("data move directly")
    }

    fn buffer(&mut self, _slot: u32, _offset: u32) -> &mut [u8] {
        unreachable!("data move directly")
    }

    fn unreserve(&mut self, _slot: u32) {}

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        let mut state = self.media.state();
        state.now += 1;
        let one = Pending {
            io: self.io,
            slot,
            op,
            pieces: pieces.to_vec(),
            file: self.file,
            at: state.now,
        };
        if state.crash.is_some() {
            return;
        }
        state.pending.push(one);
        if !matches!(op, Op::Read { .. } | Op::Flush) {
            state.left -= 1;
            if state.left == 0 {
                state.crash(&self.ram);
            }
        }
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let mut state = self.media.state();
        if state.crash.is_some() {
            return;
        }
        for one in std::mem::take(&mut state.pending) {
            if one.io != self.io || state.random.chance(0.5) {
                state.pending.push(one);
                continue;
            }
            state.end(&one, &self.ram);
            let (slot, outcome) = (one.slot, Outcome::Done);
            done.push(Completion { slot, outcome });
        }
    }

    fn has_completions(&mut self) -> bool {
        let state = self.media.state();
        state.crash.is_none() && state.pending.iter().any(|one| one.io == self.io)
    }

    fn cancel(&mut self, _slot: u32) {}

    fn arm(&mut self) {}

    fn disarm(&mut self) {}

    fn wake_fds(&self, _fds: &mut Vec<RawFd>) {}
}
