//! Capabilities behind a structure that the kernel fills in.
//!
//! `struct vfio_iommu_type1_info` and `struct vfio_region_info` end with a chain of capabilities,
//! each with a header: 16-bit id, 16-bit version, 32-bit offset of the next one from the start of
//! the structure (0 in the last). The kernel writes it, and still no length or offset is trusted:
//! those that lead outside, back, or in circles are errors, and so is a list that is longer than
//! its capability.

use crate::error::{Errno, InfoError};

/// Bytes of a capability's header.
pub const HEADER: usize = 8;

/// Longest answer that is accepted: more than any kernel gives.
const ANSWER_MAX: usize = 1 << 20;

/// Asks with a buffer that begins with `head`, and again with a longer one while the answer's first
/// word requires it.
pub fn whole_answer(
    head: &[u8],
    mut ask: impl FnMut(&mut [u8]) -> Result<(), Errno>,
) -> Result<Vec<u8>, Errno> {
    let mut len = head.len();
    loop {
        let mut bytes = Vec::from(head);
        bytes.resize(len, 0);
        ask(&mut bytes)?;
        let word = bytes.first_chunk().expect("a head has a length");
        let wanted = u32::from_ne_bytes(*word) as usize;
        if wanted <= len {
            return Ok(bytes);
        }
        if wanted > ANSWER_MAX {
            return Err(Errno(libc::E2BIG));
        }
        // There may be more by then: each round is longer, up to the bound.
        len = wanted;
    }
}

/// Bytes, none of them believed to be there.
#[derive(Clone, Copy)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The error of something that is cut short.
    pub fn short(self, what: &'static str, at: usize) -> InfoError {
        let len = self.0.len();
        InfoError::Short { len, what, at }
    }

    /// So many pieces of so many bytes.
    fn words<const N: usize, const COUNT: usize>(
        self,
        at: usize,
        what: &'static str,
    ) -> Result<[[u8; N]; COUNT], InfoError> {
        let found = self.0.get(at..).unwrap_or_default();
        match found.as_chunks().0.first_chunk() {
            Some(words) => Ok(*words),
            None => Err(self.short(what, at)),
        }
    }

    /// The 32-bit word at this byte.
    pub fn u32(self, at: usize, what: &'static str) -> Result<u32, InfoError> {
        self.words(at, what).map(|[word]| u32::from_le_bytes(word))
    }

    /// A list behind a capability's header: its number of entries, 4 bytes reserved, then two
    /// 64-bit words of each.
    pub fn pairs(
        self,
        at: usize,
        what: &'static str,
    ) -> Result<impl Iterator<Item = [u64; 2]> + use<'a>, InfoError> {
        let count = self.u32(at, what)? as usize;
        let list = self.0.get(at + 8..).unwrap_or_default();
        // Before anything is allocated for them.
        let (pairs, _) = list.as_chunks::<16>();
        let pairs = pairs.get(..count).ok_or_else(|| self.short(what, at))?;
        let read = |pair: &[u8; 16]| {
            [0, 8].map(|at| {
                let half = pair[at..].first_chunk().expect("two halves of 8 bytes");
                u64::from_le_bytes(*half)
            })
        };
        Ok(pairs.iter().map(read))
    }

    /// The capabilities from `first` on, which lie behind the `head` bytes of the structure.
    pub fn capabilities(self, head: usize, first: u32) -> Capabilities<'a> {
        Capabilities {
            reader: self,
            from: 0,
            end: head,
            at: first as usize,
        }
    }
}

/// Capability, and where its content begins.
pub struct Capability {
    pub id: u16,
    pub version: u16,
    pub body: usize,
}

/// Iterator over a chain. Each capability lies behind the one before, so there is an end; the first
/// error is the last item.
pub struct Capabilities<'a> {
    reader: Reader<'a>,
    /// Offset of the header whose link is followed; 0 for the structure.
    from: usize,
    /// End of that header.
    end: usize,
    /// Offset of the next header; 0 for none.
    at: usize,
}

impl Capabilities<'_> {
    fn read(&mut self, at: usize) -> Result<Capability, InfoError> {
        if at < self.end {
            let from = self.from;
            return Err(InfoError::NotBehind { from, to: at });
        }
        let [id, version] = self
            .reader
            .words(at, "a capability")?
            .map(u16::from_le_bytes);
        let next = self.reader.u32(at + 4, "a capability")? as usize;
        let body = at + HEADER;
        (self.from, self.end, self.at) = (at, body, next);
        Ok(Capability { id, version, body })
    }
}

impl Iterator for Capabilities<'_> {
    type Item = Result<Capability, InfoError>;

    fn next(&mut self) -> Option<Self::Item> {
        let at = std::mem::take(&mut self.at);
        (at != 0).then(|| self.read(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers with this many bytes, or reports the number there would be.
    fn answer(bytes: usize) -> impl FnMut(&mut [u8]) -> Result<(), Errno> {
        move |buffer| {
            assert_eq!(buffer[4], 7, "what was asked is asked each time");
            let len = u32::try_from(bytes).map_err(|_| Errno(libc::E2BIG))?;
            buffer[..4].copy_from_slice(&len.to_ne_bytes());
            Ok(())
        }
    }

    #[test]
    fn buffer_grows_to_the_answer_and_not_past_a_bound() {
        let head = [0, 0, 0, 0, 7, 0, 0, 0];
        for bytes in [0, 8, 9, 100, ANSWER_MAX] {
            let whole = whole_answer(&head, answer(bytes)).expect("an answer");
            assert_eq!(whole.len(), bytes.max(8));
        }
        for bytes in [ANSWER_MAX + 1, u32::MAX as usize] {
            let whole = whole_answer(&head, answer(bytes));
            assert_eq!(whole, Err(Errno(libc::E2BIG)));
        }
    }

    #[test]
    fn answer_that_always_wants_more_is_an_error_in_the_end() {
        let mut rounds = 0;
        let whole = whole_answer(&[0; 8], |buffer| {
            rounds += 1;
            let len = u32::try_from(2 * buffer.len()).expect("a bounded length");
            buffer[..4].copy_from_slice(&len.to_ne_bytes());
            Ok(())
        });
        assert_eq!((whole, rounds), (Err(Errno(libc::E2BIG)), 18));
    }
}
