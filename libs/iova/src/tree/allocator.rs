//! The tree behind one lock.

use alloc::sync::Arc;
use core::fmt;

use lines::Lock;

use super::Tree;
use crate::allocator::SpaceId;
use crate::claims::Claims;
use crate::wanted::Wanted;
use crate::{
    AllocError, Aperture, ApertureError, ClaimError, CoreAllocator, CoreId, FreeError,
    IovaAllocator, IovaRange, Pinned, Request, ResetError, Stats,
};

/// Ranges packed to the top of the space in logarithmic time, behind one lock.
///
/// ```
/// use iova::{Aperture, CoreAllocator, CoreId, IovaAllocator, IovaPfn, Request, TreeAllocator};
///
/// let space = TreeAllocator::new(Aperture::of_bits(48)?, 1)?;
/// let mut core = space.claim(CoreId(0))?;
/// let ring = core.alloc(Request::pages(3).at_most(IovaPfn::new(0xf_ffff)))?;
/// assert_eq!((ring.first(), ring.pages()), (IovaPfn::new(0xf_fffc), 3));
/// core.free(ring)?;
/// assert!(core.free(ring).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TreeAllocator(Arc<Shared>);

struct Shared {
    aperture: Aperture,
    claims: Claims,
    space: SpaceId,
    /// The tree, and how often it was asked: every operation leaves its core's memory.
    inner: Lock<(Tree, u64)>,
}

impl TreeAllocator {
    /// All of `aperture` free, for `cores` cores (1 to [`MAX_CORES`](crate::MAX_CORES)).
    ///
    /// # Errors
    /// [`ApertureError::Cores`].
    pub fn new(aperture: Aperture, cores: usize) -> Result<Self, ApertureError> {
        Ok(Self(Arc::new(Shared {
            claims: Claims::new(cores)?,
            space: SpaceId::next(),
            inner: Lock::new((Tree::new(aperture.usable()), 0)),
            aperture,
        })))
    }
}

impl IovaAllocator for TreeAllocator {
    type Core = TreeCore;

    fn claim(&self, core: CoreId) -> Result<TreeCore, ClaimError> {
        self.0.claims.claim(core)?;
        let shared = Arc::clone(&self.0);
        Ok(TreeCore { shared, core })
    }

    fn cores(&self) -> usize {
        self.0.claims.cores()
    }

    fn aperture(&self) -> &Aperture {
        &self.0.aperture
    }

    fn stats(&self) -> Stats {
        let (tree, slow) = &*self.0.inner.lock();
        Stats {
            live_ranges: tree.live_ranges(),
            live_pages: tree.live_pages(),
            chunks: tree.chunks(),
            bytes: tree.bytes() + size_of::<Shared>() + self.cores(),
            slow: *slow,
            ..Stats::default()
        }
    }

    fn reset(&self) -> Result<(), ResetError> {
        let usable = self.0.aperture.usable();
        let reset = || *self.0.inner.lock() = (Tree::new(usable), 0);
        self.0.claims.while_idle(reset)
    }
}

impl fmt::Debug for TreeAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeAllocator").finish_non_exhaustive()
    }
}

#[cfg(debug_assertions)]
impl Drop for Shared {
    fn drop(&mut self) {
        self.inner.get_mut().0.check();
    }
}

/// One core's handle of a [`TreeAllocator`]. It owns nothing but its number.
pub struct TreeCore {
    shared: Arc<Shared>,
    core: CoreId,
}

impl TreeCore {
    fn with<R>(&self, work: impl FnOnce(&mut Tree) -> R) -> R {
        let mut inner = self.shared.inner.lock();
        inner.1 += 1;
        work(&mut inner.0)
    }
}

impl CoreAllocator for TreeCore {
    fn core(&self) -> CoreId {
        self.core
    }

    fn alloc(&mut self, request: Request) -> Result<IovaRange, AllocError> {
        let wanted = Wanted::of(&request)?;
        self.with(|tree| tree.alloc(wanted.pages, wanted.order, wanted.last))
            .ok_or_else(|| wanted.failure(&self.shared.aperture, 0))
    }

    fn free(&mut self, range: IovaRange) -> Result<(), FreeError> {
        self.with(|tree| tree.free(range))
    }

    fn pin(&mut self, range: IovaRange) -> Result<Pinned, FreeError> {
        self.with(|tree| tree.set_pinned(range, true))?;
        Ok(Pinned::new(range, self.shared.space, false))
    }

    fn free_pinned(&mut self, pinned: Pinned) {
        pinned.check(self.shared.space);
        self.with(|tree| {
            tree.set_pinned(pinned.range(), false)?;
            tree.free(pinned.range())
        })
        .expect("what this allocator pinned is allocated");
    }

    fn unpin(&mut self, pinned: Pinned) {
        pinned.check(self.shared.space);
        self.with(|tree| tree.set_pinned(pinned.range(), false))
            .expect("what this allocator pinned is allocated");
    }

    fn park(&mut self) {}
}

impl fmt::Debug for TreeCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeCore")
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}

impl Drop for TreeCore {
    fn drop(&mut self) {
        self.shared.claims.release(self.core);
    }
}
