//! Interrupts of a device: which there are, and the call that hands their eventfds over.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};

use zerocopy::IntoBytes;

use crate::uapi::{
    IRQ_AUTOMASKED, IRQ_EVENTFD, IRQ_MASKABLE, IRQ_NORESIZE, IrqInfo, IrqSet, SET_ACTION_TRIGGER,
    SET_ACTION_UNMASK, SET_DATA_EVENTFD, SET_DATA_NONE, Sized32,
};

/// Kind of interrupt of a PCI function: `VFIO_PCI_*_IRQ_INDEX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum IrqIndex {
    /// The interrupt pin.
    Intx = 0,
    /// MSI.
    Msi = 1,
    /// MSI-X.
    Msix = 2,
    /// An error of the PCI Express link or the function that was reported by AER.
    Err = 3,
    /// The host wants the device back.
    Req = 4,
}

impl fmt::Display for IrqIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Intx => "INTx",
            Self::Msi => "MSI",
            Self::Msix => "MSI-X",
            Self::Err => "the error interrupt",
            Self::Req => "the request interrupt",
        })
    }
}

/// Interrupts of one [`IrqIndex`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Irq {
    /// Vectors; 0 where the function has none of this kind.
    pub count: u32,
    /// They can signal eventfds.
    pub can_eventfd: bool,
    /// They can be masked and unmasked.
    pub can_mask: bool,
    /// Each is masked by the kernel when it has signalled, until
    /// [`Device::unmask`](crate::Device::unmask).
    pub auto_masked: bool,
    /// Vectors cannot be added while some are on: all eventfds are handed over in one call, or all
    /// vectors are turned off before.
    pub no_resize: bool,
}

impl From<IrqInfo> for Irq {
    fn from(info: IrqInfo) -> Self {
        let has = |bit| info.flags & bit != 0;
        Self {
            count: info.count,
            can_eventfd: has(IRQ_EVENTFD),
            can_mask: has(IRQ_MASKABLE),
            auto_masked: has(IRQ_AUTOMASKED),
            no_resize: has(IRQ_NORESIZE),
        }
    }
}

/// The argument that has vector *n* signal `fds[n]`, or turns the index off where there are none.
/// Its first word, the length, is written with the call.
pub fn argument(index: IrqIndex, fds: &[Option<BorrowedFd<'_>>]) -> Vec<u8> {
    let data = if fds.is_empty() {
        SET_DATA_NONE
    } else {
        SET_DATA_EVENTFD
    };
    let fds = fds.iter();
    let fds: Vec<i32> = fds.map(|fd| fd.map_or(-1, |fd| fd.as_raw_fd())).collect();
    let head = IrqSet {
        flags: data | SET_ACTION_TRIGGER,
        index: index as u32,
        // More than 2^32 vectors are more than any index has, which the kernel refuses.
        count: u32::try_from(fds.len()).unwrap_or(u32::MAX),
        ..IrqSet::zeroed()
    };
    [head.as_bytes(), fds.as_bytes()].concat()
}

/// The argument that unmasks the first vector of an index.
pub fn unmask(index: IrqIndex) -> Vec<u8> {
    let head = IrqSet {
        flags: SET_DATA_NONE | SET_ACTION_UNMASK,
        index: index as u32,
        count: 1,
        ..IrqSet::zeroed()
    };
    Vec::from(head.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn words(bytes: &[u8]) -> Vec<u32> {
        let (words, rest) = bytes.as_chunks();
        assert_eq!(rest, []);
        words.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    /// `linux/vfio.h`: argsz, flags (EVENTFD is bit 2, TRIGGER bit 5), index, start, count,
    /// descriptors.
    #[test]
    fn all_eventfds_of_an_index_go_in_one_argument() {
        let file = tempfile::tempfile().expect("a file");
        let fd = file.as_raw_fd() as u32;
        let fds = [Some(file.as_fd()), None, Some(file.as_fd())];
        let none = u32::MAX;
        for (index, number) in [
            (IrqIndex::Intx, 0),
            (IrqIndex::Msi, 1),
            (IrqIndex::Msix, 2),
            (IrqIndex::Err, 3),
            (IrqIndex::Req, 4),
        ] {
            let bytes = argument(index, &fds);
            assert_eq!(words(&bytes)[1..], [0x24, number, 0, 3, fd, none, fd]);
        }
    }

    /// DATA_NONE and TRIGGER with a count of 0.
    #[test]
    fn no_eventfds_turn_the_index_off() {
        assert_eq!(words(&argument(IrqIndex::Msix, &[])), [20, 0x21, 2, 0, 0]);
    }

    #[test]
    fn one_vector_is_unmasked() {
        assert_eq!(words(&unmask(IrqIndex::Intx)), [20, 0x11, 0, 0, 1]);
    }

    /// MSI-X of QEMU's NVMe drive (65 vectors, eventfds, NORESIZE), and an INTx.
    #[test]
    fn flags_of_an_index_are_read() {
        let of = |flags, count| {
            let head = IrqInfo::zeroed();
            Irq::from(IrqInfo {
                flags,
                count,
                ..head
            })
        };
        let msix = Irq {
            count: 65,
            can_eventfd: true,
            can_mask: false,
            auto_masked: false,
            no_resize: true,
        };
        assert_eq!(of(0b1001, 65), msix);
        let intx = Irq {
            count: 1,
            can_eventfd: true,
            can_mask: true,
            auto_masked: true,
            no_resize: false,
        };
        assert_eq!(of(0b0111, 1), intx);
    }
}
