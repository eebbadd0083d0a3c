//! The guest, its knowledge of its disks and buffers, and the schedule of everything that happens
//! to it.

mod requests;

use std::collections::VecDeque;

use fake_driver::{AnyDriver, Rings};
use guest_mem::{Gpa, PAGE_SIZE, Ticket};
use machine::Absent;
use seeded::Random;
use vio::QueueConfig;

use crate::memory::Cpu;
use crate::world::{
    DATA, DISKS, Machine, NET, PAGES, QUEUE_SIZE, REQUESTS, RING_PAGES, RINGS, SECTORS, UNMAPPED,
    ring_base,
};

const PAGE: u64 = PAGE_SIZE;
/// Requests of a function at a time; of the network card half of them receive.
const SLOTS: usize = 16;
/// A slot's buffer.
const BUFFER_PAGES: u64 = 6;
const BUFFER: u64 = BUFFER_PAGES * PAGE;
/// Addresses that a slot's buffer may be mapped at, in pages.
const WINDOW_PAGES: u64 = 64;
const IOVA: u64 = 0x40_0000_0000;
const SECTOR: u64 = 512;
/// Polls in which everything comes to rest that is not held up.
const PATIENCE: u32 = 20_000;
/// Receive and transmit.
const RX: u16 = 0;
const TX: u16 = 1;

/// Counts of events so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    pub requests: u64,
    pub frames: u64,
    pub errors: u64,
    pub tickets: u64,
    pub failed: u64,
    pub forgotten: u64,
    pub refused: u64,
    pub resets: u64,
    pub resets_waiting: u64,
    pub restarts: u64,
    pub restarts_waiting: u64,
    pub revoked: u64,
}

#[derive(Clone, Debug)]
enum What {
    Read { sector: u64 },
    Write { sector: u64, data: Vec<u8> },
    WriteZeroes { sector: u64, sectors: u64 },
    Flush,
    Id,
    Send { frame: Vec<u8> },
    Receive,
}

/// A request in flight.
#[derive(Clone, Debug)]
struct Flying {
    queue: u16,
    head: u16,
    what: What,
    /// Its data in the slot's buffer: offset and length.
    parts: Vec<(u64, u32)>,
    /// Failures of memory before it; `None` if something was lost when it began.
    epoch: Option<u64>,
    /// The buffer was unmapped under it.
    is_surprised: bool,
    /// Whether that unmap is complete: the device reaches the buffer no more.
    is_revoked: bool,
}

impl Flying {
    fn len(&self) -> u64 {
        self.parts.iter().map(|(_, len)| u64::from(*len)).sum()
    }

    fn sectors(&self) -> std::ops::Range<u64> {
        match &self.what {
            What::Read { sector } | What::Write { sector, .. } => {
                *sector..*sector + self.len() / SECTOR
            }
            What::WriteZeroes { sector, sectors } => *sector..*sector + *sectors,
            _ => 0..0,
        }
    }
}

#[derive(Default)]
struct Slot {
    flying: Option<Flying>,
    /// Address at which the buffer is mapped.
    iova: Option<u64>,
    /// The wait behind the unmap.
    wait: Option<u32>,
    /// Content of the buffer.
    bytes: Vec<u8>,
}

struct Function {
    drivers: Vec<AnyDriver<Cpu>>,
    slots: Vec<Slot>,
    contents: Vec<u8>,
    /// Sectors whose content is known.
    known: Vec<bool>,
}

pub struct Guest {
    pub machine: Machine,
    pub done: Done,
    random: Random,
    functions: Vec<Function>,
    epoch: u64,
    /// Steps until what was lost heals.
    heals_in: Option<u32>,
    /// Interrupts may have been blocked: look at every ring.
    looks: bool,
    /// Frames that were sent and have not been received.
    expected: VecDeque<Vec<u8>>,
}

impl Guest {
    pub fn new(seed: u64) -> Self {
        let mut guest = Self {
            machine: Machine::new(seed),
            done: Done::default(),
            random: Random::new(seed),
            functions: Vec::new(),
            epoch: 0,
            heals_in: None,
            looks: false,
            expected: VecDeque::new(),
        };
        for function in 0..=NET {
            let slot = || Slot {
                bytes: vec![0; BUFFER as usize],
                ..Slot::default()
            };
            guest.functions.push(Function {
                drivers: Vec::new(),
                slots: (0..SLOTS).map(|_| slot()).collect(),
                contents: vec![0; (SECTORS * SECTOR) as usize],
                known: vec![true; SECTORS as usize],
            });
            guest.start(function);
        }
        guest
    }

    /// Brings a function up that is reset.
    fn start(&mut self, function: usize) {
        let queues = if function == NET { 2 } else { 1 };
        let features = self.machine.features(function);
        let cpu = self.machine.cpu.clone();
        let driver = |queue| {
            let base = Gpa::new(ring_base(function, queue));
            AnyDriver::new(cpu.clone(), base, queue, QUEUE_SIZE, features)
        };
        let drivers: Vec<_> = (0..queues).map(driver).collect();
        let queue = |rings: Rings| QueueConfig {
            index: rings.index,
            size: rings.size,
            desc: rings.desc,
            avail: rings.avail,
            used: rings.used,
        };
        let configs: Vec<_> = drivers
            .iter()
            .map(|driver| queue(driver.config()))
            .collect();
        self.functions[function].drivers = drivers;
        self.machine.start(function, &configs);
    }

    /// One thing happens.
    pub fn step(&mut self) {
        match self.random.below(1000) {
            0..300 => self.machine.poll(),
            300..420 => self.submit(),
            420..720 => self.end_a_ticket(),
            720..800 => self.evict(),
            800..940 => {
                let function = self.random.below(NET as u64 + 1) as usize;
                self.reap(function);
                self.finish_unmaps();
            }
            940..975 => self.flush(),
            975..990 => self.machine.doze(),
            990..995 => self.revoke(),
            995 => self.reset_one(),
            996 => self.restart_queue(),
            _ => {}
        }
        self.heals_in = match self.heals_in {
            Some(0) => {
                self.heal();
                None
            }
            steps => steps.map(|steps| steps - 1),
        };
    }

    /// Brings in all absent pages, and waits for the end of everything under way.
    pub fn come_to_rest(&mut self) {
        if self.heals_in.take().is_some() {
            self.heal();
        }
        for _ in 0..PATIENCE {
            self.machine.poll();
            self.machine.serve();
            for function in 0..=NET {
                self.reap(function);
            }
            self.finish_unmaps();
            if self.is_at_rest() {
                return;
            }
            if !self.expected.is_empty() {
                // The frames that are still expected need receive buffers.
                let slot = self.random.below(SLOTS as u64 / 2) as usize;
                self.submit_to(NET, slot);
            }
        }
        for (number, function) in self.functions.iter().enumerate() {
            for (at, slot) in function.slots.iter().enumerate() {
                if slot.flying.is_some() || slot.wait.is_some() {
                    println!(
                        "function {number}, slot {at}: {:?}, wait {:?}",
                        slot.flying, slot.wait
                    );
                }
            }
        }
        let completed = self.machine.completed_wait();
        println!("{} frames are expected", self.expected.len());
        panic!(
            "it hangs: waits up to {completed} are complete; {:?}",
            self.done
        );
    }

    fn is_at_rest(&self) -> bool {
        let rests = |slot: &Slot| {
            let receives = |flying: &Flying| matches!(flying.what, What::Receive);
            slot.wait.is_none() && slot.flying.as_ref().is_none_or(receives)
        };
        self.functions.iter().all(|f| f.slots.iter().all(rests)) && self.expected.is_empty()
    }

    // Memory.

    fn evict(&mut self) {
        let mut pages = Vec::new();
        let most = match self.random.below(16) {
            0 => 32,
            _ => 4,
        };
        for _ in 0..1 + self.random.below(most) {
            let page = match self.random.percent() {
                0..60 => {
                    let nth = self.random.below(48);
                    self.machine.pager.recent(nth)
                }
                _ => Some(1 + self.random.below(PAGES - 1)),
            };
            pages.extend(page.filter(|page| self.machine.pager.is_candidate(*page)));
        }
        pages.sort_unstable();
        pages.dedup();
        let gone = self.machine.evict(&pages);
        self.done.refused += pages.len() as u64 - u64::from(gone.count_ones());
    }

    /// One of the tickets ends, whichever it is.
    fn end_a_ticket(&mut self) {
        let tickets = self.machine.pager.tickets();
        // A parked queue or unit asks for nothing: no more than one for each, and the interrupts
        // that wait.
        assert!(tickets.len() < 64, "{} tickets at once", tickets.len());
        if tickets.is_empty() {
            return self.machine.poll();
        }
        let ticket = tickets[self.random.below(tickets.len() as u64) as usize];
        self.done.tickets += 1;
        if self.random.below(400) == 0 {
            self.machine.pager.fail(ticket);
            self.epoch += 1;
            self.done.failed += 1;
            self.heals_in = Some(self.random.below(60) as u32);
            self.machine.ticket_done(ticket, Err(Absent));
        } else {
            self.machine.pager.deliver(ticket);
            self.machine.ticket_done(ticket, Ok(()));
        }
    }

    /// Makes lost pages available again, and has the guest try again whatever has failed.
    fn heal(&mut self) {
        self.machine.pager.heal();
        self.machine.clear_queue_error();
        for function in 0..=NET {
            if self.machine.status(function) & 64 != 0 {
                self.reset(function);
            }
            for queue in 0..self.functions[function].drivers.len() {
                self.machine.ring(function, queue as u16);
            }
        }
        self.looks = true;
    }

    // Mappings.

    fn unmap(&mut self, function: usize, at: usize) {
        let Some(iova) = self.functions[function].slots[at].iova.take() else {
            return;
        };
        for nth in 0..BUFFER_PAGES {
            self.machine.unmap(iova + nth * PAGE);
        }
        let pages = Machine::flush_pages(iova);
        let wait = self.machine.submit(&pages[..BUFFER_PAGES as usize]);
        self.functions[function].slots[at].wait = Some(wait);
    }

    /// Unmaps a request's buffer while it is in flight.
    fn revoke(&mut self) {
        let function = self.random.below(DISKS as u64) as usize;
        let at = self.random.below(SLOTS as u64) as usize;
        let slot = &mut self.functions[function].slots[at];
        if let Some(flying) = &mut slot.flying
            && slot.wait.is_none()
            && function != UNMAPPED
        {
            flying.is_surprised = true;
            self.done.revoked += 1;
            self.unmap(function, at);
        }
    }

    fn finish_unmaps(&mut self) {
        let completed = self.machine.completed_wait();
        for function in 0..=NET {
            for at in 0..SLOTS {
                let slot = &mut self.functions[function].slots[at];
                if slot.wait.is_none_or(|wait| wait > completed) {
                    continue;
                }
                slot.wait = None;
                if let Some(flying) = &mut slot.flying {
                    // From here on the device cannot change the buffer any more.
                    flying.is_revoked = true;
                    let gpa = Self::slot_page(function, at) * PAGE;
                    self.machine.pager.peek(gpa, &mut slot.bytes);
                } else {
                    self.check(function, at, &What::Flush);
                }
            }
        }
    }

    fn flush(&mut self) {
        match self.random.below(3) {
            0 => self.machine.submit(&Machine::flush_everything()),
            1 => self.machine.submit(&[Machine::flush_domain()]),
            _ => self.machine.submit(&[]),
        };
    }

    /// Switches the queue off in the middle of what it does.
    fn restart_queue(&mut self) {
        let waits = |slot: &Slot| slot.wait.is_some();
        let is_waiting = self.functions.iter().any(|f| f.slots.iter().any(waits));
        self.done.restarts += 1;
        self.done.restarts_waiting += u64::from(is_waiting);
        self.machine.restart_queue();
        // What was in it has to be asked for once more.
        let wait = self.machine.submit(&Machine::flush_everything());
        let slots = self.functions.iter_mut().flat_map(|f| &mut f.slots);
        for slot in slots.filter(|slot| slot.wait.is_some()) {
            slot.wait = Some(wait);
        }
    }

    // Resets.

    fn reset_one(&mut self) {
        let function = self.random.below(NET as u64 + 1) as usize;
        self.reset(function);
    }

    fn reset(&mut self, function: usize) {
        let before = self.machine.pager.tickets();
        let its_own = |ticket: &Ticket| {
            let pages = self.machine.pager.asked(*ticket);
            pages.iter().all(|page| owner_of(*page) == Some(function))
        };
        let its_own: Vec<Ticket> = before.into_iter().filter(its_own).collect();
        self.done.resets += 1;
        self.done.resets_waiting += u64::from(!its_own.is_empty());
        self.machine.reset(function);
        for ticket in its_own {
            // Either the ticket never ends; or it ends later, and a function that waits for another
            // one must not take it for its own.
            if self.random.below(2) == 0 {
                self.machine.pager.forget(ticket);
                self.done.forgotten += 1;
            }
        }
        for at in 0..SLOTS {
            let own = &mut self.functions[function];
            let Some(flying) = own.slots[at].flying.take() else {
                continue;
            };
            if !matches!(flying.what, What::Read { .. }) {
                let range = flying.sectors();
                own.known[range.start as usize..range.end as usize].fill(false);
            }
            // From here on the device leaves it alone.
            let gpa = Self::slot_page(function, at) * PAGE;
            let slot = &mut own.slots[at];
            self.machine.pager.peek(gpa, &mut slot.bytes);
            if slot.wait.is_none() {
                self.unmap(function, at);
            }
        }
        if function == NET {
            self.machine.cable.take_sent();
            self.expected.clear();
        }
        let queues = self.functions[function].drivers.len() as u16;
        for vector in 1..=queues {
            self.machine.take_interrupts(function, vector);
        }
        self.start(function);
    }
}

/// Whose a page of rings, headers or data is.
fn owner_of(page: u64) -> Option<usize> {
    let (rings, requests, data) = (RINGS / PAGE, REQUESTS / PAGE, DATA / PAGE);
    let function = match page {
        page if page >= data => (page - data) / (BUFFER_PAGES * SLOTS as u64),
        page if page >= requests => (page - requests) / 6,
        page if page >= rings => (page - rings) / (2 * RING_PAGES),
        _ => return None,
    };
    (function <= DISKS as u64).then_some(function as usize)
}
