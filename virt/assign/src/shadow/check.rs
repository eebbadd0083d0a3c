//! Check of the container's recorded mappings against the guest's tables, after an invalidation.

use guest_mem::{Budget, Found, Iommu, Next, PAGE_SIZE, PhysMem, Stop};

use super::{Pause, Phase, Shadow, TOGETHER, Task, iova};
use crate::calls::{Caller, MOST};
use crate::container_mappings::Mapping;

/// Progress of a check.
#[derive(Debug)]
pub(super) struct Check {
    /// First and last page of the guest's invalidation.
    told: (u64, u64),
    /// Page from which the next recorded mapping is checked.
    next: u64,
    /// Mappings that are gone are unmapped before the invalidation completes, whatever the policy.
    at_once: bool,
    looking: Option<Looking>,
    /// Mappings that are gone and not yet handled: those that are unmapped before the invalidation
    /// completes, and those that the policy decides about.
    gone_at_once: Vec<Mapping>,
    gone_by_policy: Vec<Mapping>,
    /// First and last pages of mappings of which a part is gone. What is left of them is mapped
    /// anew.
    cut: Vec<(u64, u64)>,
}

/// A mapping that is being checked.
#[derive(Clone, Copy, Debug)]
struct Looking {
    mapping: Mapping,
    /// Next page to compare.
    at: u64,
    /// The tables still map some page of it as recorded.
    stands: bool,
    /// The tables do not map some page of it as recorded.
    is_gone: bool,
}

impl Check {
    /// Creates a check of the pages `first..=last`.
    pub(super) fn of(first: u64, last: u64, at_once: bool) -> Self {
        Self {
            told: (first, last),
            next: first,
            at_once,
            looking: None,
            gone_at_once: Vec::new(),
            gone_by_policy: Vec::new(),
            cut: Vec::new(),
        }
    }
}

impl<C: Caller> Shadow<C> {
    /// Checks the mappings of `task`, and unmaps those that are gone, or keeps them as the policy
    /// prescribes. Returns the ranges to fill afterwards, as first and last pages.
    pub(super) fn check<I: Iommu, M: PhysMem>(
        &mut self,
        task: &mut Task,
        unit: &I,
        mem: &M,
        budget: &mut Budget,
    ) -> Result<Vec<(u64, u64)>, Pause> {
        let Phase::Check(mut check) = std::mem::replace(&mut task.phase, Phase::Settle) else {
            unreachable!("the caller has seen a check");
        };
        match self.check_some(&mut check, task, unit, mem, budget) {
            Ok(()) => {
                let mut ranges = check.cut;
                ranges.push(check.told);
                Ok(ranges)
            }
            Err(pause) => {
                task.phase = Phase::Check(check);
                Err(pause)
            }
        }
    }

    fn check_some<I: Iommu, M: PhysMem>(
        &mut self,
        check: &mut Check,
        task: &mut Task,
        unit: &I,
        mem: &M,
        budget: &mut Budget,
    ) -> Result<(), Pause> {
        loop {
            if check.gone_at_once.len() + check.gone_by_policy.len() >= TOGETHER {
                self.deal_with(check, task)?;
            }
            let mut looking = match check.looking.take() {
                Some(looking) => looking,
                None => match self.book.live_from(check.next, check.told.1) {
                    Some(mapping) => Looking {
                        mapping,
                        at: mapping.first,
                        stands: false,
                        is_gone: false,
                    },
                    None => return self.deal_with(check, task),
                },
            };
            let looked = self.look_at(&mut looking, unit, mem, budget);
            if looked.is_err() {
                check.looking = Some(looking);
                // Mappings found gone need not wait for the rest of the check.
                self.deal_with(check, task)?;
                return looked;
            }
            let mapping = looking.mapping;
            if looking.is_gone && looking.stands {
                self.counts.cut += 1;
                check.cut.push((mapping.first, mapping.last()));
                self.is_granular = true;
            }
            if looking.is_gone {
                // What is left of a mapping that was cut is mapped anew, so the whole is unmapped
                // first.
                match check.at_once || looking.stands {
                    true => check.gone_at_once.push(mapping),
                    false => check.gone_by_policy.push(mapping),
                }
            }
            match mapping.last().checked_add(1) {
                Some(next) => check.next = next,
                None => return self.deal_with(check, task),
            }
        }
    }

    /// Compares a mapping with the guest's tables.
    fn look_at<I: Iommu, M: PhysMem>(
        &mut self,
        looking: &mut Looking,
        unit: &I,
        mem: &M,
        budget: &mut Budget,
    ) -> Result<(), Pause> {
        let mapping = looking.mapping;
        let last = iova(mapping.last()).raw() | (PAGE_SIZE - 1);
        // Each iteration advances by at least a page, or returns.
        while looking.at <= mapping.last() {
            if budget.is_spent() {
                return Err(Pause::Budget);
            }
            let next = unit.next_mapping(
                mem,
                self.source,
                iova(looking.at),
                guest_mem::Iova::new(last),
                budget,
            );
            match next {
                Ok(Next::Found(found)) => {
                    let first = found.iova.raw() / PAGE_SIZE;
                    looking.is_gone |= first > looking.at || !is_part(&mapping, &found);
                    looking.stands |= is_part(&mapping, &found);
                    looking.at = first + (found.len / PAGE_SIZE).max(1);
                }
                Ok(Next::None) => {
                    looking.is_gone = true;
                    looking.at = mapping.last() + 1;
                }
                Ok(Next::Budget(from)) => {
                    let from = from.raw() / PAGE_SIZE;
                    looking.is_gone |= from > looking.at;
                    looking.at = from;
                }
                Err(Stop::Pending(ticket)) => return Err(self.wait_for(ticket)),
                Err(Stop::Fault(_)) => {
                    looking.is_gone = true;
                    looking.at = mapping.last() + 1;
                }
            }
        }
        Ok(())
    }

    /// Unmaps mappings that are gone, or keeps them as the policy prescribes.
    fn deal_with(&mut self, check: &mut Check, task: &mut Task) -> Result<(), Pause> {
        if check.gone_at_once.is_empty() && check.gone_by_policy.is_empty() {
            return Ok(());
        }
        // In the worst case each mapping takes a call of its own.
        if self.calls.len() >= MOST {
            return Err(Pause::Wait);
        }
        let at_once = std::mem::take(&mut check.gone_at_once);
        let by_policy = std::mem::take(&mut check.gone_by_policy);
        self.unmap(at_once, by_policy, task);
        Ok(())
    }
}

/// Returns whether `found` equals the part of `mapping` at its IOVA.
fn is_part(mapping: &Mapping, found: &Found) -> bool {
    let at = found.iova.raw() / PAGE_SIZE;
    let gpa = mapping.gpa.wrapping_add(at.wrapping_sub(mapping.first));
    found.gpa.raw() == gpa.wrapping_mul(PAGE_SIZE) && access_of(found) == Some(mapping.access)
}

/// Returns the access that `found` grants the device; `None`: no access.
pub(super) fn access_of(found: &Found) -> Option<dma_map::iova::Access> {
    use dma_map::iova::Access;
    match (found.can_read, found.can_write) {
        (true, true) => Some(Access::ReadWrite),
        (true, false) => Some(Access::Read),
        (false, true) => Some(Access::Write),
        (false, false) => None,
    }
}
