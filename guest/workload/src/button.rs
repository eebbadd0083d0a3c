//! The power button, as Linux shows it to programs: an input device
//! (`Documentation/input/event-codes.rst`), whose driver needs the modules `button` and `evdev`.
//!
//! Left out: any other key, and devices that come later.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Name that the kernel gives the device.
const NAME: &str = "Power Button";

/// `struct input_event` of a 64-bit kernel: two words of time, then type, code and value.
const EVENT: usize = 24;
/// Type of a key.
const EV_KEY: u16 = 1;
/// Code of the power button.
const KEY_POWER: u16 = 116;
/// Value of a key that goes down.
const DOWN: i32 = 1;

/// The power button's events.
///
/// # Errors
/// There is no such device, or its file cannot be opened.
pub fn open() -> io::Result<File> {
    for entry in fs::read_dir("/sys/class/input")? {
        let entry = entry?;
        let is_button = fs::read_to_string(entry.path().join("device/name"))
            .is_ok_and(|name| name.trim_end() == NAME);
        if is_button && entry.file_name().as_encoded_bytes().starts_with(b"event") {
            return File::open(Path::new("/dev/input").join(entry.file_name()));
        }
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("no input device is called {NAME:?}"),
    ))
}

/// Waits until the button is pressed.
///
/// # Errors
/// Its events end.
pub fn wait(mut events: impl Read) -> io::Result<()> {
    let mut event = [0; EVENT];
    loop {
        events.read_exact(&mut event)?;
        if is_press(&event) {
            return Ok(());
        }
    }
}

fn is_press(event: &[u8; EVENT]) -> bool {
    let [kind, code] = [16, 18].map(|at| u16::from_ne_bytes([event[at], event[at + 1]]));
    let value = i32::from_ne_bytes([event[20], event[21], event[22], event[23]]);
    (kind, code, value) == (EV_KEY, KEY_POWER, DOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An event at some time; little endian, as on the machines that guests are.
    fn event(tail: [u8; 8]) -> Vec<u8> {
        [vec![0x5a; 16], tail.into()].concat()
    }

    #[test]
    fn a_press_is_waited_for_past_other_events() {
        let others = [
            // EV_SYN; another key; the button that goes up.
            event([0, 0, 0, 0, 0, 0, 0, 0]),
            event([1, 0, 30, 0, 1, 0, 0, 0]),
            event([1, 0, 116, 0, 0, 0, 0, 0]),
        ]
        .concat();
        let ended = wait(&others[..]).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
        let press = event([1, 0, 116, 0, 1, 0, 0, 0]);
        wait(&[others, press].concat()[..]).unwrap();
    }
}
