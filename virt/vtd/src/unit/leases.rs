//! Execution of an invalidation: drops cached entries, then finds the leases that it revoked.
//!
//! The order matters. The caches are dropped first, so that nothing is translated by an old entry
//! from then on. Then the *current* tables are walked, past every cache, for each live lease in
//! scope. A lease whose walk still gives its address delays no wait (stock Linux flushes whole
//! domains, lazily); one whose walk differs is stale until its device ends it, and holds back waits
//! ([`Unit::step`]).
//!
//! A walk may pend, and a step's budget may be spent: the invalidation then resumes where it
//! stopped, in the middle of a lease if need be. It is begun anew if the registers or the queue
//! request a different one by then.
//!
//! Cost: the leases in the 2 MiB of IOVA that it touches, or all of them, and a table walk for each
//! 4 KiB of a lease in question. Bound: a step's budget, in which all of it is counted.

use guest_mem::{Access, Budget, Iova, LeaseRecord, PAGE_SIZE, Part, PhysMem, SourceId, Stop};

use super::context::ContextCache;
use super::iotlb::MAX_PROBES;
use super::registers::MAX_ADDRESS_MASK;
use super::{Halt, Invalidation, Sink, Unit};
use crate::spec::invalidate::Granularity;

/// Scope of one invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// Everything: also the scope of a switch of translation.
    ContextGlobal,
    ContextDomain(u16),
    /// Source, and the function bits of it to ignore.
    ContextDevice(SourceId, u16),
    IotlbGlobal,
    IotlbDomain(u16),
    IotlbPages {
        did: u16,
        iova: Iova,
        pages: u64,
    },
}

impl Scope {
    /// Returns the scope of a context-cache invalidation; `None` for the reserved granularity.
    pub(super) fn of_context(g: Granularity, did: u16, sid: u16, fm: u8) -> Option<Self> {
        // FM counts ignored function bits from the most significant, bit 2.
        let ignored = [0, 4, 6, 7][usize::from(fm & 3)];
        match g {
            Granularity::GLOBAL => Some(Self::ContextGlobal),
            Granularity::DOMAIN => Some(Self::ContextDomain(did)),
            Granularity::SELECTIVE => Some(Self::ContextDevice(SourceId(sid), ignored)),
            _ => None,
        }
    }

    /// Returns the scope of an IOTLB invalidation of 2^`am` pages from page number `addr`; `None`
    /// for the reserved granularity, and for pages past the mask that is advertised.
    pub(super) fn of_iotlb(g: Granularity, did: u16, addr: u64, am: u8) -> Option<Self> {
        match g {
            Granularity::GLOBAL => Some(Self::IotlbGlobal),
            Granularity::DOMAIN => Some(Self::IotlbDomain(did)),
            Granularity::SELECTIVE if am <= MAX_ADDRESS_MASK => {
                let pages = 1 << am;
                Some(Self::IotlbPages {
                    did,
                    iova: Iova::new((addr & !(pages - 1)) * PAGE_SIZE),
                    pages,
                })
            }
            _ => None,
        }
    }

    fn has_source(ignored: u16, sid: SourceId, source: SourceId) -> bool {
        (sid.0 ^ source.0) & !ignored == 0
    }

    /// Returns whether leases of `source` may depend on the invalidated translations. A source
    /// whose context is not cached counts for every domain: its lease may be older than the
    /// context. One whose context *is* cached under another domain was rechecked by the
    /// invalidation of the context cache at the change.
    fn covers(&self, contexts: &ContextCache, source: SourceId) -> bool {
        match *self {
            // A domain's contexts may have been replaced in the cache since the lease began.
            Self::ContextGlobal | Self::ContextDomain(_) | Self::IotlbGlobal => true,
            Self::ContextDevice(sid, ignored) => Self::has_source(ignored, sid, source),
            Self::IotlbDomain(did) | Self::IotlbPages { did, .. } => contexts
                .get(source)
                .is_none_or(|context| context.did == did),
        }
    }

    /// Returns the scope in the form for [`Sink::invalidated`].
    fn invalidation(self) -> Invalidation {
        match self {
            Self::ContextGlobal | Self::IotlbGlobal => Invalidation::All,
            Self::ContextDomain(did) | Self::IotlbDomain(did) => Invalidation::Domain(did),
            Self::ContextDevice(sid, ignored) => Invalidation::Sources(sid, ignored),
            Self::IotlbPages { did, iova, pages } => {
                let len = pages * PAGE_SIZE;
                Invalidation::Pages { did, iova, len }
            }
        }
    }

    /// Returns the first and last invalidated address, if not all addresses are.
    fn range(&self) -> Option<(Iova, Iova)> {
        match *self {
            // Aligned to its length, so the last one does not wrap.
            Self::IotlbPages { iova, pages, .. } => {
                Some((iova, Iova::new(iova.raw() + (pages * PAGE_SIZE - 1))))
            }
            _ => None,
        }
    }
}

/// Requester of an invalidation. One of each may be under way, and none continues that of
/// another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskedBy {
    TranslationEnable,
    ContextCommand,
    IotlbInvalidate,
    Queue,
}

/// Cost of the lookup of one page of a page-selective flush, in ns.
const PROBE: u64 = 1;
/// Cost of a table walk, in ns.
const WALK: u64 = 25;

impl Unit {
    /// Performs an invalidation up to, not including, draining, or as much of it as `budget`
    /// allows.
    #[inline]
    pub(super) fn invalidate<M: PhysMem>(
        &mut self,
        mem: &M,
        by: AskedBy,
        scope: Scope,
        budget: &mut Budget,
        sink: &mut impl Sink,
    ) -> Result<(), Halt> {
        let goes_on = self.checking.is_some() && self.checking == Some((by, scope));
        if !goes_on {
            self.checking = None;
            self.flush(scope, budget);
            let holds = sink.invalidated(&scope.invalidation());
            self.holds = self.holds.saturating_add(holds);
            if !self.leases.has_any() {
                return Ok(());
            }
            self.leases.begin_recheck(scope.range());
            self.checking = Some((by, scope));
        }
        self.recheck(mem, scope, budget)
    }

    /// Drops the cached entries in scope.
    #[inline]
    fn flush(&mut self, scope: Scope, budget: &mut Budget) {
        self.generation += 1;
        match scope {
            Scope::IotlbPages { did, iova, pages } if pages <= MAX_PROBES => {
                if let Some((tag, _)) = self.contexts.domain(did) {
                    budget.charge(pages * PROBE);
                    self.iotlb.flush_pages(tag, iova, pages);
                }
            }
            _ => self.flush_contexts(scope),
        }
    }

    /// Without its context a domain has no epoch, and its entries match nothing any more.
    #[inline(never)]
    fn flush_contexts(&mut self, scope: Scope) {
        match scope {
            Scope::ContextGlobal | Scope::IotlbGlobal => self.contexts.flush_all(),
            Scope::ContextDomain(did) | Scope::IotlbDomain(did) | Scope::IotlbPages { did, .. } => {
                self.contexts.flush_domain(did)
            }
            Scope::ContextDevice(sid, ignored) => self
                .contexts
                .flush_sources(|source| Scope::has_source(ignored, sid, source)),
        }
    }

    /// Rechecks the leases that the invalidation under way concerns.
    #[inline(never)]
    fn recheck<M: PhysMem>(
        &mut self,
        mem: &M,
        scope: Scope,
        budget: &mut Budget,
    ) -> Result<(), Halt> {
        let walker = self.walker();
        let Self {
            leases,
            contexts,
            stats,
            te,
            ..
        } = self;
        let holds = |lease: &LeaseRecord, part: &mut Part, budget: &mut Budget| -> Access<bool> {
            if *te {
                walker.still_holds(mem, lease, part, &mut || {
                    stats.leases_rechecked += 1;
                    budget.charge(WALK);
                    !budget.is_spent()
                })
            } else {
                part.at = part.end;
                Ok(lease.gpa.raw() == lease.iova.raw())
            }
        };
        match leases.recheck(budget, |source| scope.covers(contexts, source), holds) {
            Ok(true) => {
                self.checking = None;
                Ok(())
            }
            Ok(false) => Err(Halt::Budget),
            Err(Stop::Pending(ticket)) => Err(Halt::Ticket(ticket)),
            Err(Stop::Fault(_)) => unreachable!("the table takes a fault of the walk as a change"),
        }
    }
}
