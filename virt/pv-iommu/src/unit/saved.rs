//! State of a unit that is kept while its machine is paused: the result of its driver's requests.
//!
//! [`SavedUnit`] is plain and versioned: domains with their mappings (guest addresses as the driver
//! gave them, so it means the same on another host), the endpoints attached to each, and bypass.
//! This is the guest's view of a paravirtual IOMMU that a migration carries (PVIOMMU, Table 4).
//!
//! Derived, and therefore absent: the last hits, generations, and counters of this process.
//! *Absent by precondition*: requests, leases and holds. The machine is saved quiesced, and its
//! IOMMU function with no request taken; [`PvIommu::save`] has no state before that.
//!
//! [`PvIommu::restore`] distrusts the state: it comes from a file. It takes no mapping that a MAP
//! could not have made, and no more of them than the configuration allows.

use guest_mem::SourceId;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::requests::check_range;
use super::{Config, Domain, Endpoint, PvIommu};
use crate::mappings::{Mapping, Mappings};
use crate::wire::{self, DOMAIN_LAST};

/// Version that [`PvIommu::save`] writes.
pub const VERSION: u32 = 1;

/// A domain: its endpoints, and its mappings by their addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedDomain {
    /// Number, 0 to 65,535.
    pub number: u32,
    /// A bypass domain: addresses translate to themselves, and there are no mappings.
    pub is_bypass: bool,
    /// Requesters of the PCI functions attached to it, one at least.
    pub endpoints: Vec<u16>,
    /// Its mappings; none overlaps another.
    pub mappings: Vec<Mapping>,
}

/// A unit at rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedUnit {
    /// Layout of this structure: [`VERSION`].
    pub version: u32,
    /// Endpoints that are not attached reach memory.
    pub is_bypass: bool,
    /// Domains, by number.
    pub domains: Vec<SavedDomain>,
}

/// Reason why a saved state was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RestoreError {
    /// Written by another version: the one found.
    #[error("saved paravirtual IOMMU has version {0}, this program reads {VERSION}")]
    Version(u32),
    /// More domains, or more mappings, than the configuration allows.
    #[error("saved paravirtual IOMMU has more {what} than the {max} that it may have")]
    TooMany {
        /// The kind of item.
        what: &'static str,
        /// Most that there may be.
        max: usize,
    },
    /// A domain that no requests could have made.
    #[error("saved paravirtual IOMMU: domain {number} has impossible {field}")]
    Domain {
        /// Its number.
        number: u32,
        /// Which part of it.
        field: &'static str,
    },
}

impl PvIommu {
    /// The unit's state; none while a request is under way, waits, or is held.
    pub fn save(&self) -> Option<SavedUnit> {
        // In full, so that a new field does not compile until it is handled here.
        let Self {
            config: _,
            domains,
            endpoints,
            is_bypass,
            leases: _,
            queue,
            under_way,
            waiting,
            holds,
            freed: _,
            refused: _,
            generation: _,
            hints: _,
            cost: _,
            stats: _,
        } = self;
        if under_way.is_some() || !queue.is_empty() || !waiting.is_empty() || *holds != 0 {
            return None;
        }
        let domains = domains.iter().map(|(&number, domain)| {
            let attached = endpoints.iter().filter(|own| own.domain == Some(number));
            SavedDomain {
                number,
                is_bypass: domain.is_bypass,
                endpoints: attached.map(|own| own.source.0).collect(),
                mappings: domain.mappings.iter().copied().collect(),
            }
        });
        Some(SavedUnit {
            version: VERSION,
            is_bypass: *is_bypass,
            domains: domains.collect(),
        })
    }

    /// A unit with this state.
    ///
    /// # Errors
    /// `saved` is of another version, larger than `config` allows, or no state that requests to a
    /// unit with these endpoints lead to.
    pub fn restore(config: Config, saved: &SavedUnit) -> Result<Self, RestoreError> {
        if saved.version != VERSION {
            return Err(RestoreError::Version(saved.version));
        }
        let max = config.max_domains;
        if saved.domains.len() > max {
            let what = "domains";
            return Err(RestoreError::TooMany { what, max });
        }
        let mut unit = Self::new(config);
        unit.is_bypass = saved.is_bypass;
        for domain in &saved.domains {
            unit.restore_domain(domain)?;
        }
        Ok(unit)
    }

    fn restore_domain(&mut self, saved: &SavedDomain) -> Result<(), RestoreError> {
        let number = saved.number;
        let wrong = |field| Err(RestoreError::Domain { number, field });
        if number > DOMAIN_LAST || self.domains.contains_key(&number) {
            return wrong("number");
        }
        if saved.endpoints.is_empty() {
            return wrong("endpoints");
        }
        let generation = self.next_generation();
        for &endpoint in &saved.endpoints {
            let source = wire::requester(&self.config.endpoints, endpoint.into());
            let is_free = |source: SourceId| self.endpoint(source).is_none();
            let Some(source) = source.ok().filter(|source| is_free(*source)) else {
                return wrong("endpoints");
            };
            self.endpoints.push(Endpoint {
                source,
                domain: Some(number),
                generation,
                hit: None,
            });
        }
        if saved.is_bypass && !saved.mappings.is_empty() {
            return wrong("mappings");
        }
        let max = self.config.max_mappings;
        self.stats.mappings += saved.mappings.len() as u64;
        if self.stats.mappings > max as u64 {
            let what = "mappings";
            return Err(RestoreError::TooMany { what, max });
        }
        let mut mappings = Mappings::default();
        for mapping in &saved.mappings {
            let Mapping {
                first, last, phys, ..
            } = *mapping;
            if check_range(first, last, phys).is_err() || !mappings.insert(*mapping) {
                return wrong("mappings");
            }
        }
        let domain = Domain {
            is_bypass: saved.is_bypass,
            mappings,
            endpoints: saved.endpoints.len(),
            generation,
        };
        self.domains.insert(number, domain);
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests;
