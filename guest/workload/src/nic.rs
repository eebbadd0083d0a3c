//! Counters of a network interface, as the guest's kernel has them: frames, bytes, and interrupts.
//!
//! Frames and bytes are `/sys/class/net/NAME/statistics`, interrupts the lines of
//! `/proc/interrupts` that bear the name of the interface's virtio device (`virtio1-input.0`,
//! `virtio1-output.0`). Linux's driver counts a frame that it sends when its buffer comes back, so
//! that the frames of a window may be those of a ring's length before.

use std::fs;
use std::io;
use std::path::Path;

/// Value of all counters since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NicCounts {
    /// Frames sent. One with segmentation offload is one.
    pub frames_out: u64,
    /// Frames received.
    pub frames_in: u64,
    /// Bytes sent, Ethernet headers among them.
    pub bytes_out: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Interrupts of its queues that a processor has taken.
    pub interrupts: u64,
}

impl NicCounts {
    /// Reads the counts of this interface.
    ///
    /// # Errors
    /// There is no such interface (`NotFound`), it is no virtio device, or a count is no number
    /// (`InvalidData`).
    pub fn read(interface: &str) -> io::Result<Self> {
        let folder = Path::new("/sys/class/net").join(interface);
        let count = |name: &str| -> io::Result<u64> {
            let text = fs::read_to_string(folder.join("statistics").join(name))?;
            let text = text.trim();
            text.parse()
                .map_err(|_| invalid(format!("{name}: {text:?}")))
        };
        let device = fs::read_link(folder.join("device"))?;
        let device = device.file_name().and_then(|name| name.to_str());
        let device = device.ok_or_else(|| invalid(format!("{interface} has no device")))?;
        let interrupts = fs::read_to_string("/proc/interrupts")?;
        Ok(Self {
            frames_out: count("tx_packets")?,
            frames_in: count("rx_packets")?,
            bytes_out: count("tx_bytes")?,
            bytes_in: count("rx_bytes")?,
            interrupts: interrupts_of(&interrupts, device),
        })
    }

    /// Returns the difference to `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            frames_out: self.frames_out - earlier.frames_out,
            frames_in: self.frames_in - earlier.frames_in,
            bytes_out: self.bytes_out - earlier.bytes_out,
            bytes_in: self.bytes_in - earlier.bytes_in,
            interrupts: self.interrupts - earlier.interrupts,
        }
    }

    /// Returns the counts as `key=value`, in one line.
    #[must_use]
    pub fn line(&self) -> String {
        let Self {
            frames_out,
            frames_in,
            bytes_out,
            bytes_in,
            interrupts,
        } = self;
        format!(
            "frames_out={frames_out} frames_in={frames_in} bytes_out={bytes_out} \
             bytes_in={bytes_in} interrupts={interrupts}"
        )
    }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Returns the interrupts of the queues of virtio device `device` in the text of
/// `/proc/interrupts`, of all processors. Configuration changes (`virtio1-config`) are not counted:
/// they are not a queue's.
fn interrupts_of(text: &str, device: &str) -> u64 {
    let is_of_a_queue = |name: &str| {
        let of = name
            .strip_prefix(device)
            .and_then(|rest| rest.strip_prefix('-'));
        of.is_some_and(|of| of.starts_with("input.") || of.starts_with("output."))
    };
    let lines = text
        .lines()
        .filter(|line| line.split_whitespace().last().is_some_and(is_of_a_queue));
    // A line: the number and a colon, a count for each processor, the names of chip, vector and
    // queue.
    let counts = lines.flat_map(|line| {
        let words = line.split_whitespace().skip(1);
        words.map_while(|word| word.parse::<u64>().ok())
    });
    counts.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_those_of_the_devices_queues_on_all_processors() {
        let text = "           CPU0       CPU1       \n\
                    \x20 1:          9          0   IO-APIC    1-edge      i8042\n\
                    \x2024:          1          0   PCI-MSI 49152-edge      virtio1-config\n\
                    \x2025:         10         20   PCI-MSI 49153-edge      virtio1-input.0\n\
                    \x2026:          3          4   PCI-MSI 49154-edge      virtio1-output.0\n\
                    \x2027:        100        100   PCI-MSI 65537-edge      virtio11-input.0\n\
                    \x2028:        100        100   PCI-MSI 65538-edge      virtio1-req.0\n\
                    NMI:          7          7   Non-maskable interrupts\n";
        assert_eq!(interrupts_of(text, "virtio1"), 37);
        assert_eq!(interrupts_of(text, "virtio11"), 200);
        assert_eq!(interrupts_of(text, "virtio2"), 0);
    }

    #[test]
    fn an_interface_that_is_not_there_or_is_none_of_virtio_is_an_error() {
        let error = NicCounts::read("nosuchinterface").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(NicCounts::read("lo").is_err());
    }

    #[test]
    fn a_window_is_the_difference_and_its_line_names_every_count() {
        let at = |n: u64| NicCounts {
            frames_out: n,
            frames_in: 2 * n,
            bytes_out: 3 * n,
            bytes_in: 4 * n,
            interrupts: 5 * n,
        };
        assert_eq!(at(7).since(&at(5)), at(2));
        let line = "frames_out=1 frames_in=2 bytes_out=3 bytes_in=4 interrupts=5";
        assert_eq!(at(1).line(), line);
    }
}
