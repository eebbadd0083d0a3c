//! The guest, its devices other than disks, and the machine's owner.

use super::*;

impl World {
    pub(super) fn load(&mut self, page: Page) -> Checked {
        if !self.frame(page).is_mapped {
            self.faults.entry(page).or_insert(false);
            return Ok(());
        }
        self.find(page, "a processor")
    }

    /// Reads a page, as a processor or a device.
    pub(super) fn find(&mut self, page: Page, who: &str) -> Checked {
        let look = self.residency.look(page);
        let frame = self.frame(page);
        let Some(found) = frame.content else {
            return Err(format!("{who} finds no memory at {page:?}: {look:?}"));
        };
        match frame.truth {
            Truth::Known(wanted) if wanted != found => Err(format!(
                "{who} finds {found} for {wanted} at {page:?}: {look:?}"
            )),
            _ => {
                frame.now_holds(found);
                Ok(())
            }
        }
    }

    pub(super) fn store(&mut self, page: Page) -> Checked {
        let content = self.fresh();
        let frame = self.frame(page);
        if !frame.is_mapped {
            self.faults.insert(page, true);
            return Ok(());
        }
        if frame.content.is_none() {
            return Err(format!(
                "a processor stores where there is no memory: {page:?}"
            ));
        }
        frame.is_clean = false;
        frame.content = Some(content);
        frame.now_holds(content);
        Ok(())
    }

    pub(super) fn clear(&mut self, page: Page) {
        let frame = self.frame(page);
        if frame.is_mapped {
            frame.is_clean = false;
            frame.content = Some(0);
            frame.now_holds(0);
        } else if !self.clearing.contains(&page) {
            self.clearing.push(page);
        }
    }

    /// Accesses a page, as a device other than a disk, or for a part of a block.
    pub(super) fn access(&mut self, page: Page, is_store: bool) -> Checked {
        if !self.frame(page).is_shown {
            let overwrites = is_store && self.random.chance(0.3);
            self.ask_for(vec![(page, overwrites)]);
            return Ok(());
        }
        if !is_store {
            return self.find(page, "a device");
        }
        let content = self.fresh();
        let frame = self.frame(page);
        if frame.content.is_none() {
            return Err(format!(
                "a device stores where there is no memory: {page:?}"
            ));
        }
        frame.content = Some(content);
        frame.is_written = true;
        frame.now_holds(content);
        Ok(())
    }

    pub(super) fn lend(&mut self, page: Page) {
        let frame = self.frame(page);
        frame.lent += 1;
        frame.truth = Truth::Undefined;
    }

    pub(super) fn ask_for(&mut self, pages: Vec<(Page, bool)>) {
        if self.tickets.len() < 4 {
            self.next_ticket += 1;
            for (page, _) in pages.iter().filter(|(_, overwrites)| *overwrites) {
                self.lend(*page);
            }
            self.tickets.insert(self.next_ticket, pages.clone());
            self.owner_events
                .push_back(OwnerEvent::Wants(Ticket(self.next_ticket), pages));
        }
    }

    /// Makes the guest discard some pages, of which it may name one twice.
    pub(super) fn offer(&mut self) {
        if self.offers.len() >= 2 {
            return;
        }
        let count = 1 + self.random.below(48) as u32;
        let first = self.page().0.min(PAGES - count);
        let mut pages: Vec<Page> = (first..first + count).map(Page).collect();
        pages.push(self.page());
        for page in &pages {
            self.lend(*page);
        }
        self.next_ticket += 1;
        self.offers.insert(self.next_ticket, pages.clone());
        self.owner_events
            .push_back(OwnerEvent::Offers(Ticket(self.next_ticket), pages));
    }

    /// Makes the guest, its devices or the owner do one thing.
    pub(super) fn guest(&mut self, phase: Phase) -> Checked {
        if self.is_stopped || self.is_resting {
            return Ok(());
        }
        self.events += 1;
        let page = self.page();
        let (loads, stores, clears, reads, writes) = match phase {
            Phase::Fill => (10, 30, 33, 65, 75),
            Phase::Fragment => (30, 40, 42, 60, 70),
            Phase::Clear => (5, 10, 25, 45, 60),
        };
        match self.random.below(100) {
            n if n < loads => self.load(page),
            n if n < stores => self.store(page),
            n if n < clears => {
                self.clear(page);
                Ok(())
            }
            n if n < reads => {
                self.begin_read();
                Ok(())
            }
            n if n < writes => {
                self.begin_write();
                Ok(())
            }
            n if n < writes + 2 => {
                self.begin(Kind::Discard);
                Ok(())
            }
            n if n < writes + 4 => {
                if self.frame(page).is_shown && self.leases.len() < 4 {
                    self.frame(page).leases += 1;
                    self.frame(page).is_lent_out = true;
                    self.leases.push(page);
                }
                Ok(())
            }
            n if n < writes + 8 => {
                let at = self.random.below(1 + self.leases.len() as u64) as usize;
                let Some(&page) = self.leases.get(at) else {
                    return Ok(());
                };
                // A store through an address is not reported.
                let noted = self.frame(page).is_written;
                let stored = self.access(page, true);
                self.frame(page).is_written = noted;
                if self.random.chance(0.5) {
                    self.leases.swap_remove(at);
                    self.frame(page).leases -= 1;
                }
                stored
            }
            n if n < writes + 12 => {
                let is_store = self.random.chance(0.5);
                self.access(page, is_store)
            }
            n if n < writes + 15 => {
                self.answer();
                Ok(())
            }
            n if n == writes + 15 => {
                self.offer();
                Ok(())
            }
            n if n == writes + 16 => {
                self.cancel();
                Ok(())
            }
            _ => self.go_on(),
        }
    }

    /// Makes the owner release the pages that no device uses.
    pub(super) fn answer(&mut self) {
        let Some(pages) = self.questions.pop_front() else {
            return;
        };
        let (mut gone, mut written) = (0, 0);
        for (nth, page) in pages.into_iter().enumerate() {
            if self.frame(page).leases > 0 || self.held.contains(&page) {
                continue;
            }
            let forgets_lent = self.forgets_lent;
            let frame = self.frame(page);
            frame.is_shown = false;
            gone |= 1 << nth;
            let is_lent_out = frame.is_lent_out && !forgets_lent;
            written |= u32::from(frame.is_written || is_lent_out) << nth;
            frame.is_written = false;
            frame.is_lent_out = false;
        }
        self.owner_events
            .push_back(OwnerEvent::Answer { gone, written });
    }
}
