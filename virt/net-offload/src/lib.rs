//! Offloads of virtio-net frames in software (virtio 1.2 §5.1.6): does the work that a frame's
//! sender left undone, for a receiver that cannot do it either.
//!
//! A driver with CSUM leaves a frame's checksum to the device, one with HOST_TSO4, HOST_TSO6 or
//! HOST_USO the division of up to 64 KiB into packets. It states so in the `virtio_net_hdr` in
//! front of the frame. That header is not trusted: [`Checked::check`] compares it with the frame
//! and copies the frame's headers once, and only a [`Checked`] has the methods that use them. The
//! form in which a receiver gets the frame follows from its [`Offloads`] alone:
//! ```text
//! NetHeader + frame ─ check ─▶ Checked ─ deliver(receiver's Offloads) ─▶ Delivery::Unchanged   (a new header)
//!                        │                                             ├─▶ Delivery::Checksum    (two bytes to write)
//!                        └─▶ HeaderError: drop, count                  └─▶ Delivery::Segments    (headers, payload range)
//! ```
//! *Implemented*: NEEDS_CSUM of any protocol; TCP over IPv4 and IPv6, with ECN; USO; up to eight
//! VLAN tags (802.1Q and 802.1ad), IPv4 options, IPv6 hop-by-hop, routing and destination options.
//! *Not implemented*: UFO (offered by no device here), tunnels, segmentation of IP fragments,
//! receive-side coalescing.
//!
//! **Segments.** Each gets a copy of the frame's headers with: IP length, the IPv4 identification
//! counted up, the IPv4 header's checksum; the TCP sequence number, CWR in the first one only, FIN
//! and PSH in the last one only; the UDP length. The transport checksum is *adjusted* from the
//! sender's partial one and never computed afresh: a wrong one stays wrong.
//!
//! `hdr_len` is a hint and is not read. Bytes are read through [`FrameBytes`], which may be
//! scattered; nothing is allocated. For a receiver with checksum offload, the payload of a segment
//! is not read. Bound: [`MAX_SEGMENTS`] of one frame, [`MAX_HEADERS`] bytes of headers.
//!
//! ```
//! use net_offload::{Checked, Delivery, HeaderRoom, Offloads, NetHeader};
//!
//! let frame = [0u8; 60];
//! let mut room = HeaderRoom::new();
//! let header = NetHeader {
//!     flags: NetHeader::NEEDS_CSUM,
//!     csum_start: 34,
//!     csum_offset: 16,
//!     ..NetHeader::default()
//! };
//! let mut checked = Checked::check(&header, &frame[..], Offloads::ALL, &mut room)?;
//! // A receiver without offloads gets a finished frame.
//! let Delivery::Checksum(partial) = checked.deliver(Offloads::NONE) else { unreachable!() };
//! assert_eq!((partial.position(), partial.complete(&frame[..])), (50, 0xffff));
//! # Ok::<(), net_offload::HeaderError>(())
//! ```
#![forbid(unsafe_code)]

mod bytes;
mod check;
mod checksum;
mod deliver;
mod error;
mod gso;
mod header;
mod layout;
mod offloads;
mod original;
mod segments;
mod undone;

pub use bytes::FrameBytes;
pub use check::{Checked, MAX_SEGMENTS, MAX_UDP_SEGMENTS};
pub use checksum::Checksum;
pub use deliver::{Delivery, Unchanged};
pub use error::HeaderError;
pub use gso::GsoType;
pub use header::{HEADER_LEN, MAX_FRAME, MIN_FRAME, NetHeader};
pub use layout::{HeaderRoom, MAX_HEADERS};
pub use offloads::{Offloads, feature};
pub use segments::{Segment, Segments};
pub use undone::PartialChecksum;
