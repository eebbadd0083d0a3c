//! Doorbells of one virtio function: an eventfd for each queue, rung inside KVM (`KVM_IOEVENTFD`).
//!
//! While the sidecore polls, drivers are told not to ring. Each value read from an eventfd is a number of
//! exits: the ledger's doorbell column is their sum.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::pci::virtio::function::NOTIFY_STRIDE;

/// The eventfds and where KVM listens for them.
pub struct Doorbells {
    vm: Arc<VmFd>,
    fds: Vec<EventFd>,
    at: Option<u64>,
    rung: u64,
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
        })
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
        if let Some(new) = at {
            for (fd, address) in self.fds.iter().zip(addresses(new)) {
                if let Err(error) = self.vm.register_ioevent(fd, &address, NoDatamatch) {
                    tracing::warn!(%error, "no ioeventfd for a doorbell; it will exit to user space");
                }
            }
        }
    }

    /// Descriptors that become readable when a doorbell rings.
    pub fn fds(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.fds.iter().map(AsRawFd::as_raw_fd)
    }

    /// Takes what has rung and tells `kick` which queues; one system call a queue.
    pub fn drain(&mut self, mut kick: impl FnMut(u16)) {
        for (fd, queue) in self.fds.iter().zip(0..) {
            if let Ok(count) = fd.read() {
                self.rung += count;
                kick(queue);
            }
        }
    }

    /// Doorbells taken so far.
    pub fn rung(&self) -> u64 {
        self.rung
    }
}

fn addresses(base: u64) -> impl Iterator<Item = IoEventAddress> {
    (0..).map(move |queue| IoEventAddress::Mmio(base + queue * NOTIFY_STRIDE))
}
