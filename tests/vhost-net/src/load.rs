//! Ports and their loads.

use std::path::{Path, PathBuf};

use crate::client::Options;
use crate::frame::{self, MIN_FRAME, Mac};

/// Times at which frames are sent, by each pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// Never.
    Silent,
    /// Bursts, whenever the ring has room.
    Flood,
    /// Whenever fewer than so many are under way, of a port whose frames arrive; 1: there and back,
    /// one at a time.
    Window(u64),
    /// So many per second, at equal distances.
    Rate(f64),
}

/// Content of the frames that are sent.
#[derive(Clone, Debug)]
pub enum Content {
    /// Stamped frames of so many bytes, at least [`MIN_FRAME`].
    Stamped(u32),
    /// The same header and frame each time.
    Fixed {
        /// `struct virtio_net_hdr`.
        header: [u8; 12],
        /// From the destination address on.
        frame: Vec<u8>,
    },
}

/// Frames that a port receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Stamped frames of any port of the driver; others are counted as foreign.
    Stamped,
    /// Frames of so many bytes that the server makes.
    Made(u32),
}

/// One port and its load.
#[derive(Clone, Debug)]
pub struct PortSpec {
    /// Socket of its server.
    pub socket: PathBuf,
    /// Features to take of its offer, and sizes.
    pub options: Options,
    /// Times at which frames are sent.
    pub load: Load,
    /// Content of the frames that are sent.
    pub content: Content,
    /// Destination and source.
    pub addresses: (Mac, Mac),
    /// Whether what is sent arrives at a port of the driver.
    pub arrives: bool,
    /// Frames that are received.
    pub expected: Expected,
}

impl PortSpec {
    /// A port that sends stamped frames to itself, by a server that returns them.
    pub fn looped(socket: &Path, options: Options, load: Load, frame_len: u32) -> Self {
        Self {
            socket: socket.to_owned(),
            options,
            load,
            content: Content::Stamped(frame_len),
            addresses: (frame::mac(1), frame::mac(0)),
            arrives: true,
            expected: Expected::Stamped,
        }
    }

    /// A port that sends stamped frames to a server that discards them.
    pub fn to_sink(socket: &Path, options: Options, load: Load, frame_len: u32) -> Self {
        Self {
            arrives: false,
            ..Self::looped(socket, options, load, frame_len)
        }
    }

    /// A port that receives frames of so many bytes from a server that makes them.
    pub fn from_source(socket: &Path, options: Options, frame_len: u32) -> Self {
        Self {
            expected: Expected::Made(frame_len),
            ..Self::to_sink(socket, options, Load::Silent, MIN_FRAME)
        }
    }
}
