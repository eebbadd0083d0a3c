//! The line probe: counts, for simulated cores, which accesses need a cache line of another core.
//!
//! **What.** The atomics and the [`Lock`] of this crate, which those of `lines` are with its
//! feature `probe`, note every access in a [`Machine`]: one cache per simulated core, unbounded,
//! 64-byte lines, each line either held by one core that wrote it or shared by those that read it
//! (the states of MESI, exclusive and modified taken together). An access is a **remote transfer**
//! if its line is in another core's cache, and not in its own with the right that the access needs.
//!
//! **How work flows.** One thread drives everything: [`start`], then before each operation
//! [`set_core`], then [`counts`] or [`stop`]. The machine belongs to the thread; other threads, and
//! this one before `start`, count nothing. Operations that run to their end one after another never
//! wait for each other; to show waiting, a harness gives each core a thread, lets one of them run
//! at a time, hands the machine over with [`take`] and [`resume`], and does so whenever a core
//! spins ([`on_spin`]). Either way the same program counts the same each time. Re-models add plain
//! memory by [`touch_read`] and [`touch_write`].
//!
//! **Left out.** Plain memory (that of one core by design, or a lock's: of it only the first line
//! is counted, when the guard is used), capacity and conflict misses, the prefetcher's second line,
//! the cost of fences.
//!
//! ```
//! use std::sync::atomic::Ordering;
//!
//! let line = line_probe::AtomicU64::new(0);
//! line_probe::start();
//! for core in [0, 1, 0, 1] {
//!     line_probe::set_core(core);
//!     line.fetch_add(1, Ordering::Relaxed);
//! }
//! // The first access found the line nowhere, the others found it at the other core.
//! assert_eq!(line_probe::stop().map(|counts| counts.transfers()), Some(3));
//! ```
#![forbid(unsafe_code)]

mod atomic;
mod lock;
mod machine;

use std::cell::RefCell;
use std::rc::Rc;

pub use atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize};
pub use lock::{Guard, Lock};
pub use machine::{CORES_MAX, Counts, LINE, Machine};

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
    static ON_SPIN: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Runs `action` on this thread's machine, if there is one. A thread that ends may have lost it
/// already.
fn with<R>(action: impl FnOnce(&mut Machine) -> R) -> Option<R> {
    MACHINE
        .try_with(|machine| machine.try_borrow_mut().ok()?.as_mut().map(action))
        .ok()
        .flatten()
}

/// Begins to count on this thread: core 0 works, all caches are empty, all counts 0.
pub fn start() {
    resume(Machine::new());
}

/// Ends counting on this thread; `None` where it had not begun.
pub fn stop() -> Option<Counts> {
    take().map(|machine| machine.counts())
}

/// Ends counting on this thread and gives the machine, with which another may go on.
pub fn take() -> Option<Machine> {
    MACHINE.with(|machine| machine.borrow_mut().take())
}

/// Counts on this thread with a machine that has counted before. One that this thread had is
/// dropped.
pub fn resume(machine: Machine) {
    MACHINE.with(|current| *current.borrow_mut() = Some(machine));
}

/// Sets the action of this thread whenever it waits for another core, in place of a pause: to let
/// that core run.
pub fn on_spin(action: Option<Rc<dyn Fn()>>) {
    ON_SPIN.with(|current| *current.borrow_mut() = action);
}

/// A pause in a loop that waits for another core, or what [`on_spin`] says.
pub fn spin_loop() {
    // Not borrowed during the call: another thread runs meanwhile, on which this may be called, and
    // it may be replaced.
    let action = ON_SPIN.with(|current| current.borrow().clone());
    match action {
        Some(action) => action(),
        None => std::hint::spin_loop(),
    }
}

/// From here on `core` works.
///
/// # Panics
/// `core` is [`CORES_MAX`] or more.
pub fn set_core(core: usize) {
    with(|machine| machine.set_core(core));
}

/// Returns the counts since [`start`] or [`clear`]; zeros where nothing counts.
#[must_use]
pub fn counts() -> Counts {
    with(|machine| machine.counts()).unwrap_or_default()
}

/// Sets the counts to 0; the caches stay as they are (after a warm-up, say).
pub fn clear() {
    with(Machine::clear);
}

/// The lines with the most transfers, with their addresses divided by [`LINE`]; at most `most`.
#[must_use]
pub fn hottest(most: usize) -> Vec<(usize, u64)> {
    with(|machine| machine.hottest(most)).unwrap_or_default()
}

/// The working core reads all of `value`: for plain memory in a re-model.
pub fn touch_read<T: ?Sized>(value: &T) {
    let (at, len) = (
        std::ptr::from_ref(value).cast::<u8>().addr(),
        size_of_val(value),
    );
    with(|machine| machine.read(at, len));
}

/// The working core writes all of `value`.
pub fn touch_write<T: ?Sized>(value: &T) {
    let (at, len) = (
        std::ptr::from_ref(value).cast::<u8>().addr(),
        size_of_val(value),
    );
    with(|machine| machine.write(at, len));
}
