//! A chain taken from a ring and not yet given back.

/// Token of a chain that a ring has handed out: returned by
/// [`Ring::advance`](super::Ring::advance), given back once to [`Ring::stage`](super::Ring::stage).
///
/// It does not refer to guest memory, so it may be kept for as long as the request takes.
///
/// One word and a half: four 16-bit fields would be stored one by one and copied together, which
/// takes a processor longer than all the rest that is done with them (see `counter.rs`).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// `id`, `descs`, `slot`, `seq`, from the lowest.
    word: u64,
    writable: u32,
}

impl Token {
    #[inline(always)]
    pub(super) fn new(id: u16, descs: u16, slot: u16, seq: u16, writable: u32) -> Self {
        let word =
            u64::from(id) | u64::from(descs) << 16 | u64::from(slot) << 32 | u64::from(seq) << 48;
        Self { word, writable }
    }

    /// Returns the identifier in the used ring: the head's index (split) or the buffer id (packed).
    #[inline(always)]
    pub fn id(self) -> u16 {
        self.word as u16
    }

    /// Ring descriptors that the chain takes up; always 1 in a split ring.
    #[inline(always)]
    pub(super) fn descs(self) -> u16 {
        (self.word >> 16) as u16
    }

    /// The journal's name for it.
    #[inline(always)]
    pub(super) fn slot(self) -> u16 {
        (self.word >> 32) as u16
    }

    /// Number of the chain since the start, modulo 2^16; 0 without IN_ORDER.
    #[inline(always)]
    pub(super) fn seq(self) -> u16 {
        (self.word >> 48) as u16
    }

    /// Bytes of its device-writable buffers.
    #[inline(always)]
    pub(crate) fn writable(self) -> u32 {
        self.writable
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token")
            .field("id", &self.id())
            .field("descs", &self.descs())
            .field("slot", &self.slot())
            .field("seq", &self.seq())
            .field("writable", &self.writable)
            .finish()
    }
}
