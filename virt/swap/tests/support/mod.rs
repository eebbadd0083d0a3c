//! A machine without a hypervisor: memory that threads of the test reach through a guest's mapping,
//! an owner with disks, a pager, a store.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guest_mem::{
    Gpa, GuestRam, HugePages, Intent, PAGE_SIZE, Pages, PhysMem, SlotMapping, Stop, Ticket,
};
use rustix::fs::{SeekFrom, seek};
use sidecore::{
    Activity, AlwaysPoll, ArmError, Handle, IdlePolicy, Poller, Sidecore, SidecoreBuilder, Turn,
    Wakes,
};
use swap::balloon::SwappedBalloon;
use swap::book::{FaultOrigin, IoPolicy, Page, Trouble};
use swap::disk::MappedDisk;
use swap::overwrite::Registers;
use swap::pager::{self, Message, Pager, Report};
use swap::ram::SwappedRam;
use swap::stopped::{Answer, Stopped};
use swap::store::{Growth, Store};
use uffd::Source;
use vio::balloon::{BalloonIo, PageRange};
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece, RawDisk, RawDiskOptions};

const PATIENCE: Duration = Duration::from_secs(60);

/// Policy of a control: what a vCPU is about to overwrite is read all the same.
#[derive(Debug)]
struct ReadsWhatVcpusOverwrite;

impl IoPolicy for ReadsWhatVcpusOverwrite {
    fn reads_overwritten(&self, origin: FaultOrigin) -> bool {
        origin == FaultOrigin::Vcpu
    }
}

/// How large it is, in pages.
pub struct Shape {
    /// Of memory.
    pub pages: u32,
    /// That may be in memory.
    pub limit: usize,
}

/// A request of a guest.
pub struct Transfer {
    /// Which disk's.
    pub disk: usize,
    /// What it asks.
    pub op: Op,
    /// From or to where, if it moves anything.
    pub gpa: Option<Gpa>,
    /// Told whether it was done.
    pub done: Sender<bool>,
}

impl Transfer {
    /// Its memory.
    fn range(&self) -> Option<(Gpa, u64)> {
        match self.op {
            Op::Read { len, .. } | Op::Write { len, .. } => Some((self.gpa?, len.into())),
            Op::Flush | Op::Discard { .. } | Op::WriteZeroes { .. } => None,
        }
    }
}

/// A disk, twice.
pub struct Disk {
    /// For the guest's requests.
    pub below: Box<dyn BlockIo>,
    /// For the pager to read.
    pub image: Box<dyn BlockIo>,
}

/// What is not memory.
pub struct Files {
    /// Where pages go.
    pub store: Box<dyn BlockIo>,
    /// How many it holds.
    pub slots: usize,
    /// Slots that are free again are trimmed.
    pub trims: bool,
    /// By their numbers.
    pub disks: Vec<Disk>,
}

/// Or why a test cannot be.
pub type Made<T> = Result<T, Box<dyn Error>>;

/// What the owner is told.
pub enum Request {
    /// A guest's.
    Transfer(Transfer),
    /// A guest that does without a page, and is told when it may use it again.
    GiveUp(Page, Sender<()>),
    /// The pager's.
    Evict(Box<Pages>),
    /// The pager's.
    TicketDone(Ticket),
}

/// The owner: disks whose requests it takes from messages.
struct Owner {
    ram: SwappedRam,
    disks: Vec<MappedDisk>,
    balloon: SwappedBalloon,
    /// Pages that are being given up.
    given: HashMap<Ticket, (Page, Sender<()>)>,
    /// What has not been begun, since its page was absent when it was last tried.
    parked: HashMap<Ticket, Transfer>,
    /// By disks and slots.
    begun: HashMap<(usize, u32), Transfer>,
    done: Vec<Completion>,
}

/// Requests of a disk under way at a time.
const SLOTS: u32 = 64;

impl Owner {
    fn begin(&mut self, transfer: Transfer) {
        let mut pieces = Vec::new();
        if let Some((gpa, len)) = transfer.range() {
            let intent = match transfer.op {
                Op::Read { .. } => Intent::Overwrite,
                _ => Intent::Read,
            };
            let hva = match self.ram.host(gpa, len, intent) {
                Ok(hva) => hva,
                Err(Stop::Pending(ticket)) => return drop(self.parked.insert(ticket, transfer)),
                Err(Stop::Fault(fault)) => panic!("{fault:?}"),
            };
            // A request has 32 bits for its length.
            let len = len as u32;
            pieces.push(Piece { hva, len });
        }
        let (disk, op) = (transfer.disk, transfer.op);
        if let Some(outcome) = self.disks[disk].run_now(op, &pieces) {
            // If the guest has failed meanwhile no thread listens.
            let _ = transfer.done.send(outcome == Outcome::Done);
            return;
        }
        let free = (0..SLOTS).find(|slot| !self.begun.contains_key(&(disk, *slot)));
        let slot = free.expect("fewer threads than slots");
        self.begun.insert((disk, slot), transfer);
        self.disks[disk].submit(slot, op, &pieces);
    }

    fn give_up(&mut self, page: Page, done: Sender<()>) {
        let pages = [PageRange {
            gpa: Gpa::new(u64::from(page.0) * PAGE_SIZE),
            pages: 1,
        }];
        match self.balloon.inflated(&pages) {
            Ok(()) => {
                // If the guest has failed meanwhile no thread listens.
                let _ = done.send(());
            }
            Err(ticket) => drop(self.given.insert(ticket, (page, done))),
        }
    }

    fn evict(&self, pages: &Pages) {
        let in_use = self.begun.values().filter_map(Transfer::range);
        let in_use = in_use.fold(0, |mask, (gpa, len)| mask | pages.touched(gpa, len));
        self.ram.let_go(pages, pages.all() & !in_use);
    }
}

impl Poller for Owner {
    type Message = Request;
    type Probe = AlwaysPoll;

    fn poll(&mut self, _: &mut Turn<'_>) -> Activity {
        let mut is_busy = false;
        for (number, disk) in self.disks.iter_mut().enumerate() {
            disk.flush();
            disk.poll(&mut self.done);
            is_busy |= !self.done.is_empty();
            for completion in self.done.drain(..) {
                let transfer = self.begun.remove(&(number, completion.slot));
                let transfer = transfer.expect("it was begun");
                let _ = transfer.done.send(completion.outcome == Outcome::Done);
            }
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
            Request::GiveUp(page, done) if self.given.is_empty() => self.give_up(page, done),
            // A driver has one at a time in a queue.
            Request::GiveUp(_, done) => drop(done.send(())),
            Request::TicketDone(ticket) => {
                if let Some((page, done)) = self.given.remove(&ticket) {
                    return self.give_up(page, done);
                }
                let transfer = self.parked.remove(&ticket);
                self.begin(transfer.expect("a ticket is done once"));
            }
        }
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        let mut fds = Vec::new();
        for disk in &mut self.disks {
            disk.arm();
            disk.wake_fds(&mut fds);
        }
        let fds: Vec<_> = fds.into_iter().map(|fd| (fd, 0)).collect();
        wakes.replace(&fds).map_err(ArmError::new)
    }

    fn has_work(&mut self) -> bool {
        self.disks.iter_mut().any(|disk| disk.has_completions())
    }

    fn disarm(&mut self) {
        self.disks.iter_mut().for_each(|disk| disk.disarm());
    }
}

/// Of a Linux kernel in 64-bit mode with 4-level paging, at an instruction; where that is and what
/// it does is the test's.
pub const IN_KERNEL: Registers = Registers {
    rip: 0,
    rax: 0,
    rcx: 0,
    rsi: 0,
    rdi: 0,
    rflags: 0x246,
    cr0: 0x8005_0033,
    cr3: 0,
    cr4: 0x0037_0ef0,
    efer: 0xd01,
    dr7: 0x400,
    pkru: None,
    cpl: 0,
    cs_l: true,
    cs_d: false,
    is_at_instruction: true,
};

/// What stands for a vCPU.
pub struct Vcpu {
    /// What it is about to overwrite is read all the same.
    pub is_only_counted: bool,
    /// How it says where it is.
    pub stops: Stops,
}

/// How a vCPU says where it is, when it is to stop.
pub enum Stops {
    /// It is always here, and says so at once; where each answer comes.
    AtOnce(Registers, Sender<Answer>),
    /// The test is told, and says it when it likes ([`Message::Stopped`]).
    ByTest(Sender<()>),
}

/// Where a page is, as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// The guest reaches it.
    Mapped,
    /// In memory, and not mapped: soft, or on its way in or out.
    Unmapped,
    /// Not in memory.
    Absent,
}

/// The owner as the pager reaches it, and what it hears.
struct Door {
    owner: Handle<Request>,
    troubles: Arc<Mutex<Sender<Option<Trouble>>>>,
    vcpu: Option<Vcpu>,
    pager: Arc<OnceLock<Handle<Message>>>,
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
        // An owner that has ended releases nothing.
        let _ = self.owner.send(Request::Evict(Box::new(pages)));
    }

    fn ticket_done(&self, ticket: Ticket) {
        let _ = self.owner.send(Request::TicketDone(ticket));
    }

    fn wake(&self) {
        self.owner.wake();
    }

    fn stop_vcpus(&self) {
        let (Some(vcpu), Some(pager)) = (&self.vcpu, self.pager.get()) else {
            return;
        };
        // A test that does not care has gone.
        match &vcpu.stops {
            Stops::AtOnce(registers, stops) => {
                let (stopped, answer) = Stopped::new(*registers);
                let _ = pager.send(Message::Stopped(stopped));
                let _ = stops.send(answer);
            }
            Stops::ByTest(stops) => drop(stops.send(())),
        }
    }

    fn pause(&self, trouble: Trouble, _: &Report) {
        self.tell(Some(trouble));
    }

    fn resume(&self, _: &Report) {
        self.tell(None);
    }

    fn fail(&self, error: &io::Error) {
        panic!("{error}");
    }
}

/// All of it.
pub struct Machine {
    ram: GuestRam,
    mapping: Arc<SlotMapping>,
    pagemap: File,
    owner: Sidecore<Owner>,
    pager: Sidecore<Pager>,
    troubles: Mutex<Receiver<Option<Trouble>>>,
}

impl Machine {
    /// Starts over what is made for this memory.
    pub fn over(shape: &Shape, files: impl FnOnce(&GuestRam) -> Made<Files>) -> Made<Self> {
        Self::with_vcpu(shape, files, None)
    }

    /// The same, with a vCPU that a Preventer looks at.
    pub fn with_vcpu(
        shape: &Shape,
        files: impl FnOnce(&GuestRam) -> Made<Files>,
        vcpu: Option<Vcpu>,
    ) -> Made<Self> {
        let size = u64::from(shape.pages) * PAGE_SIZE;
        let ram = GuestRam::with_pages(&[(Gpa::new(0), size)], HugePages::Never)?;
        let mapping = Arc::new(ram.slot_mapping(&ram.regions()[0])?);
        let files = files(&ram)?;
        let memory = ram.clone();
        let ram = SwappedRam::new(ram);
        let (mut disks, mut images) = (Vec::new(), Vec::new());
        for (number, disk) in (0..).zip(files.disks) {
            let mut mapped = MappedDisk::new(disk.below, ram.clone(), number);
            mapped.attach(ram.keep_alive());
            disks.push(mapped);
            images.push(disk.image);
        }
        let owner = Owner {
            ram: ram.clone(),
            disks,
            balloon: SwappedBalloon::new(ram.clone()),
            given: HashMap::new(),
            parked: HashMap::new(),
            begun: HashMap::new(),
            done: Vec::new(),
        };
        // As a machine has it unless it is told otherwise.
        let spawn = |name: &str| {
            let core = SidecoreBuilder::new(name).idle(IdlePolicy::adaptive());
            core.shares_cpu(true)
        };
        let owner = spawn("owner").spawn(vec![owner])?;
        let (tell, troubles) = channel();
        let is_looked_at = vcpu.is_some();
        let is_only_counted = vcpu.as_ref().is_some_and(|vcpu| vcpu.is_only_counted);
        let own_handle = Arc::new(OnceLock::new());
        let door = Door {
            owner: owner.handle(0),
            troubles: Arc::new(Mutex::new(tell)),
            vcpu,
            pager: own_handle.clone(),
        };
        let parts = pager::Parts {
            ram: ram.clone(),
            slots: vec![mapping.clone()],
            faults: Source::User,
            limit: shape.limit,
            store: (files.store, files.slots),
            preventer: is_looked_at.then_some((1, PATIENCE)),
            images,
        };
        let mut pager = Pager::new(parts, Box::new(door))?;
        if files.trims {
            pager.trims_slots();
        }
        if is_only_counted {
            pager.set_policy(Box::new(ReadsWhatVcpusOverwrite));
        }
        let pager = spawn("pager").spawn(vec![pager])?;
        // Once, as this is.
        let _ = own_handle.set(pager.handle(0));
        Pager::connect(&ram, pager.handle(0));
        Ok(Self {
            ram: memory,
            mapping,
            pagemap: File::open("/proc/self/pagemap")?,
            owner,
            pager,
            troubles: Mutex::new(troubles),
        })
    }

    /// What the guest has mapped.
    pub fn mapping(&self) -> &Arc<SlotMapping> {
        &self.mapping
    }

    /// What runs the pager.
    pub fn pager(&self) -> &Sidecore<Pager> {
        &self.pager
    }

    /// Where the guest's requests go.
    pub fn requests(&self) -> Handle<Request> {
        self.owner.handle(0)
    }

    /// Waits until the guest is paused, and why; or goes on.
    pub fn wait_for_trouble(&self) -> Option<Trouble> {
        let troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.recv_timeout(PATIENCE).expect("it is told")
    }

    /// Loads word `index` of a page, as a processor.
    pub fn load(&self, page: usize, index: usize) -> u64 {
        self.word(page, index).load(Ordering::Relaxed)
    }

    /// Stores word `index` of a page, as a processor.
    pub fn store(&self, page: usize, index: usize, value: u64) {
        self.word(page, index).store(value, Ordering::Relaxed);
    }

    fn word(&self, page: usize, index: usize) -> &AtomicU64 {
        let at = self.mapping.hva().raw() as usize + page * PAGE_SIZE as usize + index * 8;
        // SAFETY: aligned, inside the mapping, which lives as long as the machine, and only used
        // atomically.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(at)) }
    }

    /// Where a page is.
    pub fn whereabouts(&self, page: usize) -> Whereabouts {
        let (hva, offset) = (self.mapping.hva().raw(), page as u64 * PAGE_SIZE);
        // 8 bytes for each page of the process, of which the highest bit says that it is mapped.
        let mut entry = [0; 8];
        let at = (hva + offset) / PAGE_SIZE * 8;
        let read = self.pagemap.read_exact_at(&mut entry, at);
        read.expect("an entry for each page");
        let file = self.ram.memfd().expect("guest memory is a file");
        match seek(file, SeekFrom::Data(offset)) {
            _ if u64::from_ne_bytes(entry) >> 63 != 0 => Whereabouts::Mapped,
            Ok(found) if found == offset => Whereabouts::Unmapped,
            _ => Whereabouts::Absent,
        }
    }

    /// Has the first disk do this, from or to memory from this page on, and waits: whether it was
    /// done.
    pub fn request(&self, op: Op, page: usize) -> bool {
        let (done, wait) = channel();
        let gpa = Some(Gpa::new(page as u64 * PAGE_SIZE));
        let disk = 0;
        let transfer = Transfer {
            disk,
            op,
            gpa,
            done,
        };
        let sent = self.requests().send(Request::Transfer(transfer));
        assert!(sent.is_ok(), "the owner lives");
        wait.recv_timeout(PATIENCE).expect("the request ends")
    }

    /// Has the guest do without a page; told when it may use it again, if it was asked in time.
    pub fn give_up(&self, page: Page, done: Sender<()>) {
        let sent = self.owner.handle(0).send(Request::GiveUp(page, done));
        assert!(sent.is_ok(), "the owner lives");
    }

    /// Tells the pager.
    pub fn tell(&self, message: Message) {
        assert!(self.pager.handle(0).send(message).is_ok(), "it lives");
    }

    /// Has every page leave memory, where so many may be from then on.
    pub fn empty(&self, limit: usize) {
        self.tell(Message::SetLimit(0));
        let deadline = Instant::now() + PATIENCE;
        while self.report().present > 0 {
            assert!(Instant::now() < deadline, "{:?}", self.report());
            thread::sleep(Duration::from_millis(1));
        }
        self.tell(Message::SetLimit(limit));
    }

    /// How things stand.
    pub fn report(&self) -> Report {
        self.pager
            .handle(0)
            .call(Message::Report)
            .expect("it lives")
    }

    /// Ends both, when nothing is under way any more; how things stood.
    pub fn stop(self) -> Report {
        let Self { owner, pager, .. } = self;
        drop(owner.stop());
        let (tell, ended) = channel();
        let sent = pager.handle(0).send(Message::End(tell));
        assert!(sent.is_ok(), "it lives");
        // Else files are closed on this thread, which cannot see requests of another's end and
        // waits two seconds for them.
        let outcome = ended.recv_timeout(PATIENCE);
        outcome.expect("all that is under way ends");
        pager.stop()[0].report()
    }

    /// The same, of which nothing that is under way will end.
    pub fn cut_off(self) -> Report {
        drop(self.owner.stop());
        self.pager.stop()[0].report()
    }
}

/// A store in a file that has no name.
pub fn store(slots: u32) -> Made<Box<dyn BlockIo>> {
    Ok(store_that_grows(slots)?.0)
}

/// The same, what makes it larger, and its file, to look at.
pub fn store_that_grows(slots: u32) -> Made<(Box<dyn BlockIo>, Growth, File)> {
    let dir = tempfile::tempdir()?;
    let store = Store::open(&dir.path().join("swap"), u64::from(slots) * PAGE_SIZE)?;
    let growth = store.growth()?;
    let file = store.into_file();
    let store = RawDisk::from_file(file.try_clone()?, past_the_cache())?;
    Ok((Box::new(store), growth, file))
}

/// A disk with this image.
pub fn disk(image: &File) -> Made<Disk> {
    disk_with(image, RawDiskOptions::default())
}

/// The same, that refuses to be written.
pub fn read_only_disk(image: &File) -> Made<Disk> {
    let options = RawDiskOptions {
        read_only: true,
        ..RawDiskOptions::default()
    };
    disk_with(image, options)
}

fn disk_with(image: &File, options: RawDiskOptions) -> Made<Disk> {
    let file = || -> Made<Box<dyn BlockIo>> {
        Ok(Box::new(RawDisk::from_file(image.try_clone()?, options)?))
    };
    Ok(Disk {
        below: file()?,
        image: file()?,
    })
}

/// How a store is reached.
fn past_the_cache() -> RawDiskOptions {
    RawDiskOptions {
        o_direct: true,
        ..RawDiskOptions::default()
    }
}
