//! Events of the session for the daemon, and the daemon's answers.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{Kick, Region, RequestError, RingBase, RingConfig, SharedFd};
use crate::wire::{ConfigAccess, Inflight, IotlbAccess, IotlbRange, Message, ProtocolFeatures};

/// Outcome of a message.
#[derive(Debug)]
pub enum Step {
    /// Done; the reply, where there is one, is to be sent.
    Done(Option<Message>),
    /// The daemon is to act, then to call [`Session::finish`](super::Session::finish).
    Event(Event),
    /// Refused, as this reply reports; the session goes on.
    Refused(RequestError, Message),
}

/// Something for the daemon to do. Each is answered by [`Answer::Done`] unless it says otherwise.
#[derive(Clone, Debug)]
pub enum Event {
    /// SET_OWNER: a session starts.
    Owner,
    /// RESET_OWNER, read as the specification recommends: all rings are disabled (where bit 30 was
    /// acknowledged; otherwise nothing changes and there is no event).
    RingsDisabled,
    /// SET_FEATURES: the front end acknowledged these (bit 30 among them or not). Clients send it
    /// twice.
    Features(u64),
    /// SET_PROTOCOL_FEATURES.
    ProtocolFeatures(ProtocolFeatures),
    /// The guest's memory is now this: sorted by guest address, free of overlaps, perhaps empty. A
    /// region that stays has the descriptor (the same `Arc`) it had. Rings may be running.
    Memory(Arc<[Region]>),
    /// A ring starts. Look at it as if it had been kicked.
    RingStarted(RingConfig),
    /// A ring stops: drain it, then answer [`Answer::RingStopped`] with where it stands.
    RingStopped(u8),
    /// SET_VRING_ENABLE on a running ring. Enabled, look at it as if it had been kicked.
    RingEnabled(u8, bool),
    /// The kick of a running ring is replaced. Look at it as if it had been kicked.
    KickReplaced(u8, Kick),
    /// The call descriptor of a running ring is replaced; `None` means that the guest polls.
    CallReplaced(u8, Option<SharedFd>),
    /// The error descriptor of a running ring is replaced.
    ErrReplaced(u8, Option<SharedFd>),
    /// A socket for requests of ours ([`BackendRequest`](crate::wire::BackendRequest)).
    BackendChannel(SharedFd),
    /// A new IOTLB entry; its user addresses are inside memory regions.
    IotlbUpdate {
        /// IOVAs.
        range: IotlbRange,
        /// User address of the first.
        user_addr: u64,
        /// Access that is allowed.
        access: IotlbAccess,
    },
    /// IOTLB entries are invalidated: finish when no access uses them any more.
    IotlbInvalidate(IotlbRange),
    /// Configuration space is read: answer [`Answer::Config`] with exactly that many bytes.
    ConfigRead(ConfigAccess),
    /// Configuration space is written. Only migration may write read-only fields.
    ConfigWrite(ConfigAccess, Vec<u8>),
    /// An inflight region is asked for: answer [`Answer::Inflight`].
    InflightWanted(Inflight),
    /// An inflight region comes back from before a crash (or from an earlier
    /// [`Event::InflightWanted`]).
    InflightGiven(Inflight, SharedFd),
    /// SEND_RARP: announce this address to the network, as a reverse ARP request from it does.
    Announce([u8; 6]),
    /// NET_SET_MTU: the guest's MTU; refuse one that the network does not carry.
    Mtu(u64),
    /// RESET_DEVICE: all rings are stopped, disabled and without description; the device forgets
    /// its state. Memory, protocol features, call and err descriptors stay.
    Reset,
}

/// Successful result of an event.
#[derive(Debug)]
pub enum Answer {
    /// Done as asked.
    Done,
    /// To [`Event::RingStopped`]: where the ring goes on if it is started again.
    RingStopped(RingBase),
    /// To [`Event::ConfigRead`].
    Config(Vec<u8>),
    /// To [`Event::InflightWanted`].
    Inflight {
        /// The region's file.
        fd: OwnedFd,
        /// Bytes of the region.
        mmap_size: u64,
        /// Its offset in the file, in bytes.
        mmap_offset: u64,
    },
}
