//! The small fixed devices: power (sleep control, sleep status, reset), keyboard reset, marker port.

use std::sync::Arc;

use super::bus::BusDevice;
use super::control::{Control, End};
use super::exits::ExitCause;
use super::layout;

/// Sleep control bit 5: enter the sleep type of bits 4:2 (ACPI §4.8.3.7).
const SLEEP_ENABLE: u8 = 1 << 5;

/// ACPI sleep control, sleep status and reset registers: three one-byte ports from [`layout::SLEEP_CONTROL`].
pub struct Power(pub Arc<Control>);

impl Power {
    /// Number of ports.
    pub const PORTS: u16 = 3;
}

impl BusDevice for Power {
    fn read(&self, _offset: u64, data: &mut [u8]) -> ExitCause {
        // No wake has happened; the other two are write-only.
        data.fill(0);
        ExitCause::OtherDevice
    }

    fn write(&self, offset: u64, data: &[u8]) -> ExitCause {
        let port = layout::SLEEP_CONTROL + offset as u16;
        match (port, data.first().copied().unwrap_or(0)) {
            (layout::SLEEP_CONTROL, value)
                if value & SLEEP_ENABLE != 0 && value >> 2 & 7 == layout::S5_SLEEP_TYPE =>
            {
                self.0.end(End::PowerOff);
            }
            (layout::RESET, layout::RESET_VALUE) => self.0.end(End::Reset),
            _ => {}
        }
        ExitCause::OtherDevice
    }
}

/// The keyboard controller's command port, of which only "pulse the reset line" exists.
pub struct KeyboardReset(pub Arc<Control>);

impl BusDevice for KeyboardReset {
    fn read(&self, _offset: u64, data: &mut [u8]) -> ExitCause {
        // Input buffer empty: a guest that waits before its command goes on.
        data.fill(0);
        ExitCause::OtherDevice
    }

    fn write(&self, _offset: u64, data: &[u8]) -> ExitCause {
        if data == [0xfe] {
            self.0.end(End::Reset);
        }
        ExitCause::OtherDevice
    }
}

/// Told of each marker: called on the vCPU's thread, before the guest goes on.
pub trait MarkerSink: Send + Sync {
    /// 1 begins a measuring window, 2 ends it, others are the guest's own tags.
    fn marker(&self, value: u8);
}

/// The marker port.
pub struct Marker(pub Arc<dyn MarkerSink>);

impl BusDevice for Marker {
    fn read(&self, _offset: u64, _data: &mut [u8]) -> ExitCause {
        ExitCause::Marker
    }

    fn write(&self, _offset: u64, data: &[u8]) -> ExitCause {
        for value in data {
            self.0.marker(*value);
        }
        ExitCause::Marker
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(write: impl Fn(&Arc<Control>)) -> Option<End> {
        let control = Arc::new(Control::new().unwrap());
        write(&control);
        control.is_over().then(|| control.wait_for_end())
    }

    #[test]
    fn soft_off_needs_the_enable_bit_and_our_sleep_type() {
        let sleep = |value: u8| {
            after(|control| {
                Power(control.clone()).write(0, &[value]);
            })
        };
        assert_eq!(sleep(5 << 2 | 1 << 5), Some(End::PowerOff));
        assert_eq!(sleep(5 << 2), None);
        assert_eq!(sleep(3 << 2 | 1 << 5), None);
    }

    #[test]
    fn reset_by_acpi_and_by_keyboard() {
        assert_eq!(
            after(|c| {
                Power(c.clone()).write(2, &[0x0f]);
            }),
            Some(End::Reset)
        );
        assert_eq!(
            after(|c| {
                Power(c.clone()).write(2, &[0]);
            }),
            None
        );
        assert_eq!(
            after(|c| {
                Power(c.clone()).write(1, &[0x80]);
            }),
            None
        );
        assert_eq!(
            after(|c| {
                KeyboardReset(c.clone()).write(0, &[0xfe]);
            }),
            Some(End::Reset)
        );
        assert_eq!(
            after(|c| {
                KeyboardReset(c.clone()).write(0, &[0xd1]);
            }),
            None
        );
    }
}
