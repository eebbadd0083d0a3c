//! Self-describing blocks: number, generation, seed, and a checksum of the whole block.
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | `EXITLESB` |
//! | 8..16 | block number, little-endian |
//! | 16..24 | generation: how often the block was written |
//! | 24..32 | seed of the run |
//! | 32..4088 | pattern of the three |
//! | 4088..4096 | checksum of the rest |

use std::fmt;

use crate::BLOCK;
use crate::pattern::{self, Checksum};

const MAGIC: &[u8; 8] = b"EXITLESB";
const SUM_AT: usize = BLOCK - 8;

/// Writes the block's content into `data`.
///
/// # Panics
/// If `data` is not one [`BLOCK`].
pub fn seal(data: &mut [u8], number: u64, generation: u64, seed: u64) {
    assert_eq!(data.len(), BLOCK, "one block");
    data[..8].copy_from_slice(MAGIC);
    for (at, field) in [(8, number), (16, generation), (24, seed)] {
        data[at..at + 8].copy_from_slice(&field.to_le_bytes());
    }
    pattern::fill(
        body_seed(number, generation, seed),
        0,
        &mut data[32..SUM_AT],
    );
    let sum = Checksum::of(&data[..SUM_AT]);
    data[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
}

/// Checks that `data` is this block in this generation.
///
/// # Errors
/// The difference found.
///
/// # Panics
/// If `data` is not one [`BLOCK`].
pub fn check(data: &[u8], number: u64, generation: u64, seed: u64) -> Result<(), Damage> {
    let Some(found) = identify(data) else {
        return Err(Damage::NoBlock { number });
    };
    if !found.is_whole {
        return Err(Damage::Torn { number });
    }
    for (what, found, expected) in [
        ("number", found.number, number),
        ("seed", found.seed, seed),
        ("generation", found.generation, generation),
    ] {
        if found != expected {
            return Err(Damage::Other {
                number,
                what,
                expected,
                found,
            });
        }
    }
    Ok(())
}

/// Identity that a block's header claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Number of the block.
    pub number: u64,
    /// Number of times that the block was written.
    pub generation: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Whether its checksum is right.
    pub is_whole: bool,
}

/// Decodes the header of `data`; `None` if it does not begin with the magic bytes.
///
/// # Panics
/// If `data` is not one [`BLOCK`].
#[must_use]
pub fn identify(data: &[u8]) -> Option<Identity> {
    assert_eq!(data.len(), BLOCK, "one block");
    let field = |at: usize| field(data, at);
    (&data[..8] == MAGIC).then(|| Identity {
        number: field(8),
        generation: field(16),
        seed: field(24),
        is_whole: field(SUM_AT) == Checksum::of(&data[..SUM_AT]),
    })
}

fn field(data: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(data[at..at + 8].try_into().expect("a slice of eight bytes"))
}

fn body_seed(number: u64, generation: u64, seed: u64) -> u64 {
    seed ^ number.rotate_left(20) ^ generation.rotate_left(44)
}

/// Difference between a block's content and the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// It was not written by this workload.
    NoBlock {
        /// The block read.
        number: u64,
    },
    /// Its checksum is wrong: parts of two writes, or corruption.
    Torn {
        /// The block read.
        number: u64,
    },
    /// It is whole, but another block, run or generation (a lost or misplaced write).
    Other {
        /// The block read.
        number: u64,
        /// Which field differs.
        what: &'static str,
        /// Expected value of the field.
        expected: u64,
        /// Value found.
        found: u64,
    },
}

impl fmt::Display for Damage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoBlock { number } => write!(out, "block {number}: not written by this workload"),
            Self::Torn { number } => write!(out, "block {number}: checksum does not match"),
            Self::Other {
                number,
                what,
                expected,
                found,
            } => {
                write!(out, "block {number}: {what} is {found}, not {expected}")
            }
        }
    }
}

impl std::error::Error for Damage {}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64, generation: u64, seed: u64) -> Vec<u8> {
        let mut data = vec![0; BLOCK];
        seal(&mut data, number, generation, seed);
        data
    }

    #[test]
    fn a_sealed_block_is_accepted_only_as_itself() {
        let data = block(5, 2, 9);
        assert_eq!(check(&data, 5, 2, 9), Ok(()));
        let other = |what, expected, found| {
            Err(Damage::Other {
                number: 5,
                what,
                expected,
                found,
            })
        };
        assert_eq!(check(&data, 5, 3, 9), other("generation", 3, 2));
        assert_eq!(check(&data, 5, 2, 8), other("seed", 8, 9));
        assert!(matches!(
            check(&data, 6, 2, 9),
            Err(Damage::Other { what: "number", .. })
        ));
    }

    #[test]
    fn every_flipped_byte_is_noticed() {
        let data = block(1, 1, 1);
        for at in 0..BLOCK {
            let mut bad = data.clone();
            bad[at] ^= 0x40;
            assert!(check(&bad, 1, 1, 1).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_block_torn_between_two_generations_is_noticed() {
        let mut data = block(1, 1, 1);
        data[2048..].copy_from_slice(&block(1, 2, 1)[2048..]);
        assert_eq!(check(&data, 1, 1, 1), Err(Damage::Torn { number: 1 }));
    }
}
