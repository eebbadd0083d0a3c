//! `--resident`: a guest with less memory than it believes it has. The request, checked; the pager
//! put beside the owner.

mod changes;
mod config;
mod status;

use assign::reach::Reach;
use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use guest_mem::{Pages, Ticket};
use kvm::control::{Control, End};
use machine::Request as Question;
use sidecore::{Handle, Monitor, Reply, Sidecore, SidecoreBuilder, StallCause, StallReport};
use swap::balloon::SwappedBalloon;
use swap::disk::MappedDisk;
use swap::pager::{self, Message, Pager, Report};
use swap::ram::SwappedRam;
use swap::residency::PauseReason;
use uffd::Source;
use vio::balloon::BalloonIo;
use vio::blk::{BlockIo, RawDisk, RawDiskOptions, Transfer};

use super::args::MapperArg;
use super::composed::Functions;
use super::disk::{DiskConfig, Format};
use super::file_watch::follow;
use super::memory::{AskPager, Memory, OwnerHandle, PagerStatus, Paging, Pieces};
use super::stopped;
use crate::composition::Composition;
use crate::lacks;
use crate::messages::say;
use crate::values::size;
use changes::{Changes, follow_size};
pub use config::SwapConfig;
use status::{Names, Status, said};

/// Name of the file from which the store's size is read, in messages.
const STORE_FILE: &str = "--swap: file";
/// Duration that the pager's last requests may take, once no page needs them.
const LAST_REQUESTS: Duration = Duration::from_secs(1);
/// Requests of the pager that are under way at a time, to the store and to each image.
const DEPTH: u32 = 256;

/// Memory of which some is in a store or on disks.
pub struct Swapped {
    config: SwapConfig,
    pieces: Pieces,
    ram: SwappedRam,
    images: Vec<Box<dyn BlockIo>>,
    names: Names,
    composition: Arc<dyn Composition>,
}

impl Swapped {
    /// Creates it of these pieces; `composition` wraps the store and sets up the pager.
    pub fn new(config: SwapConfig, pieces: Pieces, composition: Arc<dyn Composition>) -> Self {
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
            composition,
        }
    }
}

impl<F: Functions> Memory<F> for Swapped {
    type Ram = SwappedRam;

    fn ram(&self) -> SwappedRam {
        self.ram.clone()
    }

    fn disk(&mut self, io: Box<dyn BlockIo>, disk: &DiskConfig) -> Result<Box<dyn BlockIo>> {
        // Where an image keeps a block is the image's to change.
        if self.config.mapper == MapperArg::Off || disk.format != Format::Raw {
            return Ok(io);
        }
        let number = u8::try_from(self.images.len()).context("more disks than can be mapped")?;
        let options = RawDiskOptions {
            read_only: true,
            // As the guest's requests: what they wrote is there.
            o_direct: disk.direct,
            transfer: Transfer::Direct,
            depth: DEPTH,
        };
        let file = disk.file.try_clone().context("a second descriptor")?;
        self.images
            .push(Box::new(RawDisk::from_file(file, options)?));
        self.names.disks.push(disk.path.clone());
        Ok(Box::new(MappedDisk::new(io, self.ram.clone(), number)))
    }

    /// Returns the balloon's handler. The pager asks the owner before it takes a page away.
    fn balloon(&self, _: &Reach) -> Result<Box<dyn BalloonIo>> {
        Ok(Box::new(SwappedBalloon::new(self.ram.clone())))
    }

    fn start(self, owner: OwnerHandle<F, SwappedRam>) -> Result<Option<Box<dyn Paging>>> {
        Ok(Some(Box::new(Swapper {
            names: self.names.clone(),
            handle: Arc::default(),
            running: None,
            waiting: Some((self, owner)),
        })))
    }
}

/// The pager, before and while it runs.
struct Swapper<F> {
    waiting: Option<(Swapped, OwnerHandle<F, SwappedRam>)>,
    running: Option<Running>,
    names: Names,
    handle: Arc<OnceLock<Handle<Message>>>,
}

/// The pager's core, and its monitor.
struct Running {
    core: Sidecore<Pager>,
    _monitor: Monitor,
}

impl<F: Functions> Paging for Swapper<F> {
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
            composition,
        } = swapped;
        let slots = config.store.slots() as usize;
        let growth = config.store.growth().context("--swap")?;
        let options = RawDiskOptions {
            read_only: false,
            o_direct: true,
            transfer: Transfer::Direct,
            depth: DEPTH,
        };
        let store = RawDisk::from_file(config.store.into_file(), options)
            .with_context(|| format!("--swap path={}", config.path.display()))?;
        lacks::say_how_served(&store);
        let store = composition.store(Box::new(store), &pieces.ram);
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
        let handle = MachineHandle {
            owner,
            pager: self.handle.clone(),
            vcpus: config.preventer.map_or(0, |(vcpus, _)| vcpus),
            control: control.clone(),
            names,
            status: status.clone(),
        };
        let mut pager = Pager::new(parts, Box::new(handle)).context("--resident")?;
        pager.set_policy(composition.io_policy());
        if config.discards {
            pager.trims_slots();
        }
        let core = SidecoreBuilder::new("pager")
            .idle(config.idle.policy())
            .shares_cpu(true)
            .spawn(vec![pager])
            .context("starting the pager")?;
        let monitor = monitor(&core, control)?;
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
        self.running = Some(Running {
            core,
            _monitor: monitor,
        });
        Ok(())
    }

    fn end(&self) {
        if let Some(handle) = self.handle.get() {
            // One that has ended holds no page.
            let _ = handle.send(Message::LetGo);
        }
    }

    fn reporter(&self) -> Option<AskPager> {
        let (handle, names) = (self.handle.clone(), self.names.clone());
        Some(Box::new(move || {
            let report = handle.get()?.call(Message::Report).ok()?;
            let pause_reason = report.last_pause.map(|reason| names.say(reason));
            Some(PagerStatus {
                report,
                pause_reason,
            })
        }))
    }

    fn stop(self: Box<Self>) -> String {
        let Some(Running { core, .. }) = self.running else {
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

/// Starts the pager's monitor. A pager that panics ends the machine, whose vCPUs may wait for it.
/// One that is slow does not: the kernel may have it wait, and so the guest.
fn monitor(core: &Sidecore<Pager>, control: Arc<Control>) -> Result<Monitor> {
    let monitor = Monitor::spawn(Monitor::LIMIT, move |stuck: &StallReport| {
        if stuck.cause == StallCause::Panicked {
            control.end(End::Watchdog(format!("{stuck:?}")));
        }
    })
    .context("starting the pager's monitor")?;
    monitor.watch(core.watch());
    Ok(monitor)
}

/// The machine as the pager reaches it.
struct MachineHandle<F> {
    owner: OwnerHandle<F, SwappedRam>,
    pager: Arc<OnceLock<Handle<Message>>>,
    vcpus: usize,
    control: Arc<Control>,
    names: Names,
    status: Arc<Status>,
}

impl<F: Functions> pager::Machine for MachineHandle<F> {
    fn evict(&self, pages: Pages) {
        // The answer comes by way of the memory. An owner that has ended releases nothing.
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

    fn pause(&self, reason: PauseReason, report: &Report) {
        let why = self.names.say(reason);
        say!("paused: {why}\n  swap: {}", self.status.stands(report));
        // A vCPU that waits for a fault does not run either.
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
