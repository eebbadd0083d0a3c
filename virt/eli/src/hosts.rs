//! Vectors of the host's own (§3.5.3).
//!
//! Vectors are shared: an interrupt is identified by its vector and nothing else, so none may mean
//! two things. The host keeps to the highest class, behind the limit of the guest's table (§3.7.2:
//! *critical* interrupts). That class is the host's *alone* at the real local APIC: the guest's
//! vectors of that class have others there ([`alias`](crate::alias)). So nothing of the guest's is
//! ever in service above or beside one of the host's, and an interrupt of the host's is delivered
//! as soon as interrupts are enabled.

use crate::{Vector, VectorSet};

/// The lowest of the host's vectors; a guest in direct mode runs with a table that ends before it.
pub const CRITICAL: Vector = 0xf0;
/// The local APIC's spurious vector, which is no device's.
pub const SPURIOUS: Vector = 0xff;

/// Interrupts of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Its periodic tick.
    Tick,
    /// A message from another core.
    Message,
    /// A core that polls a device of the guest's has completed a request.
    Completion,
}

impl Source {
    const ALL: [Self; 3] = [Self::Tick, Self::Message, Self::Completion];

    /// Its vector.
    #[must_use]
    pub const fn vector(self) -> Vector {
        match self {
            Self::Tick => 0xf1,
            Self::Message => 0xf2,
            Self::Completion => 0xf3,
        }
    }

    /// That of a vector at the real local APIC, if it is the host's.
    #[must_use]
    pub fn of(vector: Vector) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|source| source.vector() == vector)
    }
}

/// Whether an interrupt of the host's is among those that are requested at the real local APIC;
/// `last` is its last request register, of the vectors from 0xe0 on.
#[must_use]
pub fn is_requested(last: u32) -> bool {
    let requested = VectorSet::from_words([0, 0, 0, 0, 0, 0, 0, last]);
    Source::ALL
        .into_iter()
        .any(|source| requested.contains(source.vector()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_vectors_are_of_the_highest_class_and_seen_in_the_last_register() {
        for source in Source::ALL {
            let vector = source.vector();
            assert!((CRITICAL..SPURIOUS).contains(&vector));
            assert_eq!(Source::of(vector), Some(source));
            assert!(is_requested(1 << (vector - 0xe0)));
        }
        let others = (0..32).filter(|bit| Source::of(0xe0 + bit).is_none());
        assert!(!is_requested(others.fold(0, |word, bit| word | 1 << bit)));
    }
}
