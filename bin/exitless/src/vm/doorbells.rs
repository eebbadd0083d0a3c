//! Doorbells of one virtio function: an eventfd for each queue, rung inside KVM (`KVM_IOEVENTFD`).
//!
//! While the sidecore polls, drivers are told not to ring. Each value read from an eventfd is a number of
//! exits: the ledger's doorbell column is their sum.
//!
//! Doorbells may belong to somebody else ([`Doorbells::for_others`]): a device that is served in another process reads them
//! there. Nobody here may read them, then; how often they rang only the kernel's tracepoints tell, for which the ledger is
//! given their addresses ([`Doorbells::places`]).

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::pci::virtio::function::NOTIFY_STRIDE;

/// The eventfds and where KVM listens for them.
pub struct Doorbells {
    vm: Arc<VmFd>,
    fds: Vec<EventFd>,
    at: Option<u64>,
    rung: u64,
    /// Where doorbells that others read have been placed.
    places: Option<Arc<Places>>,
}

/// Where a function's doorbells are, for other threads; one function's BAR lies in one place for nearly all its life.
#[derive(Debug, Default)]
pub struct Places {
    /// Address of queue 0's; 0: nowhere yet. Decoding that is turned off leaves it.
    first: AtomicU64,
    queues: AtomicU64,
}

impl Places {
    /// Whether a doorbell is at this guest-physical address.
    pub fn contain(&self, gpa: u64) -> bool {
        // Relaxed: two words of a statistic; the second does not change.
        let first = self.first.load(Ordering::Relaxed);
        let len = self.queues.load(Ordering::Relaxed) * NOTIFY_STRIDE;
        first != 0 && gpa.checked_sub(first).is_some_and(|inside| inside < len)
    }
}

impl Doorbells {
    /// One for each of `queues` queues, nowhere yet.
    pub fn new(vm: Arc<VmFd>, queues: u16) -> io::Result<Self> {
        let fds = (0..queues)
            .map(|_| EventFd::new(EFD_NONBLOCK))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            vm,
            fds,
            at: None,
            rung: 0,
            places: None,
        })
    }

    /// The same, for somebody else to read.
    pub fn for_others(vm: Arc<VmFd>, queues: u16) -> io::Result<Self> {
        let places = Places::default();
        places.queues.store(queues.into(), Ordering::Relaxed);
        Ok(Self {
            places: Some(Arc::new(places)),
            ..Self::new(vm, queues)?
        })
    }

    /// Where doorbells for others are.
    pub fn places(&self) -> Option<Arc<Places>> {
        self.places.clone()
    }

    /// The eventfds.
    pub fn eventfds(&self) -> &[EventFd] {
        &self.fds
    }

    /// Follows the BAR: queue 0's doorbell is at GPA `at`, or decoding is off. A doorbell KVM refuses to
    /// watch still works, as an exit to user space.
    pub fn place(&mut self, at: Option<u64>) {
        if at == self.at {
            return;
        }
        if let Some(old) = self.at {
            for (fd, address) in self.fds.iter().zip(addresses(old)) {
                let _ = self.vm.unregister_ioevent(fd, &address, NoDatamatch);
            }
        }
        self.at = at;
        if let (Some(places), Some(new)) = (&self.places, at) {
            places.first.store(new, Ordering::Relaxed);
        }
        if let Some(new) = at {
            for (fd, address) in self.fds.iter().zip(addresses(new)) {
                if let Err(error) = self.vm.register_ioevent(fd, &address, NoDatamatch) {
                    tracing::warn!(%error, "no ioeventfd for a doorbell; it will exit to user space");
                }
            }
        }
    }

    /// Descriptors that become readable when a doorbell rings, and are ours to read.
    pub fn fds(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.ours().iter().map(AsRawFd::as_raw_fd)
    }

    /// Those that are read here.
    fn ours(&self) -> &[EventFd] {
        match self.places {
            None => &self.fds,
            Some(_) => &[],
        }
    }

    /// Takes what has rung here and tells `kick` which queues; one system call a queue.
    pub fn drain(&mut self, mut kick: impl FnMut(u16)) {
        let mut rung = 0;
        for (fd, queue) in self.ours().iter().zip(0..) {
            if let Ok(count) = fd.read() {
                rung += count;
                kick(queue);
            }
        }
        self.rung += rung;
    }

    /// Doorbells taken so far.
    pub fn rung(&self) -> u64 {
        self.rung
    }
}

fn addresses(base: u64) -> impl Iterator<Item = IoEventAddress> {
    (0..).map(move |queue| IoEventAddress::Mmio(base + queue * NOTIFY_STRIDE))
}
