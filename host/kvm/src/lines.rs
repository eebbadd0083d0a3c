//! Interrupts of queues that a back end outside this process serves (another process, or the
//! kernel's vhost): an eventfd for each queue, which KVM turns into the queue's message
//! (`KVM_IRQFD` with a GSI route of its own), so that no thread of ours wakes for an interrupt.
//!
//! A queue whose message may not be delivered (masked, no vector, MSI-X off, Bus Master off) is
//! disconnected: what is signalled meanwhile stays in the eventfd, which is the pending bit, and
//! KVM delivers it once when the queue is connected again.
//!
//! Lines that change together are one new table: a device with 65 vectors costs one grace period,
//! not 65.
//!
//! Called by the owner's thread. Connecting costs a grace period of the host's kernel, and happens
//! when a driver sets its vectors up or moves them; interrupts themselves never come here, so the
//! ledger does not count them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use platform::interrupt::{InterruptLines, Message};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::Vm;
use crate::routes::KvmRoutes;

struct Line {
    fd: EventFd,
    gsi: u32,
    /// KVM listens to the eventfd.
    is_connected: bool,
}

/// [`InterruptLines`] of a KVM machine.
pub struct KvmLines {
    vm: Arc<Vm>,
    routes: Arc<KvmRoutes>,
    lines: Vec<Line>,
}

impl KvmLines {
    /// Creates one line for each of `queues` queues, not connected.
    ///
    /// # Errors
    /// The host has no more descriptors.
    pub fn new(vm: Arc<Vm>, routes: Arc<KvmRoutes>, queues: u16) -> io::Result<Self> {
        let lines = (0..queues)
            .map(|_| {
                Ok(Line {
                    fd: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
                    gsi: routes.new_gsi(),
                    is_connected: false,
                })
            })
            .collect::<io::Result<_>>()?;
        Ok(Self { vm, routes, lines })
    }

    /// Tries whether KVM turns eventfds into interrupts, while no line is connected.
    ///
    /// # Errors
    /// It does not: the process that serves the queues could not interrupt the guest.
    pub fn try_connect(&self) -> io::Result<()> {
        let Some(line) = self.lines.first() else {
            return Ok(());
        };
        // Without a route nothing is delivered.
        self.vm.fd().register_irqfd(&line.fd, line.gsi)?;
        Ok(self.vm.fd().unregister_irqfd(&line.fd, line.gsi)?)
    }

    /// Returns the eventfds, for the back end that signals them.
    pub fn fds(&self) -> impl Iterator<Item = &EventFd> {
        self.lines.iter().map(|line| &line.fd)
    }

    /// Has KVM listen to a line that is routed.
    fn listen(&mut self, queue: u16) {
        let line = &mut self.lines[usize::from(queue)];
        if line.is_connected {
            return;
        }
        match self.vm.fd().register_irqfd(&line.fd, line.gsi) {
            Ok(()) => line.is_connected = true,
            Err(error) => {
                tracing::error!(%error, queue, "no irqfd: this line's interrupts are kept back");
            }
        }
    }

    fn disconnect(&mut self, queue: u16) {
        let line = &mut self.lines[usize::from(queue)];
        if line.is_connected {
            line.is_connected = false;
            if let Err(error) = self.vm.fd().unregister_irqfd(&line.fd, line.gsi) {
                tracing::warn!(%error, queue, "an interrupt line cannot be disconnected");
            }
        }
    }
}

/// Messages that KVM takes in its routing table with 32-bit APIC ids (bits 39:32 are none of them);
/// one it does not take would make it refuse the whole table, and reaches no local APIC anyway.
fn is_routable(message: Message) -> bool {
    message.address >> 32 & 0xff == 0
}

impl InterruptLines for KvmLines {
    fn connect(&mut self, lines: &[(u16, Option<Message>)]) {
        let routable = |message: &Option<Message>| message.filter(|message| is_routable(*message));
        let gsi = |queue: u16| self.lines[usize::from(queue)].gsi;
        let routes: Vec<_> = lines
            .iter()
            .filter_map(|(queue, message)| Some((gsi(*queue), routable(message)?)))
            .collect();
        let are_routed = self.routes.route(&routes);
        if !are_routed {
            tracing::error!("KVM refuses routes: these interrupts are kept back");
        }
        for (queue, message) in lines {
            match routable(message) {
                Some(_) if are_routed => self.listen(*queue),
                _ => self.disconnect(*queue),
            }
        }
    }

    fn is_pending(&self, queue: u16) -> bool {
        let line = &self.lines[usize::from(queue)];
        let mut poll = libc::pollfd {
            fd: line.fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor that is open, a structure that outlives the call, no waiting.
        !line.is_connected && unsafe { libc::poll(&raw mut poll, 1, 0) } == 1
    }

    fn forget(&mut self, queue: u16) {
        let line = &self.lines[usize::from(queue)];
        if !line.is_connected {
            // SAFETY: the descriptor belongs to `line.fd`, which outlives this call.
            let fd = unsafe { BorrowedFd::borrow_raw(line.fd.as_raw_fd()) };
            // The back end that signals it can make it a descriptor whose reader waits.
            sidecore::drain_eventfd(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_with_destination_bits_below_8_are_not_routable() {
        let to = |address| Message {
            address,
            data: 0x41,
        };
        assert!(is_routable(to(0xfee0_1000)));
        // Destination bits 31:8 lie in bits 63:40.
        assert!(is_routable(to(0x0000_0100_fee0_1000)));
        assert!(!is_routable(to(0x0000_0001_fee0_1000)));
    }
}
