//! A block request (virtio 1.2 §5.2.6): header, data and status, divided among descriptors in any
//! way.
//!
//! The data go from the disk to the guest, or back, in one copy. A request beyond the disk, or of
//! an unsupported type, is answered with an error status; a chain that is no request, or names
//! memory that is not the guest's, breaks the protocol.

use address::Iova;
use virtqueue::{FixedChain, Memory, OutOfReach, QueueStop, Segment, Violation};

/// VIRTIO_BLK_F_SIZE_MAX (1): a bound on the size of a segment.
pub const SIZE_MAX_FEATURE: u64 = 1 << 1;
/// VIRTIO_BLK_F_SEG_MAX (2): a bound on the number of segments.
pub const SEG_MAX_FEATURE: u64 = 1 << 2;

/// Bytes of a sector.
pub const SECTOR: u64 = 512;
/// Largest segment that drivers are asked to make, bytes.
pub const SIZE_MAX: u32 = 8 << 10;
/// Most data segments that drivers are asked to make: a chain has a header and a status, too.
pub const SEG_MAX: u32 = 126;
/// Most bytes of a request, which bounds the duration of a poll.
pub const TRANSFER_MAX: u32 = 1 << 20;
const _: () = assert!(SIZE_MAX * SEG_MAX <= TRANSFER_MAX);

/// Bytes of the header: type, reserved word, sector.
const HEADER_LEN: u32 = 16;
const IN: u32 = 0;
const OUT: u32 = 1;
const GET_ID: u32 = 8;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
const ID: [u8; 20] = *b"exitless-elvis\0\0\0\0\0\0";

/// The device's configuration (§5.2.4): capacity, largest segment, most segments.
#[must_use]
pub fn config(disk_len: usize) -> [u8; 16] {
    let sectors = disk_len as u64 / SECTOR;
    let words = u128::from(sectors) | u128::from(SIZE_MAX) << 64 | u128::from(SEG_MAX) << 96;
    words.to_le_bytes()
}

/// Segments of a chain in one direction.
#[derive(Clone, Copy)]
enum Row<'a> {
    FromGuest(&'a [Segment]),
    ToGuest(&'a [Segment]),
}

/// Serves the request in `chain`. Returns the bytes written into it.
///
/// # Errors
/// The chain is no request, or names memory that is not the guest's.
pub fn serve<const N: usize>(
    memory: &impl Memory,
    chain: &FixedChain<N>,
    disk: &mut [u8],
) -> Result<u32, QueueStop> {
    let (readable, writable) = (chain.readable(), chain.writable());
    let Some(room) = chain.writable_len().checked_sub(1) else {
        return Err(Violation::Truncated.into());
    };
    let Some(sent) = chain.readable_len().checked_sub(HEADER_LEN) else {
        return Err(Violation::Truncated.into());
    };
    let mut header = [0; HEADER_LEN as usize];
    copy(memory, Row::FromGuest(readable), 0, &mut header)?;
    let header = u128::from_le_bytes(header);
    let (kind, sector) = (header as u32, (header >> 64) as u64);
    let (status, written) = match kind {
        IN => match range(disk, sector, room) {
            Some(data) => {
                copy(memory, Row::ToGuest(writable), 0, data)?;
                (OK, room)
            }
            None => (IO_ERROR, 0),
        },
        OUT => match range(disk, sector, sent) {
            Some(data) => {
                copy(memory, Row::FromGuest(readable), HEADER_LEN, data)?;
                (OK, 0)
            }
            None => (IO_ERROR, 0),
        },
        GET_ID => {
            let len = room.min(ID.len() as u32);
            let mut id = ID;
            copy(memory, Row::ToGuest(writable), 0, &mut id[..len as usize])?;
            (OK, len)
        }
        _ => (UNSUPPORTED, 0),
    };
    copy(memory, Row::ToGuest(writable), room, &mut [status])?;
    // Bytes that were not written count as written, too, since the status is behind them: the
    // driver may not read them, according to the status.
    Ok(if status == OK { written + 1 } else { 1 })
}

/// Returns the bytes of the disk for a request, if they are whole sectors of the disk.
fn range(disk: &mut [u8], sector: u64, len: u32) -> Option<&mut [u8]> {
    let is_whole = len <= TRANSFER_MAX && u64::from(len).is_multiple_of(SECTOR);
    let start = usize::try_from(sector.checked_mul(SECTOR)?).ok()?;
    let end = start.checked_add(len as usize)?;
    disk.get_mut(start..end).filter(|_| is_whole)
}

/// Copies `bytes` to or from the segments of `row`, from its byte `offset` on; they are long
/// enough.
fn copy(
    memory: &impl Memory,
    row: Row<'_>,
    offset: u32,
    bytes: &mut [u8],
) -> Result<(), QueueStop> {
    let (Row::FromGuest(segments) | Row::ToGuest(segments)) = row;
    let (mut skip, mut done) = (offset, 0);
    for segment in segments {
        if skip >= segment.len {
            skip -= segment.len;
            continue;
        }
        let len = ((segment.len - skip) as usize).min(bytes.len() - done);
        if len == 0 {
            break;
        }
        // A segment does not wrap, so neither does a step inside of it.
        let out = OutOfReach(segment.iova);
        let at: Iova = segment.iova.checked_add(skip.into()).ok_or(out)?;
        let part = &mut bytes[done..done + len];
        match row {
            Row::FromGuest(_) => memory.read(at, part)?,
            Row::ToGuest(_) => memory.write(at, part)?,
        }
        skip = 0;
        done += len;
    }
    Ok(())
}
