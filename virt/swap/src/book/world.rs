//! The book against a small world that knows what every page and block holds: memory with mappings and markers, an owner with
//! devices, disks whose requests take their time, a store. Between any two commands the guest does something.

use std::collections::BTreeMap;

use seeded::Random;

use super::*;

pub(super) const PAGES: u32 = 160;
const BLOCKS: u32 = 192;
pub(super) const LIMIT: usize = 48;
pub(super) const SLOTS: usize = 128;

/// What a page or block holds. 0 is zeroes; each store stores a number of its own.
type Content = u64;

/// What a guest has to find in a page.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Truth {
    Known(Content),
    /// A read failed into it: whatever it holds, it keeps.
    Undefined,
}

/// A page as the kernel and the owner have it.
#[derive(Clone, Copy, Debug)]
struct Frame {
    content: Option<Content>,
    is_mapped: bool,
    /// Nobody stored through the guest's mapping since it was write-protected. Outlives the mapping and the memory.
    is_clean: bool,
    is_shown: bool,
    /// A device stored since it was shown, or since a request of a disk began.
    is_written: bool,
    /// A device has had an address to store to since it was shown.
    is_lent_out: bool,
    leases: u32,
    /// Accesses under way that are to overwrite all of it. Until they end, what it holds is nobody's to say.
    lent: u32,
    truth: Truth,
}

impl Frame {
    /// The guest stored this.
    fn now_holds(&mut self, content: Content) {
        self.truth = match self.lent {
            0 => Truth::Known(content),
            _ => Truth::Undefined,
        };
    }

    /// One access that was to overwrite it is over.
    fn is_back(&mut self, is_good: bool) {
        self.lent -= 1;
        self.truth = match (self.lent, is_good, self.content) {
            (0, true, Some(content)) => Truth::Known(content),
            _ => Truth::Undefined,
        };
    }
}

/// A request of a disk as the owner has it.
#[derive(Clone, Debug)]
struct DiskOp {
    kind: Kind,
    first: u32,
    pages: Vec<Page>,
    has_gone: bool,
    /// Blocks that are not through yet.
    left: Vec<usize>,
    fails: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Read,
    Write,
    Discard,
}

/// What the owner tells the pager, in its order.
enum Says {
    Answer { gone: u32, written: u32 },
    Wants(Ticket, Vec<(Page, bool)>),
    Begin(Op),
    End(Op, bool),
    Offers(Ticket, Vec<Page>),
}

/// What the guest does most at the time.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Fill,
    Fragment,
    Clear,
}

pub(super) struct World {
    random: Random,
    pub(super) book: Book,
    frames: Vec<Frame>,
    image: Vec<Content>,
    store: Vec<Content>,
    next_content: Content,
    /// Processors that wait, and whether for a store.
    faults: BTreeMap<Page, bool>,
    reading: Vec<(Page, Place)>,
    writing: Vec<(Page, Slot)>,
    trimming: Vec<(Slot, u32)>,
    pub(super) trims: u64,
    questions: VecDeque<Vec<Page>>,
    says: VecDeque<Says>,
    tickets: BTreeMap<u64, Vec<(Page, bool)>>,
    /// Pages that a balloon has named. Until it is answered, what they hold is nobody's to say.
    offers: BTreeMap<u64, Vec<Page>>,
    /// Pages that stay until a ticket's access is made again.
    held: Vec<Page>,
    ops: BTreeMap<u64, DiskOp>,
    next_op: u64,
    next_ticket: u64,
    leases: Vec<Page>,
    /// Pages that a processor is about to clear, all of each.
    clearing: Vec<Page>,
    /// Pages that were taken from the guest lately: what a second chance is for.
    unmapped: Vec<Page>,
    is_stopped: bool,
    /// Of each thousand reads and writes of the store and the image by the pager, how many fail.
    pub(super) failing: u64,
    pub(super) events: u64,
    limit: usize,
    /// The highest since it last came to rest.
    highest: usize,
    is_resting: bool,
    /// As who scans and punches, without unmapping first.
    pub(super) is_naive: bool,
    /// As an owner who takes an address for a store that is over.
    pub(super) forgets_lent: bool,
}

/// What is wrong, and where.
type Checked = Result<(), String>;

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let frame = Frame {
            content: None,
            is_mapped: false,
            is_clean: false,
            is_shown: false,
            is_written: false,
            is_lent_out: false,
            leases: 0,
            lent: 0,
            truth: Truth::Known(0),
        };
        let mut book = Book::new(PAGES, LIMIT, SLOTS);
        book.slots.set_chunk(4);
        book.trims_slots();
        Self {
            random: Random::new(seed),
            book,
            frames: vec![frame; PAGES as usize],
            image: (1..=Content::from(BLOCKS)).collect(),
            store: vec![0; 2 * SLOTS],
            next_content: 1_000,
            faults: BTreeMap::new(),
            reading: Vec::new(),
            writing: Vec::new(),
            trimming: Vec::new(),
            trims: 0,
            questions: VecDeque::new(),
            says: VecDeque::new(),
            tickets: BTreeMap::new(),
            offers: BTreeMap::new(),
            held: Vec::new(),
            ops: BTreeMap::new(),
            next_op: 0,
            next_ticket: 0,
            leases: Vec::new(),
            clearing: Vec::new(),
            unmapped: Vec::new(),
            is_stopped: false,
            failing: 0,
            events: 0,
            limit: LIMIT,
            highest: LIMIT,
            is_resting: false,
            is_naive: false,
            forgets_lent: false,
        }
    }

    fn frame(&mut self, page: Page) -> &mut Frame {
        &mut self.frames[page.0 as usize]
    }

    fn page(&mut self) -> Page {
        if self.random.chance(0.1)
            && let Some(page) = self.unmapped.pop()
        {
            return page;
        }
        // Some are hot.
        let end = if self.random.chance(0.5) {
            PAGES / 4
        } else {
            PAGES
        };
        Page(self.random.below(u64::from(end)) as u32)
    }

    fn fresh(&mut self) -> Content {
        if self.random.chance(0.03) {
            return 0;
        }
        self.next_content += 1;
        self.next_content
    }

    // The guest.

    fn load(&mut self, page: Page) -> Checked {
        if !self.frame(page).is_mapped {
            self.faults.entry(page).or_insert(false);
            return Ok(());
        }
        self.find(page, "a processor")
    }

    /// Somebody looks at a page.
    fn find(&mut self, page: Page, who: &str) -> Checked {
        let look = self.book.look(page);
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

    fn store(&mut self, page: Page) -> Checked {
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

    fn clear(&mut self, page: Page) {
        let frame = self.frame(page);
        if frame.is_mapped {
            frame.is_clean = false;
            frame.content = Some(0);
            frame.now_holds(0);
        } else if !self.clearing.contains(&page) {
            self.clearing.push(page);
        }
    }

    /// A device that is no disk, or a part of a block.
    fn access(&mut self, page: Page, is_store: bool) -> Checked {
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

    fn lend(&mut self, page: Page) {
        let frame = self.frame(page);
        frame.lent += 1;
        frame.truth = Truth::Undefined;
    }

    fn ask_for(&mut self, pages: Vec<(Page, bool)>) {
        if self.tickets.len() < 4 {
            self.next_ticket += 1;
            for (page, _) in pages.iter().filter(|(_, overwrites)| *overwrites) {
                self.lend(*page);
            }
            self.tickets.insert(self.next_ticket, pages.clone());
            self.says
                .push_back(Says::Wants(Ticket(self.next_ticket), pages));
        }
    }

    /// The guest does without some pages, of which it may name one twice.
    fn offer(&mut self) {
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
        self.says
            .push_back(Says::Offers(Ticket(self.next_ticket), pages));
    }

    fn begin(&mut self, kind: Kind) {
        if self.ops.len() >= 4 {
            return;
        }
        let count = 1 + self.random.below(4) as u32;
        let first = self.random.below(u64::from(BLOCKS - count)) as u32;
        let start = self.page().0.min(PAGES - count);
        let scattered = self.random.chance(0.3);
        let mut pages: Vec<Page> = (start..start + count).map(Page).collect();
        if scattered {
            for page in &mut pages {
                *page = self.page();
            }
        }
        match kind {
            Kind::Discard => pages.clear(),
            Kind::Write | Kind::Read => {}
        }
        for page in &pages {
            self.frame(*page).is_written = false;
            if kind == Kind::Read {
                self.lend(*page);
            }
        }
        self.next_op += 1;
        let op = DiskOp {
            kind,
            first,
            has_gone: false,
            left: (0..count as usize).collect(),
            pages,
            fails: self.random.chance(0.05),
        };
        self.ops.insert(self.next_op, op);
        self.says.push_back(Says::Begin(Op(self.next_op)));
    }

    /// One block of a request that has gone down is read or written, or the request ends.
    fn go_on(&mut self) -> Checked {
        let gone: Vec<u64> = self
            .ops
            .iter()
            .filter(|(_, op)| op.has_gone)
            .map(|(n, _)| *n)
            .collect();
        if gone.is_empty() {
            return Ok(());
        }
        let number = gone[self.random.below(gone.len() as u64) as usize];
        let mut op = self.ops.remove(&number).expect("listed");
        let failed_now = op.fails && self.random.chance(0.3);
        if op.left.is_empty() || failed_now {
            for &page in &op.pages {
                let frame = self.frame(page);
                frame.leases -= 1;
                if op.kind == Kind::Read {
                    frame.is_back(!op.fails);
                }
            }
            if op.fails && op.kind != Kind::Read {
                // Who knows what was written.
                for nth in &op.left {
                    if self.random.chance(0.5) {
                        self.image[op.first as usize + nth] = self.next_content + 1;
                        self.next_content += 1;
                    }
                }
            }
            self.says.push_back(Says::End(Op(number), !op.fails));
            return Ok(());
        }
        let nth = op
            .left
            .swap_remove(self.random.below(op.left.len() as u64) as usize);
        let block = op.first as usize + nth;
        match op.kind {
            Kind::Read => {
                let content = self.image[block];
                let frame = self.frame(op.pages[nth]);
                if frame.content.is_none() || !frame.is_shown {
                    return Err(format!(
                        "a disk reads where there is no memory: {:?}",
                        op.pages[nth]
                    ));
                }
                frame.content = Some(content);
            }
            Kind::Write => {
                self.find(op.pages[nth], "a disk")?;
                self.image[block] = self.frame(op.pages[nth]).content.unwrap_or_default();
            }
            Kind::Discard => self.image[block] = 0,
        }
        self.ops.insert(number, op);
        Ok(())
    }

    /// The guest, its devices or the owner do one thing.
    fn guest(&mut self, phase: Phase) -> Checked {
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
                self.begin(Kind::Read);
                Ok(())
            }
            n if n < writes => {
                self.begin(Kind::Write);
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
                // Nobody hears of what is stored through an address.
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
            _ => self.go_on(),
        }
    }

    /// The owner lets go of what nobody uses.
    fn answer(&mut self) {
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
        self.says.push_back(Says::Answer { gone, written });
    }

    // The pager.

    /// The pager hears of one thing, if there is any, and does what comes of it; true if it did.
    fn pager(&mut self, phase: Phase) -> Result<bool, String> {
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
                    let op = self.ops[&number].clone();
                    let first = Block {
                        disk: 0,
                        number: op.first,
                    };
                    let span = Span {
                        first,
                        count: op.left.len() as u32,
                        pages: op.pages,
                        is_whole: true,
                    };
                    match op.kind {
                        Kind::Read => self.book.begin_read(Op(number), &span),
                        _ => self.book.begin_write(Op(number), &span),
                    }
                }
                Some(Says::End(op, is_good)) => {
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
    fn carry_out(&mut self, phase: Phase) -> Checked {
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

    fn command(&mut self, command: Command) -> Checked {
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
            Command::Go(op) => {
                let Some(op) = self.ops.get_mut(&op.0) else {
                    return Err("a request goes that is over".into());
                };
                if op.has_gone {
                    return Err("a request goes twice".into());
                }
                op.has_gone = true;
                for page in op.pages.clone() {
                    let frame = self.frame(page);
                    if !frame.is_shown {
                        return wrong("goes without memory", page, *frame);
                    }
                    frame.leases += 1;
                }
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

    /// What has to hold between any two events.
    fn check(&mut self) -> Checked {
        if self.is_naive {
            return Ok(());
        }
        let mut in_memory = 0;
        for number in 0..PAGES {
            let page = Page(number);
            let (state, place) = self.book.look(page);
            let frame = self.frames[number as usize];
            in_memory += usize::from(state != State::Absent);
            if state != State::Absent {
                continue;
            }
            let holds = match place {
                Place::Nowhere => 0,
                Place::Slot(slot) => self.store[slot.0 as usize],
                Place::Block(block) => self.image[block.number as usize],
            };
            if frame.content.is_some() || frame.is_shown || frame.is_mapped {
                return Err(format!("{page:?} is away and there: {frame:?}"));
            }
            if frame.truth != Truth::Undefined && frame.truth != Truth::Known(holds) {
                return Err(format!(
                    "{page:?} is at {place:?}, which holds {holds}: {frame:?}"
                ));
            }
        }
        if in_memory != self.book.present() || in_memory > self.highest + BATCH {
            return Err(format!(
                "{in_memory} pages in memory, {} counted",
                self.book.present()
            ));
        }
        self.book
            .check_slots(self.writing.iter().map(|(_, slot)| *slot))
    }

    pub(super) fn run(&mut self, events: u64) -> Checked {
        // A kernel has been loaded.
        for number in 0..LIMIT as u32 {
            let content = self.fresh();
            let frame = self.frame(Page(number));
            frame.content = Some(content);
            frame.now_holds(content);
            self.book.adopt(Page(number));
        }
        self.carry_out(Phase::Fill)?;
        let phases = [Phase::Fill, Phase::Fragment, Phase::Clear];
        while self.events < events {
            let phase = phases[(self.events / 5_000 % 3) as usize];
            self.guest(phase)?;
            if self.random.chance(0.6) {
                self.pager(phase)?;
            }
            if self.random.chance(0.1) {
                self.book.ask();
                self.carry_out(phase)?;
            }
            if self.random.chance(0.1) {
                self.book.trim();
                self.carry_out(phase)?;
            }
            if self.random.chance(0.02) {
                self.check()?;
            }
            if self.random.below(5_000) == 0 {
                self.limit = 24 + self.random.below(96) as usize;
                self.highest = self.highest.max(self.limit);
                self.book.set_limit(self.limit);
                self.carry_out(phase)?;
            }
            if self.random.below(20_000) == 0 {
                self.rest()?;
            }
        }
        self.rest()
    }

    /// The guest does nothing new: everything that was begun ends.
    fn rest(&mut self) -> Checked {
        self.is_resting = true;
        let rested = self.come_to_rest();
        self.is_resting = false;
        self.highest = self.limit;
        rested
    }

    fn come_to_rest(&mut self) -> Checked {
        for _ in 0..20_000 {
            let waits = !self.faults.is_empty()
                || !self.clearing.is_empty()
                || !self.tickets.is_empty()
                || !self.offers.is_empty()
                || !self.ops.is_empty()
                || !self.says.is_empty()
                || !self.reading.is_empty()
                || !self.writing.is_empty()
                || !self.trimming.is_empty()
                || self.is_stopped
                || self.book.present() > self.limit;
            if !waits {
                return self.check();
            }
            if let Some(page) = self.leases.pop() {
                self.frame(page).leases -= 1;
            }
            if !self.is_stopped {
                self.answer();
                self.go_on()?;
            }
            self.pager(Phase::Fill)?;
            self.book.ask();
            self.carry_out(Phase::Fill)?;
            self.held.clear();
        }
        Err(format!(
            "it does not come to rest: faults {:?}, tickets {:?}, ops {:?}, {}",
            self.faults,
            self.tickets,
            self.ops,
            self.book.summary()
        ))
    }
}
