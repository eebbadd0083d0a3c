//! Translation of accesses, and queries about it by other functions.

use std::collections::BTreeMap;

use guest_mem::{
    Access, Attachment, Budget, DmaFault, Found, Gpa, Iommu, Iova, LeaseTable, Next, Perm, PhysMem,
    Run, SourceId,
};
use machine::RefusedAccess;

use super::{Domain, Endpoint, MAX_REFUSED, PvIommu};
use crate::mappings::Mapping;
use crate::wire::Reason;

impl PvIommu {
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

/// Returns the translation of an access, without recording a refusal.
pub(super) fn look(
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
