//! Operations on pages and blocks, and their frequencies in each phase.

/// A kind of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Pages are written by the processor.
    Fill,
    /// Pages are read by it, and compared.
    Check,
    /// Part of a page is overwritten.
    Patch,
    /// One REP instruction, or one `memcpy`, stores to the end of a page, pages behind it, and the
    /// beginning of another.
    Straddle,
    /// Pages are filled with zeros.
    Zero,
    /// Pages are filled with a word or a byte, by one REP instruction or one `memset`.
    Set,
    /// Pages are copied, by one REP instruction or one `memcpy`.
    Copy,
    /// Pages are given back, and read as zeros.
    GiveBack,
    /// Pages are unmapped and mapped again.
    Remap,
    /// A child checks pages that its parent overwrites, and overwrites some itself.
    Fork,
    /// Pages are written to blocks through the page cache.
    WriteCached,
    /// Pages are written to blocks by direct I/O.
    WriteDirect,
    /// Blocks are read into pages through the page cache.
    ReadCached,
    /// Blocks are read into pages by direct I/O.
    ReadDirect,
    /// Blocks are read both ways, and compared.
    ReadTwice,
    /// Part of a block is read, to a place that is no page of its own.
    ReadPart,
    /// Part of a block is overwritten.
    WritePart,
    /// One block is read into many pages.
    ReadMany,
    /// One page is written to two blocks.
    WriteTwice,
    /// A block is read into a page, and the page at once written to another block.
    Relay,
    /// A block is overwritten that pages were read from.
    Replace,
    /// The device is flushed.
    Sync,
    /// Blocks are discarded.
    Discard,
    /// Blocks are zeroed by the device (as by `BLKZEROOUT`), and stay allocated or not.
    ZeroOut,
    /// The page cache is to forget blocks.
    Forget,
    /// The page cache is to forget everything.
    DropCaches,
}

impl Kind {
    /// All, in the order of the report.
    pub const ALL: [Kind; 26] = [
        Self::Fill,
        Self::Check,
        Self::Patch,
        Self::Straddle,
        Self::Zero,
        Self::Set,
        Self::Copy,
        Self::GiveBack,
        Self::Remap,
        Self::Fork,
        Self::WriteCached,
        Self::WriteDirect,
        Self::ReadCached,
        Self::ReadDirect,
        Self::ReadTwice,
        Self::ReadPart,
        Self::WritePart,
        Self::ReadMany,
        Self::WriteTwice,
        Self::Relay,
        Self::Replace,
        Self::Sync,
        Self::Discard,
        Self::ZeroOut,
        Self::Forget,
        Self::DropCaches,
    ];

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fill => "fill",
            Self::Check => "check",
            Self::Patch => "patch",
            Self::Straddle => "straddle",
            Self::Zero => "zero",
            Self::Set => "set",
            Self::Copy => "copy",
            Self::GiveBack => "give-back",
            Self::Remap => "remap",
            Self::Fork => "fork",
            Self::WriteCached => "write-cached",
            Self::WriteDirect => "write-direct",
            Self::ReadCached => "read-cached",
            Self::ReadDirect => "read-direct",
            Self::ReadTwice => "read-twice",
            Self::ReadPart => "read-part",
            Self::WritePart => "write-part",
            Self::ReadMany => "read-many",
            Self::WriteTwice => "write-twice",
            Self::Relay => "relay",
            Self::Replace => "replace",
            Self::Sync => "sync",
            Self::Discard => "discard",
            Self::ZeroOut => "zero-out",
            Self::Forget => "forget",
            Self::DropCaches => "drop-caches",
        }
    }
}

/// Phase of a thread: the operations that prevail for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Pages and blocks are filled, in order.
    Fill,
    /// All operations on all pages and blocks, in small pieces.
    Fragment,
    /// Pages and blocks are emptied.
    Clear,
}

impl Phase {
    /// All, in the order they follow each other.
    pub const ALL: [Phase; 3] = [Phase::Fill, Phase::Fragment, Phase::Clear];

    /// Its name in lines of progress.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fill => "fill",
            Self::Fragment => "fragment",
            Self::Clear => "clear",
        }
    }

    /// Returns the number of a thread's operations in it. It is small, so that the phases take
    /// turns in a slow machine too; from one phase to the next a thousand pages are emptied, and
    /// about as many filled.
    pub(super) fn length(self) -> u32 {
        match self {
            Self::Fill | Self::Clear => 128,
            Self::Fragment => 256,
        }
    }

    /// Returns the operations done in it, each with its relative frequency.
    pub(super) fn kinds(self) -> &'static [(Kind, u64)] {
        match self {
            Self::Fill => &[
                (Kind::Fill, 400),
                (Kind::Check, 200),
                (Kind::Set, 30),
                (Kind::Copy, 30),
                (Kind::WriteCached, 100),
                (Kind::WriteDirect, 100),
                (Kind::ReadCached, 50),
                (Kind::ReadDirect, 50),
                (Kind::ReadTwice, 20),
                (Kind::Sync, 5),
            ],
            Self::Fragment => &[
                (Kind::Fill, 60),
                (Kind::Check, 200),
                (Kind::Patch, 60),
                (Kind::Straddle, 40),
                (Kind::Set, 40),
                (Kind::Copy, 80),
                (Kind::GiveBack, 20),
                (Kind::Fork, 5),
                (Kind::WriteCached, 40),
                (Kind::WriteDirect, 60),
                (Kind::ReadCached, 50),
                (Kind::ReadDirect, 70),
                (Kind::ReadTwice, 40),
                (Kind::ReadPart, 30),
                (Kind::WritePart, 40),
                (Kind::ReadMany, 20),
                (Kind::WriteTwice, 30),
                (Kind::Relay, 50),
                (Kind::Replace, 30),
                (Kind::Sync, 5),
                (Kind::Forget, 10),
                (Kind::DropCaches, 1),
            ],
            Self::Clear => &[
                (Kind::Check, 250),
                (Kind::Zero, 150),
                (Kind::Set, 50),
                (Kind::GiveBack, 120),
                (Kind::Remap, 10),
                (Kind::Fork, 5),
                (Kind::ReadTwice, 80),
                (Kind::Discard, 50),
                (Kind::ZeroOut, 60),
                (Kind::Sync, 10),
                (Kind::Forget, 20),
                (Kind::DropCaches, 2),
            ],
        }
    }
}

/// Counts of all kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts([Count; Kind::ALL.len()]);

/// Count of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// Operations.
    pub operations: u64,
    /// Pages and blocks that they accessed.
    pub pages: u64,
}

impl Counts {
    /// Counts one operation on `pages` pages.
    pub(super) fn add(&mut self, kind: Kind, pages: usize) {
        let count = &mut self.0[kind as usize];
        count.operations += 1;
        count.pages += pages as u64;
    }

    /// Adds the counts of another thread.
    pub(super) fn add_all(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            mine.operations += theirs.operations;
            mine.pages += theirs.pages;
        }
    }

    /// Returns the count of one kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> Count {
        self.0[kind as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_count_its_name_and_a_phase() {
        for (at, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(at, kind as usize);
            let named = |other: &&Kind| other.name() == kind.name();
            assert_eq!(Kind::ALL.iter().filter(named).count(), 1);
            let mut phases = Phase::ALL.iter().flat_map(|phase| phase.kinds());
            assert!(
                phases.any(|(other, often)| *other == kind && *often > 0),
                "{kind:?}"
            );
        }
    }
}
