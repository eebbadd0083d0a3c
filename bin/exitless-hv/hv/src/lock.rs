//! A spin lock between cores of the host, with a bound on the wait.
//!
//! Nothing interrupts a core while it holds one: interrupts are taken in windows alone (`run.s`),
//! none of which is within a critical section. So it is held for as long as its section runs, and
//! no longer.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, Ordering};

/// A value that one core at a time uses.
pub struct Lock<T> {
    is_held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `lock` hands the value to one core at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// Creates a lock of this value, not held.
    pub const fn new(value: T) -> Self {
        Self {
            is_held: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock.
    ///
    /// # Panics
    /// It is not released in seconds, or this core holds it already: the machine ends, and says so.
    pub fn lock(&self) -> Guard<'_, T> {
        const TRIES: u64 = 2_000_000_000;
        for _ in 0..TRIES {
            // Acquire: pairs with `drop`'s Release, so that this core sees all that the last holder
            // wrote.
            if !self.is_held.swap(true, Ordering::Acquire) {
                return Guard(self);
            }
            core::hint::spin_loop();
        }
        panic!("a lock is held for ever");
    }

    /// Returns the value, before other cores have it.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

/// A lock that is held, until this is dropped.
pub struct Guard<'a, T>(&'a Lock<T>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: it is held, by this.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // Release: pairs with `lock`'s Acquire.
        self.0.is_held.store(false, Ordering::Release);
    }
}
