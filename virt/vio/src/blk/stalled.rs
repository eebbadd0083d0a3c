//! Operations that the back end cannot begin, for want of something that the host may grant again
//! at any time.
//!
//! For the guest they are in flight. The host does not notify when there are descriptors or memory
//! again. So the first of them is submitted anew [`RETRY_NS`] after it was refused, and the others
//! once that one has begun. Operations that come meanwhile wait behind them, so that a host that
//! lacks something is asked ten times a second, whatever the guest does.

use std::collections::VecDeque;
use std::io;

use super::BlkClass;
use super::backend::{Completion, Outcome};
use super::slot::{Cancel, Request};
use crate::ring::RETRY_NS;

/// Operations that wait for the host.
#[derive(Debug, Default)]
pub(super) struct Stalled {
    slots: VecDeque<u32>,
    /// Time at which the first is submitted again, in nanoseconds of the visits' clock.
    retry_at_ns: u64,
    /// The one that this visit has submitted again.
    tried: Option<u32>,
    /// One of them has been asked to end.
    has_cancelled: bool,
}

impl Stalled {
    /// Returns the time at which a visit is due, in nanoseconds.
    pub(super) fn retry_at_ns(&self) -> Option<u64> {
        (!self.slots.is_empty()).then_some(self.retry_at_ns)
    }

    /// Whether the next visit ends one.
    pub(super) fn has_cancelled(&self) -> bool {
        self.has_cancelled
    }

    /// Asks `slot` to end; false: it does not wait here.
    pub(super) fn cancel(&mut self, slot: u32) -> bool {
        let waits = self.slots.contains(&slot);
        self.has_cancelled |= waits;
        waits
    }

    /// Appends those that have been asked to end, which is all that happens to them.
    pub(super) fn take_cancelled(&mut self, slab: &[Request], done: &mut Vec<Completion>) {
        if std::mem::take(&mut self.has_cancelled) {
            self.slots.retain(|&slot| {
                let goes_on = slab[slot as usize].cancel == Cancel::No;
                if !goes_on {
                    let outcome = Outcome::Failed(libc::ECANCELED);
                    done.push(Completion { slot, outcome });
                }
                goes_on
            });
        }
    }
}

impl BlkClass {
    /// Submits the part that is prepared in `slot`, or has it wait behind others.
    pub(super) fn submit(&mut self, slot: u32) {
        if self.stalled.slots.is_empty() {
            self.submit_now(slot);
        } else {
            self.stalled.slots.push_back(slot);
        }
    }

    fn submit_now(&mut self, slot: u32) {
        let own = &self.slab[slot as usize];
        self.io.submit(slot, own.part_op(), &own.pieces);
    }

    /// Notes that the back end has not begun the operation of `slot`.
    #[cold]
    pub(super) fn stall(&mut self, slot: u32, errno: i32, now_ns: u64) {
        let retry_at_ns = now_ns.saturating_add(RETRY_NS);
        self.stalled.has_cancelled |= self.slab[slot as usize].cancel != Cancel::No;
        if self.stalled.tried.take_if(|tried| *tried == slot).is_some() {
            self.stalled.slots.push_front(slot);
        } else {
            if self.stalled.slots.is_empty() {
                let (op, error) = (
                    self.slab[slot as usize].part_op(),
                    io::Error::from_raw_os_error(errno),
                );
                let every = RETRY_NS / 1_000_000;
                self.say(now_ns, || {
                    format!("{op:?} waits, and is tried again each {every} ms: {error}")
                });
            }
            self.stalled.slots.push_back(slot);
        }
        self.stalled.retry_at_ns = retry_at_ns;
    }

    /// Submits the first again if its time has come. The back end is polled next.
    pub(super) fn retry_stalled(&mut self, now_ns: u64) {
        if self.stalled.retry_at_ns().is_some_and(|at| at <= now_ns)
            && let Some(slot) = self.stalled.slots.pop_front()
        {
            self.stalled.tried = Some(slot);
            self.submit_now(slot);
        }
    }

    /// The back end has been polled: if it has begun the one that was tried, so it will the others.
    pub(super) fn go_on_with_stalled(&mut self, now_ns: u64) {
        if self.stalled.tried.take().is_none() {
            return;
        }
        let slots = std::mem::take(&mut self.stalled.slots);
        let count = slots.len() + 1;
        self.say(now_ns, || format!("{count} that waited go on"));
        for slot in slots {
            self.submit_now(slot);
        }
        self.io.flush();
    }
}
