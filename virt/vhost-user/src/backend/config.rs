//! Configuration of a session: the features and limits that a device offers.

use crate::wire::{ProtocolFeatures, feature};

/// Rings one session may have: their index has eight bits where it matters.
pub const MAX_QUEUES: u16 = 256;

/// Entries a ring may have (virtio 1.2 §2.7, §2.8).
pub const MAX_RING_SIZE: u16 = 32768;

/// Protocol features this crate knows how to serve.
pub const SUPPORTED: ProtocolFeatures = ProtocolFeatures(
    ProtocolFeatures::MQ.0
        | ProtocolFeatures::RARP.0
        | ProtocolFeatures::REPLY_ACK.0
        | ProtocolFeatures::MTU.0
        | ProtocolFeatures::BACKEND_REQ.0
        | ProtocolFeatures::CONFIG.0
        | ProtocolFeatures::INFLIGHT_SHMFD.0
        | ProtocolFeatures::RESET_DEVICE.0
        | ProtocolFeatures::CONFIGURE_MEM_SLOTS.0,
);

/// Features and limits of a session; chosen by the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Virtio (and vhost) feature bits offered. Bit 30 is added where `protocol` is not empty; bit
    /// 33 (ACCESS_PLATFORM) is offered from when REPLY_ACK and BACKEND_REQ were acknowledged on.
    pub features: u64,
    /// Protocol features offered, a subset of [`SUPPORTED`].
    pub protocol: ProtocolFeatures,
    /// Rings, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Rings that GET_QUEUE_NUM counts as one, at least 1: 2 for network devices, whose front ends
    /// count pairs. A ring left over, as their control queue, is not counted.
    pub rings_per_queue: u16,
    /// Entries a ring may have, 1 to [`MAX_RING_SIZE`].
    pub max_ring_size: u16,
    /// Memory regions accepted, at least 1. Each keeps a descriptor open.
    pub max_regions: usize,
}

/// A configuration that cannot be served: an error of ours, not of a front end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Protocol features without an implementation here.
    #[error("protocol features {0:?} are not implemented")]
    Protocol(ProtocolFeatures),
    /// A number outside its range.
    #[error("{field} is {value}")]
    Range {
        /// Which.
        field: &'static str,
        /// Its value.
        value: usize,
    },
}

impl Config {
    pub(super) fn check(mut self) -> Result<Self, ConfigError> {
        let unknown = self.protocol.without(SUPPORTED);
        if !unknown.is_empty() {
            return Err(ConfigError::Protocol(unknown));
        }
        let range = |field, value: usize, max: usize| match value {
            value if (1..=max).contains(&value) => Ok(()),
            value => Err(ConfigError::Range { field, value }),
        };
        range("queues", self.queues.into(), MAX_QUEUES.into())?;
        range(
            "rings_per_queue",
            self.rings_per_queue.into(),
            self.queues.into(),
        )?;
        range(
            "max_ring_size",
            self.max_ring_size.into(),
            MAX_RING_SIZE.into(),
        )?;
        range("max_regions", self.max_regions, usize::MAX)?;
        self.features &= !feature::PROTOCOL_FEATURES;
        if !self.protocol.is_empty() {
            self.features |= feature::PROTOCOL_FEATURES;
        }
        Ok(self)
    }
}
