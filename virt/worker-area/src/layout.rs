//! Where what lies. Words are little-endian; offsets are bytes from the area's start.
//!
//! | offset | what | written by |
//! |---|---|---|
//! | 0 | magic, version, slots, data bytes of a slot, head bytes, foot bytes | the owner, once |
//! | 64 | submissions so far, whether the owner sleeps, features of the driver | the owner |
//! | 128 | answers so far, whether the worker sleeps | the worker |
//! | 192 | start: state, length of the text, facts, text | the worker, once |
//! | 4096 | submission ring, 32 bytes an entry; answer ring, 16 bytes an entry | each its own |
//! | next page | slots: a page for head and foot, then data | both |
//!
//! | entry | word | low half | high half |
//! |---|---|---|---|
//! | submission | 0 | slot | flags: 1 first window, 2 last window |
//! | | 1 | bytes that the device reads, without the head | bytes that it writes, without the foot |
//! | | 2 | of them in this window: read | written |
//! | | 3 | position of the window in the row of both | |
//! | answer | 0 | slot | 1 goes on, 2 over |
//! | | 1 | bytes written of this window | |

/// `"ecag"`.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"ecag");
pub(crate) const VERSION: u32 = 1;

pub(crate) const AT_MAGIC: usize = 0;
pub(crate) const AT_VERSION: usize = 4;
pub(crate) const AT_SLOTS: usize = 8;
pub(crate) const AT_DATA: usize = 12;
pub(crate) const AT_HEAD: usize = 16;
pub(crate) const AT_FOOT: usize = 20;

pub(crate) const AT_SUBMITTED: usize = 64;
pub(crate) const AT_OWNER_ASLEEP: usize = 68;
pub(crate) const AT_FEATURES: usize = 72;

pub(crate) const AT_ANSWERED: usize = 128;
pub(crate) const AT_WORKER_ASLEEP: usize = 132;

pub(crate) const AT_STATE: usize = 192;
pub(crate) const AT_TEXT_LEN: usize = 196;
pub(crate) const AT_FACTS: usize = 200;
pub(crate) const AT_TEXT: usize = 256;

/// The worker can begin.
pub(crate) const STATE_READY: u32 = 1;
/// It cannot, and the text says why.
pub(crate) const STATE_FAILED: u32 = 2;

pub(crate) const AT_RINGS: usize = 4096;
pub(crate) const SUBMISSION: usize = 32;
pub(crate) const ANSWER: usize = 16;

pub(crate) const PAGE: usize = 4096;
/// Offset of the foot in a slot's first page, whose first half the head has.
pub(crate) const AT_FOOT_OF_SLOT: usize = PAGE / 2;

pub(crate) const FLAG_FIRST: u32 = 1;
pub(crate) const FLAG_LAST: u32 = 2;

pub(crate) const GOES_ON: u32 = 1;
pub(crate) const OVER: u32 = 2;

/// Two halves of a word.
pub(crate) fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// A word of two halves.
pub(crate) fn word(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}
