//! COM1: a 16550A (from `vm-superio`) on eight ports, its interrupt on an I/O APIC pin.
//!
//! vCPU threads call through [`BusDevice`]. The console's thread calls [`Uart::offer`], which never
//! waits: bytes for which the receive buffer has no room stay with the caller, and an eventfd
//! notifies it when the guest has emptied the buffer. One lock guards the chip. A byte that a vCPU
//! writes is added to the output's [`Sink`] under the lock, which keeps the order of several vCPUs'
//! bytes. A vCPU whose output is not read waits in the sink, *before* it takes the lock, until
//! there is room or the machine ends. The interrupt is raised under the lock too: I/O APIC and KVM
//! never call back into the UART.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use platform::bus::{AccessCause, BusDevice};
use platform::ioapic::Ioapic;

use crate::sink::Sink;

/// One I/O APIC pin. A trigger is a pulse on it.
struct Pin {
    ioapic: Arc<Ioapic>,
    number: u8,
}

impl Trigger for Pin {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.ioapic.pulse(self.number);
        Ok(())
    }
}

struct Chip {
    serial: Serial<Pin, NoEvents, Sink>,
    /// Capacity of the receive buffer, in bytes.
    depth: usize,
    /// The caller of [`Uart::offer`] has more bytes, and is to be notified when the buffer is
    /// empty.
    is_awaited: bool,
}

/// Registers: interrupt enable, interrupt identification, line control.
const IER: u8 = 1;
const IIR: u8 = 2;
const LCR: u8 = 3;
/// IER: an interrupt while bytes wait.
const IER_RECEIVED: u8 = 1;
/// LCR: registers 0 and 1 are the divisor.
const LCR_DIVISOR: u8 = 0x80;

impl Chip {
    /// Returns whether bytes wait for the guest.
    fn has_received(&self) -> bool {
        self.serial.fifo_capacity() < self.depth
    }

    /// Keeps the received-data interrupt pending for as long as bytes wait, as a 16550's does
    /// (PC16550D, table 5). `vm-superio` clears it with the first byte that is read, so that a
    /// driver that reads some bytes and polls for more would find none.
    fn keep_received_interrupt(&mut self) {
        if !self.has_received() || self.serial.read(LCR) & LCR_DIVISOR != 0 {
            return;
        }
        let enabled = self.serial.read(IER);
        if enabled & IER_RECEIVED != 0 {
            // Writing the enable bit again raises the interrupt. The pin cannot fail.
            let _ = self.serial.write(IER, enabled);
        }
    }
}

/// The emulated UART. See the module documentation.
pub struct Uart {
    chip: Mutex<Chip>,
    output: Sink,
    emptied: EventFd,
}

impl Uart {
    /// Creates a chip that pulses pin `pin` of `ioapic` and sends its bytes to `output`.
    ///
    /// # Errors
    /// No eventfd can be created.
    pub fn new(ioapic: Arc<Ioapic>, pin: u8, output: Sink) -> io::Result<Self> {
        let trigger = Pin {
            ioapic,
            number: pin,
        };
        let serial = Serial::new(trigger, output.clone());
        Ok(Self {
            chip: Mutex::new(Chip {
                depth: serial.fifo_capacity(),
                serial,
                is_awaited: false,
            }),
            output,
            emptied: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    fn chip(&self) -> MutexGuard<'_, Chip> {
        // A panic inside the chip cannot leave its registers unusable.
        self.chip.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts as many of `bytes` into the guest's receive buffer as have room now, and returns their
    /// number. If it was not all, [`emptied_fd`](Self::emptied_fd) becomes readable when the guest
    /// has read everything.
    pub fn offer(&self, bytes: &[u8]) -> usize {
        // Before the lock: this clears the event of an earlier offer. A later event belongs to this
        // one.
        let _ = self.emptied.read();
        let mut chip = self.chip();
        let len = bytes.len().min(chip.serial.fifo_capacity());
        if len > 0 {
            // Refused in loop-back mode only: then the chip has no receiver and the bytes are lost,
            // as on a wire.
            let _ = chip.serial.enqueue_raw_bytes(&bytes[..len]);
        }
        chip.is_awaited = len < bytes.len();
        len
    }

    /// Returns the eventfd that [`offer`](Self::offer) describes.
    pub fn emptied_fd(&self) -> RawFd {
        self.emptied.as_raw_fd()
    }
}

impl BusDevice for Uart {
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause {
        let mut chip = self.chip();
        if offset == u64::from(IIR) {
            chip.keep_received_interrupt();
        }
        for byte in data {
            *byte = chip.serial.read(offset as u8);
        }
        let tells = !chip.has_received() && std::mem::take(&mut chip.is_awaited);
        drop(chip);
        if tells {
            // Fails only if the counter is full, and then the eventfd is readable already.
            let _ = self.emptied.write(1);
        }
        AccessCause::Register
    }

    fn write(&self, offset: u64, data: &[u8]) -> AccessCause {
        if offset == 0 {
            self.output.wait_for_room();
        }
        let mut chip = self.chip();
        for byte in data {
            // A sink refuses nothing, and the pin cannot fail.
            let _ = chip.serial.write(offset as u8, *byte);
        }
        AccessCause::Register
    }
}

#[cfg(test)]
mod tests;
