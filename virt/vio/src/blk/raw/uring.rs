//! The io_uring instance of a thread, lent to the disks that it polls.
//!
//! A ring made for one issuer with its completions deferred (SINGLE_ISSUER, DEFER_TASKRUN and
//! TASKRUN_FLAG, where the kernel has them) belongs to the thread that enters it, so it lives in a
//! variable of that thread and goes with it. A disk holds a [`UringShare`], which names a place in
//! it and is taken at first use; on any other thread a seat reaches nothing. A disk that no driver
//! reads has no place, and one that moves to another thread leaves the old one's, with nothing in
//! flight.
//!
//! **What disks share, and what not.** One system call submits what all have queued, and takes in
//! what has ended for all; an idle poll costs a few loads and no system call. Each completion names
//! its disk's place and waits there until that disk is polled; a place is given to another disk
//! only when the kernel has answered every entry written for it, so no disk gets another's
//! completions. Entries are not shared out: a disk takes its whole depth off a ring's [`ROOM`], and
//! one that finds less left is lent the thread's next ring, so none ever waits for another's. The
//! kernel's threads that wait for storage are the polling thread's, with one ring or with many;
//! each disk adds as many as its depth.
//!
//! **Waking.** Completions are counted in one eventfd while any disk is armed; each disk has a
//! descriptor of it for its own, and all become readable at once. It is emptied when the last disk
//! is disarmed: until then it may stand for the completion of an armed disk that has not been
//! polled since. (The ring's own descriptor would not do: with DEFER_TASKRUN, Linux 6.18 reports it
//! readable when asked but does not wake a thread that is already waiting for it.)
//!
//! **Files are named by their descriptors,** and not registered: before Linux 6.13 one that is
//! taken out of a ring's table stays open until all operations begun before that have ended, of any
//! disk. A disk that does not answer would keep another's image open, and locked.
//!
//! Measured against a ring of its own for each disk (Linux 6.18, two processors, busy with other
//! things), 4 KiB reads of a file in memory, the lowest of three runs: one disk 3.2 and 0.81 µs per
//! read at depth 1 and 32 where it was 3.3 and 0.82, four disks 3.1 and 1.05 µs at depth 1 and 8
//! where it was 3.3 and 1.13, eight at depth 32 0.96 where it was 1.13. Served from a file system
//! with O_DIRECT, processor time per request was between 0.81 and 1.15 of what it was: a tie. Eight
//! disks of depth 256 hold 81 KiB of ring where it was 800.

mod probe;

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::thread::{self, ThreadId};

use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};

use super::call::CANCEL;
pub use probe::UringRefusal;
use probe::refused;

/// Depths of one ring's disks together.
const ROOM: u32 = 2048;
/// Entries that wait for the next entering.
const SUBMISSIONS: u32 = 256;
/// An answer to each operation in flight, and one to its cancellation.
const COMPLETIONS: u32 = 2 * ROOM;

/// The place in `user_data`; the disk's slot, below 1024, stands in the 16 bits below.
const PLACE_SHIFT: u32 = 16;
const PLACE: u64 = 0xffff << PLACE_SHIFT;
const _: () = assert!(ROOM <= 1 << 16);

struct Rings {
    thread: ThreadId,
    rings: Vec<Ring>,
}

thread_local! {
    static RINGS: RefCell<Rings> = RefCell::new(Rings {
        thread: thread::current().id(),
        rings: Vec::new(),
    });
}

struct Ring {
    io: IoUring,
    wake: OwnedFd,
    /// Disks that are armed: completions are counted in `wake` while there is one.
    armed: u32,
    /// Entries written and not yet submitted.
    queued: bool,
    room: u32,
    places: Vec<ShareState>,
}

/// One disk's part of a ring.
#[derive(Default)]
struct ShareState {
    /// 0: no disk has it.
    depth: u32,
    /// The disk has gone.
    is_left: bool,
    /// Entries written that the kernel has not answered.
    open: u32,
    /// `user_data`, without the place, and result of those that it has.
    answered: Vec<(u64, i32)>,
}

impl Ring {
    /// The best this kernel makes, silent at first.
    fn new() -> Result<Self, UringRefusal> {
        let best = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(COMPLETIONS)
            .build(SUBMISSIONS);
        let io = match best {
            Ok(io) => io,
            // A kernel that knows none of them, or a host that allows none.
            Err(_) => IoUring::builder()
                .setup_cqsize(COMPLETIONS)
                .build(SUBMISSIONS)
                .map_err(refused("io_uring_setup"))?,
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(|errno| refused("eventfd")(errno.into()))?;
        io.submitter()
            .register_eventfd(wake.as_raw_fd())
            .map_err(refused("REGISTER_EVENTFD of io_uring_register"))?;
        let mut ring = Self {
            io,
            wake,
            armed: 0,
            queued: false,
            room: ROOM,
            places: Vec::new(),
        };
        ring.set_notify(false);
        Ok(ring)
    }

    /// A place for a disk of this depth, for which there is room.
    fn take_place(&mut self, depth: u32) -> usize {
        self.room -= depth;
        self.add_workers(depth);
        let free = self.places.iter().position(|place| place.depth == 0);
        let at = free.unwrap_or_else(|| {
            self.places.push(ShareState::default());
            self.places.len() - 1
        });
        self.places[at].depth = depth;
        at
    }

    /// Gives a place back that has been left, unless the kernel has still to answer.
    fn free_place(&mut self, at: usize) {
        let place = &mut self.places[at];
        if place.is_left && place.open == 0 {
            self.room += place.depth;
            *place = ShareState::default();
        }
    }

    /// Adds room for all of a disk's operations to the threads with which the kernel waits for
    /// storage on this thread's behalf. There are four for each CPU at first: a handful of requests
    /// that one slow disk does not answer would keep the flushes of all others from being begun.
    /// Threads are made only while operations wait in others, so there are never more than
    /// operations in flight.
    fn add_workers(&self, depth: u32) {
        let submitter = self.io.submitter();
        // Makes the kernel's record of this thread, of which the limit is a part.
        // SAFETY: submits nothing, waits for nothing.
        let entered = unsafe { submitter.enter::<libc::sigset_t>(0, 0, 0, None) };
        // Zero leaves a limit unchanged and returns it.
        let mut limits = [0; 2];
        if entered.is_ok() && submitter.register_iowq_max_workers(&mut limits).is_ok() {
            let bounded = limits[0].saturating_add(depth);
            // As many as the user may have processes; a kernel before 5.15 keeps its own limit.
            let _ = submitter.register_iowq_max_workers(&mut [bounded, 0]);
        }
    }

    /// Enters the kernel: it takes queued entries, and runs work that it has deferred for this
    /// thread.
    fn enter(&mut self) {
        // EAGAIN, EBUSY and EINTR leave the entries where they are, for the next time.
        let _ = self.io.submit();
        self.queued = !self.io.submission().is_empty();
    }

    /// Whether the kernel has something for us: completions, or work it deferred to our next entry.
    fn has_events(&mut self) -> bool {
        self.io.submission().taskrun() || !self.io.completion().is_empty()
    }

    fn next(&mut self) -> Option<cqueue::Entry> {
        self.io.completion().next()
    }

    /// Takes in the kernel's completions, for all disks.
    fn collect(&mut self) {
        let submission = self.io.submission();
        let is_deferred = submission.taskrun() || submission.cq_overflow();
        drop(submission);
        if is_deferred {
            self.enter();
        }
        while let Some(entry) = self.next() {
            let at = ((entry.user_data() & PLACE) >> PLACE_SHIFT) as usize;
            let place = &mut self.places[at];
            place.open -= 1;
            if !place.is_left {
                let answer = (entry.user_data() & !PLACE, entry.result());
                place.answered.push(answer);
                continue;
            }
            self.free_place(at);
        }
    }

    /// Whether completions are counted in the eventfd.
    fn set_notify(&mut self, on: bool) {
        if on {
            self.io.completion().enable_eventfd();
        } else {
            self.io.completion().disable_eventfd();
        }
    }
}

/// A disk's place in the ring of the thread that has taken it. Left when it is dropped on that
/// thread; otherwise the place is lost, until the thread ends and the ring with it.
#[derive(Debug, Default)]
pub struct UringShare(Option<Held>);

/// A place that was taken.
#[derive(Debug)]
struct Held {
    thread: ThreadId,
    ring: usize,
    place: usize,
    wake: OwnedFd,
    is_armed: bool,
}

impl UringShare {
    /// Takes a place for `depth` operations, at most 2,048, of a disk that this thread polls, if
    /// it has none.
    pub fn take(&mut self, depth: u32) -> io::Result<()> {
        if self.0.is_some() {
            return Ok(());
        }
        let held = RINGS.with_borrow_mut(|own| {
            let has_room = |ring: &Ring| ring.room >= depth;
            if !own.rings.iter().any(has_room) {
                own.rings
                    .push(Ring::new().map_err(|refusal| refusal.error)?);
            }
            let at = own.rings.iter().position(has_room);
            let at = at.expect("a depth is at most the room of a new ring");
            let ring = &mut own.rings[at];
            Ok::<_, io::Error>(Held {
                thread: own.thread,
                ring: at,
                wake: ring.wake.try_clone()?,
                place: ring.take_place(depth),
                is_armed: false,
            })
        })?;
        self.0 = Some(held);
        Ok(())
    }

    /// Does `then` with the ring and the place in it; `None` without one, and on another thread.
    #[inline]
    fn with<R>(&self, then: impl FnOnce(&mut Ring, usize) -> R) -> Option<R> {
        let held = self.0.as_ref()?;
        let found = RINGS.try_with(|own| {
            let own = &mut *own.borrow_mut();
            let is_here = own.thread == held.thread;
            is_here.then(|| then(&mut own.rings[held.ring], held.place))
        });
        // The thread ends, and its ring has gone.
        found.unwrap_or(None)
    }

    /// Writes an entry, answered as `user_data`, whose bits 16 to 31 are 0.
    ///
    /// # Safety
    /// The memory that the entry points to stays valid until it is answered.
    pub unsafe fn push(&self, entry: squeue::Entry, user_data: u64) {
        debug_assert_eq!(user_data & PLACE, 0);
        debug_assert!(
            self.0.is_some(),
            "a place is taken before anything is pushed"
        );
        self.with(|ring, place| {
            let entry = entry.user_data(user_data | (place as u64) << PLACE_SHIFT);
            ring.places[place].open += 1;
            ring.queued = true;
            // SAFETY: as the caller promises.
            while unsafe { ring.io.submission().push(&entry) }.is_err() {
                // Full of what the kernel has not looked at yet. It refuses for want of memory, or
                // until the completions that wait are taken in.
                ring.enter();
                ring.collect();
            }
        });
    }

    /// Asks to stop the operation that is answered as `user_data`.
    pub fn cancel(&self, user_data: u64) {
        let Some(held) = &self.0 else {
            return;
        };
        let target = user_data | (held.place as u64) << PLACE_SHIFT;
        let entry = opcode::AsyncCancel::new(target).build();
        // SAFETY: it points to nothing.
        unsafe { self.push(entry, user_data | CANCEL) };
    }

    /// Submits queued entries.
    pub fn flush(&self) {
        self.with(|ring, _| {
            if ring.queued {
                ring.enter();
            }
        });
    }

    /// Enters the kernel, queued or not.
    pub fn enter(&self) {
        self.with(|ring, _| ring.enter());
    }

    /// Replaces `answers` by the answers since the last call: `user_data` and result.
    pub fn collect(&self, answers: &mut Vec<(u64, i32)>) {
        answers.clear();
        self.with(|ring, place| {
            ring.collect();
            std::mem::swap(answers, &mut ring.places[place].answered);
        });
    }

    /// Whether there is anything to submit or to collect, for whatever disk.
    pub fn has_events(&self) -> bool {
        let has_events = self.with(|ring, place| {
            ring.queued || !ring.places[place].answered.is_empty() || ring.has_events()
        });
        has_events.unwrap_or(false)
    }

    /// From now on completions make the descriptor readable.
    pub fn arm(&mut self) {
        if let Some(held) = &mut self.0
            && !std::mem::replace(&mut held.is_armed, true)
        {
            self.with(|ring, _| {
                ring.armed += 1;
                ring.set_notify(true);
            });
        }
    }

    /// The descriptor is not needed; a poll follows.
    pub fn disarm(&mut self) {
        if let Some(held) = &mut self.0
            && std::mem::take(&mut held.is_armed)
        {
            self.with(|ring, _| {
                ring.armed -= 1;
                if ring.armed == 0 {
                    ring.set_notify(false);
                    // Would-block means that nothing was counted.
                    let _ = rustix::io::read(&ring.wake, &mut [0; 8]);
                }
            });
        }
    }

    /// The descriptor that completions make readable while it is armed.
    pub fn wake_fd(&self) -> Option<RawFd> {
        self.0.as_ref().map(|held| held.wake.as_raw_fd())
    }
}

impl Drop for UringShare {
    fn drop(&mut self) {
        self.disarm();
        self.with(|ring, place| {
            ring.places[place].is_left = true;
            ring.free_place(place);
        });
    }
}

/// Tries whether this host lets its disks have io_uring, with all that they ask of it.
///
/// # Errors
/// The refusal for which threads serve the disks.
pub fn try_io_uring() -> Result<(), UringRefusal> {
    probe::try_operations(&mut Ring::new()?.io)
}

/// The room left in each of this thread's rings.
#[cfg(test)]
pub(super) fn rooms() -> Vec<u32> {
    RINGS.with_borrow(|own| own.rings.iter().map(|ring| ring.room).collect())
}
