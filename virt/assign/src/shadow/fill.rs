//! Mappings that the tables have and the book lacks.

use dma_map::iova::Access;
use guest_mem::{Access as MemAccess, Budget, Gpa, Intent, Iommu, Next, PAGE_SIZE, PhysMem, Stop};

use super::check::access_of;
use super::{HostCall, Mode, Pause, Phase, Shadow, State, Task, iova};
use crate::calls::{Call, CallId, Caller, MOST, Refusal};
use crate::container_mappings::Mapping;
use crate::pin::Pinned;
use crate::policy::HostPolicy;

/// Pages of one mapping where all of RAM is mapped: 64 MiB.
const ALL_SLICE: u64 = (64 << 20) / PAGE_SIZE;

/// Progress of a fill.
#[derive(Debug)]
pub(super) struct Fill {
    from: From,
    /// Adjacent pages that were found and are not yet mapped: a page that continues them joins the
    /// run.
    run: Option<Mapping>,
    /// That run has ended.
    is_cut_off: bool,
}

#[derive(Debug)]
enum From {
    /// The tables: ranges of pages left to visit, first and last page, the last range first.
    Tables(Vec<(u64, u64)>),
    /// All of RAM, from this page of guest memory on.
    Ram(u64),
}

impl Fill {
    /// Creates a fill from the tables in these ranges of pages, each a first and last page.
    pub(super) fn of_tables(ranges: Vec<(u64, u64)>) -> Self {
        Self {
            from: From::Tables(ranges),
            run: None,
            is_cut_off: false,
        }
    }

    /// All of guest memory, at its guest-physical addresses.
    pub(super) fn all_of_ram() -> Self {
        Self {
            from: From::Ram(0),
            run: None,
            is_cut_off: false,
        }
    }
}

impl<C: Caller> Shadow<C> {
    /// Maps the mappings that it finds.
    pub(super) fn fill<I: Iommu, M: PhysMem>(
        &mut self,
        task: &mut Task,
        unit: &I,
        mem: &M,
        budget: &mut Budget,
    ) -> Result<(), Pause> {
        let Phase::Fill(mut fill) = std::mem::replace(&mut task.phase, Phase::Settle) else {
            unreachable!("the caller has seen a fill");
        };
        let filled = self.fill_some(&mut fill, task, unit, mem, budget);
        if filled.is_err() {
            task.phase = Phase::Fill(fill);
        }
        filled
    }

    fn fill_some<I: Iommu, M: PhysMem>(
        &mut self,
        fill: &mut Fill,
        task: &mut Task,
        unit: &I,
        mem: &M,
        budget: &mut Budget,
    ) -> Result<(), Pause> {
        loop {
            if fill.is_cut_off {
                self.map_run(&mut fill.run, task, mem, budget)?;
                fill.is_cut_off = false;
            }
            let found = match &mut fill.from {
                From::Tables(ranges) => self.next_of_tables(ranges, unit, mem, budget)?,
                From::Ram(next) => next_of_ram(&self.limits.ram, next),
            };
            let Some(found) = found else {
                return self.map_run(&mut fill.run, task, mem, budget);
            };
            match &mut fill.run {
                Some(run) if continues(run, &found) && matches!(fill.from, From::Tables(_)) => {
                    run.pages += found.pages;
                }
                None => fill.run = Some(found),
                Some(_) => {
                    // The search continues behind `found` once the run before it is mapped.
                    self.map_run(&mut fill.run, task, mem, budget)
                        .inspect_err(|_| {
                            fill.is_cut_off = true;
                            put_back(&mut fill.from, &found);
                        })?;
                    fill.run = Some(found);
                }
            }
        }
    }

    /// Returns the next mapping of the tables, or a part of one; `None` at the end.
    fn next_of_tables<I: Iommu, M: PhysMem>(
        &mut self,
        ranges: &mut Vec<(u64, u64)>,
        unit: &I,
        mem: &M,
        budget: &mut Budget,
    ) -> Result<Option<Mapping>, Pause> {
        // Each turn advances in a range, or ends one.
        while let Some((first, last)) = ranges.last_mut() {
            if budget.is_spent() {
                return Err(Pause::Budget);
            }
            let end = guest_mem::Iova::new(iova(*last).raw() | (PAGE_SIZE - 1));
            let next = unit.next_mapping(mem, self.source, iova(*first), end, budget);
            let (behind, found) = match next {
                Ok(Next::Found(found)) => {
                    let mapping = access_of(&found).map(|access| Mapping {
                        first: found.iova.raw() / PAGE_SIZE,
                        pages: (found.len / PAGE_SIZE).max(1),
                        gpa: found.gpa.raw() / PAGE_SIZE,
                        access,
                    });
                    let at = found.iova.raw() / PAGE_SIZE;
                    (Some(at + (found.len / PAGE_SIZE).max(1)), mapping)
                }
                Ok(Next::Budget(from)) => (Some(from.raw() / PAGE_SIZE), None),
                Ok(Next::None) | Err(Stop::Fault(_)) => (None, None),
                Err(Stop::Pending(ticket)) => return Err(self.wait_for(ticket)),
            };
            match behind.filter(|behind| behind <= last) {
                Some(behind) => *first = behind,
                None => {
                    ranges.pop();
                }
            }
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Maps a run. Its parts that are live already stay; stale ones are revived or torn down first;
    /// parts outside RAM or not allowed are refused. When this pauses, `run` is the rest.
    fn map_run<M: PhysMem>(
        &mut self,
        run: &mut Option<Mapping>,
        task: &mut Task,
        mem: &M,
        budget: &mut Budget,
    ) -> Result<(), Pause> {
        // Each turn takes a page at least off the run, or a stale mapping out of its way.
        while let Some(left) = *run {
            if self.calls.len() >= MOST {
                return Err(Pause::Wait);
            }
            if budget.is_spent() {
                return Err(Pause::Budget);
            }
            budget.charge(Budget::VISIT);
            let pages = self.map_some(left, task, mem, budget)?;
            *run = (pages < left.pages).then(|| Mapping {
                first: left.first + pages,
                pages: left.pages - pages,
                gpa: left.gpa + pages,
                access: left.access,
            });
        }
        Ok(())
    }

    /// Handles the first pages of a run; returns their number.
    fn map_some<M: PhysMem>(
        &mut self,
        run: Mapping,
        task: &mut Task,
        mem: &M,
        budget: &mut Budget,
    ) -> Result<u64, Pause> {
        let mut pages = run.pages;
        if let Some(live) = self.book.live_from(run.first, run.last()) {
            if live.first <= run.first {
                return Ok((live.last() - run.first + 1).min(run.pages));
            }
            pages = live.first - run.first;
        }
        let (n, is_ram) = part(&self.limits.ram, run.gpa, pages);
        let (n, is_allowed) = part(&self.limits.allowed, run.first, n);
        pages = n;
        if !is_ram || !is_allowed {
            self.refuse(&run, is_ram);
            return Ok(pages);
        }
        if self.is_granular && matches!(self.mode, Mode::Domain(_)) {
            pages = 1;
        }
        let wanted = Mapping { pages, ..run };
        if let Some(stale) = self.book.stale_from(wanted.first, wanted.last()) {
            return Ok(self.meet_stale(&wanted, &stale));
        }
        budget.charge(pages.min(64) * Budget::VISIT);
        let memory = match memory_of(&wanted, mem) {
            Ok(memory) => memory,
            Err(Stop::Pending(ticket)) => return Err(self.wait_for(ticket)),
            Err(Stop::Fault(_)) => {
                self.refuse(&wanted, false);
                return Ok(pages);
            }
        };
        self.counts.misses += 1;
        // From here on the page is in use.
        self.book.enter(wanted);
        task.until = Some(self.ask_to_map(wanted, memory, false));
        Ok(pages)
    }

    /// Handles a wanted mapping that overlaps the stale mapping `stale`: if it is the same, the
    /// stale one is revived, else it is torn down first. Returns the number of pages handled.
    fn meet_stale(&mut self, wanted: &Mapping, stale: &Mapping) -> u64 {
        let is_same = stale.first == wanted.first
            && stale.gpa == wanted.gpa
            && stale.access == wanted.access
            && stale.pages <= wanted.pages;
        if is_same
            && matches!(self.policy, HostPolicy::Optimistic(_))
            && let Some(found) = self.book.take_stale(stale.first)
        {
            if found.is_counted {
                self.account.end(self.now.saturating_sub(found.since));
            }
            self.counts.hits += 1;
            self.book.revive(found.mapping);
            return stale.pages;
        }
        self.tear_down_stale(vec![stale.first]);
        0
    }

    fn ask_to_map(&mut self, mapping: Mapping, memory: Pinned, was_refused: bool) -> CallId {
        self.counts.maps += 1;
        self.counts.mapped_pages += mapping.pages;
        let range = mapping.range().expect("pages of an address space");
        let call = Call::Map {
            range,
            memory,
            access: mapping.access,
        };
        self.submit(call, HostCall::Map(mapping, was_refused))
    }

    /// Handles a map that the host has refused. If a limit is reached, stale mappings are torn
    /// down, and the map is submitted once more.
    #[cold]
    pub(super) fn map_refused<M: PhysMem>(
        &mut self,
        mapping: Mapping,
        was_refused: bool,
        refusal: Refusal,
        mem: &M,
    ) {
        let is_open = self.state == State::Open;
        let may_go = is_open && refusal.is_full && !was_refused && self.book.stale() > 0;
        if may_go {
            let stale = self.book.some_stale(usize::MAX);
            self.tear_down_stale(stale);
            // It is in use, so it is present.
            if let Ok(memory) = memory_of(&mapping, mem) {
                let id = self.ask_to_map(mapping, memory, true);
                if let Some(task) = self.tasks.front_mut() {
                    task.until = Some(id);
                }
                return;
            }
        }
        self.counts.refused += 1;
        if self.book.take_live(mapping.first).is_some() {
            self.book.leave(&mapping);
        }
        if !std::mem::replace(&mut self.said.refused, true) {
            tracing::warn!(
                device = %self.source,
                "the host refuses a mapping of the guest's, which the device does not reach: {}",
                refusal.text
            );
        }
    }

    #[cold]
    fn refuse(&mut self, run: &Mapping, is_ram: bool) {
        let (at, to) = (run.first * PAGE_SIZE, run.gpa * PAGE_SIZE);
        if is_ram {
            self.counts.not_allowed += 1;
            if !std::mem::replace(&mut self.said.not_allowed, true) {
                tracing::warn!(device = %self.source, "the guest maps IOVA {at:#x}, which the \
                     host's IOMMU does not allow: the device does not reach it");
            }
        } else {
            self.counts.not_ram += 1;
            if !std::mem::replace(&mut self.said.not_ram, true) {
                tracing::warn!(device = %self.source, "the guest maps IOVA {at:#x} to {to:#x}, \
                     which is no memory: the device does not reach it");
            }
        }
    }
}

/// The memory of a mapping, once it is there. A pager learns whether the device may write it.
fn memory_of<M: PhysMem>(mapping: &Mapping, mem: &M) -> MemAccess<Pinned> {
    let intent = match mapping.access {
        Access::Read => Intent::Read,
        Access::Write | Access::ReadWrite => Intent::Write,
    };
    let (gpa, len) = (Gpa::new(mapping.gpa * PAGE_SIZE), mapping.pages * PAGE_SIZE);
    Pinned::ask(mem, gpa, len, intent)
}

/// Returns the number of the `pages` pages from `first` on that lie alike in one of the sorted
/// `runs` (first page, pages) or in none, and whether they lie in one.
fn part(runs: &[(u64, u64)], first: u64, pages: u64) -> (u64, bool) {
    let behind = runs.partition_point(|(at, _)| *at <= first);
    let inside = behind.checked_sub(1).map(|at| runs[at]);
    if let Some((at, len)) = inside
        && let left = len.saturating_sub(first - at)
        && left > 0
    {
        return (left.min(pages), true);
    }
    let next = runs.get(behind).map_or(u64::MAX, |(at, _)| *at);
    ((next - first).min(pages), false)
}

/// Returns whether `next` begins where `run` ends.
fn continues(run: &Mapping, next: &Mapping) -> bool {
    run.first + run.pages == next.first
        && run.gpa + run.pages == next.gpa
        && run.access == next.access
}

/// Puts a mapping that was found back to be found again.
fn put_back(from: &mut From, found: &Mapping) {
    match from {
        From::Tables(ranges) => ranges.push((found.first, found.last())),
        From::Ram(next) => *next = found.gpa,
    }
}

/// The next slice of memory, at its own addresses.
fn next_of_ram(ram: &[(u64, u64)], next: &mut u64) -> Option<Mapping> {
    let (first, pages) = *ram.iter().find(|(first, pages)| first + pages > *next)?;
    let at = first.max(*next);
    let pages = (first + pages - at).min(ALL_SLICE);
    *next = at + pages;
    Some(Mapping {
        first: at,
        pages,
        gpa: at,
        access: Access::ReadWrite,
    })
}
