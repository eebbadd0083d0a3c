//! Doorbells of one function: an eventfd for each queue, rung inside KVM (`KVM_IOEVENTFD`).
//!
//! While the sidecore polls, it has drivers suppress doorbells. Each value read from an eventfd is
//! a number of exits: the ledger's doorbell column is their sum.
//!
//! Doorbells may belong to a back end outside this process ([`KvmDoorbells::for_others`]), which
//! serves the device and reads them: another process, or the kernel's vhost. This process must not
//! read them then. Only the kernel's tracepoints count them, for which the ledger receives their
//! addresses ([`KvmDoorbells::places`]).
//!
//! Another thread sets where they are ([`IoEvents`]): each change waits until no vCPU can be in the
//! middle of looking for one (a grace period of some milliseconds), and a BAR that moves is two of
//! them for each queue.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvm_ioctls::{IoEventAddress, NoDatamatch};
use platform::doorbell::{Doorbells, PlaceDoorbells};
use platform::layout;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::Vm;

/// The eventfds, for the thread or back end that reads them.
pub struct KvmDoorbells {
    events: Arc<IoEvents>,
    rung: u64,
}

/// Place at which KVM listens for a function's doorbells.
pub struct IoEvents {
    vm: Arc<dyn Listen>,
    fds: Vec<EventFd>,
    /// Bytes between two.
    stride: u64,
    /// Where doorbell 0 is. Held during a change, so that each begins where the one before it has
    /// ended.
    at: Mutex<Option<u64>>,
    /// Where doorbells that others read have been placed.
    places: Option<Arc<Places>>,
}

/// Calls of KVM that [`IoEvents`] needs; tests have their own.
trait Listen: Send + Sync {
    fn listen(&self, fd: &EventFd, at: IoEventAddress) -> io::Result<()>;

    fn forget(&self, fd: &EventFd, at: IoEventAddress) -> io::Result<()>;
}

impl Listen for Vm {
    fn listen(&self, fd: &EventFd, at: IoEventAddress) -> io::Result<()> {
        match self.has_doorbells() {
            true => Ok(self.fd().register_ioevent(fd, &at, NoDatamatch)?),
            false => Ok(()),
        }
    }

    fn forget(&self, fd: &EventFd, at: IoEventAddress) -> io::Result<()> {
        match self.has_doorbells() {
            true => Ok(self.fd().unregister_ioevent(fd, &at, NoDatamatch)?),
            false => Ok(()),
        }
    }
}

/// Tries whether KVM rings eventfds, before any vCPU has run. One that does not is not asked again:
/// each doorbell of this machine is an exit to user space then.
///
/// # Errors
/// It does not.
pub fn try_listening(vm: &Vm) -> io::Result<()> {
    let fd = EventFd::new(EFD_NONBLOCK)?;
    // Any address will do, where nothing listens yet.
    let at = IoEventAddress::Mmio(layout::PCI_WINDOW);
    let tried = vm.listen(&fd, at).and_then(|()| vm.forget(&fd, at));
    tried.inspect_err(|_| vm.go_without_doorbells())
}

/// Place of a function's doorbells, for other threads; one function's BAR lies in one place for
/// nearly all its life.
#[derive(Debug, Default)]
pub struct Places {
    /// Address of queue 0's; 0: nowhere yet. Decoding that is turned off leaves it.
    first: AtomicU64,
    /// Bytes that they take.
    len: AtomicU64,
}

impl Places {
    /// Returns whether a doorbell is at this guest-physical address.
    pub fn contain(&self, gpa: u64) -> bool {
        // Relaxed: two words of a statistic; the second does not change.
        let first = self.first.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        first != 0 && gpa.checked_sub(first).is_some_and(|inside| inside < len)
    }
}

impl KvmDoorbells {
    /// Creates one for each of `queues` queues, `stride` bytes apart, nowhere yet.
    ///
    /// # Errors
    /// The host has no more descriptors.
    pub fn new(vm: Arc<Vm>, queues: u16, stride: u64) -> io::Result<Self> {
        IoEvents::new(vm, queues, stride, None).map(Self::of)
    }

    /// Creates the same, for a back end outside this process to read.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn for_others(vm: Arc<Vm>, queues: u16, stride: u64) -> io::Result<Self> {
        let places = Places::default();
        places
            .len
            .store(u64::from(queues) * stride, Ordering::Relaxed);
        IoEvents::new(vm, queues, stride, Some(Arc::new(places))).map(Self::of)
    }

    fn of(events: IoEvents) -> Self {
        Self {
            events: Arc::new(events),
            rung: 0,
        }
    }

    /// Returns the place where KVM listens for them, for the decoder of the function's BARs.
    pub fn events(&self) -> Arc<IoEvents> {
        self.events.clone()
    }

    /// Returns the places of doorbells for others.
    pub fn places(&self) -> Option<Arc<Places>> {
        self.events.places.clone()
    }

    /// Returns the eventfds.
    pub fn eventfds(&self) -> &[EventFd] {
        &self.events.fds
    }

    /// Returns those that are read here.
    fn ours(&self) -> &[EventFd] {
        match self.events.places {
            None => &self.events.fds,
            Some(_) => &[],
        }
    }
}

impl IoEvents {
    fn new(
        vm: Arc<dyn Listen>,
        queues: u16,
        stride: u64,
        places: Option<Arc<Places>>,
    ) -> io::Result<Self> {
        let fds = (0..queues)
            .map(|_| EventFd::new(EFD_NONBLOCK))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            vm,
            fds,
            stride,
            at: Mutex::new(None),
            places,
        })
    }

    fn addresses(&self, first: u64) -> impl Iterator<Item = (&EventFd, IoEventAddress)> {
        let places = (0..).map(move |queue| IoEventAddress::Mmio(first + queue * self.stride));
        self.fds.iter().zip(places)
    }
}

impl PlaceDoorbells for IoEvents {
    /// Moves the doorbells. Costs two grace periods of KVM's for each queue that moves.
    fn place(&self, first: Option<u64>) {
        // A panic in between leaves an address that is at worst left a second time, which fails
        // without effect.
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        if first == *at {
            return;
        }
        if let Some(old) = *at {
            for (fd, address) in self.addresses(old) {
                let _ = self.vm.forget(fd, address);
            }
        }
        if let (Some(places), Some(new)) = (&self.places, first) {
            places.first.store(new, Ordering::Relaxed);
        }
        if let Some(new) = first {
            for (fd, address) in self.addresses(new) {
                if let Err(error) = self.vm.listen(fd, address) {
                    tracing::warn!(%error, "no ioeventfd for a doorbell; it will exit to user \
                         space");
                }
            }
        }
        *at = first;
    }
}

impl Doorbells for KvmDoorbells {
    fn fds(&self, add: &mut dyn FnMut(RawFd)) {
        self.ours().iter().map(AsRawFd::as_raw_fd).for_each(add);
    }

    /// Drains the eventfds. Costs one system call a queue.
    fn drain(&mut self, ring: &mut dyn FnMut(u16)) {
        let mut rung = 0;
        for (fd, queue) in self.ours().iter().zip(0..) {
            if let Ok(count) = fd.read() {
                rung += count;
                ring(queue);
            }
        }
        self.rung += rung;
    }

    fn rung(&self) -> u64 {
        self.rung
    }
}

#[cfg(test)]
mod tests;
