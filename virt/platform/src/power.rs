//! Small fixed devices: power (sleep control, sleep status, reset), reset by the keyboard
//! controller, report of a guest's panic, ejection of PCI functions, marker port.

use std::sync::Arc;

use crate::bus::{AccessCause, BusDevice};
use crate::layout;

/// Receiver of a guest's requests that concern the whole machine. Called on vCPU threads.
pub trait PowerSink: Send + Sync {
    /// Handles soft off (ACPI S5).
    fn power_off(&self);
    /// Handles a reset, by ACPI or by the keyboard controller.
    fn reset(&self);
    /// Handles a panic of a guest kernel that has no crash kernel loaded.
    fn panicked(&self);
}

/// Sleep control bit 5: enter the sleep type of bits 4:2 (ACPI §4.8.3.7).
const SLEEP_ENABLE: u8 = 1 << 5;

/// ACPI sleep control, sleep status and reset registers: three one-byte ports from
/// [`layout::SLEEP_CONTROL`].
pub struct Power(pub Arc<dyn PowerSink>);

impl Power {
    /// Number of ports.
    pub const PORTS: u16 = 3;
}

impl BusDevice for Power {
    fn read(&self, _offset: u64, data: &mut [u8]) -> AccessCause {
        // Sleep status: no wake has happened. The other two registers are write-only.
        data.fill(0);
        AccessCause::Register
    }

    fn write(&self, offset: u64, data: &[u8]) -> AccessCause {
        let port = layout::SLEEP_CONTROL + offset as u16;
        match (port, data.first().copied().unwrap_or(0)) {
            (layout::SLEEP_CONTROL, value)
                if value & SLEEP_ENABLE != 0 && value >> 2 & 7 == layout::S5_SLEEP_TYPE =>
            {
                self.0.power_off();
            }
            (layout::RESET, layout::RESET_VALUE) => self.0.reset(),
            _ => {}
        }
        AccessCause::Register
    }
}

/// The keyboard controller's command port, of which only "pulse the reset line" exists.
pub struct KeyboardReset(pub Arc<dyn PowerSink>);

impl BusDevice for KeyboardReset {
    fn read(&self, _offset: u64, data: &mut [u8]) -> AccessCause {
        // Input buffer empty: a guest that polls for that continues.
        data.fill(0);
        AccessCause::Register
    }

    fn write(&self, _offset: u64, data: &[u8]) -> AccessCause {
        if data == [0xfe] {
            self.0.reset();
        }
        AccessCause::Register
    }
}

/// Event of [`PanicNotice`]: the kernel has panicked.
const PANICKED: u8 = 1 << 0;
/// Event of [`PanicNotice`]: the kernel has panicked and a crash kernel is about to run, which ends
/// or resets the machine when it has finished.
const CRASH_LOADED: u8 = 1 << 1;

/// Port at which a guest reports that its kernel has panicked: QEMU's pvpanic
/// (`docs/specs/pvpanic.rst`), one byte at [`layout::PANIC_NOTICE`]. A read returns the supported
/// events, a write reports an event.
pub struct PanicNotice(pub Arc<dyn PowerSink>);

impl BusDevice for PanicNotice {
    fn read(&self, _offset: u64, data: &mut [u8]) -> AccessCause {
        data.fill(PANICKED | CRASH_LOADED);
        AccessCause::Register
    }

    fn write(&self, _offset: u64, data: &[u8]) -> AccessCause {
        if data.first().is_some_and(|event| event & PANICKED != 0) {
            self.0.panicked();
        }
        AccessCause::Register
    }
}

/// Receiver of ejection requests. Called on vCPU threads.
pub trait EjectSink: Send + Sync {
    /// Removes the function in PCI slot `slot`, which the guest has stopped using. A slot without a
    /// function, or with one that cannot be ejected, is the guest's error and is ignored. On return
    /// the function is gone from the bus.
    fn eject(&self, slot: u8);
}

/// Ejection register at [`layout::EJECT`], which the slots' ACPI method `_EJ0` writes. It reads as
/// zero.
pub struct Eject(pub Arc<dyn EjectSink>);

impl BusDevice for Eject {
    fn read(&self, _offset: u64, data: &mut [u8]) -> AccessCause {
        data.fill(0);
        AccessCause::Register
    }

    fn write(&self, _offset: u64, data: &[u8]) -> AccessCause {
        // The register is one byte wide: each element of a string instruction is a write.
        for slot in data {
            self.0.eject(*slot);
        }
        AccessCause::Register
    }
}

/// Receiver of markers. Called on the vCPU's thread, before the guest continues.
pub trait MarkerSink: Send + Sync {
    /// Reports a marker: 1 begins a measuring window, 2 ends it, others are the guest's own tags.
    fn marker(&self, value: u8);
}

/// Port at which a guest marks points in time for measurements.
pub struct Marker(pub Arc<dyn MarkerSink>);

impl BusDevice for Marker {
    fn read(&self, _offset: u64, _data: &mut [u8]) -> AccessCause {
        AccessCause::Marker
    }

    fn write(&self, _offset: u64, data: &[u8]) -> AccessCause {
        for value in data {
            self.0.marker(*value);
        }
        AccessCause::Marker
    }
}

#[cfg(test)]
mod tests;
