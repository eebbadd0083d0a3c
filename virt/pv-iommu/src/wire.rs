//! The device's words as they lie in memory (§5.13.3 to §5.13.6): configuration, requests,
//! statuses, properties, fault reports. All little-endian.

use std::ops::RangeInclusive;

use guest_mem::SourceId;

/// Feature bits (§5.13.3).
pub mod feature {
    /// `input_range` is meant.
    pub const INPUT_RANGE: u64 = 1 << 0;
    /// `domain_range` is meant.
    pub const DOMAIN_RANGE: u64 = 1 << 1;
    /// MAP and UNMAP.
    pub const MAP_UNMAP: u64 = 1 << 2;
    /// PROBE.
    pub const PROBE: u64 = 1 << 4;
    /// The MMIO flag of MAP.
    pub const MMIO: u64 = 1 << 5;
    /// The field `bypass`, and the flag of ATTACH.
    pub const BYPASS_CONFIG: u64 = 1 << 6;
}

/// Granule, bytes: mappings begin and end at multiples of it.
pub const GRANULE: u64 = 4096;
/// Largest address of an endpoint.
pub const INPUT_LAST: u64 = (1 << 48) - 1;
/// Largest guest-physical address that x86 page tables can hold.
pub const PHYS_LAST: u64 = (1 << 52) - 1;
/// Largest domain number.
pub const DOMAIN_LAST: u32 = u16::MAX as u32;
/// Bytes of an endpoint's properties.
pub const PROBE_SIZE: u32 = 64;
/// Addresses to which interrupt messages are written, which are no memory.
pub const MSI_WINDOW: RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;

/// Bytes of the configuration space.
pub const CONFIG_LEN: usize = 40;
/// Offset of its field `bypass`.
pub const CONFIG_BYPASS: u64 = 36;

/// Bytes of a request's tail.
pub const TAIL_LEN: u32 = 4;
/// Bytes of a fault report.
pub const FAULT_LEN: u32 = 24;
/// Bytes that are read of the longest request but PROBE, whose padding is not read.
pub const MAX_REQUEST: usize = 36;

/// Error status of a request (§5.13.6). 0, success, is none of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// A feature that is not offered, or not in this combination.
    Unsupp = 2,
    /// Fields that contradict each other, or the unit's state.
    Inval = 4,
    /// Addresses that are not aligned, or outside of the device's ranges.
    Range = 5,
    /// No such domain, or no such endpoint.
    NoEnt = 6,
    /// The host's limit on domains or mappings is reached.
    NoMem = 8,
}

/// Request of a driver, parsed but not checked against the unit's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Attaches an endpoint to a domain, which is made if it is not there.
    Attach {
        /// Which domain.
        domain: u32,
        /// Which endpoint.
        endpoint: u32,
        /// [`ATTACH_BYPASS`] and bits that mean nothing.
        flags: u32,
        /// To be zero.
        reserved: u32,
    },
    /// Detaches an endpoint.
    Detach {
        /// From which domain.
        domain: u32,
        /// Which endpoint.
        endpoint: u32,
    },
    /// Maps `first..=last`.
    Map {
        /// In which domain.
        domain: u32,
        /// First address.
        first: u64,
        /// Last address.
        last: u64,
        /// Translation of the first address.
        phys: u64,
        /// [`MAP_READ`], [`MAP_WRITE`], [`MAP_MMIO`], and bits that mean nothing.
        flags: u32,
    },
    /// Removes the mappings in `first..=last`.
    Unmap {
        /// The domain.
        domain: u32,
        /// First address.
        first: u64,
        /// Last address.
        last: u64,
    },
    /// The driver has written `bypass`.
    SetBypass(bool),
    /// The device was reset: nothing is attached.
    Reset,
}

impl Request {
    /// Whether it makes use of no flag that comes with a feature which the driver has not accepted:
    /// such a bit is one that the device does not recognize (§5.13.6.3, §5.13.6.5).
    pub fn is_within(&self, features: u64) -> bool {
        let (flags, flag, feature) = match *self {
            Self::Attach { flags, .. } => (flags, ATTACH_BYPASS, feature::BYPASS_CONFIG),
            Self::Map { flags, .. } => (flags, MAP_MMIO, feature::MMIO),
            _ => return true,
        };
        flags & flag == 0 || features & feature != 0
    }
}

/// The domain's endpoints are in bypass mode.
pub const ATTACH_BYPASS: u32 = 1;
/// Devices may read.
pub const MAP_READ: u32 = 1;
/// Devices may write.
pub const MAP_WRITE: u32 = 2;
/// The mapped memory is a device's registers.
pub const MAP_MMIO: u32 = 4;

/// A request by its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParsedRequest {
    /// For the unit.
    Unit(Request),
    /// The properties of an endpoint.
    Probe {
        /// Which endpoint.
        endpoint: u32,
    },
}

const T_ATTACH: u8 = 1;
const T_DETACH: u8 = 2;
const T_MAP: u8 = 3;
const T_UNMAP: u8 = 4;
const T_PROBE: u8 = 5;

/// Bytes of the part that the device reads, of a request of this type; `None`: there is no such
/// type.
fn readable_len(kind: u8) -> Option<usize> {
    match kind {
        T_ATTACH | T_DETACH => Some(20),
        T_MAP => Some(36),
        T_UNMAP => Some(28),
        T_PROBE => Some(72),
        _ => None,
    }
}

/// Parses a request whose device-readable part has `len` bytes, of which `bytes` are the first, up
/// to [`MAX_REQUEST`]. `None`: of no known type, or too short for it; the buffers are then given
/// back unwritten. Bytes behind a request's end are ignored.
pub fn parse(bytes: &[u8], len: u32) -> Option<ParsedRequest> {
    let kind = *bytes.first()?;
    if (len as usize) < readable_len(kind)? {
        return None;
    }
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let domain = word(4)?;
    Some(ParsedRequest::Unit(match kind {
        T_ATTACH => Request::Attach {
            domain,
            endpoint: word(8)?,
            flags: word(12)?,
            reserved: word(16)?,
        },
        T_DETACH => Request::Detach {
            domain,
            endpoint: word(8)?,
        },
        T_MAP => Request::Map {
            domain,
            first: long(8)?,
            last: long(16)?,
            phys: long(24)?,
            flags: word(32)?,
        },
        T_UNMAP => Request::Unmap {
            domain,
            first: long(8)?,
            last: long(16)?,
        },
        // Where others have their domain.
        _ => return Some(ParsedRequest::Probe { endpoint: domain }),
    }))
}

/// The requester that `endpoint` names, if it is one of `endpoints`.
///
/// # Errors
/// [`Status::NoEnt`].
pub fn requester(endpoints: &[RangeInclusive<u16>], endpoint: u32) -> Result<SourceId, Status> {
    let source = u16::try_from(endpoint).map_err(|_| Status::NoEnt)?;
    match endpoints.iter().any(|range| range.contains(&source)) {
        true => Ok(SourceId(source)),
        false => Err(Status::NoEnt),
    }
}

/// The configuration space.
pub fn config(is_bypass: bool) -> [u8; CONFIG_LEN] {
    let mut space = [0; CONFIG_LEN];
    // Page sizes: the granule and all larger powers of two, since a mapping of any length is one
    // here.
    space[..8].copy_from_slice(&(!(GRANULE - 1)).to_le_bytes());
    space[16..24].copy_from_slice(&INPUT_LAST.to_le_bytes());
    space[28..32].copy_from_slice(&DOMAIN_LAST.to_le_bytes());
    space[32..36].copy_from_slice(&PROBE_SIZE.to_le_bytes());
    space[CONFIG_BYPASS as usize] = is_bypass.into();
    space
}

/// The properties of every endpoint: where interrupt messages go is reserved (RESV_MEM, subtype
/// MSI).
pub fn properties() -> [u8; PROBE_SIZE as usize] {
    let mut list = [0; PROBE_SIZE as usize];
    list[0] = 1;
    list[2] = 20;
    list[4] = 1;
    list[8..16].copy_from_slice(&MSI_WINDOW.start().to_le_bytes());
    list[16..24].copy_from_slice(&MSI_WINDOW.end().to_le_bytes());
    list
}

/// Reason why an access was refused (§5.13.6.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// The endpoint is attached to nothing.
    Domain = 1,
    /// The address is not mapped, or not for this.
    Mapping = 2,
}

/// A report of an access that was refused.
pub fn fault(reason: u8, endpoint: u32, iova: u64, is_write: bool) -> [u8; FAULT_LEN as usize] {
    const READ: u32 = 1;
    const WRITE: u32 = 2;
    const ADDRESS: u32 = 1 << 8;
    let mut report = [0; FAULT_LEN as usize];
    report[0] = reason;
    let flags = ADDRESS | if is_write { WRITE } else { READ };
    report[4..8].copy_from_slice(&flags.to_le_bytes());
    report[8..12].copy_from_slice(&endpoint.to_le_bytes());
    report[16..24].copy_from_slice(&iova.to_le_bytes());
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a request, from its words behind the head.
    fn request(kind: u8, words: &[u32]) -> Vec<u8> {
        let words = words.iter().flat_map(|word| word.to_le_bytes());
        [kind, 0xa, 0xb, 0xc].into_iter().chain(words).collect()
    }

    #[test]
    fn requests_are_where_the_specification_has_them() {
        let parsed = |bytes: &[u8]| parse(bytes, bytes.len() as u32);
        let attach = Request::Attach {
            domain: 7,
            endpoint: 0x18,
            flags: 1,
            reserved: 9,
        };
        let bytes = request(1, &[7, 0x18, 1, 9]);
        assert_eq!(parsed(&bytes), Some(ParsedRequest::Unit(attach)));
        let bytes = request(2, &[7, 0x18, 0, 0]);
        let (domain, endpoint) = (7, 0x18);
        let detach = Request::Detach { domain, endpoint };
        assert_eq!(parsed(&bytes), Some(ParsedRequest::Unit(detach)));
        let bytes = request(3, &[7, 0x1000, 1, 0x2fff, 1, 0x5000, 2, 6]);
        let map = Request::Map {
            domain: 7,
            first: 0x1_0000_1000,
            last: 0x1_0000_2fff,
            phys: 0x2_0000_5000,
            flags: 6,
        };
        assert_eq!(parsed(&bytes), Some(ParsedRequest::Unit(map)));
        let bytes = request(4, &[7, 0x1000, 0, 0x2fff, 0, 0xffff_ffff]);
        let unmap = Request::Unmap {
            domain: 7,
            first: 0x1000,
            last: 0x2fff,
        };
        assert_eq!(parsed(&bytes), Some(ParsedRequest::Unit(unmap)));
        let bytes = request(5, &[&[0x18], &[0; 16][..]].concat());
        assert_eq!(bytes.len(), 72);
        assert_eq!(
            parsed(&bytes),
            Some(ParsedRequest::Probe { endpoint: 0x18 })
        );
        // Only so much is copied.
        let first = &bytes[..MAX_REQUEST];
        assert_eq!(
            parse(first, 72),
            Some(ParsedRequest::Probe { endpoint: 0x18 })
        );
    }

    #[test]
    fn request_too_short_or_of_unknown_type_does_not_parse() {
        for (kind, len) in [(1, 20), (2, 20), (3, 36), (4, 28), (5, 72)] {
            let bytes = [&[kind][..], &[0; 71]].concat();
            assert!(parse(&bytes[..len.min(MAX_REQUEST)], len as u32).is_some());
            for short in 0..len {
                let bytes = &bytes[..short.min(MAX_REQUEST)];
                assert_eq!(parse(bytes, short as u32), None, "{kind}, {short} bytes");
            }
        }
        for kind in [0, 6, 7, 255] {
            assert_eq!(parse(&[kind; MAX_REQUEST], 100), None);
        }
    }

    #[test]
    fn configuration_properties_and_reports_in_bytes() {
        let space = config(true);
        assert_eq!(space[..8], [0, 0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(space[8..16], [0; 8]);
        assert_eq!(space[16..24], [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]);
        assert_eq!(space[24..32], [0, 0, 0, 0, 0xff, 0xff, 0, 0]);
        assert_eq!(space[32..], [64, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(config(false)[32..], [64, 0, 0, 0, 0, 0, 0, 0]);
        let list = properties();
        let expected = [
            1, 0, 20, 0, 1, 0, 0, 0, 0, 0, 0xe0, 0xfe, 0, 0, 0, 0, 0xff, 0xff, 0xef, 0xfe, 0, 0, 0,
            0,
        ];
        assert_eq!(list[..24], expected);
        assert!(list[24..].iter().all(|&byte| byte == 0));
        let report = fault(2, 0x18, 0x1_2345_6789, true);
        let expected = [
            2, 0, 0, 0, 2, 1, 0, 0, 0x18, 0, 0, 0, 0, 0, 0, 0, 0x89, 0x67, 0x45, 0x23, 1, 0, 0, 0,
        ];
        assert_eq!(report, expected);
        assert_eq!(fault(1, 0x18, 0, false)[..8], [1, 0, 0, 0, 1, 1, 0, 0]);
    }
}
