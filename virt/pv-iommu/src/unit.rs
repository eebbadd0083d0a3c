//! The remapping unit: endpoints, domains, and what becomes of accesses under way when something is taken away.
//!
//! Requests are carried out in their order, one after the other. One that takes mappings or attachments away is a *revocation*:
//!
//! ```text
//! mappings removed, a budget at a time ─▶ leases of the endpoints concerned looked at ─▶ waits for those that no longer hold
//!            (requests behind it wait)                  (these too)                         (requests behind it go on)
//! ```
//! Each waiting request has a list of its own leases: those that its recheck has found to hold no more, and those that an earlier one has,
//! in the same range. It is answered when they have ended, whatever others wait for. Whoever follows the mappings and holds
//! an invalidation holds all requests that wait then.
//!
//! A domain that ceases to exist is out of reach at once; its mappings are freed a budget at a time.
//!
//! Thread: the owner's only.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

use guest_mem::{
    Access, Attachment, Budget, DmaFault, Found, Gpa, Iommu, Iova, LeaseId, LeaseRecord,
    LeaseTable, Leases, Next, Part, Perm, PhysMem, Run, SourceId,
};
use machine::{
    Command, CommandId, CommandResult, Invalidation, RefusedAccess, RemappingUnit, Scope,
    UnitControl, UnitEvent, UnitPoll, UnitSink,
};
use serde::{Deserialize, Serialize};

use crate::mappings::{Mapping, Mappings};
use crate::wire::{
    ATTACH_BYPASS, DOMAIN_LAST, GRANULE, INPUT_LAST, MAP_MMIO, MAP_READ, MAP_WRITE, MSI_WINDOW,
    PHYS_LAST, Reason, Request, Status,
};

/// Work of one call, in ns.
const BUDGET: u64 = 20_000;
/// What a request costs, in ns.
const REQUEST: u64 = 100;
/// What looking a mapping up costs, in ns.
const LOOKUP: u64 = 30;
/// What removing a mapping costs, in ns.
const REMOVE: u64 = 60;
/// Mappings that are removed between two looks at the budget.
const CHUNK: usize = 32;

/// What a unit is made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The endpoints that it translates for: requesters of PCI functions.
    pub endpoints: Vec<RangeInclusive<u16>>,
    /// Domains at a time.
    pub max_domains: usize,
    /// Mappings at a time, of all domains. A host byte count: some 60 for each.
    pub max_mappings: usize,
    /// Leases at a time.
    pub max_leases: usize,
    /// How long a request may wait for leases before their devices' requests are cancelled, in ns.
    pub drain_limit_ns: u64,
}

impl Default for Config {
    /// No endpoint; 1,024 domains, 2^20 mappings (64 MiB), all leases, one second.
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            max_domains: 1024,
            max_mappings: 1 << 20,
            max_leases: guest_mem::MAX_LEASES,
            drain_limit_ns: 1_000_000_000,
        }
    }
}

/// Counters since the unit was made, and how much there is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// ATTACH requests carried out.
    pub attaches: u64,
    /// DETACH requests carried out.
    pub detaches: u64,
    /// MAP requests carried out.
    pub maps: u64,
    /// UNMAP requests carried out.
    pub unmaps: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Requests that had to wait for leases.
    pub waits: u64,
    /// Times the drain limit has passed.
    pub drain_limits: u64,
    /// Accesses that were refused.
    pub faults: u64,
    /// Mappings that requests have removed, or that went with their domain.
    pub removed: u64,
    /// Mappings now.
    pub mappings: u64,
    /// Domains now.
    pub domains: u64,
}

#[derive(Debug)]
struct Domain {
    is_bypass: bool,
    mappings: Mappings,
    /// Endpoints that are attached to it, at least one.
    endpoints: usize,
    generation: u64,
}

/// An endpoint that was ever attached.
#[derive(Debug)]
struct Endpoint {
    source: SourceId,
    domain: Option<u32>,
    /// While it is attached to nothing.
    generation: u64,
    /// The mapping that its last access found, and under which generation.
    hit: Option<(u64, Mapping)>,
}

/// What a revocation takes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    /// Mappings of a domain.
    Pages { domain: u32, first: u64, last: u64 },
    /// What an endpoint reached.
    Endpoint(SourceId),
    /// What all of them did.
    Everything,
}

impl Taken {
    fn range(&self) -> Option<(Iova, Iova)> {
        match *self {
            Self::Pages { first, last, .. } => Some((Iova::new(first), Iova::new(last))),
            Self::Endpoint(_) | Self::Everything => None,
        }
    }

    fn invalidation(&self) -> Invalidation {
        let scope = match *self {
            Self::Pages {
                domain,
                first,
                last,
            } => Scope::Range {
                domain,
                iova: Iova::new(first),
                len: (last - first).saturating_add(1),
            },
            Self::Endpoint(source) => Scope::Source(source, 0),
            Self::Everything => Scope::All,
        };
        Invalidation { scope }
    }
}

/// A revocation under way.
#[derive(Debug)]
struct Revocation {
    id: CommandId,
    taken: Taken,
    /// Its mappings are gone.
    is_removed: bool,
    /// Leases that it waits for.
    leases: Vec<LeaseId>,
}

/// A request that waits.
#[derive(Debug)]
struct Waiting {
    id: CommandId,
    leases: Vec<LeaseId>,
    since: u64,
    is_overdue: bool,
}

/// The unit. See the module's head.
#[derive(Debug)]
pub struct PvIommu {
    config: Config,
    domains: BTreeMap<u32, Domain>,
    endpoints: Vec<Endpoint>,
    is_bypass: bool,
    leases: LeaseTable,
    /// Requests not begun.
    queue: VecDeque<Command<Request>>,
    under_way: Option<Revocation>,
    waiting: Vec<Waiting>,
    /// Invalidations held by those that follow the mappings.
    holds: u32,
    /// Mappings of domains that are no more.
    freed: Vec<Mappings>,
    /// Accesses refused since the last poll.
    refused: VecDeque<RefusedAccess>,
    generation: u64,
    /// Not asked for yet.
    cost: u64,
    stats: Stats,
}

/// Accesses refused between two polls that are reported; what is beyond is counted.
const MAX_REFUSED: usize = 64;

impl PvIommu {
    /// A unit without domains, not in bypass mode.
    pub fn new(config: Config) -> Self {
        Self {
            leases: LeaseTable::new(config.max_leases),
            config,
            domains: BTreeMap::new(),
            endpoints: Vec::new(),
            is_bypass: false,
            queue: VecDeque::new(),
            under_way: None,
            waiting: Vec::new(),
            holds: 0,
            freed: Vec::new(),
            refused: VecDeque::new(),
            generation: 0,
            cost: 0,
            stats: Stats::default(),
        }
    }

    /// Sets which endpoints there are.
    pub fn set_endpoints(&mut self, endpoints: Vec<RangeInclusive<u16>>) {
        self.config.endpoints = endpoints;
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        Stats {
            domains: self.domains.len() as u64,
            ..self.stats
        }
    }

    fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    fn endpoint(&self, source: SourceId) -> Option<&Endpoint> {
        self.endpoints.iter().find(|own| own.source == source)
    }

    /// The requester of an endpoint that exists.
    fn known(&self, endpoint: u32) -> Result<SourceId, Status> {
        let source = u16::try_from(endpoint).map_err(|_| Status::NoEnt)?;
        let mut ranges = self.config.endpoints.iter();
        match ranges.any(|range| range.contains(&source)) {
            true => Ok(SourceId(source)),
            false => Err(Status::NoEnt),
        }
    }

    // -- requests ------------------------------------------------------------------------------

    /// Carries out a request, or the part of it that can be refused; what it takes away, if anything.
    fn carry_out(&mut self, request: Request) -> Result<Option<Taken>, Status> {
        match request {
            Request::Attach {
                domain,
                endpoint,
                flags,
                reserved,
            } => self.attach(domain, endpoint, flags, reserved),
            Request::Detach { domain, endpoint } => {
                let source = self.known(endpoint)?;
                if self.endpoint(source).and_then(|own| own.domain) != Some(domain) {
                    return Err(Status::Inval);
                }
                self.leave(source);
                self.stats.detaches += 1;
                Ok(Some(Taken::Endpoint(source)))
            }
            Request::Map {
                domain,
                first,
                last,
                phys,
                flags,
            } => self.map(domain, first, last, phys, flags).map(|()| None),
            Request::Unmap {
                domain,
                first,
                last,
            } => self.unmap(domain, first, last),
            Request::SetBypass(is_bypass) => {
                let was_bypass = std::mem::replace(&mut self.is_bypass, is_bypass);
                if was_bypass == is_bypass {
                    return Ok(None);
                }
                self.renew_unattached();
                Ok(was_bypass.then_some(Taken::Everything))
            }
            Request::Reset => {
                for source in self.attached() {
                    self.leave(source);
                }
                Ok(Some(Taken::Everything))
            }
        }
    }

    fn attached(&self) -> Vec<SourceId> {
        let attached = self.endpoints.iter().filter(|own| own.domain.is_some());
        attached.map(|own| own.source).collect()
    }

    /// What endpoints that are attached to nothing reach has changed.
    fn renew_unattached(&mut self) {
        let generation = self.next_generation();
        for own in &mut self.endpoints {
            own.generation = generation;
        }
    }

    fn attach(
        &mut self,
        domain: u32,
        endpoint: u32,
        flags: u32,
        reserved: u32,
    ) -> Result<Option<Taken>, Status> {
        if reserved != 0 || flags & !ATTACH_BYPASS != 0 {
            return Err(Status::Inval);
        }
        let source = self.known(endpoint)?;
        if domain > DOMAIN_LAST {
            return Err(Status::Range);
        }
        let is_bypass = flags & ATTACH_BYPASS != 0;
        let former = self.endpoint(source).and_then(|own| own.domain);
        match self.domains.get(&domain) {
            Some(there) if there.is_bypass != is_bypass => return Err(Status::Inval),
            Some(_) => {}
            // One that the endpoint alone is in goes by this.
            None => {
                let alone = former.and_then(|former| self.domains.get(&former));
                let goes = usize::from(alone.is_some_and(|own| own.endpoints == 1));
                if self.domains.len() - goes >= self.config.max_domains {
                    return Err(Status::NoMem);
                }
            }
        }
        self.stats.attaches += 1;
        if former == Some(domain) {
            return Ok(None);
        }
        let had_access = former.is_some() || self.is_bypass;
        if former.is_some() {
            self.leave(source);
        }
        let generation = self.next_generation();
        // One that is there keeps its own: whoever was in it before and comes back finds what there is under that.
        let there = self.domains.entry(domain).or_insert_with(|| Domain {
            is_bypass,
            mappings: Mappings::default(),
            endpoints: 0,
            generation,
        });
        there.endpoints += 1;
        match self.endpoints.iter_mut().find(|own| own.source == source) {
            Some(own) => own.domain = Some(domain),
            None => self.endpoints.push(Endpoint {
                source,
                domain: Some(domain),
                generation,
                hit: None,
            }),
        }
        Ok(had_access.then_some(Taken::Endpoint(source)))
    }

    /// Takes an endpoint out of its domain, which ceases to exist if it was the last.
    fn leave(&mut self, source: SourceId) {
        let generation = self.next_generation();
        let Some(own) = self.endpoints.iter_mut().find(|own| own.source == source) else {
            return;
        };
        own.generation = generation;
        own.hit = None;
        let Some(number) = own.domain.take() else {
            return;
        };
        let Some(domain) = self.domains.get_mut(&number) else {
            return;
        };
        domain.endpoints -= 1;
        if domain.endpoints == 0
            && let Some(gone) = self.domains.remove(&number)
            && !gone.mappings.is_empty()
        {
            self.freed.push(gone.mappings);
        }
    }

    fn map(
        &mut self,
        domain: u32,
        first: u64,
        last: u64,
        phys: u64,
        flags: u32,
    ) -> Result<(), Status> {
        if flags & !(MAP_READ | MAP_WRITE | MAP_MMIO) != 0 {
            return Err(Status::Inval);
        }
        let there = self.domains.get_mut(&domain).ok_or(Status::NoEnt)?;
        if there.is_bypass {
            return Err(Status::Inval);
        }
        let is_aligned = |at: u64| at.is_multiple_of(GRANULE);
        if !is_aligned(first) || !is_aligned(last.wrapping_add(1)) || !is_aligned(phys) {
            return Err(Status::Range);
        }
        if first > last {
            return Err(Status::Inval);
        }
        // Both below 2^64 - 1, so nothing wraps from here on.
        let fits = last <= INPUT_LAST && phys <= PHYS_LAST && last - first <= PHYS_LAST - phys;
        if !fits {
            return Err(Status::Range);
        }
        if first <= *MSI_WINDOW.end() && last >= *MSI_WINDOW.start() {
            return Err(Status::Inval);
        }
        if self.stats.mappings >= self.config.max_mappings as u64 {
            return Err(Status::NoMem);
        }
        let is_new = there.mappings.insert(Mapping {
            first,
            last,
            phys,
            can_read: flags & MAP_READ != 0,
            can_write: flags & MAP_WRITE != 0,
        });
        if !is_new {
            return Err(Status::Inval);
        }
        self.stats.mappings += 1;
        self.stats.maps += 1;
        Ok(())
    }

    fn unmap(&mut self, domain: u32, first: u64, last: u64) -> Result<Option<Taken>, Status> {
        let there = self.domains.get(&domain).ok_or(Status::NoEnt)?;
        if there.is_bypass || first > last {
            return Err(Status::Inval);
        }
        if there.mappings.would_split(first, last) {
            return Err(Status::Range);
        }
        self.stats.unmaps += 1;
        let is_any = there.mappings.first_in(first, last).is_some();
        Ok(is_any.then_some(Taken::Pages {
            domain,
            first,
            last,
        }))
    }

    // -- revocations ---------------------------------------------------------------------------

    /// Begins requests and goes on with revocations while the budget lasts; whether anything is left to do.
    fn run(&mut self, now: u64, sink: &mut impl UnitSink) -> bool {
        let mut budget = Budget::new(BUDGET);
        while !budget.is_spent() {
            if let Some(revocation) = self.under_way.take() {
                self.under_way = self.go_on(revocation, now, &mut budget, sink);
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
        self.free(&mut budget);
        self.cost += budget.spent();
        self.is_at_work()
    }

    fn is_at_work(&self) -> bool {
        self.under_way.is_some() || !self.queue.is_empty() || !self.freed.is_empty()
    }

    /// Does more of a revocation; what is left of it.
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
                since: now,
                is_overdue: false,
            });
        }
        None
    }

    /// Removes the mappings that are taken away, as the budget lasts; whether they are gone.
    fn remove(&mut self, taken: Taken, budget: &mut Budget) -> bool {
        let Taken::Pages {
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

    /// Frees what domains that are no more have left.
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
        // What an earlier revocation has found is not looked at again, and waited for by this one too.
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

    /// Finds the leases that no longer hold, as the budget lasts; whether all were looked at.
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
        // No memory is looked at, so nothing can be absent.
        answer.unwrap_or(true)
    }

    /// Answers requests whose leases have ended.
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
            if !waiting.is_overdue && now.saturating_sub(waiting.since) >= limit {
                waiting.is_overdue = true;
                is_any = true;
            }
        }
        if is_any {
            self.stats.drain_limits += 1;
            let sources = self.leases.stale_sources();
            sink.event(UnitEvent::DrainLimit { sources });
        }
    }

    // -- accesses ------------------------------------------------------------------------------

    #[cold]
    fn refuse(&mut self, source: SourceId, iova: Iova, perm: Perm, reason: Reason) -> DmaFault {
        self.stats.faults += 1;
        if self.refused.len() < MAX_REFUSED {
            self.refused.push_back(RefusedAccess {
                source,
                iova,
                perm,
                reason: reason as u8,
            });
        }
        DmaFault::Blocked { iova }
    }
}

/// Whether accesses of `source` may be concerned.
fn concerns(endpoints: &[Endpoint], taken: Taken, source: SourceId) -> bool {
    match taken {
        Taken::Pages { domain, .. } => endpoints
            .iter()
            .any(|own| own.source == source && own.domain == Some(domain)),
        Taken::Endpoint(endpoint) => endpoint == source,
        Taken::Everything => true,
    }
}

/// Where an access goes, without a trace.
fn look(
    endpoints: &[Endpoint],
    domains: &BTreeMap<u32, Domain>,
    is_bypass: bool,
    source: SourceId,
    iova: u64,
    perm: Perm,
) -> Result<Run, Reason> {
    let identity = Run {
        gpa: Gpa::new(iova),
        len: Iova::new(iova).left_in_page(),
    };
    let own = endpoints.iter().find(|own| own.source == source);
    let domain = own.and_then(|own| own.domain);
    let Some(domain) = domain.and_then(|domain| domains.get(&domain)) else {
        return match is_bypass {
            true => Ok(identity),
            false => Err(Reason::Domain),
        };
    };
    if domain.is_bypass {
        return Ok(identity);
    }
    let mapping = domain.mappings.find(iova).ok_or(Reason::Mapping)?;
    run_of(mapping, iova, perm)
}

/// An access to a mapping.
#[inline]
fn run_of(mapping: &Mapping, iova: u64, perm: Perm) -> Result<Run, Reason> {
    let may = match perm {
        Perm::Read => mapping.can_read,
        Perm::Write => mapping.can_write,
    };
    match may {
        true => Ok(Run {
            gpa: Gpa::new(mapping.to_phys(iova)),
            len: mapping.last - iova + 1,
        }),
        false => Err(Reason::Mapping),
    }
}

impl Iommu for PvIommu {
    #[inline]
    fn translate<M: PhysMem>(
        &mut self,
        _mem: &M,
        source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Access<Run> {
        let at = iova.raw();
        let Self {
            endpoints, domains, ..
        } = self;
        if let Some(own) = endpoints.iter_mut().find(|own| own.source == source)
            && let Some(domain) = own.domain.and_then(|domain| domains.get(&domain))
            && !domain.is_bypass
        {
            let found = match own.hit {
                Some((generation, hit)) if generation == domain.generation && hit.holds(at) => {
                    Some(hit)
                }
                _ => domain.mappings.find(at).copied(),
            };
            own.hit = found.map(|found| (domain.generation, found));
            if let Some(Ok(run)) = found.map(|found| run_of(&found, at, perm)) {
                return Ok(run);
            }
            return Err(self.refuse(source, iova, perm, Reason::Mapping).into());
        }
        let looked = look(
            &self.endpoints,
            &self.domains,
            self.is_bypass,
            source,
            at,
            perm,
        );
        looked.map_err(|reason| self.refuse(source, iova, perm, reason).into())
    }

    #[inline]
    fn generation(&self, source: SourceId) -> u64 {
        let Some(own) = self.endpoint(source) else {
            // It may be attached, or bypass be switched, at any time.
            return self.generation;
        };
        let domain = own.domain.and_then(|domain| self.domains.get(&domain));
        domain.map_or(own.generation, |domain| domain.generation)
    }

    fn attachment<M: PhysMem>(&self, _mem: &M, source: SourceId) -> Access<Attachment> {
        let number = self.endpoint(source).and_then(|own| own.domain);
        let domain = number.and_then(|number| Some((number, self.domains.get(&number)?)));
        Ok(match domain {
            None if self.is_bypass => Attachment::Off,
            None => Attachment::Absent,
            Some((_, domain)) if domain.is_bypass => Attachment::PassThrough,
            Some((number, _)) => Attachment::Domain(number),
        })
    }

    fn next_mapping<M: PhysMem>(
        &self,
        _mem: &M,
        source: SourceId,
        from: Iova,
        last: Iova,
        budget: &mut Budget,
    ) -> Access<Next> {
        let number = self.endpoint(source).and_then(|own| own.domain);
        let domain = number.and_then(|number| self.domains.get(&number));
        let Some(domain) = domain.filter(|domain| !domain.is_bypass) else {
            return Ok(Next::None);
        };
        let mut at = from.raw();
        while at <= last.raw() {
            if budget.is_spent() {
                return Ok(Next::Budget(Iova::new(at)));
            }
            budget.charge(Budget::ENTRY);
            let Some(found) = domain.mappings.first_in(at, last.raw()) else {
                break;
            };
            if found.can_read || found.can_write {
                let (first, end) = (found.first.max(at), found.last.min(last.raw()));
                return Ok(Next::Found(Found {
                    iova: Iova::new(first),
                    gpa: Gpa::new(found.to_phys(first)),
                    len: end - first + 1,
                    can_read: found.can_read,
                    can_write: found.can_write,
                }));
            }
            // Mappings end below 2^48.
            at = found.last + 1;
        }
        Ok(Next::None)
    }

    type Leases = LeaseTable;

    #[inline]
    fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    #[inline]
    fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases
    }
}

impl UnitControl for PvIommu {
    fn has_work(&mut self) -> bool {
        let leases = &self.leases;
        let has_ended = |waiting: &Waiting| !waiting.leases.iter().any(|&id| leases.is_stale(id));
        let may_answer = self.holds == 0 && self.waiting.iter().any(has_ended);
        self.is_at_work() || may_answer || !self.refused.is_empty()
    }

    fn deadline(&self) -> Option<u64> {
        let not_told = self.waiting.iter().filter(|waiting| !waiting.is_overdue);
        let first = not_told.map(|waiting| waiting.since).min()?;
        Some(first.saturating_add(self.config.drain_limit_ns))
    }

    fn release(&mut self, holds: u32) {
        self.holds = self.holds.saturating_sub(holds);
    }
}

impl RemappingUnit<Request> for PvIommu {
    type Iommu = Self;

    #[inline]
    fn iommu(&mut self) -> &mut Self {
        self
    }

    fn poll<M: PhysMem>(&mut self, _mem: &M, now: u64, sink: &mut impl UnitSink) -> UnitPoll {
        let is_busy = self.is_at_work() && self.run(now, sink);
        let has_answered = !self.waiting.is_empty() && self.answer(now, sink);
        while let Some(refused) = self.refused.pop_front() {
            sink.access_refused(refused);
        }
        UnitPoll {
            is_busy: is_busy || has_answered,
            cost: std::mem::take(&mut self.cost),
        }
    }

    fn command<M: PhysMem>(
        &mut self,
        command: Command<Request>,
        _mem: &M,
        now: u64,
        sink: &mut impl UnitSink,
    ) {
        self.queue.push_back(command);
        self.run(now, sink);
    }
}

#[cfg(test)]
mod tests;
