//! Locks around the walk: none, and the two that *Utilizing the IOMMU Scalably* (ATC'15, Table 1) found in use.
//!
//! The same code walks under each, so a comparison measures the lock and nothing else:
//!
//! * [`LockFree`]: no lock. Tables are installed by compare-and-swap.
//! * [`GlobalLock`]: one lock for each call.
//! * [`TableLocks`]: a reader-writer lock for each table, held to read one entry on the way down and to write the
//!   entries of the last table; never two at a time, so no order is needed.

use address::{PAGE_SHIFT, PhysAddr};
use lines::{AtomicU32, CachePadded, Lock, Ordering, spin_loop};

/// What a call, and each look at a table, does first.
pub trait Locking: sealed::Sealed + Default + Send + Sync + 'static {
    /// Runs one call.
    #[inline]
    fn whole<R>(&self, call: impl FnOnce() -> R) -> R {
        call()
    }

    /// Reads entries of the table at `page`.
    #[inline]
    fn read<R>(&self, _page: PhysAddr, read: impl FnOnce() -> R) -> R {
        read()
    }

    /// Reads and changes entries of the table at `page`.
    #[inline]
    fn write<R>(&self, _page: PhysAddr, write: impl FnOnce() -> R) -> R {
        write()
    }
}

/// No lock.
#[derive(Clone, Copy, Debug, Default)]
pub struct LockFree;

impl sealed::Sealed for LockFree {}
impl Locking for LockFree {}

/// One lock for each call.
#[derive(Debug, Default)]
pub struct GlobalLock(CachePadded<Lock<()>>);

impl sealed::Sealed for GlobalLock {}
impl Locking for GlobalLock {
    #[inline]
    fn whole<R>(&self, call: impl FnOnce() -> R) -> R {
        let _held = self.0.lock();
        call()
    }
}

/// Locks that tables are spread over: with more tables than that, two may share one. 256 × 128 B = 32 KiB.
const TABLE_LOCKS: usize = if cfg!(loom) { 2 } else { 256 };

/// A reader-writer lock for each table.
#[derive(Debug)]
pub struct TableLocks([CachePadded<RwSpin>; TABLE_LOCKS]);

impl TableLocks {
    #[inline]
    fn of(&self, page: PhysAddr) -> &RwSpin {
        // Fibonacci hashing: the top bits of the product depend on every bit of the page number.
        let hash = (page.raw() >> PAGE_SHIFT).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.0[(hash >> 32) as usize % TABLE_LOCKS]
    }
}

impl Default for TableLocks {
    fn default() -> Self {
        Self(core::array::from_fn(|_| CachePadded::default()))
    }
}

impl sealed::Sealed for TableLocks {}
impl Locking for TableLocks {
    #[inline]
    fn read<R>(&self, page: PhysAddr, read: impl FnOnce() -> R) -> R {
        let lock = self.of(page);
        lock.read();
        let result = read();
        lock.0.fetch_sub(1, Ordering::Release);
        result
    }

    #[inline]
    fn write<R>(&self, page: PhysAddr, write: impl FnOnce() -> R) -> R {
        let lock = self.of(page);
        lock.write();
        let result = write();
        lock.0.store(0, Ordering::Release);
        result
    }
}

/// Readers inside, or [`WRITER`].
#[derive(Debug, Default)]
struct RwSpin(AtomicU32);

const WRITER: u32 = u32::MAX;

impl RwSpin {
    /// Enters as a reader. Acquire pairs with the release of the last writer to leave.
    #[inline]
    fn read(&self) {
        let mut readers = self.0.load(Ordering::Relaxed);
        loop {
            if readers == WRITER {
                spin_loop();
                readers = self.0.load(Ordering::Relaxed);
                continue;
            }
            let entered = self.0.compare_exchange_weak(
                readers,
                readers + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match entered {
                Ok(_) => return,
                Err(now) => readers = now,
            }
        }
    }

    /// Enters as the writer. Acquire pairs with the release of whoever left last.
    #[inline]
    fn write(&self) {
        while self
            .0
            .compare_exchange_weak(0, WRITER, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            spin_loop();
        }
    }
}

mod sealed {
    /// Only the lockings of this crate: they must run what they are given exactly once.
    pub trait Sealed {}
}
