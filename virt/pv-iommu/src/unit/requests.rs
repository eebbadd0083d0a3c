//! Checks and execution of each request (virtio 1.2 §5.13.6.3 to §5.13.6.6). A refused request
//! changes nothing.

use guest_mem::SourceId;

use super::{Domain, Endpoint, PvIommu, RevocationScope};
use crate::mappings::{Mapping, Mappings};
use crate::wire::{
    ATTACH_BYPASS, DOMAIN_LAST, GRANULE, INPUT_LAST, MAP_MMIO, MAP_READ, MAP_WRITE, MSI_WINDOW,
    PHYS_LAST, Request, Status,
};

impl PvIommu {
    /// Executes the part of a request that can be refused, which is all of it unless mappings are
    /// to be removed. Returns the scope of the mappings to be removed, if any.
    pub(super) fn carry_out(
        &mut self,
        request: Request,
    ) -> Result<Option<RevocationScope>, Status> {
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
                Ok(Some(RevocationScope::Endpoint(source)))
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
                Ok(was_bypass.then_some(RevocationScope::Everything))
            }
            Request::Reset => {
                for source in self.attached() {
                    self.leave(source);
                }
                Ok(Some(RevocationScope::Everything))
            }
        }
    }

    fn attached(&self) -> Vec<SourceId> {
        let attached = self.endpoints.iter().filter(|own| own.domain.is_some());
        attached.map(|own| own.source).collect()
    }

    /// Advances the generation of all endpoints: the memory that unattached ones reach has changed.
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
    ) -> Result<Option<RevocationScope>, Status> {
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
            // If the endpoint is the only one in its former domain, that domain ceases to exist.
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
        // An existing domain keeps its generation: an endpoint that leaves and returns finds the
        // domain's current mappings under it.
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
        Ok(had_access.then_some(RevocationScope::Endpoint(source)))
    }

    /// Removes an endpoint from its domain, which ceases to exist if this was its last endpoint.
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
        check_range(first, last, phys)?;
        if self.stats.mappings >= self.config.max_mappings as u64 {
            return Err(Status::NoMem);
        }
        let mapping = Mapping {
            first,
            last,
            phys,
            can_read: flags & MAP_READ != 0,
            can_write: flags & MAP_WRITE != 0,
        };
        if !there.mappings.insert(mapping) {
            return Err(Status::Inval);
        }
        if flags & MAP_MMIO == 0 {
            self.hints.take(&mapping);
        }
        self.stats.mappings += 1;
        self.stats.maps += 1;
        Ok(())
    }

    fn unmap(
        &mut self,
        domain: u32,
        first: u64,
        last: u64,
    ) -> Result<Option<RevocationScope>, Status> {
        let there = self.domains.get(&domain).ok_or(Status::NoEnt)?;
        if there.is_bypass || first > last {
            return Err(Status::Inval);
        }
        if there.mappings.would_split(first, last) {
            return Err(Status::Range);
        }
        self.stats.unmaps += 1;
        let is_any = there.mappings.first_in(first, last).is_some();
        Ok(is_any.then_some(RevocationScope::Pages {
            domain,
            first,
            last,
        }))
    }
}

/// Checks whether `first..=last` may be mapped to `phys`, regardless of other mappings
/// (§5.13.6.5.2).
///
/// # Errors
/// The status of a MAP request that may not.
pub(super) fn check_range(first: u64, last: u64, phys: u64) -> Result<(), Status> {
    let is_aligned = |at: u64| at.is_multiple_of(GRANULE);
    if !is_aligned(first) || !is_aligned(last.wrapping_add(1)) || !is_aligned(phys) {
        return Err(Status::Range);
    }
    if first > last {
        return Err(Status::Inval);
    }
    // Both limits are below 2^64 - 1, so nothing wraps from here on.
    let fits = last <= INPUT_LAST && phys <= PHYS_LAST && last - first <= PHYS_LAST - phys;
    if !fits {
        return Err(Status::Range);
    }
    if first <= *MSI_WINDOW.end() && last >= *MSI_WINDOW.start() {
        return Err(Status::Inval);
    }
    Ok(())
}
