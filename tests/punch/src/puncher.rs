//! The thread that removes pages and restores them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use guest_mem::{Gpa, PAGE_SIZE, Pages, SlotMapping};
use machine::Request;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::mm::{Advice, madvise};
use seeded::Random;
use sidecore::{Answer, Handle, Reply};
use uffd::{GuestMapping, Protection, Source, Stores};

use crate::counts::Counts;
use crate::memory::{PunchedRam, Use};

const PAGE: usize = PAGE_SIZE as usize;
/// Time between two batches.
const PACE: Duration = Duration::from_millis(2);
/// Time for which a page that was restored for a ticket is held although no access needs it: the
/// device may have been reset.
const HELD_FOR: Duration = Duration::from_secs(2);
/// Greatest number of absent pages. Pages that no access needs would stay absent, until the guest
/// had too few left and only waited. So beyond this number the oldest are restored.
const ABSENT: usize = 1024;
/// Number of batches after which the set of pages in use by devices is read again.
const LOOK_EVERY: u32 = 16;

/// Tasks of the thread: remove and restore pages, restore only, end.
const PUNCH: u8 = 0;
const SERVE: u8 = 1;
const END: u8 = 2;

/// The thread. It has to be stopped after the last vCPU and the owner.
pub struct Puncher {
    thread: JoinHandle<Counts>,
    task: Arc<AtomicU8>,
    punched: Arc<AtomicU64>,
    ram: PunchedRam,
}

impl Puncher {
    /// Starts to remove pages of `ram` once a device has used it. `slots` are the mappings of the
    /// guest's memory slots, one for each region; `owner` is the handle of the owner of this
    /// memory.
    ///
    /// # Errors
    /// The kernel's error, for example if userfaultfd may not serve faults of the kernel.
    pub fn start<O: 'static>(
        ram: PunchedRam,
        slots: Vec<Arc<SlotMapping>>,
        owner: Handle<Request<O>>,
    ) -> io::Result<Self> {
        let task = Arc::new(AtomicU8::new(PUNCH));
        let punched = Arc::new(AtomicU64::new(0));
        let thread = Thread::new(ram.clone(), slots, owner, (task.clone(), punched.clone()))?;
        let builder = std::thread::Builder::new().name("puncher".into());
        Ok(Self {
            thread: builder.spawn(move || thread.run())?,
            task,
            punched,
            ram,
        })
    }

    /// Returns the number of pages removed so far.
    pub fn punched(&self) -> u64 {
        self.punched.load(Ordering::Relaxed)
    }

    /// Stops to remove pages. Absent pages are still restored on access.
    pub fn rest(&self) {
        self.task.fetch_max(SERVE, Ordering::Relaxed);
        self.ram.wake();
    }

    /// Ends the thread. Returns its counts.
    pub fn stop(self) -> Counts {
        self.task.store(END, Ordering::Relaxed);
        self.ram.wake();
        self.thread.join().unwrap_or_default()
    }
}

/// A page that was removed.
struct Absent {
    /// Its content.
    bytes: Box<[u8; PAGE]>,
    /// Number of the batch in which the owner released it.
    batch: u64,
}

/// A request to the owner to release pages, and its pending answer.
struct Question {
    pages: Vec<u64>,
    answer: Answer<u32>,
}

struct Thread<O> {
    guest: GuestMapping,
    file: OwnedFd,
    ram: PunchedRam,
    owner: Handle<Request<O>>,
    task: Arc<AtomicU8>,
    punched: Arc<AtomicU64>,
    absent: HashMap<u64, Absent>,
    /// Absent pages, oldest first; some entries are restored already.
    order: VecDeque<u64>,
    held: VecDeque<(Instant, u64)>,
    question: Option<Question>,
    /// Pages that devices use, as of the last look.
    used: Vec<u64>,
    batches: u32,
    last: Instant,
    random: Random,
    counts: Counts,
}

impl<O: 'static> Thread<O> {
    fn new(
        ram: PunchedRam,
        slots: Vec<Arc<SlotMapping>>,
        owner: Handle<Request<O>>,
        (task, punched): (Arc<AtomicU8>, Arc<AtomicU64>),
    ) -> io::Result<Self> {
        for slot in &slots {
            let start = std::ptr::with_exposed_provenance_mut(slot.hva().raw() as usize);
            // SAFETY: the mapping is this process's, and populating it does not change its content.
            unsafe { madvise(start, slot.len() as usize, Advice::LinuxPopulateWrite) }?;
        }
        let offsets = ram.ram().regions().iter().map(|region| region.fd_offset);
        let guest = GuestMapping::new(offsets.zip(slots), Source::Kernel, Stores::Unseen)?;
        let file = ram.ram().memfd().ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self {
            guest,
            file: file.try_clone_to_owned()?,
            ram,
            owner,
            task,
            punched,
            absent: HashMap::new(),
            order: VecDeque::new(),
            held: VecDeque::new(),
            question: None,
            used: Vec::new(),
            batches: 0,
            last: Instant::now(),
            random: Random::new(1),
            counts: Counts::default(),
        })
    }

    fn run(mut self) -> Counts {
        loop {
            let task = self.task.load(Ordering::Relaxed);
            if task == END {
                return self.counts;
            }
            if let Err(error) = self.turn(task == PUNCH) {
                // A vCPU that waits for a fault would wait for ever, so the thread ends with the
                // reason.
                panic!("a page of guest memory cannot be moved: {error}");
            }
        }
    }

    /// Serves all waiting accesses, then continues to remove pages. Never blocks on the owner,
    /// which may itself wait for a vCPU that waits for a fault to be served.
    fn turn(&mut self, punches: bool) -> io::Result<()> {
        self.wait();
        let all_asked = self.ram.take_asked();
        // A request for a page comes after the answer that released it, so the answer is processed
        // first. (A request from before that refers to an earlier absence.)
        if let Some(question) = &self.question
            && let Some(gone) = question.answer.try_take()
        {
            self.punch(gone)?;
        }
        while self.absent.len() > ABSENT
            && let Some(page) = self.order.pop_front()
        {
            self.bring_back(page, None)?;
        }
        while let Some(fault) = self.guest.next_fault()? {
            let page = fault.page;
            if self.bring_back(page, None)? {
                let what = self.ram.use_of(page);
                self.counts.for_vcpus.add(what);
            }
        }
        for asked in all_asked {
            for (page, is_overwritten) in asked.pages {
                self.ram.hold(page);
                if self.bring_back(page, is_overwritten.then_some(asked.batches))? {
                    self.counts.for_devices.add(self.ram.use_of(page));
                }
                self.held.push_back((Instant::now(), page));
            }
            // If the owner has ended, no access waits.
            let _ = self.owner.send(Request::TicketDone(asked.ticket, Ok(())));
        }
        while let Some((since, page)) = self.held.front()
            && since.elapsed() > HELD_FOR
        {
            self.ram.unhold(*page);
            self.held.pop_front();
        }
        if punches && self.question.is_none() && self.last.elapsed() >= PACE {
            self.ask();
        }
        Ok(())
    }

    fn wait(&self) {
        let fds = &mut [
            PollFd::new(&self.guest, PollFlags::IN),
            PollFd::from_borrowed_fd(self.ram.wake_fd(), PollFlags::IN),
        ];
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        };
        // After EINTR the turn has nothing to do.
        let _ = poll(fds, Some(&limit));
        let _ = rustix::io::read(self.ram.wake_fd(), &mut [0_u8; 8]);
    }

    /// Asks the owner to release a batch of pages, of which devices use about half.
    fn ask(&mut self) {
        self.last = Instant::now();
        if self.batches.is_multiple_of(LOOK_EVERY) {
            let pages = 0..self.ram.pages();
            self.used = pages
                .filter(|page| self.ram.use_of(*page) != Use::Other)
                .collect();
        }
        if self.used.is_empty() {
            // No device uses the memory yet.
            return;
        }
        self.batches += 1;
        let mut pages = Vec::new();
        for nth in 0..Pages::MAX {
            let page = match nth % 2 {
                0 => self.used[self.random.below(self.used.len() as u64) as usize],
                _ => self.random.below(self.ram.pages()),
            };
            if !self.absent.contains_key(&page) && !pages.contains(&page) {
                pages.push(page);
            }
        }
        let gpas: Vec<Gpa> = pages.iter().map(|page| self.gpa_of(*page)).collect();
        let asked = Pages::new(&gpas).expect("as many as there may be, of whole pages");
        let (reply, answer) = Reply::pair();
        let question = Request::Evict {
            pages: Box::new(asked),
            reply,
        };
        if self.owner.send(question).is_ok() {
            self.question = Some(Question { pages, answer });
        }
    }

    /// Removes those pages of the request that the owner has released.
    fn punch(&mut self, gone: u32) -> io::Result<()> {
        let Some(Question { pages, .. }) = self.question.take() else {
            return Ok(());
        };
        self.counts.refused += pages.len() as u64 - u64::from(gone.count_ones());
        let gone = (0..).zip(pages).filter(|(nth, _)| gone >> nth & 1 != 0);
        let gone: Vec<u64> = gone.map(|(_, page)| page).collect();
        for page in &gone {
            self.guest.unmap(*page, 1)?;
        }
        for page in gone {
            let mut bytes = Box::new([0; PAGE]);
            let batch = self.ram.batches();
            let at = page * PAGE_SIZE;
            rustix::io::pread(&self.file, &mut bytes[..], at)?;
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.file, hole, at, PAGE_SIZE)?;
            self.absent.insert(page, Absent { bytes, batch });
            self.order.push_back(page);
            self.counts.punched.add(self.ram.use_of(page));
        }
        let punched = self.counts.punched.total();
        self.punched.store(punched, Ordering::Relaxed);
        Ok(())
    }

    /// Restores a page if it is absent, maps it for the guest and makes it present for the owner.
    /// Returns whether it was absent. Its content is not needed if an access overwrites it
    /// completely that started when `filled` batches had been released. A page may have two
    /// requests: by the second one it may have been restored, overwritten, and removed again with
    /// the new content.
    fn bring_back(&mut self, page: u64, filled: Option<u64>) -> io::Result<bool> {
        let absent = self.absent.remove(&page);
        if let Some(Absent { mut bytes, batch }) = absent {
            let at = page * PAGE_SIZE;
            // Finds the next data from there on: in a hole, data further on or none at all.
            if seek(&self.file, SeekFrom::Data(at)) == Ok(at) {
                self.counts.trespasses += 1;
            }
            if filled.is_some_and(|asked| asked >= batch) {
                self.counts.not_fetched += 1;
                bytes.fill(0);
            }
            rustix::io::pwrite(&self.file, &bytes[..], at)?;
            self.guest.map(page, 1, Protection::Writable)?;
            self.ram.show(page);
            return Ok(true);
        }
        self.guest.map(page, 1, Protection::Writable)?;
        Ok(false)
    }

    fn gpa_of(&self, page: u64) -> Gpa {
        let at = page * PAGE_SIZE;
        let regions = self.ram.ram().regions().iter();
        let mut found = regions.filter(|r| r.fd_offset <= at && at < r.fd_offset + r.len);
        let region = found.next().expect("a page of the file");
        Gpa::new(region.gpa.raw() + (at - region.fd_offset))
    }
}

#[cfg(test)]
mod tests;
