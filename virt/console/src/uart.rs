//! COM1: a 16550A (from `vm-superio`) on eight ports, its interrupt on an I/O APIC pin.
//!
//! vCPU threads call through [`BusDevice`]; the console's thread calls [`Uart::offer`], which waits for nobody: what the guest has
//! no room for stays with the caller, who is told by a descriptor when the guest has read what it had. One lock around the
//! chip; a byte written is handed to the output's [`Sink`] under it, which keeps the order of several vCPUs' bytes. A vCPU whose output nobody
//! reads waits in the sink, *before* it takes the lock, until there is room or the machine is over. The interrupt is
//! raised under the lock too: I/O APIC and KVM never call back into the UART.

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

/// One I/O APIC pin as a push-button.
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
    /// What the receive buffer holds when it is empty.
    depth: usize,
    /// Somebody has more to type, and is told when the buffer is empty.
    is_awaited: bool,
}

/// The chip. See the module's head.
pub struct Uart {
    chip: Mutex<Chip>,
    output: Sink,
    emptied: EventFd,
}

impl Uart {
    /// A chip that fires pin `pin` of `ioapic` and sends its bytes to `output`.
    ///
    /// # Errors
    /// No eventfd.
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

    /// Gives the guest as much of `bytes` as its receive buffer takes now; how much that was. If it was not all,
    /// [`emptied_fd`](Self::emptied_fd) becomes readable when the guest has read everything.
    pub fn offer(&self, bytes: &[u8]) -> usize {
        // Before the lock: an event of the time before is over, one that comes later is for this offer.
        let _ = self.emptied.read();
        let mut chip = self.chip();
        let len = bytes.len().min(chip.serial.fifo_capacity());
        if len > 0 {
            // Refused in loop-back mode only: then nobody listens and the bytes are lost, as on a wire.
            let _ = chip.serial.enqueue_raw_bytes(&bytes[..len]);
        }
        chip.is_awaited = len < bytes.len();
        len
    }

    /// See [`offer`](Self::offer).
    pub fn emptied_fd(&self) -> RawFd {
        self.emptied.as_raw_fd()
    }
}

impl BusDevice for Uart {
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause {
        let mut chip = self.chip();
        for byte in data {
            *byte = chip.serial.read(offset as u8);
        }
        let is_empty = chip.serial.fifo_capacity() == chip.depth;
        let tells = is_empty && std::mem::take(&mut chip.is_awaited);
        drop(chip);
        if tells {
            // Fails only when the counter is full, and then it is readable.
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
mod tests {
    use std::io::Read;
    use std::time::{Duration, Instant};

    use super::*;
    use guest_mem::SourceId;
    use platform::interrupt::{InterruptSink, Message};
    use platform::ioapic::{RouteSink, Routes};
    use platform::layout;

    #[derive(Default)]
    struct Messages(Mutex<Vec<u32>>);

    impl InterruptSink for Messages {
        fn send(&self, _from: SourceId, message: Message) {
            self.0.lock().unwrap().push(message.data);
        }
    }

    impl RouteSink for Messages {
        fn update(&self, _routes: &Routes) {}
    }

    fn uart(output: Sink) -> (Arc<Uart>, Arc<Messages>) {
        let messages = Arc::new(Messages::default());
        let ioapic = Arc::new(Ioapic::new(
            layout::IOAPIC_SOURCE,
            messages.clone(),
            messages.clone(),
        ));
        ioapic.write(0, &[0x18]);
        ioapic.write(0x10, &0x55u32.to_le_bytes());
        (Arc::new(Uart::new(ioapic, 4, output).unwrap()), messages)
    }

    #[test]
    fn written_bytes_reach_the_output_and_string_writes_write_each() {
        let (mut screen, writer) = io::pipe().unwrap();
        let (uart, _) = uart(Sink::start("screen", writer).unwrap());
        uart.write(0, b"o");
        uart.write(0, b"k\n");
        let mut bytes = [0; 3];
        screen.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"ok\n");
    }

    #[test]
    fn a_vcpu_whose_output_nobody_reads_keeps_neither_the_chip_nor_the_machines_end_waiting() {
        let (_unread, writer) = io::pipe().unwrap();
        let output = Sink::start("screen", writer).unwrap();
        let (uart, _) = uart(output.clone());
        let vcpu = std::thread::spawn({
            let uart = uart.clone();
            // More than the pipe and the sink hold.
            move || {
                (0..4 * Sink::CAPACITY).for_each(|_| {
                    let _ = uart.write(0, b"x");
                })
            }
        });
        let deadline = Instant::now() + Duration::from_secs(10);
        while output.offer(b"is there room?") {
            assert!(Instant::now() < deadline, "it never filled up");
        }
        // The chip is free, for another vCPU and for the console's thread.
        uart.read(5, &mut [0]);
        assert_eq!(uart.offer(b"typed"), 5);
        output.let_go();
        vcpu.join().unwrap();
    }

    #[test]
    fn typing_interrupts_and_more_than_the_buffer_is_taken_as_the_guest_reads() {
        let (uart, messages) = uart(Sink::nowhere());
        uart.write(1, &[1]);
        let mut left = 200;
        let mut read = 0;
        while read < 200 {
            let taken = uart.offer(&vec![b'x'; left]);
            left -= taken;
            assert!(uart.emptied.read().is_err(), "before the guest has read");
            loop {
                let mut status = [0];
                uart.read(5, &mut status);
                if status[0] & 1 == 0 {
                    break;
                }
                uart.read(0, &mut [0]);
                read += 1;
            }
            assert_eq!(uart.emptied.read().is_ok(), left > 0, "{left} left");
        }
        assert!(messages.0.lock().unwrap().iter().all(|data| *data == 0x55));
        assert!(!messages.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_full_buffer_takes_nothing_and_nobody_waits() {
        let (uart, _) = uart(Sink::nowhere());
        assert_eq!(uart.offer(&[b'x'; 100]), 64);
        assert_eq!(uart.offer(b"y"), 0);
        uart.read(0, &mut [0]);
        assert!(uart.emptied.read().is_err(), "63 are left to read");
        assert_eq!(uart.offer(b"y"), 1);
    }
}
