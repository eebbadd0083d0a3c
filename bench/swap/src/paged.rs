//! The pager at work: on a sidecore of its own, over a disk that answers at once. The calling
//! thread is the guest and the owner.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use guest_mem::{Gpa, GuestRam, Intent, PAGE_SIZE, Pages, PhysMem, SlotMapping, Stop, Ticket};
use sidecore::{IdlePolicy, Sidecore, SidecoreBuilder};
use swap::disk::MappedDisk;
use swap::pager::{self, Machine, Message, Pager, Report};
use swap::ram::SwappedRam;
use swap::residency::PauseReason;
use uffd::Source;
use vio::blk::{BlockIo, Op, Piece};

use crate::image::{Disk, Image};
use crate::memory::{load, memory, wait_until_empty};
use crate::{Cpus, Waiting};

/// Pages in memory while pages come to stand for blocks.
const FEW: usize = 64;

enum PagerEvent {
    /// And when it was said.
    Evict(Box<Pages>, Instant),
    Done(Ticket),
    Failed(String),
}

struct EventSender(Sender<PagerEvent>);

impl EventSender {
    fn tell(&self, told: PagerEvent) {
        // The receiver may have ended, which is no error.
        let _ = self.0.send(told);
    }
}

impl Machine for EventSender {
    fn evict(&self, pages: Pages) {
        self.tell(PagerEvent::Evict(Box::new(pages), Instant::now()));
    }

    fn ticket_done(&self, ticket: Ticket) {
        self.tell(PagerEvent::Done(ticket));
    }

    fn wake(&self) {}

    fn stop_vcpus(&self) {}

    fn pause(&self, reason: PauseReason, _: &Report) {
        self.tell(PagerEvent::Failed(format!("{reason:?}")));
    }

    fn resume(&self, _: &Report) {}

    fn fail(&self, error: &io::Error) {
        self.tell(PagerEvent::Failed(error.to_string()));
    }
}

/// A guest all of whose pages are on its disk.
pub struct Paged {
    /// Memory as the guest sees it.
    pub mapping: Arc<SlotMapping>,
    ram: SwappedRam,
    pager: Sidecore<Pager>,
    told: Receiver<PagerEvent>,
    asked: RefCell<Vec<Instant>>,
    pages: usize,
}

impl Paged {
    /// Starts it, has its disk read each page once, and takes all of them out of memory.
    pub fn new(pages: usize, image: &Image, cpus: Cpus, waiting: Waiting) -> Result<Self> {
        let (ram, mapping) = memory(pages)?;
        let mapping = Arc::new(mapping);
        let disk = |ram: &GuestRam| Box::new(Disk::new(image.clone(), ram.clone()));
        let (below, behind, store) = (disk(&ram), disk(&ram), disk(&ram));
        let ram = SwappedRam::new(ram);
        let (tell, told) = channel();
        let parts = pager::Parts {
            ram: ram.clone(),
            slots: vec![mapping.clone()],
            faults: Source::Kernel,
            limit: FEW,
            // Nothing goes there.
            store: (store, pages),
            preventer: None,
            images: vec![behind],
        };
        let mut disk = MappedDisk::new(below, ram.clone(), 0);
        disk.attach(ram.keep_alive());
        let pager = Pager::new(parts, Box::new(EventSender(tell)))?;
        let core = SidecoreBuilder::new("pager").cpu(Some(cpus.pager));
        let core = core.idle(match waiting {
            Waiting::Spins => IdlePolicy::Poll,
            Waiting::Sleeps => IdlePolicy::Sleep,
        });
        let pager = core.spawn(vec![pager])?;
        Pager::connect(&ram, pager.handle(0));
        let paged = Self {
            mapping,
            ram,
            pager,
            told,
            asked: RefCell::default(),
            pages,
        };
        // Memory has to be short before disks report.
        for page in 0..FEW {
            load(&paged.mapping, page);
        }
        // Between two answers it has had a turn, in which it notices.
        for _ in 0..2 {
            paged.report()?;
        }
        for page in 0..pages {
            paged.read(&mut disk, image, page)?;
        }
        paged.set_limit(0);
        paged.serve_until_empty()?;
        let report = paged.report()?;
        let dropped = report.counts.dropped_to_disk;
        ensure!(
            dropped >= pages as u64,
            "pages that stand for blocks: {dropped}"
        );
        Ok(paged)
    }

    /// Raises the limit so that all pages may be in memory, and none has to leave.
    pub fn open(&self) {
        self.set_limit(2 * self.pages);
    }

    /// No page may be in memory.
    fn close(&self) {
        self.set_limit(0);
    }

    fn set_limit(&self, limit: usize) {
        self.tell(Message::SetLimit(limit));
    }

    fn tell(&self, message: Message) {
        // A pager that has ended is noticed by the caller that waits for its answer.
        let _ = self.pager.handle(0).send(message);
    }

    /// Returns the pager's report.
    pub fn report(&self) -> Result<Report> {
        let answer = self.pager.handle(0).call(Message::Report);
        answer.context("the pager has ended")
    }

    /// Does as the pager says until no page is in memory. Nanoseconds from one question to the
    /// next, each of which is behind all that became of the one before.
    pub fn batches(&self) -> Result<Vec<f64>> {
        self.asked.borrow_mut().clear();
        self.close();
        self.serve_until_empty()?;
        let asked = self.asked.borrow();
        let times = asked.windows(2).map(|pair| pair[1] - pair[0]);
        Ok(times.map(|time| time.as_nanos() as f64).collect())
    }

    /// Does as the pager says until no page is in memory.
    fn serve_until_empty(&self) -> Result<()> {
        wait_until_empty(self.ram.ram(), || self.serve(None).map(drop))
    }

    /// Does what the pager has said, but for a page that the disk uses; the ticket that is done, if
    /// one is.
    fn serve(&self, in_use: Option<Gpa>) -> Result<Option<Ticket>> {
        match self.told.try_recv() {
            Ok(PagerEvent::Evict(pages, at)) => {
                self.asked.borrow_mut().push(at);
                let in_use = in_use.map_or(0, |gpa| pages.touched(gpa, PAGE_SIZE));
                self.ram.let_go(&pages, pages.all() & !in_use);
                Ok(None)
            }
            Ok(PagerEvent::Done(ticket)) => Ok(Some(ticket)),
            Ok(PagerEvent::Failed(why)) => anyhow::bail!("the pager stopped the guest: {why}"),
            Err(_) => {
                std::hint::spin_loop();
                Ok(None)
            }
        }
    }

    /// The guest's disk reads the page's block.
    fn read(&self, disk: &mut MappedDisk, image: &Image, page: usize) -> Result<()> {
        let gpa = Gpa::new(page as u64 * PAGE_SIZE);
        let hva = loop {
            match self.ram.host(gpa, PAGE_SIZE, Intent::Overwrite) {
                Ok(hva) => break hva,
                Err(Stop::Fault(fault)) => anyhow::bail!("{fault:?}"),
                Err(Stop::Pending(ticket)) => while self.serve(None)? != Some(ticket) {},
            }
        };
        let len = PAGE_SIZE as u32;
        let offset = image.offset(page);
        disk.submit(0, Op::Read { offset, len }, &[Piece { hva, len }]);
        let mut done = Vec::new();
        while done.is_empty() {
            self.serve(Some(gpa))?;
            disk.flush();
            disk.poll(&mut done);
        }
        Ok(())
    }

    /// Ends it.
    pub fn stop(self) {
        drop(self.pager.stop());
    }
}
