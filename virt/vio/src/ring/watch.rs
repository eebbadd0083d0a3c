//! Watch of a ring: one word of guest memory that shows, by a plain load, whether there is
//! something new.

use guest_mem::{WatchWord, Window};

/// Condition on a word of memory: nothing new is there while `word & mask` is `quiet`.
#[derive(Clone, Debug)]
pub struct Watch {
    word: WatchWord,
    mask: u16,
    quiet: u16,
}

/// Place of that word.
pub(super) struct WatchPlace<'a> {
    pub(super) window: &'a Window,
    pub(super) offset: u32,
    pub(super) mask: u16,
    pub(super) quiet: u16,
}

impl WatchPlace<'_> {
    /// Makes `slot` watch this place, with the word that it has if it is the same one.
    pub(super) fn put(self, slot: &mut Option<Watch>) {
        let Self {
            window,
            offset,
            mask,
            quiet,
        } = self;
        match slot {
            Some(watch) if window.is_watched_by(&watch.word, offset) => {
                watch.mask = mask;
                watch.quiet = quiet;
            }
            _ => {
                *slot = Some(Watch {
                    word: window.watch_u16(offset),
                    mask,
                    quiet,
                })
            }
        }
    }
}

impl Watch {
    /// Whether the ring should be looked at. A hint: about one load, which orders nothing.
    #[inline]
    pub fn fires(&self) -> bool {
        self.word.load_relaxed() & self.mask != self.quiet
    }

    /// Makes it look for what `other` looks for; cheap where that is the same word.
    #[inline]
    pub fn follow(&mut self, other: &Self) {
        if !self.word.is_same(&other.word) {
            self.word = other.word.clone();
        }
        self.mask = other.mask;
        self.quiet = other.quiet;
    }
}
