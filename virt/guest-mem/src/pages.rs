//! Batch of pages that the pager is about to evict.

use crate::addr::{Gpa, PAGE_SIZE};

/// Batch of up to 32 pages of guest memory. A subset is a mask with a bit for each page, the first
/// page lowest: the set that one device uses is then one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Page numbers, sorted, each with its bit.
    sorted: [(u64, u8); Self::MAX],
    count: usize,
}

impl Pages {
    /// Most pages of a batch: the number of bits of a mask.
    pub const MAX: usize = 32;

    /// These pages, of 4 KiB each; `None` if an address is not a page's, or there are more than
    /// [`MAX`](Self::MAX).
    pub fn new(pages: &[Gpa]) -> Option<Self> {
        if pages.len() > Self::MAX || pages.iter().any(|page| !page.is_aligned(PAGE_SIZE)) {
            return None;
        }
        let mut sorted = [(u64::MAX, 0); Self::MAX];
        for (bit, (entry, page)) in (0..).zip(sorted.iter_mut().zip(pages)) {
            *entry = (page.raw() / PAGE_SIZE, bit);
        }
        sorted[..pages.len()].sort_unstable();
        let count = pages.len();
        Some(Self { sorted, count })
    }

    fn sorted(&self) -> &[(u64, u8)] {
        &self.sorted[..self.count]
    }

    /// All of them.
    pub fn all(&self) -> u32 {
        // Up to 32 bits.
        ((1_u64 << self.count) - 1) as u32
    }

    /// Those in which some of the `len` bytes from `gpa` on lie.
    pub fn touched(&self, gpa: Gpa, len: u64) -> u32 {
        if len == 0 {
            return 0;
        }
        let first = gpa.raw() / PAGE_SIZE;
        let last = gpa.raw().saturating_add(len - 1) / PAGE_SIZE;
        let from = self.sorted().partition_point(|(page, _)| *page < first);
        let touched = self.sorted()[from..].iter();
        touched
            .take_while(|(page, _)| *page <= last)
            .fold(0, |mask, (_, bit)| mask | 1 << bit)
    }

    /// The pages of `mask`, lowest address first, each with its bit.
    pub fn of(&self, mask: u32) -> impl Iterator<Item = (Gpa, u32)> {
        let named = self.sorted().iter().map(|(page, bit)| (page, 1 << bit));
        named
            .filter(move |(_, bit)| mask & bit != 0)
            .map(|(page, bit)| (Gpa::new(page * PAGE_SIZE), bit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nothing_but_up_to_32_whole_pages_is_taken() {
        let pages: Vec<_> = (0..33).map(|at| Gpa::new(at * PAGE_SIZE)).collect();
        assert_eq!(Pages::new(&pages), None);
        assert_eq!(Pages::new(&pages[..32]).unwrap().all(), u32::MAX);
        assert_eq!(Pages::new(&[]).unwrap().all(), 0);
        assert_eq!(Pages::new(&[Gpa::new(0x1800)]), None);
    }

    proptest! {
        /// Against a comparison with each page; the same page may be named twice.
        #[test]
        fn ranges_touch_what_a_comparison_with_each_page_says(
            pages in prop::collection::vec(0_u64..64, 0..=32),
            start in 0_u64..70 * PAGE_SIZE,
            len in prop_oneof![0_u64..3, 0..20 * PAGE_SIZE, Just(u64::MAX)],
            mask: u32,
        ) {
            let named: Vec<_> = pages.iter().map(|page| Gpa::new(page * PAGE_SIZE)).collect();
            let set = Pages::new(&named).unwrap();
            let end = start.saturating_add(len);
            let wanted = (0..).zip(&pages).fold(0, |wanted, (bit, page)| {
                let touches = len != 0 && start < (page + 1) * PAGE_SIZE && page * PAGE_SIZE < end;
                wanted | u32::from(touches) << bit
            });
            prop_assert_eq!(set.touched(Gpa::new(start), len), wanted);
            let of: u32 = set.of(mask).map(|(page, bit)| {
                assert_eq!(named[bit.trailing_zeros() as usize], page);
                bit
            }).sum();
            prop_assert_eq!(of, mask & set.all());
        }
    }
}
