//! The image as a block back end.

use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use guest_mem::KeepAlive;
use vio::blk::{BlockIo, Completion, MAX_TRANSFER, Op, Piece, SECTOR, Transfer};

use crate::chain;
use crate::image::Image;
use crate::options::{ImageError, ImageErrorKind, ImageOptions};
use crate::queue::{Done, Job, Queue};
use crate::trial::FileUse;
use crate::worker;

/// Most bytes of private buffers reserved at a time; four of the largest transfers.
const RESERVE_LIMIT: usize = 4 * MAX_TRANSFER as usize;
/// A slot keeps a buffer of up to this many bytes for its next request: 16 MiB with 256 slots.
const KEEP_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Reserved,
    InFlight,
}

struct Slot {
    state: State,
    /// Away while the slot is in flight.
    data: Vec<u8>,
    /// Bytes that count against [`RESERVE_LIMIT`].
    reserved: usize,
    cancelled: bool,
}

/// A disk image served by threads of its own.
///
/// Thread: made anywhere, used from one thread at a time, which may change. Dropping waits for the
/// operations that threads have begun.
pub struct ImageDisk {
    queue: Arc<Queue>,
    image: Arc<Image>,
    threads: Vec<JoinHandle<()>>,
    options: ImageOptions,
    capacity: u64,
    slots: Vec<Slot>,
    reserved: usize,
    /// Submitted and not yet handed over.
    pending: Vec<Job>,
    /// Kept for its memory.
    collected: Vec<Done>,
    in_flight: u32,
}

impl ImageDisk {
    /// Opens the image at `path`, locks it (as QEMU does, so QEMU's tools take notice), and starts
    /// its threads. Where another process uses it, this blocks as [`lock`](crate::lock::lock) does.
    ///
    /// # Errors
    /// Names the file at fault, the image or one behind it, and the fault.
    pub fn open(path: &Path, options: ImageOptions) -> Result<Self, ImageError> {
        check_options(path, &options)?;
        let opened = unless_it_panics(path, || chain::open(path, &options))?;
        Self::of(Image::new(opened), options)
    }

    /// Opens the image at `path` in trial: what [`open`](Self::open) would refuse is refused, an
    /// image that is in use at once, but no file is locked or changed, whatever becomes of the
    /// disk. The files that it would use.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    pub fn open_in_trial(
        path: &Path,
        options: ImageOptions,
    ) -> Result<(Self, Vec<FileUse>), ImageError> {
        check_options(path, &options)?;
        let (opened, files) = unless_it_panics(path, || chain::open_in_trial(path, &options))?;
        Ok((Self::of(Image::new(opened), options)?, files))
    }

    /// Starts the threads that serve an open image.
    pub(crate) fn of(image: Image, options: ImageOptions) -> Result<Self, ImageError> {
        let path = image.path().to_owned();
        let at = |kind| ImageError {
            path: path.clone(),
            kind,
        };
        let image = Arc::new(image);
        let capacity = image.size;
        if capacity == 0 || !capacity.is_multiple_of(SECTOR) {
            return Err(at(ImageErrorKind::Size(capacity)));
        }
        let queue = Queue::new().map_err(|error| at(ImageErrorKind::Io(error)))?;
        let slot = |_| Slot {
            state: State::Free,
            data: Vec::new(),
            reserved: 0,
            cancelled: false,
        };
        let mut disk = Self {
            queue: Arc::new(queue),
            image,
            threads: Vec::new(),
            options,
            capacity,
            slots: (0..options.depth).map(slot).collect(),
            reserved: 0,
            pending: Vec::new(),
            collected: Vec::new(),
            in_flight: 0,
        };
        for number in 0..options.threads {
            let (queue, image) = (Arc::clone(&disk.queue), Arc::clone(&disk.image));
            let thread = std::thread::Builder::new()
                .name(format!("image-{number}"))
                .spawn(move || worker::run(&queue, &image))
                // Those that run are ended by dropping the disk.
                .map_err(|error| at(ImageErrorKind::Io(error)))?;
            disk.threads.push(thread);
        }
        Ok(disk)
    }

    fn slot(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }
}

fn check_options(path: &Path, options: &ImageOptions) -> Result<(), ImageError> {
    let what = match options {
        ImageOptions { depth, .. } if !(1..=1024).contains(depth) => "a queue depth of 1 to 1024",
        ImageOptions { threads, .. } if !(1..=64).contains(threads) => "1 to 64 threads",
        _ => return Ok(()),
    };
    Err(ImageError {
        path: path.to_owned(),
        kind: ImageErrorKind::Options(what),
    })
}

/// Calls what reads the image at `path` by the library, which may panic over it.
fn unless_it_panics<T>(
    path: &Path,
    open: impl FnOnce() -> Result<T, ImageError>,
) -> Result<T, ImageError> {
    catch_unwind(AssertUnwindSafe(open)).unwrap_or_else(|panic| {
        Err(ImageError {
            path: path.to_owned(),
            kind: ImageErrorKind::Panicked(worker::message(&*panic).to_owned()),
        })
    })
}

impl BlockIo for ImageDisk {
    fn path(&self) -> Option<PathBuf> {
        Some(self.image.path().to_owned())
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    fn depth(&self) -> u32 {
        self.options.depth
    }

    fn transfer(&self) -> Transfer {
        Transfer::Bounce
    }

    fn attach(&mut self, _keep: KeepAlive) {}

    fn detach(&mut self) {
        assert_eq!(self.in_flight, 0, "a reset under operations in flight");
    }

    fn reserve(&mut self, slot: u32, len: u32) -> bool {
        assert!(len <= MAX_TRANSFER);
        let len = len as usize;
        if self.reserved + len > RESERVE_LIMIT {
            return false;
        }
        let slot = self.slot(slot);
        assert_eq!(
            slot.state,
            State::Free,
            "a slot serves one request at a time"
        );
        // What an earlier request left in it is overwritten: by the device, or by a read that
        // succeeds.
        slot.data.resize(len, 0);
        slot.reserved = len;
        slot.state = State::Reserved;
        self.reserved += len;
        true
    }

    fn buffer(&mut self, slot: u32, offset: u32) -> &mut [u8] {
        let slot = self.slot(slot);
        assert_eq!(
            slot.state,
            State::Reserved,
            "the private buffer of an operation in flight, or of none"
        );
        let buffer = &mut slot.data[offset as usize..];
        assert!(!buffer.is_empty(), "offset outside the private buffer");
        buffer
    }

    fn unreserve(&mut self, slot: u32) {
        let slot = self.slot(slot);
        assert_ne!(
            slot.state,
            State::InFlight,
            "the private buffer of an operation in flight"
        );
        let reserved = std::mem::take(&mut slot.reserved);
        slot.state = State::Free;
        if slot.data.capacity() > KEEP_BYTES {
            slot.data = Vec::new();
        }
        self.reserved -= reserved;
    }

    fn submit(&mut self, number: u32, op: Op, _pieces: &[Piece]) {
        let slot = self.slot(number);
        assert_ne!(
            slot.state,
            State::InFlight,
            "a slot serves one request at a time"
        );
        if let Op::Read { len, .. } | Op::Write { len, .. } = op {
            assert_eq!(
                slot.reserved, len as usize,
                "the buffer is not the transfer's length"
            );
        }
        slot.state = State::InFlight;
        slot.cancelled = false;
        let data = std::mem::take(&mut slot.data);
        self.in_flight += 1;
        self.pending.push(Job {
            slot: number,
            op,
            data,
        });
    }

    fn flush(&mut self) {
        if !self.pending.is_empty() {
            self.queue.submit(&mut self.pending);
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.flush();
        if !self.queue.has_done() {
            return;
        }
        let mut collected = std::mem::take(&mut self.collected);
        self.queue.take_done(&mut collected);
        for Done { completion, data } in collected.drain(..) {
            if let Some(data) = data {
                let slot = self.slot(completion.slot);
                slot.data = data;
                slot.state = if slot.reserved == 0 {
                    State::Free
                } else {
                    State::Reserved
                };
                self.in_flight -= 1;
            }
            done.push(completion);
        }
        self.collected = collected;
    }

    fn has_completions(&mut self) -> bool {
        !self.pending.is_empty() || self.queue.has_done()
    }

    fn cancel(&mut self, slot: u32) {
        let own = self.slot(slot);
        if own.state == State::InFlight && !own.cancelled {
            own.cancelled = true;
            self.flush();
            self.queue.cancel(slot);
        }
    }

    fn arm(&mut self) {
        self.queue.arm();
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        fds.push(self.queue.wake_fd());
    }
}

impl Drop for ImageDisk {
    fn drop(&mut self) {
        self.queue.stop();
        for thread in self.threads.drain(..) {
            // A worker catches panics of the library.
            let _ = thread.join();
        }
        // The device is done with it; a later power cut must not lose writes that were completed to
        // it.
        if !self.options.read_only
            && !self.queue.is_dead()
            && let Err(error) = self.image.flush()
        {
            tracing::warn!(
                "flushing {} at its end failed: {error}",
                self.image.path().display()
            );
        }
    }
}

#[cfg(test)]
mod tests;
