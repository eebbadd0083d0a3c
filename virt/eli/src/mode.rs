//! Mode machine, and model of the requested and in-service vectors.

mod counts;
mod reflect;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;

pub use counts::Counts;
pub use reflect::{Fault, Reflection};

use crate::alias::{Aliases, Full};
use crate::event::{Event, Kind};
use crate::gate::{self, Gate};
use crate::hosts::{CRITICAL, SPURIOUS, Source};
use crate::policy;
use crate::vectors::class;
use crate::{Vector, VectorSet};

/// Operations that are direct, without an exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectModes {
    /// Assigned interrupts are delivered directly (§3.5.1).
    pub delivery: bool,
    /// The guest ends them at the real local APIC (§3.5.4).
    pub completion: bool,
}

/// The guest's processor, at an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// RFLAGS.IF.
    pub interrupts: bool,
    /// The instruction behind STI or a load of SS: interrupts wait.
    pub shadow: bool,
    /// The entry begins with an event already (EVENTINJ).
    pub event: bool,
    /// The guest runs one instruction only, with interrupts masked.
    pub stepping: bool,
}

/// A vector that the processor acknowledged on the host's behalf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// The vector.
    pub vector: Vector,
    /// Its bit in the local APIC's in-service register. If clear, the interrupt is an 8259's
    /// (ExtINT) and gets no EOI.
    pub in_service: bool,
    /// Its bit in the trigger-mode register. If set, its source sends again at the EOI, unless its
    /// line is deasserted by then.
    pub level: bool,
}

/// Disposition of an acknowledged vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disposition {
    /// Number of EOIs to send to the real local APIC now.
    pub eois: u8,
    /// The host's source if the vector is the host's; otherwise it is the guest's and requested
    /// virtually.
    pub to: Option<Source>,
}

/// Result of an EOI of the guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Number of EOIs to send to the real local APIC.
    pub eois: u8,
    /// Interrupt that it ended.
    pub ended: EoiOutcome,
}

/// Interrupt that an EOI ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EoiOutcome {
    /// A virtual interrupt.
    Virtual(Vector),
    /// An interrupt that was delivered directly.
    Real(Vector),
    /// Nothing was in service.
    Nothing,
}

/// An event to begin an entry with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The event.
    pub event: Event,
    /// Its gate is hidden in the shadow, and must be open for it.
    pub opens: bool,
}

/// How the guest runs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryControls {
    /// Real interrupts are the guest's: none exits but by a fault. Else all exit.
    pub direct: bool,
    /// EOI exits.
    pub eoi_exits: bool,
    /// The limit of the guest's interrupt descriptor table.
    pub limit: u32,
    /// An interrupt to begin with.
    pub inject: Option<Injection>,
    /// Exit when the guest can take one.
    pub window: bool,
    /// Gates that were opened, to be hidden again.
    pub hide: VectorSet,
}

const EXTERNALS: usize = 16;

/// The mode machine of one guest processor.
#[derive(Clone, Debug)]
pub struct Core {
    direct_modes: DirectModes,
    /// The guest's vectors at the real local APIC.
    aliases: Aliases,
    /// The guest's spurious vector.
    spurious: Vector,
    /// The guest's table is shadowed.
    engaged: bool,
    /// The guest delays the host's interrupts by masking: no direct mode until it is resumed.
    suspended: bool,
    /// The guest's interrupts were ended for it, or it was suspended, and it has not been in direct
    /// mode since.
    away: bool,
    assigned: VectorSet,
    guest_limit: u32,
    task_priority: u8,
    /// Virtual.
    requested: VectorSet,
    in_service: VectorSet,
    /// Vectors of 8259s, in service there. The newest, which is last, has their highest priority.
    externals: [Vector; EXTERNALS],
    externals_len: usize,
    /// In service at the real local APIC, with an EOI that is owed to it.
    owed: VectorSet,
    /// Those of `owed` that have ended, but had another above them.
    over: VectorSet,
    /// Gates of the shadow that are open though not assigned.
    opened: VectorSet,
    /// The interrupt that the last entry began with; also if it did so again, its delivery having
    /// been cut off.
    injected: Option<Vector>,
    /// How the guest ran last.
    last: EntryControls,
    counts: Counts,
}

impl Core {
    /// A processor that has taken nothing yet, and whose guest has no table yet.
    #[must_use]
    pub fn new(direct_modes: DirectModes) -> Self {
        Self {
            direct_modes,
            aliases: Aliases::default(),
            spurious: SPURIOUS,
            engaged: false,
            suspended: false,
            away: false,
            assigned: VectorSet::EMPTY,
            guest_limit: 0,
            task_priority: 0,
            requested: VectorSet::EMPTY,
            in_service: VectorSet::EMPTY,
            externals: [0; EXTERNALS],
            externals_len: 0,
            owed: VectorSet::EMPTY,
            over: VectorSet::EMPTY,
            opened: VectorSet::EMPTY,
            injected: None,
            last: EntryControls {
                direct: false,
                eoi_exits: true,
                limit: 0,
                inject: None,
                window: false,
                hide: VectorSet::EMPTY,
            },
            counts: Counts::default(),
        }
    }

    /// Vectors that are delivered directly from now on, if they are the same at the real local
    /// APIC.
    ///
    /// Vectors of the host's class, and those that have an alias, are not assigned: in direct mode
    /// their fault would look like the guest's own.
    pub fn assign(&mut self, vectors: VectorSet) {
        let aliases = &mut self.aliases;
        self.assigned = vectors
            .iter()
            .filter(|vector| *vector < CRITICAL && aliases.claim(*vector) == Ok(*vector))
            .collect();
        // Its delivery may have been interrupted: it is injected again, through a gate that must
        // not be hidden meanwhile.
        if let Some(vector) = self.injected {
            self.open(vector);
        }
    }

    /// Returns the assigned vectors.
    #[must_use]
    pub const fn assigned(&self) -> VectorSet {
        self.assigned
    }

    /// The guest uses `vector` from now on: which one it is at the real local APIC.
    ///
    /// # Errors
    /// No other is left for it.
    pub fn claim(&mut self, vector: Vector) -> Result<Vector, Full> {
        self.aliases.claim(vector)
    }

    /// Number of the guest's vectors that are others at the real local APIC.
    #[must_use]
    pub fn aliased(&self) -> u32 {
        self.aliases.len()
    }

    /// The guest's vector of an interrupt that came as `real`.
    #[must_use]
    pub const fn guests(&self, real: Vector) -> Vector {
        self.aliases.guests(real)
    }

    /// The guest sends itself `vector`. Whether the real local APIC is to send it; else it is
    /// requested virtually, and an injection is due.
    pub fn send(&mut self, vector: Vector) -> bool {
        let is_same = vector < CRITICAL && self.aliases.claim(vector) == Ok(vector);
        if !is_same {
            self.requested.insert(vector);
        }
        is_same
    }

    /// Requests `vector` virtually: another processor of the guest's has sent it, or the host has
    /// an interrupt for the guest.
    pub fn request(&mut self, vector: Vector) {
        self.requested.insert(vector);
    }

    /// Resets the state after the processor received INIT: nothing is requested or in service any
    /// more, and it has no table. The aliases of vectors at the real local APIC stay, since
    /// messages with them may be under way. Nothing may be in service there.
    pub fn reset(&mut self) {
        let (direct_modes, aliases, counts) =
            (self.direct_modes, self.aliases.clone(), self.counts);
        *self = Self::new(direct_modes);
        (self.aliases, self.counts) = (aliases, counts);
    }

    /// The guest's vector for interrupts that are gone when they are acknowledged. The real one is
    /// the host's.
    pub fn set_spurious(&mut self, vector: Vector) {
        self.spurious = vector;
    }

    /// The guest loaded a table of this limit; whether it has a shadow now.
    pub fn load_table(&mut self, limit: u32, shadowed: bool) {
        self.guest_limit = limit;
        self.engaged = shadowed;
        if !shadowed {
            self.opened = VectorSet::EMPTY;
        }
    }

    /// Returns whether the guest's table is shadowed.
    #[must_use]
    pub const fn is_engaged(&self) -> bool {
        self.engaged
    }

    /// How the guest ran last.
    #[must_use]
    pub const fn last(&self) -> &EntryControls {
        &self.last
    }

    /// Returns the counters.
    #[must_use]
    pub const fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Whether something of the guest's is in service at the real local APIC, which has `real`, and
    /// none of it waits for the guest virtually.
    #[must_use]
    pub fn is_held(&self, real: VectorSet) -> bool {
        !real.without(self.owed).is_empty()
    }

    /// Ends the interrupts in service at the real local APIC, `real`, which are virtual from here
    /// on. Returns the number of EOIs to send now. There is no direct mode until the guest has
    /// ended them.
    ///
    /// The guest's own priorities stay as they are, and a later EOI of the guest ends the interrupt
    /// for which it is meant. An interrupt in service below a level-triggered one that waits for
    /// the guest is ended with that one.
    pub fn fall_back(&mut self, mut real: VectorSet) -> u8 {
        self.away = true;
        self.counts.forced += 1;
        let guests = real.without(self.owed);
        self.in_service = self.in_service.union(guests);
        self.owed = self.owed.union(guests);
        self.over = self.over.union(guests);
        match real.highest() {
            Some(highest) if self.over.contains(highest) => self.end(&mut real),
            _ => 0,
        }
    }

    /// No direct mode until [`resume`](Self::resume).
    pub fn suspend(&mut self) {
        self.suspended = true;
        self.away = true;
        self.counts.suspended += 1;
    }

    /// Direct mode again, when nothing is virtual.
    pub fn resume(&mut self) {
        self.suspended = false;
    }

    /// Whether it is suspended.
    #[must_use]
    pub const fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// Sets the guest's task priority (CR8 is its upper half); returns the value for the real
    /// register.
    pub fn set_task_priority(&mut self, priority: u8) -> u8 {
        self.task_priority = priority;
        policy::real_task_priority(priority)
    }

    /// Returns the guest's task priority.
    #[must_use]
    pub const fn task_priority(&self) -> u8 {
        self.task_priority
    }

    /// Vectors that are requested virtually.
    #[must_use]
    pub const fn requested(&self) -> VectorSet {
        self.requested
    }

    /// The guest's request register, where the real one has `real`: without the host's vectors.
    #[must_use]
    pub fn shown_requested(&self, real: VectorSet) -> VectorSet {
        let guests = real.iter().filter(|vector| *vector < CRITICAL);
        let guests: VectorSet = guests.map(|vector| self.guests(vector)).collect();
        guests.union(self.requested)
    }

    /// Returns the value of the guest's in-service register, where the real one has `real`. To
    /// return `real` alone would be wrong: a vector whose EOI is owed is in `real`, but the guest
    /// may not have received it yet.
    #[must_use]
    pub fn in_service(&self, real: VectorSet) -> VectorSet {
        real.without(self.owed).union(self.in_service)
    }

    /// The gate of `vector` in the shadow: the guest's own, or hidden.
    #[must_use]
    pub fn shadow(&self, vector: Vector, guests: Gate) -> Gate {
        let is_seen = vector < gate::FIRST_INTERRUPT
            || self.assigned.contains(vector)
            || self.opened.contains(vector);
        if is_seen { guests } else { guests.hidden() }
    }

    /// Vectors that the processor acknowledged, in this order, while the real in-service register
    /// came to be `real`. `each` gets the vector of each, the guest's if it is the guest's, and its
    /// disposition, and carries out EOIs at once.
    ///
    /// An EOI ends the *highest* in service, and a vector that was taken inside another's window is
    /// the higher one. So the newest come first: the other way round the wrong one is ended and the
    /// device's stays in service for ever (bug 3).
    pub fn acknowledge(
        &mut self,
        taken: &[Acknowledged],
        mut real: VectorSet,
        mut each: impl FnMut(Vector, Disposition),
    ) {
        let older = self.externals_len;
        for one in taken.iter().rev() {
            let (vector, disposition) = self.acknowledge_one(*one, &mut real, older);
            each(vector, disposition);
        }
    }

    fn acknowledge_one(
        &mut self,
        taken: Acknowledged,
        real: &mut VectorSet,
        older: usize,
    ) -> (Vector, Disposition) {
        let vector = taken.vector;
        // The one in service is not the local APIC's, and none must wait for its end there (bug 2).
        if !taken.in_service {
            self.counts.caught_external += 1;
            // Sixteen lines: more there cannot be, since each is in service in its 8259 until the
            // guest ends it.
            if self.externals_len < EXTERNALS {
                // Behind the older ones, but before those of this window, which are newer and have
                // been handled already.
                self.externals
                    .copy_within(older..self.externals_len, older + 1);
                self.externals[older] = if vector == SPURIOUS {
                    self.spurious
                } else {
                    vector
                };
                self.externals_len += 1;
            }
            return (vector, Disposition { eois: 0, to: None });
        }
        let to = Source::of(vector);
        // A level-triggered one of the guest's is ended when the guest does so; sooner, and its
        // source sends it again (bug 5).
        let waits = taken.level && to.is_none();
        let eois = if waits {
            self.owed.insert(vector);
            0
        } else if real.highest() == Some(vector) {
            self.end(real)
        } else {
            self.owed.insert(vector);
            self.over.insert(vector);
            0
        };
        let vector = match to {
            Some(_) => {
                self.counts.hosts += 1;
                vector
            }
            None => {
                let guests = self.guests(vector);
                self.counts.caught += 1;
                self.requested.insert(guests);
                guests
            }
        };
        (vector, Disposition { eois, to })
    }

    /// Ends the highest in service, and those below it that only waited for that.
    fn end(&mut self, real: &mut VectorSet) -> u8 {
        let mut eois = 0;
        loop {
            if let Some(highest) = real.highest() {
                real.remove(highest);
                self.owed.remove(highest);
                self.over.remove(highest);
            }
            eois += 1;
            match real.highest() {
                Some(next) if self.over.contains(next) => {}
                _ => return eois,
            }
        }
    }

    /// The guest ends an interrupt while the real in-service register has `real`.
    pub fn guest_eoi(&mut self, mut real: VectorSet) -> Completed {
        let virtually = self.in_service.highest();
        let really = real.without(self.owed).highest();
        match (virtually, really) {
            (Some(vector), _) if really.is_none_or(|other| other < vector) => {
                self.in_service.remove(vector);
                self.counts.completed_virtual += 1;
                let own = self.aliases.real(vector);
                let eois = match self.owed.contains(own) && !self.over.contains(own) {
                    true => self.end_of(own, &mut real),
                    false => 0,
                };
                Completed {
                    eois,
                    ended: EoiOutcome::Virtual(vector),
                }
            }
            (_, Some(vector)) => {
                self.counts.completed_real += 1;
                let eois = self.end_of(vector, &mut real);
                Completed {
                    eois,
                    ended: EoiOutcome::Real(vector),
                }
            }
            _ => Completed {
                eois: 0,
                ended: EoiOutcome::Nothing,
            },
        }
    }

    /// Ends `vector`, as it is at the real local APIC, now or after those above it.
    fn end_of(&mut self, vector: Vector, real: &mut VectorSet) -> u8 {
        if real.highest() == Some(vector) {
            return self.end(real);
        }
        self.owed.insert(vector);
        self.over.insert(vector);
        0
    }

    /// How the guest runs next, with `real` in service at the real local APIC.
    pub fn plan(&mut self, cpu: Cpu, real: VectorSet) -> EntryControls {
        let direct = self.may_be_direct() && !cpu.stepping && !self.opens_now(cpu);
        let mut plan = EntryControls {
            direct,
            eoi_exits: !(direct && self.direct_modes.completion),
            limit: self.guest_limit,
            inject: None,
            window: false,
            hide: VectorSet::EMPTY,
        };
        if direct {
            let critical = u32::from(CRITICAL) * u32::from(gate::GATE_LEN) - 1;
            plan.limit = self.guest_limit.min(critical);
            plan.hide = self.opened;
            self.opened = VectorSet::EMPTY;
        } else if !cpu.stepping {
            self.choose(cpu, real, &mut plan);
        }
        // An event without an injection of now is the last one again, or another while none is to
        // be delivered by the processor.
        self.injected = match plan.inject {
            Some(injection) => Some(injection.event.vector),
            None => self.injected.filter(|_| cpu.event && !direct),
        };
        self.counts.entries_direct += u64::from(direct);
        self.counts.returned += u64::from(direct && self.away);
        self.away &= !direct;
        self.last = plan;
        plan
    }

    /// Returns whether nothing is virtual.
    fn may_be_direct(&self) -> bool {
        let quiet = self.externals_len == 0
            && self.requested.is_empty()
            && self.in_service.is_empty()
            && self.owed.is_empty();
        self.direct_modes.delivery && self.engaged && !self.suspended && quiet
    }

    /// The entry begins with an INT instruction's event, whose gate must stay open for it.
    fn opens_now(&self, cpu: Cpu) -> bool {
        cpu.event && !self.opened.is_empty()
    }

    fn choose(&mut self, cpu: Cpu, real: VectorSet, plan: &mut EntryControls) {
        let can = cpu.interrupts && !cpu.shadow && !cpu.event;
        if let Some(last) = self.externals_len.checked_sub(1) {
            if can {
                self.externals_len = last;
                plan.inject = Some(self.inject(self.externals[last]));
            }
            // Its end goes to the 8259 without an exit: other waiting interrupts need an exit as
            // soon as they can be taken.
            plan.window = !can || self.externals_len > 0 || self.next(real).is_some();
            return;
        }
        let Some(vector) = self.next(real) else {
            return;
        };
        if can {
            self.requested.remove(vector);
            self.in_service.insert(vector);
            plan.inject = Some(self.inject(vector));
        }
        plan.window = !can;
    }

    /// Returns the highest vector that is requested virtually, if its priority is above those in
    /// service and the task's.
    fn next(&self, real: VectorSet) -> Option<Vector> {
        let vector = self.requested.highest()?;
        let in_service = self.in_service(real).highest().map_or(0, class);
        (class(vector) > in_service.max(class(self.task_priority))).then_some(vector)
    }

    fn inject(&mut self, vector: Vector) -> Injection {
        self.counts.injected += 1;
        let event = Event {
            vector,
            kind: Kind::External,
            code: None,
        };
        Injection {
            event,
            opens: self.open(vector),
        }
    }

    /// Whether the gate of `vector` has to be opened.
    fn open(&mut self, vector: Vector) -> bool {
        let is_hidden = self.engaged && !self.assigned.contains(vector);
        if is_hidden {
            self.opened.insert(vector);
        }
        is_hidden
    }

    /// Returns the event that an exit interrupted, if the next entry must inject it again.
    ///
    /// The guest runs an INT instruction again by itself, since the instruction pointer is still
    /// before it, unless the hypervisor injected it, with the pointer behind it.
    #[must_use]
    pub fn again(&self, cut_off: Option<Event>, was_injected: bool) -> Option<Event> {
        cut_off.filter(|event| event.kind != Kind::Software || was_injected)
    }

    /// Checks the vectors really in service at an exit. One that is neither the guest's nor owed
    /// was meant for the host, and the guest took it: it is returned.
    pub fn audit(&mut self, real: VectorSet) -> Option<Vector> {
        let stolen = real.without(self.owed).without(self.assigned);
        let vector = stolen.iter().find(|vector| Source::of(*vector).is_some())?;
        self.counts.stolen += 1;
        Some(vector)
    }
}
