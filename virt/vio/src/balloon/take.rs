//! Chains are worked off step by step, and answered when they are over.

use guest_mem::{Dma, Intent, PAGE_SIZE, Perm, Stop};

use super::pages::{Batch, MAX_PAGES, MAX_RANGES, Numbers, Ram};
use super::statistics::{ENTRY, MAX_ENTRIES, Statistics};
use super::{BalloonClass, Progress, Queue, Role};
use crate::body::{Context, DeviceClass, Environment, Step};
use crate::device::Activity;
use crate::poll_budget::cost;
use crate::ring::{Chain, wait_for_all};

/// Bytes of a page number.
const PFN: u32 = 4;
/// Bytes of page numbers that one step reads: as many as Linux sends at a time.
const PFN_BYTES: usize = 1024;

/// Outcome of one step over a chain; the pages are in the batch.
struct BatchProgress {
    progress: Progress,
    is_over: bool,
    /// Pages that are not RAM.
    outside: u64,
    /// Page numbers or pieces that were looked at.
    items: u64,
}

impl BatchProgress {
    /// Nothing was looked at yet, and there is nothing more.
    fn at(progress: Progress) -> Self {
        Self {
            progress,
            is_over: true,
            outside: 0,
            items: 0,
        }
    }
}

impl BalloonClass {
    /// One step of a chain that names pages.
    pub(super) fn take_pages<E: Environment>(
        &mut self,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
    ) -> Step {
        let Self {
            chain, batch, ram, ..
        } = self;
        if !queue.peek(cx.dma, chain)? {
            queue.own.progress = Progress::default();
            return Ok(Activity::Idle);
        }
        charge_chain(cx, chain);
        let (role, progress) = (queue.own.role, queue.own.progress);
        let looked = match role {
            Role::Report => locate_buffers(cx.dma, chain, progress, ram, batch),
            _ => read_numbers(cx.dma, chain, progress, ram, batch),
        };
        let looked = looked.map_err(|pending| queue.park(pending))?;
        cx.visit.charge(looked.items * cost::DESCRIPTOR);
        if batch.pages() != 0 {
            let pages = batch.ranges();
            let taken = match role {
                Role::Inflate => self.io.inflated(pages),
                Role::Report => self.io.reported(pages),
                _ => {
                    self.io.deflated(pages);
                    Ok(())
                }
            };
            if role != Role::Deflate {
                // Also where it waits: asking was work.
                let ranges = pages.len() as u64;
                cx.visit
                    .charge(ranges * cost::REQUEST + batch.pages() * cost::PAGE);
            }
            if let Err(ticket) = taken {
                queue.own.dropping = Some(ticket);
                return Err(queue.park(Stop::Pending(ticket)));
            }
        }
        let count = match role {
            Role::Inflate => &mut self.counts.inflated,
            Role::Report => &mut self.counts.reported,
            _ => &mut self.counts.deflated,
        };
        *count += batch.pages();
        self.counts.outside += looked.outside;
        queue.own.progress = looked.progress;
        if looked.is_over {
            cx.stats.requests += 1;
            cx.stats.errors += u64::from(looked.progress.is_odd);
            queue.own.progress = Progress::default();
            queue.answer(chain, 0)?;
            queue.stage_answers(cx.dma)?;
        }
        Ok(Activity::Busy)
    }

    /// Reads the statistics that the driver has left, and gives it its buffer back if new ones are
    /// wanted.
    pub(super) fn take_statistics<E: Environment>(
        &mut self,
        queue: &mut Queue,
        cx: &mut Context<'_, E>,
    ) -> Step {
        if !self.may_take(queue, cx.dma) {
            return Ok(Activity::Idle);
        }
        let chain = &mut self.chain;
        if !queue.peek(cx.dma, chain)? {
            queue.own.is_read = false;
            return Ok(Activity::Idle);
        }
        charge_chain(cx, chain);
        if !queue.own.is_read {
            let mut bytes = [0; ENTRY * MAX_ENTRIES];
            let readable = chain.readable();
            let len = bytes.len().min(readable.len() as usize);
            match readable.read(cx.dma, 0, &mut bytes[..len]) {
                Ok(()) if len >= ENTRY => {
                    let all = Statistics::parse(&bytes[..len], cx.visit.now_ns());
                    self.statistics = Some(all);
                    self.counts.statistics += 1;
                }
                // It can be used to ask for others all the same.
                Ok(()) | Err(Stop::Fault(_)) => cx.stats.errors += 1,
                Err(pending) => {
                    let all = readable.wanted(0, len as u32, Intent::Read);
                    return Err(queue.wait_for(cx.dma, pending, all));
                }
            }
            queue.own.is_read = true;
        }
        if self.wants_statistics {
            self.wants_statistics = false;
            cx.stats.requests += 1;
            queue.own.is_read = false;
            queue.answer(chain, 0)?;
            queue.stage_answers(cx.dma)?;
        }
        Ok(Activity::Busy)
    }
}

/// Charges the visit for a look at `chain`.
fn charge_chain<E: Environment>(cx: &mut Context<'_, E>, chain: &Chain) {
    let descriptors = chain.descriptors() as u64;
    cx.visit
        .take_request(cost::REQUEST + descriptors * cost::DESCRIPTOR);
}

/// Reads page numbers from `progress` on, and puts those that are RAM into `batch`.
fn read_numbers<D: Dma>(
    dma: &mut D,
    chain: &Chain,
    mut progress: Progress,
    ram: &Ram,
    batch: &mut Batch,
) -> Result<BatchProgress, Stop> {
    batch.clear();
    let readable = chain.readable();
    let all = readable.len() / PFN * PFN;
    progress.is_odd |= all == 0 || all != readable.len() || !chain.writable().is_empty();
    // The guest may have put a shorter chain in the place of this one.
    let left = all.saturating_sub(progress.done);
    let mut bytes = [0; PFN_BYTES];
    let len = bytes.len().min(left as usize);
    let mut looked = BatchProgress::at(progress);
    match readable.read(dma, progress.done, &mut bytes[..len]) {
        Ok(()) => {}
        Err(Stop::Fault(_)) => {
            // The rest is out of reach.
            looked.progress.is_odd = true;
            return Ok(looked);
        }
        Err(pending) => {
            let all = readable.wanted(progress.done, len as u32, Intent::Read);
            return Err(wait_for_all(dma, pending, all));
        }
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

/// Finds out where the buffers of `chain` lie, from `progress` on, and puts whole pages of RAM into
/// `batch`.
fn locate_buffers<D: Dma>(
    dma: &mut D,
    chain: &Chain,
    mut progress: Progress,
    ram: &Ram,
    batch: &mut Batch,
) -> Result<BatchProgress, Stop> {
    const MOST: u32 = (MAX_PAGES * PAGE_SIZE) as u32;
    batch.clear();
    let writable = chain.writable();
    progress.is_odd |= writable.is_empty() || !chain.readable().is_empty();
    let mut looked = BatchProgress::at(progress);
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
