//! A device whose rings the host's kernel serves (vhost of Linux, `include/uapi/linux/vhost.h`),
//! seen from the thread that talks to it.
//!
//! ```text
//! guest's driver ── rings ──────────────────────────────▶ vhost's thread in the kernel ── TAP interface
//!       │ doorbell ─▶ KVM ─▶ kick eventfd ──────────────────▶ │
//!       ◀── MSI ── KVM ◀── call eventfd (irqfd) ◀──────────────┘
//! registers ─▶ owner ─▶ Import ─ orders ─▶ this thread ─ ioctl ─▶ vhost
//! vhost ─ MISS, read ─▶ this thread ─ question ─▶ owner ─ entry ─▶ this thread ─ UPDATE, written ─▶ vhost
//! ```
//! The owner's part is the same as for a back end behind a socket:
//! [`Exchange`](crate::exchange::Exchange) with its one order,
//! [`Follower`](crate::follow::Follower), [`Shared`]. What differs is here, and is less: a call has
//! ended when it returns, so that nothing is awaited; the kernel does not die, so that rings go on
//! where a stop has left them.
//!
//! **Calls may wait**, for the kernel's own locks and for a frame under way; so they are made here
//! and not by the owner. One that does not return holds this thread, and what waits for it is given
//! up by the owner (a stop at the machine's end, a hold at its limit).
//!
//! **An invalidation** is done when its write returns: the kernel looks up an address, uses it and
//! forgets it under one lock, which the write takes too. (With `experimental_zcopytx=1`, which is
//! off in all kernels by default, it would keep pages of frames under way.)
//!
//! **A miss without a mapping** cannot be refused in this protocol: the kernel would keep the
//! question for ever, and ask once more for each doorbell. So the rings are stopped, the question
//! is ended ([`KernelBackEnd::refuse`]), and the device needs a reset: its ring stands at a buffer
//! that it may not access. The same follows where the kernel itself finds that an entry does not
//! allow an access.
//!
//! **A call that fails** which takes something away from the kernel (a stop, an invalidation) is
//! followed by the close of its descriptor, which ends all use of memory. The device is then of no
//! more use.

mod active;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use guest_mem::{Gpa, Iova};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost_user::chain;
use vhost_user::wire::{IotlbAccess, IotlbRange};
use vio::feature;

use crate::class::Class;
use crate::error::ImportError;
use crate::exchange::{Command, Invalidation, MISSES, Question};
use crate::handshake::RingFds;
use crate::shared::{LinkCommand, Shared};

use active::Active;

/// Interval between checks that the interface exists, while its rings are served.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A split ring, as the kernel is given it.
#[derive(Clone, Copy, Debug)]
pub struct KernelRing<'a> {
    /// Number of the queue.
    pub index: u16,
    /// Entries, a power of two.
    pub size: u16,
    /// Index of the next entry of the available ring to be taken.
    pub base: u16,
    /// Descriptor table: as the driver says, so a guest-physical address where there is no IOMMU.
    pub desc: Iova,
    /// Available ring, likewise.
    pub avail: Iova,
    /// Used ring, likewise.
    pub used: Iova,
    /// Signalled by the driver.
    pub kick: BorrowedFd<'a>,
    /// Interrupts the driver.
    pub call: BorrowedFd<'a>,
    /// Signalled where the ring makes no sense.
    pub err: BorrowedFd<'a>,
}

/// A network device of the kernel's vhost, of one pair of queues, and the guest memory that it was
/// given. Calls may wait for the kernel. When it is dropped nothing of it accesses memory any more.
pub trait KernelBackEnd: Send {
    /// Features that it has for a driver: those of rings and those of frames.
    fn features(&self) -> u64;

    /// The driver has accepted these; a subset of [`features`](Self::features). No ring is served
    /// then. The IOTLB is empty after it.
    ///
    /// # Errors
    /// The kernel's.
    fn set_features(&mut self, features: u64) -> Result<(), ImportError>;

    /// Serves a ring.
    ///
    /// # Errors
    /// The ring does not lie in memory, or the kernel cannot access it.
    fn start_ring(&mut self, ring: &KernelRing<'_>) -> Result<(), ImportError>;

    /// Stops a ring, also one that was not started; the index of the next entry that would have
    /// been taken.
    ///
    /// # Errors
    /// The kernel's; it may go on.
    fn stop_ring(&mut self, index: u16) -> Result<u16, ImportError>;

    /// `range` goes to memory at `gpa`.
    ///
    /// # Errors
    /// The kernel's, or that is no memory.
    fn update(
        &mut self,
        range: IotlbRange,
        gpa: Gpa,
        access: IotlbAccess,
    ) -> Result<(), ImportError>;

    /// Forgets all entries in `range`. No access by them is under way when it returns.
    ///
    /// # Errors
    /// The kernel's; it may go on using them.
    fn invalidate(&mut self, range: IotlbRange) -> Result<(), ImportError>;

    /// Ends a miss for which there is no mapping. No ring is served then.
    ///
    /// # Errors
    /// As of [`invalidate`](Self::invalidate).
    fn refuse(&mut self, iova: u64) -> Result<(), ImportError>;

    /// Takes the next miss, without waiting: its IOVA and the access wanted.
    ///
    /// # Errors
    /// The kernel's, or it asks something else.
    fn take_miss(&mut self) -> Result<Option<(u64, IotlbAccess)>, ImportError>;

    /// Readable when there is a miss.
    fn requests(&self) -> BorrowedFd<'_>;

    /// Its interface has been deleted.
    fn is_gone(&self) -> bool;
}

/// Features that the guest is offered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Features of the device.
    pub features: u64,
    /// Those of them that the back end has.
    known: u64,
    /// Features that are acknowledged to the back end whatever the driver has accepted.
    forced: u64,
    has_iommu: bool,
}

impl Offer {
    pub fn of(
        back_end: &impl KernelBackEnd,
        class: &Class,
        has_iommu: bool,
    ) -> Result<Self, ImportError> {
        let theirs = back_end.features();
        let forced = match has_iommu {
            true => feature::ACCESS_PLATFORM,
            false => 0,
        };
        let what = match theirs {
            theirs if theirs & feature::VERSION_1 == 0 => "VIRTIO_F_VERSION_1",
            theirs if theirs & forced != forced => {
                "VIRTIO_F_ACCESS_PLATFORM, so it knows of no IOMMU"
            }
            _ => {
                return Ok(Self {
                    // One pair.
                    features: theirs & class.features() | class.own_features(2) | forced,
                    known: theirs & (class.features() | forced),
                    forced,
                    has_iommu,
                });
            }
        };
        Err(ImportError::NotOffered { what })
    }
}

/// See the module's head.
pub(crate) struct KernelLink<B> {
    name: String,
    /// None: it was closed.
    back_end: Option<B>,
    offer: Offer,
    shared: Arc<Shared>,
    fds: RingFds,
    active: Option<Active>,
    /// Number of the last question about the rings.
    question: u64,
    /// Misses that the owner is asked about, with their numbers. A ring waits for one at a time,
    /// and asks again for each doorbell.
    misses: VecDeque<(u64, (u64, IotlbAccess))>,
    next_miss: u64,
    is_gone: bool,
}

impl<B: KernelBackEnd> KernelLink<B> {
    pub fn new(name: String, back_end: B, offer: Offer, shared: Arc<Shared>, fds: RingFds) -> Self {
        if offer.has_iommu {
            // Its only one: the kernel does not go away.
            shared.exchange.begin(1);
        }
        Self {
            name,
            back_end: Some(back_end),
            offer,
            shared,
            fds,
            active: None,
            question: 0,
            misses: VecDeque::new(),
            next_miss: 1,
            is_gone: false,
        }
    }

    /// Carries orders out until [`Shared::end`].
    pub fn run(mut self) {
        while !self.shared.is_over() {
            self.look_for_cut_off();
            while let Some((number, order)) = self.shared.take_order() {
                self.shared.uncancel();
                self.obey(order);
                self.shared.set_done(number);
                if self.shared.is_over() {
                    return;
                }
            }
            self.obey_commands();
            self.wait();
        }
    }

    /// A call has taken so long that the owner does not wait any more.
    fn look_for_cut_off(&mut self) {
        if self.shared.take_cut_off() {
            self.fail("it has not forgotten revoked mappings in time");
        }
    }

    fn obey(&mut self, order: LinkCommand) {
        match order {
            LinkCommand::Start(activation) => {
                self.active = Some(Active::new(activation));
                self.start();
            }
            LinkCommand::Stop => {
                if let Some(active) = &mut self.active {
                    active.is_wanted = false;
                }
                // An answer about rings that are not to be started now.
                self.question += 1;
                self.stop();
            }
            LinkCommand::Resume => {
                if let Some(active) = &mut self.active {
                    active.is_wanted = true;
                    self.start();
                }
            }
            // It has one.
            LinkCommand::Pairs(_) => {}
            LinkCommand::Forget => {
                self.stop();
                self.active = None;
            }
        }
    }

    /// Starts the rings. Behind an IOMMU the kernel must have entries for them first, which only
    /// the owner can give.
    fn start(&mut self) {
        let Some(active) = self.active.as_mut().filter(|active| active.is_startable()) else {
            return;
        };
        let Some(back_end) = &mut self.back_end else {
            self.fail("the kernel's vhost is closed since a call to it failed");
            return;
        };
        let features = active.activation.features & self.offer.known | self.offer.forced;
        if let Err(error) = back_end.set_features(features) {
            self.fail(&chain(&error));
        } else if self.offer.has_iommu {
            self.question += 1;
            self.shared.exchange.ask(Question::Rings {
                number: self.question,
                rings: active.activation.rings.clone(),
            });
            self.shared.tell();
        } else {
            self.start_rings();
        }
    }

    fn start_rings(&mut self) {
        let Some(active) = self.active.as_mut().filter(|active| active.is_startable()) else {
            return;
        };
        let Some(back_end) = &mut self.back_end else {
            return;
        };
        // An error signalled before was about rings that are gone.
        sidecore::drain_eventfd(self.fds.err.as_fd());
        if let Err(error) = active.start(back_end, &self.fds) {
            self.fail(&chain(&error));
        }
    }

    fn stop(&mut self) {
        let (Some(active), Some(back_end)) = (&mut self.active, &mut self.back_end) else {
            return;
        };
        if !active.is_serving {
            return;
        }
        let misses = self.misses.drain(..);
        let stopped = active.stop(back_end).and_then(|()| {
            // The owner's answers are about rings that are gone; the kernel's questions would stay.
            misses
                .map(|(_, miss)| back_end.refuse(miss.0))
                .try_for_each(|ended| ended)
        });
        if let Err(error) = stopped {
            self.close(&chain(&error));
        }
    }

    /// Closes the kernel's descriptor, since the kernel may still use memory that it was to
    /// release: the close ends all use.
    fn close(&mut self, why: &str) {
        self.back_end = None;
        if let Some(active) = &mut self.active {
            active.is_serving = false;
        }
        self.misses.clear();
        if self.offer.has_iommu && self.shared.exchange.end() {
            self.shared.tell();
        }
        self.fail(why);
    }

    /// The device needs a reset.
    fn fail(&mut self, why: &str) {
        self.stop();
        if let Some(active) = &mut self.active
            && !std::mem::replace(&mut active.is_broken, true)
        {
            tracing::error!(device = %self.name, why, "the device needs a reset");
            self.shared.set_broken(active.activation.generation);
        }
    }

    /// Carries out the owner's commands about the kernel's IOTLB.
    fn obey_commands(&mut self) {
        while let Some(back_end) = &mut self.back_end
            && let Some(command) = self.shared.exchange.take_command()
        {
            match command {
                Command::Update { miss, entry } => {
                    self.misses.retain(|(number, _)| Some(*number) != miss);
                    if let Err(error) = back_end.update(entry.range, entry.gpa, entry.access) {
                        self.fail(&chain(&error));
                    }
                }
                Command::Invalidate(Invalidation { ranges, hold }) => {
                    let mut forgotten = ranges.iter().map(|range| back_end.invalidate(*range));
                    let forgotten = forgotten.try_for_each(|forgotten| forgotten);
                    if let Err(error) = forgotten {
                        self.close(&chain(&error));
                    }
                    // Forgotten, or closed.
                    if let Some(hold) = hold {
                        self.shared.exchange.release(hold);
                        self.shared.tell();
                    }
                }
                Command::Refuse { miss } => self.refuse(miss),
                // Of several questions the last counts, and a stop is behind all of them.
                Command::Rings { number, .. } if number == self.question => self.start_rings(),
                Command::Rings { .. } => {}
            }
        }
    }

    /// See the module's head.
    fn refuse(&mut self, number: u64) {
        let Some(at) = self.misses.iter().position(|(miss, _)| *miss == number) else {
            return;
        };
        let (_, (iova, _)) = self.misses.remove(at).expect("it was found there");
        self.fail(&format!(
            "a buffer at IOVA {iova:#x}, which the IOMMU does not let it access"
        ));
        if let Some(back_end) = &mut self.back_end
            && let Err(error) = back_end.refuse(iova)
        {
            self.close(&chain(&error));
        }
    }

    /// Asks the owner for the translations that the kernel has missed, a bounded number.
    fn take_misses(&mut self) {
        let mut has_asked = false;
        for _ in 0..MISSES {
            if self.misses.len() == MISSES {
                break;
            }
            let Some(back_end) = &mut self.back_end else {
                break;
            };
            match back_end.take_miss() {
                Ok(None) => break,
                // An entry answers all that it covers.
                Ok(Some(miss)) if self.misses.iter().any(|(_, asked)| *asked == miss) => {}
                Ok(Some((iova, access))) => {
                    let number = self.next_miss;
                    self.next_miss += 1;
                    self.misses.push_back((number, (iova, access)));
                    self.shared.exchange.ask(Question::Miss {
                        number,
                        iova,
                        access,
                    });
                    has_asked = true;
                }
                Err(error) => self.close(&chain(&error)),
            }
        }
        if has_asked {
            self.shared.tell();
        }
    }

    fn look_for_interface(&mut self) {
        let is_gone = self.back_end.as_ref().is_some_and(B::is_gone);
        if is_gone && !std::mem::replace(&mut self.is_gone, true) {
            tracing::warn!(device = %self.name, "its interface has been deleted: the link is down");
            self.shared.set_link_down();
        }
    }

    fn wait(&mut self) {
        let is_serving = self.active.as_ref().is_some_and(|active| active.is_serving);
        let looks = is_serving && !self.is_gone;
        let timeout = looks.then(|| Timespec::try_from(LOOK_EVERY).expect("a second"));
        let mut fds = vec![
            PollFd::new(self.shared.orders_fd(), PollFlags::IN),
            PollFd::new(&self.fds.err, PollFlags::IN),
        ];
        if self.offer.has_iommu
            && self.misses.len() < MISSES
            && let Some(back_end) = &self.back_end
        {
            fds.push(PollFd::from_borrowed_fd(back_end.requests(), PollFlags::IN));
        }
        let woken = poll(&mut fds, timeout.as_ref()).unwrap_or(0);
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (has_error, has_request) = (is_ready(1), is_ready(2));
        drop(fds);
        if woken == 0 && looks {
            self.look_for_interface();
        }
        if has_error && sidecore::drain_eventfd(self.fds.err.as_fd()) {
            self.fail(
                "the kernel reports a ring that makes no sense, or an access that the IOMMU \
                 does not let it make",
            );
        }
        if has_request {
            self.take_misses();
        }
    }
}
