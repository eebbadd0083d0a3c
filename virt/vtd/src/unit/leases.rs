//! What an invalidation does: drop cached entries, then find the leases it revoked.
//!
//! The order is the point. First the caches, so that nothing is translated by an old entry from here
//! on; then a walk of the *current* tables, past every cache, for each live lease in scope. A lease
//! whose walk still gives its address delays nobody (stock Linux flushes whole domains, lazily); one
//! whose walk differs is stale until its device ends it, and holds back waits ([`Unit::step`]).
//!
//! A walk may pend. The invalidation is then begun again when the ticket is done: flushing twice and
//! marking twice are the same as once.
//!
//! Cost: live leases × one table walk at most. Bound: `Config::max_leases` walks of six reads.

use guest_mem::{Access, Iova, LeaseRecord, PAGE_SIZE, PhysMem, SourceId, Stop, Ticket};

use super::Unit;
use super::context::ContextCache;
use super::iotlb::MAX_PROBES;
use super::registers::MAX_ADDRESS_MASK;
use crate::spec::invalidate::Granularity;

/// What one invalidation covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// Everything: also what a switch of translation covers.
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
    /// Of a context-cache invalidation; `None` for the reserved granularity.
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

    /// Of an IOTLB invalidation of 2^`am` pages from page number `addr`; `None` for the reserved
    /// granularity, and for pages past the mask that is advertised.
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

    /// Whether a lease may depend on what is invalidated. A source whose context is not cached counts
    /// for every domain: its lease may be older than the context. One whose context *is* cached under
    /// another domain was rechecked when the context cache was told of the change.
    fn covers(&self, contexts: &ContextCache, lease: &LeaseRecord) -> bool {
        let in_domain = |did| {
            contexts
                .get(lease.source)
                .is_none_or(|context| context.did == did)
        };
        match *self {
            // A domain's contexts may have been replaced in the cache since the lease began.
            Self::ContextGlobal | Self::ContextDomain(_) | Self::IotlbGlobal => true,
            Self::ContextDevice(sid, ignored) => Self::has_source(ignored, sid, lease.source),
            Self::IotlbDomain(did) => in_domain(did),
            Self::IotlbPages { did, iova, pages } => {
                let (start, last) = (iova.raw(), iova.raw() + (pages * PAGE_SIZE - 1));
                // A lease was translated page by page, so it does not wrap; a zero length covers nothing.
                let lease_last = lease
                    .iova
                    .raw()
                    .saturating_add(u64::from(lease.len).saturating_sub(1));
                in_domain(did) && lease.iova.raw() <= last && start <= lease_last
            }
        }
    }
}

impl Unit {
    /// Performs an invalidation up to, not including, draining.
    pub(super) fn invalidate<M: PhysMem>(&mut self, mem: &M, scope: Scope) -> Result<(), Ticket> {
        self.generation += 1;
        match scope {
            // Without its context a domain has no epoch, and its entries match nothing any more.
            Scope::ContextGlobal | Scope::IotlbGlobal => self.contexts.flush_all(),
            Scope::ContextDomain(did) | Scope::IotlbDomain(did) => self.contexts.flush_domain(did),
            Scope::ContextDevice(sid, ignored) => self
                .contexts
                .flush_sources(|source| Scope::has_source(ignored, sid, source)),
            Scope::IotlbPages { did, pages, .. } if pages > MAX_PROBES => {
                self.contexts.flush_domain(did);
            }
            Scope::IotlbPages { did, iova, pages } => {
                if let Some(tag) = self.contexts.tag_of(did) {
                    self.iotlb.flush_pages(tag, iova, pages);
                }
            }
        }
        self.recheck(mem, scope)
    }

    fn recheck<M: PhysMem>(&mut self, mem: &M, scope: Scope) -> Result<(), Ticket> {
        if self.leases.is_empty() {
            return Ok(());
        }
        let walker = self.walker();
        let Self {
            leases,
            contexts,
            stats,
            te,
            ..
        } = self;
        let holds = |lease: &LeaseRecord| -> Access<bool> {
            stats.leases_rechecked += 1;
            if *te {
                walker.still_holds(mem, lease)
            } else {
                Ok(lease.gpa.raw() == lease.iova.raw())
            }
        };
        match leases.recheck(|lease| scope.covers(contexts, lease), holds) {
            Err(Stop::Pending(ticket)) => Err(ticket),
            // A fault of the walk was taken as "changed" by the table.
            Ok(()) | Err(Stop::Fault(_)) => Ok(()),
        }
    }
}
