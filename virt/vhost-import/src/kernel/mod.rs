//! A device whose rings the host's kernel serves (vhost of Linux, `include/uapi/linux/vhost.h`), as
//! seen by the link thread, which makes the calls to vhost.
//!
//! ```text
//! guest's driver ── rings ──────────────────────────────▶ vhost's thread in the kernel ── TAP interface
//!       │ doorbell ─▶ KVM ─▶ kick eventfd ──────────────────▶ │
//!       ◀── MSI ── KVM ◀── call eventfd (irqfd) ◀──────────────┘
//! registers ─▶ owner ─▶ Import ─ orders ─▶ this thread ─ ioctl ─▶ vhost
//! vhost ─ MISS, read ─▶ this thread ─ question ─▶ owner ─ entry ─▶ this thread ─ UPDATE, written ─▶ vhost
//! ```
//! The owner's part is the same as for a back end behind a socket:
//! [`Exchange`](crate::exchange::Exchange) with its single order of messages,
//! [`Follower`](crate::follow::Follower), [`Shared`]. Only two things differ here. A call has
//! completed when it returns, so no answer is awaited; and the kernel does not die, so rings
//! continue where a stop left them.
//!
//! **Calls may wait**, for the kernel's locks and for a frame being processed; so they are made by
//! this thread and not by the owner. A call that does not return blocks this thread, and the owner
//! stops waiting for it (for a stop at the machine's end, for a hold at its limit).
//!
//! **An invalidation** is complete when its write returns: the kernel looks up an address, uses it
//! and forgets it under one lock, which the write takes, too. (With `experimental_zcopytx=1`, which
//! is off by default in all kernels, it would keep pages of frames in flight.)
//!
//! **A miss without a mapping** cannot be refused in this protocol: the kernel would keep the miss
//! for ever, and repeat it for each doorbell. So the rings are stopped, the miss is ended
//! ([`KernelBackEnd::refuse`]), and the device needs a reset: its ring is at a buffer that it may
//! not access. The same follows if the kernel finds that an entry does not allow an access.
//!
//! **If a call fails that revokes access** (a stop, an invalidation), the kernel's descriptor is
//! closed, which ends all use of memory. The device cannot be used after that.

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

/// A split ring, as it is described to the kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelRing<'a> {
    /// Number of the queue.
    pub index: u16,
    /// Entries, a power of two.
    pub size: u16,
    /// Index of the next entry of the available ring to be taken.
    pub base: u16,
    /// Descriptor table: the driver's address, which is guest-physical if there is no IOMMU.
    pub desc: Iova,
    /// Available ring, likewise.
    pub avail: Iova,
    /// Used ring, likewise.
    pub used: Iova,
    /// Eventfd that the driver signals.
    pub kick: BorrowedFd<'a>,
    /// Eventfd that interrupts the driver.
    pub call: BorrowedFd<'a>,
    /// Eventfd that the kernel signals if the ring is malformed.
    pub err: BorrowedFd<'a>,
}

/// A network device of the kernel's vhost with one queue pair, and the guest memory that was
/// described to it. Calls may wait for the kernel. Once it is dropped, it accesses no memory any
/// more.
pub trait KernelBackEnd: Send {
    /// Features that it can offer to a driver: those of rings and those of frames.
    fn features(&self) -> u64;

    /// Sets the features that the driver has accepted, a subset of [`features`](Self::features).
    /// Called while no ring is served. Empties the IOTLB.
    ///
    /// # Errors
    /// The kernel's.
    fn set_features(&mut self, features: u64) -> Result<(), ImportError>;

    /// Starts to serve a ring.
    ///
    /// # Errors
    /// The ring does not lie in memory, or the kernel cannot access it.
    fn start_ring(&mut self, ring: &KernelRing<'_>) -> Result<(), ImportError>;

    /// Stops a ring, also one that was not started. Returns the index of the next entry that would
    /// have been taken.
    ///
    /// # Errors
    /// The kernel's error; it may still serve the ring.
    fn stop_ring(&mut self, index: u16) -> Result<u16, ImportError>;

    /// Adds an entry: `range` translates to memory at `gpa`.
    ///
    /// # Errors
    /// The kernel's error, or there is no memory at `gpa`.
    fn update(
        &mut self,
        range: IotlbRange,
        gpa: Gpa,
        access: IotlbAccess,
    ) -> Result<(), ImportError>;

    /// Removes all entries in `range`. No access through them is in progress when it returns.
    ///
    /// # Errors
    /// The kernel's error; it may still use them.
    fn invalidate(&mut self, range: IotlbRange) -> Result<(), ImportError>;

    /// Ends a miss for which there is no mapping. Called while no ring is served.
    ///
    /// # Errors
    /// As for [`invalidate`](Self::invalidate).
    fn refuse(&mut self, iova: u64) -> Result<(), ImportError>;

    /// Takes the next miss, without waiting: its IOVA and the access wanted.
    ///
    /// # Errors
    /// The kernel's error, or a request that is no miss.
    fn take_miss(&mut self) -> Result<Option<(u64, IotlbAccess)>, ImportError>;

    /// Returns the descriptor that is readable when there is a miss.
    fn requests(&self) -> BorrowedFd<'_>;

    /// Whether its interface has been deleted.
    fn is_gone(&self) -> bool;
}

/// Features that the guest is offered, and those of the back end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Features of the device.
    pub features: u64,
    /// Features that the back end has, too.
    known: u64,
    /// Features that the back end always gets, whatever the driver has accepted.
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
                    // Two rings: one queue pair.
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
    /// `None` once it was closed.
    back_end: Option<B>,
    offer: Offer,
    shared: Arc<Shared>,
    fds: RingFds,
    active: Option<Active>,
    /// Number of the last question about the rings.
    question: u64,
    /// Misses that the owner was asked about, with their numbers. A ring has at most one at a time,
    /// which it repeats for each doorbell.
    misses: VecDeque<(u64, (u64, IotlbAccess))>,
    next_miss: u64,
    is_gone: bool,
}

impl<B: KernelBackEnd> KernelLink<B> {
    pub fn new(name: String, back_end: B, offer: Offer, shared: Arc<Shared>, fds: RingFds) -> Self {
        if offer.has_iommu {
            // The only session: the kernel does not go away.
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

    /// Executes commands until [`Shared::end`].
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

    /// Fails the device if a call took so long that the owner has stopped waiting for it.
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
                // An answer to an earlier question is about rings that must not start now.
                self.question += 1;
                self.stop();
            }
            LinkCommand::Resume => {
                if let Some(active) = &mut self.active {
                    active.is_wanted = true;
                    self.start();
                }
            }
            // There is one pair.
            LinkCommand::Pairs(_) => {}
            LinkCommand::Forget => {
                self.stop();
                self.active = None;
            }
        }
    }

    /// Starts the rings. Behind an IOMMU the kernel must first have entries for them, which only
    /// the owner can provide.
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
        // An error signalled before this was about former rings.
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
            // The owner's answers would be about former rings. The kernel's misses would remain.
            misses
                .map(|(_, miss)| back_end.refuse(miss.0))
                .try_for_each(|ended| ended)
        });
        if let Err(error) = stopped {
            self.close(&chain(&error));
        }
    }

    /// Closes the kernel's descriptor. The kernel may still use memory that it was to release, and
    /// the close ends all use.
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

    /// Stops the rings, and reports that the device needs a reset.
    fn fail(&mut self, why: &str) {
        self.stop();
        if let Some(active) = &mut self.active
            && !std::mem::replace(&mut active.is_broken, true)
        {
            tracing::error!(device = %self.name, why, "the device needs a reset");
            self.shared.set_broken(active.activation.generation);
        }
    }

    /// Executes the owner's commands about the kernel's IOTLB.
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
                    // The entries are removed, or the descriptor is closed.
                    if let Some(hold) = hold {
                        self.shared.exchange.release(hold);
                        self.shared.tell();
                    }
                }
                Command::Refuse { miss } => self.refuse(miss),
                // Only the answer to the last question counts; a stop advances its number.
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
                // A repeated miss: one answer suffices.
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
