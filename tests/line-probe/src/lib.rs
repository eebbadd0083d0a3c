//! Line probe: counts, for simulated cores, the accesses that need a cache line of another core.
//!
//! **What.** With its feature `probe`, the crate `lines` uses the atomics and the [`Lock`] of this
//! crate, which record every access in a [`Machine`]: one unbounded cache per simulated core, with
//! lines of 64 bytes. A line is either exclusive to the core that wrote it last or shared by the
//! cores that have read it (the states of MESI, with exclusive and modified merged). An access is a
//! **remote transfer** if its line is in another core's cache, and not in its own with the required
//! state.
//!
//! **How work flows.** One thread drives everything: [`start`], then before each operation
//! [`set_core`], then [`counts`] or [`stop`]. The machine belongs to the thread; other threads, and
//! this one before `start`, count nothing. Operations that run to completion one after another
//! never wait for each other. To model waiting, a harness gives each core a thread and lets one of
//! them run at a time: it passes the machine on with [`take`] and [`resume`] whenever a core spins
//! ([`on_spin`]). Either way the counts of a program are repeatable. Models of other algorithms
//! report accesses to plain memory by [`touch_read`] and [`touch_write`].
//!
//! **Left out.** Plain memory (that of one core by design, or the value of a lock, of which only
//! the first line is counted when the guard is used), capacity and conflict misses, the
//! prefetcher's second line, the cost of fences.
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
//! // No core had the line at the first access; at the others, the other core had it.
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

/// Runs `action` on this thread's machine, if there is one. While a thread ends, the machine may be
/// gone already.
fn with<R>(action: impl FnOnce(&mut Machine) -> R) -> Option<R> {
    MACHINE
        .try_with(|machine| machine.try_borrow_mut().ok()?.as_mut().map(action))
        .ok()
        .flatten()
}

/// Starts counting on this thread: core 0 works, all caches are empty, all counts are 0.
pub fn start() {
    resume(Machine::new());
}

/// Stops counting on this thread. Returns `None` if it had not started.
pub fn stop() -> Option<Counts> {
    take().map(|machine| machine.counts())
}

/// Stops counting on this thread and returns the machine, with which another thread may continue.
pub fn take() -> Option<Machine> {
    MACHINE.with(|machine| machine.borrow_mut().take())
}

/// Continues counting on this thread with a machine that was taken. A machine that this thread had
/// is dropped.
pub fn resume(machine: Machine) {
    MACHINE.with(|current| *current.borrow_mut() = Some(machine));
}

/// Sets the action that this thread executes whenever it waits for another core, instead of a
/// pause: to let that core run.
pub fn on_spin(action: Option<Rc<dyn Fn()>>) {
    ON_SPIN.with(|current| *current.borrow_mut() = action);
}

/// Pauses in a loop that waits for another core, or executes the action of [`on_spin`].
pub fn spin_loop() {
    // Not borrowed during the call: meanwhile another thread runs, which may call this function, or
    // replace the action.
    let action = ON_SPIN.with(|current| current.borrow().clone());
    match action {
        Some(action) => action(),
        None => std::hint::spin_loop(),
    }
}

/// Makes `core` the working core.
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

/// Returns the lines with the most transfers, at most `most`: their addresses divided by [`LINE`],
/// and their transfers.
#[must_use]
pub fn hottest(most: usize) -> Vec<(usize, u64)> {
    with(|machine| machine.hottest(most)).unwrap_or_default()
}

/// Records that the working core reads all of `value`, which is plain memory.
pub fn touch_read<T: ?Sized>(value: &T) {
    let (at, len) = (
        std::ptr::from_ref(value).cast::<u8>().addr(),
        size_of_val(value),
    );
    with(|machine| machine.read(at, len));
}

/// Records that the working core writes all of `value`.
pub fn touch_write<T: ?Sized>(value: &T) {
    let (at, len) = (
        std::ptr::from_ref(value).cast::<u8>().addr(),
        size_of_val(value),
    );
    with(|machine| machine.write(at, len));
}
