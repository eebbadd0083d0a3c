//! Reports of the ports for a window.

use crate::account::Counts;
use crate::hist::Histogram;

/// Report of one port for a window.
#[derive(Clone, Debug, Default)]
pub struct PortReport {
    /// Frames received per second: whole, of the expected length, each once.
    pub received_per_s: f64,
    /// Bytes of them.
    pub bytes_per_s: f64,
    /// Frames per second whose buffers the server returned: what it took from this port.
    pub taken_per_s: f64,
    /// Nanoseconds from there to back, where latencies are taken.
    pub latency: Histogram,
    /// Nanoseconds between two visits to the port, where latencies are taken: a frame that has come
    /// waits up to so long for this client.
    pub looks: Histogram,
    /// Counts of wrong frames among those received.
    pub wrong: Wrong,
    /// Frames whose bytes were all checked.
    pub checked: u64,
    /// Frames of other origin, where stamped ones are expected.
    pub foreign: u64,
    /// Frames that the server took in the whole window.
    pub taken: u64,
    /// Counts of the frames sent from here and of their arrival; of a port whose frames arrive.
    pub counts: Counts,
    /// Kicks written.
    pub kicks: u64,
    /// Calls read.
    pub calls: u64,
}

/// Frames received that are not as sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wrong {
    /// A length or a number of buffers that cannot be.
    pub malformed: u64,
    /// Another length than was sent.
    pub length: u64,
    /// A sum that does not hold.
    pub corrupt: u64,
    /// The number of a queue, or of a frame, that was never sent.
    pub forged: u64,
    /// A number that came before.
    pub duplicate: u64,
}

impl Wrong {
    /// All of them.
    pub const fn total(&self) -> u64 {
        self.malformed + self.length + self.corrupt + self.forged + self.duplicate
    }
}

/// Report of all ports for a window.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Measured.
    pub seconds: f64,
    /// Port by port.
    pub ports: Vec<PortReport>,
    /// Processor time of the server per second, where its process is known.
    pub server_cpu: Option<f64>,
}

impl Report {
    /// A sum over ports.
    pub fn sum(&self, of: impl Fn(&PortReport) -> f64) -> f64 {
        self.ports.iter().map(of).sum()
    }

    /// Frames sent that did not arrive.
    pub fn lost(&self) -> u64 {
        self.ports.iter().map(|port| port.counts.lost()).sum()
    }

    /// Frames that are not as sent.
    pub fn wrong(&self) -> u64 {
        self.ports.iter().map(|port| port.wrong.total()).sum()
    }
}
