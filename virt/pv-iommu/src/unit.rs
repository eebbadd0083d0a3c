//! The remapping unit: endpoints, domains, and the revocation of mappings under accesses in flight.
//!
//! Requests are executed in their order, one after the other. One that removes mappings or
//! attachments is a *revocation*:
//!
//! ```text
//! mappings removed,   ─▶ leases of the endpoints  ─▶ waits for the leases
//! a budget at a time     concerned rechecked         that became stale
//!
//! (requests behind       (likewise)                  (requests behind
//!  it wait)                                           it are executed)
//! ```
//! Each waiting request has a list of its own leases: those that its recheck has found stale, and
//! those that an earlier recheck has, in the same range. It is answered when they have ended,
//! regardless of the leases of other requests. A function that follows the mappings and holds an
//! invalidation holds all requests that wait at that time.
//!
//! A domain that ceases to exist is out of reach at once; its mappings are freed a budget at a
//! time.
//!
//! In addition, a MAP hints at accesses to come ([`hints`]): after its answer, in the same call.
//!
//! `requests`: checks and changes of each request. `revoke`: execution of requests in order, and
//! revocation of accesses in flight. `access`: translation. [`saved`]: the state that is kept while
//! the machine is paused.
//!
//! Thread: the owner's only.

mod access;
pub mod hints;
mod requests;
mod revoke;
pub mod saved;

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

use guest_mem::{Iova, LeaseTable, Leases, PhysMem, SourceId, Ticket};
use machine::{
    Command, Invalidation, RefusedAccess, RemappingUnit, Scope, TicketResult, UnitControl,
    UnitPoll, UnitSink,
};
use serde::{Deserialize, Serialize};

use crate::mappings::{Mapping, Mappings};
use crate::wire::{self, Request, Status};
use hints::{HintCounts, Hints};
use revoke::{Revocation, Waiting};

/// Parameters of a unit.
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
    /// Longest wait of a request for leases before their devices' requests are cancelled, in ns.
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
            drain_limit_ns: guest_mem::DRAIN_LIMIT_NS,
        }
    }
}

/// Counters since the unit was made, and current numbers of mappings and domains.
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
    /// Generation while it is attached to nothing.
    generation: u64,
    /// Generation and mapping that its last access found.
    hit: Option<(u64, Mapping)>,
}

/// Mappings that a revocation removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RevocationScope {
    /// Mappings of a domain.
    Pages { domain: u32, first: u64, last: u64 },
    /// All mappings that an endpoint reached.
    Endpoint(SourceId),
    /// All mappings that any endpoint reached.
    Everything,
}

impl RevocationScope {
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

/// Paravirtual remapping unit. See the module's head.
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
    /// Mappings of domains that were removed, to be freed.
    freed: Vec<Mappings>,
    /// Accesses refused since the last poll.
    refused: VecDeque<RefusedAccess>,
    generation: u64,
    hints: Hints,
    /// Estimated cost of the work that has not been charged yet, in ns.
    cost: u64,
    stats: Stats,
}

/// Cost of a request for a page that may be absent, in ns.
const HINT: u64 = 10;

/// Most refused accesses that are reported between two polls; those beyond are counted.
const MAX_REFUSED: usize = 64;

impl PvIommu {
    /// Creates a unit without domains, not in bypass mode.
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
            hints: Hints::default(),
            cost: 0,
            stats: Stats::default(),
        }
    }

    /// Sets the hints that its MAPs give.
    #[must_use]
    pub fn with_hints(mut self, hints: Hints) -> Self {
        self.hints = hints;
        self
    }

    /// Counters of its hints.
    pub fn hint_counts(&self) -> HintCounts {
        self.hints.counts()
    }

    /// Requests the pages that MAPs have hinted at, after their answers.
    fn follow_hints(&mut self, mem: &impl PhysMem) {
        self.cost += self.hints.ask(mem) * HINT;
    }

    /// Sets the endpoints.
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

    /// As [`wire::requester`], among its endpoints.
    fn known(&self, endpoint: u32) -> Result<SourceId, Status> {
        wire::requester(&self.config.endpoints, endpoint)
    }
}

impl UnitControl for PvIommu {
    fn has_work(&mut self) -> bool {
        let leases = &self.leases;
        let has_ended = |waiting: &Waiting| !waiting.leases.iter().any(|&id| leases.is_stale(id));
        let may_answer = self.holds == 0 && self.waiting.iter().any(has_ended);
        let is_told = self.hints.has_come() || !self.refused.is_empty();
        self.is_at_work() || may_answer || is_told
    }

    fn deadline(&self) -> Option<u64> {
        let limit = self.config.drain_limit_ns;
        let deadlines = self.waiting.iter();
        deadlines
            .filter_map(|waiting| waiting.drain.deadline(limit))
            .min()
    }

    fn release(&mut self, holds: u32) {
        self.holds = self.holds.saturating_sub(holds);
    }

    fn ticket_done(&mut self, ticket: Ticket, _result: TicketResult) {
        self.hints.answered(ticket);
    }
}

impl RemappingUnit<Request> for PvIommu {
    type Iommu = Self;

    #[inline]
    fn iommu(&mut self) -> &mut Self {
        self
    }

    fn poll<M: PhysMem>(&mut self, mem: &M, now: u64, sink: &mut impl UnitSink) -> UnitPoll {
        let is_busy = self.step(now, sink);
        self.follow_hints(mem);
        while let Some(refused) = self.refused.pop_front() {
            sink.access_refused(refused);
        }
        UnitPoll {
            is_busy,
            cost: std::mem::take(&mut self.cost),
        }
    }

    fn command<M: PhysMem>(
        &mut self,
        command: Command<Request>,
        mem: &M,
        now: u64,
        sink: &mut impl UnitSink,
    ) {
        self.begin(command, now, sink);
        self.follow_hints(mem);
    }
}

#[cfg(test)]
mod tests;
