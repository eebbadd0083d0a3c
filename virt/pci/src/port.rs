//! Interface of a PCI function for vCPU threads, independent of the function's owner.

use platform::bus::AccessCause;

use crate::bars::{BARS, BarKind, Bars};

/// Interface of a function for vCPU threads.
///
/// Called on any vCPU thread, several at once. A function owned by a sidecore turns each call into
/// a message and waits for the answer; it must answer in bounded time, except that a write which
/// stops a device (Bus Master, virtio status) may wait until the device is quiet. No lock of the
/// bus is held during a call, but for that of the function's own BARs during a write that changes
/// them.
pub trait FunctionPort: Send + Sync {
    /// Returns the kind of each BAR; constant for the life of the function. The bus places the BARs
    /// and follows writes to them.
    fn bar_kinds(&self) -> [BarKind; BARS];

    /// Reads `len` (1, 2 or 4) bytes of configuration space at `reg` (`reg` + `len` ≤ 4096).
    fn config_read(&self, reg: u16, len: u8) -> u32;

    /// Writes `len` (1, 2 or 4) bytes of configuration space at `reg` (`reg` + `len` ≤ 4096).
    fn config_write(&self, reg: u16, len: u8, value: u32);

    /// Notifies the function that the bus decodes these BARs now, or none of them any more. Called
    /// for a write before the function itself receives it, and when the function is unplugged. The
    /// lock of its BARs is held, so there is one call at a time, in the order of the changes. It
    /// may block: only a vCPU that writes to the same BARs waits.
    fn decodes(&self, _bars: &Bars) {}

    /// Notifies the function that it has received the write after which these BARs are decoded.
    /// Called after each write for which [`decodes`](Self::decodes) was called, with the same lock
    /// still held.
    fn has_decoded(&self, _bars: &Bars) {}

    /// Reads `data.len()` (1, 2, 4 or 8) bytes inside BAR `bar`. `data` arrives as all ones.
    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes `data.len()` (1, 2, 4 or 8) bytes inside BAR `bar`.
    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]);

    /// Returns the cause to which an access at `offset` is charged: [`AccessCause::Doorbell`] for
    /// doorbells.
    fn bar_cause(&self, _bar: u8, _offset: u64) -> AccessCause {
        AccessCause::Register
    }
}
