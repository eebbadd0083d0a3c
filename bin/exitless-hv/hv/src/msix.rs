//! The assigned device's message table: the guest sees a copy of its page, and what it writes there
//! goes to the device when it has been checked.

use bare::pci;
use eli::policy::Message;

use crate::memory::{self, PAGE, Page};

/// Class codes of what is assigned: the first NVMe controller.
const CLASS_NVME: u32 = 0x01_0802;
const ENTRIES_MAX: usize = (PAGE / 16) as usize;

/// A device's table.
#[derive(Clone, Copy)]
pub struct Msix {
    /// Bus << 8 | device << 3 | function.
    pub function: u16,
    /// The page that it is in.
    pub page: u64,
    /// Bytes before it in there.
    offset: usize,
    entries: usize,
}

/// Reason why no device is assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// There is none of the class.
    NoDevice,
    /// It has no MSI-X.
    NoMsix,
    /// Its table is not in memory below 512 GiB, or longer than its page.
    Place,
    /// Its pending bits, or its registers, are in the same page.
    Shared,
}

impl core::fmt::Display for Unfit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::NoDevice => "there is no NVMe controller",
            Self::NoMsix => "the NVMe controller has no MSI-X",
            Self::Place => "its MSI-X table is longer than a page, or not mapped",
            Self::Shared => {
                "its MSI-X table shares its page with its registers or its pending bits"
            }
        })
    }
}

/// An entry, as four words: address, upper address, data, control.
pub type Entry = [u32; 4];

/// In an entry's control word.
pub const MASKED: u32 = 1;

/// An entry that sends nothing.
pub const NONE: Entry = [0, 0, 0, MASKED];

/// Returns the entry that sends a message.
pub fn entry(message: Message) -> Entry {
    let Message { address, data } = message;
    [address as u32, (address >> 32) as u32, data, 0]
}

/// Returns the message of an entry.
pub fn message(entry: Entry) -> Message {
    Message {
        address: u64::from(entry[1]) << 32 | u64::from(entry[0]),
        data: entry[2],
    }
}

impl Msix {
    /// Finds that of the first controller on bus 0.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn find() -> Result<Self, Unfit> {
        let function = pci::find(0..256, CLASS_NVME).ok_or(Unfit::NoDevice)?;
        let at = pci::capability(function, pci::MSIX).ok_or(Unfit::NoMsix)?;
        let entries = (pci::read(function, at) >> 16 & 0x7ff) as usize + 1;
        let place = |register| {
            let word = pci::read(function, register);
            let bar = pci::memory(function, word as u8 & 7).ok_or(Unfit::Place)?;
            Ok((bar, bar + u64::from(word & !7)))
        };
        let (registers, start) = place(at + 4)?;
        let (_, bits) = place(at + 8)?;
        let (page, offset) = (start & !(PAGE - 1), (start % PAGE) as usize);
        if entries > ENTRIES_MAX - offset / 16 || start >= memory::MAPPED {
            return Err(Unfit::Place);
        }
        // Registers begin at the BAR's start. What else is behind the table is not known; NVMe has
        // its doorbells in front of it.
        if bits & !(PAGE - 1) == page || registers == page {
            return Err(Unfit::Shared);
        }
        Ok(Self {
            function,
            page,
            offset,
            entries,
        })
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries
    }

    /// Returns the guest's view of an entry, in its copy of the page. It may write there meanwhile.
    pub fn entry(&self, copy: &Page, index: usize) -> Entry {
        [0, 4, 8, 12].map(|word| {
            let at = self.offset + index * 16 + word;
            // SAFETY: of the page, and aligned; volatile, since another processor of the guest's
            // may write there.
            unsafe { memory::read32(copy.address() + at as u64) }
        })
    }

    /// Copies the guest's view, as the device has it now.
    pub fn copy(&self, copy: &mut Page) {
        for (word, slot) in copy.0.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            // SAFETY: the page has the table, and reading it changes nothing.
            *slot = unsafe { memory::read32(self.page + word as u64 * 4) }.to_le_bytes();
        }
    }

    /// Gives the device an entry: masked, changed, and then as it is to be.
    pub fn write(&self, index: usize, entry: Entry) {
        let at = self.page + (self.offset + index * 16) as u64;
        let [address, upper, data, control] = entry;
        for (offset, value) in [
            (12, control | MASKED),
            (0, address),
            (4, upper),
            (8, data),
            (12, control),
        ] {
            // SAFETY: it is an entry of the table, and policy has seen what it holds.
            unsafe { memory::write32(at + offset, value) }
        }
    }
}
