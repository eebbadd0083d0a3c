//! Atomics of the same interface and layout as those of `core`, which report every access to the
//! probe.

use std::fmt;
use std::sync::atomic as real;
use std::sync::atomic::Ordering;

use super::with;

#[inline]
fn read<T>(value: &T) {
    let at = std::ptr::from_ref(value).addr();
    with(|machine| machine.read(at, size_of::<T>()));
}

#[inline]
fn write<T>(value: &T) {
    let at = std::ptr::from_ref(value).addr();
    with(|machine| machine.write(at, size_of::<T>()));
}

/// Methods that every atomic has; `$generics` is empty but for pointers.
macro_rules! common {
    ($name:ident, [$($generics:tt)*], $value:ty) => {
        impl<$($generics)*> $name<$($generics)*> {
            /// An atomic of this value.
            #[inline]
            pub const fn new(value: $value) -> Self {
                Self(real::$name::new(value))
            }

            /// See `core`.
            #[inline]
            pub fn load(&self, order: Ordering) -> $value {
                read(self);
                self.0.load(order)
            }

            /// See `core`.
            #[inline]
            pub fn store(&self, value: $value, order: Ordering) {
                write(self);
                self.0.store(value, order);
            }

            /// See `core`.
            #[inline]
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                write(self);
                self.0.swap(value, order)
            }

            /// See `core`. A failure takes the line for writing too, as the instruction does.
            #[inline]
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                write(self);
                self.0.compare_exchange(current, new, success, failure)
            }

            /// See `core`; never fails without cause here, so that counts repeat.
            #[inline]
            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(current, new, success, failure)
            }

            /// See `core`.
            #[inline]
            pub fn fetch_update(
                &self,
                set_order: Ordering,
                fetch_order: Ordering,
                update: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                read(self);
                let outcome = self.0.fetch_update(set_order, fetch_order, update);
                if outcome.is_ok() {
                    write(self);
                }
                outcome
            }

            /// See `core`. Counted as a write: the reference allows one.
            #[inline]
            pub fn get_mut(&mut self) -> &mut $value {
                write(self);
                self.0.get_mut()
            }

            /// See `core`.
            #[inline]
            pub fn into_inner(self) -> $value {
                self.0.into_inner()
            }

            /// See `core`. What is done through the pointer is not counted.
            #[inline]
            pub const fn as_ptr(&self) -> *mut $value {
                self.0.as_ptr()
            }
        }

        impl<$($generics)*> fmt::Debug for $name<$($generics)*> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl<$($generics)*> From<$value> for $name<$($generics)*> {
            fn from(value: $value) -> Self {
                Self::new(value)
            }
        }
    };
}

/// Reads that write and give back what was there.
macro_rules! fetch {
    ($name:ident, $value:ty, $($method:ident)*) => {
        impl $name {
            $(
                /// See `core`.
                #[inline]
                pub fn $method(&self, value: $value, order: Ordering) -> $value {
                    write(self);
                    self.0.$method(value, order)
                }
            )*
        }
    };
}

macro_rules! integer {
    ($($name:ident $value:ty,)*) => {
        $(
            /// The atomic of this name in `core`, watched.
            #[derive(Default)]
            #[repr(transparent)]
            pub struct $name(real::$name);

            common!($name, [], $value);
            fetch!(
                $name, $value,
                fetch_add fetch_sub fetch_and fetch_or fetch_xor fetch_nand fetch_max fetch_min
            );
        )*
    };
}

integer! {
    AtomicU8 u8,
    AtomicU16 u16,
    AtomicU32 u32,
    AtomicU64 u64,
    AtomicUsize usize,
}

/// The atomic of this name in `core`, watched.
#[derive(Default)]
#[repr(transparent)]
pub struct AtomicBool(real::AtomicBool);

common!(AtomicBool, [], bool);
fetch!(AtomicBool, bool, fetch_and fetch_or fetch_xor fetch_nand);

/// The atomic of this name in `core`, watched.
#[repr(transparent)]
pub struct AtomicPtr<T>(real::AtomicPtr<T>);

common!(AtomicPtr, [T], *mut T);

impl<T> Default for AtomicPtr<T> {
    fn default() -> Self {
        Self::new(std::ptr::null_mut())
    }
}
