use std::sync::Mutex;

use super::*;

#[derive(Default)]
struct Asked(Mutex<Vec<&'static str>>);

impl PowerSink for Asked {
    fn power_off(&self) {
        self.0.lock().unwrap().push("off");
    }

    fn reset(&self) {
        self.0.lock().unwrap().push("reset");
    }
}

/// What is asked of the machine by writing `value` at `offset` of the ACPI registers.
fn acpi(offset: u64, value: u8) -> Vec<&'static str> {
    let asked = Arc::new(Asked::default());
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
    let asked = Arc::new(Asked::default());
    KeyboardReset(asked.clone()).write(0, &[0xd1]);
    assert!(asked.0.lock().unwrap().is_empty());
    KeyboardReset(asked.clone()).write(0, &[0xfe]);
    assert_eq!(*asked.0.lock().unwrap(), ["reset"]);
}
