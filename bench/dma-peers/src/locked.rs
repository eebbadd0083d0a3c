//! An IOVA space behind one lock: common part of those allocators that have no per-core caches.

use alloc::sync::Arc;

use lines::Lock;

use iova::parts::{Claims, Wanted};
use iova::{
    AllocError, Aperture, ApertureError, ClaimError, CoreId, FreeError, IovaRange, Request,
    ResetError, Stats,
};

/// State of a space behind its lock.
pub(crate) trait Space: Send + Sized {
    /// Creates a space that is completely free.
    fn new(aperture: &Aperture) -> Self;
    fn alloc(&mut self, wanted: Wanted, aperture: &Aperture) -> Result<IovaRange, AllocError>;
    fn free(&mut self, range: IovaRange) -> Result<(), FreeError>;
    /// Pins an allocated range that is not pinned, or unpins a pinned one.
    fn set_pinned(&mut self, range: IovaRange, is_pinned: bool) -> Result<(), FreeError>;
    /// Returns all statistics but `slow`.
    fn stats(&self) -> Stats;
    /// Panics if an invariant is broken.
    #[cfg(debug_assertions)]
    fn check(&self);
}

pub(crate) struct Locked<S: Space> {
    pub(crate) aperture: Aperture,
    claims: Claims,
    inner: Lock<Counted<S>>,
}

/// A space, and the number of operations on it. Each counts as slow: it leaves the core's own
/// memory.
struct Counted<S> {
    space: S,
    slow: u64,
}

impl<S: Space> Locked<S> {
    pub(crate) fn new(aperture: Aperture, cores: usize) -> Result<Arc<Self>, ApertureError> {
        let claims = Claims::new(cores)?;
        let space = S::new(&aperture);
        Ok(Arc::new(Self {
            aperture,
            claims,
            inner: Lock::new(Counted { space, slow: 0 }),
        }))
    }

    pub(crate) fn cores(&self) -> usize {
        self.claims.cores()
    }

    pub(crate) fn claim(&self, core: CoreId) -> Result<(), ClaimError> {
        self.claims.claim(core)
    }

    pub(crate) fn release(&self, core: CoreId) {
        self.claims.release(core);
    }

    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut S) -> R) -> R {
        let mut inner = self.inner.lock();
        inner.slow += 1;
        work(&mut inner.space)
    }

    pub(crate) fn alloc(&self, request: &Request) -> Result<IovaRange, AllocError> {
        let wanted = Wanted::of(request)?;
        self.with(|space| space.alloc(wanted, &self.aperture))
    }

    pub(crate) fn stats(&self) -> Stats {
        let inner = self.inner.lock();
        let stats = inner.space.stats();
        Stats {
            bytes: stats.bytes + size_of::<Self>() + self.cores(),
            slow: inner.slow,
            ..stats
        }
    }

    pub(crate) fn reset(&self) -> Result<(), ResetError> {
        self.claims.while_idle(|| {
            let slow = 0;
            *self.inner.lock() = Counted {
                space: S::new(&self.aperture),
                slow,
            };
        })
    }
}

#[cfg(debug_assertions)]
impl<S: Space> Drop for Locked<S> {
    fn drop(&mut self) {
        self.inner.get_mut().space.check();
    }
}

/// Defines an allocator and its per-core handle over a [`Space`].
macro_rules! locked_allocator {
    ($(#[$doc:meta])* $name:ident, $core:ident, $space:ty) => {
        $(#[$doc])*
        pub struct $name(alloc::sync::Arc<crate::locked::Locked<$space>>);

        impl $name {
            /// All of `aperture` free, for `cores` cores (1 to [`MAX_CORES`](iova::MAX_CORES)).
            ///
            /// # Errors
            /// [`ApertureError::Cores`](iova::ApertureError::Cores).
            pub fn new(
                aperture: iova::Aperture,
                cores: usize,
            ) -> Result<Self, iova::ApertureError> {
                crate::locked::Locked::new(aperture, cores).map(Self)
            }
        }

        impl iova::IovaAllocator for $name {
            type Core = $core;

            fn claim(&self, core: iova::CoreId) -> Result<$core, iova::ClaimError> {
                self.0.claim(core)?;
                Ok($core {
                    shared: alloc::sync::Arc::clone(&self.0),
                    core,
                })
            }

            fn cores(&self) -> usize {
                self.0.cores()
            }

            fn aperture(&self) -> &iova::Aperture {
                &self.0.aperture
            }

            fn stats(&self) -> iova::Stats {
                self.0.stats()
            }

            fn reset(&self) -> Result<(), iova::ResetError> {
                self.0.reset()
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }

        #[doc = concat!("One core's handle of a \
             [`", stringify!($name), "`]. It owns nothing but its number.")]
        pub struct $core {
            shared: alloc::sync::Arc<crate::locked::Locked<$space>>,
            core: iova::CoreId,
        }

        impl iova::CoreAllocator for $core {
            fn core(&self) -> iova::CoreId {
                self.core
            }

            fn alloc(
                &mut self,
                request: iova::Request,
            ) -> Result<iova::IovaRange, iova::AllocError> {
                self.shared.alloc(&request)
            }

            fn free(&mut self, range: iova::IovaRange) -> Result<(), iova::FreeError> {
                self.shared
                    .with(|space| crate::locked::Space::free(space, range))
            }

            fn pin(
                &mut self,
                range: iova::IovaRange,
            ) -> Result<iova::Pinned, iova::FreeError> {
                self.shared
                    .with(|space| crate::locked::Space::set_pinned(space, range, true))?;
                Ok(iova::parts::pinned(range))
            }

            fn free_pinned(&mut self, pinned: iova::Pinned) {
                self.shared
                    .with(|space| {
                        crate::locked::Space::set_pinned(space, pinned.range(), false)?;
                        crate::locked::Space::free(space, pinned.range())
                    })
                    .expect("what this allocator pinned is allocated");
            }

            fn unpin(&mut self, pinned: iova::Pinned) {
                self.shared
                    .with(|space| crate::locked::Space::set_pinned(space, pinned.range(), false))
                    .expect("what this allocator pinned is allocated");
            }

            fn park(&mut self) {}
        }

        impl core::fmt::Debug for $core {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($core))
                    .field("core", &self.core)
                    .finish_non_exhaustive()
            }
        }

        impl Drop for $core {
            fn drop(&mut self) {
                self.shared.release(self.core);
            }
        }
    };
}

pub(crate) use locked_allocator;
