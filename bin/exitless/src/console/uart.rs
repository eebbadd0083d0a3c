//! COM1: a 16550A (from `vm-superio`) on eight ports, its interrupt on an I/O APIC pin.
//!
//! vCPU threads call through [`BusDevice`]; the input thread calls [`Uart::type_in`]. One lock around the
//! chip; a byte written goes out under it, which keeps the order of several vCPUs' bytes. The interrupt is
//! raised under it too: I/O APIC and KVM never call back into the UART.

use std::convert::Infallible;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};

use crate::irq::ioapic::Ioapic;
use crate::vm::bus::BusDevice;
use crate::vm::exits::ExitCause;

/// How long [`Uart::type_in`] waits at most before it looks whether the machine still runs.
const INPUT_PATIENCE: Duration = Duration::from_millis(200);

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

type Output = Box<dyn Write + Send>;

/// The chip. See the module's head.
pub struct Uart {
    chip: Mutex<Serial<Pin, NoEvents, Output>>,
    /// Told after each read: the receive buffer may have room again.
    room: Condvar,
}

impl Uart {
    /// A chip that fires pin `pin` of `ioapic` and sends its bytes to `output` (unbuffered, or flushed
    /// by itself: each byte is flushed).
    pub fn new(ioapic: Arc<Ioapic>, pin: u8, output: Output) -> Self {
        let trigger = Pin {
            ioapic,
            number: pin,
        };
        Self {
            chip: Mutex::new(Serial::new(trigger, output)),
            room: Condvar::new(),
        }
    }

    fn chip(&self) -> MutexGuard<'_, Serial<Pin, NoEvents, Output>> {
        // A panic inside the chip cannot leave its registers unusable.
        self.chip.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the guest `bytes` as typed, waiting while its receive buffer is full; stops early, with the
    /// rest untyped, once `is_over` says so.
    pub fn type_in(&self, mut bytes: &[u8], is_over: impl Fn() -> bool) {
        let mut chip = self.chip();
        while !bytes.is_empty() && !is_over() {
            let len = bytes.len().min(chip.fifo_capacity());
            if len > 0 {
                let (now, later) = bytes.split_at(len);
                // Refused in loop-back mode only: then nobody listens and the bytes are lost, as on a wire.
                let _ = chip.enqueue_raw_bytes(now);
                bytes = later;
            } else {
                let waited = self.room.wait_timeout(chip, INPUT_PATIENCE);
                chip = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl BusDevice for Uart {
    fn read(&self, offset: u64, data: &mut [u8]) -> ExitCause {
        let mut chip = self.chip();
        for byte in data {
            *byte = chip.read(offset as u8);
        }
        drop(chip);
        self.room.notify_one();
        ExitCause::OtherDevice
    }

    fn write(&self, offset: u64, data: &[u8]) -> ExitCause {
        let mut chip = self.chip();
        for byte in data {
            // Fails when the output refuses a byte (closed pipe, full disk): the guest does not care.
            let _ = chip.write(offset as u8, *byte);
        }
        ExitCause::OtherDevice
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::irq::ioapic::{RouteSink, Routes};
    use crate::irq::msi::MsiSink;

    #[derive(Default)]
    struct Messages(Mutex<Vec<u32>>);

    impl MsiSink for Messages {
        fn send(&self, _address: u64, data: u32) {
            self.0.lock().unwrap().push(data);
        }
    }

    impl RouteSink for Messages {
        fn update(&self, _routes: &Routes) {}
    }

    #[derive(Clone, Default)]
    struct Screen(Arc<Mutex<Vec<u8>>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn uart() -> (Arc<Uart>, Arc<Messages>, Screen) {
        let messages = Arc::new(Messages::default());
        let ioapic = Arc::new(Ioapic::new(messages.clone(), messages.clone()));
        ioapic.write(0, &[0x18]);
        ioapic.write(0x10, &0x55u32.to_le_bytes());
        let screen = Screen::default();
        (
            Arc::new(Uart::new(ioapic, 4, Box::new(screen.clone()))),
            messages,
            screen,
        )
    }

    #[test]
    fn written_bytes_reach_the_output_and_string_writes_write_each() {
        let (uart, _, screen) = uart();
        uart.write(0, b"o");
        uart.write(0, b"k\n");
        assert_eq!(*screen.0.lock().unwrap(), b"ok\n");
    }

    #[test]
    fn typing_interrupts_and_more_than_the_buffer_waits_for_the_guest() {
        let (uart, messages, _) = uart();
        uart.write(1, &[1]);
        let typist = std::thread::spawn({
            let uart = uart.clone();
            move || uart.type_in(&[b'x'; 200], || false)
        });
        let mut read = 0;
        while read < 200 {
            let mut status = [0];
            uart.read(5, &mut status);
            if status[0] & 1 != 0 {
                uart.read(0, &mut [0]);
                read += 1;
            }
        }
        typist.join().unwrap();
        assert!(messages.0.lock().unwrap().iter().all(|data| *data == 0x55));
        assert!(!messages.0.lock().unwrap().is_empty());
    }

    #[test]
    fn typing_into_a_full_buffer_ends_with_the_machine() {
        let (uart, _, _) = uart();
        uart.type_in(&[b'x'; 64], || false);
        let asked = std::cell::Cell::new(0);
        uart.type_in(b"y", || {
            asked.set(asked.get() + 1);
            asked.get() > 1
        });
        assert_eq!(asked.get(), 2);
    }
}
