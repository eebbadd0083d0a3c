//! `--resident`: a guest with less memory than it believes it has. The request, checked; the pager put beside the owner.

use std::io;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use guest_mem::{PAGE_SIZE, Pages, Ticket};
use kvm::control::{Control, End};
use machine::Request as Question;
use sidecore::{Handle, Reply, Sidecore, SidecoreBuilder};
use swap::balloon::SwappedBalloon;
use swap::book::{Errno, Place, Trouble};
use swap::disk::MappedDisk;
use swap::pager::{self, Message, Pager, Report};
use swap::ram::SwappedRam;
use swap::store::{Growth, Store};
use uffd::Source;
use vio::balloon::BalloonIo;
use vio::blk::{BlockIo, Transfer, UringFile, UringOptions};
use vio_faults::{FaultyStore, StoreFault};

use super::args::{DmaArg, IdleArg, MapperArg, PreventerArg, RunArgs};
use super::config::Disk;
use super::disk::DiskConfig;
use super::followed::follow;
use super::memory::{AskPager, Memory, OwnerHandle, Paging, Pieces, Standing};
use super::stopped;
use crate::messages::say;
use crate::resident::Host;
use crate::values::keys::Keys;
use crate::values::size;

/// What every guest needs: its kernel, and what runs at a time.
const LEAST: u64 = 16 << 20;
/// Of each disk: its largest request, and its rings with what their descriptors point to.
const LEAST_OF_A_DISK: u64 = (4 << 20) + (1 << 20);
/// How long the pager's last requests may take, once nobody needs them.
const LAST_REQUESTS: Duration = Duration::from_secs(1);
/// How the store's size is read from a file, in messages.
const STORE_FILE: &str = "--swap: file";
/// Requests of the pager that are under way at a time, to the store and to each image.
const DEPTH: u32 = 256;

/// A checked request.
#[derive(Debug)]
pub struct SwapConfig {
    /// Bytes that may be in memory.
    limit: Limit,
    store: Store,
    path: PathBuf,
    /// Where a larger size of the store is read from.
    store_file: Option<PathBuf>,
    /// What is behind slots that nobody needs any more is given back.
    discards: bool,
    /// What the store does wrong, for tests.
    fault: Option<StoreFault>,
    /// Whether disks' blocks may stand for pages.
    mapper: MapperArg,
    /// Stores that overwrite a page are looked for: in so many vCPUs, for so long.
    preventer: Option<(usize, Duration)>,
    /// What they overwrite is read all the same, and counted.
    reads_overwritten: bool,
    /// Where a new limit is read from.
    file: Option<PathBuf>,
    idle: IdleArg,
    /// What its user should know of the host.
    warning: Option<String>,
}

impl SwapConfig {
    /// Checks what `--resident` and its companions ask for, of a machine with these disks.
    ///
    /// # Errors
    /// What does not go together, or is too small, or cannot be opened; what the host lacks.
    pub fn check(args: &RunArgs, memory: u64, disks: &[Disk]) -> Result<Option<Self>> {
        let Some(resident) = &args.resident else {
            for (is_given, option) in [
                (args.swap.is_some(), "--swap"),
                (args.resident_file.is_some(), "--resident-file"),
            ] {
                if is_given {
                    bail!(
                        "{option} goes with --resident: say how much of --memory may be in memory"
                    );
                }
            }
            return Ok(None);
        };
        let Some(swap) = &args.swap else {
            bail!("--resident {resident} needs a place for the rest: --swap path=FILE,size=SIZE");
        };
        if args.dma == DmaArg::Bounce {
            bail!("--resident does not go with --dma bounce: disks read straight into pages");
        }
        if args.punch {
            bail!("--resident does not go with --punch: a page has one pager");
        }
        if let Some(Disk::Remote(disk)) = disks.iter().find(|d| matches!(d, Disk::Remote(_))) {
            bail!(
                "--disk socket={}: whoever serves it reaches guest memory past the pager, so it does not go with --resident",
                disk.socket.display()
            );
        }
        let limit = size::bytes(resident).context("--resident")?;
        let limit = Limit::check(limit, memory, disks.len()).context("--resident")?;
        let mut keys = Keys::parse("--swap", swap)?;
        let path = match keys.take("path") {
            Some(path) if !path.is_empty() => PathBuf::from(path),
            _ => bail!("--swap {swap:?} names no file: write path=FILE,size=SIZE"),
        };
        let bytes = match keys.take("size") {
            Some(text) => size::bytes(text).context("--swap: size")?,
            None => memory,
        };
        let store_file = match keys.take("file") {
            Some("") => {
                bail!("{STORE_FILE} is empty: name the file that a larger size is read from")
            }
            file => file.map(PathBuf::from),
        };
        let discards = keys.take_optional_switch("discard")?;
        let fault = keys.take("misbehave").map(fault).transpose()?;
        keys.finish()?;
        // Before there is a store.
        let host = Host::probe();
        if let Some(why) = host.refusal() {
            bail!("--resident: {why}");
        }
        let store = Store::open(&path, bytes).context("--swap")?;
        Ok(Some(Self {
            limit,
            // A file's blocks were allocated so that a write finds room.
            discards: discards.unwrap_or(store.is_device()),
            store,
            path,
            store_file,
            fault,
            mapper: args.mapper,
            preventer: (args.preventer != PreventerArg::Off)
                .then(|| (args.cpus, Duration::from_micros(args.preventer_limit))),
            reads_overwritten: args.preventer == PreventerArg::Count,
            file: args.resident_file.clone(),
            idle: args.idle,
            warning: host.warning(),
        }))
    }

    /// Says what may make it slower than it has to be.
    pub fn warn(&self) {
        if let Some(warning) = &self.warning {
            say!("warning: {warning}");
        }
    }
}

/// A store's deliberate fault.
fn fault(text: &str) -> Result<StoreFault> {
    let nth = |nth: &str| nth.parse::<NonZeroU64>().ok();
    let fault = text.split_once('@').and_then(|(kind, at)| match kind {
        "eio" => nth(at).map(StoreFault::Eio),
        "enospc" => nth(at).map(StoreFault::Enospc),
        "corrupt" => nth(at).map(StoreFault::Corrupt),
        _ => None,
    });
    fault.with_context(|| {
        format!("--swap: misbehave is eio@N, enospc@N or corrupt@N, N at least 1, not {text:?}")
    })
}

/// How much may be in memory.
#[derive(Clone, Copy, Debug)]
struct Limit {
    bytes: u64,
    /// What a limit is at least.
    least: u64,
    disks: usize,
}

impl Limit {
    /// Checks `bytes` for a machine with so much memory and so many disks.
    fn check(bytes: u64, memory: u64, disks: usize) -> Result<Self> {
        let least = LEAST + LEAST_OF_A_DISK * disks as u64 + pager::BATCH_BYTES;
        let any = Self {
            bytes: 0,
            least: least.min(memory),
            disks,
        };
        any.changed(bytes)
    }

    /// The same machine's with another number of bytes.
    fn changed(self, bytes: u64) -> Result<Self> {
        if bytes < self.least {
            bail!(
                "{bytes} bytes: a guest with {} disks does not get on with less than {} KiB \
                 (16 MiB, a batch of pages, and 5 MiB for each disk's largest request and rings)",
                self.disks,
                self.least.div_ceil(1024)
            );
        }
        Ok(Self { bytes, ..self })
    }

    fn pages(self) -> usize {
        // Fewer than the machine has memory.
        (self.bytes / PAGE_SIZE) as usize
    }
}

/// Memory of which some is in a store or on disks.
pub struct Swapped {
    config: SwapConfig,
    pieces: Pieces,
    ram: SwappedRam,
    images: Vec<Box<dyn BlockIo>>,
    names: Names,
}

impl Swapped {
    /// Of these pieces.
    pub fn new(config: SwapConfig, pieces: Pieces) -> Self {
        Self {
            ram: SwappedRam::new(pieces.ram.clone()),
            names: Names {
                store: config.path.clone(),
                limit: config.file.clone(),
                size: config.store_file.clone(),
                disks: Vec::new(),
            },
            config,
            pieces,
            images: Vec::new(),
        }
    }
}

impl Memory for Swapped {
    type Ram = SwappedRam;

    fn ram(&self) -> SwappedRam {
        self.ram.clone()
    }

    fn disk(&mut self, io: Box<dyn BlockIo>, disk: &DiskConfig) -> Result<Box<dyn BlockIo>> {
        if self.config.mapper == MapperArg::Off {
            return Ok(io);
        }
        let number = u8::try_from(self.images.len()).context("more disks than can be mapped")?;
        let options = UringOptions {
            read_only: true,
            // As the guest's requests: what they wrote is there.
            o_direct: disk.direct,
            transfer: Transfer::Direct,
            depth: DEPTH,
        };
        let file = disk.file.try_clone().context("a second descriptor")?;
        self.images
            .push(Box::new(UringFile::from_file(file, options)?));
        self.names.disks.push(disk.path.clone());
        Ok(Box::new(MappedDisk::new(io, self.ram.clone(), number)))
    }

    fn balloon(&self) -> Result<Box<dyn BalloonIo>> {
        Ok(Box::new(SwappedBalloon::new(self.ram.clone())))
    }

    fn start(self, owner: OwnerHandle<SwappedRam>) -> Result<Option<Box<dyn Paging>>> {
        Ok(Some(Box::new(Swapper {
            names: self.names.clone(),
            handle: Arc::default(),
            running: None,
            waiting: Some((self, owner)),
        })))
    }
}

/// The pager, before and while it runs.
struct Swapper {
    waiting: Option<(Swapped, OwnerHandle<SwappedRam>)>,
    running: Option<Sidecore<Pager>>,
    names: Names,
    handle: Arc<OnceLock<Handle<Message>>>,
}

impl Paging for Swapper {
    fn begin(&mut self) -> Result<()> {
        let Some((swapped, owner)) = self.waiting.take() else {
            return Ok(());
        };
        let Swapped {
            config,
            pieces,
            ram,
            images,
            names,
        } = swapped;
        let slots = config.store.slots() as usize;
        let growth = config.store.growth().context("--swap")?;
        let options = UringOptions {
            read_only: false,
            o_direct: true,
            transfer: Transfer::Direct,
            depth: DEPTH,
        };
        let store = UringFile::from_file(config.store.into_file(), options)
            .with_context(|| format!("--swap path={}", config.path.display()))?;
        let store: Box<dyn BlockIo> = match config.fault {
            None => Box::new(store),
            Some(fault) => Box::new(FaultyStore::new(Box::new(store), pieces.ram, fault)),
        };
        let limit = config.limit;
        let parts = pager::Parts {
            ram: ram.clone(),
            slots: pieces.slots,
            faults: Source::Kernel,
            limit: limit.pages(),
            store: (store, slots),
            preventer: config.preventer,
            images,
        };
        let control = pieces.control;
        let status = Arc::new(Status::default());
        let door = Door {
            owner,
            pager: self.handle.clone(),
            vcpus: config.preventer.map_or(0, |(vcpus, _)| vcpus),
            control: control.clone(),
            names,
            status: status.clone(),
        };
        let mut pager = Pager::new(parts, Box::new(door)).context("--resident")?;
        if config.mapper == MapperArg::Stale {
            pager.reads_before_overwrites();
            pager.saves_what_blocks_hold();
        }
        if config.discards {
            pager.trims_slots();
        }
        if config.reads_overwritten {
            pager.reads_what_vcpus_overwrite();
        }
        let core = SidecoreBuilder::new("pager")
            .idle(config.idle.policy())
            .shares_cpu(true)
            .spawn(vec![pager])
            .context("starting the pager")?;
        Pager::connect(&ram, core.handle(0));
        let handle = core.handle(0);
        if let Some(file) = config.file {
            let changes = Changes::new(handle.clone(), status.clone());
            follow("--resident-file", file, move |text| {
                let limit = limit.changed(size::bytes(text)?)?;
                changes.make(Message::SetLimit(limit.pages()))
            })?;
        }
        if let Some(file) = config.store_file {
            follow_size(file, growth, Changes::new(handle.clone(), status))?;
        }
        // Once, as this is.
        let _ = self.handle.set(handle);
        self.running = Some(core);
        Ok(())
    }

    fn end(&self) {
        if let Some(handle) = self.handle.get() {
            // One that has ended holds nobody.
            let _ = handle.send(Message::LetGo);
        }
    }

    fn reporter(&self) -> Option<AskPager> {
        let (handle, names) = (self.handle.clone(), self.names.clone());
        Some(Box::new(move || {
            let report = handle.get()?.call(Message::Report).ok()?;
            let pause_reason = report.last_pause.map(|trouble| names.say(trouble));
            Some(Standing {
                report,
                pause_reason,
            })
        }))
    }

    fn stop(self: Box<Self>) -> String {
        let Some(core) = self.running else {
            return "the pager did not run".into();
        };
        let cpu = core.thread_cpu_time().unwrap_or_default();
        let (tell, ended) = channel();
        // One that has ended has nothing under way that could be waited for.
        if core.handle(0).send(Message::End(tell)).is_ok() {
            let _ = ended.recv_timeout(LAST_REQUESTS);
        }
        let pagers = core.stop();
        let [pager] = pagers.as_slice() else {
            return "the pager has failed".into();
        };
        said(&pager.report(), cpu)
    }
}

/// Has the store grow to the size that stands in `file`, at the start and whenever somebody has written it.
fn follow_size(file: PathBuf, growth: Growth, changes: Changes) -> Result<()> {
    let growth = Mutex::new(growth);
    follow(STORE_FILE, file, move |text| {
        let bytes = size::bytes(text)?;
        // What has failed half way has left it as it was.
        let mut growth = growth.lock().unwrap_or_else(PoisonError::into_inner);
        match growth.grow(bytes)? {
            0 => Ok(()),
            added => changes.make(Message::AddSlots(added as usize)),
        }
    })
}

/// What its user asks of a pager that runs.
struct Changes {
    pager: Handle<Message>,
    status: Arc<Status>,
}

impl Changes {
    fn new(pager: Handle<Message>, status: Arc<Status>) -> Self {
        Self { pager, status }
    }

    /// Tells the pager of a change, and its user what has come of it.
    fn make(&self, change: Message) -> Result<()> {
        let ended = || anyhow!("the pager has ended");
        let look = || self.pager.call(Message::Report).map_err(|_| ended());
        let before = look()?;
        self.pager.send(change).map_err(|_| ended())?;
        if let Some(said) = self.status.changed(&before, &look()?) {
            say!("{said}");
        }
        Ok(())
    }
}

/// How a pager stands, in part of a line on standard error. Said when its user has changed something, and when the guest is paused and
/// goes on.
#[derive(Debug, Default)]
struct Status {
    /// Faults of vCPUs when it was last said. Relaxed: it orders nothing; two that speak at once may share the faults between them.
    faults: AtomicU64,
}

impl Status {
    /// What is in memory and in the store, and what has been wanted since the last time that this was said.
    fn stands(&self, report: &Report) -> String {
        let faults = self.faults.swap(report.faults, Ordering::Relaxed);
        format!(
            "{} of {} MiB in memory, {} of {} MiB of the store used, {} faults since this was last said",
            mib(report.present),
            mib(report.limit),
            mib(report.slots - report.free_slots),
            mib(report.slots),
            report.faults.saturating_sub(faults)
        )
    }

    /// What a change has changed, if anything.
    fn changed(&self, before: &Report, after: &Report) -> Option<String> {
        let limit = ("limit", before.limit, after.limit);
        let store = ("store", before.slots, after.slots);
        let (what, was, is) = [limit, store].into_iter().find(|(_, was, is)| was != is)?;
        let stands = self.stands(after);
        let (is, was) = (mib(is), mib(was));
        Some(format!("swap: {what} {is} MiB now (was {was}): {stands}"))
    }
}

/// Whole MiB of so many pages.
fn mib(pages: usize) -> u64 {
    (pages as u64 * PAGE_SIZE) >> 20
}

/// What it has done, in a few lines.
fn said(report: &Report, cpu: Duration) -> String {
    let Report {
        limit,
        present,
        slots: _,
        tracked: _,
        free_slots: _,
        counts,
        traffic,
        faults,
        prevented,
        undecided,
        false_reads,
        tickets,
        pauses,
        last_pause: _,
        is_paused: _,
    } = report;
    format!(
        "swap: {present} of {limit} pages in memory; {faults} faults of vCPUs, {tickets} waits of devices, \
         {pauses} pauses; pager's CPU {} ms\n  \
         left memory: {} unwritten to a disk that holds the same, {} as zeroes, {} written ({} requests), {} given up by the guest\n  \
         came back: {} from disks ({} requests), {} from the store ({} requests), {} rescued, {} not read since overwritten, \
         {} read before their block changed\n  \
         {prevented} not read since a vCPU was about to overwrite them, {undecided} looked at in vain, {false_reads} read all the same; \
         {} written although a disk held the same; {} pages of the store discarded ({} requests)",
        cpu.as_millis(),
        counts.dropped_to_disk,
        counts.dropped_as_zeroes,
        counts.saved,
        traffic.store_writes.requests,
        counts.discarded,
        counts.fetched_from_disk,
        traffic.image_reads.requests,
        counts.fetched_from_store,
        traffic.store_reads.requests,
        counts.rescued,
        counts.not_fetched,
        counts.fetched_before_a_write,
        counts.silent_writes,
        traffic.store_trims.pages,
        traffic.store_trims.requests,
    )
}

/// What a machine's pages are in, as its user knows it.
#[derive(Clone, Debug)]
struct Names {
    store: PathBuf,
    /// Where a new limit is read from.
    limit: Option<PathBuf>,
    /// Where a larger size of the store is read from.
    size: Option<PathBuf>,
    /// By their numbers.
    disks: Vec<PathBuf>,
}

impl Names {
    /// Why the machine is paused, and what to do.
    fn say(&self, trouble: Trouble) -> String {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.0);
        let store = self.store.display();
        match trouble {
            Trouble::StoreFull => format!("the swap store {store} is full: {}", self.remedy()),
            Trouble::CannotSave(slot, errno) => format!(
                "slot {} of the swap store {store} cannot be written: {}; {RETRIED}",
                slot.0,
                error(errno)
            ),
            Trouble::CannotFetch(place, errno) => {
                let place = self.place(place);
                format!("{place} cannot be read: {}; {RETRIED}", error(errno))
            }
            Trouble::Changed(place) => format!(
                "{} does not hold what was there: somebody else has written to it, or its storage lies; {RETRIED}",
                self.place(place)
            ),
        }
    }

    fn place(&self, place: Place) -> String {
        match place {
            Place::Nowhere => "a page of zeroes".into(),
            Place::Slot(slot) => {
                format!("slot {} of the swap store {}", slot.0, self.store.display())
            }
            Place::Block(block) => match self.disks.get(usize::from(block.disk)) {
                Some(disk) => format!("block {} of disk {}", block.number, disk.display()),
                None => format!("block {} of disk {}", block.number, block.disk),
            },
        }
    }

    fn remedy(&self) -> String {
        let write = |what: &str, file: &Option<PathBuf>| {
            let file = file.as_ref()?;
            Some(format!("write {what} into {}", file.display()))
        };
        let ways = [
            write("a higher limit", &self.limit),
            write("a larger size", &self.size),
        ];
        let ways: Vec<String> = ways.into_iter().flatten().collect();
        match ways.is_empty() {
            true => "start it with --resident-file, or with file= in --swap, to raise its limit or enlarge its store while \
                     it runs"
                .into(),
            false => ways.join(", or "),
        }
    }
}

/// What becomes of what has failed.
const RETRIED: &str = "see to its storage: it is tried again each second";

/// The machine as the pager reaches it.
struct Door {
    owner: OwnerHandle<SwappedRam>,
    pager: Arc<OnceLock<Handle<Message>>>,
    vcpus: usize,
    control: Arc<Control>,
    names: Names,
    status: Arc<Status>,
}

impl pager::Machine for Door {
    fn evict(&self, pages: Pages) {
        // The answer comes by way of the memory. An owner that has ended lets go of nothing.
        let (reply, _) = Reply::pair();
        let pages = Box::new(pages);
        let _ = self.owner.send(Question::Evict { pages, reply });
    }

    fn ticket_done(&self, ticket: Ticket) {
        let _ = self.owner.send(Question::TicketDone(ticket, Ok(())));
    }

    fn wake(&self) {
        self.owner.wake();
    }

    fn stop_vcpus(&self) {
        if let Some(pager) = self.pager.get() {
            self.control.visit(self.vcpus, |_| {
                let pager = pager.clone();
                Box::new(move |vcpu, is_complete| stopped::tell(vcpu, is_complete, &pager))
            });
        }
    }

    fn pause(&self, trouble: Trouble, report: &Report) {
        let why = self.names.say(trouble);
        say!("paused: {why}\n  swap: {}", self.status.stands(report));
        // Who waits for a fault does not run either.
        self.control.pause(Duration::ZERO);
    }

    fn resume(&self, report: &Report) {
        say!("goes on: {}", self.status.stands(report));
        self.control.resume();
    }

    fn fail(&self, error: &io::Error) {
        let what = format!("a page of guest memory cannot be moved: {error}");
        self.control.end(End::Host(what));
    }
}

#[cfg(test)]
mod tests {
    use swap::book::{Block, Slot};

    use super::*;

    #[test]
    fn a_fault_of_the_store_has_a_kind_and_a_number() {
        let nth = |n| NonZeroU64::new(n).expect("counted from 1");
        for (text, wanted) in [
            ("eio@1", StoreFault::Eio(nth(1))),
            ("enospc@20", StoreFault::Enospc(nth(20))),
            ("corrupt@300", StoreFault::Corrupt(nth(300))),
        ] {
            assert_eq!(fault(text).expect(text), wanted);
        }
    }

    #[test]
    fn a_pause_says_what_failed_why_and_what_to_do() {
        let names = Names {
            store: "/var/swap0".into(),
            limit: Some("/run/limit0".into()),
            size: Some("/run/size0".into()),
            disks: vec!["a.raw".into(), "b.raw".into()],
        };
        let slot = Slot(3);
        let block = Block { disk: 1, number: 7 };
        for (trouble, words) in [
            (
                Trouble::StoreFull,
                ["store /var/swap0 is full", "limit into /run/limit0"],
            ),
            (
                Trouble::CannotSave(slot, Errno(libc::ENOSPC)),
                ["slot 3 of the swap store /var/swap0", "No space left"],
            ),
            (
                Trouble::CannotFetch(Place::Slot(slot), Errno(libc::EIO)),
                ["/var/swap0 cannot be read: Input/output", "tried again"],
            ),
            (
                Trouble::Changed(Place::Block(block)),
                ["block 7 of disk b.raw does not hold", "tried again"],
            ),
        ] {
            let said = names.say(trouble);
            for word in words {
                assert!(said.contains(word), "no {word:?} in: {said}");
            }
        }
    }

    #[test]
    fn a_change_says_how_things_stand_and_the_faults_since_it_last_did() {
        let status = Status::default();
        let before = Report {
            limit: 200 << 8,
            present: 190 << 8,
            slots: 1024 << 8,
            free_slots: 1012 << 8,
            faults: 3000,
            ..Report::default()
        };
        assert_eq!(status.changed(&before, &before), None);
        let lower = Report {
            limit: 100 << 8,
            present: 55 << 8,
            faults: 3211,
            ..before
        };
        assert_eq!(
            status.changed(&before, &lower).expect("another limit"),
            "swap: limit 100 MiB now (was 200): 55 of 100 MiB in memory, 12 of 1024 MiB of the store used, \
             3211 faults since this was last said"
        );
        let larger = Report {
            slots: 2048 << 8,
            free_slots: 2036 << 8,
            faults: 3215,
            ..lower
        };
        let said = status.changed(&lower, &larger).expect("another size");
        assert!(
            said.starts_with("swap: store 2048 MiB now (was 1024): "),
            "{said}"
        );
        assert!(
            said.ends_with("12 of 2048 MiB of the store used, 4 faults since this was last said"),
            "{said}"
        );
    }

    #[test]
    fn a_full_store_names_the_ways_that_there_are() {
        let names = |limit: Option<&str>, size: Option<&str>| Names {
            store: "/var/swap0".into(),
            limit: limit.map(PathBuf::from),
            size: size.map(PathBuf::from),
            disks: Vec::new(),
        };
        let both = names(Some("/run/limit0"), Some("/run/size0")).say(Trouble::StoreFull);
        let wanted =
            "write a higher limit into /run/limit0, or write a larger size into /run/size0";
        assert!(both.ends_with(wanted), "{both}");
        let one = names(None, Some("/run/size0")).say(Trouble::StoreFull);
        assert!(
            one.ends_with("full: write a larger size into /run/size0"),
            "{one}"
        );
        let none = names(None, None).say(Trouble::StoreFull);
        assert!(
            none.contains("--resident-file, or with file= in --swap"),
            "{none}"
        );
    }

    #[test]
    fn a_changed_limit_keeps_to_the_machines_least() {
        let limit = Limit::check(64 << 20, 256 << 20, 2).expect("enough");
        assert_eq!(limit.pages(), 16384);
        let least = (16 + 2 * 5) * (1 << 20) + pager::BATCH_BYTES;
        assert!(limit.changed(least).is_ok());
        limit.changed(least - 1).expect_err("too little");
        // A machine without that much memory may have all of it.
        assert!(Limit::check(16 << 20, 16 << 20, 2).is_ok());
    }
}
