//! Headers of a frame that is to be segmented, copied once.

use etherparse::{
    IpNumber, Ipv4HeaderSlice, Ipv6ExtensionSlice, Ipv6ExtensionsSlice, Ipv6HeaderSlice,
    TcpHeaderSlice, err, ip_number,
};

use crate::{FrameBytes, HeaderError};

/// Longest headers of a frame that is segmented, in bytes: eight VLAN tags, IPv6 with 344 bytes of
/// extensions, TCP with all options.
pub const MAX_HEADERS: usize = 490;
/// Most VLAN tags, as in Linux (VLAN_MAX_DEPTH).
const MAX_TAGS: usize = 8;
/// Ethernet addresses, after which the first tag or the EtherType comes.
const ADDRESSES: usize = 12;
const VLAN: [u8; 2] = [0x81, 0x00];
const QINQ: [u8; 2] = [0x88, 0xa8];
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const UDP_LEN: usize = 8;

/// Room for the headers of one frame: one per queue, used again and again.
#[derive(Clone, Debug)]
pub struct HeaderRoom(pub(crate) [u8; MAX_HEADERS]);

impl HeaderRoom {
    /// Room.
    pub fn new() -> Self {
        Self([0; MAX_HEADERS])
    }
}

impl Default for HeaderRoom {
    fn default() -> Self {
        Self::new()
    }
}

/// Version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ip {
    V4,
    V6,
}

/// Transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp,
    Udp,
}

/// Positions of the headers of a frame, as offsets from its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub ip: Ip,
    pub transport: Transport,
    /// Start of the IP header.
    pub l3: usize,
    /// Start of the transport header.
    pub l4: usize,
    /// Start of the payload.
    pub payload: usize,
}

impl Layout {
    /// Copies the headers of `frame` into `room` and finds their parts.
    pub fn read(
        frame: &(impl FrameBytes + ?Sized),
        room: &mut HeaderRoom,
    ) -> Result<Self, HeaderError> {
        let len = frame.frame_len();
        let bytes = &mut room.0[..len.min(MAX_HEADERS)];
        frame.copy_to(0, bytes);
        let layout = Self::parse(bytes, len);
        layout.map_err(|error| match error {
            // The missing bytes are not behind the copied ones: the frame ends there.
            HeaderError::HeadersTooLong if len <= MAX_HEADERS => HeaderError::Malformed,
            other => other,
        })
    }

    /// Finds the headers in `bytes`, the first ones of a frame of `len`. Headers that continue
    /// behind them are too long.
    fn parse(bytes: &[u8], len: usize) -> Result<Self, HeaderError> {
        let mut l3 = ADDRESSES + 2;
        let mut ether_type = ether_type_before(bytes, l3)?;
        for _ in 0..MAX_TAGS {
            if ether_type != VLAN && ether_type != QINQ {
                break;
            }
            l3 += 4;
            ether_type = ether_type_before(bytes, l3)?;
        }
        let packet = bytes.get(l3..).ok_or(HeaderError::HeadersTooLong)?;
        let (ip, number, ip_len) = match ether_type {
            IPV4 => parse_v4(packet, len - l3)?,
            IPV6 => parse_v6(packet, len - l3)?,
            _ => return Err(HeaderError::Protocol),
        };
        let l4 = l3 + ip_len;
        let (transport, l4_len) = match number {
            ip_number::TCP => {
                let header = TcpHeaderSlice::from_slice(&bytes[l4..]);
                let header = header.map_err(|error| match error {
                    err::tcp::HeaderSliceError::Len(_) => HeaderError::HeadersTooLong,
                    err::tcp::HeaderSliceError::Content(_) => HeaderError::Malformed,
                })?;
                (Transport::Tcp, header.slice().len())
            }
            ip_number::UDP => {
                let header = bytes
                    .get(l4..l4 + UDP_LEN)
                    .ok_or(HeaderError::HeadersTooLong)?;
                let udp_len = u16::from_be_bytes([header[4], header[5]]);
                if usize::from(udp_len) != len - l4 {
                    return Err(HeaderError::Length);
                }
                (Transport::Udp, UDP_LEN)
            }
            _ => return Err(HeaderError::Protocol),
        };
        Ok(Self {
            ip,
            transport,
            l3,
            l4,
            payload: l4 + l4_len,
        })
    }
}

fn ether_type_before(bytes: &[u8], end: usize) -> Result<[u8; 2], HeaderError> {
    let word = bytes.get(end - 2..end).ok_or(HeaderError::HeadersTooLong)?;
    Ok([word[0], word[1]])
}

/// Version, protocol, and length of the header, of a packet of `len` bytes.
fn parse_v4(packet: &[u8], len: usize) -> Result<(Ip, IpNumber, usize), HeaderError> {
    let header = Ipv4HeaderSlice::from_slice(packet).map_err(|error| match error {
        err::ipv4::HeaderSliceError::Len(_) => HeaderError::HeadersTooLong,
        err::ipv4::HeaderSliceError::Content(_) => HeaderError::Malformed,
    })?;
    if header.is_fragmenting_payload() {
        return Err(HeaderError::Fragment);
    }
    if usize::from(header.total_len()) != len {
        return Err(HeaderError::Length);
    }
    Ok((Ip::V4, header.protocol(), header.slice().len()))
}

/// As [`parse_v4`]; the length includes extension headers.
fn parse_v6(packet: &[u8], len: usize) -> Result<(Ip, IpNumber, usize), HeaderError> {
    let header = Ipv6HeaderSlice::from_slice(packet).map_err(|error| match error {
        err::ipv6::HeaderSliceError::Len(_) => HeaderError::HeadersTooLong,
        err::ipv6::HeaderSliceError::Content(_) => HeaderError::Malformed,
    })?;
    let (_, behind) = packet.split_at(header.slice().len());
    if usize::from(header.payload_length()) != len - header.slice().len() {
        return Err(HeaderError::Length);
    }
    let extensions = Ipv6ExtensionsSlice::from_slice(header.next_header(), behind);
    let (extensions, number, rest) = extensions.map_err(|error| match error {
        err::ipv6_exts::HeaderSliceError::Len(_) => HeaderError::HeadersTooLong,
        err::ipv6_exts::HeaderSliceError::Content(_) => HeaderError::Malformed,
    })?;
    for extension in extensions {
        match extension {
            // Also an atomic one, of which Linux makes no segments either.
            Ipv6ExtensionSlice::Fragment(_) => return Err(HeaderError::Fragment),
            // Covers fields that segmentation changes.
            Ipv6ExtensionSlice::Authentication(_) => return Err(HeaderError::Protocol),
            _ => {}
        }
    }
    Ok((Ip::V6, number, packet.len() - rest.len()))
}
