//! Starting, pausing and ending a machine: the agreement between the vCPU threads and all others.
//!
//! * [`Control::ask`] records that the machine is to end, while its guest is given the time to do
//!   so itself.
//! * [`Control::end`] may be called by any thread, first come first served; the thread in
//!   [`Control::wait_for_end`] wakes and winds the machine down.
//! * [`Control::pause`] returns once every vCPU thread has left the guest and parked; pauses nest.
//! * A vCPU is brought out of the guest by a signal, see [`kick`](crate::kick).
//!
//! Lock order: one mutex, nothing is called while it is held except `pthread_kill`.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuFd;
use platform::power::PowerSink;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::kick::Thread;

/// Reason why a machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest powered off (ACPI S5).
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest's kernel reported that it has panicked.
    Panicked,
    /// The user asked, by the escape key.
    Quit,
    /// A signal asked.
    Signal(i32),
    /// The guest put a vCPU into a state it cannot leave; the message says which.
    Crash(String),
    /// The host refused something while the machine ran.
    Host(String),
    /// A sidecore stopped answering; the message says which.
    Watchdog(String),
}

#[derive(Default)]
struct State {
    end: Option<End>,
    /// A sidecore has stopped answering, before or after the end.
    stuck: Option<String>,
    /// The first end that the user or a signal has asked for, before or after the machine's.
    asked: Option<End>,
    pauses: usize,
    /// vCPU threads alive.
    threads: Vec<Thread>,
    /// Of those, parked.
    parked: usize,
    /// A question to the parked thread of a vCPU.
    inspection: Option<(usize, Inspection)>,
    /// Work that threads of vCPUs do when they are next outside the guest, by the vCPU's index.
    visits: Vec<(usize, VcpuWork)>,
}

/// A question that only a vCPU's own thread can answer.
pub(crate) type Inspection = Box<dyn FnOnce(&VcpuFd) + Send>;

/// Work that the thread of a vCPU does outside the guest. Its arguments: the vCPU, and whether the
/// instruction pointer is where the vCPU goes on. It is not while the next entry must still
/// complete an access to a device.
pub type VcpuWork = Box<dyn FnOnce(&VcpuFd, bool) + Send>;

/// The agreement. See the module's head.
pub struct Control {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether vCPU threads must check `state` before they enter the guest.
    attention: AtomicBool,
    over: AtomicBool,
    end_event: EventFd,
}

/// Next step of a vCPU thread.
pub(crate) enum Next {
    /// Enter the guest.
    Run,
    /// Answer this, and ask again.
    Inspect(Inspection),
    /// Do this, and ask again.
    VcpuWork(VcpuWork),
    /// Return.
    Stop,
}

impl Control {
    /// Creates the state of a machine about to run.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            attention: AtomicBool::new(false),
            over: AtomicBool::new(false),
            end_event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is one assignment, so a panic elsewhere leaves the state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a request of the user or of a signal to end the machine for this reason: its guest
    /// has been asked to power off. Does not end it.
    pub fn ask(&self, reason: End) {
        self.state().asked.get_or_insert(reason);
    }

    /// Ends the machine for this reason, unless it has ended already. Does not wait.
    pub fn end(&self, reason: End) {
        let mut state = self.state();
        match &reason {
            End::Watchdog(what) => state.stuck = Some(what.clone()),
            End::Quit | End::Signal(_) => {
                state.asked.get_or_insert_with(|| reason.clone());
            }
            _ => {}
        }
        if state.end.is_none() {
            state.end = Some(reason);
            // SeqCst, as is the load in `is_over`: the store is ordered before the write of the
            // event, so a thread that reads the event also reads the flag as set.
            self.over.store(true, Ordering::SeqCst);
            // Fails only when the counter is full, and then it is readable.
            let _ = self.end_event.write(1);
        }
        self.summon(&state);
        drop(state);
        self.changed.notify_all();
    }

    /// Returns whether the machine has ended.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Returns the watchdog's report, also after the machine ended for another reason.
    pub fn stuck(&self) -> Option<String> {
        self.state().stuck.clone()
    }

    /// Returns the first end that the user or a signal has asked for, also after the machine ended
    /// for another reason.
    pub fn asked(&self) -> Option<End> {
        self.state().asked.clone()
    }

    /// Returns whether each vCPU should show its registers as it stops: after SIGQUIT, and when a
    /// sidecore is silent.
    pub(crate) fn wants_registers(&self) -> bool {
        matches!(
            self.state().end,
            Some(End::Signal(libc::SIGQUIT) | End::Watchdog(_))
        )
    }

    /// Becomes readable, for good, when the machine ends.
    pub fn end_fd(&self) -> RawFd {
        self.end_event.as_raw_fd()
    }

    /// Waits until the machine ends, and says why.
    pub fn wait_for_end(&self) -> End {
        let mut state = self.state();
        loop {
            if let Some(end) = &state.end {
                return end.clone();
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Brings every vCPU out of the guest and keeps it out until [`resume`](Self::resume). True
    /// when all have parked within `patience`; false otherwise (one is still inside a device's
    /// call), with the pause in force all the same. Must not be called on a vCPU thread, nor by a
    /// sidecore that a vCPU may be waiting for.
    pub fn pause(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.state();
        state.pauses += 1;
        self.summon(&state);
        while state.parked < state.threads.len() && !self.is_over() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Asks vCPU `index`, which [`pause`](Self::pause) has parked, something about its state.
    /// `None`: there is no such vCPU, the machine is not paused, or has ended, or no answer has
    /// come within `patience`.
    pub fn inspect<R: Send + 'static>(
        &self,
        index: usize,
        patience: Duration,
        question: impl FnOnce(&VcpuFd) -> R + Send + 'static,
    ) -> Option<R> {
        let (sender, answer) = mpsc::channel();
        let mut state = self.state();
        if state.pauses == 0 || state.end.is_some() {
            return None;
        }
        state.inspection = Some((
            index,
            Box::new(move |vcpu| {
                // The caller may have given up waiting.
                let _ = sender.send(question(vcpu));
            }),
        ));
        drop(state);
        self.changed.notify_all();
        let answer = answer.recv_timeout(patience).ok();
        if answer.is_none() {
            self.state().inspection = None;
        }
        answer
    }

    /// Has the threads of vCPUs `0..count` each do its work once, outside the guest, which they
    /// leave for it. Does not wait; what has not been done when this is called again, for lack of a
    /// thread, is forgotten.
    pub fn visit(&self, count: usize, mut what: impl FnMut(usize) -> VcpuWork) {
        let mut state = self.state();
        state.visits.clear();
        state
            .visits
            .extend((0..count).map(|index| (index, what(index))));
        self.summon(&state);
        drop(state);
        // Those that are parked.
        self.changed.notify_all();
    }

    /// Waits until every vCPU thread has left, at most for `patience`; whether they have.
    pub fn wait_for_vcpus(&self, patience: Duration) -> bool {
        let waited = self
            .changed
            .wait_timeout_while(self.state(), patience, |state| !state.threads.is_empty());
        waited
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .threads
            .is_empty()
    }

    /// Takes back one [`pause`](Self::pause); the vCPUs run again after the last.
    pub fn resume(&self) {
        let mut state = self.state();
        state.pauses = state.pauses.saturating_sub(1);
        drop(state);
        self.changed.notify_all();
    }

    /// Makes every vCPU thread check the state.
    fn summon(&self, state: &State) {
        // Release: a vCPU that sees it takes the lock and so sees the state. The flag is set before
        // the signal is sent; a vCPU clears its immediate_exit before it looks, so it misses
        // neither.
        self.attention.store(true, Ordering::Release);
        for thread in &state.threads {
            thread.kick();
        }
    }

    /// Adds a vCPU thread; pair with [`leave`](Self::leave).
    pub(crate) fn join(&self, thread: Thread) {
        self.state().threads.push(thread);
    }

    /// Removes a vCPU thread that is about to return: it is never signalled again.
    pub(crate) fn leave(&self, thread: Thread) {
        self.state().threads.retain(|other| *other != thread);
        self.changed.notify_all();
    }

    /// Returns the next step of the thread of vCPU `index`; parks it while the machine is paused.
    #[inline]
    pub(crate) fn next(&self, index: usize) -> Next {
        if self.attention.load(Ordering::Acquire) {
            self.park(index)
        } else {
            Next::Run
        }
    }

    #[cold]
    fn park(&self, index: usize) -> Next {
        let mut state = self.state();
        loop {
            if state.end.is_some() {
                return Next::Stop;
            }
            if let Some(at) = state.visits.iter().position(|(of, _)| *of == index) {
                return Next::VcpuWork(state.visits.swap_remove(at).1);
            }
            if state.pauses == 0 {
                // Under the lock, so that it cannot undo a summons that came later; nor one of a
                // vCPU that has not come yet.
                if state.visits.is_empty() {
                    self.attention.store(false, Ordering::Release);
                }
                return Next::Run;
            }
            if let Some((_, question)) = state.inspection.take_if(|(of, _)| *of == index) {
                return Next::Inspect(question);
            }
            state.parked += 1;
            self.changed.notify_all();
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.parked -= 1;
        }
    }
}

impl PowerSink for Control {
    fn power_off(&self) {
        self.end(End::PowerOff);
    }

    fn reset(&self) {
        self.end(End::Reset);
    }

    fn panicked(&self) {
        self.end(End::Panicked);
    }
}

#[cfg(test)]
mod tests;
