//! Vectors that the guest's interrupts have at the real local APIC.
//!
//! A vector of the guest's is its own there, unless it is of the host's class, or another one's
//! alias already: then it gets an *alias*, the highest below that class that the guest has not
//! claimed. An interrupt that comes with an alias is always acknowledged by the host, which
//! requests the guest's vector virtually; so an alias is never delivered directly.
//!
//! A claim is permanent. A guest that has used all vectors has none left for aliases; an interrupt
//! that would need one is masked then.

use crate::gate::FIRST_INTERRUPT;
use crate::hosts::CRITICAL;
use crate::{Vector, VectorSet};

/// No vector is left for an alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Map from the guest's vectors to those at the real local APIC.
#[derive(Clone, Debug)]
pub struct Aliases {
    /// Claimed, and the same there.
    same: VectorSet,
    /// Claimed, with an alias.
    aliased: VectorSet,
    /// By the guest's vector, of those that are aliased.
    alias: [Vector; 256],
    /// Aliases.
    used: VectorSet,
    /// By the alias.
    guests: [Vector; 256],
}

impl Default for Aliases {
    fn default() -> Self {
        Self {
            same: VectorSet::EMPTY,
            aliased: VectorSet::EMPTY,
            alias: [0; 256],
            used: VectorSet::EMPTY,
            guests: [0; 256],
        }
    }
}

impl Aliases {
    /// The guest uses `vector`, which is no exception's, from now on: which one it is at the real
    /// local APIC.
    ///
    /// # Errors
    /// It would need an alias, and there is none.
    pub fn claim(&mut self, vector: Vector) -> Result<Vector, Full> {
        if self.aliased.contains(vector) || self.same.contains(vector) {
            return Ok(self.real(vector));
        }
        if vector < CRITICAL && !self.used.contains(vector) {
            self.same.insert(vector);
            return Ok(vector);
        }
        let is_free = |alias: &Vector| !self.same.contains(*alias) && !self.used.contains(*alias);
        let alias = (FIRST_INTERRUPT..CRITICAL)
            .rev()
            .find(is_free)
            .ok_or(Full)?;
        self.aliased.insert(vector);
        self.alias[usize::from(vector)] = alias;
        self.used.insert(alias);
        self.guests[usize::from(alias)] = vector;
        Ok(alias)
    }

    /// The guest's `vector` at the real local APIC.
    #[must_use]
    pub const fn real(&self, vector: Vector) -> Vector {
        if self.aliased.contains(vector) {
            self.alias[vector as usize]
        } else {
            vector
        }
    }

    /// The guest's vector of an interrupt that came as `real`.
    #[must_use]
    pub const fn guests(&self, real: Vector) -> Vector {
        if self.used.contains(real) {
            self.guests[real as usize]
        } else {
            real
        }
    }

    /// Number of vectors that have an alias.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.aliased.len()
    }

    /// Whether none has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.aliased.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seeded::Random;

    #[test]
    fn nothing_of_the_guests_has_a_vector_of_the_hosts_class_and_no_two_the_same() {
        for seed in 1..200 {
            let mut random = Random::new(seed);
            let mut aliases = Aliases::default();
            let mut claimed = [None; 256];
            for _ in 0..400 {
                let vector = match random.chance(0.3) {
                    true => 0xf0 + random.below(16) as u8,
                    false => 32 + random.below(224) as u8,
                };
                let had = claimed[usize::from(vector)];
                let Ok(real) = aliases.claim(vector) else {
                    // Only a full table fails.
                    let reals = claimed.iter().flatten().count();
                    assert_eq!(reals, usize::from(CRITICAL - FIRST_INTERRUPT));
                    assert_eq!(had, None);
                    continue;
                };
                // For good.
                assert!(had.is_none_or(|had| had == real));
                claimed[usize::from(vector)] = Some(real);
                assert!((FIRST_INTERRUPT..CRITICAL).contains(&real));
                for (other, its) in (0..=255).zip(claimed) {
                    assert!(
                        other == vector || its != Some(real),
                        "{vector:#x} {other:#x}"
                    );
                }
                assert_eq!((aliases.real(vector), aliases.guests(real)), (real, vector));
            }
        }
    }

    #[test]
    fn a_vector_that_is_an_alias_already_gets_one_itself() {
        let mut aliases = Aliases::default();
        assert_eq!(aliases.claim(0xef), Ok(0xef));
        assert_eq!(aliases.claim(0xf1), Ok(0xee));
        assert_eq!(aliases.claim(0xee), Ok(0xed));
        assert_eq!(aliases.guests(0xee), 0xf1);
        assert_eq!(aliases.guests(0xed), 0xee);
        assert_eq!(aliases.claim(0xf1), Ok(0xee));
        assert_eq!(aliases.len(), 2);
    }
}
