//! Vectors of the host's own, and where one goes that the guest or its device wants (§3.5.3).
//!
//! Vectors are shared: an interrupt is identified by its vector and nothing else, so none may mean
//! two things. The host keeps to the highest class, behind the limit of the guest's table (§3.7.2:
//! *critical* interrupts), and gives way there.

use crate::{Vector, VectorSet};

/// The lowest of the host's vectors; a guest in direct mode runs with a table that ends before it.
pub const CRITICAL: Vector = 0xf0;
/// The local APIC's spurious vector, which is no device's.
const SPURIOUS: Vector = 0xff;

/// Interrupts of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Its periodic tick.
    Tick,
    /// What another core tells it.
    Message,
}

const SOURCES: usize = 2;

/// The host gave up a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relocation {
    /// Whose.
    pub source: Source,
    /// Which, the guest's from now on.
    pub from: Vector,
    /// Which takes its place.
    pub to: Vector,
}

/// The host's vectors.
#[derive(Clone, Debug)]
pub struct Hosts {
    own: [(Source, Vector); SOURCES],
    /// The guest's, as far as it has said so.
    claimed: VectorSet,
}

impl Default for Hosts {
    fn default() -> Self {
        Self {
            own: [(Source::Tick, 0xf1), (Source::Message, 0xf2)],
            claimed: VectorSet::EMPTY,
        }
    }
}

impl Hosts {
    /// The vector of `source`.
    #[must_use]
    pub fn of(&self, source: Source) -> Vector {
        self.own
            .iter()
            .find(|own| own.0 == source)
            .map_or(SPURIOUS, |own| own.1)
    }

    /// Whose `vector` is, if it is the host's.
    #[must_use]
    pub fn source(&self, vector: Vector) -> Option<Source> {
        self.own.iter().find(|own| own.1 == vector).map(|own| own.0)
    }

    /// The guest uses `vector` from now on; if it was the host's, that one's source has another.
    ///
    /// # Errors
    /// The host has it and no other is free: the guest cannot have it.
    pub fn claim(&mut self, vector: Vector) -> Result<Option<Relocation>, Full> {
        let Some(at) = self.own.iter().position(|own| own.1 == vector) else {
            self.claimed.insert(vector);
            return Ok(None);
        };
        let is_free = |to: &Vector| {
            !self.claimed.contains(*to) && *to != vector && self.source(*to).is_none()
        };
        let to = (CRITICAL..SPURIOUS).find(is_free).ok_or(Full)?;
        let source = self.own[at].0;
        self.own[at].1 = to;
        self.claimed.insert(vector);
        Ok(Some(Relocation {
            source,
            from: vector,
            to,
        }))
    }
}

/// All vectors of the host's class are the guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_vector_that_the_guest_wants_is_relocated_until_there_is_no_other() {
        let mut hosts = Hosts::default();
        let tick = hosts.of(Source::Tick);
        assert_eq!(hosts.claim(0x41), Ok(None));
        let moved = hosts.claim(tick).unwrap().unwrap();
        assert_eq!((moved.source, moved.from), (Source::Tick, tick));
        assert_eq!(
            (hosts.of(Source::Tick), hosts.source(tick)),
            (moved.to, None)
        );
        assert_ne!(hosts.of(Source::Message), moved.to);
        // The guest wants them all: 15 are above the limit beside the spurious one, two stay the host's.
        let refused = (CRITICAL..SPURIOUS)
            .filter(|vector| hosts.claim(*vector).is_err())
            .count();
        assert_eq!(refused, SOURCES);
        let own = [Source::Tick, Source::Message].map(|source| hosts.of(source));
        assert!(own[0] != own[1] && own.iter().all(|own| (CRITICAL..SPURIOUS).contains(own)));
        assert_eq!(hosts.claim(own[0]), Err(Full));
    }
}
