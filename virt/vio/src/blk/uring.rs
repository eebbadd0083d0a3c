//! A raw file or block device through io_uring, or by threads where the host has none for us ([`engine`], [`threads`]; what is
//! refused is found out by trying, [`trial`]).
//!
//! What need not wait is done at once, by one system call and without the ring ([`now`]). For the rest a disk is lent a place in
//! the ring of the thread that polls it, at first use ([`ring`]; SINGLE_ISSUER, DEFER_TASKRUN and
//! TASKRUN_FLAG where the kernel has them): an idle poll costs a few loads and no system call, and a batch
//! of submissions one, for all disks of the thread. Guest memory is not registered, for that would pin all of it, and
//! a request has many pieces where a registered buffer is one. A disk that nobody reads has no place, and one that moves to
//! another thread leaves the old one's, with nothing in flight. An owner that sleeps does so on an eventfd, which is silent while
//! it polls. (The ring's own descriptor would not do: with DEFER_TASKRUN, Linux 6.18 reports it readable when asked but
//! wakes nobody who is already waiting for it.)
//!
//! Measured against a ring of its own for each disk (Linux 6.18, two processors, busy with other things), 4 KiB reads of a file
//! in memory, the lowest of three runs: one disk 3.2 and 0.81 µs per read at depth 1 and 32 where it was 3.3 and 0.82, four
//! disks 3.1 and 1.05 µs at depth 1 and 8 where it was 3.3 and 1.13, eight at depth 32 0.96 where it was 1.13. Served from a
//! file system with O_DIRECT, processor time per request was between 0.81 and 1.15 of what it was: a tie. Eight disks of
//! depth 256 hold 81 KiB of ring where it was 800.
//!
//! Data go straight into leased guest memory (readv, writev), or through a private pool: with
//! [`Transfer::Bounce`], and past the page cache where the guest's buffers lie as the storage
//! cannot take them ([`align`]), or the transfer is no whole number of the storage's blocks
//! ([`misaligned`]). Discard and write-zeroes are fallocate, as [`range`](super::range) says, and
//! zeroes written as data ([`zeroes`]) where no mode of it does. A short transfer is continued; one
//! that makes no progress (the file was truncated under us) is EIO.
//!
//! Syncs of a file in the page cache run one at a time, and fail for good once one has ([`sync`]). A durable write there
//! is a write and such a sync after it; with O_DIRECT it is one operation (RWF_DSYNC).
//!
//! Bounds: `depth` operations in flight; a pool of 512 × 16 KiB = 8 MiB, committed by the
//! host as it is touched, once something goes through it.
//!
//! UNSAFETY: the kernel is given addresses that it uses after the call returns. What keeps them valid is
//! stated at [`UringFile::submit`] and `drop`. A safe wrapper would have to own the buffers, and
//! they belong to the guest.

mod align;
mod ended;
mod engine;
mod misaligned;
mod now;
mod order;
mod pool;
mod ring;
mod slot;
mod sync;
mod threads;
mod trial;
mod zeroes;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_mem::{KeepAlive, keeps_mapped};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::backend::{BlockIo, Completion, Op, Outcome, Piece, Transfer};
use super::range::{self, RangePlan, RangeStep, RangeSupport};
use super::{MAX_PIECES, MAX_TRANSFER, SECTOR};
use align::Alignment;
use engine::{Call, Engine};
use now::Now;
use order::{Hold, WriteOrder};
use pool::{CHUNK, Pool};
use ring::probe;
use slot::{Slot, Stage, State};
use sync::Syncs;
use threads::Threads;
pub use trial::RingRefusal;
use zeroes::ZeroWriters;

/// How long `drop` waits for operations in flight before it leaks what they use.
const DROP_LIMIT: Duration = Duration::from_secs(2);

/// `user_data`: the slot in the lowest 16 bits, 16 for the ring, then this bit for a cancellation, and the use of the slot, so
/// that the answer to a cancellation is not taken for one about the slot's next operation.
const CANCEL: u64 = 1 << 32;
const USE_SHIFT: u32 = 33;

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub struct UringOptions {
    /// Refuse writing.
    pub read_only: bool,
    /// O_DIRECT: past the page cache.
    pub o_direct: bool,
    /// How data move.
    pub transfer: Transfer,
    /// Operations in flight, 1 to 1024.
    pub depth: u32,
}

impl Default for UringOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            o_direct: false,
            transfer: Transfer::Direct,
            depth: 256,
        }
    }
}

/// Why a file cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum UringError {
    /// It cannot be opened, or its size not be found.
    #[error("cannot open the disk image")]
    Open(#[source] io::Error),
    /// It is neither a regular file nor a block device.
    #[error("the disk image is neither a regular file nor a block device")]
    Kind,
    /// Its size is zero or no multiple of 512 bytes.
    #[error("the disk image has {0} bytes, no positive multiple of 512")]
    Size(u64),
    /// A depth outside 1 to 1024.
    #[error("a queue depth of 1 to 1024, not {0}")]
    Depth(u32),
    /// The host refuses io_uring, and what stands in for it as well.
    #[error("cannot start the threads that serve a disk without io_uring ({why})")]
    Threads {
        /// What is the matter with io_uring.
        why: RingRefusal,
        /// What is the matter with threads.
        source: io::Error,
    },
}

/// A raw file or block device.
///
/// Thread: made and attached anywhere, submitted to and polled from one thread only, the first that does:
/// on others nothing is submitted and nothing ends. To be dropped on that thread if
/// anything is in flight; elsewhere what is in flight is leaked after two seconds.
pub struct UringFile {
    engine: Engine,
    /// Threads that are in a call keep it open.
    file: Arc<File>,
    capacity: u64,
    alignment: Alignment,
    /// Calls for ranges that the file has.
    support: RangeSupport,
    options: UringOptions,
    now: Now,
    /// The file cannot say that an operation would wait: each is begun in a thread of the kernel.
    waits: bool,
    /// As many as have been used at the same time: at most `options.depth`.
    slots: Vec<Slot>,
    /// Made when it is first needed.
    pool: Option<Pool>,
    keep: Option<KeepAlive>,
    /// Operations the kernel has or will be given.
    in_flight: u32,
    /// Submissions that have ended before they reached the kernel.
    early: Vec<Completion>,
    /// What the kernel has answered. Empty between polls.
    answers: Vec<(u64, i32)>,
    /// The vectors of an operation done at once.
    scratch: Vec<libc::iovec>,
    /// Of a file in the page cache.
    syncs: Syncs,
    /// Of a file past the page cache whose blocks are larger than a sector.
    order: WriteOrder,
    zero_writers: ZeroWriters,
    /// Operations whose cancellation the kernel has refused, as it knows them. Empty between polls.
    refused: Vec<u64>,
}

// SAFETY: not `Send` by itself because of the pointers in `iovec`, which point into `pool` or into guest
// memory that `keep` holds; neither is tied to a thread.
unsafe impl Send for UringFile {}

impl UringFile {
    /// Opens `path`.
    pub fn open(path: &Path, options: UringOptions) -> Result<Self, UringError> {
        let file = OpenOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(if options.o_direct { libc::O_DIRECT } else { 0 })
            .open(path)
            .map_err(UringError::Open)?;
        Self::from_file(file, options)
    }

    /// Serves an open file, whose flags must fit the options; O_NONBLOCK is taken from it. By threads, which this starts, where
    /// the host has no io_uring for it.
    pub fn from_file(file: File, options: UringOptions) -> Result<Self, UringError> {
        Self::by(probe().err(), file, options)
    }

    /// Likewise, by threads in any case: there is something the matter with rings.
    pub fn by_threads(
        file: File,
        options: UringOptions,
        why: RingRefusal,
    ) -> Result<Self, UringError> {
        Self::by(Some(why), file, options)
    }

    fn by(
        no_ring: Option<RingRefusal>,
        file: File,
        options: UringOptions,
    ) -> Result<Self, UringError> {
        use std::io::{Seek, SeekFrom};
        if options.depth == 0 || options.depth > 1024 {
            return Err(UringError::Depth(options.depth));
        }
        let kind = file.metadata().map_err(UringError::Open)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(UringError::Kind);
        }
        // Metadata of a block device say 0; its end does not.
        let capacity = (&file).seek(SeekFrom::End(0)).map_err(UringError::Open)?;
        if capacity == 0 || !capacity.is_multiple_of(SECTOR) {
            return Err(UringError::Size(capacity));
        }
        clear_nonblock(&file).map_err(UringError::Open)?;
        let alignment = match options.o_direct {
            true => Alignment::direct(&file, kind.is_block_device()).map_err(UringError::Open)?,
            false => Alignment::CACHED,
        };
        let mut support = match options.read_only {
            true => RangeSupport::default(),
            false => range::probe(&file, capacity, alignment.block),
        };
        // A ring does what the host forbids as a system call.
        if no_ring.is_some() && support.punches && !threads::may_fallocate(&file, capacity) {
            support.punches = false;
        }
        let file = Arc::new(file);
        let engine = match no_ring {
            None => Engine::Ring(None),
            Some(why) => match Threads::start(&file) {
                Ok(threads) => Engine::Threads(threads, why),
                Err(source) => return Err(UringError::Threads { why, source }),
            },
        };
        Ok(Self {
            engine,
            now: Now::new(&file, kind.is_file() && !options.o_direct),
            waits: now::may_wait(&file),
            file,
            capacity,
            alignment,
            support,
            options,
            slots: Vec::new(),
            pool: None,
            keep: None,
            in_flight: 0,
            early: Vec::new(),
            answers: Vec::new(),
            scratch: Vec::new(),
            syncs: Syncs::default(),
            order: WriteOrder::default(),
            zero_writers: ZeroWriters::default(),
            refused: Vec::new(),
        })
    }

    /// The slot, made if it never was.
    fn slot(&mut self, number: u32) -> &mut Slot {
        assert!(number < self.options.depth, "a slot beyond the depth");
        let number = number as usize;
        if number >= self.slots.len() {
            self.slots.resize_with(number + 1, Slot::default);
        }
        &mut self.slots[number]
    }

    /// Whether the kernel may be given these pieces: they stay mapped for as long as `self.keep` is held.
    fn keeps(&self, pieces: &[Piece]) -> bool {
        self.keep.as_ref().is_some_and(|keep| {
            pieces
                .iter()
                .all(|piece| keeps_mapped(keep, piece.hva, u64::from(piece.len)))
        })
    }

    /// Reports a submission that does not reach the kernel.
    fn end_early(&mut self, slot: u32, errno: i32) {
        self.early.push(Completion {
            slot,
            outcome: Outcome::Failed(errno),
        });
    }

    /// Why threads serve it: what the host refuses of io_uring. `None`: a ring does.
    pub fn without_ring(&self) -> Option<&RingRefusal> {
        self.engine.without_ring()
    }

    /// Has the engine carry out what a slot in state `InFlight` is at.
    fn push(&mut self, number: u32) {
        let slot = &self.slots[number as usize];
        let call = match slot.stage {
            Stage::Sync => Call::Sync,
            Stage::Fallocate { step, offset, len } => Call::Fallocate {
                mode: step.mode(),
                offset,
                len,
            },
            Stage::Transfer | Stage::Zeroes { .. } | Stage::Load | Stage::Store => {
                let (offset, _) = slot.extent().expect("a stage that moves data");
                let offset = offset + u64::from(slot.moved);
                let vectors = &slot.iovecs[slot.first..];
                let (vectors, count) = (vectors.as_ptr(), vectors.len() as u32);
                match slot.reads() {
                    true => Call::Read {
                        vectors,
                        count,
                        offset,
                    },
                    // In the page cache a failure of the write must be told from one of its sync, which
                    // comes after it.
                    false => Call::Write {
                        vectors,
                        count,
                        offset,
                        durable: matches!(slot.op, Op::Write { durable: true, .. })
                            && self.options.o_direct,
                    },
                }
            }
        };
        // Zeroes are never written by the thread that enters the ring: no guest waits
        // for them as for a read.
        let waits = self.waits || matches!(slot.stage, Stage::Zeroes { .. });
        let user_data = slot.user_data(number);
        // SAFETY: the call's addresses are (a) the slot's vectors, which are not touched while the
        // engine has the slot's call and lie on the heap; (b) what the vectors point to: chunks of
        // `self.pool` that belong to this slot until it is unreserved, guest memory that
        // `self.keep` was checked to keep mapped in `submit`, the slot's aligned copy, which lies
        // on the heap and stays until the operation has ended, or zeroes in a static. A slot is in
        // flight until its call is answered; `drop` waits for that, or leaks them all.
        unsafe { self.engine.push(&self.file, call, waits, user_data) };
    }

    /// Begins what waits for others, where they have ended.
    fn begin_waiting(&mut self) {
        while let Some((number, hold)) = self.order.next() {
            self.slots[number as usize].hold = Some(hold);
            self.begin_or_end(number);
        }
        while let Some(number) = self.zero_writers.next() {
            self.write_zeroes(number);
        }
    }

    fn begin_or_end(&mut self, number: u32) {
        if let Some(outcome) = self.begin(number) {
            self.end_in_flight(number, outcome);
        }
    }

    /// Begins the operation of a slot in state `InFlight`; an outcome if it has ended already.
    fn begin(&mut self, number: u32) -> Option<Outcome> {
        match self.slots[number as usize].op {
            Op::Flush => return self.begin_sync(number),
            Op::Discard { .. } | Op::WriteZeroes { .. } => return self.begin_step(number),
            Op::Read { offset, len } | Op::Write { offset, len, .. } => {
                match self.alignment.fits(offset, len) {
                    true => self.push(number),
                    false => self.load(number, offset, len),
                }
            }
        }
        None
    }

    /// Begins the step that a discard or write-zeroes is at; an outcome if there is none.
    fn begin_step(&mut self, number: u32) -> Option<Outcome> {
        let slot = &mut self.slots[number as usize];
        let plan = slot.plan.expect("made when it was submitted");
        match plan.step(&self.support) {
            None => return Some(Outcome::Done),
            Some(RangeStep::Fallocate { step, offset, len }) => {
                slot.stage = Stage::Fallocate { step, offset, len };
                self.push(number);
            }
            Some(RangeStep::WriteZeroes { offset, len }) => {
                slot.stage = Stage::Zeroes { offset, len };
                self.zero_writers.enter(number);
            }
        }
        None
    }

    /// The permission that an operation needs to begin, where misaligned writes have to be kept
    /// from others.
    fn hold(&self, op: Op) -> Option<Hold> {
        if self.alignment.block <= SECTOR as u32 {
            return None;
        }
        let fits = match op {
            Op::Read { .. } | Op::Flush => return None,
            Op::Write { offset, len, .. } => self.alignment.fits(offset, len),
            Op::WriteZeroes { offset, len, .. } => self.alignment.fits(offset, len),
            // Cut to whole blocks.
            Op::Discard { .. } => true,
        };
        Some(if fits { Hold::Shared } else { Hold::Exclusive })
    }

    /// The slot's private buffer from `offset` on, at most a chunk of it, while the kernel has no
    /// entry that names it.
    fn private_buffer(&mut self, number: u32, offset: u32) -> &mut [u8] {
        let slot = &self.slots[number as usize];
        assert!(offset < slot.reserved, "offset outside the private buffer");
        let within = offset % CHUNK;
        let len = (CHUNK - within).min(slot.reserved - offset);
        let chunk = slot.chunks[(offset / CHUNK) as usize];
        let pool = self.pool.as_ref().expect("a slot with chunks has a pool");
        // SAFETY: `[within, within + len)` lies in the chunk, which belongs to this slot alone. The
        // callers are `buffer`, of a slot that is not in flight, and the copying of misaligned
        // data, whose entries name the copy and not the chunks; so the kernel does not access it.
        // The borrow of `self` keeps others out.
        unsafe {
            std::slice::from_raw_parts_mut(pool.chunk(chunk).add(within as usize), len as usize)
        }
    }
}

/// Tries whether this host lets its disks have io_uring, with all that they ask of it.
///
/// # Errors
/// What is refused: threads serve the disks then.
pub fn try_io_uring() -> Result<(), RingRefusal> {
    probe()
}

/// Where an open file is, for messages.
fn path_of(file: &File) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

/// Takes O_NONBLOCK from an open file, with which it may have been opened so that a FIFO is not waited for. io_uring takes
/// the flag for a promise that no operation waits, and begins all of them in the thread that enters the ring.
fn clear_nonblock(file: &File) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    Ok(fcntl_setfl(file, flags - OFlags::NONBLOCK)?)
}

/// What becomes of an operation for which no ring could be had.
fn not_begun(error: &io::Error) -> Outcome {
    match error.raw_os_error().unwrap_or(libc::EIO) {
        // Descriptors, the process's or the host's, or memory: others may give theirs back.
        errno @ (libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN) => {
            Outcome::NotBegun(errno)
        }
        errno => Outcome::Failed(errno),
    }
}

fn iovec(piece: &Piece) -> libc::iovec {
    libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(piece.hva.raw() as usize),
        iov_len: piece.len as usize,
    }
}

impl BlockIo for UringFile {
    fn path(&self) -> Option<PathBuf> {
        path_of(&self.file)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    fn alignment(&self) -> u32 {
        self.alignment.block
    }

    fn takes(&self, op: Op, pieces: &[Piece]) -> bool {
        match op {
            Op::Read { offset, .. } | Op::Write { offset, .. } => {
                self.alignment.takes(offset, pieces)
            }
            Op::Flush | Op::Discard { .. } | Op::WriteZeroes { .. } => true,
        }
    }

    fn discards(&self) -> bool {
        self.support.punches
    }

    fn discard_block(&self) -> u32 {
        self.support.call_block
    }

    fn depth(&self) -> u32 {
        self.options.depth
    }

    fn transfer(&self) -> Transfer {
        self.options.transfer
    }

    fn attach(&mut self, keep: KeepAlive) {
        assert_eq!(
            self.in_flight, 0,
            "guest memory changed under operations in flight"
        );
        self.keep = Some(keep);
    }

    fn detach(&mut self) {
        assert_eq!(
            self.in_flight, 0,
            "guest memory given up under operations in flight"
        );
        self.keep = None;
    }

    fn reserve(&mut self, slot: u32, len: u32) -> bool {
        assert!(len <= MAX_TRANSFER);
        self.slot(slot);
        let pool = self.pool.get_or_insert_with(Pool::new);
        let slot = &mut self.slots[slot as usize];
        assert_eq!(
            slot.state,
            State::Free,
            "a slot serves one request at a time"
        );
        let count = len.div_ceil(CHUNK) as usize;
        let Some(left) = pool.free.len().checked_sub(count) else {
            return false;
        };
        slot.chunks.extend(pool.free.drain(left..));
        slot.reserved = len;
        slot.state = State::Idle;
        true
    }

    fn buffer(&mut self, number: u32, offset: u32) -> &mut [u8] {
        assert_eq!(
            self.slots[number as usize].state,
            State::Idle,
            "the private buffer of an operation in flight"
        );
        self.private_buffer(number, offset)
    }

    fn unreserve(&mut self, slot: u32) {
        let Some(slot) = self.slots.get_mut(slot as usize) else {
            return;
        };
        assert_ne!(
            slot.state,
            State::InFlight,
            "the private buffer of an operation in flight"
        );
        slot.state = State::Free;
        slot.reserved = 0;
        match self.pool.as_mut() {
            Some(pool) => pool.free.append(&mut slot.chunks),
            None => debug_assert!(slot.chunks.is_empty()),
        }
    }

    fn run_now(&mut self, op: Op, pieces: &[Piece]) -> Option<Outcome> {
        if self.options.transfer != Transfer::Direct {
            return None;
        }
        let (offset, len) = match op {
            Op::Read { offset, len } => (offset, len),
            Op::Write {
                offset,
                len,
                durable: _,
            } => (offset, len),
            Op::Flush => return self.now.flush_is_free().then_some(Outcome::Done),
            Op::Discard { .. } | Op::WriteZeroes { .. } => return None,
        };
        if !self.keeps(pieces) {
            return None;
        }
        self.scratch.clear();
        self.scratch.extend(pieces.iter().map(iovec));
        let done = match op {
            Op::Write { .. } => self.now.write(&self.file, &self.scratch, offset, len),
            _ => self.now.read(&self.file, &self.scratch, offset, len),
        };
        done.map(|()| Outcome::Done)
    }

    fn submit(&mut self, number: u32, op: Op, pieces: &[Piece]) {
        if let Err(error) = self.engine.prepare(self.options.depth) {
            let (slot, outcome) = (number, not_begun(&error));
            return self.early.push(Completion { slot, outcome });
        }
        if op == Op::Flush
            && let Some(errno) = self.syncs.error()
        {
            return self.end_early(number, errno);
        }
        // The check that the safety of the kernel's access rests on: these bytes stay mapped for as
        // long as `self.keep` is held, which is until nothing is in flight.
        if !pieces.is_empty() && !self.keeps(pieces) {
            return self.end_early(number, libc::EFAULT);
        }
        // What is no whole number of blocks goes through a private buffer, as `takes` says.
        let is_misaligned = match op {
            Op::Read { offset, len } | Op::Write { offset, len, .. } => {
                !self.alignment.fits(offset, len)
            }
            _ => false,
        };
        if is_misaligned && !pieces.is_empty() {
            return self.end_early(number, libc::EINVAL);
        }
        let plan = RangePlan::of(op, &self.support);
        let slot = self.slot(number);
        assert_ne!(
            slot.state,
            State::InFlight,
            "a slot serves one request at a time"
        );
        slot.op = op;
        slot.cancelled = false;
        slot.uses = (slot.uses + 1) & (u32::MAX >> 1);
        slot.plan = plan;
        slot.move_through(Stage::Transfer, pieces.iter().map(iovec));
        let mut total: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        let slot = &mut self.slots[number as usize];
        let mut left = slot.reserved;
        for &chunk in &slot.chunks {
            let len = left.min(CHUNK);
            left -= len;
            total += u64::from(len);
            let pool = self.pool.as_ref().expect("a slot with chunks has a pool");
            let iov_base = pool.chunk(chunk).cast();
            slot.iovecs.push(libc::iovec {
                iov_base,
                iov_len: len as usize,
            });
        }
        if let Op::Read { len, .. } | Op::Write { len, .. } = op {
            assert_eq!(
                u64::from(len),
                total,
                "buffers do not add up to the transfer"
            );
            assert!(slot.iovecs.len() <= MAX_PIECES);
        }
        slot.state = State::InFlight;
        self.in_flight += 1;
        match self.hold(op) {
            Some(hold) => self.order.enter(number, hold),
            None => self.begin_or_end(number),
        }
        self.begin_waiting();
    }

    fn flush(&mut self) {
        self.engine.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.early);
        if self.in_flight == 0 {
            return;
        }
        self.flush();
        self.collect(done);
        if !self.refused.is_empty() {
            // A refusal says that the kernel cannot stop the operation: it runs, in the device or in a thread of the kernel,
            // or it has ended, and its own completion stands behind the refusal or waits for our next entry. After one
            // more look only those that run are left.
            self.engine.enter();
            self.collect(done);
            for refused in std::mem::take(&mut self.refused) {
                let number = u32::from(refused as u16);
                let slot = &self.slots[number as usize];
                if slot.state == State::InFlight && slot.user_data(number) == refused {
                    done.push(Completion {
                        slot: number,
                        outcome: Outcome::NotCancellable,
                    });
                }
            }
        }
        // Continuations of short transfers.
        self.flush();
    }

    fn has_completions(&mut self) -> bool {
        !self.early.is_empty() || (self.in_flight != 0 && self.engine.has_news())
    }

    fn cancel(&mut self, slot: u32) {
        // A submission that ended early may never have had a slot.
        let Some(own) = self.slots.get_mut(slot as usize) else {
            return;
        };
        if own.state == State::InFlight && !own.cancelled {
            own.cancelled = true;
            let waits = self.syncs.give_up(slot)
                || self.order.give_up(slot)
                || self.zero_writers.give_up(slot);
            if waits {
                // The kernel does not have it now.
                self.end_in_flight(slot, Outcome::Failed(libc::ECANCELED));
                return self.begin_waiting();
            }
            let user_data = self.slots[slot as usize].user_data(slot);
            self.engine.cancel(user_data);
        }
    }

    fn rebind(&mut self) {
        assert_eq!(
            self.in_flight, 0,
            "a ring given up under operations in flight"
        );
        self.engine.rebind();
    }

    fn arm(&mut self) {
        // With nothing in flight there is nothing to tell.
        if self.in_flight != 0 {
            self.engine.arm();
        }
    }

    fn disarm(&mut self) {
        self.engine.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        fds.extend(self.engine.wake_fd());
    }
}

impl Drop for UringFile {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_LIMIT;
        for slot in 0..self.slots.len() as u32 {
            self.cancel(slot);
        }
        let mut done = Vec::new();
        while self.in_flight != 0 && Instant::now() < deadline {
            self.poll(&mut done);
            done.clear();
            std::thread::yield_now();
        }
        if self.in_flight != 0 {
            // The kernel may write to these at any time: keep them for ever.
            std::mem::forget(self.keep.take());
            std::mem::forget(self.pool.take());
            std::mem::forget(std::mem::take(&mut self.slots));
            self.engine.abandon();
        }
    }
}

#[cfg(test)]
mod tests;
