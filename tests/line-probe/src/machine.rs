//! Caches of simulated cores, limited to the ownership of lines.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Greatest number of simulated cores.
pub const CORES_MAX: usize = 256;

type Set = [u64; CORES_MAX / 64];

/// Hash of line numbers by one multiplication: cheap, since every access does a look-up; input is
/// not adversarial.
#[derive(Debug, Clone, Copy, Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_usize(usize::from(byte));
        }
    }

    fn write_usize(&mut self, number: usize) {
        let mixed = (self.0 ^ number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ mixed >> 32;
    }
}

/// Cores that have a copy of a line, and the number of its transfers.
#[derive(Debug, Clone, Copy, Default)]
struct Line {
    sharers: Set,
    transfers: u64,
}

/// Counts of a machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads and writes, counted per line.
    pub accesses: u64,
    /// Accesses to lines that no core had: memory serves them.
    pub cold: u64,
    /// Reads of a line that only other cores had.
    pub remote_reads: u64,
    /// Writes to a line that only other cores had.
    pub remote_writes: u64,
    /// Writes to a line that this core had and shared with others, whose copies are invalidated.
    pub upgrades: u64,
    /// Locks taken.
    pub locks: u64,
}

impl Counts {
    /// Returns the accesses that needed another core: the line was fetched from it, or its copy was
    /// invalidated.
    #[must_use]
    pub const fn transfers(&self) -> u64 {
        self.remote_reads + self.remote_writes + self.upgrades
    }
}

/// The caches of up to [`CORES_MAX`] cores, and the counts.
#[derive(Debug, Clone)]
pub struct Machine {
    core: usize,
    lines: HashMap<usize, Line, BuildHasherDefault<Mix>>,
    counts: Counts,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

impl Machine {
    /// Creates empty caches, with core 0 working.
    #[must_use]
    pub fn new() -> Self {
        Self {
            core: 0,
            lines: HashMap::default(),
            counts: Counts::default(),
        }
    }

    /// Makes `core` the working core.
    ///
    /// # Panics
    /// `core` is [`CORES_MAX`] or more.
    pub fn set_core(&mut self, core: usize) {
        assert!(core < CORES_MAX, "core {core} of {CORES_MAX}");
        self.core = core;
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Sets the counts to 0; the caches keep their lines.
    pub fn clear(&mut self) {
        self.counts = Counts::default();
        self.lines.values_mut().for_each(|line| line.transfers = 0);
    }

    /// Returns the lines with the most transfers, in descending order; at most `most`.
    #[must_use]
    pub fn hottest(&self, most: usize) -> Vec<(usize, u64)> {
        let lines = self.lines.iter().map(|(at, line)| (*at, line.transfers));
        let mut moved: Vec<_> = lines.filter(|(_, transfers)| *transfers > 0).collect();
        moved.sort_by_key(|(at, transfers)| (std::cmp::Reverse(*transfers), *at));
        moved.truncate(most);
        moved
    }

    /// Records that the working core reads `len` bytes at `at`.
    pub fn read(&mut self, at: usize, len: usize) {
        self.each(at, len, |line, word, bit, counts| {
            if line.sharers[word] & bit != 0 {
                return;
            }
            if line.sharers == Set::default() {
                counts.cold += 1;
            } else {
                counts.remote_reads += 1;
                line.transfers += 1;
            }
            line.sharers[word] |= bit;
        });
    }

    /// Records that the working core writes `len` bytes at `at`, or does an atomic
    /// read-modify-write.
    pub fn write(&mut self, at: usize, len: usize) {
        self.each(at, len, |line, word, bit, counts| {
            let mut own = Set::default();
            own[word] = bit;
            if line.sharers == own {
                return;
            }
            if line.sharers == Set::default() {
                counts.cold += 1;
            } else {
                line.transfers += 1;
                if line.sharers[word] & bit != 0 {
                    counts.upgrades += 1;
                } else {
                    counts.remote_writes += 1;
                }
            }
            line.sharers = own;
        });
    }

    /// Counts a lock that was taken.
    pub fn lock(&mut self) {
        self.counts.locks += 1;
    }

    fn each(
        &mut self,
        at: usize,
        len: usize,
        mut access: impl FnMut(&mut Line, usize, u64, &mut Counts),
    ) {
        if len == 0 {
            return;
        }
        let (word, bit) = (self.core / 64, 1 << (self.core % 64));
        for line in at / LINE..=at.saturating_add(len - 1) / LINE {
            self.counts.accesses += 1;
            access(
                self.lines.entry(line).or_default(),
                word,
                bit,
                &mut self.counts,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(accesses: &[(usize, char, usize)]) -> Counts {
        let mut machine = Machine::new();
        for (core, kind, at) in accesses {
            machine.set_core(*core);
            match kind {
                'r' => machine.read(*at, 8),
                _ => machine.write(*at, 8),
            }
        }
        machine.counts()
    }

    #[test]
    fn each_transition_counts_as_what_it_is() {
        let counts = run(&[
            (0, 'w', 64),  // no core had it
            (0, 'r', 72),  // same line, own
            (1, 'r', 64),  // from core 0: shared now
            (0, 'r', 64),  // still has its copy
            (0, 'w', 64),  // ends core 1's copy
            (1, 'w', 64),  // from core 0, which loses it
            (1, 'w', 127), // crosses into the next line: own, and one no core had
            (200, 'r', 0), // another line
        ]);
        let expected = Counts {
            accesses: 9,
            cold: 3,
            remote_reads: 1,
            remote_writes: 1,
            upgrades: 1,
            locks: 0,
        };
        assert_eq!(counts, expected);
        assert_eq!(counts.transfers(), 3);
    }

    #[test]
    fn the_line_that_bounces_is_named() {
        let mut machine = Machine::new();
        for round in 0..10 {
            for core in 0..2 {
                machine.set_core(core);
                machine.write(640, 8);
                machine.write(64 * core, 8);
            }
            if round == 0 {
                machine.clear();
            }
        }
        assert_eq!(machine.hottest(5), [(10, 18)]);
        assert_eq!(machine.counts().transfers(), 18);
    }
}
