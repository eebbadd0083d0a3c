//! Forwarding decisions of an Ethernet switch (IEEE 802.1Q-2018, in the sections named below): the
//! ports that a frame goes to, and the VLAN tag that it has there.
//!
//! It reads the first 18 bytes of a frame and a time, accesses neither guest memory nor queues,
//! makes no system call, and is owned by one thread:
//! ```text
//! frame's head, port, time ─ forward ─▶ Forward { ports, one Retag for each } │ DropReason, counted for the port
//! ```
//! Checks, in their order:
//! - **Address** (8.8.8): a source that is a group's, or zero, is dropped; so is a link-local
//!   destination (01-80-c2-00-00-0x).
//! - **VLAN** ([`VlanMode`]): an access port has one VLAN and accepts no other tag; a trunk accepts
//!   the tags it is allowed, and untagged frames if it has a native VLAN. A frame with a priority
//!   tag (VID 0) counts as untagged. Only 802.1Q tags are parsed: an 802.1ad frame counts as
//!   untagged.
//! - **Binding**: a port with bound addresses sends from these only, and no other port sends from
//!   them.
//! - **Learning** (8.7): an address is known at the port that used it last, for
//!   [`SwitchConfig::ageing_ns`]. It moves to another port once it has been quiet for
//!   [`SwitchConfig::move_hold_ns`], or its port's link went down.
//! - **Flooding** (8.8.1): a frame to a group address, or to one that is not known, goes to all
//!   other ports of the VLAN, within the rates of the port it came from ([`FloodLimits`]).
//! - **Isolation**: an isolated port reaches only ports that are not.
//!
//! **Bounds.** A port has room for [`SwitchConfig::addresses_per_port`] addresses. One more
//! replaces the port's own oldest, so a flood of addresses from one port evicts no address of
//! another.
//!
//! Left out: spanning trees (ports lead to guests, so there are no loops), multicast snooping, link
//! aggregation. Cost: two look-ups in a hash table whose keys a guest cannot predict (SipHash), or
//! none for a frame between stations for which the last decision still holds; nothing is allocated
//! once a port's room has been used.
#![forbid(unsafe_code)]

mod config;
mod limit;
mod port_set;
mod switch;
mod table;

pub use config::{FloodLimits, MAX_PORTS, Mac, PortConfig, SwitchConfig, Vid, VidSet, VlanMode};
pub use limit::Rate;
pub use port_set::{PortId, PortSet};
pub use switch::{DropReason, Forward, HEAD_LEN, PortCounters, Retag, Switch, SwitchError};
