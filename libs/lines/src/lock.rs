//! A spinning lock. It disables no interrupts and has no queue: code that must not wait takes
//! [`Lock::try_lock`].

use core::fmt;
use core::ops::{Deref, DerefMut};

#[cfg(loom)]
type Inner<T> = loom::sync::Mutex<T>;
#[cfg(loom)]
type InnerGuard<'a, T> = loom::sync::MutexGuard<'a, T>;
#[cfg(shuttle)]
type Inner<T> = shuttle::sync::Mutex<T>;
#[cfg(shuttle)]
type InnerGuard<'a, T> = shuttle::sync::MutexGuard<'a, T>;
#[cfg(not(any(loom, shuttle, feature = "hooks")))]
type Inner<T> = spin::mutex::SpinMutex<T>;
#[cfg(all(feature = "hooks", not(any(loom, shuttle))))]
type Inner<T> = spin::mutex::SpinMutex<T, crate::hooks::Relax>;
#[cfg(not(any(loom, shuttle)))]
type InnerGuard<'a, T> = spin::mutex::SpinMutexGuard<'a, T>;

/// A value behind a test-and-test-and-set lock.
pub struct Lock<T>(Inner<T>);

impl<T> Lock<T> {
    /// Creates an unlocked lock around `value`.
    pub fn new(value: T) -> Self {
        Self(Inner::new(value))
    }

    /// Spins until the lock is taken.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        #[cfg(all(feature = "hooks", not(any(loom, shuttle))))]
        crate::hooks::at(crate::hooks::Step::Lock);
        #[cfg(any(loom, shuttle))]
        return Guard(self.0.lock().expect("a model ends at a panic"));
        #[cfg(not(any(loom, shuttle)))]
        Guard(self.0.lock())
    }

    /// Takes the lock, if it is free now.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        #[cfg(all(feature = "hooks", not(any(loom, shuttle))))]
        crate::hooks::at(crate::hooks::Step::Lock);
        #[cfg(any(loom, shuttle))]
        return self.0.try_lock().ok().map(Guard);
        #[cfg(not(any(loom, shuttle)))]
        self.0.try_lock().map(Guard)
    }

    /// Returns the value: the exclusive reference excludes other holders.
    #[inline]
    pub fn get_mut(&mut self) -> &mut T {
        #[cfg(any(loom, shuttle))]
        return self.0.get_mut().expect("a model ends at a panic");
        #[cfg(not(any(loom, shuttle)))]
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
pub struct Guard<'a, T>(InnerGuard<'a, T>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
