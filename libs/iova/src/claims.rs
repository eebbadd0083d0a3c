//! Flags of the cores that have their handles.

use alloc::{boxed::Box, vec::Vec};

use lines::{AtomicBool, Ordering};

use crate::{ApertureError, ClaimError, CoreId, MAX_CORES, ResetError};

/// One flag per core: whether its handle is out. A handle is one core's exclusive way in, so taking
/// it is a lock held for as long as the handle lives.
pub struct Claims(Box<[AtomicBool]>);

impl Claims {
    /// All handles are in. 1 to [`MAX_CORES`] cores.
    ///
    /// # Errors
    /// [`ApertureError::Cores`].
    pub fn new(cores: usize) -> Result<Self, ApertureError> {
        if !(1..=MAX_CORES).contains(&cores) {
            return Err(ApertureError::Cores { cores });
        }
        Ok(Self((0..cores).map(|_| AtomicBool::new(false)).collect()))
    }

    /// Number of cores.
    pub fn cores(&self) -> usize {
        self.0.len()
    }

    /// Takes the handle of `core`. Acquire: pairs with [`Self::release`], after which everything
    /// that the last owner left behind is seen.
    ///
    /// # Errors
    /// It is out, or there is no such core.
    pub fn claim(&self, core: CoreId) -> Result<(), ClaimError> {
        let cores = self.cores();
        let flag = self.0.get(core.0);
        let flag = flag.ok_or(ClaimError::NoSuchCore { core, cores })?;
        match flag.swap(true, Ordering::Acquire) {
            false => Ok(()),
            true => Err(ClaimError::InUse { core }),
        }
    }

    /// Gives back the handle of `core` that [`Self::claim`] took.
    pub fn release(&self, core: CoreId) {
        self.0[core.0].store(false, Ordering::Release);
    }

    /// Whether the handle of core number `core` is out now.
    #[cfg(feature = "parts")]
    pub fn is_claimed(&self, core: usize) -> bool {
        self.0[core].load(Ordering::Relaxed)
    }

    /// Runs `work` while no core has a handle nor can get one.
    ///
    /// # Errors
    /// Some are out.
    pub fn while_idle<R>(&self, work: impl FnOnce() -> R) -> Result<R, ResetError> {
        let cores = || (0..self.cores()).map(CoreId);
        let taken: Vec<CoreId> = cores().filter(|&core| self.claim(core).is_ok()).collect();
        let claimed = self.cores() - taken.len();
        let result = (claimed == 0).then(work);
        taken.into_iter().for_each(|core| self.release(core));
        result.ok_or(ResetError { claimed })
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
