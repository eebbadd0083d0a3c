//! The thread that takes pages away and brings them back.

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
/// Between two batches.
const PACE: Duration = Duration::from_millis(2);
/// Time for which a page that has come for a ticket stays although no access asks for it: its
/// device may have been reset.
const HELD_FOR: Duration = Duration::from_secs(2);
/// Most absent pages at a time. Pages that no access asks for would stay away, and the guest would
/// have too few left and only wait: so the oldest come back by themselves.
const ABSENT: usize = 1024;
/// Batches after which it reads anew which pages devices use.
const LOOK_EVERY: u32 = 16;

/// Tasks of the thread.
const PUNCH: u8 = 0;
const SERVE: u8 = 1;
const END: u8 = 2;

/// The thread. It has to be stopped, behind the last vCPU and the owner.
pub struct Puncher {
    thread: JoinHandle<Counts>,
    task: Arc<AtomicU8>,
    punched: Arc<AtomicU64>,
    ram: PunchedRam,
}

impl Puncher {
    /// Begins to take pages of `ram` away once a device has used it. `slots` are the mappings that
    /// the guest's memory slots show, one for each region; `owner` is whose memory it is.
    ///
    /// # Errors
    /// The kernel's, for instance that faults of the kernel cannot be served.
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

    /// Pages taken away so far.
    pub fn punched(&self) -> u64 {
        self.punched.load(Ordering::Relaxed)
    }

    /// Takes no more pages away; what is absent comes back as it is wanted.
    pub fn rest(&self) {
        self.task.fetch_max(SERVE, Ordering::Relaxed);
        self.ram.wake();
    }

    /// Ends the thread; what it has done.
    pub fn stop(self) -> Counts {
        self.task.store(END, Ordering::Relaxed);
        self.ram.wake();
        self.thread.join().unwrap_or_default()
    }
}

/// A page that was taken away.
struct Absent {
    /// Its content.
    bytes: Box<[u8; PAGE]>,
    /// Number of the batch in which the owner released it.
    batch: u64,
}

/// A question to the owner: which pages, and what it answers.
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
    /// Pages in the order in which they went; some are back.
    order: VecDeque<u64>,
    held: VecDeque<(Instant, u64)>,
    question: Option<Question>,
    /// Pages that devices use, when last looked.
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
            // SAFETY: the mapping is ours, and populating it changes nothing of what it holds.
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
                // A vCPU that waits for a fault waits for ever: better to end here, with the
                // reason.
                panic!("a page of guest memory cannot be moved: {error}");
            }
        }
    }

    /// Serves all that wait, and goes on with taking away. Never waits for the owner: it may itself
    /// wait for a vCPU that waits for a fault to be served.
    fn turn(&mut self, punches: bool) -> io::Result<()> {
        self.wait();
        let all_asked = self.ram.take_asked();
        // A request for a page that was released comes behind the answer that released it: first
        // the page goes, then it comes back. (A request from before meant an earlier absence.)
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
            // An owner that has ended waits for nothing.
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
        // Interrupted is a turn for nothing.
        let _ = poll(fds, Some(&limit));
        let _ = rustix::io::read(self.ram.wake_fd(), &mut [0_u8; 8]);
    }

    /// Asks the owner for a batch: half of it pages that devices use.
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

    /// Takes away those pages of the question that the owner has released.
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

    /// Puts a page back that is absent, maps it for the guest and shows it to the owner; returns
    /// whether it was absent. Its bytes are not needed if it is about to be filled by an access
    /// that asked when `filled` batches had been released. The same page may be asked for twice: by
    /// the second time it may have come back, been filled, and gone again with what it was filled
    /// with.
    fn bring_back(&mut self, page: u64, filled: Option<u64>) -> io::Result<bool> {
        let absent = self.absent.remove(&page);
        if let Some(Absent { mut bytes, batch }) = absent {
            let at = page * PAGE_SIZE;
            // The next data from there on: of a hole something further on, or nothing at all.
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
