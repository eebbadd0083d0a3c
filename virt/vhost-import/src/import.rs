//! The owner's handle of a device that a back end serves.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use guest_mem::GuestRam;
use vhost_user::frontend::Connection;
use vhost_user::wire::IotlbRange;
use vio::{ActivateError, QueueConfig, RemoteDevice, RemoteMemory, Revoked, feature};

use crate::class::{self, Class};
use crate::config::{ImportConfig, KernelConfig};
use crate::error::ImportError;
use crate::follow::Follower;
use crate::handshake::{self, RingFds, ring};
use crate::kernel::{self, KernelBackEnd, KernelLink};
use crate::link::Link;
use crate::memory::{Memory, RingPlace};
use crate::shared::{Activation, LinkCommand, Shared};

/// Longest wait for the end of the link thread. Its requests are cancelled, so it waits for nothing
/// but the kernel. There the close of a descriptor that the back end has sent may take as long as
/// the back end wants (a file of a FUSE file system, a lingering socket).
const END_LIMIT: Duration = Duration::from_secs(1);

/// Properties of the device, independent of the kind of back end.
struct Outline {
    /// Its name in the log.
    name: String,
    device_type: u16,
    features: u64,
    queue_sizes: Vec<u16>,
    /// Of a network device; else 1.
    pairs: u16,
    /// Configuration space.
    config: Vec<u8>,
    /// Of a device behind an IOMMU.
    follower: Option<Follower>,
}

/// A device that another process serves, or the host's kernel. See the crate's head.
pub struct Import {
    shared: Arc<Shared>,
    /// Taken when joined.
    thread: Option<JoinHandle<()>>,
    /// Closed by the thread when it ends.
    ended: Receiver<()>,
    memory: Memory,
    outline: Outline,
    kick: Vec<OwnedFd>,
    call: Vec<OwnedFd>,
    /// Which start of the driver's is, or will be, the present one.
    generation: u64,
    /// The stop that was asked for.
    stop: Option<u64>,
    /// That stop was abandoned.
    is_overdue: bool,
    /// The driver has been notified that the device is broken.
    is_told: bool,
    /// The driver has been notified that the network is gone.
    is_link_down: bool,
    /// The back end has not forgotten revoked mappings in time.
    is_cut_off: bool,
}

impl fmt::Debug for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Import")
            .field("features", &format_args!("{:#x}", self.outline.features))
            .field("queue_sizes", &self.outline.queue_sizes)
            .field("generation", &self.generation)
            .field("stop", &self.stop)
            .finish_non_exhaustive()
    }
}

impl Import {
    /// Connects, negotiates, shares `ram`, and starts the thread that keeps the connection. `kick`
    /// and `call` are eventfds, one for each queue: the guest's doorbell signals the first, and the
    /// second interrupts the guest. Blocks for at most `patience`, and `reply_limit` for each of
    /// about a dozen requests.
    ///
    /// # Errors
    /// No process listens, or the back end lacks something; see [`ImportError`].
    ///
    /// # Panics
    /// If the number of descriptors is not that of the queues, or the numbers of `config` are
    /// outside their ranges.
    pub fn connect(
        config: ImportConfig,
        ram: GuestRam,
        kick: Vec<OwnedFd>,
        call: Vec<OwnedFd>,
    ) -> Result<Self, ImportError> {
        let queues = config.queues;
        check_arguments(&config.class, queues, config.queue_size, &kick, &call);
        let shared = Arc::new(Shared::new().map_err(ImportError::Host)?);
        let memory = Memory::shared(ram).map_err(ImportError::Host)?;
        let cancel = Some(shared.cancel.clone());
        let limit = config.reply_limit;
        let opened = Connection::open_within(config.patience, &config.path, cancel, limit);
        let mut connection = opened.map_err(|source| ImportError::Connect {
            path: config.path.clone(),
            source,
        })?;
        let (offer, channel) = handshake::negotiate(&mut connection, &memory, &config)?;
        let outline = Outline {
            name: config.name.clone(),
            device_type: config.class.device_type(),
            features: offer.features,
            queue_sizes: vec![config.queue_size; usize::from(config.class.device_queues(queues))],
            pairs: match config.class {
                Class::Block => 1,
                Class::Net(_) => queues / 2,
            },
            config: offer.config.clone(),
            follower: config.has_iommu.then(|| Follower::new(memory.clone())),
        };
        let fds = RingFds::new(kick, call).map_err(ImportError::Host)?;
        let own = fds.own().map_err(ImportError::Host)?;
        let connected = (connection, offer, channel);
        let link = Link::new(config, shared.clone(), memory.clone(), fds, connected);
        Self::with_link(outline, shared, memory, own, move || link.run())
    }

    /// Has the kernel's `back_end` serve `config`'s device in `ram`, which is the memory that it
    /// was given, and starts the thread that talks to it. `kick` and `call` as of
    /// [`connect`](Self::connect).
    ///
    /// # Errors
    /// The back end lacks something, or the host refuses a descriptor or the thread.
    ///
    /// # Panics
    /// As [`connect`](Self::connect).
    pub fn attach(
        config: KernelConfig,
        back_end: impl KernelBackEnd + 'static,
        ram: GuestRam,
        kick: Vec<OwnedFd>,
        call: Vec<OwnedFd>,
    ) -> Result<Self, ImportError> {
        /// One pair.
        const QUEUES: u16 = 2;
        let class = Class::Net(config.identity);
        check_arguments(&class, QUEUES, config.queue_size, &kick, &call);
        let shared = Arc::new(Shared::new().map_err(ImportError::Host)?);
        let memory = Memory::new(ram);
        let offer = kernel::Offer::of(&back_end, &class, config.has_iommu)?;
        let outline = Outline {
            name: config.name.clone(),
            device_type: class.device_type(),
            features: offer.features,
            queue_sizes: vec![config.queue_size; usize::from(QUEUES)],
            pairs: QUEUES / 2,
            config: config.identity.config(QUEUES / 2),
            follower: config.has_iommu.then(|| Follower::new(memory.clone())),
        };
        let fds = RingFds::new(kick, call).map_err(ImportError::Host)?;
        let own = fds.own().map_err(ImportError::Host)?;
        let link = KernelLink::new(config.name, back_end, offer, shared.clone(), fds);
        Self::with_link(outline, shared, memory, own, move || link.run())
    }

    /// Starts the thread that talks to the back end.
    fn with_link(
        outline: Outline,
        shared: Arc<Shared>,
        memory: Memory,
        (kick, call): (Vec<OwnedFd>, Vec<OwnedFd>),
        link: impl FnOnce() + Send + 'static,
    ) -> Result<Self, ImportError> {
        let thread_name = format!("link-{}", outline.name);
        let (ending, ended) = mpsc::channel();
        let run = move || {
            link();
            drop(ending);
        };
        let thread = std::thread::Builder::new()
            .name(thread_name)
            .spawn(run)
            .map_err(ImportError::Host)?;
        Ok(Self {
            shared,
            thread: Some(thread),
            ended,
            memory,
            outline,
            kick,
            call,
            generation: 1,
            stop: None,
            is_overdue: false,
            is_told: false,
            is_link_down: false,
            is_cut_off: false,
        })
    }

    fn is_stopped(&self, number: u64) -> bool {
        self.is_overdue || self.is_cut_off || self.shared.is_done(number)
    }
}

/// # Panics
/// If the number of descriptors is not that of the queues, or a number is outside its range.
fn check_arguments(
    class: &Class,
    queues: u16,
    queue_size: u16,
    kick: &[OwnedFd],
    call: &[OwnedFd],
) {
    assert!(class.has_queues(queues), "as many queues as its class has");
    assert!(queue_size.is_power_of_two(), "queues of a power of two");
    let wanted = usize::from(class.device_queues(queues));
    assert!(
        kick.len() == wanted && call.len() == wanted,
        "two descriptors for each queue"
    );
}

impl RemoteDevice for Import {
    fn device_type(&self) -> u16 {
        self.outline.device_type
    }

    fn features(&self) -> u64 {
        self.outline.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.outline.queue_sizes
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        vio::read_space(&self.outline.config, offset, out);
    }

    fn start(&mut self, features: u64, queues: &[QueueConfig]) -> Result<(), ActivateError> {
        let offered = self.outline.features;
        if features & !offered != 0 || features & feature::VERSION_1 == 0 {
            return Err(ActivateError::Features { features, offered });
        }
        let mut rings: Vec<RingPlace> = Vec::with_capacity(queues.len());
        for queue in queues {
            let index = queue.index;
            let Some(&max) = self.outline.queue_sizes.get(usize::from(index)) else {
                return Err(ActivateError::QueueIndex { index });
            };
            if rings.iter().any(|ring| ring.index == index) {
                return Err(ActivateError::QueueIndex { index });
            }
            let size = queue.size;
            if !size.is_power_of_two() || size > max {
                return Err(ActivateError::QueueSize { index, size, max });
            }
            let is_aligned =
                queue.desc.is_aligned(16) && queue.avail.is_aligned(2) && queue.used.is_aligned(4);
            if !is_aligned {
                return Err(ActivateError::QueueAddress { index });
            }
            let place = match self.outline.follower {
                Some(_) => RingPlace::at_iovas(queue),
                None => self.memory.place(queue),
            };
            rings.push(place.ok_or(ActivateError::QueueMemory { index })?);
        }
        self.shared.order(LinkCommand::Start(Activation {
            generation: self.generation,
            features,
            rings,
        }));
        Ok(())
    }

    fn kick(&mut self, queue: u16) {
        if let Some(kick) = self.kick.get(usize::from(queue)) {
            ring(kick);
        }
    }

    fn has_events(&self) -> bool {
        self.shared.has_events()
    }

    fn take_events(&mut self) -> bool {
        self.shared.take_events();
        let has_broken = self.needs_reset() && !std::mem::replace(&mut self.is_told, true);
        let is_down = self.shared.is_link_down();
        let has_changed = is_down != std::mem::replace(&mut self.is_link_down, is_down);
        if has_changed {
            class::set_link(&mut self.outline.config, !is_down);
        }
        has_broken || has_changed
    }

    fn serve(&mut self, memory: &mut dyn RemoteMemory, now_ns: u64) {
        let Some(follower) = &mut self.outline.follower else {
            return;
        };
        let (has_told, has_more) = follower.serve(&self.shared.exchange, memory, now_ns);
        if has_told {
            self.shared.notify_thread();
        }
        if has_more {
            self.shared.remind();
        }
    }

    fn is_waiting(&self) -> bool {
        self.outline
            .follower
            .as_ref()
            .is_some_and(Follower::is_waiting)
    }

    fn keeps_translations(&self) -> bool {
        self.outline.follower.is_some()
    }

    fn invalidated(&mut self, what: Revoked, hold: u64) -> bool {
        let Some(follower) = &mut self.outline.follower else {
            return false;
        };
        if self.is_cut_off {
            return false;
        }
        let is_held = follower.invalidated(&self.shared.exchange, what, hold);
        self.shared.notify_thread();
        is_held
    }

    fn hold_overdue(&mut self, hold: u64) {
        let Some(follower) = &mut self.outline.follower else {
            return;
        };
        if let Some(IotlbRange { first, last }) = follower.held(hold) {
            let mappings = format_args!("{first:#x} to {last:#x}");
            tracing::error!(device = %self.outline.name, %mappings, "the back end has not said in \
                 time that it has forgotten revoked mappings; it is cut off, and the \
                device needs a reset");
        }
        // What it has mapped cannot be taken from it: there is nothing more to wait for.
        follower.drop_holds();
        self.is_cut_off = true;
        self.shared.cut_off();
        self.shared.remind();
    }

    fn take_released(&mut self) -> Option<u64> {
        self.outline
            .follower
            .as_mut()?
            .take_released(&self.shared.exchange)
    }

    fn stop(&mut self) -> bool {
        let number = match self.stop {
            Some(number) => number,
            None => *self.stop.insert(self.shared.order(LinkCommand::Stop)),
        };
        self.is_stopped(number)
    }

    fn resume(&mut self) {
        if self.stop.take().is_some() {
            self.shared.order(LinkCommand::Resume);
        }
    }

    fn reset(&mut self) {
        self.shared.order(LinkCommand::Forget);
        if let Some(follower) = &mut self.outline.follower {
            follower.reset(&self.shared.exchange);
            self.shared.notify_thread();
        }
        self.is_cut_off = false;
        self.generation += 1;
        self.stop = None;
        self.is_overdue = false;
        self.is_told = false;
    }

    fn abandon(&mut self) {
        if let Some(number) = self.stop
            && !self.is_stopped(number)
        {
            self.is_overdue = true;
            self.shared.abandon(number);
            self.shared.remind();
        }
    }

    fn needs_reset(&self) -> bool {
        self.is_overdue || self.is_cut_off || self.shared.broken() == self.generation
    }

    fn wake_fd(&self) -> RawFd {
        self.shared.news_fd().as_raw_fd()
    }

    fn pairs(&self) -> u16 {
        self.outline.pairs
    }

    fn set_pairs(&mut self, pairs: u16) {
        self.shared.order(LinkCommand::Pairs(pairs));
    }

    fn interrupt(&mut self, queue: u16) {
        if let Some(call) = self.call.get(usize::from(queue)) {
            ring(call);
        }
    }

    fn doorbell(&self, queue: u16) -> Option<RawFd> {
        self.kick.get(usize::from(queue)).map(AsRawFd::as_raw_fd)
    }

    fn drain_doorbell(&mut self, queue: u16) {
        if let Some(kick) = self.kick.get(usize::from(queue)) {
            sidecore::drain_eventfd(kick.as_fd());
        }
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        self.shared.end();
        let is_stuck = self.ended.recv_timeout(END_LIMIT) == Err(RecvTimeoutError::Timeout);
        match self.thread.take() {
            Some(_) if is_stuck => {
                tracing::warn!(
                    "the thread of a back end's connection does not end; it is left behind"
                );
            }
            // A panic of it has been printed by its hook; the machine ends anyway.
            thread => drop(thread.map(JoinHandle::join)),
        }
    }
}
