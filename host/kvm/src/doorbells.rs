//! Doorbells of one function: an eventfd for each queue, rung inside KVM (`KVM_IOEVENTFD`).
//!
//! While the sidecore polls, drivers are told not to ring. Each value read from an eventfd is a number of
//! exits: the ledger's doorbell column is their sum.
//!
//! Doorbells may belong to somebody else ([`KvmDoorbells::for_others`]): a device that is served in another process reads them
//! there. Nobody here may read them, then; how often they rang only the kernel's tracepoints tell, for which the ledger is
//! given their addresses ([`KvmDoorbells::places`]).

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_ioctls::{IoEventAddress, NoDatamatch};
use platform::doorbell::Doorbells;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::Vm;

/// The eventfds and where KVM listens for them.
pub struct KvmDoorbells {
    vm: Arc<Vm>,
    fds: Vec<EventFd>,
    /// Bytes between two.
    stride: u64,
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
    /// Bytes that they take.
    len: AtomicU64,
}

impl Places {
    /// Whether a doorbell is at this guest-physical address.
    pub fn contain(&self, gpa: u64) -> bool {
        // Relaxed: two words of a statistic; the second does not change.
        let first = self.first.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        first != 0 && gpa.checked_sub(first).is_some_and(|inside| inside < len)
    }
}

impl KvmDoorbells {
    /// One for each of `queues` queues, `stride` bytes apart, nowhere yet.
    ///
    /// # Errors
    /// The host has no more descriptors.
    pub fn new(vm: Arc<Vm>, queues: u16, stride: u64) -> io::Result<Self> {
        let fds = (0..queues)
            .map(|_| EventFd::new(EFD_NONBLOCK))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            vm,
            fds,
            stride,
            at: None,
            rung: 0,
            places: None,
        })
    }

    /// The same, for somebody else to read.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn for_others(vm: Arc<Vm>, queues: u16, stride: u64) -> io::Result<Self> {
        let places = Places::default();
        places
            .len
            .store(u64::from(queues) * stride, Ordering::Relaxed);
        Ok(Self {
            places: Some(Arc::new(places)),
            ..Self::new(vm, queues, stride)?
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

    /// Those that are read here.
    fn ours(&self) -> &[EventFd] {
        match self.places {
            None => &self.fds,
            Some(_) => &[],
        }
    }

    fn addresses(&self, first: u64) -> impl Iterator<Item = (&EventFd, IoEventAddress)> {
        let places = (0..).map(move |queue| IoEventAddress::Mmio(first + queue * self.stride));
        self.fds.iter().zip(places)
    }
}

impl Doorbells for KvmDoorbells {
    fn place(&mut self, first: Option<u64>) {
        if first == self.at {
            return;
        }
        let vm = self.vm.fd();
        if let Some(old) = self.at {
            for (fd, address) in self.addresses(old) {
                let _ = vm.unregister_ioevent(fd, &address, NoDatamatch);
            }
        }
        if let (Some(places), Some(new)) = (&self.places, first) {
            places.first.store(new, Ordering::Relaxed);
        }
        if let Some(new) = first {
            for (fd, address) in self.addresses(new) {
                if let Err(error) = vm.register_ioevent(fd, &address, NoDatamatch) {
                    tracing::warn!(%error, "no ioeventfd for a doorbell; it will exit to user space");
                }
            }
        }
        self.at = first;
    }

    fn fds(&self, add: &mut dyn FnMut(RawFd)) {
        self.ours().iter().map(AsRawFd::as_raw_fd).for_each(add);
    }

    /// One system call a queue.
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
