//! Commands of the book, carried out as the kernel, the store and the owner would, and checked
//! against their contents.

use super::*;

fn wrong(what: &str, page: Page, frame: Frame) -> Checked {
    Err(format!("{what}: {page:?} {frame:?}"))
}

impl World {
    /// Carries out the book's commands; between any two of them the guest acts.
    pub(super) fn carry_out(&mut self, phase: Phase) -> Checked {
        let mut commands: VecDeque<Command> = self.residency.take_commands().into();
        while let Some(command) = commands.pop_front() {
            self.command(command)?;
            // Commands that result from an examination follow those already issued.
            commands.extend(self.residency.take_commands());
            // A store that clears an absent page is one step with the zeroes that come.
            if self.random.chance(0.3) {
                self.guest(phase)?;
            }
        }
        Ok(())
    }

    fn command(&mut self, command: Command) -> Checked {
        match command {
            Command::Ask(pages) => self.questions.push_back(pages),
            Command::Unmap(page) => {
                let is_naive = self.is_naive;
                self.frame(page).is_mapped &= is_naive;
                self.unmapped.push(page);
            }
            Command::Examine(page) => self.examine(page)?,
            Command::Punch(page) => self.punch(page)?,
            Command::Zero(page) => self.zero(page)?,
            Command::Fetch(page, backing) => {
                if let Backing::Slot(slot) = backing {
                    self.is_not_trimmed(slot)?;
                }
                self.reading.push((page, backing));
            }
            Command::Save(page, slot) => {
                self.is_not_trimmed(slot)?;
                self.writing.push((page, slot));
            }
            Command::Trim(first, count) => self.trim(first, count)?,
            Command::Map(page, protection) => self.map(page, protection)?,
            Command::Protect(page) => self.protect(page)?,
            Command::Wake(page) => {
                self.faults.remove(&page);
            }
            Command::Show(page) => self.show(page)?,
            Command::Done(ticket) => self.done(ticket)?,
            Command::Go(op) => self.go(op.0)?,
            // Only the guest's disks change the image.
            Command::Stop(reason @ PauseReason::Changed(_)) if !self.is_naive => {
                return Err(format!("what comes is not what left: {reason:?}"));
            }
            Command::Stop(_) => self.is_stopped = true,
        }
        Ok(())
    }

    /// Returns whether the guest or a device may access the page.
    fn is_in_use(&self, frame: &Frame) -> bool {
        frame.is_mapped && !self.is_naive || frame.is_shown || frame.leases > 0
    }

    fn examine(&mut self, page: Page) -> Checked {
        let frame = *self.frame(page);
        if self.is_in_use(&frame) {
            return wrong("examined while in use", page, frame);
        }
        let Some(content) = frame.content else {
            return wrong("examined without memory", page, frame);
        };
        let backing = self.residency.look(page).1;
        let before = self.residency.counts().silent_writes;
        self.residency.examined(
            page,
            PageExamination {
                is_clean: frame.is_clean,
                is_zero: content == 0,
                crc: content as u32,
            },
        );
        if let Backing::Block(block) = backing
            && self.residency.counts().silent_writes > before
            && self.image[block.number as usize] != content
        {
            return wrong("no block holds it", page, frame);
        }
        Ok(())
    }

    fn punch(&mut self, page: Page) -> Checked {
        let frame = *self.frame(page);
        if frame.content.is_none() {
            return wrong("punched twice", page, frame);
        }
        if self.is_in_use(&frame) {
            return wrong("punched while in use", page, frame);
        }
        let frame = self.frame(page);
        frame.content = None;
        frame.is_mapped = false;
        Ok(())
    }

    fn zero(&mut self, page: Page) -> Checked {
        let frame = self.frame(page);
        if frame.content.is_some() {
            return wrong("zeroed in memory", page, *frame);
        }
        frame.content = Some(0);
        Ok(())
    }

    fn trim(&mut self, first: Slot, count: u32) -> Checked {
        let slots = first.0..first.0 + count;
        let is_read = |(_, backing): &(Page, Backing)| match backing {
            Backing::Slot(slot) => slots.contains(&slot.0),
            _ => false,
        };
        let is_written = |(_, slot): &(Page, Slot)| slots.contains(&slot.0);
        if self.reading.iter().any(is_read) || self.writing.iter().any(is_written) {
            return Err(format!("trimmed while in use: {slots:?}"));
        }
        self.trimming.push((first, count));
        Ok(())
    }

    fn map(&mut self, page: Page, protection: Protection) -> Checked {
        let frame = self.frame(page);
        if frame.content.is_none() {
            return wrong("mapped without memory", page, *frame);
        }
        frame.is_mapped = true;
        frame.is_clean = match protection {
            Protection::Writable => false,
            Protection::Protected => true,
            Protection::AsMarked => frame.is_clean,
        };
        self.faults.remove(&page);
        Ok(())
    }

    fn protect(&mut self, page: Page) -> Checked {
        let frame = self.frame(page);
        if !frame.is_mapped {
            return wrong("protected without a mapping", page, *frame);
        }
        frame.is_clean = true;
        Ok(())
    }

    fn show(&mut self, page: Page) -> Checked {
        let frame = self.frame(page);
        if frame.content.is_none() {
            return wrong("shown without memory", page, *frame);
        }
        frame.is_shown = true;
        Ok(())
    }

    /// Answers a balloon, or retries the access that waited for pages.
    fn done(&mut self, ticket: Ticket) -> Checked {
        if let Some(pages) = self.offers.remove(&ticket.0) {
            for page in pages {
                self.frame(page).is_back(false);
            }
            return Ok(());
        }
        let pages = self.tickets.remove(&ticket.0);
        self.held.clear();
        for (page, overwrites) in pages.ok_or("a ticket done twice")? {
            if overwrites {
                self.frame(page).is_back(false);
            }
            if self.frame(page).is_shown {
                // It stays for the access that is retried.
                self.held.push(page);
                // An access that was announced as overwriting the page does overwrite it.
                self.access(page, overwrites)?;
            }
        }
        Ok(())
    }

    /// Checks that no slot is handed out while the blocks behind it are being freed.
    fn is_not_trimmed(&self, slot: Slot) -> Checked {
        let is_in = |(first, count): &(Slot, u32)| (first.0..first.0 + count).contains(&slot.0);
        match self.trimming.iter().any(is_in) {
            true => Err(format!("{slot:?} is used and trimmed")),
            false => Ok(()),
        }
    }
}
