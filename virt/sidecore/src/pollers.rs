//! The pollers of one core, the armed state of each, and the array of their probes.
//!
//! A poller is armed when the core goes to sleep and **stays armed** until the runtime is about to
//! call it ([`Pollers::touch`]), so that a core that wakes for one of 256 pollers arms one when it
//! goes back to sleep. The fields that the loop reads for each poller, however idle, are in two
//! compact arrays: the probe, and [`SlotSchedule`].

use crate::{
    clock::Nanos,
    poller::{ArmError, Poller, Probe},
    wakes::Wakes,
};

/// No deadline.
const NEVER: Nanos = Nanos(u64::MAX);

/// A poller and its descriptors.
#[derive(Debug)]
pub(crate) struct Attached<P> {
    pub(crate) poller: P,
    pub(crate) wakes: Wakes,
}

/// Fields of a slot that each sweep reads. 24 bytes.
#[derive(Clone, Copy, Debug)]
struct SlotSchedule {
    deadline: Nanos,
    muted_until: Nanos,
    is_armed: bool,
    /// `attached` has succeeded.
    is_registered: bool,
}

const EMPTY: SlotSchedule = SlotSchedule {
    deadline: NEVER,
    muted_until: NEVER,
    is_armed: true,
    is_registered: true,
};

/// Pollers of one core, in numbered slots; empty ones are `None`. See the head of this module.
#[derive(Debug)]
pub(crate) struct Pollers<P: Poller> {
    slots: Vec<Option<Attached<P>>>,
    probes: Vec<Option<P::Probe>>,
    schedules: Vec<SlotSchedule>,
    /// Not armed, in the order in which they were touched.
    unarmed: Vec<usize>,
    /// Armed and not checked since.
    fresh: Vec<usize>,
    /// Pollers in which the last check found work.
    found: Vec<usize>,
    /// Lower bound of all deadlines.
    next_deadline: Nanos,
}

impl<P: Poller> Pollers<P> {
    pub(crate) fn new() -> Self {
        Pollers {
            slots: Vec::new(),
            probes: Vec::new(),
            schedules: Vec::new(),
            unarmed: Vec::new(),
            fresh: Vec::new(),
            found: Vec::new(),
            next_deadline: NEVER,
        }
    }

    /// Returns the number of an empty slot.
    pub(crate) fn vacancy(&self) -> usize {
        let gap = self.slots.iter().position(Option::is_none);
        gap.unwrap_or(self.slots.len())
    }

    /// Puts a poller into an empty slot. One that is not registered is asked to register at the
    /// next arming.
    pub(crate) fn insert(&mut self, at: usize, poller: P, wakes: Wakes, is_registered: bool) {
        while self.slots.len() <= at {
            self.slots.push(None);
            self.probes.push(None);
            self.schedules.push(EMPTY);
        }
        self.slots[at] = Some(Attached { poller, wakes });
        self.schedules[at] = SlotSchedule {
            is_armed: false,
            is_registered,
            ..EMPTY
        };
        self.unarmed.push(at);
        self.asked(at);
    }

    /// Takes a poller out, disarmed and unregistered.
    pub(crate) fn remove(&mut self, at: usize) -> P {
        let slot = self.touch(at);
        slot.poller.detaching(&mut slot.wakes);
        slot.wakes.clear();
        self.unarmed.retain(|&other| other != at);
        self.fresh.retain(|&other| other != at);
        self.schedules[at] = EMPTY;
        self.probes[at] = None;
        self.slots[at].take().expect("touched just now").poller
    }

    /// Returns the number of slots, empty ones included.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn get(&self, at: usize) -> Option<&Attached<P>> {
        self.slots.get(at)?.as_ref()
    }

    /// Returns a poller without disarming it.
    pub(crate) fn get_mut(&mut self, at: usize) -> Option<&mut Attached<P>> {
        self.slots.get_mut(at)?.as_mut()
    }

    /// Returns a poller that is about to be called: disarms it first, if it is armed.
    ///
    /// # Panics
    /// When the slot is empty.
    pub(crate) fn touch(&mut self, at: usize) -> &mut Attached<P> {
        let slot = self.slots[at].as_mut().expect("a slot with a poller");
        if self.schedules[at].is_armed {
            self.schedules[at].is_armed = false;
            self.unarmed.push(at);
            slot.poller.disarm();
        }
        slot
    }

    // -- probes and deadlines ------------------------------------------------------------------

    /// Renews the probe after an `Idle` poll. Returns false if the poller wants to be polled at
    /// each sweep.
    pub(crate) fn probe(&mut self, at: usize) -> bool {
        let slot = self.slots[at].as_ref().expect("a slot with a poller");
        slot.poller.probe(&mut self.probes[at]);
        self.probes[at].is_some()
    }

    /// Calls `fired` for each slot whose probe fires.
    #[inline]
    pub(crate) fn scan(&self, mut fired: impl FnMut(usize)) {
        for (at, probe) in self.probes.iter().enumerate() {
            if probe.as_ref().is_some_and(P::Probe::fires) {
                fired(at);
            }
        }
    }

    /// Updates the deadlines, after a call of the poller or a change of its descriptors.
    #[inline]
    pub(crate) fn asked(&mut self, at: usize) {
        let slot = self.slots[at].as_ref().expect("a slot with a poller");
        let schedule = &mut self.schedules[at];
        schedule.deadline = slot.poller.deadline().unwrap_or(NEVER);
        schedule.muted_until = slot.wakes.muted_until().unwrap_or(NEVER);
        let earlier = schedule.deadline.min(schedule.muted_until);
        self.next_deadline = self.next_deadline.min(earlier);
    }

    /// Returns whether a deadline may have passed.
    #[inline]
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        now >= self.next_deadline
    }

    /// Puts muted descriptors back whose time has come, and fills `due` with the pollers whose
    /// deadline has passed.
    #[cold]
    pub(crate) fn due(&mut self, now: Nanos, due: &mut Vec<usize>) {
        let mut next = NEVER;
        for (at, schedule) in self.schedules.iter_mut().enumerate() {
            if schedule.muted_until <= now
                && let Some(slot) = &mut self.slots[at]
            {
                slot.wakes.unmute(now);
                schedule.muted_until = slot.wakes.muted_until().unwrap_or(NEVER);
            }
            if schedule.deadline <= now {
                due.push(at);
            } else {
                next = next.min(schedule.deadline);
            }
            next = next.min(schedule.muted_until);
        }
        // Those that are due are polled now, which asks for their next one.
        self.next_deadline = next;
    }

    /// Returns the earliest time at which the core must be awake: a deadline of a poller, or the
    /// end of a descriptor's muting.
    pub(crate) fn earliest(&self) -> Option<Nanos> {
        let all = self.schedules.iter();
        let earliest = all.fold(NEVER, |min, schedule| {
            min.min(schedule.deadline).min(schedule.muted_until)
        });
        Some(earliest).filter(|&at| at != NEVER)
    }

    // -- going to sleep ------------------------------------------------------------------------

    /// Returns the cost of arming (and disarming) the pollers that are not armed, in nanoseconds.
    pub(crate) fn arm_cost_ns(&self) -> u64 {
        let costs = self
            .unarmed
            .iter()
            .filter_map(|&at| self.slots[at].as_ref());
        costs.fold(0, |sum: u64, slot| {
            sum.saturating_add(slot.poller.arm_cost())
        })
    }

    /// Arms all that are not armed. After an error those that are armed stay so.
    pub(crate) fn arm(&mut self) -> Result<(), ArmError> {
        // Left over from an arming that failed, unless disarmed since.
        let schedules = &self.schedules;
        self.fresh.retain(|&at| schedules[at].is_armed);
        let moved = std::mem::take(&mut self.unarmed);
        let mut outcome = Ok(());
        for at in moved {
            if outcome.is_ok() {
                outcome = self.arm_one(at);
            }
            if outcome.is_ok() {
                self.schedules[at].is_armed = true;
                self.fresh.push(at);
            } else {
                self.unarmed.push(at);
            }
        }
        outcome
    }

    fn arm_one(&mut self, at: usize) -> Result<(), ArmError> {
        let slot = self.slots[at].as_mut().expect("a slot with a poller");
        let schedule = &mut self.schedules[at];
        if !schedule.is_registered {
            let attached = slot.poller.attached(&mut slot.wakes);
            if let Err(error) = attached {
                slot.wakes.clear();
                return Err(ArmError::new(error));
            }
            schedule.is_registered = true;
        }
        slot.poller.arm(&mut slot.wakes)
    }

    /// Re-checks for work, after the fence. The pollers that were just armed are asked. Those that
    /// have been armed for longer were checked after *their* arming, and anything published since
    /// then has made a descriptor readable; their probes only find it sooner.
    pub(crate) fn last_look(&mut self) -> bool {
        self.found.clear();
        for &at in &self.fresh {
            let slot = self.slots[at].as_mut().expect("a slot with a poller");
            if slot.poller.has_work() {
                self.found.push(at);
            }
        }
        let is_any_kept_firing = self.is_any_kept_firing();
        while let Some(at) = self.fresh.pop() {
            // Arming may have set a deadline.
            self.asked(at);
        }
        !self.found.is_empty() || is_any_kept_firing
    }

    /// Returns whether the re-check has yet to ask it.
    pub(crate) fn is_fresh(&self, at: usize) -> bool {
        self.fresh.contains(&at)
    }

    fn is_any_kept_firing(&self) -> bool {
        self.probes.iter().enumerate().any(|(at, probe)| {
            probe
                .as_ref()
                .is_some_and(|probe| probe.fires() && !self.is_fresh(at))
        })
    }

    /// Takes the pollers in which the re-check found work; they are to be polled.
    pub(crate) fn take_found(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.found)
    }

    /// Returns a poller as [`touch`](Self::touch) does, and the probes of all.
    pub(crate) fn touch_beside(&mut self, at: usize) -> (&mut Attached<P>, &[Option<P::Probe>]) {
        self.touch(at);
        let slot = self.slots[at].as_mut().expect("a slot with a poller");
        (slot, &self.probes)
    }
}
