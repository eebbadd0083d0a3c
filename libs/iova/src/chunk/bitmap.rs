//! A set of small numbers that many cores take from and put into without a lock: a bit each.
//!
//! There is no summary of the words: one that a taker clears while another puts would, for a
//! moment, hide a number that is in the set, and a space would call itself exhausted that is not. A
//! search reads at most every word once, 2 KiB for a zone of the default size, and goes on behind a
//! word in which another core was faster.

use alloc::boxed::Box;

use lines::{AtomicU64, Ordering};

use super::layout::FULL;

#[derive(Debug)]
pub(super) struct Bitmap(Box<[AtomicU64]>);

/// The lowest `count` bits; 64 for more.
fn low(count: usize) -> u64 {
    u64::MAX >> (64 - count.clamp(1, 64))
}

impl Bitmap {
    /// A set over the numbers below `len`; empty.
    pub(super) fn new(len: usize) -> Self {
        Self((0..len.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Makes it the set of all numbers in `first..end`. The caller must be its only user.
    pub(super) fn fill(&self, first: usize, end: usize) {
        self.0
            .iter()
            .for_each(|word| word.store(0, Ordering::Relaxed));
        for (word, mask) in pieces(first, end) {
            self.0[word].store(mask, Ordering::Release);
        }
    }

    /// Puts `index` in. Release: the caller's earlier writes are seen by the core that takes it.
    pub(super) fn put(&self, index: usize) {
        self.0[index / 64].fetch_or(1 << (index % 64), Ordering::AcqRel);
    }

    /// Takes `index` out; false where it is not in.
    pub(super) fn take(&self, index: usize) -> bool {
        let bit = 1 << (index % 64);
        self.0[index / 64].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// Takes the highest number not above `bound`.
    pub(super) fn take_highest(&self, bound: usize) -> Option<usize> {
        self.take_run(1, 0, 0, bound)
    }

    /// Takes `count` consecutive numbers whose first is `offset` (a multiple of 64) more than a
    /// multiple of `2^order`, which is at least `count`, and whose last is not above `bound`; the
    /// highest such run.
    pub(super) fn take_run(
        &self,
        count: usize,
        order: u32,
        offset: usize,
        bound: usize,
    ) -> Option<usize> {
        let end = bound.saturating_add(1).min(self.0.len() * 64);
        if order > 6 {
            // Runs that start with a word.
            let align = 1_usize.checked_shl(order)?;
            let most = end.checked_sub(count)?;
            let top = most.checked_sub(most.wrapping_sub(offset) & (align - 1))?;
            let mut starts = (0..=top / align).map(|step| top - step * align);
            return starts.find(|&start| self.take_all(start, start + count));
        }
        for at in (0..end.div_ceil(64)).rev() {
            let room = (end - at * 64 + 1).saturating_sub(count);
            let starts = match room {
                0 => 0,
                _ => FULL[order as usize] & low(room),
            };
            let word = &self.0[at];
            let mut seen = word.load(Ordering::Relaxed);
            // Each further iteration is one in which another core changed the word.
            while seen != 0 {
                let fits = starting(seen, count) & starts;
                let Some(bit) = fits.checked_ilog2() else {
                    break;
                };
                let run = low(count) << bit;
                let taken = word.compare_exchange_weak(
                    seen,
                    seen & !run,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                match taken {
                    Ok(_) => return Some(at * 64 + bit as usize),
                    Err(now) => seen = now,
                }
            }
        }
        None
    }

    /// Takes all of them, or none.
    fn take_all(&self, start: usize, end: usize) -> bool {
        // A run that is put back below was missing from the set for a moment; so nothing is taken
        // unless the run looks complete.
        let is_missing =
            |(word, mask): (usize, u64)| mask & !self.0[word].load(Ordering::Relaxed) != 0;
        if pieces(start, end).any(is_missing) {
            return false;
        }
        for (done, (word, mask)) in pieces(start, end).enumerate() {
            let taken = self.0[word].fetch_update(Ordering::AcqRel, Ordering::Relaxed, |now| {
                (now & mask == mask).then_some(now & !mask)
            });
            if taken.is_err() {
                for (word, mask) in pieces(start, end).take(done) {
                    self.0[word].fetch_or(mask, Ordering::AcqRel);
                }
                return false;
            }
        }
        true
    }

    /// Whether `index` is in the set now.
    pub(super) fn has(&self, index: usize) -> bool {
        let word = self.0.get(index / 64);
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (index % 64) & 1 != 0)
    }

    /// Bytes of the words.
    pub(super) fn bytes(&self) -> usize {
        self.0.len() * 8
    }
}

/// The bits at which `count` set bits start, at most 64.
fn starting(mut word: u64, count: usize) -> u64 {
    let mut known = 1;
    while known < count {
        let more = known.min(count - known);
        word &= word >> more;
        known += more;
    }
    word
}

/// The words that `start..end` touches, and its bits in each.
fn pieces(start: usize, end: usize) -> impl Iterator<Item = (usize, u64)> {
    (start / 64..end.div_ceil(64)).map(move |word| {
        let from = start.max(word * 64) - word * 64;
        let to = end.min(word * 64 + 64) - word * 64;
        (word, low(to - from) << from)
    })
}

#[cfg(all(test, not(loom)))]
mod tests;
