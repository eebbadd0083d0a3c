//! Content of a verified block: each sector contains its own number, the number of the write, and
//! the client.
//!
//! ```text
//! 0  magic        8  sector number (8 bytes)
//! 16 generation  20  client   24  checksum over everything else
//! 32 …           a pattern that depends on all of them
//! ```
//! All sectors of a block that is read back must have the same generation and client. A torn write,
//! a write to a wrong place, an old block and foreign data are distinguished.

use crate::queue::SECTOR;

const MAGIC: u64 = u64::from_ne_bytes(*b"exitless");
const SECTOR_LEN: usize = SECTOR as usize;
const CHECKSUM: usize = 24;
const PATTERN: usize = 32;

/// Identity of the write that produced a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// First sector of the block.
    pub sector: u64,
    /// Number of this write among those to the block, from 1.
    pub generation: u32,
    /// Number of the client that wrote it.
    pub client: u32,
}

/// Mismatch found in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Damage {
    #[error("sector {sector}: no stamp")]
    Magic { sector: u64 },
    #[error("sector {sector}: wrong checksum")]
    Checksum { sector: u64 },
    #[error("sector {sector} holds what belongs to sector {found}")]
    Misplaced { sector: u64, found: u64 },
    #[error("sector {sector} is of generation {found}, the block's first of {first}: torn")]
    Torn { sector: u64, first: u32, found: u32 },
    #[error("sector {sector} is client {found}'s, not {client}'s")]
    Foreign {
        sector: u64,
        client: u32,
        found: u32,
    },
    #[error("sector {sector} is of generation {found}, generation {expected} was acknowledged")]
    Generation {
        sector: u64,
        expected: u32,
        found: u32,
    },
    #[error("sector {sector} is not zero")]
    NotZero { sector: u64 },
}

/// FNV-1a over words, which detects any accidental damage in practice.
fn checksum(sector: &[u8]) -> u64 {
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("chunks of eight"));
    let words = sector.chunks_exact(8).map(word).enumerate();
    words
        .filter(|(at, _)| *at != CHECKSUM / 8)
        .fold(0xcbf2_9ce4_8422_2325, |sum: u64, (_, word)| {
            (sum ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
        })
}

impl Stamp {
    /// Fills a block, whose length is a multiple of a sector.
    pub fn fill(self, block: &mut [u8]) {
        for (number, sector) in (self.sector..).zip(block.chunks_exact_mut(SECTOR_LEN)) {
            sector[..8].copy_from_slice(&MAGIC.to_ne_bytes());
            sector[8..16].copy_from_slice(&number.to_ne_bytes());
            sector[16..20].copy_from_slice(&self.generation.to_ne_bytes());
            sector[20..24].copy_from_slice(&self.client.to_ne_bytes());
            let mut seed = number << 32 ^ u64::from(self.generation) << 8 ^ u64::from(self.client);
            for word in sector[PATTERN..].chunks_exact_mut(8) {
                seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                word.copy_from_slice(&seed.to_ne_bytes());
            }
            let sum = checksum(sector);
            sector[CHECKSUM..PATTERN].copy_from_slice(&sum.to_ne_bytes());
        }
    }

    /// Checks that a block has the content of this write.
    ///
    /// # Errors
    /// The mismatch of the first damaged sector. A block of another generation is whole; one with
    /// sectors of two generations is torn.
    pub fn check(self, block: &[u8]) -> Result<(), Damage> {
        let mut first = None;
        for (sector, bytes) in (self.sector..).zip(block.chunks_exact(SECTOR_LEN)) {
            let word =
                |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
            if word(0) != MAGIC {
                return Err(Damage::Magic { sector });
            }
            if word(CHECKSUM) != checksum(bytes) {
                return Err(Damage::Checksum { sector });
            }
            let number = word(8);
            if number != sector {
                let found = number;
                return Err(Damage::Misplaced { sector, found });
            }
            let half =
                |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
            let (found, owner) = (half(16), half(20));
            if owner != self.client {
                let (client, found) = (self.client, owner);
                return Err(Damage::Foreign {
                    sector,
                    client,
                    found,
                });
            }
            let first = *first.get_or_insert(found);
            if found != first {
                return Err(Damage::Torn {
                    sector,
                    first,
                    found,
                });
            }
        }
        match first {
            Some(found) if found != self.generation => Err(Damage::Generation {
                sector: self.sector,
                expected: self.generation,
                found,
            }),
            _ => Ok(()),
        }
    }
}

/// Checks that a block is zero.
///
/// # Errors
/// The first sector that is not zero.
pub fn check_zero(first: u64, block: &[u8]) -> Result<(), Damage> {
    for (sector, bytes) in (first..).zip(block.chunks_exact(SECTOR_LEN)) {
        if bytes.iter().any(|&byte| byte != 0) {
            return Err(Damage::NotZero { sector });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp {
        sector: 72,
        generation: 5,
        client: 3,
    };

    fn block(stamp: Stamp) -> Vec<u8> {
        let mut block = vec![0; 4096];
        stamp.fill(&mut block);
        block
    }

    /// The first half of one block and the second of another.
    fn halves(first: Stamp, second: Stamp) -> Vec<u8> {
        [&block(first)[..2048], &block(second)[2048..]].concat()
    }

    #[test]
    fn each_damage_has_its_name() {
        let (sector, found) = (72, 4);
        let old = Stamp {
            generation: found,
            ..STAMP
        };
        let elsewhere = Stamp {
            sector: 80,
            ..STAMP
        };
        let other = Stamp {
            client: found,
            ..STAMP
        };
        let mut flipped = block(STAMP);
        flipped[1000] ^= 4;
        let torn = |first, found| Damage::Torn {
            sector: 76,
            first,
            found,
        };
        let lost = Damage::Generation {
            sector,
            expected: 5,
            found,
        };
        let foreign = Damage::Foreign {
            sector,
            client: 3,
            found,
        };
        for (block, damage) in [
            (flipped, Damage::Checksum { sector: 73 }),
            (vec![0; 4096], Damage::Magic { sector }),
            (block(elsewhere), Damage::Misplaced { sector, found: 80 }),
            (block(other), foreign),
            (block(old), lost),
            (halves(STAMP, old), torn(5, 4)),
            (halves(old, STAMP), torn(4, 5)),
        ] {
            assert_eq!(STAMP.check(&block), Err(damage));
        }
        assert_eq!(STAMP.check(&block(STAMP)), Ok(()));
    }

    #[test]
    fn zeroes_are_told_from_anything_else() {
        assert_eq!(check_zero(1, &[0; 1024]), Ok(()));
        assert_eq!(
            check_zero(1, &block(STAMP)),
            Err(Damage::NotZero { sector: 1 })
        );
    }
}
