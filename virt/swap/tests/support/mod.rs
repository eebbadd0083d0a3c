//! A machine without a hypervisor: memory that threads of the test access through a guest's
//! mapping, an owner with disks, a pager, a store.
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
    Activity, AlwaysPoll, ArmError, Handle, IdlePolicy, PollContext, Poller, Sidecore,
    SidecoreBuilder, Wakes,
};
use swap::balloon::SwappedBalloon;
use swap::disk::MappedDisk;
use swap::overwrite::Registers;
use swap::pager::{self, Message, Pager, Report};
use swap::ram::SwappedRam;
use swap::residency::{FaultOrigin, IoPolicy, Page, PauseReason};
use swap::stopped::{Answer, Stopped};
use swap::store::{Growth, Store};
use uffd::Source;
use vio::balloon::{BalloonIo, PageRange};
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece, RawDisk, RawDiskOptions};

const PATIENCE: Duration = Duration::from_secs(60);

/// Policy of a control: a page that a vCPU is about to overwrite is read all the same.
#[derive(Debug)]
struct ReadsWhatVcpusOverwrite;

impl IoPolicy for ReadsWhatVcpusOverwrite {
    fn reads_overwritten(&self, origin: FaultOrigin) -> bool {
        origin == FaultOrigin::Vcpu
    }
}

/// Sizes of a machine, in pages.
pub struct Shape {
    /// Pages of memory.
    pub pages: u32,
    /// Pages that may be in memory.
    pub limit: usize,
}

/// A request of a guest.
pub struct Transfer {
    /// Number of the disk.
    pub disk: usize,
    /// Operation.
    pub op: Op,
    /// Address of its data, if it moves any.
    pub gpa: Option<Gpa>,
    /// Receives whether it succeeded.
    pub done: Sender<bool>,
}

impl Transfer {
    /// Returns its memory.
    fn range(&self) -> Option<(Gpa, u64)> {
        match self.op {
            Op::Read { len, .. } | Op::Write { len, .. } => Some((self.gpa?, len.into())),
            Op::Flush | Op::Discard { .. } | Op::WriteZeroes { .. } => None,
        }
    }
}

/// A disk, opened twice.
pub struct Disk {
    /// For the guest's requests.
    pub below: Box<dyn BlockIo>,
    /// For the pager to read.
    pub image: Box<dyn BlockIo>,
}

/// Store and disks of a machine.
pub struct Files {
    /// Store of the pager.
    pub store: Box<dyn BlockIo>,
    /// Number of slots of the store.
    pub slots: usize,
    /// Free slots are trimmed.
    pub trims: bool,
    /// Disks by their numbers.
    pub disks: Vec<Disk>,
}

/// Result of a setup, or the reason why a test cannot run.
pub type Made<T> = Result<T, Box<dyn Error>>;

/// Message to the owner.
pub enum Request {
    /// A guest's request of a disk.
    Transfer(Transfer),
    /// A page that the guest discards; the sender is notified when the guest may use it again.
    GiveUp(Page, Sender<()>),
    /// Pages that the pager asks for.
    Evict(Box<Pages>),
    /// A ticket of the pager's that is done.
    TicketDone(Ticket),
}

/// The owner: disks whose requests it takes from messages.
struct Owner {
    ram: SwappedRam,
    disks: Vec<MappedDisk>,
    balloon: SwappedBalloon,
    /// Pages whose discard has not been answered.
    given: HashMap<Ticket, (Page, Sender<()>)>,
    /// Requests that have not begun, since a page was absent when they were last tried.
    parked: HashMap<Ticket, Transfer>,
    /// Requests under way, by disk and slot.
    begun: HashMap<(usize, u32), Transfer>,
    done: Vec<Completion>,
}

/// Most requests of a disk under way.
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
            // If the guest has failed meanwhile the receiver is gone.
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
                // If the guest has failed meanwhile the receiver is gone.
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

    fn poll(&mut self, _: &mut PollContext<'_>) -> Activity {
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

    fn message(&mut self, request: Request, _: &mut PollContext<'_>) {
        match request {
            Request::Transfer(transfer) => self.begin(transfer),
            Request::Evict(pages) => self.evict(&pages),
            Request::GiveUp(page, done) if self.given.is_empty() => self.give_up(page, done),
            // A driver has one discard at a time in a queue.
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

/// Registers of a vCPU in a Linux kernel in 64-bit mode with 4-level paging, at an instruction; the
/// test sets its address and operands.
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

/// Simulated vCPU.
pub struct Vcpu {
    /// A page that it is about to overwrite is read all the same.
    pub is_only_counted: bool,
    /// Way in which it reports its registers.
    pub stops: Stops,
}

/// Way in which a vCPU reports its registers, when it is to stop.
pub enum Stops {
    /// It has always these registers, and reports them at once; the answers are sent to the test.
    AtOnce(Registers, Sender<Answer>),
    /// The test is notified, and reports the registers at a time of its choice
    /// ([`Message::Stopped`]).
    ByTest(Sender<()>),
}

/// Location of a page, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// Mapped for the guest.
    Mapped,
    /// In memory, and not mapped: unmapped but resident, or on its way in or out.
    Unmapped,
    /// Not in memory.
    Absent,
}

/// The pager's view of the machine, and the receivers of its reports.
struct MachineHandle {
    owner: Handle<Request>,
    reasons: Arc<Mutex<Sender<Option<PauseReason>>>>,
    vcpu: Option<Vcpu>,
    pager: Arc<OnceLock<Handle<Message>>>,
}

impl MachineHandle {
    fn tell(&self, reason: Option<PauseReason>) {
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        // The test may not receive it.
        let _ = reasons.send(reason);
    }
}

impl pager::Machine for MachineHandle {
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
        // The test may have dropped its receiver.
        match &vcpu.stops {
            Stops::AtOnce(registers, stops) => {
                let (stopped, answer) = Stopped::new(*registers);
                let _ = pager.send(Message::Stopped(stopped));
                let _ = stops.send(answer);
            }
            Stops::ByTest(stops) => drop(stops.send(())),
        }
    }

    fn pause(&self, reason: PauseReason, _: &Report) {
        self.tell(Some(reason));
    }

    fn resume(&self, _: &Report) {
        self.tell(None);
    }

    fn fail(&self, error: &io::Error) {
        panic!("{error}");
    }
}

/// A machine: owner, pager and memory.
pub struct Machine {
    ram: GuestRam,
    mapping: Arc<SlotMapping>,
    pagemap: File,
    owner: Sidecore<Owner>,
    pager: Sidecore<Pager>,
    reasons: Mutex<Receiver<Option<PauseReason>>>,
}

impl Machine {
    /// Starts a machine with the files that are made for its memory.
    pub fn over(shape: &Shape, files: impl FnOnce(&GuestRam) -> Made<Files>) -> Made<Self> {
        Self::with_vcpu(shape, files, None)
    }

    /// Starts a machine with a vCPU for a Preventer.
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
        // A machine's default policy.
        let spawn = |name: &str| {
            let core = SidecoreBuilder::new(name).idle(IdlePolicy::adaptive());
            core.shares_cpu(true)
        };
        let owner = spawn("owner").spawn(vec![owner])?;
        let (tell, reasons) = channel();
        let is_looked_at = vcpu.is_some();
        let is_only_counted = vcpu.as_ref().is_some_and(|vcpu| vcpu.is_only_counted);
        let own_handle = Arc::new(OnceLock::new());
        let machine = MachineHandle {
            owner: owner.handle(0),
            reasons: Arc::new(Mutex::new(tell)),
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
        let mut pager = Pager::new(parts, Box::new(machine))?;
        if files.trims {
            pager.trims_slots();
        }
        if is_only_counted {
            pager.set_policy(Box::new(ReadsWhatVcpusOverwrite));
        }
        let pager = spawn("pager").spawn(vec![pager])?;
        // Set once: this runs once.
        let _ = own_handle.set(pager.handle(0));
        Pager::connect(&ram, pager.handle(0));
        Ok(Self {
            ram: memory,
            mapping,
            pagemap: File::open("/proc/self/pagemap")?,
            owner,
            pager,
            reasons: Mutex::new(reasons),
        })
    }

    /// Returns the guest's mapping.
    pub fn mapping(&self) -> &Arc<SlotMapping> {
        &self.mapping
    }

    /// Returns the sidecore of the pager.
    pub fn pager(&self) -> &Sidecore<Pager> {
        &self.pager
    }

    /// Returns a handle for the guest's requests.
    pub fn requests(&self) -> Handle<Request> {
        self.owner.handle(0)
    }

    /// Waits until the guest is paused, and returns the reason; or until it is resumed: `None`.
    pub fn wait_for_pause(&self) -> Option<PauseReason> {
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        reasons.recv_timeout(PATIENCE).expect("it is told")
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

    /// Returns the location of a page.
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

    /// Makes a request of the first disk, from or to memory from this page on, and waits; returns
    /// whether it succeeded.
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

    /// Discards a page for the guest; `done` is notified when the guest may use it again. It is
    /// notified at once if another discard is pending.
    pub fn give_up(&self, page: Page, done: Sender<()>) {
        let sent = self.owner.handle(0).send(Request::GiveUp(page, done));
        assert!(sent.is_ok(), "the owner lives");
    }

    /// Sends a message to the pager.
    pub fn tell(&self, message: Message) {
        assert!(self.pager.handle(0).send(message).is_ok(), "it lives");
    }

    /// Makes every page leave memory; then sets the limit to `limit`.
    pub fn empty(&self, limit: usize) {
        self.tell(Message::SetLimit(0));
        let deadline = Instant::now() + PATIENCE;
        while self.report().present > 0 {
            assert!(Instant::now() < deadline, "{:?}", self.report());
            thread::sleep(Duration::from_millis(1));
        }
        self.tell(Message::SetLimit(limit));
    }

    /// Returns the pager's state.
    pub fn report(&self) -> Report {
        self.pager
            .handle(0)
            .call(Message::Report)
            .expect("it lives")
    }

    /// Stops owner and pager when nothing is under way any more; returns the pager's state.
    pub fn stop(self) -> Report {
        let Self { owner, pager, .. } = self;
        drop(owner.stop());
        let (tell, ended) = channel();
        let sent = pager.handle(0).send(Message::End(tell));
        assert!(sent.is_ok(), "it lives");
        // Otherwise files are closed on this thread, which does not see the end of another thread's
        // requests and waits two seconds for them.
        let outcome = ended.recv_timeout(PATIENCE);
        outcome.expect("all that is under way ends");
        pager.stop()[0].report()
    }

    /// Stops owner and pager while requests are under way that will not end.
    pub fn cut_off(self) -> Report {
        drop(self.owner.stop());
        self.pager.stop()[0].report()
    }
}

/// Creates a store in a file without a name.
pub fn store(slots: u32) -> Made<Box<dyn BlockIo>> {
    Ok(store_that_grows(slots)?.0)
}

/// Creates a store, a handle that enlarges it, and its file, for checks.
pub fn store_that_grows(slots: u32) -> Made<(Box<dyn BlockIo>, Growth, File)> {
    let dir = tempfile::tempdir()?;
    let store = Store::open(&dir.path().join("swap"), u64::from(slots) * PAGE_SIZE)?;
    let growth = store.growth()?;
    let file = store.into_file();
    let store = RawDisk::from_file(file.try_clone()?, past_the_cache())?;
    Ok((Box::new(store), growth, file))
}

/// Creates a disk with this image.
pub fn disk(image: &File) -> Made<Disk> {
    disk_with(image, RawDiskOptions::default())
}

/// Creates a disk that refuses writes.
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

/// Returns the options for the store's file.
fn past_the_cache() -> RawDiskOptions {
    RawDiskOptions {
        o_direct: true,
        ..RawDiskOptions::default()
    }
}
