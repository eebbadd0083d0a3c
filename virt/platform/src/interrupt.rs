//! Interrupt messages: what a message-signalled interrupt, an I/O APIC pin and a routed eventfd
//! have in common.

use guest_mem::SourceId;

/// A write of the 32-bit `data` to `address` (`0xFEEx_xxxx`; bits 63:32 hold destination bits 31:8
/// where the hypervisor takes 32-bit APIC ids). Intel SDM volume 3 §11.11.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Address of the write.
    pub address: u64,
    /// Data of the write.
    pub data: u32,
}

/// Receiver of interrupt messages, which delivers them to the local APICs. Any thread may send.
///
/// A message carries its requester, because interrupt remapping looks it up by that. In a machine
/// whose remapping unit remaps interrupts, the unit implements this trait; without one, messages go
/// to the hypervisor unchanged.
pub trait InterruptSink: Send + Sync {
    /// Sends `message` on behalf of `from`. A message that no local APIC accepts is lost, as on
    /// hardware.
    fn send(&self, from: SourceId, message: Message);
}

/// Eventfds that another process or the host's kernel signals and that the hypervisor turns into
/// interrupt messages, so that none of our threads wakes for an interrupt: one line for each queue
/// of a function that is served elsewhere, or for each vector of an assigned device. Called by the
/// function's owner.
pub trait InterruptLines: Send {
    /// Sets the message that a signal of each line sends from now on; `None`: a signal is kept, and
    /// sent once when the line has a message again. Lines that change together come in one call,
    /// since a hypervisor's table may be costly to send.
    fn connect(&mut self, lines: &[(u16, Option<Message>)]);

    /// Returns whether a signal of `line` is kept.
    fn is_pending(&self, line: u16) -> bool;

    /// Drops a signal that is kept: the queue was reset.
    fn forget(&mut self, line: u16);
}

/// The legacy interrupt pin of a function, wired to an interrupt controller.
pub trait InterruptPin: Send {
    /// Drives the pin to `level`.
    fn set(&mut self, level: bool);
}
