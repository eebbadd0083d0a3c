//! LZ4 unpacking, for kernels packed by `lz4 -l` (no such tool on a fresh Debian).
//!
//! Source: `lz4_Block_format.md` of the LZ4 project, and its frame document's "legacy frame": after
//! the magic, blocks of at most 8 MiB unpacked, each behind its packed size (`u32`, little-endian).

/// Largest unpacked size of one legacy block, bytes.
const BLOCK_MAX: usize = 8 << 20;

/// Unpacks the blocks after a legacy frame's magic; `None` if they are damaged.
pub(super) fn unpack_legacy(mut input: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    while let Some((size, rest)) = input.split_first_chunk::<4>() {
        let size = usize::try_from(u32::from_le_bytes(*size)).ok()?;
        let (block, rest) = rest.split_at_checked(size)?;
        unpack_block(block, &mut out)?;
        input = rest;
    }
    input.is_empty().then_some(out)
}

/// Unpacks one block, and appends it to `out`. A block's matches reach only into itself.
fn unpack_block(mut input: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let start = out.len();
    loop {
        let token = take(&mut input, 1)?[0];
        let literals = length(token >> 4, &mut input)?;
        if out.len() - start + literals > BLOCK_MAX {
            return None;
        }
        out.extend_from_slice(take(&mut input, literals)?);
        // The last sequence of a block is literals only.
        if input.is_empty() {
            return Some(());
        }
        let offset = take(&mut input, 2)?;
        let offset = usize::from(u16::from_le_bytes([offset[0], offset[1]]));
        let len = length(token & 15, &mut input)? + 4;
        let from = out
            .len()
            .checked_sub(offset)
            .filter(|from| offset > 0 && *from >= start)?;
        if out.len() - start + len > BLOCK_MAX {
            return None;
        }
        // The copy may overlap itself: bytes written here may be read later in it.
        for at in from..from + len {
            out.push(out[at]);
        }
    }
}

/// Returns a length: 15 continues in bytes of 255, up to the first smaller one.
fn length(nibble: u8, input: &mut &[u8]) -> Option<usize> {
    let mut length = usize::from(nibble);
    if nibble == 15 {
        loop {
            let byte = take(input, 1)?[0];
            length = length.checked_add(usize::from(byte))?;
            if byte != 255 {
                break;
            }
        }
    }
    Some(length)
}

fn take<'a>(input: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (head, rest) = input.split_at_checked(len)?;
    *input = rest;
    Some(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(block: &[u8]) -> Vec<u8> {
        let mut bytes = u32::try_from(block.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend_from_slice(block);
        bytes
    }

    #[test]
    fn literals_overlapping_matches_and_long_lengths() {
        // "ab", then 4+5 bytes from 2 back, then the literal "!".
        let block = [0x25, b'a', b'b', 2, 0, 0x10, b'!'];
        assert_eq!(unpack_legacy(&framed(&block)).unwrap(), b"ababababab\x61!");
        // 15 + 255 + 3 literals.
        let mut long = vec![0xf0, 255, 3];
        long.extend_from_slice(&[7; 273]);
        assert_eq!(unpack_legacy(&framed(&long)).unwrap(), [7; 273]);
    }

    #[test]
    fn damage_is_noticed() {
        let before_the_start = [0x14, b'a', 9, 0, 0x10, b'!'];
        let offset_zero = [0x14, b'a', 0, 0, 0x10, b'!'];
        let too_few_literals = [0x50, b'a'];
        for block in [&before_the_start[..], &offset_zero, &too_few_literals, &[]] {
            assert_eq!(unpack_legacy(&framed(block)), None, "{block:?}");
        }
        assert_eq!(unpack_legacy(&[9, 0, 0, 0, 1]), None);
        assert_eq!(unpack_legacy(&[9, 0]), None);
    }
}
