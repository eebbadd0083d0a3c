//! A device of the host, as far as a guest's accesses and interrupts reach it.
//!
//! Behind a trait, so that all above it is tested without an IOMMU;
//! [`VfioHardware`](crate::vfio_device::VfioHardware) is the real one.

use std::io;
use std::os::fd::RawFd;

/// Interrupts that a device signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vectors {
    /// None.
    Off,
    /// This number of vectors, by MSI.
    Msi(u16),
    /// This number of vectors, by MSI-X.
    Msix(u16),
}

/// Notice of the host about a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// It has reported an error that was not corrected.
    Error,
    /// The host wants it back.
    Request,
}

/// A device. Called by the owner's thread; none of the calls waits for the device longer than an
/// access to its registers takes.
pub trait Hardware: Send {
    /// Reads two bytes of its configuration space; ones where it does not answer.
    fn read_config(&self, at: u16) -> u16;

    /// Reads 1 to 8 bytes of a BAR; ones where it does not answer.
    fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes 1 to 8 bytes of a BAR.
    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]);

    /// Sets Memory Space and Bus Master.
    fn set_command(&mut self, memory: bool, bus_master: bool);

    /// Has it signal the eventfds of its lines, all of these at once.
    ///
    /// # Errors
    /// The host refuses: none is on.
    fn set_vectors(&mut self, vectors: Vectors) -> io::Result<()>;

    /// Stops the device for good: after the return there is no DMA, no interrupt and no access. It
    /// releases the device, which reads as ones.
    fn stop(&mut self);

    /// Passes to `add` the descriptors that are readable when the host has a notice about it.
    fn wake_fds(&self, add: &mut dyn FnMut(RawFd)) {
        let _ = add;
    }

    /// Takes the next notice of the host about the device.
    fn notice(&mut self) -> Option<HostEvent> {
        None
    }
}
