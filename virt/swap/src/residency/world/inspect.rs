//! Access to the book's private state, for checks.

use super::*;

impl Residency {
    pub(super) fn is_read(&self, op: Op) -> Option<bool> {
        Some(self.requests.direction(op)? == Direction::Read)
    }

    pub(in crate::residency) fn summary(&self) -> String {
        format!(
            "{} present, {} soft, {} being examined, {} being saved, {} wait for room, {:?}, {} \
             slots free, {:?}",
            self.present(),
            self.pages.count(State::Unmapped),
            self.pages.examining(),
            self.pages.count(State::Saving),
            self.room_queue.len(),
            self.question,
            self.free_slots(),
            self.failures,
        )
    }

    /// Checks that as many pages are in each state as are counted.
    pub(super) fn check_states(&self) -> Checked {
        for state in [
            State::Absent,
            State::Fetching,
            State::Filling,
            State::Resident,
            State::Unmapped,
            State::Saving,
        ] {
            let all = (0..self.pages.len()).map(Page);
            let found = all.filter(|page| self.pages.state(*page) == state).count();
            let counted = self.pages.count(state);
            if found != counted {
                return Err(format!("{found} pages are {state:?}, {counted} counted"));
            }
        }
        Ok(())
    }

    /// Checks that each slot that is taken has one owner, whose place it is, or is still being
    /// written for a page that came back.
    pub(super) fn check_slots(&self, in_flight: impl Iterator<Item = Slot>) -> Checked {
        let in_flight: Vec<Slot> = in_flight.collect();
        let slots = self.pages.slots();
        let mut taken = 0;
        for page in (0..self.pages.len()).map(Page) {
            if let Backing::Slot(slot) = self.pages.backing(page) {
                taken += 1;
                if slots.owner(slot) != Some(page) {
                    return Err(format!("{slot:?} is not of {page:?}"));
                }
            }
        }
        let is_forgotten = |slot: &&Slot| {
            let owner = slots.owner(**slot).map(|page| self.pages.backing(page));
            owner != Some(Backing::Slot(**slot))
        };
        taken += in_flight.iter().filter(is_forgotten).count();
        match taken == slots.taken() {
            true => Ok(()),
            false => Err(format!("{} slots are taken, {taken} known", slots.taken())),
        }
    }
}
