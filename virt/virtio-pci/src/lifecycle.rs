//! The state of a function between its driver's start and its reset, and how it stops.
//!
//! ```text
//! Inactive ┬─ activate, Bus Master on ──▶ Live
//!          ├─ activate, Bus Master off ─▶ Draining(Pause)
//!          └─ end ─▶ Ended
//! Live ┬─ Bus Master off ─▶ Draining(Pause) ─▶ Drained(Pause) ─ Bus Master on ─▶ Live
//!      ├─ Status = 0 ─────▶ Draining(Reset) ─▶ Drained(Reset) ─ reset ─▶ Inactive
//!      └─ end ────────────▶ Draining(End) ───▶ Drained(End) ─── reset ─▶ Ended
//! Draining(Pause) ─ Bus Master on ─▶ Live
//! Draining(r), Drained(r) ┬─ another stop, for s ────────▶ Draining(the greater of r and s)
//!                         └─ any other change of Bus Master ─▶ Draining(r)
//! ```
//! So Drained(End) drains again at Status = 0, which waits for its reset, and at a change of Bus
//! Master, whose write is answered by a poll too: what is in flight is re-checked by one rule.
//!
//! | stop | asked for by | drained once |
//! |---|---|---|
//! | Pause | Bus Master off: no accesses any more (PCI Local Bus 3.0, §6.2.2) | no guest memory is touched |
//! | Reset | Status = 0, which reads 0 when no queue is used any more (Virtio 1.2, §2.4.1) | nothing is in flight |
//! | End | the machine's end, or removal; for good | nothing is in flight |
//!
//! Of two reasons the greater one is further down in this table. Bus Master on ends a pause only. A
//! reset is completed after the end too: the driver waits for it (§4.1.4.3.2).
//!
//! Left out: the registers. `CommonConfig` knows that a reset was asked for, also of a device that
//! was never activated: the next poll resets its registers, and changes no state here.

/// Reason why a function stops; of two the greater one holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StopReason {
    /// Bus Master is off, until it is on again.
    Pause,
    /// The driver has written a status of 0.
    Reset,
    /// The machine has ended, or the function is removed.
    End,
}

/// Whether what is in flight may touch guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Touched,
    Untouched,
}

/// States of the drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The device is not activated.
    Inactive,
    /// The device serves its queues.
    Live,
    /// The device is to stop, and requests may be in flight; memory is as the last poll found it.
    Draining(StopReason, Memory),
    /// The device has stopped and is still activated.
    Drained(StopReason),
    /// The device is not activated, and never will be.
    Ended,
}

/// State of a function. It does not access the device: the caller does what a transition returns.
#[derive(Debug)]
pub(crate) struct Lifecycle {
    state: State,
}

impl Lifecycle {
    /// State of a function whose device is not activated.
    pub(crate) fn new() -> Self {
        Self {
            state: State::Inactive,
        }
    }

    /// Notes that the device has begun. With Bus Master off it is paused before it has served
    /// anything.
    pub(crate) fn activate(&mut self, is_master: bool) {
        assert!(self.may_activate() && !self.is_active(), "begun twice");
        self.state = if is_master {
            State::Live
        } else {
            State::Draining(StopReason::Pause, Memory::Touched)
        };
    }

    /// Notes that a reset or the end is asked for. Keeps the state of memory as it is known.
    pub(crate) fn stop(&mut self, reason: StopReason) {
        self.state = match self.state {
            State::Inactive if reason == StopReason::End => State::Ended,
            State::Inactive => State::Inactive,
            State::Live => State::Draining(reason, Memory::Touched),
            State::Draining(former, memory) => State::Draining(former.max(reason), memory),
            State::Drained(former) => State::Draining(former.max(reason), Memory::Untouched),
            State::Ended => State::Ended,
        };
    }

    /// Notes a change of Bus Master. Returns whether the device is to go on. Where it is not, the
    /// write is answered once a poll has found that no memory is touched.
    #[must_use]
    pub(crate) fn set_bus_master(&mut self, on: bool) -> bool {
        self.state = match (self.state, on) {
            (State::Inactive | State::Ended, _) | (State::Live, true) => return false,
            (State::Live, false) => State::Draining(StopReason::Pause, Memory::Touched),
            (State::Draining(StopReason::Pause, _) | State::Drained(StopReason::Pause), true) => {
                State::Live
            }
            (State::Draining(reason, _) | State::Drained(reason), _) => {
                State::Draining(reason, Memory::Touched)
            }
        };
        self.is_live()
    }

    /// A stopped device was polled: `in_flight` requests are left, which touch memory or do not.
    pub(crate) fn drain(&mut self, in_flight: u32, touches_memory: bool) {
        let State::Draining(reason, _) = self.state else {
            return;
        };
        let is_over = match reason {
            StopReason::Pause => !touches_memory,
            // A write from before must not overtake one of after, wherever its buffer is.
            StopReason::Reset | StopReason::End => in_flight == 0,
        };
        self.state = match (is_over, touches_memory) {
            (true, _) => State::Drained(reason),
            (false, true) => State::Draining(reason, Memory::Touched),
            (false, false) => State::Draining(reason, Memory::Untouched),
        };
    }

    /// The device was reset, or had not begun.
    pub(crate) fn reset(&mut self) {
        self.state = match self.state {
            State::Inactive | State::Drained(StopReason::Reset) => State::Inactive,
            State::Ended | State::Drained(StopReason::End) => State::Ended,
            State::Live | State::Draining(..) | State::Drained(StopReason::Pause) => {
                panic!("a device is reset once it has stopped for that")
            }
        };
    }

    /// Whether the driver may activate the device.
    pub(crate) fn may_activate(&self) -> bool {
        self.state != State::Ended
    }

    /// Whether the device is activated.
    pub(crate) fn is_active(&self) -> bool {
        !matches!(self.state, State::Inactive | State::Ended)
    }

    /// Whether the device serves its queues.
    pub(crate) fn is_live(&self) -> bool {
        self.state == State::Live
    }

    /// Whether a stop waits for what is in flight, and the reason.
    pub(crate) fn draining(&self) -> Option<StopReason> {
        match self.state {
            State::Draining(reason, _) => Some(reason),
            _ => None,
        }
    }

    /// Whether no stop waits for guest memory that may still be touched.
    pub(crate) fn is_silent(&self) -> bool {
        !matches!(self.state, State::Draining(_, Memory::Touched))
    }

    /// Whether the end was asked for and nothing is in flight.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.state, State::Ended | State::Drained(StopReason::End))
    }
}
