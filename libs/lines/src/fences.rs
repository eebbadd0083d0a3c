//! A pair of fences for two sides of which one runs often and the other seldom: the frequent one
//! costs next to nothing.
//!
//! Each side stores, fences, and loads what the other stores. With two full fences at least one of
//! them sees the other's store (the pattern of Dekker's lock). Here the frequent side's fence is
//! the compiler's only, and the rare side asks the kernel for a full barrier on every CPU that runs
//! a thread of this process: `membarrier(2)`, `MEMBARRIER_CMD_PRIVATE_EXPEDITED`, since Linux 4.14.
//! Where the kernel has no such call, or forbids it, and under loom and shuttle, both are full
//! fences.

use crate::{Ordering, fence};

/// Kind of fences of two sides that synchronize: both must have a copy of the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fences {
    /// The kernel makes the rare side's fence one of all CPUs.
    is_by_kernel: bool,
}

/// The kernel did not carry out the rare side's fence, which it had promised: the caller must act
/// as if the other side had not seen its stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFenced;

impl Fences {
    /// Those of two full fences, which need no kernel.
    pub const FULL: Self = Self {
        is_by_kernel: false,
    };

    /// The cheapest fences that this process can have. Makes one system call.
    pub fn new() -> Self {
        Self::by_kernel().unwrap_or(Self::FULL)
    }

    /// Fences whose rare side is the kernel's; `None` where the kernel has no such call, or forbids
    /// it.
    pub fn by_kernel() -> Option<Self> {
        kernel::register().then_some(Self { is_by_kernel: true })
    }

    /// Fence of the frequent side: between its store and its load.
    #[inline(always)]
    pub fn light(self) {
        if !self.is_by_kernel {
            return fence(Ordering::SeqCst);
        }
        core::sync::atomic::compiler_fence(Ordering::SeqCst);
    }

    /// Returns whether [`Self::light_by_kernel`] suffices. In the models of loom and shuttle it
    /// always does.
    pub fn is_by_kernel(self) -> bool {
        self.is_by_kernel || cfg!(any(loom, shuttle))
    }

    /// Fence of the frequent side where the kernel makes the other one ([`Self::is_by_kernel`]):
    /// for paths that must not even check. It stops the compiler, and no CPU.
    #[inline(always)]
    pub fn light_by_kernel() {
        if cfg!(any(loom, shuttle)) {
            fence(Ordering::SeqCst);
        }
        core::sync::atomic::compiler_fence(Ordering::SeqCst);
    }

    /// The rare side's: between its store, or what it has seen of others' stores, and its load. A
    /// system call that interrupts the other CPUs of this process: some microseconds.
    ///
    /// # Errors
    /// [`NotFenced`]: a filter of system calls has forbidden it since [`Self::new`].
    pub fn heavy(self) -> Result<(), NotFenced> {
        fence(Ordering::SeqCst);
        match self.is_by_kernel {
            true => kernel::barrier(),
            false => Ok(()),
        }
    }
}

impl Default for Fences {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(target_os = "linux", not(any(loom, shuttle, miri))))]
mod kernel {
    use rustix::thread::{MembarrierCommand, membarrier};

    use super::NotFenced;

    /// Whether this process can make [`barrier`]s from now on.
    pub(super) fn register() -> bool {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
    }

    /// A full barrier on every CPU that runs a thread of this process.
    pub(super) fn barrier() -> Result<(), NotFenced> {
        membarrier(MembarrierCommand::PrivateExpedited).map_err(|_| NotFenced)
    }
}

#[cfg(not(all(target_os = "linux", not(any(loom, shuttle, miri)))))]
mod kernel {
    use super::NotFenced;

    pub(super) fn register() -> bool {
        false
    }

    pub(super) fn barrier() -> Result<(), NotFenced> {
        Err(NotFenced)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    extern crate std;

    use super::*;
    use crate::{AtomicU64, CachePadded};

    /// In how many of some rounds, in each of which both sides store, fence and load, neither saw
    /// the other. Without fences it is one in fifteen on two CPUs that are idle otherwise.
    fn missed(frequent: impl Fn() + Sync, rare: impl Fn() + Sync) -> u64 {
        const ROUNDS: u64 = 2_000;
        let [one, other, seen] = [(); 3].map(|()| CachePadded::new(AtomicU64::new(0)));
        let [in_step, missed] = [(); 2].map(|()| CachePadded::new(AtomicU64::new(0)));
        // Both sides begin a round together, so that they are in the middle of it together.
        let meet = |count: u64| {
            in_step.fetch_add(1, Ordering::AcqRel);
            while in_step.load(Ordering::Acquire) < count {
                crate::spin_loop();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    meet(4 * round - 2);
                    one.store(round, Ordering::Relaxed);
                    frequent();
                    seen.store(other.load(Ordering::Relaxed), Ordering::Relaxed);
                    meet(4 * round);
                }
            });
            for round in 1..=ROUNDS {
                meet(4 * round - 2);
                other.store(round, Ordering::Relaxed);
                rare();
                let is_seen = one.load(Ordering::Relaxed) == round;
                meet(4 * round);
                if !is_seen && seen.load(Ordering::Relaxed) != round {
                    missed.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        missed.load(Ordering::Relaxed)
    }

    #[test]
    fn one_of_two_sides_sees_the_other() {
        for fences in [Fences::new(), Fences::FULL] {
            let heavy = || fences.heavy().expect("nobody forbids it");
            assert_eq!(missed(|| fences.light(), heavy), 0, "{fences:?}");
        }
    }
}
