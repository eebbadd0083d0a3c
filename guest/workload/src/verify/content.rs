//! Model of a page's content. It accesses neither memory nor a device, and has no time.
//!
//! Content is a value that describes how every byte comes about, so that it can be copied from page
//! to block and from block to page as the bytes are, and be computed at any time. Its base says
//! where and when it was made (a [`Stamp`]), and part of it may have been overwritten since (a
//! [`Patch`]):
//!
//! | base | bytes |
//! |---|---|
//! | unknown | any: a block that was never written, or that was discarded |
//! | zero | zeros |
//! | sealed | [`crate::block`]: number, generation, seed, checksum |
//! | words | one word of 64 bits repeated, computed from place and generation: the result of `memset` and REP |
//! | bytes | one byte repeated, which follows from them |
//!
//! A [`Record`] is stored for each page and block: its content, and enough of its past to describe
//! an error.

use std::fmt;
use std::num::NonZeroU16;

use super::kinds::Kind;
use crate::block;
use crate::memory::PAGE;
use crate::pattern::{self, Random};

/// A page of memory or a block of the disk, numbered over all threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Place(u32);

impl Place {
    /// Bound of the numbers of pages, and of blocks.
    pub const LIMIT: u32 = 1 << 31;

    pub fn page(number: u32) -> Self {
        assert!(number < Self::LIMIT, "page {number}");
        Self(number | Self::LIMIT)
    }

    pub fn block(number: u32) -> Self {
        assert!(number < Self::LIMIT, "block {number}");
        Self(number)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.checked_sub(Self::LIMIT) {
            Some(page) => write!(out, "memory page {page}"),
            None => write!(out, "block {}", self.0),
        }
    }
}

/// Place where content was first made, and the number of contents made for that place until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Stamp {
    pub origin: Place,
    pub generation: u32,
}

impl Stamp {
    /// Returns the word that is repeated.
    pub fn word(self, seed: u64) -> u64 {
        (u64::from(self.origin.0) << 32 | u64::from(self.generation)) ^ key(seed)
    }

    /// Returns the byte that is repeated; not zero.
    pub fn byte(self, seed: u64) -> u8 {
        Random::new(self.word(seed)).next() as u8 | 1
    }

    fn of_word(word: u64, seed: u64) -> Self {
        let word = word ^ key(seed);
        Self {
            origin: Place((word >> 32) as u32),
            generation: word as u32,
        }
    }
}

fn key(seed: u64) -> u64 {
    Random::new(seed ^ 0x776f_7264).next()
}

impl fmt::Display for Stamp {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} in generation {}", self.origin, self.generation)
    }
}

/// Base content of a whole page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Base {
    Unknown,
    Zero,
    Sealed(Stamp),
    Words(Stamp),
    Bytes(Stamp),
}

impl fmt::Display for Base {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => write!(out, "anything"),
            Self::Zero => write!(out, "zeros"),
            Self::Sealed(stamp) => write!(out, "{stamp}"),
            Self::Words(stamp) => write!(out, "a word of {stamp}, repeated"),
            Self::Bytes(stamp) => write!(out, "a byte of {stamp}, repeated"),
        }
    }
}

/// Part of a page that has been overwritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Patch {
    pub start: u16,
    pub len: NonZeroU16,
    /// Serial number, unique in a run; the bytes follow from it.
    pub serial: u32,
}

impl Patch {
    /// Returns a patch that overwrites `start..end` of a page that may have a patch already; the
    /// range grows until it covers that one.
    ///
    /// # Panics
    /// If there is no such range in a page.
    pub fn over(before: Option<Patch>, start: usize, end: usize, serial: u32) -> Self {
        let (start, end) = match before {
            Some(patch) => (start.min(patch.start()), end.max(patch.end())),
            None => (start, end),
        };
        assert!(
            start < end && end <= PAGE,
            "bytes {start} to {end} of a page"
        );
        let narrow = |value: usize| u16::try_from(value).expect("at most a page");
        Self {
            start: narrow(start),
            len: NonZeroU16::new(narrow(end - start)).expect("not empty"),
            serial,
        }
    }

    pub fn start(self) -> usize {
        self.start.into()
    }

    pub fn end(self) -> usize {
        usize::from(self.start) + usize::from(self.len.get())
    }

    /// Writes its bytes into `out`, which has its length.
    pub fn render(self, seed: u64, out: &mut [u8]) {
        let seed = seed ^ u64::from(self.serial).rotate_left(32) ^ u64::from(self.start);
        pattern::fill(seed, 0, out);
    }
}

/// Content of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Content {
    pub base: Base,
    pub patch: Option<Patch>,
}

/// A guest of 256 MiB stores some 70,000 of them.
const _: () = assert!(size_of::<Content>() == 20);

impl Content {
    pub const UNKNOWN: Self = Self::whole(Base::Unknown);
    pub const ZERO: Self = Self::whole(Base::Zero);

    pub const fn whole(base: Base) -> Self {
        Self { base, patch: None }
    }

    pub fn is_known(self) -> bool {
        self.base != Base::Unknown
    }

    /// Writes the page into `out`.
    ///
    /// # Panics
    /// If the content is unknown.
    pub fn render(self, seed: u64, out: &mut [u8]) {
        match self.base {
            Base::Unknown => panic!("unknown content is not looked at"),
            Base::Zero => out.fill(0),
            Base::Sealed(Stamp { origin, generation }) => {
                block::seal(out, origin.0.into(), generation.into(), seed);
            }
            Base::Words(stamp) => {
                for word in out.as_chunks_mut::<8>().0 {
                    *word = stamp.word(seed).to_le_bytes();
                }
            }
            Base::Bytes(stamp) => out.fill(stamp.byte(seed)),
        }
        if let Some(patch) = self.patch {
            patch.render(seed, &mut out[patch.start()..patch.end()]);
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.base)?;
        if let Some(patch) = self.patch {
            let (start, end, serial) = (patch.start(), patch.end(), patch.serial);
            write!(
                out,
                ", bytes {start:#x} to {end:#x} overwritten (patch {serial})"
            )?;
        }
        Ok(())
    }
}

/// Identification of bytes that differ from the wanted ones, by their own content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// All of it is this base.
    Whole(Base),
    /// It begins as this base, and its checksum is wrong: patched, torn, or damaged.
    Begins(Base),
    /// One byte repeated.
    Byte(u8),
    /// A page of a run with another seed.
    OtherRun(u64),
    /// None of these.
    Nothing,
}

impl Found {
    pub fn identify(data: &[u8], seed: u64) -> Self {
        let words = data.as_chunks::<8>().0;
        let first = words[0];
        if words.iter().all(|word| *word == first) {
            return match first {
                [0, ..] if first == [0; 8] => Self::Whole(Base::Zero),
                [byte, ..] if first == [byte; 8] => Self::Byte(byte),
                _ => Self::Whole(Base::Words(Stamp::of_word(u64::from_le_bytes(first), seed))),
            };
        }
        let Some(says) = block::identify(data) else {
            return Self::Nothing;
        };
        if says.seed != seed {
            return Self::OtherRun(says.seed);
        }
        let (Ok(origin), Ok(generation)) = (says.number.try_into(), says.generation.try_into())
        else {
            return Self::Nothing;
        };
        let base = Base::Sealed(Stamp {
            origin: Place(origin),
            generation,
        });
        if says.is_whole {
            Self::Whole(base)
        } else {
            Self::Begins(base)
        }
    }

    fn base(self) -> Option<Base> {
        match self {
            Self::Whole(base) | Self::Begins(base) => Some(base),
            Self::Byte(_) | Self::OtherRun(_) | Self::Nothing => None,
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(base) => write!(out, "{base}"),
            Self::Begins(base) => write!(out, "the beginning of {base}, but another checksum"),
            Self::Byte(byte) => write!(out, "the byte {byte:#04x}, repeated"),
            Self::OtherRun(seed) => write!(out, "a page of a run with seed {seed}"),
            Self::Nothing => write!(out, "nothing that this program writes"),
        }
    }
}

/// One change of a page's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Change {
    /// Number of the operation, among all of its thread.
    operation: u32,
    /// [`fingerprint`] of the base before it.
    before: u32,
    kind: Kind,
}

/// Number of changes that are stored.
const PAST: usize = 3;

/// State that is stored for a page or block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    content: Content,
    /// Number of contents made for this place.
    generation: u32,
    /// Number of the operation that last found it right.
    seen: u32,
    /// Its changes, the latest first.
    past: [Option<Change>; PAST],
}

/// With [`super::BLOCKS_MAX`] and 150 MiB: 4.5 MiB.
const _: () = assert!(size_of::<Record>() == 64);

impl Record {
    pub fn new(content: Content) -> Self {
        Self {
            content,
            generation: 0,
            seen: 0,
            past: [None; PAST],
        }
    }

    pub fn content(&self) -> Content {
        self.content
    }

    /// Returns a new stamp of this place.
    pub fn stamp(&mut self, origin: Place) -> Stamp {
        self.generation += 1;
        let generation = self.generation;
        Stamp { origin, generation }
    }

    /// Sets its content, by an operation of this number and kind.
    pub fn put(&mut self, content: Content, operation: u32, kind: Kind) {
        let before = fingerprint(self.content.base);
        self.past.rotate_right(1);
        self.past[0] = Some(Change {
            operation,
            before,
            kind,
        });
        self.content = content;
    }

    /// Notes that an operation of this number has found it right.
    pub fn saw(&mut self, operation: u32) {
        self.seen = operation;
    }

    /// Describes how the content found at a place with this record relates to the wanted one.
    pub fn relation(&self, place: Place, found: Found) -> String {
        let Some(base) = found.base() else {
            return "damaged".into();
        };
        if base == self.content.base {
            return "right in part".into();
        }
        let is_before = |past: &Option<Change>| past.is_some_and(|c| c.before == fingerprint(base));
        if let Some(age) = self.past.iter().position(is_before) {
            return format!("stale: what it held {} changes ago", age + 1);
        }
        match base {
            Base::Sealed(stamp) | Base::Words(stamp) if stamp.origin == place => {
                "stale: it was made for this place".into()
            }
            Base::Sealed(_) | Base::Words(_) => "foreign".into(),
            _ => "lost".into(),
        }
    }

    /// Describes its changes, the latest first.
    pub fn past(&self) -> String {
        let mut text = String::new();
        for change in self.past.iter().flatten() {
            let (kind, operation) = (change.kind.name(), change.operation);
            text.push_str(&format!("{kind} in operation {operation}, "));
        }
        match self.seen {
            0 => text.push_str("never seen right"),
            seen => text.push_str(&format!("last seen right in operation {seen}")),
        }
        text
    }
}

/// Distinguishes bases that one place has had; two are alike with probability 2⁻³².
fn fingerprint(base: Base) -> u32 {
    let (kind, stamp) = match base {
        Base::Unknown => (0, None),
        Base::Zero => (1, None),
        Base::Sealed(stamp) => (2, Some(stamp)),
        Base::Words(stamp) => (3, Some(stamp)),
        Base::Bytes(stamp) => (4, Some(stamp)),
    };
    let word = stamp.map_or(0, |stamp| stamp.word(0));
    Random::new(word.wrapping_add(kind)).next() as u32
}

/// Difference of a page from its wanted content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wrong {
    /// First byte that differs: its index, the wanted value, the value found.
    pub first: (usize, u8, u8),
    pub last: usize,
    pub bytes: usize,
}

impl Wrong {
    /// Compares a part of a page that begins at byte `start`; `None` if `found` is as wanted.
    ///
    /// # Panics
    /// If one is longer than the other.
    pub fn between(wanted: &[u8], found: &[u8], start: usize) -> Option<Self> {
        assert_eq!(wanted.len(), found.len(), "the same part of a page");
        if wanted == found {
            return None;
        }
        let mut differ = (start..)
            .zip(wanted.iter().zip(found))
            .filter(|(_, (wanted, found))| wanted != found);
        let (at, (wanted, found)) = differ.next().expect("they differ");
        let (last, more) = differ.fold((at, 0), |(_, count), (at, _)| (at, count + 1));
        Some(Self {
            first: (at, *wanted, *found),
            last,
            bytes: 1 + more,
        })
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (at, wanted, found) = self.first;
        write!(
            out,
            "byte {at:#x}: wanted {wanted:#04x}, found {found:#04x} ({} bytes differ, the last \
             {:#x})",
            self.bytes, self.last
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 6;

    fn stamp(page: u32, generation: u32) -> Stamp {
        let origin = Place::page(page);
        Stamp { origin, generation }
    }

    fn bytes(content: Content) -> Vec<u8> {
        let mut out = vec![0xee; PAGE];
        content.render(SEED, &mut out);
        out
    }

    fn found(content: Content) -> Found {
        Found::identify(&bytes(content), SEED)
    }

    #[test]
    fn every_base_is_known_again_from_its_bytes() {
        for base in [
            Base::Zero,
            Base::Sealed(stamp(3, 4)),
            Base::Words(stamp(5, 6)),
        ] {
            assert_eq!(found(Content::whole(base)), Found::Whole(base));
        }
        let byte = stamp(1, 2).byte(SEED);
        assert_eq!(
            found(Content::whole(Base::Bytes(stamp(1, 2)))),
            Found::Byte(byte)
        );
        let other = Content::whole(Base::Sealed(stamp(3, 4)));
        assert_eq!(Found::identify(&bytes(other), 7), Found::OtherRun(SEED));
        assert_eq!(Found::identify(&[[1, 2]; PAGE / 2].concat()[..], SEED), {
            let word = u64::from_le_bytes([1, 2, 1, 2, 1, 2, 1, 2]);
            Found::Whole(Base::Words(Stamp::of_word(word, SEED)))
        });
        let mut nothing = vec![1; PAGE];
        nothing[9] = 2;
        assert_eq!(Found::identify(&nothing, SEED), Found::Nothing);
    }

    #[test]
    fn page_and_block_of_one_number_and_two_generations_differ() {
        let of = |origin, generation| Stamp { origin, generation };
        let stamps = [
            of(Place::page(1), 1),
            of(Place::block(1), 1),
            of(Place::page(1), 2),
            of(Place::page(2), 1),
        ];
        let kinds: [fn(Stamp) -> Base; 2] = [Base::Sealed, Base::Words];
        for kind in kinds {
            for (at, one) in stamps.iter().enumerate() {
                for other in &stamps[at + 1..] {
                    let (one, other) = (Content::whole(kind(*one)), Content::whole(kind(*other)));
                    assert_ne!(bytes(one), bytes(other));
                }
            }
        }
    }

    #[test]
    fn a_patch_changes_its_bytes_and_no_others() {
        let mut content = Content::whole(Base::Sealed(stamp(1, 1)));
        let before = bytes(content);
        content.patch = Some(Patch::over(None, 100, 164, 1));
        let after = bytes(content);
        assert_eq!(
            (&after[..100], &after[164..]),
            (&before[..100], &before[164..])
        );
        assert_ne!(after[100..164], before[100..164]);
        assert!(matches!(found(content), Found::Begins(Base::Sealed(_))));
        content.patch = Some(Patch::over(None, 100, 164, 2));
        assert_ne!(bytes(content), after, "each patch has bytes of its own");
    }

    #[test]
    fn a_second_patch_covers_the_first() {
        let over = |start, end| {
            let first = Patch::over(None, 100, 200, 1);
            let patch = Patch::over(Some(first), start, end, 2);
            (patch.start(), patch.end())
        };
        assert_eq!(over(50, 60), (50, 200));
        assert_eq!(over(120, 130), (100, 200));
        assert_eq!(over(150, PAGE), (100, PAGE));
        assert_eq!(over(0, PAGE), (0, PAGE));
    }

    #[test]
    fn a_stale_page_is_told_from_a_foreign_one() {
        let place = Place::page(1);
        let mut record = Record::new(Content::ZERO);
        let mut put = |content, operation| record.put(content, operation, Kind::Fill);
        let was_block = Content::whole(Base::Sealed(Stamp {
            origin: Place::block(9),
            generation: 3,
        }));
        put(was_block, 11);
        put(Content::whole(Base::Sealed(stamp(1, 1))), 12);
        put(Content::whole(Base::Words(stamp(1, 2))), 13);
        record.saw(14);
        let says = |content| record.relation(place, found(content));
        let sealed = |page, generation| Content::whole(Base::Sealed(stamp(page, generation)));
        assert_eq!(says(sealed(1, 1)), "stale: what it held 1 changes ago");
        assert_eq!(says(was_block), "stale: what it held 2 changes ago");
        assert_eq!(says(Content::ZERO), "stale: what it held 3 changes ago");
        assert_eq!(says(sealed(1, 7)), "stale: it was made for this place");
        assert_eq!(says(sealed(2, 1)), "foreign");
        assert_eq!(
            record.past(),
            "fill in operation 13, fill in operation 12, fill in operation 11, \
             last seen right in operation 14"
        );
        let mut torn = record.content();
        torn.patch = Some(Patch::over(None, 8, 9, 1));
        assert_eq!(record.relation(place, found(torn)), "damaged");
        record.put(sealed(1, 8), 15, Kind::Fill);
        let mut torn = sealed(1, 8);
        torn.patch = Some(Patch::over(None, 40, 41, 1));
        assert_eq!(record.relation(place, found(torn)), "right in part");
        assert_eq!(record.relation(place, Found::Whole(Base::Zero)), "lost");
    }

    #[test]
    fn the_first_the_last_and_the_number_of_wrong_bytes_are_found() {
        let wanted = bytes(Content::ZERO);
        assert_eq!(Wrong::between(&wanted, &wanted, 0), None);
        let mut found = wanted.clone();
        (found[7], found[9], found[4000]) = (1, 2, 3);
        let wrong = Wrong::between(&wanted, &found, 0).unwrap();
        let text = "byte 0x7: wanted 0x00, found 0x01 (3 bytes differ, the last 0xfa0)";
        assert_eq!(wrong.to_string(), text);
        let wrong = Wrong::between(&wanted[..2], &found[8..10], 8).unwrap();
        assert_eq!((wrong.first, wrong.last, wrong.bytes), ((9, 0, 2), 9, 1));
    }
}
