//! State shared by the owner and the link thread: commands to the thread, events to the owner.
//!
//! Commands are numbered and executed in order; one number records the completed ones. The lock is
//! held for a push or a pop. Each side has an eventfd that wakes it. Commands are rare (a few for
//! each start of a driver), so nothing here is optimized except [`Shared::has_events`], which the
//! owner reads in every sweep.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use rustix::event::{EventfdFlags, eventfd};
use sidecore::drain_eventfd;

use crate::exchange::Exchange;
use crate::handshake::ring;
use crate::memory::RingPlace;

/// One activation of the device by its driver.
#[derive(Clone, Debug)]
pub(crate) struct Activation {
    /// Number of this activation, from 1.
    pub generation: u64,
    /// Features the driver accepted.
    pub features: u64,
    pub rings: Vec<RingPlace>,
}

/// Command from the owner to the link thread.
#[derive(Debug)]
pub(crate) enum LinkCommand {
    /// Serve these rings, which are new.
    Start(Activation),
    /// Stop serving the rings, and keep their indices.
    Stop,
    /// Serve the stopped rings again.
    Resume,
    /// The driver uses this number of queue pairs from now on.
    Pairs(u16),
    /// The rings are gone: the device was reset.
    Forget,
}

/// Shared state. See the module documentation.
#[derive(Debug)]
pub(crate) struct Shared {
    orders: Mutex<VecDeque<(u64, LinkCommand)>>,
    /// Number of the last command given; written by the owner.
    given: AtomicU64,
    /// Number of the last command completed; written by the thread.
    done: AtomicU64,
    /// The owner does not wait any more for commands up to this number; written by the owner.
    abandoned: AtomicU64,
    /// Generation of the last activation that failed, 0 for none. Written by the thread.
    broken: AtomicU64,
    is_over: AtomicBool,
    /// The network interface is gone. Written by the thread.
    is_link_down: AtomicBool,
    /// The connection is to be closed, since the owner has waited too long for the back end.
    /// Written by the owner, cleared by the thread.
    is_cut_off: AtomicBool,
    /// Messages about the back end's IOTLB.
    pub exchange: Exchange,
    has_events: AtomicBool,
    /// Wakes the owner.
    events: OwnedFd,
    /// Lock under which flag and eventfd of the events change together. If the owner cleared both
    /// between an event's store to the flag and its write to the eventfd, the eventfd would stay
    /// readable without an event, and the owner could not sleep. The owner only tries the lock.
    telling: Mutex<()>,
    /// Wakes the thread between requests.
    ordered: OwnedFd,
    /// Ends the thread's wait for a reply.
    pub cancel: Arc<OwnedFd>,
}

impl Shared {
    pub fn new() -> std::io::Result<Self> {
        let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self {
            orders: Mutex::default(),
            given: AtomicU64::new(0),
            done: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
            broken: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            is_link_down: AtomicBool::new(false),
            is_cut_off: AtomicBool::new(false),
            exchange: Exchange::default(),
            has_events: AtomicBool::new(false),
            events: fd()?,
            telling: Mutex::default(),
            ordered: fd()?,
            cancel: Arc::new(fd()?),
        })
    }

    // The owner's side.

    /// Queues a command. Returns its number.
    pub fn order(&self, order: LinkCommand) -> u64 {
        let number = self.given.fetch_add(1, Ordering::Relaxed) + 1;
        self.orders
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back((number, order));
        ring(&self.ordered);
        number
    }

    /// Whether that command is complete. If so, the thread's stores for it are visible (release and
    /// acquire).
    pub fn is_done(&self, number: u64) -> bool {
        self.done.load(Ordering::Acquire) >= number
    }

    /// Abandons that command and those before it: the owner does not wait for them any more.
    pub fn abandon(&self, number: u64) {
        // SeqCst: the thread that is woken by `cancel` sees the number.
        self.abandoned.store(number, Ordering::SeqCst);
        ring(&self.cancel);
    }

    /// Wakes the thread, for which a message was put into the exchange.
    pub fn notify_thread(&self) {
        ring(&self.ordered);
    }

    /// Requests that the connection be closed, whatever the thread waits for.
    pub fn cut_off(&self) {
        // SeqCst, and first: the thread sees it when it is woken by `cancel`, or clears `cancel`.
        self.is_cut_off.store(true, Ordering::SeqCst);
        ring(&self.cancel);
        ring(&self.ordered);
    }

    /// Returns the generation of the last activation that failed; 0: none.
    pub fn broken(&self) -> u64 {
        self.broken.load(Ordering::Acquire)
    }

    /// Whether the network interface is gone.
    pub fn is_link_down(&self) -> bool {
        // Relaxed: it publishes no other data. Its store precedes the store to `has_events`
        // (SeqCst, in `tell`), and the owner loads them in the opposite order.
        self.is_link_down.load(Ordering::Relaxed)
    }

    pub fn has_events(&self) -> bool {
        self.has_events.load(Ordering::Acquire)
    }

    /// Clears the events. If the thread is just reporting one, they stay set.
    pub fn take_events(&self) {
        let _telling = match self.telling.try_lock() {
            Ok(telling) => telling,
            Err(TryLockError::Poisoned(telling)) => telling.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        drain_eventfd(self.events.as_fd());
        self.has_events.store(false, Ordering::SeqCst);
    }

    /// Sets the flag of events without a wake-up. Called by the owner, which is awake.
    pub fn remind(&self) {
        self.has_events.store(true, Ordering::SeqCst);
    }

    pub fn news_fd(&self) -> &OwnedFd {
        &self.events
    }

    /// Makes the thread return.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        ring(&self.cancel);
        ring(&self.ordered);
    }

    // The thread's side.

    /// Returns the next command, with its number.
    pub fn take_order(&self) -> Option<(u64, LinkCommand)> {
        drain_eventfd(self.ordered.as_fd());
        self.orders
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    }

    /// Returns whether the connection is to be closed, and clears the request.
    pub fn take_cut_off(&self) -> bool {
        self.is_cut_off.swap(false, Ordering::SeqCst)
    }

    pub fn is_abandoned(&self, number: u64) -> bool {
        self.abandoned.load(Ordering::SeqCst) >= number
    }

    pub fn set_done(&self, number: u64) {
        self.done.store(number, Ordering::Release);
    }

    pub fn set_broken(&self, generation: u64) {
        self.broken.store(generation, Ordering::Release);
        self.tell();
    }

    /// Reports that the network interface is gone, for good.
    pub fn set_link_down(&self) {
        self.is_link_down.store(true, Ordering::Relaxed);
        self.tell();
    }

    /// Wakes the owner.
    pub fn tell(&self) {
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_events.store(true, Ordering::SeqCst);
        ring(&self.events);
    }

    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    pub fn orders_fd(&self) -> &OwnedFd {
        &self.ordered
    }

    /// Clears a cancellation, which was for a request that has ended since.
    pub fn uncancel(&self) {
        drain_eventfd(self.cancel.as_fd());
        if self.is_over() {
            ring(&self.cancel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taken_news_leaves_nothing_that_wakes() {
        let shared = Arc::new(Shared::new().unwrap());
        for _ in 0..2_000 {
            let other = shared.clone();
            let teller = std::thread::spawn(move || other.tell());
            while !shared.has_events() {
                std::thread::yield_now();
            }
            while shared.has_events() {
                shared.take_events();
            }
            teller.join().unwrap();
            assert!(
                !drain_eventfd(shared.events.as_fd()),
                "it wakes, and nobody would look"
            );
        }
    }
}
