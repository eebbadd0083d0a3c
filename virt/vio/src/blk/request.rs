//! The layout of block requests and configuration space (virtio 1.2 §5.2), and the check of a
//! chain.

use guest_mem::{Access, Dma, Intent, Iova, PAGE_SIZE, Stop, Wanted};

use super::backend::{Op, Transfer};
use super::{MAX_TRANSFER, SECTOR};
use crate::ring::Chain;

/// Feature bits (§5.2.3).
pub mod feature {
    /// VIRTIO_BLK_F_SIZE_MAX (1): a bound on the size of a segment.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// VIRTIO_BLK_F_SEG_MAX (2): a bound on the number of segments.
    pub const SEG_MAX: u64 = 1 << 2;
    /// VIRTIO_BLK_F_RO (5): read-only.
    pub const RO: u64 = 1 << 5;
    /// VIRTIO_BLK_F_BLK_SIZE (6): a logical block size.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// VIRTIO_BLK_F_FLUSH (9): a write cache that can be flushed.
    pub const FLUSH: u64 = 1 << 9;
    /// VIRTIO_BLK_F_MQ (12): several queues.
    pub const MQ: u64 = 1 << 12;
    /// VIRTIO_BLK_F_DISCARD (13).
    pub const DISCARD: u64 = 1 << 13;
    /// VIRTIO_BLK_F_WRITE_ZEROES (14).
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Request types (§5.2.6).
pub mod kind {
    /// VIRTIO_BLK_T_IN: read.
    pub const IN: u32 = 0;
    /// VIRTIO_BLK_T_OUT: write.
    pub const OUT: u32 = 1;
    /// VIRTIO_BLK_T_FLUSH.
    pub const FLUSH: u32 = 4;
    /// VIRTIO_BLK_T_GET_ID: the serial number, 20 bytes.
    pub const GET_ID: u32 = 8;
    /// VIRTIO_BLK_T_DISCARD.
    pub const DISCARD: u32 = 11;
    /// VIRTIO_BLK_T_WRITE_ZEROES.
    pub const WRITE_ZEROES: u32 = 13;
}

/// VIRTIO_BLK_S_OK.
pub const STATUS_OK: u8 = 0;
/// VIRTIO_BLK_S_IOERR.
pub const STATUS_IOERR: u8 = 1;
/// VIRTIO_BLK_S_UNSUPP.
pub const STATUS_UNSUPP: u8 = 2;

/// `struct virtio_blk_req` up to its data: type, reserved, sector.
pub const HEADER_LEN: u32 = 16;
/// Length of the GET_ID string.
pub const ID_LEN: usize = 20;
/// `struct virtio_blk_discard_write_zeroes`: sector, num_sectors, flags.
const RANGE_LEN: u32 = 16;
/// VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP.
const FLAG_UNMAP: u32 = 1;

/// Largest segment we ask drivers to make, in bytes.
pub const SIZE_MAX: u32 = 32 << 10;
/// Most data segments we ask drivers to make. 126 × 32 KiB is just below [`MAX_TRANSFER`].
pub const SEG_MAX: u32 = 126;
/// Most sectors of one discard or write-zeroes request: 2 GiB.
pub const MAX_RANGE_SECTORS: u32 = 1 << 22;
const _: () = assert!(SIZE_MAX * SEG_MAX <= MAX_TRANSFER);

/// Limits of the device that a request is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// 512-byte sectors.
    pub sectors: u64,
    /// Whether writing is refused.
    pub read_only: bool,
    /// Features the driver accepted.
    pub features: u64,
    /// Most sectors of one discard or write-zeroes request.
    pub max_range: u32,
}

/// A checked request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// Action that it requires.
    pub action: Action,
    /// Address of the status byte: the last writable one.
    pub status_at: Iova,
}

/// Action that a checked request requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Give it to the back end.
    Run(Op),
    /// Answer the serial number, this many bytes of it.
    GetId(u32),
    /// Answer this status.
    Status(u8),
}

/// Reads and checks the request in `chain`. `Ok(None)`: there is no header, or no byte for a
/// status; it cannot be answered.
pub fn parse<D: Dma>(dma: &mut D, chain: &Chain, limits: &Limits) -> Access<Option<Parsed>> {
    let (readable, writable) = (chain.readable(), chain.writable());
    let Some(status_at) = status_at(chain) else {
        return Ok(None);
    };
    let Some(first) = readable
        .segments()
        .first()
        .filter(|_| readable.len() >= HEADER_LEN)
    else {
        return Ok(None);
    };
    let status_offset = writable.len() - 1;
    let mut header = [0; HEADER_LEN as usize];
    let answer = |action| Ok(Some(Parsed { action, status_at }));
    // Drivers give the header a descriptor of its own; the rest is for those that do not.
    let read = if first.len >= HEADER_LEN {
        dma.read(first.iova, &mut header)
    } else {
        readable.read(dma, 0, &mut header)
    };
    match read {
        Ok(()) => {}
        Err(pending @ Stop::Pending(_)) => return Err(pending),
        Err(Stop::Fault(_)) => return answer(Action::Status(STATUS_IOERR)),
    }
    let data = Data {
        readable: readable.len() - HEADER_LEN,
        writable: status_offset,
    };
    let read = |range: &mut [u8]| readable.read(dma, HEADER_LEN, range);
    answer(check(&header, data, limits, read)?)
}

/// Bytes of a request between its header and its status.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    /// Those that the device reads.
    pub readable: u32,
    /// Those that it writes.
    pub writable: u32,
}

/// Checks the request that `header` begins, wherever its bytes lie. `read` copies the first of the
/// bytes behind the header, if there are as many.
///
/// # Errors
/// `read` has nothing at the moment.
pub fn check(
    header: &[u8; HEADER_LEN as usize],
    data: Data,
    limits: &Limits,
    read: impl FnOnce(&mut [u8]) -> Access<()>,
) -> Access<Action> {
    let kind = u32::from_le_bytes(header[..4].try_into().expect("4 of 16 bytes"));
    let sector = u64::from_le_bytes(header[8..].try_into().expect("8 of 16 bytes"));
    Ok(match kind {
        kind::IN => transfer(limits, sector, data.writable, false),
        kind::OUT => transfer(limits, sector, data.readable, true),
        kind::FLUSH => Action::Run(Op::Flush),
        kind::GET_ID => Action::GetId(data.writable.min(ID_LEN as u32)),
        kind::DISCARD if limits.features & feature::DISCARD != 0 => {
            range(data, limits, false, read)?
        }
        kind::WRITE_ZEROES if limits.features & feature::WRITE_ZEROES != 0 => {
            range(data, limits, true, read)?
        }
        _ => Action::Status(STATUS_UNSUPP),
    })
}

/// Returns the accesses of the request in `chain` that are known before its header is read: the
/// bytes that the device reads first, and the status byte.
pub(super) fn wanted(chain: &Chain) -> impl Iterator<Item = Wanted> {
    let read = chain.readable().len().min(HEADER_LEN + MAX_TRANSFER);
    let read = chain.readable().wanted(0, read, Intent::Read);
    read.chain(status_at(chain).map(|at| (at, 1, Intent::Write)))
}

/// The last byte of the last writable segment, which is not empty and does not wrap.
fn status_at(chain: &Chain) -> Option<Iova> {
    let last = chain.writable().segments().last()?;
    Some(Iova::new(last.iova.raw() + u64::from(last.len - 1)))
}

/// Asks for all that the request in `chain` will want first once it is its turn. Whole pages that
/// the back end fills itself are not brought in.
pub(super) fn ask_ahead<D: Dma>(
    dma: &mut D,
    chain: &Chain,
    limits: &Limits,
    transfer: Transfer,
) -> Access<()> {
    dma.gather(wanted(chain))?;
    let Some(Parsed {
        action: Action::Run(Op::Read { len, .. }),
        ..
    }) = parse(dma, chain, limits)?
    else {
        return Ok(());
    };
    let data = |intent| chain.writable().wanted(0, len.min(MAX_TRANSFER), intent);
    match transfer {
        Transfer::Memory | Transfer::Bounce => dma.gather(data(Intent::Write)),
        Transfer::Direct => dma.gather(data(Intent::Overwrite).flat_map(parts_of_pages)),
        Transfer::Nothing => Ok(()),
    }
}

/// Returns the parts of a range, which does not wrap, that are not whole pages: at its start, and
/// at its end.
fn parts_of_pages((start, len, intent): Wanted) -> impl Iterator<Item = Wanted> {
    let first = start.left_in_page().min(u64::from(len)) as u32;
    let rest = len - first;
    let last = rest % PAGE_SIZE as u32;
    let last_at = Iova::new(start.raw() + u64::from(len - last));
    let parts = [(start, first, intent), (last_at, last, intent)];
    let is_part = |&(_, len, _): &Wanted| !len.is_multiple_of(PAGE_SIZE as u32);
    parts.into_iter().filter(is_part)
}

/// A read or write of `len` bytes from `sector` on.
fn transfer(limits: &Limits, sector: u64, len: u32, write: bool) -> Action {
    if !len.is_multiple_of(SECTOR as u32) || (write && limits.read_only) {
        return Action::Status(STATUS_IOERR);
    }
    let Some(offset) = inside(limits, sector, u64::from(len) / SECTOR) else {
        return Action::Status(STATUS_IOERR);
    };
    if len == 0 {
        return Action::Status(STATUS_OK);
    }
    Action::Run(if write {
        let durable = limits.features & feature::FLUSH == 0;
        Op::Write {
            offset,
            len,
            durable,
        }
    } else {
        Op::Read { offset, len }
    })
}

/// A discard or write-zeroes request (§5.2.6.2): exactly one range, since that is what we
/// advertise.
fn range(
    data: Data,
    limits: &Limits,
    zeroes: bool,
    read: impl FnOnce(&mut [u8]) -> Access<()>,
) -> Access<Action> {
    if limits.read_only || data.readable != RANGE_LEN {
        return Ok(Action::Status(STATUS_IOERR));
    }
    let mut bytes = [0; RANGE_LEN as usize];
    match read(&mut bytes) {
        Ok(()) => {}
        Err(pending @ Stop::Pending(_)) => return Err(pending),
        Err(Stop::Fault(_)) => return Ok(Action::Status(STATUS_IOERR)),
    }
    let sector = u64::from_le_bytes(bytes[..8].try_into().expect("8 of 16 bytes"));
    let sectors = u32::from_le_bytes(bytes[8..12].try_into().expect("4 of 16 bytes"));
    let flags = u32::from_le_bytes(bytes[12..].try_into().expect("4 of 16 bytes"));
    let allowed = if zeroes { FLAG_UNMAP } else { 0 };
    if flags & !allowed != 0 {
        return Ok(Action::Status(STATUS_UNSUPP));
    }
    if sectors > limits.max_range {
        return Ok(Action::Status(STATUS_IOERR));
    }
    let Some(offset) = inside(limits, sector, u64::from(sectors)) else {
        return Ok(Action::Status(STATUS_IOERR));
    };
    let len = u64::from(sectors) * SECTOR;
    Ok(match (len, zeroes) {
        (0, _) => Action::Status(STATUS_OK),
        (_, true) => Action::Run(Op::WriteZeroes {
            offset,
            len,
            unmap: flags & FLAG_UNMAP != 0,
        }),
        (_, false) => Action::Run(Op::Discard { offset, len }),
    })
}

/// The byte offset of `sector`, if it and the `count - 1` after it exist.
fn inside(limits: &Limits, sector: u64, count: u64) -> Option<u64> {
    let left = limits.sectors.checked_sub(sector)?;
    // The device's size in bytes fits 64 bits, so a sector inside it does.
    (count <= left).then(|| sector * SECTOR)
}

/// Configuration space (§5.2.4), `struct virtio_blk_config` up to `write_zeroes_may_unmap`.
/// Discards are best multiples of `discard_block` bytes.
pub fn config_space(
    sectors: u64,
    block: u32,
    queues: u16,
    max_range: u32,
    discard_block: u32,
) -> [u8; 60] {
    let mut space = [0; 60];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &sectors.to_le_bytes());
    put(8, &SIZE_MAX.to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &block.to_le_bytes());
    put(34, &queues.to_le_bytes());
    put(36, &max_range.to_le_bytes()); // max_discard_sectors
    put(40, &1u32.to_le_bytes()); // max_discard_seg
    let discard_alignment = block.max(discard_block) / SECTOR as u32;
    put(44, &discard_alignment.to_le_bytes()); // discard_sector_alignment
    put(48, &max_range.to_le_bytes()); // max_write_zeroes_sectors
    put(52, &1u32.to_le_bytes()); // max_write_zeroes_seg
    put(56, &[1]); // write_zeroes_may_unmap
    space
}
