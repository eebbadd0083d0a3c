//! Reports of all ports for a measured window.

use crate::account::Counts;
use crate::hist::Histogram;

/// Report of one port for a window.
#[derive(Clone, Debug, Default)]
pub struct PortReport {
    /// Frames received per second that are complete, of the expected length, and not duplicates.
    pub received_per_s: f64,
    /// Bytes of these frames per second.
    pub bytes_per_s: f64,
    /// Frames per second whose buffers the server has returned: those that it took from this port.
    pub taken_per_s: f64,
    /// Round-trip times in nanoseconds, if latencies are measured.
    pub latency: Histogram,
    /// Nanoseconds between two polls of the port, if latencies are measured: a received frame may
    /// wait this long for the client.
    pub looks: Histogram,
    /// Counts of wrong frames among those received.
    pub wrong: Wrong,
    /// Number of frames whose bytes were all checked.
    pub checked: u64,
    /// Number of frames of other origin, where stamped ones are expected.
    pub foreign: u64,
    /// Number of frames that the server took in the whole window.
    pub taken: u64,
    /// Counts of frames sent by this port and of their arrival, if its frames are expected to
    /// arrive.
    pub counts: Counts,
    /// Number of kicks written.
    pub kicks: u64,
    /// Number of calls read.
    pub calls: u64,
}

/// Counts of received frames that differ from those sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wrong {
    /// Impossible length or number of buffers.
    pub malformed: u64,
    /// Another length than the frame was sent with.
    pub length: u64,
    /// Wrong checksum.
    pub corrupt: u64,
    /// Number of a queue, or of a frame, that was never sent.
    pub forged: u64,
    /// Number of a frame that was received before.
    pub duplicate: u64,
}

impl Wrong {
    /// Returns the sum of all counts.
    pub const fn total(&self) -> u64 {
        self.malformed + self.length + self.corrupt + self.forged + self.duplicate
    }
}

/// Report of all ports for a window.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Duration of the window in seconds.
    pub seconds: f64,
    /// Reports of the ports.
    pub ports: Vec<PortReport>,
    /// Processor time of the server in seconds per second, if its process is known.
    pub server_cpu: Option<f64>,
}

impl Report {
    /// Returns the sum of a value over all ports.
    pub fn sum(&self, of: impl Fn(&PortReport) -> f64) -> f64 {
        self.ports.iter().map(of).sum()
    }

    /// Returns the number of frames sent that did not arrive.
    pub fn lost(&self) -> u64 {
        self.ports.iter().map(|port| port.counts.lost()).sum()
    }

    /// Returns the number of wrong frames.
    pub fn wrong(&self) -> u64 {
        self.ports.iter().map(|port| port.wrong.total()).sum()
    }
}
