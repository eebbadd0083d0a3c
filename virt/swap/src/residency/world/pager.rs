//! Events of the pager, and its reports to the book.

use super::*;

/// Event that the pager may find when it is woken.
#[derive(Clone, Copy)]
enum Event {
    /// A processor waits for a page, or is about to clear one.
    Fault,
    /// The owner has sent an event.
    Owner,
    Read,
    Written,
    /// The guest is paused; the cause may have been removed.
    Paused,
    Trimmed,
}

impl World {
    /// Handles one event at random, if there is any, and carries out the resulting commands;
    /// returns whether there was one.
    pub(super) fn pager(&mut self, phase: Phase) -> Result<bool, String> {
        self.events += 1;
        let events = [
            (
                !self.faults.is_empty() || !self.clearing.is_empty(),
                Event::Fault,
            ),
            (!self.owner_events.is_empty(), Event::Owner),
            (!self.reading.is_empty(), Event::Read),
            (!self.writing.is_empty(), Event::Written),
            (self.is_stopped, Event::Paused),
            (!self.trimming.is_empty(), Event::Trimmed),
        ];
        let found = |(is_there, event): (bool, Event)| is_there.then_some(event);
        let choices: Vec<Event> = events.into_iter().filter_map(found).collect();
        if choices.is_empty() {
            return Ok(false);
        }
        match choices[self.random.below(choices.len() as u64) as usize] {
            Event::Fault => self.fault(),
            Event::Owner => self.owner_reports()?,
            Event::Read => self.read_ends()?,
            Event::Written => self.write_ends(),
            Event::Paused => self.retry(),
            Event::Trimmed => self.trim_ends(),
        }
        self.carry_out(phase)?;
        Ok(true)
    }

    fn fault(&mut self) {
        if let Some(page) = self.clearing.pop() {
            // Only a store to an absent page is made by the pager; otherwise the processor makes
            // it.
            if self.residency.look(page).0 == State::Absent && !self.frame(page).is_mapped {
                self.residency.fault_overwriting(page);
                if self.residency.look(page).0 == State::Resident {
                    // In one step with the zeroes of the page.
                    self.frame(page).now_holds(0);
                }
            }
        } else if let Some((page, is_store)) = self.faults.pop_first() {
            let ahead = match is_store {
                true if self.random.chance(0.5) => ReadAhead::Never,
                true => ReadAhead::InOrder,
                false => ReadAhead::Always,
            };
            self.residency.fault(page, ahead);
        }
    }

    fn owner_reports(&mut self) -> Checked {
        match self.owner_events.pop_front() {
            Some(OwnerEvent::Answer { gone, written }) => self.residency.answered(gone, written),
            Some(OwnerEvent::Wants(ticket, pages)) => self.residency.wanted(ticket, &pages),
            Some(OwnerEvent::Offers(ticket, pages)) => self.residency.discard(ticket, &pages),
            Some(OwnerEvent::Begin(Op(number))) => {
                let ops = self.ops.get(&number);
                let op = ops.or(self.cancelled.get(&number)).expect("reported");
                match op.is_read() {
                    true => self.residency.begin_read(Op(number), &op.span),
                    false => self.residency.begin_write(Op(number), &op.span),
                }
            }
            Some(OwnerEvent::End(op, is_good)) => {
                self.forget_cancelled(op);
                // The book must still know the operation.
                match self.residency.is_read(op) {
                    Some(true) => self.residency.end_read(op, is_good),
                    Some(false) => self.residency.end_write(op, is_good),
                    None => return Err(format!("{op:?} is not known")),
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Returns whether a request of the pager that ends now fails.
    fn request_fails(&mut self) -> bool {
        self.random.below(1000) < self.failing
    }

    fn read_ends(&mut self) -> Checked {
        let at = self.random.below(self.reading.len() as u64) as usize;
        let (page, backing) = self.reading.swap_remove(at);
        let content = match backing {
            Backing::Slot(slot) => self.store[slot.0 as usize],
            Backing::Block(block) => self.image[block.number as usize],
            Backing::Nowhere => return Err(format!("{page:?} is read from nowhere")),
        };
        self.frame(page).content = Some(content);
        let outcome = match self.request_fails() {
            true => Err(Errno(5)),
            false => Ok(content as u32),
        };
        self.residency.ended(CommandOutcome::Fetched(page, outcome));
        self.residency.balance();
        Ok(())
    }

    fn write_ends(&mut self) {
        let at = self.random.below(self.writing.len() as u64) as usize;
        let (page, slot) = self.writing.swap_remove(at);
        // For a page that came back meanwhile, any content.
        self.store[slot.0 as usize] = self.frame(page).content.unwrap_or(7);
        let fails = self.request_fails();
        if fails {
            self.store[slot.0 as usize] = 9;
        }
        let outcome = if fails { Err(Errno(5)) } else { Ok(()) };
        self.residency
            .ended(CommandOutcome::Saved(page, slot, outcome));
        self.residency.balance();
    }

    fn trim_ends(&mut self) {
        // By now the blocks behind the slots have been freed.
        let (first, count) = self.trimming.remove(0);
        let slots = first.0 as usize..(first.0 + count) as usize;
        self.store[slots].fill(Content::MAX);
        // A refused trim would be the last one.
        self.residency
            .ended(CommandOutcome::Trimmed(first, count, Ok(())));
        self.residency.balance();
        self.trims += 1;
    }

    fn retry(&mut self) {
        self.is_stopped = false;
        if self.residency.free_slots() == 0 {
            self.residency.add_slots(1);
            self.store.push(0);
        }
        self.residency.retry();
    }
}
