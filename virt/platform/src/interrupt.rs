//! Interrupt messages: what a message-signalled interrupt, an I/O APIC pin and a routed eventfd
//! have in common.

use guest_mem::SourceId;

/// A write of the 32-bit `data` to `address` (`0xFEEx_xxxx`; bits 63:32 hold destination bits 31:8
/// where the hypervisor takes 32-bit APIC ids). Intel SDM volume 3 §11.11.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Where it is written.
    pub address: u64,
    /// What is written.
    pub data: u32,
}

/// Whoever takes interrupt messages to the local APICs. Any thread may send.
///
/// A message carries its requester, because interrupt remapping looks it up by that. A machine
/// whose remapping unit remaps interrupts puts the unit behind this trait; one without gives
/// messages to the hypervisor as they are.
pub trait InterruptSink: Send + Sync {
    /// Sends `message` on behalf of `from`. One that no local APIC takes is lost, as on hardware.
    fn send(&self, from: SourceId, message: Message);
}

/// Eventfds that somebody else signals and the hypervisor turns into interrupt messages, so that no
/// thread of ours wakes for an interrupt: one line for each queue of a function that is served
/// elsewhere, or for each vector of an assigned device. Called by the function's owner.
pub trait InterruptLines: Send {
    /// From now on a signal of each line is its message; `None`: it is kept, and sent once when the
    /// line has a message again. Lines that change together come in one call, since a hypervisor's
    /// table may be costly to send.
    fn connect(&mut self, lines: &[(u16, Option<Message>)]);

    /// Whether a signal of `line` is kept.
    fn is_pending(&self, line: u16) -> bool;

    /// Drops a signal that is kept: the queue was reset.
    fn forget(&mut self, line: u16);
}

/// The legacy interrupt pin of a function, wired to an interrupt controller.
pub trait InterruptPin: Send {
    /// Drives it.
    fn set(&mut self, level: bool);
}
