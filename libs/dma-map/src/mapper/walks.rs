//! Walks of the tables under addresses that the walking core has neither allocated nor pinned, and
//! the check that none can still be in a table page that is to be released.
//!
//! Each core counts its walks on a line of its own; the count is odd while one lasts. The core that
//! has taken a table out of the tree reads all lines before it releases the page.

use lines::{AtomicU64, Ordering, Spin, fence};

/// Number of polls of one walk before the release is deferred: the walking thread may be preempted.
const LOOKS: u32 = if cfg!(loom) { 1 } else { 1 << 12 };

/// Count of one core's walks, begun and ended. Written by that core alone.
#[derive(Default)]
pub(super) struct Walks(AtomicU64);

impl Walks {
    /// Runs `walk`. Meanwhile no table page that it may find is released.
    #[inline]
    pub(super) fn during<R>(&self, walk: impl FnOnce() -> R) -> R {
        let Self(walks) = self;
        let before = walks.load(Ordering::Relaxed);
        walks.store(before + 1, Ordering::Relaxed);
        // Pairs with the fence in `are_over`: either that sees this walk, or this walk does not
        // find what was taken out before.
        fence(Ordering::SeqCst);
        let found = walk();
        // Release: all loads of the walk come before.
        walks.store(before + 2, Ordering::Release);
        found
    }

    /// Returns whether all walks are over that can have found what this thread took out of the tree
    /// before.
    pub(super) fn are_over<'a>(mut all: impl Iterator<Item = &'a Self>) -> bool {
        fence(Ordering::SeqCst);
        all.all(|Self(walks)| {
            // Acquire: pairs with the end of the walk.
            let seen = walks.load(Ordering::Acquire);
            let mut spin = Spin::default();
            while seen % 2 == 1 && walks.load(Ordering::Acquire) == seen {
                if spin.wait() >= LOOKS {
                    return false;
                }
            }
            true
        })
    }
}
