//! The 8254 timer's first counter, whose interrupts have a least period: 200 µs, as KVM's.
//!
//! Without one it interrupts 600,000 times a second, masked or not, and its emulator does nothing
//! else. The counts that the guest loads are raised to the least one, in each of the
//! counter's modes: a mode that is set later keeps the count. Halves of a count are held back until
//! both are known.

/// Counts of 838 ns in 200 µs.
pub const COUNT_MIN: u16 = 239;

/// Ports: the first counter's, and the control word's.
pub const COUNTER: u16 = 0x40;
/// See [`COUNTER`].
pub const CONTROL: u16 = 0x43;
/// A control word to start with: the first counter, both halves, periodic.
pub const START: u8 = 0x34;

/// Bytes of a count that are written: none is due yet after a lower half.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountWrite {
    /// The first byte for the counter's port.
    pub first: Option<u8>,
    /// The second one.
    pub second: Option<u8>,
    /// The count was raised.
    pub is_raised: bool,
}

/// Halves of a count that are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Halves {
    Low,
    High,
    #[default]
    Both,
}

/// Writes of the guest to the first counter, so far as they matter to the next. It begins as after
/// [`START`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Pit {
    halves: Halves,
    /// Lower half that is held back.
    low: Option<u8>,
}

impl Pit {
    /// Handles a control word. Returns the word for the chip: decimal counting is cleared in that
    /// of the first counter.
    pub const fn control(&mut self, word: u8) -> u8 {
        const DECIMAL: u8 = 1;
        let (counter, access) = (word >> 6, word >> 4 & 3);
        if counter != 0 {
            // Another's, or a command to read.
            return word;
        }
        self.halves = match access {
            // Its value is latched, and nothing set.
            0 => return word,
            1 => Halves::Low,
            2 => Halves::High,
            _ => Halves::Both,
        };
        self.low = None;
        word & !DECIMAL
    }

    /// A byte for the first counter.
    pub const fn count(&mut self, byte: u8) -> CountWrite {
        match self.halves {
            Halves::Low => {
                let (low, is_raised) = match byte {
                    // 65,536 counts.
                    0 => (0, false),
                    few if few < COUNT_MIN as u8 => (COUNT_MIN as u8, true),
                    enough => (enough, false),
                };
                CountWrite {
                    first: Some(low),
                    second: None,
                    is_raised,
                }
            }
            // At least 256.
            Halves::High => CountWrite {
                first: Some(byte),
                second: None,
                is_raised: false,
            },
            Halves::Both => {
                let Some(low) = self.low.take() else {
                    self.low = Some(byte);
                    return CountWrite {
                        first: None,
                        second: None,
                        is_raised: false,
                    };
                };
                let count = u16::from_le_bytes([low, byte]);
                let is_raised = count != 0 && count < COUNT_MIN;
                let [low, high] = if is_raised { COUNT_MIN } else { count }.to_le_bytes();
                CountWrite {
                    first: Some(low),
                    second: Some(high),
                    is_raised,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An 8254's first counter, as far as loading it goes.
    #[derive(Default)]
    struct Chip {
        access: u8,
        low: Option<u8>,
        /// Counts loaded; 0 is 65,536.
        count: u16,
    }

    impl Chip {
        fn control(&mut self, word: u8) {
            if word >> 6 == 0 && word >> 4 & 3 != 0 {
                assert_eq!(word & 1, 0, "decimal");
                (self.access, self.low) = (word >> 4 & 3, None);
            }
        }

        fn count(&mut self, byte: u8) {
            match (self.access, self.low.take()) {
                (1, _) => self.count = byte.into(),
                (2, _) => self.count = u16::from(byte) << 8,
                (_, None) => self.low = Some(byte),
                (_, Some(low)) => self.count = u16::from_le_bytes([low, byte]),
            }
        }

        fn carry_out(&mut self, write: CountWrite) {
            [write.first, write.second]
                .into_iter()
                .flatten()
                .for_each(|byte| self.count(byte));
        }
    }

    #[test]
    fn e11b_no_sequence_of_writes_loads_a_count_below_the_least() {
        // All sequences of six writes out of these, from the start.
        let controls = [0x34, 0x35, 0x36, 0x30, 0x14, 0x24, 0x25, 0x00, 0xc2, 0xb4];
        let counts = [0, 1, 2, 238, 239, 255];
        let kinds = controls.len() + counts.len();
        for sequence in 0..kinds.pow(6) {
            let (mut pit, mut chip) = (Pit::default(), Chip::default());
            chip.control(START);
            let mut rest = sequence;
            for _ in 0..6 {
                let kind = rest % kinds;
                rest /= kinds;
                match controls.get(kind) {
                    Some(word) => chip.control(pit.control(*word)),
                    None => chip.carry_out(pit.count(counts[kind - controls.len()])),
                }
                assert!(
                    chip.count == 0 || chip.count >= COUNT_MIN,
                    "{} counts, sequence {sequence}",
                    chip.count
                );
            }
        }
    }

    #[test]
    fn an_honest_count_is_loaded_as_it_is() {
        for count in [0, 239, 256, 1193, 4772, 11_932, u16::MAX] {
            let (mut pit, mut chip) = (Pit::default(), Chip::default());
            chip.control(pit.control(0x34));
            let [low, high] = count.to_le_bytes();
            for byte in [low, high] {
                let write = pit.count(byte);
                assert!(!write.is_raised);
                chip.carry_out(write);
            }
            assert_eq!(chip.count, count);
        }
        let mut pit = Pit::default();
        assert_eq!(pit.count(2), CountWrite::default());
        let raised = CountWrite {
            first: Some(239),
            second: Some(0),
            is_raised: true,
        };
        assert_eq!(pit.count(0), raised);
    }
}
