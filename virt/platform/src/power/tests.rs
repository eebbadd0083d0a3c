use std::sync::Mutex;

use super::*;

#[derive(Default)]
struct RecordingPower(Mutex<Vec<&'static str>>);

impl PowerSink for RecordingPower {
    fn power_off(&self) {
        self.0.lock().unwrap().push("off");
    }

    fn reset(&self) {
        self.0.lock().unwrap().push("reset");
    }

    fn panicked(&self) {
        self.0.lock().unwrap().push("panicked");
    }
}

/// Returns the requests to the machine that writing `value` at `offset` of the ACPI registers
/// causes.
fn acpi(offset: u64, value: u8) -> Vec<&'static str> {
    let asked = Arc::new(RecordingPower::default());
    Power(asked.clone()).write(offset, &[value]);
    asked.0.lock().unwrap().clone()
}

#[test]
fn soft_off_needs_the_enable_bit_and_our_sleep_type() {
    assert_eq!(acpi(0, 5 << 2 | 1 << 5), ["off"]);
    assert!(acpi(0, 5 << 2).is_empty());
    assert!(acpi(0, 3 << 2 | 1 << 5).is_empty());
}

#[test]
fn reset_by_acpi_and_by_keyboard() {
    assert_eq!(acpi(2, 0x0f), ["reset"]);
    assert!(acpi(2, 0).is_empty());
    assert!(acpi(1, 0x80).is_empty());
    let asked = Arc::new(RecordingPower::default());
    KeyboardReset(asked.clone()).write(0, &[0xd1]);
    assert!(asked.0.lock().unwrap().is_empty());
    KeyboardReset(asked.clone()).write(0, &[0xfe]);
    assert_eq!(*asked.0.lock().unwrap(), ["reset"]);
}

#[test]
fn a_panic_is_reported_unless_a_crash_kernel_handles_it() {
    let asked = Arc::new(RecordingPower::default());
    let device = PanicNotice(asked.clone());
    let mut events = [0xff];
    device.read(0, &mut events);
    assert_eq!(events, [3], "panicked, and crash kernel loaded");
    for nothing in [&[0][..], &[2], &[0xfc], &[]] {
        device.write(0, nothing);
        assert!(asked.0.lock().unwrap().is_empty(), "{nothing:?}");
    }
    device.write(0, &[1]);
    assert_eq!(*asked.0.lock().unwrap(), ["panicked"]);
}

#[test]
fn a_slot_is_ejected_by_its_number() {
    #[derive(Default)]
    struct Slots(Mutex<Vec<u8>>);
    impl EjectSink for Slots {
        fn eject(&self, slot: u8) {
            self.0.lock().unwrap().push(slot);
        }
    }
    let slots = Arc::new(Slots::default());
    let device = Eject(slots.clone());
    let mut data = [0xff; 2];
    device.read(0, &mut data);
    assert_eq!(data, [0, 0]);
    device.write(0, &[]);
    device.write(0, &[5]);
    device.write(0, &[0xff]);
    assert_eq!(*slots.0.lock().unwrap(), [5, 0xff]);
}
