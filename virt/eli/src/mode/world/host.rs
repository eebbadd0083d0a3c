//! The hypervisor of the simulated world: it carries out the machine's decisions, and checks them
//! against the ledger.

use super::*;

impl World {
    // The hypervisor.

    pub(super) fn sync(&mut self, vector: Vector) {
        self.table[usize::from(vector)] = self.core.shadow(vector, self.gates[usize::from(vector)]);
    }

    pub(super) fn sync_all(&mut self) {
        for vector in 0..=255 {
            self.sync(vector);
        }
    }

    pub(super) fn load_table(&mut self) {
        self.is_engaged =
            self.direct_modes.delivery && self.limit == 0xfff && self.random.chance(0.95);
        self.core.load_table(self.limit, self.is_engaged);
        self.sync_all();
    }

    pub(super) fn assign(&mut self) {
        let part = self.random.part();
        let vectors: Vec<_> = self.claimed.keys().copied().collect();
        let mut some = VectorSet::EMPTY;
        for vector in vectors {
            if self.random.chance(part) {
                some.insert(vector);
            }
        }
        self.core.assign(some);
        self.sync_all();
    }

    pub(super) fn claim(&mut self, vector: Vector) -> Checked {
        // A good guest has a gate for it.
        self.gates[usize::from(vector)] = Gate::interrupt(2, 8, 0);
        self.sync(vector);
        let is_taken = |real: Vector, claimed: &BTreeMap<Vector, Vector>| {
            claimed
                .iter()
                .any(|(own, its)| *its == real && *own != vector)
        };
        match self.core.claim(vector) {
            Err(Full) => {
                let free = (32..0xf0).find(|real| !is_taken(*real, &self.claimed));
                ensure(free.is_none(), || format!("{free:x?} was free"))
            }
            Ok(real) => {
                let had = self.claimed.insert(vector, real);
                self.seen.aliased += u64::from(real != vector);
                let may_be_same = vector < 0xf0 && !is_taken(vector, &self.claimed);
                let is_right = (32..0xf0).contains(&real)
                    && !is_taken(real, &self.claimed)
                    && had.is_none_or(|had| had == real)
                    && (had.is_some() || may_be_same == (real == vector));
                ensure(is_right, || format!("{vector:#x} is {real:#x} there"))
            }
        }
    }

    /// The guest stops.
    pub(super) fn exit(&mut self, why: &str) -> Checked {
        self.note(|| format!("exit: {why}"));
        self.running = None;
        self.stuck += 1;
        ensure(self.stuck < STUCK, || format!("exits for ever: {why}"))
    }

    /// Takes the pending interrupts of the host, at each exit.
    fn let_in(&mut self) -> Checked {
        while self.host_waits() {
            self.window(Phase::Drain)?;
        }
        Ok(())
    }

    fn host_waits(&self) -> bool {
        crate::hosts::is_requested(set(&self.apic.requested).word(7))
    }

    pub(super) fn enter(&mut self) -> Checked {
        self.let_in()?;
        // No state of the guest's keeps one out, for any kind of exit.
        ensure(self.hosts_raised.is_empty(), || {
            format!("{:x?} waits for the guest", self.hosts_raised)
        })?;
        let real = set(&self.apic.in_service);
        if let Some(vector) = self.core.audit(real) {
            return Err(format!("{vector:#x} was stolen"));
        }
        self.is_stepping = self.steps && self.going.is_none();
        let cpu = Cpu {
            interrupts: self.interrupts,
            shadow: self.shadow,
            event: self.going.is_some(),
            stepping: self.is_stepping,
        };
        let plan = self.core.plan(cpu, real);
        self.note(|| format!("{cpu:x?} {plan:x?}, in service {real:x?}"));
        self.running = Some(plan);
        for vector in plan.hide.iter() {
            self.sync(vector);
        }
        self.check_plan(&plan)?;
        let Some(injection) = plan.inject else {
            return match self.going.take() {
                Some(going) => {
                    // An event that is injected again was injected before, by the host or by the
                    // guest.
                    self.deliver(&plan, going, true)
                }
                None => Ok(()),
            };
        };
        let vector = injection.event.vector;
        ensure(
            self.interrupts && !self.shadow && self.going.is_none() && !self.is_stepping,
            || format!("{injection:x?} cannot be taken"),
        )?;
        let from = if self.taken_pic.contains(&vector) {
            let first = self.taken_pic.pop_first();
            ensure(first == Some(vector), || {
                format!("{vector:#x} before {first:x?}")
            })?;
            From::Pic
        } else {
            let last = self.taken.pop_last();
            ensure(last == Some(vector), || {
                format!("{vector:#x} injected where {last:x?} waits")
            })?;
            From::Apic
        };
        if injection.opens {
            self.sync(vector);
        }
        self.seen.injected += 1;
        let going = Going {
            event: injection.event,
            of: Of::Injected(from),
        };
        self.deliver(&plan, going, true)
    }

    pub(super) fn check_plan(&mut self, plan: &EntryControls) -> Checked {
        if !plan.direct {
            ensure(plan.eoi_exits && plan.limit == self.limit, || {
                format!("{plan:x?}")
            })?;
            return Ok(());
        }
        ensure(
            self.direct_modes.delivery && self.is_engaged && !self.is_suspended,
            || "direct without a table".into(),
        )?;
        let is_quiet =
            self.taken.is_empty() && self.taken_pic.is_empty() && !self.has_virtual_in_service();
        ensure(is_quiet, || {
            format!(
                "direct with {:x?}, {:x?}, {:x?}",
                self.taken, self.taken_pic, self.handlers
            )
        })?;
        let all_real = self.service.values().all(|it| *it != Service::Host);
        ensure(all_real, || format!("direct with {:x?}", self.service))?;
        for vector in 32..=255 {
            let is_open = look(&self.table, plan.limit, vector, None).is_none();
            ensure(!is_open || self.core.assigned().contains(vector), || {
                format!("direct with an open gate {vector:#x}")
            })?;
            ensure(!is_open || self.host_of(vector).is_none(), || {
                format!("the host's {vector:#x} is the guest's")
            })?;
        }
        Ok(())
    }

    /// An event goes through the table that the processor has.
    pub(super) fn deliver(
        &mut self,
        plan: &EntryControls,
        going: Going,
        was_injected: bool,
    ) -> Checked {
        let vector = going.event.vector;
        let field = going.event.field();
        let kind = field >> 8 & 7;
        let is_fault = kind == 3;
        if was_injected {
            ensure((vector < 32) == is_fault, || {
                format!("VMEXIT_INVALID: {field:#x}")
            })?;
        }
        // QEMU's way to say it, or the manual's.
        let is_external = matches!(going.of, Of::Hardware(_) | Of::Injected(_));
        let says = match is_external && self.random.chance(0.5) {
            true => field & !(7 << 8) | 3 << 8,
            false => field,
        };
        // A fault on the table's page, or the stack's, may cut the delivery off. The processor
        // accesses these pages only after its check of the limit.
        if u32::from(vector) * 16 + 15 <= plan.limit && self.random.chance(0.02) {
            return self.cut_off(going, says, was_injected);
        }
        let privilege = match going.of {
            Of::Software(privilege) => Some(privilege),
            _ => None,
        };
        let table = match self.is_engaged {
            true => &self.table,
            false => &self.gates,
        };
        let fault = look(table, plan.limit, vector, privilege);
        self.note(|| format!("{going:x?}: {fault:x?}"));
        let Some(fault) = fault else {
            return self.arrive(going);
        };
        // The host waits for #NP where it hid a gate that the limit leaves in sight.
        let is_hidden = plan.direct
            && matches!(going.of, Of::Hardware(_))
            && !self.core.assigned().contains(vector)
            && u32::from(vector) * 16 + 15 <= plan.limit;
        ensure(!is_hidden || fault == 11, || {
            format!("the hidden gate {vector:#x} raises {fault}")
        })?;
        let own = self.bare(vector, going.of);
        if !self.is_engaged && self.random.chance(0.5) {
            // Not intercepted, since nothing is hidden.
            let Some(own) = own else {
                return Err(format!("no fault of its own at {vector:#x}"));
            };
            return self.arrive_fault(own, going);
        }
        self.exit("fault")?;
        let code = u32::from(vector) << 3 | 2 | u32::from(is_external && self.random.chance(0.5));
        let reflection = self.core.reflect(Fault {
            fault: Event::exception(fault, Some(code)),
            during: Event::from_field(says),
            gate: self.gates[usize::from(vector)],
            privilege: privilege.unwrap_or(0),
        });
        self.note(|| format!("reflection {reflection:x?}"));
        match (reflection, going.of) {
            (Reflection::Interrupt(of), Of::Hardware(_)) if of == vector => {
                self.seen.reflected += 1;
                self.acknowledge_all(&[vector])
            }
            (Reflection::Guest(event), of) if Some(event) == own => {
                self.going = Some(Going {
                    event,
                    of: Self::reports(vector, of),
                });
                match of {
                    Of::Software(_) => self.seen.software_faults += 1,
                    _ => self.seen.own_gates += 1,
                }
                Ok(())
            }
            (Reflection::Software(injection), Of::Software(_))
                if own.is_none() && injection.event == going.event && !was_injected =>
            {
                if injection.opens {
                    self.sync(vector);
                }
                self.going = Some(Going {
                    event: injection.event,
                    of: going.of,
                });
                Ok(())
            }
            (wrong, _) => Err(format!("{wrong:x?} of {going:x?}, where {own:x?} is due")),
        }
    }

    /// The delivery itself meets another exit.
    pub(super) fn cut_off(&mut self, going: Going, says: u64, was_injected: bool) -> Checked {
        self.exit("delivery cut off")?;
        self.seen.cut_off += 1;
        let again = self.core.again(Event::from_field(says), was_injected);
        if matches!(going.of, Of::Software(_)) && !was_injected {
            return ensure(again.is_none(), || {
                "an INT instruction would be run twice".into()
            });
        }
        let Some(event) = again else {
            return Err(format!("{going:x?} is lost"));
        };
        self.going = Some(Going { event, ..going });
        // The assigned set may change before it is injected again.
        if self.random.chance(0.3) {
            self.assign();
        }
        Ok(())
    }

    pub(super) fn reports(vector: Vector, of: Of) -> Of {
        Of::Fault(match of {
            Of::Hardware(from) => Some((from, vector, false)),
            Of::Injected(from) => Some((from, vector, true)),
            Of::Software(_) | Of::Fault(_) => None,
        })
    }

    /// Returns the fault that a machine without a host raises.
    pub(super) fn bare(&self, vector: Vector, of: Of) -> Option<Event> {
        let (privilege, external) = match of {
            Of::Software(privilege) => (Some(privilege), 0),
            _ => (None, 1),
        };
        let fault = look(&self.gates, self.limit, vector, privilege)?;
        let code = u32::from(vector) * 8 + 2 + external;
        Some(Event::exception(fault, Some(code)))
    }

    pub(super) fn arrive_fault(&mut self, event: Event, going: Going) -> Checked {
        self.arrive(Going {
            event,
            of: Self::reports(going.event.vector, going.of),
        })
    }

    /// A handler of the guest's begins.
    pub(super) fn arrive(&mut self, going: Going) -> Checked {
        let vector = going.event.vector;
        self.stuck = 0;
        let (serves, is_virtual) = match going.of {
            Of::Hardware(from) => (Some((from, vector)), false),
            Of::Injected(from) => (Some((from, vector)), true),
            Of::Software(_) => {
                self.seen.software += 1;
                (None, false)
            }
            Of::Fault(Some((from, vector, is_virtual))) => (Some((from, vector)), is_virtual),
            Of::Fault(None) => (None, false),
        };
        if !matches!(going.of, Of::Fault(_)) {
            // A fault is the guest's own, or none is due at all.
            let own = self.bare(vector, going.of);
            ensure(own.is_none(), || format!("{going:x?} without {own:x?}"))?;
        }
        if let Some((_, vector)) = serves {
            ensure(self.interrupts && !self.shadow, || {
                format!("{vector:#x} while masked")
            })?;
        }
        if let Of::Hardware(From::Apic) = going.of {
            ensure(self.claimed.get(&vector) == Some(&vector), || {
                format!("{vector:#x} is not the guest's as it is")
            })?;
        }
        match serves {
            Some((From::Apic, vector)) => {
                let truth = self.truth();
                let above = truth.last().map_or(0, |vector| vector >> 4);
                ensure(vector >> 4 > above.max(self.task_priority >> 4), || {
                    let priority = self.task_priority;
                    format!("{vector:#x} in {truth:x?}, task priority {priority:#x}")
                })?;
                self.seen.nested += u64::from(!truth.is_empty());
                let real_below = self.handlers.iter().any(|it| {
                    !it.is_virtual && !it.is_over && matches!(it.serves, Some((From::Apic, _)))
                });
                self.seen.nested_virtual_on_real += u64::from(is_virtual && real_below);
                if !is_virtual {
                    self.seen.direct += 1;
                }
                self.seen.level += u64::from(LEVELS.contains(&vector));
            }
            Some((From::Pic, _)) => self.seen.external += 1,
            None => {}
        }
        self.handlers.push(Handler {
            serves,
            // No end of it is due at a local APIC.
            is_virtual: is_virtual && matches!(serves, Some((From::Apic, _))),
            is_over: serves.is_none(),
            interrupts: self.interrupts,
        });
        self.interrupts = false;
        self.shadow = false;
        Ok(())
    }

    /// The host has these, which were acknowledged in this order.
    pub(super) fn acknowledge_all(&mut self, vectors: &[Vector]) -> Checked {
        let mut taken = Vec::new();
        for vector in vectors.iter().copied() {
            let one = Acknowledged {
                vector,
                in_service: self.apic.in_service.contains(&vector),
                level: self.apic.level.contains(&vector),
            };
            taken.push(one);
            let service = match one.level && self.host_of(vector).is_none() {
                true => Service::Guest { is_over: false },
                false => Service::Host,
            };
            if one.in_service {
                self.service.insert(vector, service);
            }
        }
        self.seen.windows_of_several += u64::from(taken.len() > 1);
        self.seen.masked_catches += u64::from(!self.interrupts);
        let real = set(&self.apic.in_service);
        let mut heard = Vec::new();
        let mut retired = Vec::new();
        let (core, apic) = (&mut self.core, &mut self.apic);
        core.acknowledge(&taken, real, |vector, disposition| {
            retired.extend((0..disposition.eois).map(|_| apic.eoi()));
            heard.push((vector, disposition));
        });
        self.note(|| format!("took {taken:x?}: {heard:x?}, ended {retired:x?}"));
        for vector in retired {
            self.retired(vector)?;
        }
        ensure(heard.len() == taken.len(), || {
            format!("{taken:x?}: {heard:x?}")
        })?;
        // The newest come first.
        for (one, (told, disposition)) in taken.iter().zip(heard.iter().rev()) {
            let is_of = self.host_of(one.vector).filter(|_| one.in_service);
            let vector = match one.in_service {
                true if is_of.is_none() => self.guests(one.vector),
                _ => one.vector,
            };
            ensure(*told == vector, || format!("{one:x?} is {told:#x}"))?;
            ensure(disposition.to == is_of, || {
                format!("{vector:#x} goes to {:?}", disposition.to)
            })?;
            let raised = match one.in_service {
                true => self.hosts_taken.remove(&one.vector),
                false => None,
            };
            if is_of.is_some() {
                ensure(raised == is_of, || format!("nobody raised {vector:#x}"))?;
                self.seen.hosts += 1;
                continue;
            }
            ensure(raised.is_none(), || {
                format!("the guest gets the host's {vector:#x}")
            })?;
            self.seen.aliased_taken += u64::from(vector != one.vector);
            if one.in_service {
                self.taken.insert(vector);
            } else {
                let is_new = self.taken_pic.insert(vector);
                ensure(is_new, || format!("{vector:#x} taken twice"))?;
            }
        }
        Ok(())
    }

    /// The processor acknowledges the pending interrupt, if any.
    pub(super) fn acknowledge(&mut self) -> Option<(From, Vector)> {
        let prefers_pic = self.random.chance(0.5);
        let acknowledged = self.apic.acknowledge(prefers_pic);
        if let Some((From::Apic, vector)) = acknowledged
            && let Some(source) = self.hosts_raised.remove(&vector)
        {
            self.hosts_taken.insert(vector, source);
        }
        acknowledged
    }

    /// The host opens its window, in which several may come, each within the one before.
    pub(super) fn window(&mut self, phase: Phase) -> Checked {
        let mut vectors = Vec::new();
        while let Some((_, vector)) = self.acknowledge() {
            vectors.push(vector);
            if self.random.chance(0.2) {
                break;
            }
            if phase != Phase::Drain && self.random.chance(0.4) {
                self.raise();
            }
        }
        self.acknowledge_all(&vectors)
    }

    /// At an exit the host may have more to do.
    pub(super) fn host(&mut self, phase: Phase) -> Checked {
        self.steps = self.random.chance(0.2);
        match self.random.percent() {
            0..5 => {
                self.core.suspend();
                self.is_suspended = true;
            }
            5..30 => self.resume(),
            _ => {}
        }
        if phase == Phase::Reprogram && self.random.chance(0.4) {
            self.assign();
        }
        let holds = self
            .service
            .values()
            .any(|it| *it == Service::Guest { is_over: false });
        if phase == Phase::Nested && holds && self.random.chance(0.05) {
            return self.fall_back();
        }
        Ok(())
    }

    /// Suspension ends.
    pub(super) fn resume(&mut self) {
        self.core.resume();
        self.is_suspended = false;
    }

    pub(super) fn fall_back(&mut self) -> Checked {
        self.seen.fallen += 1;
        for handler in &mut self.handlers {
            let is_real = matches!(handler.serves, Some((From::Apic, _))) && !handler.is_over;
            if let Some((_, vector)) = handler.serves
                && is_real
                && !handler.is_virtual
            {
                handler.is_virtual = true;
                self.service.insert(vector, Service::Host);
            }
        }
        let eois = self.core.fall_back(set(&self.apic.in_service));
        for _ in 0..eois {
            let ended = self.apic.eoi();
            self.retired(ended)?;
        }
        Ok(())
    }
}
