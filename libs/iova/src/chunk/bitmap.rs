//! A set of small numbers that many cores take from and put into without a lock.
//!
//! Words of 64 bits, and one summary bit per word: "something may be there". A taker that finds an empty word
//! behind a set summary bit clears the bit, looks again, and sets it back if it was wrong.

use alloc::boxed::Box;

use lines::{AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct Bitmap {
    words: Box<[AtomicU64]>,
    summary: Box<[AtomicU64]>,
}

impl Bitmap {
    /// A set over the numbers below `len`; empty.
    pub(super) fn new(len: usize) -> Self {
        let zeroes = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect();
        let words = len.div_ceil(64);
        Self {
            words: zeroes(words),
            summary: zeroes(words.div_ceil(64)),
        }
    }

    /// Makes it the set of all numbers below `len`, or of none. Only while nobody else uses it.
    pub(super) fn fill(&self, len: usize) {
        for (group, words) in [(&self.words, len), (&self.summary, len.div_ceil(64))] {
            for (at, word) in group.iter().enumerate() {
                let bits = words.saturating_sub(at * 64).min(64);
                let all = u64::MAX.checked_shr(64 - bits as u32).unwrap_or(0);
                word.store(all, Ordering::Release);
            }
        }
    }

    /// Puts `index` in. Release: what its owner wrote before is seen by who takes it.
    pub(super) fn put(&self, index: usize) {
        self.words[index / 64].fetch_or(1 << (index % 64), Ordering::AcqRel);
        self.mark(index / 64);
    }

    fn mark(&self, word: usize) {
        // Always a read-modify-write: one that follows a taker's clearing sets the bit again; one that precedes it is
        // what the taker's clearing reads, so that its second look sees the word.
        self.summary[word / 64].fetch_or(1 << (word % 64), Ordering::AcqRel);
    }

    /// Takes `index` out; false where it is not in.
    pub(super) fn take(&self, index: usize) -> bool {
        let bit = 1 << (index % 64);
        self.words[index / 64].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// Takes the highest number not above `bound`. Reads at most every word once, plus one retry per number that another
    /// core takes meanwhile.
    pub(super) fn take_highest(&self, bound: usize) -> Option<usize> {
        let last = (bound / 64).min(self.words.len().checked_sub(1)?);
        for group in (0..=last / 64).rev() {
            let mut marks = self.summary[group].load(Ordering::Acquire);
            if group == last / 64 {
                marks &= u64::MAX >> (63 - last % 64);
            }
            while marks != 0 {
                let word = 63 - marks.leading_zeros() as usize;
                marks &= !(1 << word);
                let word = group * 64 + word;
                let mask = if word == bound / 64 {
                    u64::MAX >> (63 - bound % 64)
                } else {
                    u64::MAX
                };
                if let Some(bit) = self.take_in(word, mask) {
                    return Some(word * 64 + bit);
                }
            }
        }
        None
    }

    fn take_in(&self, word: usize, mask: u64) -> Option<usize> {
        let bits = &self.words[word];
        let mut seen = bits.load(Ordering::Relaxed);
        loop {
            if seen == 0 {
                self.summary[word / 64].fetch_and(!(1 << (word % 64)), Ordering::AcqRel);
                seen = bits.load(Ordering::Acquire);
                if seen == 0 {
                    return None;
                }
                self.mark(word);
            }
            let within = seen & mask;
            if within == 0 {
                return None;
            }
            let bit = 63 - within.leading_zeros() as usize;
            match bits.compare_exchange_weak(
                seen,
                seen & !(1 << bit),
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(bit),
                Err(now) => seen = now,
            }
        }
    }

    /// Takes `count` consecutive numbers whose first is `offset` more than a multiple of `align` (a power of two) and
    /// whose last is not above `bound`; the highest such run. Reads each word once and tries each start once.
    pub(super) fn take_run(
        &self,
        count: usize,
        align: usize,
        offset: usize,
        bound: usize,
    ) -> Option<usize> {
        let end = bound.min(self.words.len() * 64 - 1) + 1;
        let mut start = end.checked_sub(count)?;
        loop {
            // The highest start not above `start` that is aligned.
            start = start.checked_sub(start.wrapping_sub(offset) & (align - 1))?;
            match self.blocker(start, count) {
                // No run that ends above `taken` and starts at or below it can do.
                Some(taken) => start = taken.checked_sub(count)?,
                None if self.take_all(start, count) => return Some(start),
                None => start = start.checked_sub(1)?,
            }
        }
    }

    /// The lowest number in `[start, start + count)` that is not in the set.
    fn blocker(&self, start: usize, count: usize) -> Option<usize> {
        self.pieces(start, count).find_map(|(word, mask)| {
            let missing = mask & !self.words[word].load(Ordering::Relaxed);
            (missing != 0).then(|| word * 64 + missing.trailing_zeros() as usize)
        })
    }

    /// Takes all of them, or none.
    fn take_all(&self, start: usize, count: usize) -> bool {
        for (done, (word, mask)) in self.pieces(start, count).enumerate() {
            let bits = &self.words[word];
            let taken = bits.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |now| {
                (now & mask == mask).then_some(now & !mask)
            });
            if taken.is_err() {
                for (word, mask) in self.pieces(start, count).take(done) {
                    self.words[word].fetch_or(mask, Ordering::AcqRel);
                    self.mark(word);
                }
                return false;
            }
        }
        true
    }

    /// The words that `[start, start + count)` touches, and its bits in each.
    fn pieces(&self, start: usize, count: usize) -> impl Iterator<Item = (usize, u64)> {
        let end = start + count;
        (start / 64..end.div_ceil(64)).map(move |word| {
            let from = start.max(word * 64) - word * 64;
            let to = end.min(word * 64 + 64) - word * 64;
            (word, u64::MAX >> (64 - (to - from)) << from)
        })
    }

    /// Whether `index` is in the set now.
    pub(super) fn has(&self, index: usize) -> bool {
        self.words[index / 64].load(Ordering::Relaxed) >> (index % 64) & 1 != 0
    }

    /// Bytes of the words.
    pub(super) fn bytes(&self) -> usize {
        (self.words.len() + self.summary.len()) * 8
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
