//! The MSI-X table of the function (PCI 3.0, §6.8.2), as the guest writes it.

/// Entries: the queue's, and that of changed configuration, if the driver uses them so.
pub const ENTRIES: usize = 2;
/// Bytes of an entry.
pub const ENTRY_LEN: usize = 16;
/// In an entry's control word.
const MASKED: u32 = 1;

/// Message control: the two bits that a driver writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// Messages are sent.
    pub is_on: bool,
    /// But none of any entry.
    pub is_masked: bool,
}

impl Control {
    /// The bits, in the word that begins with the capability's number.
    pub const BITS: u32 = Self::ON | Self::MASKED;
    const ON: u32 = 1 << 31;
    const MASKED: u32 = 1 << 30;

    /// The two bits of a word.
    #[must_use]
    pub const fn from_bits(word: u32) -> Self {
        Self {
            is_on: word & Self::ON != 0,
            is_masked: word & Self::MASKED != 0,
        }
    }

    /// Returns the bits of the word.
    #[must_use]
    pub const fn bits(self) -> u32 {
        let on = if self.is_on { Self::ON } else { 0 };
        let masked = if self.is_masked { Self::MASKED } else { 0 };
        on | masked
    }
}

/// An entry: address, upper address, data, control.
pub type Entry = [u32; 4];

/// An entry that sends nothing, as after a reset.
pub const NONE: Entry = [0, 0, 0, MASKED];

/// Entry `index` of a page that begins with the table.
#[must_use]
pub fn entry(page: &[u8], index: usize) -> Entry {
    [0, 4, 8, 12].map(|word| {
        let at = index * ENTRY_LEN + word;
        let bytes = page.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    })
}

/// Writes `entry` there.
pub fn put(page: &mut [u8], index: usize, entry: Entry) {
    let slots = page[index * ENTRY_LEN..].as_chunks_mut::<4>().0.iter_mut();
    for (slot, word) in slots.zip(entry) {
        *slot = word.to_le_bytes();
    }
}

/// Whether it sends a message under this control.
#[must_use]
pub const fn is_open(entry: Entry, control: Control) -> bool {
    control.is_on && !control.is_masked && entry[3] & MASKED == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_as_they_were_written_and_open_only_when_nothing_masks_them() {
        let mut page = [0; 64];
        let some = [0xfee0_1000, 0, 0x4041, 0];
        put(&mut page, 0, NONE);
        put(&mut page, 1, some);
        assert_eq!(page[16..20], [0x00, 0x10, 0xe0, 0xfe]);
        assert_eq!((entry(&page, 0), entry(&page, 1)), (NONE, some));
        let on = Control::from_bits(1 << 31);
        let masked = Control::from_bits(3 << 30);
        assert_eq!([on, masked].map(Control::bits), [1 << 31, 3 << 30]);
        assert!(is_open(some, on));
        assert!(!is_open(NONE, on));
        assert!(!is_open(some, masked) && !is_open(some, Control::default()));
    }
}
