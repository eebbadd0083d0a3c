//! Request numbers and feature bits.

use std::fmt;
use std::ops::{BitAnd, BitOr};

/// Virtio and vhost feature bits (of GET_FEATURES) that the protocol itself looks at, as masks.
pub mod feature {
    /// VIRTIO_NET_F_MTU, bit 3, of network devices: the configuration space says the MTU.
    pub const NET_MTU: u64 = 1 << 3;
    /// VHOST_USER_F_PROTOCOL_FEATURES, bit 30: protocol features exist; once acknowledged, rings
    /// start disabled.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// VIRTIO_F_ACCESS_PLATFORM (also IOMMU_PLATFORM), bit 33: ring and buffer addresses are IOVAs.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// VIRTIO_F_RING_PACKED, bit 34.
    pub const RING_PACKED: u64 = 1 << 34;
}

macro_rules! request_ids {
    ($name:ident, $doc:literal, $($id:ident = $value:literal),* $(,)?) => {
        #[doc = $doc]
        ///
        /// Any number can be one: those without a name are answered as unknown.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u32);

        #[expect(missing_docs, reason = "the specification's names, in its order")]
        impl $name {
            $(pub const $id: Self = Self($value);)*

            /// The specification's name without its prefix.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($id)),)*
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "request {}", self.0),
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

request_ids! {
    RequestId, "Number of a request from the front end (section \"Front-end message types\").",
    GET_FEATURES = 1,
    SET_FEATURES = 2,
    SET_OWNER = 3,
    RESET_OWNER = 4,
    SET_MEM_TABLE = 5,
    SET_LOG_BASE = 6,
    SET_LOG_FD = 7,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10,
    GET_VRING_BASE = 11,
    SET_VRING_KICK = 12,
    SET_VRING_CALL = 13,
    SET_VRING_ERR = 14,
    GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18,
    SEND_RARP = 19,
    NET_SET_MTU = 20,
    SET_BACKEND_REQ_FD = 21,
    IOTLB_MSG = 22,
    SET_VRING_ENDIAN = 23,
    GET_CONFIG = 24,
    SET_CONFIG = 25,
    CREATE_CRYPTO_SESSION = 26,
    CLOSE_CRYPTO_SESSION = 27,
    POSTCOPY_ADVISE = 28,
    POSTCOPY_LISTEN = 29,
    POSTCOPY_END = 30,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32,
    GPU_SET_SOCKET = 33,
    RESET_DEVICE = 34,
    VRING_KICK = 35,
    GET_MAX_MEM_SLOTS = 36,
    ADD_MEM_REG = 37,
    REM_MEM_REG = 38,
    SET_STATUS = 39,
    GET_STATUS = 40,
}

request_ids! {
    BackendRequestId, "Number of a request from the back end (section \"Back-end message types\").",
    IOTLB_MSG = 1,
    CONFIG_CHANGE_MSG = 2,
    VRING_HOST_NOTIFIER_MSG = 3,
    VRING_CALL = 4,
    VRING_ERR = 5,
}

/// Protocol feature bits, as a set (section "Protocol features").
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct ProtocolFeatures(pub u64);

#[expect(missing_docs, reason = "the specification's names, in its order")]
impl ProtocolFeatures {
    pub const MQ: Self = Self(1 << 0);
    pub const LOG_SHMFD: Self = Self(1 << 1);
    pub const RARP: Self = Self(1 << 2);
    pub const REPLY_ACK: Self = Self(1 << 3);
    pub const MTU: Self = Self(1 << 4);
    pub const BACKEND_REQ: Self = Self(1 << 5);
    pub const CROSS_ENDIAN: Self = Self(1 << 6);
    pub const CRYPTO_SESSION: Self = Self(1 << 7);
    pub const PAGEFAULT: Self = Self(1 << 8);
    pub const CONFIG: Self = Self(1 << 9);
    pub const BACKEND_SEND_FD: Self = Self(1 << 10);
    pub const HOST_NOTIFIER: Self = Self(1 << 11);
    pub const INFLIGHT_SHMFD: Self = Self(1 << 12);
    pub const RESET_DEVICE: Self = Self(1 << 13);
    pub const INBAND_NOTIFICATIONS: Self = Self(1 << 14);
    pub const CONFIGURE_MEM_SLOTS: Self = Self(1 << 15);
    pub const STATUS: Self = Self(1 << 16);
    pub const XEN_MMAP: Self = Self(1 << 17);
    pub const SHARED_OBJECT: Self = Self(1 << 18);
    pub const DEVICE_STATE: Self = Self(1 << 19);

    /// No feature.
    pub const NONE: Self = Self(0);

    /// Whether every feature of `other` is in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The features of this set that `other` lacks.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl BitOr for ProtocolFeatures {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for ProtocolFeatures {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl fmt::Debug for ProtocolFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
