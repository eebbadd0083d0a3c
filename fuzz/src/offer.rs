//! Block requests as a driver writes them, made from the input.

use vio::QueueConfig;

use crate::Input;

/// Guest memory as its driver sees it.
pub(crate) trait Memory {
    /// Stores; what lies behind the end is dropped.
    fn store(&mut self, at: u64, bytes: &[u8]);
    /// Loads a word; anything behind the end.
    fn load(&self, at: u64) -> u16;
}

/// Makes a chain of a header, up to three buffers and a status byte available, in either layout.
/// Takes from the input: first descriptor, flags (packed: AVAIL and USED), address of the header,
/// kind, sector, number of buffers, then length and address of each.
pub(crate) fn offer(
    input: &mut Input<'_>,
    queue: &QueueConfig,
    is_packed: bool,
    memory: &mut dyn Memory,
) {
    let at = input.u8();
    let flags = input.u8();
    let header_at = u64::from(input.u16());
    let kind = input.u8();
    let sector = input.u8();
    let count = u16::from(input.u8() % 4);
    let mut header = [0; 16];
    header[0] = kind;
    header[8] = sector;
    memory.store(header_at, &header);
    let (size, desc) = (queue.size, queue.desc.raw());
    for nth in 0..count + 2 {
        let index = (u16::from(at) + nth) % size;
        let is_last = nth == count + 1;
        let (addr, len, write) = match nth {
            0 => (header_at, 16, 0),
            _ if is_last => ((header_at + 16) & 0x3fff, 1, 2),
            _ => {
                let len = u32::from(input.u16());
                let write = if kind == 1 { 0 } else { 2 };
                (input.u16().into(), len, write)
            }
        };
        let more = u16::from(!is_last);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        let (third, fourth) = if is_packed {
            let own = u16::from(flags & 1) << 7 | u16::from(flags >> 1 & 1) << 15;
            (u16::from(at), own | write | more)
        } else {
            (write | more, (index + 1) % size)
        };
        bytes[12..14].copy_from_slice(&third.to_le_bytes());
        bytes[14..].copy_from_slice(&fourth.to_le_bytes());
        memory.store(desc.saturating_add(16 * u64::from(index)), &bytes);
    }
    if !is_packed {
        let avail = queue.avail.raw();
        let idx = memory.load(avail + 2);
        let head = u16::from(at) % size;
        memory.store(avail + 4 + 2 * u64::from(idx % size), &head.to_le_bytes());
        memory.store(avail + 2, &idx.wrapping_add(1).to_le_bytes());
    }
}
