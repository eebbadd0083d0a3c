//! The guest of the small world.

use super::*;

impl World {
    pub(super) fn instruction(&mut self, phase: Phase, plan: &EntryControls) -> Checked {
        let sets = match phase {
            Phase::Masked => 4,
            Phase::Nested | Phase::Storm => 25,
            _ => 15,
        };
        match self.random.percent() {
            choice if choice < sets => {
                self.shadow = !self.interrupts;
                self.interrupts = true;
                Ok(())
            }
            25..30 => {
                self.interrupts = false;
                Ok(())
            }
            30..32 => {
                self.shadow = true;
                Ok(())
            }
            32..50 => self.end(plan),
            50..65 => {
                self.leave();
                Ok(())
            }
            65..70 if self.handlers.len() < DEPTH => self.software(plan),
            70..74 => {
                let priority = match self.random.chance(0.7) {
                    true => 0,
                    false => self.random.bits() as u8,
                };
                self.set_task_priority(priority)
            }
            74..77 => {
                self.exit("command")?;
                let vector = self.edge();
                if self.core.send(vector) {
                    self.apic.edge(vector);
                } else {
                    self.seen.sent_virtually += 1;
                    self.taken.insert(vector);
                    // Within the host's reach alone.
                    return ensure(self.real(vector) != vector, || format!("{vector:#x}"));
                }
                ensure(self.real(vector) == vector, || format!("{vector:#x}"))
            }
            77..80 => self.read(),
            80..83 if phase == Phase::Reprogram => self.change_gate(),
            80 => self.change_gate(),
            83..86 if phase == Phase::Reprogram => {
                self.exit("table")?;
                self.limit = match self.random.percent() {
                    0..10 => 0x5ff,
                    10..20 => 0xeff,
                    _ => 0xfff,
                };
                self.load_table();
                Ok(())
            }
            86..88 if phase == Phase::Reprogram => {
                self.exit("claim")?;
                // Of the host's class, or one that may be another's alias.
                let vector = match self.random.chance(0.8) {
                    true => 0xf0 + self.random.below(15) as u8,
                    false => 0xe0 + self.random.below(16) as u8,
                };
                self.claim(vector)
            }
            88..92 => {
                let vector = self.level();
                self.apic.line(self.real(vector), false);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Makes the next step of a guest that only finishes its work.
    pub(super) fn finish(&mut self, plan: &EntryControls) -> Checked {
        let Some(handler) = self.handlers.last().copied() else {
            if self.task_priority != 0 {
                return self.set_task_priority(0);
            }
            self.shadow = !self.interrupts;
            self.interrupts = true;
            return Ok(());
        };
        if handler.is_over {
            self.leave();
            return Ok(());
        }
        self.end(plan)
    }

    /// The handler that runs ends its interrupt.
    pub(super) fn end(&mut self, plan: &EntryControls) -> Checked {
        let Some(handler) = self.handlers.last_mut().filter(|handler| !handler.is_over) else {
            return Ok(());
        };
        handler.is_over = true;
        let handler = *handler;
        let vector = match handler.serves {
            Some((From::Apic, vector)) => vector,
            Some((From::Pic, vector)) => {
                self.apic.pic_in_service.remove(&(vector - PIC));
                return Ok(());
            }
            None => return Ok(()),
        };
        let real = self.real(vector);
        if let Some(Service::Guest { is_over }) = self.service.get_mut(&real) {
            *is_over = true;
        }
        // In most cases the device's request is done by then.
        if LEVELS.contains(&vector) && self.random.chance(0.7) {
            self.apic.line(real, false);
        }
        let was_up = self.apic.lines.get(&real).is_some_and(|line| line.is_up);
        if !plan.eoi_exits {
            self.seen.direct_completions += 1;
            let ended = self.apic.eoi();
            ensure(ended == Some(vector), || {
                format!("the guest ended {ended:x?}, not {vector:#x}")
            })?;
            self.seen.sent_again += u64::from(was_up);
            return self.retired(ended);
        }
        self.exit("EOI")?;
        let completed = self.core.guest_eoi(set(&self.apic.in_service));
        self.note(|| format!("{completed:x?} of {handler:x?}"));
        let expected = match handler.is_virtual {
            true => EoiOutcome::Virtual(vector),
            false => EoiOutcome::Real(vector),
        };
        ensure(completed.ended == expected, || {
            format!("{completed:x?}, where {expected:x?} is over")
        })?;
        for _ in 0..completed.eois {
            let ended = self.apic.eoi();
            self.retired(ended)?;
        }
        self.seen.late_eois += u64::from(completed.eois > 1);
        self.seen.sent_again += u64::from(was_up && self.apic.requested.contains(&real));
        Ok(())
    }

    /// IRET, of a handler that has nothing left to end.
    pub(super) fn leave(&mut self) {
        if let Some(handler) = self.handlers.pop_if(|handler| handler.is_over) {
            self.interrupts = handler.interrupts;
        }
    }

    pub(super) fn software(&mut self, plan: &EntryControls) -> Checked {
        let vector = match self.random.percent() {
            0..40 => 32 + self.random.below(224) as u8,
            40..60 => HOSTS[self.random.below(2) as usize].0,
            _ => self.edge(),
        };
        let privilege = 3 * self.random.below(2) as u8;
        let going = Going {
            event: Event {
                vector,
                kind: Kind::Software,
                code: None,
            },
            of: Of::Software(privilege),
        };
        self.deliver(plan, going, false)
    }

    pub(super) fn set_task_priority(&mut self, priority: u8) -> Checked {
        self.exit("task priority")?;
        self.task_priority = priority;
        let real = self.core.set_task_priority(priority);
        self.apic.task_priority = real;
        ensure(real < 0xf0, || "the host's class is blocked".into())
    }

    /// The guest reads its in-service and request registers.
    pub(super) fn read(&mut self) -> Checked {
        self.exit("read")?;
        self.seen.reads += 1;
        let (shown, truth) = (
            self.core.in_service(set(&self.apic.in_service)),
            set(&self.truth()),
        );
        ensure(shown == truth, || {
            format!("{shown:x?} for in service {truth:x?}")
        })?;
        let real = &self.apic.requested;
        let waiting = real.iter().filter(|real| self.host_of(**real).is_none());
        let waiting = waiting.map(|real| self.guests(*real));
        let truth: VectorSet = self.taken.iter().copied().chain(waiting).collect();
        let shown = self.core.shown_requested(set(real));
        ensure(shown == truth, || {
            format!("{shown:x?} for requested {truth:x?}")
        })
    }

    pub(super) fn change_gate(&mut self) -> Checked {
        if self.is_engaged {
            self.exit("gate")?;
        }
        let vector = match self.random.chance(0.2) {
            true => PIC + self.random.below(LINES.into()) as u8,
            false => {
                let levels = self.level();
                let edge = self.edge();
                if self.random.chance(0.2) {
                    levels
                } else {
                    edge
                }
            }
        };
        let gate = Gate::interrupt(3, 8, 3 * self.random.below(2) as u8);
        let gate = match self.random.percent() {
            0..15 => gate.hidden(),
            15..20 => Gate::default(),
            // A call gate.
            20..23 => Gate([gate.0[0] & !(0xf << 40) | 0xc << 40, 0]),
            _ => gate,
        };
        self.gates[usize::from(vector)] = gate;
        self.sync(vector);
        Ok(())
    }
}
