//! Copies between the guest's buffers and a slot, each byte once: in place where memory is this
//! process's, and through a small buffer where it is not known to be.

use guest_mem::{Access, Dma, DmaFault, Intent, Iova, KeepAlive, VolatileSlice};

use crate::ring::Segment;

/// Bytes of the buffer.
const BUFFER: usize = 4096;

/// Copies what the driver gives in `segments` to `to`, which has room for it.
pub(super) fn copy_in<D: Dma>(
    dma: &mut D,
    keep: Option<&KeepAlive>,
    segments: impl Iterator<Item = Segment>,
    to: VolatileSlice<'_>,
) -> Access<()> {
    let mut at = 0;
    for_each_piece(dma, keep, segments, Intent::Read, |dma, piece| {
        match piece {
            Piece::Here(piece) => {
                piece.copy_to(&to, at);
                at += piece.len();
            }
            Piece::Elsewhere(iova, len) => {
                let mut buffer = [0; BUFFER];
                let buffer = &mut buffer[..len as usize];
                dma.read(iova, buffer)?;
                to.write(at, buffer);
                at += len;
            }
        }
        Ok(())
    })
}

/// Copies `from` into `segments`, which have room for it.
pub(super) fn copy_out<D: Dma>(
    dma: &mut D,
    keep: Option<&KeepAlive>,
    segments: impl Iterator<Item = Segment>,
    from: VolatileSlice<'_>,
) -> Access<()> {
    let mut at = 0;
    for_each_piece(dma, keep, segments, Intent::Write, |dma, piece| {
        match piece {
            Piece::Here(piece) => {
                from.slice(at, piece.len()).copy_to(&piece, 0);
                at += piece.len();
            }
            Piece::Elsewhere(iova, len) => {
                let mut buffer = [0; BUFFER];
                let buffer = &mut buffer[..len as usize];
                from.read(at, buffer);
                dma.write(iova, buffer)?;
                at += len;
            }
        }
        Ok(())
    })
}

/// A part of a segment that is in one piece.
enum Piece<'a> {
    /// In memory that stays mapped.
    Here(VolatileSlice<'a>),
    /// To be asked for; at most [`BUFFER`] bytes.
    Elsewhere(Iova, u32),
}

fn for_each_piece<D: Dma>(
    dma: &mut D,
    keep: Option<&KeepAlive>,
    segments: impl Iterator<Item = Segment>,
    intent: Intent,
    mut each: impl FnMut(&mut D, Piece<'_>) -> Access<()>,
) -> Access<()> {
    for segment in segments {
        let mut done = 0;
        while done < segment.len {
            let at = segment.iova.checked_add(u64::from(done));
            let at = at.ok_or(DmaFault::BadRange)?;
            let (hva, len) = dma.host(at, segment.len - done, intent)?;
            // Of memory that is not kept nothing is touched: `Dma` is a safe trait.
            let here = keep.and_then(|keep| VolatileSlice::new(keep, hva, len));
            let piece = match here {
                Some(piece) => Piece::Here(piece),
                None => Piece::Elsewhere(at, len.min(BUFFER as u32)),
            };
            done += match &piece {
                Piece::Here(piece) => piece.len(),
                Piece::Elsewhere(_, len) => *len,
            };
            each(dma, piece)?;
        }
    }
    Ok(())
}
