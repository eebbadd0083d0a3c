//! A lock that reports to the probe when it is taken and released.

use std::fmt;
use std::ops::{Deref, DerefMut};

use spin::mutex::{SpinMutex, SpinMutexGuard};

use super::{spin_loop, with};

/// A value behind a test-and-test-and-set lock.
pub struct Lock<T>(SpinMutex<T>);

impl<T> Lock<T> {
    /// Creates an open lock around `value`.
    pub fn new(value: T) -> Self {
        Self(SpinMutex::new(value))
    }

    /// Spins until the lock is taken.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            // Like the product's lock, which this one replaces: reads until the lock is open, and
            // only then attempts to take it.
            while self.is_locked() {
                spin_loop();
            }
        }
    }

    /// Takes the lock if no core holds it now.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        let flag = self.flag();
        // A compare-and-swap takes the line exclusively even if it fails.
        with(|machine| machine.write(flag, 1));
        let guard = self.0.try_lock()?;
        with(super::Machine::lock);
        Some(Guard { guard, flag })
    }

    fn is_locked(&self) -> bool {
        with(|machine| machine.read(self.flag(), 1));
        self.0.is_locked()
    }

    /// Returns the address of the lock, which represents that of its flag.
    fn flag(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Returns the value without locking: by `&mut self` no core holds the lock.
    #[inline]
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

impl<T: Default> Default for Lock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lock")
    }
}

/// The value of a [`Lock`] while it is held.
pub struct Guard<'a, T> {
    guard: SpinMutexGuard<'a, T>,
    flag: usize,
}

impl<T> Guard<'_, T> {
    /// Returns address and length of the value's first byte, which represents the whole value: the
    /// accessed parts are unknown. A value without bytes has none.
    fn first_byte(&self) -> (usize, usize) {
        let value: &T = &self.guard;
        (std::ptr::from_ref(value).addr(), size_of::<T>().min(1))
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        let (at, len) = self.first_byte();
        with(|machine| machine.read(at, len));
        &self.guard
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        let (at, len) = self.first_byte();
        with(|machine| machine.write(at, len));
        &mut self.guard
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // Reports the store that opens the lock; it follows when `guard` is dropped.
        with(|machine| machine.write(self.flag, 1));
    }
}
