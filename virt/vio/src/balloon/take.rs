//! Visits: chains are worked off step by step, shown when they are over.

use guest_mem::{Dma, Intent, PAGE_SIZE, Perm, Stop};

use super::pages::{Batch, MAX_PAGES, MAX_RANGES, Numbers, Ram};
use super::statistics::{ENTRY, MAX_ENTRIES, Statistics};
use super::{Balloon, Progress, Queue, Role};
use crate::device::Interrupt;
use crate::ring::following::wait_for_all;
use crate::ring::{Buffers, Chain, RingStop};
use crate::visit::{Visit, cost};

/// Bytes of a page number.
const PFN: u32 = 4;
/// Bytes of page numbers that one step reads: as many as Linux sends at a time.
const PFN_BYTES: usize = 1024;

/// What one step made of a chain; the pages are in the batch.
struct Looked {
    progress: Progress,
    is_over: bool,
    /// Pages that are not RAM.
    outside: u64,
    /// Page numbers or pieces that were looked at.
    items: u64,
}

impl Balloon {
    /// Serves one queue; whether anything was done, or is left.
    pub(super) fn serve<D: Dma>(
        &mut self,
        at: usize,
        dma: &mut D,
        irq: &mut impl Interrupt,
        visit: &mut Visit,
    ) -> bool {
        if !self.may_run() {
            return false;
        }
        let Some(mut queue) = self.queues[at].take() else {
            return false;
        };
        let served = self.work_off(dma, irq, &mut queue, visit);
        self.queues[at] = Some(queue);
        served.unwrap_or_else(|stop| {
            self.note(stop);
            false
        })
    }

    /// Publishes what was left, takes steps while the visit lasts, publishes.
    fn work_off<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        queue: &mut Queue,
        visit: &mut Visit,
    ) -> Result<bool, RingStop> {
        if queue.ring.parked().is_some() {
            return Ok(false);
        }
        let mut busy = self.publish(dma, irq, queue)?;
        if queue.rests(self.wants_statistics) || !self.may_take() {
            return Ok(busy);
        }
        queue.ring.disarm(dma)?;
        let mut stopped = Ok(());
        loop {
            if visit.is_over() {
                // There may be more.
                busy = true;
                break;
            }
            let step = match queue.role {
                Role::Statistics => self.take_statistics(dma, queue, visit),
                Role::Inflate | Role::Deflate | Role::Report => self.take_pages(dma, queue, visit),
            };
            match step {
                Ok(true) => busy = true,
                Ok(false) => break,
                Err(stop) => {
                    stopped = Err(stop);
                    break;
                }
            }
        }
        // Not while parked by a fault of the ring itself, which would only be recorded again.
        if !queue.ring.is_faulted() {
            busy |= self.publish(dma, irq, queue)?;
        }
        stopped.map(|()| busy)
    }

    /// Shows the driver what has ended.
    pub(super) fn publish<D: Dma>(
        &mut self,
        dma: &mut D,
        irq: &mut impl Interrupt,
        queue: &mut Queue,
    ) -> Result<bool, RingStop> {
        queue.stage(dma)?;
        let any = queue.ring.staged() != 0;
        if queue.ring.publish(dma)? {
            self.stats.interrupts += 1;
            irq.queue(queue.ring.index());
        }
        Ok(any)
    }

    /// One step of a chain that names pages; whether there was one.
    fn take_pages<D: Dma>(
        &mut self,
        dma: &mut D,
        queue: &mut Queue,
        visit: &mut Visit,
    ) -> Result<bool, RingStop> {
        let Self {
            chain, batch, ram, ..
        } = self;
        if !queue.ring.peek(dma, chain)? {
            queue.progress = Progress::default();
            return Ok(false);
        }
        visit.take_request(cost::REQUEST + chain.descriptors() as u64 * cost::DESCRIPTOR);
        let looked = match queue.role {
            Role::Report => locate_buffers(dma, chain, queue.progress, ram, batch),
            _ => read_numbers(dma, chain, queue.progress, ram, batch),
        };
        let looked = looked.map_err(|pending| queue.ring.park(pending.into()))?;
        visit.charge(looked.items * cost::DESCRIPTOR);
        if batch.pages() != 0 {
            let pages = batch.ranges();
            let taken = match queue.role {
                Role::Inflate => self.io.inflated(pages),
                Role::Report => self.io.reported(pages),
                _ => {
                    self.io.deflated(pages);
                    Ok(())
                }
            };
            if queue.role != Role::Deflate {
                // Also where it waits: asking was work.
                visit.charge(pages.len() as u64 * cost::REQUEST + batch.pages() * cost::PAGE);
            }
            if let Err(ticket) = taken {
                queue.dropping = Some(ticket);
                return Err(queue.ring.park(Stop::Pending(ticket).into()));
            }
        }
        let count = match queue.role {
            Role::Inflate => &mut self.counts.inflated,
            Role::Report => &mut self.counts.reported,
            _ => &mut self.counts.deflated,
        };
        *count += batch.pages();
        self.counts.outside += looked.outside;
        queue.progress = looked.progress;
        if looked.is_over {
            self.stats.requests += 1;
            self.stats.errors += u64::from(queue.progress.is_odd);
            queue.consume(chain);
            queue.stage(dma)?;
        }
        Ok(true)
    }

    /// Reads the statistics that the driver has left, and gives it its buffer back if new ones are wanted; whether there was
    /// anything to do.
    fn take_statistics<D: Dma>(
        &mut self,
        dma: &mut D,
        queue: &mut Queue,
        visit: &mut Visit,
    ) -> Result<bool, RingStop> {
        if queue.rests(self.wants_statistics) {
            return Ok(false);
        }
        let chain = &mut self.chain;
        if !queue.ring.peek(dma, chain)? {
            queue.is_read = false;
            return Ok(false);
        }
        visit.take_request(cost::REQUEST + chain.descriptors() as u64 * cost::DESCRIPTOR);
        if !queue.is_read {
            let mut bytes = [0; ENTRY * MAX_ENTRIES];
            let readable = chain.readable();
            let len = bytes.len().min(readable.len() as usize);
            match readable.read(dma, 0, &mut bytes[..len]) {
                Ok(()) if len >= ENTRY => {
                    let all = Statistics::parse(&bytes[..len], visit.now_ns());
                    self.statistics = Some(all);
                    self.counts.statistics += 1;
                }
                // It can be used to ask for others all the same.
                Ok(()) | Err(Stop::Fault(_)) => self.stats.errors += 1,
                Err(pending) => {
                    let pending = wait_for(dma, pending, readable, 0, len);
                    return Err(queue.ring.park(pending.into()));
                }
            }
            queue.is_read = true;
        }
        if self.wants_statistics {
            self.wants_statistics = false;
            self.stats.requests += 1;
            queue.consume(chain);
            queue.stage(dma)?;
        }
        Ok(true)
    }
}

/// Asks for `len` bytes of `buffers`, an access to which has answered `stop`; what to wait for.
#[cold]
fn wait_for<D: Dma>(
    dma: &mut D,
    stop: Stop,
    buffers: Buffers<'_>,
    offset: u32,
    len: usize,
) -> Stop {
    let wanted = buffers.wanted(offset, len as u32, Intent::Read);
    wait_for_all(dma, stop, wanted)
}

/// Reads page numbers from `progress` on, and puts those that are RAM into `batch`.
fn read_numbers<D: Dma>(
    dma: &mut D,
    chain: &Chain,
    mut progress: Progress,
    ram: &Ram,
    batch: &mut Batch,
) -> Result<Looked, Stop> {
    batch.clear();
    let readable = chain.readable();
    let all = readable.len() / PFN * PFN;
    progress.is_odd |= all == 0 || all != readable.len() || !chain.writable().is_empty();
    // The guest may have put a shorter chain in the place of this one.
    let left = all.saturating_sub(progress.done);
    let mut bytes = [0; PFN_BYTES];
    let len = bytes.len().min(left as usize);
    let mut looked = Looked {
        progress,
        is_over: true,
        outside: 0,
        items: 0,
    };
    match readable.read(dma, progress.done, &mut bytes[..len]) {
        Ok(()) => {}
        Err(Stop::Fault(_)) => {
            // The rest is out of reach.
            looked.progress.is_odd = true;
            return Ok(looked);
        }
        Err(pending) => return Err(wait_for(dma, pending, readable, progress.done, len)),
    }
    let (numbers, _) = bytes[..len].as_chunks::<{ PFN as usize }>();
    for number in numbers {
        if !batch.has_room() {
            break;
        }
        looked.items += 1;
        match ram.first_of(Numbers::one(u32::from_le_bytes(*number))) {
            Some(page) => batch.add(page),
            None => looked.outside += 1,
        }
    }
    looked.progress.done += looked.items as u32 * PFN;
    looked.progress.is_odd |= looked.outside != 0;
    looked.is_over = looked.progress.done >= all;
    Ok(looked)
}

/// Finds out where the buffers of `chain` lie, from `progress` on, and puts whole pages of RAM into `batch`.
fn locate_buffers<D: Dma>(
    dma: &mut D,
    chain: &Chain,
    mut progress: Progress,
    ram: &Ram,
    batch: &mut Batch,
) -> Result<Looked, Stop> {
    const MOST: u32 = (MAX_PAGES * PAGE_SIZE) as u32;
    batch.clear();
    let writable = chain.writable();
    progress.is_odd |= writable.is_empty() || !chain.readable().is_empty();
    let mut looked = Looked {
        progress,
        is_over: true,
        outside: 0,
        items: 0,
    };
    for buffer in writable.slice(progress.done, u32::MAX) {
        let mut inside = 0;
        while inside < buffer.len {
            if !batch.has_room() || looked.items == MAX_RANGES as u64 {
                looked.is_over = false;
                return Ok(looked);
            }
            looked.items += 1;
            let left = buffer.len - inside;
            let at = buffer.iova.checked_add(inside.into());
            let at = at.expect("a buffer does not wrap");
            let run = match dma.locate(at, left.min(MOST), Perm::Write) {
                Ok(run) => run,
                Err(Stop::Fault(_)) => {
                    // One fault for a buffer is enough.
                    looked.progress.is_odd = true;
                    looked.progress.done += left;
                    break;
                }
                Err(pending) if batch.pages() == 0 => return Err(pending),
                Err(_) => {
                    // What was found first; the next step meets the wait again.
                    looked.is_over = false;
                    return Ok(looked);
                }
            };
            let named = Numbers::whole(run.gpa, run.len);
            looked.progress.is_odd |= named.count() * PAGE_SIZE != run.len;
            let mut len = run.len;
            if let Some(pages) = ram.first_of(named) {
                batch.add(pages);
                looked.outside += pages.first - named.first;
                // Behind them RAM may go on elsewhere: that is another look.
                if pages.end < named.end {
                    len = pages.end * PAGE_SIZE - run.gpa.raw();
                }
            } else {
                looked.outside += named.count();
            }
            looked.progress.is_odd |= looked.outside != 0;
            inside += len as u32;
            looked.progress.done += len as u32;
        }
    }
    Ok(looked)
}
