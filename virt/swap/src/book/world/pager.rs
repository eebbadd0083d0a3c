//! The pager: what it hears of, and the commands of the book that it carries out.

use super::*;

impl World {
    /// The pager hears of one thing, if there is any, and does what comes of it; true if it did.
    pub(super) fn pager(&mut self, phase: Phase) -> Result<bool, String> {
        self.events += 1;
        let mut choices = Vec::new();
        if !self.faults.is_empty() || !self.clearing.is_empty() {
            choices.push(0);
        }
        if !self.says.is_empty() {
            choices.push(1);
        }
        if !self.reading.is_empty() {
            choices.push(2);
        }
        if !self.writing.is_empty() {
            choices.push(3);
        }
        if self.is_stopped {
            choices.push(4);
        }
        if !self.trimming.is_empty() {
            choices.push(5);
        }
        if choices.is_empty() {
            return Ok(false);
        }
        match choices[self.random.below(choices.len() as u64) as usize] {
            0 => match self.clearing.pop() {
                // Only where nothing is there is a store made by the pager; elsewhere the processor makes it.
                Some(page)
                    if self.book.look(page).0 == State::Absent && !self.frame(page).is_mapped =>
                {
                    self.book.fault_overwriting(page);
                    if self.book.look(page).0 == State::Resident {
                        // Together with the zeroes that the page comes with.
                        self.frame(page).now_holds(0);
                    }
                }
                Some(_) => {}
                None => {
                    if let Some((page, is_store)) = self.faults.pop_first() {
                        let ahead = match is_store {
                            true if self.random.chance(0.5) => Ahead::Never,
                            true => Ahead::InOrder,
                            false => Ahead::Always,
                        };
                        self.book.fault(page, ahead);
                    }
                }
            },
            1 => match self.says.pop_front() {
                Some(Says::Answer { gone, written }) => self.book.answered(gone, written),
                Some(Says::Wants(ticket, pages)) => self.book.wanted(ticket, &pages),
                Some(Says::Offers(ticket, pages)) => self.book.discard(ticket, &pages),
                Some(Says::Begin(Op(number))) => {
                    let ops = self.ops.get(&number);
                    let op = ops.or(self.cancelled.get(&number)).expect("reported");
                    match op.is_read() {
                        true => self.book.begin_read(Op(number), &op.span),
                        false => self.book.begin_write(Op(number), &op.span),
                    }
                }
                Some(Says::End(op, is_good)) => {
                    self.heard_of_end(op);
                    // Of an operation that the book still knows.
                    match self.book.is_read(op) {
                        Some(true) => self.book.end_read(op, is_good),
                        Some(false) => self.book.end_write(op, is_good),
                        None => return Err(format!("{op:?} is not known")),
                    }
                }
                None => {}
            },
            2 => {
                let at = self.random.below(self.reading.len() as u64) as usize;
                let (page, place) = self.reading.swap_remove(at);
                let content = match place {
                    Place::Slot(slot) => self.store[slot.0 as usize],
                    Place::Block(block) => self.image[block.number as usize],
                    Place::Nowhere => return Err(format!("{page:?} is read from nowhere")),
                };
                self.frame(page).content = Some(content);
                let fails = self.random.below(1000) < self.failing;
                let outcome = match fails {
                    true => Err(Errno(5)),
                    false => Ok(content as u32),
                };
                self.book.ended(Ended::Fetched(page, outcome));
                self.book.balance();
            }
            3 => {
                let at = self.random.below(self.writing.len() as u64) as usize;
                let (page, slot) = self.writing.swap_remove(at);
                // Of a page that came back meanwhile, anything.
                self.store[slot.0 as usize] = self.frame(page).content.unwrap_or(7);
                let fails = self.random.below(1000) < self.failing;
                if fails {
                    self.store[slot.0 as usize] = 9;
                }
                let outcome = if fails { Err(Errno(5)) } else { Ok(()) };
                self.book.ended(Ended::Saved(page, slot, outcome));
                self.book.balance();
            }
            5 => {
                // Some time, what is behind them goes.
                let (first, count) = self.trimming.remove(0);
                let slots = first.0 as usize..(first.0 + count) as usize;
                self.store[slots].fill(Content::MAX);
                // One that was refused would be the last.
                self.book.ended(Ended::Trimmed(first, count, Ok(())));
                self.book.balance();
                self.trims += 1;
            }
            _ => {
                self.is_stopped = false;
                if self.book.free_slots() == 0 {
                    self.book.add_slots(1);
                    self.store.push(0);
                }
                self.book.retry();
            }
        }
        self.carry_out(phase)?;
        Ok(true)
    }

    /// Carries out what the book wants; between any two commands the guest goes on.
    pub(super) fn carry_out(&mut self, phase: Phase) -> Checked {
        let mut commands: VecDeque<Command> = self.book.take_commands().into();
        while let Some(command) = commands.pop_front() {
            self.command(command)?;
            // What an examination leads to comes behind what is already to be done.
            commands.extend(self.book.take_commands());
            // A store that clears an absent page is one step with the zeroes that come.
            if self.random.chance(0.3) {
                self.guest(phase)?;
            }
        }
        Ok(())
    }

    pub(super) fn command(&mut self, command: Command) -> Checked {
        let wrong =
            |what: &str, page: Page, frame: Frame| Err(format!("{what}: {page:?} {frame:?}"));
        match command {
            Command::Ask(pages) => self.questions.push_back(pages),
            Command::Unmap(page) => {
                let is_naive = self.is_naive;
                self.frame(page).is_mapped &= is_naive;
                self.unmapped.push(page);
            }
            Command::Examine(page) => {
                let frame = *self.frame(page);
                if frame.is_mapped && !self.is_naive || frame.is_shown || frame.leases > 0 {
                    return wrong("examined while in use", page, frame);
                }
                let Some(content) = frame.content else {
                    return wrong("examined without memory", page, frame);
                };
                let place = self.book.look(page).1;
                let before = self.book.counts().silent_writes;
                self.book.examined(
                    page,
                    Seen {
                        is_clean: frame.is_clean,
                        is_zero: content == 0,
                        crc: content as u32,
                    },
                );
                if let Place::Block(block) = place
                    && self.book.counts().silent_writes > before
                    && self.image[block.number as usize] != content
                {
                    return wrong("no block holds it", page, frame);
                }
            }
            Command::Punch(page) => {
                let frame = *self.frame(page);
                if frame.content.is_none() {
                    return wrong("punched twice", page, frame);
                }
                if frame.is_mapped && !self.is_naive || frame.is_shown || frame.leases > 0 {
                    return wrong("punched while in use", page, frame);
                }
                let frame = self.frame(page);
                frame.content = None;
                frame.is_mapped = false;
            }
            Command::Zero(page) => {
                let frame = *self.frame(page);
                if frame.content.is_some() {
                    return wrong("zeroed in memory", page, frame);
                }
                self.frame(page).content = Some(0);
            }
            Command::Fetch(page, place) => {
                if let Place::Slot(slot) = place {
                    self.is_not_trimmed(slot)?;
                }
                self.reading.push((page, place));
            }
            Command::Save(page, slot) => {
                self.is_not_trimmed(slot)?;
                self.writing.push((page, slot));
            }
            Command::Trim(first, count) => {
                let slots = first.0..first.0 + count;
                let is_read = |(_, place): &(Page, Place)| match place {
                    Place::Slot(slot) => slots.contains(&slot.0),
                    _ => false,
                };
                let is_written = |(_, slot): &(Page, Slot)| slots.contains(&slot.0);
                if self.reading.iter().any(is_read) || self.writing.iter().any(is_written) {
                    return Err(format!("trimmed while in use: {slots:?}"));
                }
                self.trimming.push((first, count));
            }
            Command::Map(page, protection) => {
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
            }
            Command::Protect(page) => {
                let frame = self.frame(page);
                if !frame.is_mapped {
                    return wrong("protected without a mapping", page, *frame);
                }
                frame.is_clean = true;
            }
            Command::Wake(page) => {
                self.faults.remove(&page);
            }
            Command::Show(page) => {
                let frame = self.frame(page);
                if frame.content.is_none() {
                    return wrong("shown without memory", page, *frame);
                }
                frame.is_shown = true;
            }
            Command::Done(ticket) if self.offers.contains_key(&ticket.0) => {
                for page in self.offers.remove(&ticket.0).into_iter().flatten() {
                    self.frame(page).is_back(false);
                }
            }
            Command::Done(ticket) => {
                let pages = self
                    .tickets
                    .remove(&ticket.0)
                    .ok_or("a ticket done twice")?;
                self.held.clear();
                for (page, overwrites) in pages {
                    if overwrites {
                        self.frame(page).is_back(false);
                    }
                    if self.frame(page).is_shown {
                        // It stays for the access that is made again.
                        self.held.push(page);
                        // Who said that it would overwrite the page does.
                        self.access(page, overwrites)?;
                    }
                }
            }
            Command::Go(op) => self.go(op.0)?,
            // Nobody but the guest's disks changes the image.
            Command::Stop(trouble @ Trouble::Changed(_)) if !self.is_naive => {
                return Err(format!("what comes is not what left: {trouble:?}"));
            }
            Command::Stop(_) => self.is_stopped = true,
        }
        Ok(())
    }

    /// A slot is handed out while what is behind it goes.
    fn is_not_trimmed(&self, slot: Slot) -> Checked {
        let is_in = |(first, count): &(Slot, u32)| (first.0..first.0 + count).contains(&slot.0);
        match self.trimming.iter().any(is_in) {
            true => Err(format!("{slot:?} is used and trimmed")),
            false => Ok(()),
        }
    }
}
