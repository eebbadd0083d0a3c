//! Chains of one descriptor, as small frames have them, taken and given back many at a time.
//!
//! [`peek`](super::Ring::peek), [`advance`](super::Ring::advance) and
//! [`stage`](super::Ring::stage) work chain by chain, with any chain, a journal and memory that is
//! not at hand. These do the same for a row of chains that need none of that:
//!
//! ```text
//! peek_singles(out) ─▶ so many of the next chains ─▶ the device uses some, from the first on ─▶ take_singles, give_back_singles
//! ```
//! The row ends before the first chain that is not such a one, is malformed, or lies in a ring that
//! is reached page by page: a chain is judged in one place, by `peek`. An empty row means nothing
//! more.
//!
//! Descriptors are read once into the row; from then on the device reads the row alone. Descriptors
//! behind it are read again by the next walk: nothing was decided on them.

use guest_mem::Iova;

use super::chain::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};
use super::token::Token;

/// A checked chain of one descriptor: its buffer is not empty and does not wrap.
#[derive(Clone, Copy, Debug)]
pub struct Single {
    iova: Iova,
    len: u32,
    /// Identifier in the used ring, and bit 16: the device writes the buffer.
    id: u32,
}

const WRITE: u32 = 1 << 16;

impl Single {
    /// None: for arrays that are filled.
    pub const EMPTY: Self = Self {
        iova: Iova::new(0),
        len: 0,
        id: 0,
    };

    /// From a descriptor's fields; `None` unless it is a good chain by itself.
    #[inline(always)]
    pub(super) fn new(addr: u64, len: u32, flags: u16, id: u16) -> Option<Self> {
        let behind = u64::from(len.checked_sub(1)?);
        if flags & (DESC_F_NEXT | DESC_F_INDIRECT) != 0 || addr.checked_add(behind).is_none() {
            return None;
        }
        let write = if flags & DESC_F_WRITE != 0 { WRITE } else { 0 };
        Some(Self {
            iova: Iova::new(addr),
            len,
            id: u32::from(id) | write,
        })
    }

    /// First byte of its buffer.
    #[inline(always)]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Bytes of its buffer, at least 1.
    #[inline(always)]
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the device writes the buffer; otherwise it reads it.
    #[inline(always)]
    pub fn is_writable(&self) -> bool {
        self.id & WRITE != 0
    }

    /// Returns the identifier in the used ring.
    #[inline(always)]
    pub(super) fn id(&self) -> u16 {
        self.id as u16
    }

    /// Bytes that the device may write.
    #[inline(always)]
    pub(super) fn writable_len(&self) -> u32 {
        if self.is_writable() { self.len } else { 0 }
    }

    /// Its token, of the `seq`-th chain since the start.
    #[inline(always)]
    pub(super) fn token(&self, seq: u16) -> Token {
        Token::new(self.id(), 1, 0, seq, self.writable_len())
    }
}

/// Whether no chain was given more bytes than it has room for.
#[inline(always)]
pub(super) fn fit(singles: &[Single], written: impl Iterator<Item = u32>) -> bool {
    let mut pairs = singles.iter().zip(written);
    pairs.all(|(single, len)| len <= single.writable_len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_good_chain_of_one_descriptor_is_one() {
        let new = |addr, len, flags| Single::new(addr, len, flags, 7);
        let read = new(0x1000, 5, 0).unwrap();
        assert_eq!((read.iova().raw(), read.len(), read.id()), (0x1000, 5, 7));
        assert_eq!((read.is_writable(), read.writable_len()), (false, 0));
        let write = new(u64::MAX, 1, DESC_F_WRITE | 0x8080).unwrap();
        assert_eq!((write.is_writable(), write.writable_len()), (true, 1));
        for flags in [DESC_F_NEXT, DESC_F_INDIRECT, DESC_F_NEXT | DESC_F_WRITE] {
            assert!(new(0x1000, 5, flags).is_none());
        }
        assert!(new(0x1000, 0, 0).is_none());
        assert!(new(0, 0, 0).is_none());
        assert!(new(u64::MAX, 2, 0).is_none());
        let fits = |written: [u32; 2]| fit(&[read, write], written.into_iter());
        assert!(fits([0, 1]) && !fits([1, 1]) && !fits([0, 2]));
    }
}
