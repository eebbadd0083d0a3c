//! A machine without a hypervisor: memory that threads of the test reach through a guest's mapping, an owner with one disk, a
//! pager, a store in a file.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use guest_mem::{
    Gpa, GuestRam, HugePages, Intent, PAGE_SIZE, Pages, PhysMem, SlotMapping, Stop, Ticket,
};
use sidecore::{
    Activity, AlwaysPoll, ArmError, Handle, IdlePolicy, Poller, Sidecore, SidecoreBuilder, Turn,
    Wakes,
};
use swap::book::{Page, Trouble};
use swap::disk::MappedDisk;
use swap::pager::{self, Message, Pager, Report};
use swap::ram::SwappedRam;
use swap::store::Store;
use uffd::Source;
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece, UringFile, UringOptions};

const PATIENCE: Duration = Duration::from_secs(60);

/// How large it is, in pages.
pub struct Shape {
    /// Of memory.
    pub pages: u32,
    /// That may be in memory.
    pub limit: usize,
    /// Of the store.
    pub slots: u32,
}

/// One block that a guest wants moved.
pub struct Transfer {
    /// From memory to the disk.
    pub is_write: bool,
    /// Which block.
    pub block: u32,
    /// From or to where.
    pub page: Page,
    /// Told whether it was done.
    pub done: Sender<bool>,
}

/// What the owner is told.
pub enum Request {
    /// A guest's.
    Transfer(Transfer),
    /// The pager's.
    Evict(Box<Pages>),
    /// The pager's.
    TicketDone(Ticket),
}

/// The owner: one disk whose requests it takes from messages.
struct Owner {
    ram: SwappedRam,
    disk: MappedDisk,
    /// What has not been begun, since its page was absent when it was last tried.
    parked: HashMap<Ticket, Transfer>,
    begun: Vec<Option<Transfer>>,
    done: Vec<Completion>,
}

impl Owner {
    fn gpa(page: Page) -> Gpa {
        Gpa::new(u64::from(page.0) * PAGE_SIZE)
    }

    fn begin(&mut self, transfer: Transfer) {
        let intent = match transfer.is_write {
            true => Intent::Read,
            false => Intent::Overwrite,
        };
        let hva = match self.ram.host(Self::gpa(transfer.page), PAGE_SIZE, intent) {
            Ok(hva) => hva,
            Err(Stop::Pending(ticket)) => return drop(self.parked.insert(ticket, transfer)),
            Err(Stop::Fault(fault)) => panic!("{fault:?}"),
        };
        let len = PAGE_SIZE as u32;
        let offset = u64::from(transfer.block) * PAGE_SIZE;
        let op = match transfer.is_write {
            true => Op::Write {
                offset,
                len,
                durable: false,
            },
            false => Op::Read { offset, len },
        };
        let pieces = [Piece { hva, len }];
        if let Some(outcome) = self.disk.run_now(op, &pieces) {
            // Of a guest that has failed meanwhile nobody listens.
            let _ = transfer.done.send(outcome == Outcome::Done);
            return;
        }
        let free = self.begun.iter().position(Option::is_none);
        let slot = free.expect("fewer threads than slots");
        self.begun[slot] = Some(transfer);
        self.disk.submit(slot as u32, op, &pieces);
    }

    fn evict(&self, pages: &Pages) {
        let in_use = self.begun.iter().flatten();
        let in_use = in_use.fold(0, |mask, transfer| {
            mask | pages.touched(Self::gpa(transfer.page), PAGE_SIZE)
        });
        self.ram.let_go(pages, pages.all() & !in_use);
    }
}

impl Poller for Owner {
    type Message = Request;
    type Probe = AlwaysPoll;

    fn poll(&mut self, _: &mut Turn<'_>) -> Activity {
        self.disk.flush();
        self.disk.poll(&mut self.done);
        let is_busy = !self.done.is_empty();
        for completion in self.done.drain(..) {
            let transfer = self.begun[completion.slot as usize].take();
            let transfer = transfer.expect("it was begun");
            let _ = transfer.done.send(completion.outcome == Outcome::Done);
        }
        match is_busy {
            true => Activity::Busy,
            false => Activity::Waiting,
        }
    }

    fn message(&mut self, request: Request, _: &mut Turn<'_>) {
        match request {
            Request::Transfer(transfer) => self.begin(transfer),
            Request::Evict(pages) => self.evict(&pages),
            Request::TicketDone(ticket) => {
                let transfer = self.parked.remove(&ticket);
                self.begin(transfer.expect("a ticket is done once"));
            }
        }
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        self.disk.arm();
        let mut fds = Vec::new();
        self.disk.wake_fds(&mut fds);
        let fds: Vec<_> = fds.into_iter().map(|fd| (fd, 0)).collect();
        wakes.replace(&fds).map_err(ArmError::new)
    }

    fn has_work(&mut self) -> bool {
        self.disk.has_completions()
    }

    fn disarm(&mut self) {
        self.disk.disarm();
    }
}

/// The owner as the pager reaches it, and what it hears.
struct Door {
    owner: Handle<Request>,
    troubles: Arc<Mutex<Sender<Option<Trouble>>>>,
}

impl Door {
    fn tell(&self, trouble: Option<Trouble>) {
        let troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        // A test that does not care.
        let _ = troubles.send(trouble);
    }
}

impl pager::Machine for Door {
    fn evict(&self, pages: Pages) {
        // An owner that has ended lets go of nothing.
        let _ = self.owner.send(Request::Evict(Box::new(pages)));
    }

    fn ticket_done(&self, ticket: Ticket) {
        let _ = self.owner.send(Request::TicketDone(ticket));
    }

    fn wake(&self) {
        self.owner.wake();
    }

    fn stop_vcpus(&self) {}

    fn pause(&self, trouble: Trouble) {
        self.tell(Some(trouble));
    }

    fn resume(&self) {
        self.tell(None);
    }

    fn fail(&self, error: &io::Error) {
        panic!("{error}");
    }
}

/// All of it.
pub struct Machine {
    mapping: Arc<SlotMapping>,
    owner: Sidecore<Owner>,
    pager: Sidecore<Pager>,
    troubles: Mutex<Receiver<Option<Trouble>>>,
}

impl Machine {
    /// Starts with a store in a file of its own.
    pub fn start(shape: Shape, image: File) -> Result<Self, Box<dyn std::error::Error>> {
        let dir = tempfile::tempdir()?;
        let bytes = u64::from(shape.slots) * PAGE_SIZE;
        let store = Store::open(&dir.path().join("swap"), bytes)?;
        let slots = store.slots() as usize;
        let io = Box::new(UringFile::from_file(store.into_file(), past_the_cache())?);
        Self::over(shape, image, io, slots)
    }

    /// Starts with this store of so many slots.
    pub fn over(
        shape: Shape,
        image: File,
        store: Box<dyn BlockIo>,
        slots: usize,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let size = u64::from(shape.pages) * PAGE_SIZE;
        let ram = GuestRam::with_pages(&[(Gpa::new(0), size)], HugePages::Never)?;
        let mapping = Arc::new(ram.slot_mapping(&ram.regions()[0])?);
        let ram = SwappedRam::new(ram);
        let file = || -> Result<Box<dyn BlockIo>, Box<dyn std::error::Error>> {
            let options = UringOptions::default();
            Ok(Box::new(UringFile::from_file(image.try_clone()?, options)?))
        };
        let mut disk = MappedDisk::new(file()?, ram.clone(), 0);
        disk.attach(ram.keep_alive());
        let owner = Owner {
            ram: ram.clone(),
            disk,
            parked: HashMap::new(),
            begun: (0..64).map(|_| None).collect(),
            done: Vec::new(),
        };
        let spawn = |name: &str| {
            let core = SidecoreBuilder::new(name).idle(IdlePolicy::adaptive());
            core.shares_cpu(true)
        };
        let owner = spawn("owner").spawn(vec![owner])?;
        let (tell, troubles) = channel();
        let door = Door {
            owner: owner.handle(0),
            troubles: Arc::new(Mutex::new(tell)),
        };
        let parts = pager::Parts {
            ram: ram.clone(),
            slots: vec![mapping.clone()],
            faults: Source::User,
            limit: shape.limit,
            store: (store, slots),
            preventer: None,
            images: vec![file()?],
        };
        let pager = Pager::new(parts, Box::new(door))?;
        let pager = spawn("pager").spawn(vec![pager])?;
        Pager::connect(&ram, pager.handle(0));
        Ok(Self {
            mapping,
            owner,
            pager,
            troubles: Mutex::new(troubles),
        })
    }

    /// What the guest has mapped.
    pub fn mapping(&self) -> &SlotMapping {
        &self.mapping
    }

    /// Waits until the guest is paused, and why; or goes on.
    pub fn wait_for_trouble(&self) -> Option<Trouble> {
        let troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.recv_timeout(PATIENCE).expect("it is told")
    }

    /// Has a block moved.
    pub fn transfer(&self, transfer: Transfer) {
        let sent = self.owner.handle(0).send(Request::Transfer(transfer));
        assert!(sent.is_ok(), "the owner lives");
    }

    /// Tells the pager.
    pub fn tell(&self, message: Message) {
        assert!(self.pager.handle(0).send(message).is_ok(), "it lives");
    }

    /// Ends both; how things stood.
    pub fn stop(self) -> Report {
        drop(self.owner.stop());
        self.pager.stop()[0].report()
    }
}

/// How a store is reached.
pub fn past_the_cache() -> UringOptions {
    UringOptions {
        o_direct: true,
        ..UringOptions::default()
    }
}
