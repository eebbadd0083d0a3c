//! Ranges that a core has at hand: plain memory of its handle, a stack per class.

use alloc::vec::Vec;

use super::layout::{CLASSES, CLASSES_PER_LANE, FULL, MAX_ORDER, WORD_PAGES, bits, class_of};

/// Ranges a core keeps ready, by class: 256 to 1536 pages of each. What a loop over mixed sizes takes and gives of one class
/// goes up and down like a random walk, and each end of it costs a look at words.
pub(super) const READY: [usize; MAX_ORDER + 1] = [256, 128, 128, 64, 48, 48, 16, 4, 2];

/// Free ranges of one core, by class. Room for [`READY`] is made with the first word of a class.
#[derive(Debug)]
pub(super) struct Ready {
    /// Those of the preferred lane come first, so that its orders are their numbers.
    stacks: [Stack; CLASSES],
    /// What makes them so: its class of single pages.
    first: u8,
}

/// Free ranges of a class: the first pages, the one freed last on top. Of 32 bytes, which makes its place a shift.
#[derive(Debug)]
#[repr(align(32))]
pub(super) struct Stack(Vec<u64>);

impl Ready {
    pub(super) fn new(preferred: usize) -> Self {
        Self {
            stacks: core::array::from_fn(|_| Stack(Vec::new())),
            first: class_of(preferred, 0),
        }
    }

    /// Where the ranges of a class are, of which the low six bits are looked at.
    #[inline]
    fn place(&self, class: u8) -> usize {
        usize::from(class ^ self.first) % CLASSES
    }

    /// The ranges of a class.
    #[inline]
    pub(super) fn of(&mut self, class: u8) -> &mut Stack {
        &mut self.stacks[self.place(class)]
    }

    /// Pages of all ranges of a lane.
    pub(super) fn pages(&self, lane: usize) -> u64 {
        let stack = |order| &self.stacks[self.place(class_of(lane, order))];
        (0..=MAX_ORDER)
            .map(|order| (stack(order).len() as u64) << order)
            .sum()
    }

    /// The ranges of an order in the preferred lane.
    #[inline(always)]
    pub(super) fn preferred(&mut self, order: usize) -> &mut Stack {
        &mut self.stacks[order % CLASSES]
    }

    /// The class of an order in the preferred lane.
    pub(super) fn preferred_class(&self, order: usize) -> u8 {
        self.first + order as u8
    }

    /// Makes room for a class.
    pub(super) fn open(&mut self, class: u8) {
        let room = READY[usize::from(class) % CLASSES_PER_LANE];
        let Stack(ready) = self.of(class);
        if ready.capacity() == 0 {
            ready.reserve_exact(room);
        }
    }

    pub(super) fn clear(&mut self) {
        self.stacks.iter_mut().for_each(|stack| stack.0.clear());
    }
}

impl Stack {
    /// The range that was kept last.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Option<u64> {
        self.0.pop()
    }

    /// Keeps a range ready; `false` where there are enough.
    #[inline(always)]
    pub(super) fn keep(&mut self, page: u64) -> bool {
        let has_room = self.0.len() < self.0.capacity();
        if has_room {
            self.0.push(page);
        }
        has_room
    }

    /// Keeps as many as there is room for of the ranges of a word whose first page is `base`: which, a bit each.
    pub(super) fn keep_all(&mut self, base: u64, free: u64, order: usize) -> u64 {
        let room = self.0.capacity() - self.0.len();
        if order <= 6 && free == FULL[order] && room >= (WORD_PAGES >> order) as usize {
            // All at once: words that strangers emptied are this.
            let starts = 0..WORD_PAGES >> order;
            self.0.extend(starts.map(|at| base + (at << order)));
            return free;
        }
        let mut kept = 0;
        for at in bits(free).take(room) {
            self.0.push(base + at);
            kept |= 1 << at;
        }
        kept
    }

    /// Whether more should be made ready, once something is.
    pub(super) fn is_below_half(&self) -> bool {
        self.0.len() < self.0.capacity() / 2
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The range that was kept first but for `at` others.
    pub(super) fn get(&self, at: usize) -> u64 {
        self.0[at]
    }

    /// Forgets the `count` ranges that were kept first.
    pub(super) fn forget(&mut self, count: usize) {
        self.0.drain(..count);
    }

    /// The range of an order that was kept last of those that end at or below `bound`.
    pub(super) fn take_below(&mut self, order: usize, bound: u64) -> Option<u64> {
        let last = (1 << order) - 1;
        let at = self.0.iter().rposition(|page| page + last <= bound)?;
        Some(self.0.remove(at))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_kept_as_far_as_there_is_room_lowest_first() {
        for order in 0..=MAX_ORDER {
            let class = class_of(1, order);
            for free in [FULL[order], FULL[order] & 0x0011_0001_0110_1011] {
                let mut ready = Ready::new(1);
                ready.open(class);
                let stack = ready.of(class);
                let mut starts: Vec<u64> = bits(free).map(|at| 640 + at).collect();
                assert_eq!(stack.keep_all(640, free, order), free);
                // Room for one more and not for two.
                let mut len = stack.len();
                while len < READY[order] - 1 {
                    assert!(stack.keep(0));
                    starts.push(0);
                    len += 1;
                }
                let more = stack.keep_all(64, free, order);
                let expected = if len == READY[order] {
                    0
                } else {
                    free & free.wrapping_neg()
                };
                assert_eq!(more, expected);
                starts.extend(bits(more).map(|at| 64 + at));
                assert!(len == READY[order] || !stack.keep(0));
                let kept: Vec<u64> = (0..stack.len()).map(|at| stack.get(at)).collect();
                assert_eq!(kept, starts);
                assert_eq!(ready.preferred(order).take(), starts.pop());
            }
        }
    }
}
