//! Execution of requests in order, and revocation of accesses in flight. See the documentation of
//! the parent module.

use guest_mem::{Access, Budget, DrainTimer, LeaseId, LeaseRecord, Leases, Part, SourceId};
use machine::{Command, CommandId, CommandResult, UnitEvent, UnitSink};

use super::access::look;
use super::{Endpoint, PvIommu, RevocationScope};
use crate::wire::Request;

/// Budget of one call, in estimated ns.
pub(super) const BUDGET: u64 = 20_000;
/// Estimated cost of a request, in ns.
const REQUEST: u64 = 100;
/// Estimated cost of a lookup of a mapping, in ns.
const LOOKUP: u64 = 30;
/// Estimated cost of the removal of a mapping, in ns.
pub(super) const REMOVE: u64 = 60;
/// Number of mappings that are removed between two checks of the budget.
pub(super) const CHUNK: usize = 32;

/// A request that revokes access and is in progress.
#[derive(Debug)]
pub(super) struct Revocation {
    id: CommandId,
    taken: RevocationScope,
    /// Its mappings have been removed.
    is_removed: bool,
    /// Leases that it waits for.
    leases: Vec<LeaseId>,
}

/// A request whose mappings are removed, and that waits for the end of leases.
#[derive(Debug)]
pub(super) struct Waiting {
    id: CommandId,
    pub(super) leases: Vec<LeaseId>,
    pub(super) drain: DrainTimer,
}

impl PvIommu {
    /// Begins a request, at once if none precedes it. If others do, it waits for the next poll:
    /// they have used up the budget of a sweep, and the guest controls their number.
    pub(super) fn begin(&mut self, command: Command<Request>, now: u64, sink: &mut impl UnitSink) {
        let is_first = self.under_way.is_none() && self.queue.is_empty();
        self.queue.push_back(command);
        if is_first {
            let mut budget = Budget::new(BUDGET);
            self.run(now, &mut budget, sink);
            self.cost += budget.spent();
        }
    }

    /// Continues the work in progress, and answers requests that have ended. Returns whether work
    /// is left or a request was answered.
    pub(super) fn step(&mut self, now: u64, sink: &mut impl UnitSink) -> bool {
        if self.is_at_work() {
            let mut budget = Budget::new(BUDGET);
            self.run(now, &mut budget, sink);
            self.free(&mut budget);
            self.cost += budget.spent();
        }
        let has_answered = !self.waiting.is_empty() && self.answer(now, sink);
        has_answered || self.is_at_work()
    }

    /// Begins requests and continues revocations while the budget lasts.
    fn run(&mut self, now: u64, budget: &mut Budget, sink: &mut impl UnitSink) {
        while !budget.is_spent() {
            if let Some(revocation) = self.under_way.take() {
                self.under_way = self.go_on(revocation, now, budget, sink);
                continue;
            }
            let Some(command) = self.queue.pop_front() else {
                break;
            };
            budget.charge(REQUEST);
            match self.carry_out(command.what) {
                Ok(None) => sink.command_done(command.id, CommandResult::Done),
                Ok(Some(taken)) => {
                    self.under_way = Some(Revocation {
                        id: command.id,
                        taken,
                        is_removed: false,
                        leases: Vec::new(),
                    });
                }
                Err(status) => {
                    self.stats.refused += 1;
                    sink.command_done(command.id, CommandResult::Refused(status as u8));
                }
            }
        }
    }

    pub(super) fn is_at_work(&self) -> bool {
        self.under_way.is_some() || !self.queue.is_empty() || !self.freed.is_empty()
    }

    /// Continues a revocation; returns it if it is not done.
    fn go_on(
        &mut self,
        mut revocation: Revocation,
        now: u64,
        budget: &mut Budget,
        sink: &mut impl UnitSink,
    ) -> Option<Revocation> {
        let taken = revocation.taken;
        if !revocation.is_removed {
            if !self.remove(taken, budget) {
                return Some(revocation);
            }
            revocation.is_removed = true;
            self.holds = self
                .holds
                .saturating_add(sink.invalidated(&taken.invalidation()));
            self.begin_recheck(&mut revocation, budget);
        }
        if !self.recheck(&mut revocation, budget) {
            return Some(revocation);
        }
        let Revocation { id, leases, .. } = revocation;
        if leases.is_empty() && self.holds == 0 {
            sink.command_done(id, CommandResult::Done);
        } else {
            self.stats.waits += 1;
            self.waiting.push(Waiting {
                id,
                leases,
                drain: DrainTimer::since(now),
            });
        }
        None
    }

    /// Removes the mappings of `taken` while the budget lasts. Returns whether all are removed.
    fn remove(&mut self, taken: RevocationScope, budget: &mut Budget) -> bool {
        let RevocationScope::Pages {
            domain,
            first,
            last,
        } = taken
        else {
            return true;
        };
        let generation = self.next_generation();
        let Some(there) = self.domains.get_mut(&domain) else {
            return true;
        };
        there.generation = generation;
        loop {
            let removed = there.mappings.remove(first, last, CHUNK);
            budget.charge(removed as u64 * REMOVE);
            self.stats.removed += removed as u64;
            self.stats.mappings -= removed as u64;
            if removed < CHUNK {
                return true;
            }
            if budget.is_spent() {
                return false;
            }
        }
    }

    /// Frees the mappings of removed domains while the budget lasts.
    fn free(&mut self, budget: &mut Budget) {
        while !budget.is_spent()
            && let Some(mappings) = self.freed.last_mut()
        {
            let removed = mappings.remove(0, u64::MAX, CHUNK);
            budget.charge(removed as u64 * REMOVE);
            self.stats.removed += removed as u64;
            self.stats.mappings -= removed as u64;
            if mappings.is_empty() {
                self.freed.pop();
            }
        }
    }

    fn begin_recheck(&mut self, revocation: &mut Revocation, budget: &mut Budget) {
        let range = revocation.taken.range();
        self.leases.begin_recheck(range);
        if self.leases.stale() == 0 {
            return;
        }
        // Leases that an earlier revocation found stale are not rechecked. This one waits for them,
        // too.
        let overlaps = |lease: &LeaseRecord| {
            let last = lease.iova.raw() + u64::from(lease.len - 1);
            range.is_none_or(|(from, to)| lease.iova <= to && from.raw() <= last)
        };
        for lease in self.leases.iter() {
            budget.charge(Budget::VISIT);
            let is_stale = lease.is_stale() && overlaps(&lease);
            if is_stale && concerns(&self.endpoints, revocation.taken, lease.source) {
                revocation.leases.push(lease.id);
            }
        }
    }

    /// Finds the leases that became stale, while the budget lasts. Returns whether all were
    /// checked.
    fn recheck(&mut self, revocation: &mut Revocation, budget: &mut Budget) -> bool {
        let taken = revocation.taken;
        let Self {
            leases,
            endpoints,
            domains,
            is_bypass,
            ..
        } = self;
        let (endpoints, domains) = (&*endpoints, &*domains);
        let found = &mut revocation.leases;
        let holds = |lease: &LeaseRecord, part: &mut Part, budget: &mut Budget| -> Access<bool> {
            while part.at < part.end && !budget.is_spent() {
                budget.charge(LOOKUP);
                let iova = lease.iova.raw() + u64::from(part.at);
                let run = look(
                    endpoints,
                    domains,
                    *is_bypass,
                    lease.source,
                    iova,
                    lease.perm,
                );
                let expected = lease.gpa.raw() + u64::from(part.at);
                match run {
                    Ok(run) if run.gpa.raw() == expected => {
                        let left = u64::from(part.end - part.at);
                        part.at += run.len.min(left) as u32;
                    }
                    _ => {
                        found.push(lease.id);
                        return Ok(false);
                    }
                }
            }
            Ok(true)
        };
        let answer = leases.recheck(budget, |source| concerns(endpoints, taken, source), holds);
        // No guest memory is accessed, so none can be absent.
        answer.unwrap_or(true)
    }

    /// Answers requests whose leases have ended. Returns whether there were any.
    fn answer(&mut self, now: u64, sink: &mut impl UnitSink) -> bool {
        if self.holds != 0 {
            return false;
        }
        let before = self.waiting.len();
        let leases = &self.leases;
        self.waiting.retain_mut(|waiting| {
            while let Some(&lease) = waiting.leases.last()
                && !leases.is_stale(lease)
            {
                waiting.leases.pop();
            }
            if waiting.leases.is_empty() {
                sink.command_done(waiting.id, CommandResult::Done);
            }
            !waiting.leases.is_empty()
        });
        self.watch_limit(now, sink);
        self.waiting.len() != before
    }

    fn watch_limit(&mut self, now: u64, sink: &mut impl UnitSink) {
        let limit = self.config.drain_limit_ns;
        let mut is_any = false;
        for waiting in &mut self.waiting {
            is_any |= waiting.drain.is_due(now, limit);
        }
        if is_any {
            self.stats.drain_limits += 1;
            let sources = self.leases.stale_sources();
            sink.event(UnitEvent::DrainLimit { sources });
        }
    }
}

/// Whether the revocation may affect accesses of `source`.
fn concerns(endpoints: &[Endpoint], taken: RevocationScope, source: SourceId) -> bool {
    match taken {
        RevocationScope::Pages { domain, .. } => endpoints
            .iter()
            .any(|own| own.source == source && own.domain == Some(domain)),
        RevocationScope::Endpoint(endpoint) => endpoint == source,
        RevocationScope::Everything => true,
    }
}
