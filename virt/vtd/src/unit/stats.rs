//! Counters of one unit: owner-local, never reset by the guest.

use serde::{Deserialize, Serialize};

use super::leases::Scope;

/// Counters of a unit since it was made. All fields count events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Translations answered from the IOTLB.
    pub iotlb_hits: u64,
    /// Translations that walked second-level tables (pends walk again and count again).
    pub iotlb_misses: u64,
    /// Translations passed through, or made while translation was off.
    pub untranslated: u64,
    /// Root and context entries read.
    pub context_walks: u64,
    /// Context-cache invalidations, any granularity.
    pub context_invalidations: u64,
    /// IOTLB invalidations of everything.
    pub global_invalidations: u64,
    /// IOTLB invalidations of a domain.
    pub domain_invalidations: u64,
    /// IOTLB invalidations of pages.
    pub page_invalidations: u64,
    /// Wait descriptors completed.
    pub waits: u64,
    /// Wait descriptors that had to wait for leases.
    pub waits_parked: u64,
    /// Times a wait passed the drain limit.
    pub drain_limits: u64,
    /// Table walks made to see whether a lease still holds.
    pub leases_rechecked: u64,
    /// Faults given a recording register.
    pub faults_recorded: u64,
    /// Faults equal to one that was still pending.
    pub faults_collapsed: u64,
    /// Faults lost to overflow.
    pub faults_dropped: u64,
    /// Faults silenced by FPD.
    pub faults_silent: u64,
    /// Times the invalidation queue stopped with IQE.
    pub queue_errors: u64,
    /// Interrupt messages sent.
    pub messages: u64,
    /// Register writes taken, from any front end.
    pub register_writes: u64,
}

impl Stats {
    pub(super) fn count(&mut self, scope: Scope) {
        let counter = match scope {
            Scope::ContextGlobal | Scope::ContextDomain(_) | Scope::ContextDevice(..) => {
                &mut self.context_invalidations
            }
            Scope::IotlbGlobal => &mut self.global_invalidations,
            Scope::IotlbDomain(_) => &mut self.domain_invalidations,
            Scope::IotlbPages { .. } => &mut self.page_invalidations,
        };
        *counter += 1;
    }
}
