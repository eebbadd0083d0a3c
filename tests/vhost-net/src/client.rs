//! A front end: one network device of one back end, from the first message to running rings.
//!
//! Messages and their order are [`vhost_user::frontend`]'s. All receive buffers are posted before
//! the rings start.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vhost_client::link::{self, Link, LinkError, Wanted};
use vhost_user::frontend::{CallError, Connection};
use vhost_user::wire::{ProtocolFeatures, feature as vhost_feature};

use crate::frame::{HEADER_LEN, MAX_FRAME};
use crate::layout::Layout;
use crate::memory::Memory;
use crate::queue::{Pair, Receive, Transmit};
use crate::ring::feature as ring_feature;

/// Feature bits of the network device (virtio 1.2 §5.1.3), as masks.
pub mod feature {
    /// VIRTIO_NET_F_CSUM: the device completes checksums.
    pub const CSUM: u64 = 1 << 0;
    /// VIRTIO_NET_F_GUEST_CSUM: the driver completes checksums.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// VIRTIO_NET_F_GUEST_TSO4: the driver takes unsegmented TCP over IPv4.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// VIRTIO_NET_F_HOST_TSO4: the device segments TCP over IPv4.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// VIRTIO_NET_F_MRG_RXBUF: a frame may take several receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// VIRTIO_NET_F_CTRL_VQ: the control queue, on which MQ rests.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// VIRTIO_NET_F_MQ: several pairs.
    pub const MQ: u64 = 1 << 22;
}

/// Options of a client; of features it gets those that the back end offers.
#[derive(Clone, Debug)]
pub struct Options {
    /// Virtio features to take where offered.
    pub features: u64,
    /// Those without which it is no use to go on.
    pub required: u64,
    /// Protocol features to take where offered.
    pub protocol: ProtocolFeatures,
    /// Queue pairs.
    pub pairs: u16,
    /// Entries per ring.
    pub ring_size: u16,
    /// Bytes of a receive buffer, with the header.
    pub buffer_len: u32,
    /// Bytes of the longest frame to send.
    pub max_frame: u32,
    /// Time to wait for a listener, and for each reply.
    pub timeout: Duration,
}

impl Options {
    /// One pair, split rings of 256 entries, mergeable receive buffers each of which takes a frame
    /// of 1,518 bytes.
    pub fn new() -> Self {
        Self {
            features: ring_feature::VERSION_1
                | vhost_feature::PROTOCOL_FEATURES
                | feature::MRG_RXBUF,
            required: ring_feature::VERSION_1,
            protocol: ProtocolFeatures::MQ | ProtocolFeatures::REPLY_ACK,
            pairs: 1,
            ring_size: 256,
            buffer_len: HEADER_LEN + MAX_FRAME,
            max_frame: MAX_FRAME,
            timeout: Duration::from_secs(5),
        }
    }

    /// Takes these features, and refuses a back end that does not offer them.
    #[must_use]
    pub const fn require(mut self, features: u64) -> Self {
        self.features |= features;
        self.required |= features;
        self
    }

    /// Leaves these features alone.
    #[must_use]
    pub const fn without(mut self, features: u64) -> Self {
        self.features &= !features;
        self
    }

    /// So many pairs.
    #[must_use]
    pub const fn pairs(mut self, pairs: u16) -> Self {
        self.pairs = pairs;
        match pairs {
            1 => self,
            _ => self.require(feature::MQ | feature::CTRL_VQ),
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

/// Reason why a client does not work.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ClientError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("cannot make the guest's memory or eventfds")]
    Memory(#[source] io::Error),
    #[error("the back end has {there} queue pairs, not {wanted}")]
    Pairs { there: u64, wanted: u16 },
}

/// A network device, connected.
#[derive(Debug)]
pub struct Client {
    pub(crate) path: PathBuf,
    connection: Connection,
    features: u64,
    pub(crate) memory: Memory,
    pub(crate) layout: Layout,
    pub(crate) pairs: Vec<Pair>,
}

impl Client {
    /// Connects, negotiates, shares memory and starts the rings, calls off.
    ///
    /// # Errors
    /// There is no listener, or the back end refused or broke off.
    pub fn connect(path: &Path, options: &Options) -> Result<Self, ClientError> {
        let Link {
            connection,
            features,
            queues,
            ..
        } = Link::open(
            path,
            &Wanted {
                features: options.features,
                protocol: options.protocol,
                required: (options.required, ProtocolFeatures::NONE),
                timeout: options.timeout,
            },
        )?;
        if queues < options.pairs.into() {
            let (there, wanted) = (queues, options.pairs);
            return Err(ClientError::Pairs { there, wanted });
        }
        let is_packed = features & ring_feature::PACKED != 0;
        let is_mergeable = features & feature::MRG_RXBUF != 0;
        let room = options.max_frame.max(options.buffer_len - HEADER_LEN);
        let layout = Layout::new(2 * options.pairs, options.ring_size, room, is_packed);
        let memory = Memory::create(layout.len()).map_err(ClientError::Memory)?;
        let pair = |pair: u16| {
            let buffer_len = options.buffer_len;
            let mut receive = Receive::new(2 * pair, &layout, features, buffer_len, is_mergeable)?;
            receive.post_all(&memory, &layout);
            let transmit = Transmit::new(2 * pair + 1, &layout, features)?;
            Ok(Pair { receive, transmit })
        };
        let pairs = (0..options.pairs)
            .map(pair)
            .collect::<Result<Vec<_>, rustix::io::Errno>>()
            .map_err(|errno| ClientError::Memory(errno.into()))?;
        let mut client = Self {
            path: path.to_owned(),
            connection,
            features,
            memory,
            layout,
            pairs,
        };
        client.start()?;
        Ok(client)
    }

    fn start(&mut self) -> Result<(), ClientError> {
        self.connection.set_features(self.features)?;
        let regions = self.layout.regions();
        self.connection.share_memory(&regions, self.memory.file())?;
        for pair in &mut self.pairs {
            pair.disarm(&self.memory);
        }
        let areas = self.layout.areas();
        let rings: Vec<_> = self
            .pairs
            .iter()
            .flat_map(Pair::rings)
            .map(|(index, notifiers)| areas.described(index, base(self.features), notifiers))
            .collect();
        Ok(self.connection.start_rings(&rings)?)
    }

    /// Features acknowledged.
    pub const fn features(&self) -> u64 {
        self.features
    }

    /// The path connected to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the back end closed the connection.
    pub fn is_hung_up(&self) -> bool {
        link::is_hung_up(&self.connection)
    }

    /// Stops the rings as a guest that shuts down does.
    ///
    /// # Errors
    /// The back end broke off.
    pub fn stop(&mut self) -> Result<(), ClientError> {
        for index in 0..2 * self.pairs.len() as u32 {
            self.connection.stop_ring(index)?;
        }
        Ok(())
    }
}

/// SET_VRING_BASE's number for a fresh ring.
const fn base(features: u64) -> u32 {
    match features & ring_feature::PACKED {
        0 => 0,
        _ => 0x8000_8000,
    }
}
