//! Bringing a vCPU thread out of `KVM_RUN`, without a race.
//!
//! The kicker sends a real-time signal; the handler, which runs on the vCPU thread, sets that
//! thread's own `kvm_run.immediate_exit`. A signal that arrives just before the ioctl therefore
//! makes it return at once, one that arrives inside it ends it with EINTR, and none is lost
//! between.
//!
//! UNSAFETY: a signal handler, and a pointer to the vCPU's shared `kvm_run` page in a thread-local.

use std::cell::Cell;
use std::io;
use std::ptr;

use kvm_bindings::kvm_run;

thread_local! {
    /// The `kvm_run` page of the vCPU this thread runs; null on other threads. Const-initialised
    /// and without a destructor, so that reading it in a signal handler is a plain load.
    static RUN_PAGE: Cell<*mut kvm_run> = const { Cell::new(ptr::null_mut()) };
}

fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn on_kick(_signal: libc::c_int) {
    let page = RUN_PAGE.get();
    if !page.is_null() {
        // SAFETY: `RunPage` keeps the pointer only while the vCPU, and so the mapping, lives on
        // this thread.
        unsafe { ptr::write_volatile(&raw mut (*page).immediate_exit, 1) };
    }
}

/// Installs the handler for the process. Once is enough; again is harmless.
pub fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is a valid one.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int) = on_kick;
    action.sa_sigaction = handler as usize;
    // SAFETY: an initialised action with an async-signal-safe handler; the old one is not asked
    // for.
    match unsafe { libc::sigaction(signal(), &action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Marks this thread as the one running a vCPU, until dropped.
pub struct RunPage(());

impl RunPage {
    /// Enters `page`, the vCPU's `kvm_run`, which outlives the guard: the caller owns the vCPU for
    /// longer.
    ///
    /// # Safety
    /// The page must stay mapped until the guard is dropped, on this thread.
    pub unsafe fn enter(page: *mut kvm_run) -> Self {
        RUN_PAGE.set(page);
        Self(())
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        RUN_PAGE.set(ptr::null_mut());
    }
}

/// A thread that can be kicked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Thread(libc::pthread_t);

impl Thread {
    /// Returns the calling thread.
    pub fn current() -> Self {
        // SAFETY: always succeeds.
        Self(unsafe { libc::pthread_self() })
    }

    /// Sends the signal. The caller knows that the thread has not returned.
    pub(crate) fn kick(self) {
        // SAFETY: `Control` kicks only threads that have joined and not left, under its lock.
        unsafe { libc::pthread_kill(self.0, signal()) };
    }
}
