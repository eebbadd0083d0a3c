//! Magazines, the two that a core keeps per class, and the depot where cores exchange them: the
//! exchange is all that cores share.

use alloc::vec::Vec;

use lines::Lock;

/// First pages of free ranges of one class. Its capacity is 0 until a core first needs it.
pub(super) type Magazine = Vec<u64>;

/// Magazines that no core has now.
pub(super) struct Depot {
    inner: Lock<Magazines>,
    /// Most full magazines, and most empty ones.
    most: usize,
}

struct Magazines {
    full: Vec<Magazine>,
    empty: Vec<Magazine>,
}

impl Depot {
    pub(super) fn new(most: usize) -> Self {
        Self {
            inner: Lock::new(Magazines {
                full: Vec::new(),
                empty: Vec::new(),
            }),
            most,
        }
    }

    /// A full magazine, if there is one, for an empty one.
    fn full_for_empty(&self, magazine: &mut Magazine) -> bool {
        debug_assert!(magazine.is_empty());
        let mut inner = self.inner.lock();
        let Some(full) = inner.full.pop() else {
            return false;
        };
        let empty = core::mem::replace(magazine, full);
        if empty.capacity() > 0 && inner.empty.len() < self.most {
            inner.empty.push(empty);
        }
        true
    }

    /// An empty magazine for a full one. A full one for which there is no room is handed back: its
    /// ranges belong to the space.
    fn empty_for_full(&self, magazine: &mut Magazine, size: usize) -> Option<Magazine> {
        let mut inner = self.inner.lock();
        let empty = inner.empty.pop();
        let has_room = inner.full.len() < self.most;
        // Made under the lock only while magazines are few: afterwards they circulate.
        let empty = empty.unwrap_or_else(|| Vec::with_capacity(size));
        let full = core::mem::replace(magazine, empty);
        if has_room {
            inner.full.push(full);
            return None;
        }
        // It goes back to the space. Linux 6.7 lost such magazines with all their ranges.
        Some(full)
    }

    /// Takes a full magazine out of circulation.
    pub(super) fn pop_full(&self) -> Option<Magazine> {
        self.inner.lock().full.pop()
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        let mut inner = self.inner.lock();
        inner.full.clear();
        inner.empty.clear();
    }

    pub(super) fn bytes(&self) -> usize {
        let inner = self.inner.lock();
        let kept = inner.full.iter().chain(&inner.empty);
        let slots: usize = kept.map(Vec::capacity).sum();
        let headers = inner.full.capacity() + inner.empty.capacity();
        slots * size_of::<u64>() + headers * size_of::<Magazine>()
    }
}

/// One core's two magazines of a class: every other core is kept out by ownership.
#[derive(Default)]
pub(super) struct Rack {
    loaded: Magazine,
    /// Full or empty whenever the depot was the last to touch it.
    previous: Magazine,
}

impl Rack {
    #[inline]
    pub(super) fn pop(&mut self) -> Option<u64> {
        if let Some(first) = self.loaded.pop() {
            return Some(first);
        }
        core::mem::swap(&mut self.loaded, &mut self.previous);
        self.loaded.pop()
    }

    /// Whether `first` found room.
    #[inline]
    pub(super) fn push(&mut self, first: u64) -> bool {
        if self.loaded.len() == self.loaded.capacity() {
            core::mem::swap(&mut self.loaded, &mut self.previous);
            if self.loaded.len() == self.loaded.capacity() {
                return false;
            }
        }
        self.loaded.push(first);
        true
    }

    /// After [`Self::pop`] found nothing: a full magazine of the depot.
    pub(super) fn refill(&mut self, depot: &Depot) -> bool {
        depot.full_for_empty(&mut self.loaded)
    }

    /// After [`Self::pop`] found nothing: an empty magazine to be filled from the space.
    pub(super) fn filling(&mut self, size: usize) -> &mut Magazine {
        if self.loaded.capacity() == 0 {
            self.loaded.reserve_exact(size);
        }
        &mut self.loaded
    }

    /// After [`Self::push`] found no room: makes some. What is returned belongs to the space.
    pub(super) fn make_room(&mut self, depot: &Depot, size: usize) -> Option<Magazine> {
        for magazine in [&mut self.loaded, &mut self.previous] {
            if magazine.capacity() == 0 {
                magazine.reserve_exact(size);
                return None;
            }
        }
        // Both are full. One goes, the other becomes the previous one, and the loaded one is empty:
        // as many frees as a magazine holds, and as many allocations, before the depot is needed
        // again.
        core::mem::swap(&mut self.loaded, &mut self.previous);
        depot.empty_for_full(&mut self.loaded, size)
    }

    /// Everything in it; the magazines stay.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = u64> {
        self.loaded.drain(..).chain(self.previous.drain(..))
    }

    pub(super) fn bytes(&self) -> usize {
        (self.loaded.capacity() + self.previous.capacity()) * size_of::<u64>()
    }
}
