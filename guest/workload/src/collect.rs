//! Memory use of a copying garbage collector. Objects are allocated one behind the other until a
//! space is full; then the collector reads all of it in the order of addresses, copies the live
//! objects to the other space, and allocates there.
//!
//! Nothing leaves the process. A host that has less memory than both spaces take writes out garbage
//! and reads it in again; the mutator does not overwrite a whole page at once. Each object
//! describes itself; all live ones are checked by each collection, and at the end.
//!
//! After the paper's Eclipse. Left out: a disk, references between objects, and time.

use std::ops::Range;

use crate::age;
use crate::memory::{CHUNK, Memory, PAGE};
use crate::pattern::{self, Checksum, Random};
use crate::phases;

/// Granule of an object's size, bytes.
const UNIT: usize = 64;
/// Largest object, in units: objects have 64 bytes to 2 KiB.
const UNITS_MAX: u64 = 32;
/// Bytes of an object's head: its number, and its length.
const HEAD: usize = 16;
/// One object of this many lives until the next collection, and half of those to the end.
const LIVES: u64 = 4;
const CHUNK_BYTES: usize = CHUNK * PAGE;

/// Configuration of a run.
#[derive(Debug, Clone)]
pub struct CollectConfig {
    /// MiB of the heap: of both spaces together; even.
    pub mib: u64,
    /// Number of collections, a phase each.
    pub collections: u64,
    /// Seed of the objects.
    pub seed: u64,
}

/// Allocates and collects. Calls `mark` before each phase and after the last. Returns the checksum
/// of the objects that live at the end, or `None` where memory was too short.
///
/// # Errors
/// The first wrong object, or the system's error, as text.
pub fn run(config: &CollectConfig, mark: &mut dyn FnMut(u8)) -> Result<Option<u64>, String> {
    if !config.mib.is_multiple_of(2) {
        return Err(format!("{} MiB are no two halves", config.mib));
    }
    let space = || Space::new(config.mib / 2);
    let (mut from, mut to) = (space()?, space()?);
    phases::run(config.collections, mark, |phases| {
        let mut random = Random::new(config.seed);
        let mut next = 0;
        let mut sum = Checksum::default();
        for collection in 1..=config.collections {
            phases.begin();
            while from.allocate(next, 1 + random.below(UNITS_MAX), config.seed) {
                next += 1;
            }
            to.top = 0;
            let is_last = collection == config.collections;
            from.walk(config.seed, |number, object| {
                // As it was when it was allocated; older ones die more slowly.
                let of = if number + LIVES * 1000 < next {
                    2 * LIVES
                } else {
                    LIVES
                };
                if !number.is_multiple_of(of) {
                    return Ok(());
                }
                if is_last {
                    sum.add(&number.to_le_bytes());
                }
                to.take(object)
            })?;
            std::mem::swap(&mut from, &mut to);
        }
        from.walk(config.seed, |_, _| Ok(()))?;
        Ok(Some(sum.value()))
    })
}

/// Half of the heap: objects lie one behind the other, none in two chunks. A head of zeroes ends a
/// chunk.
#[derive(Debug)]
struct Space {
    memory: Memory,
    /// Bytes in use.
    top: usize,
}

impl Space {
    fn new(mib: u64) -> Result<Self, String> {
        let memory = age::map(age::pages(mib)?)?;
        Ok(Self { memory, top: 0 })
    }

    /// Reserves `len` bytes; `None` if the space is full.
    fn room(&mut self, len: usize) -> Option<&mut [u8]> {
        let left = self.end(self.top) - self.top;
        if left < len {
            // Not the one of an earlier use.
            if left > 0 {
                self.bytes_mut(self.top..self.top + UNIT)[..HEAD].fill(0);
            }
            self.top += left;
        }
        if self.top == self.memory.pages() * PAGE {
            return None;
        }
        let range = self.top..self.top + len;
        self.top += len;
        Some(self.bytes_mut(range))
    }

    /// Stores a new object; false if the space is full.
    fn allocate(&mut self, number: u64, units: u64, seed: u64) -> bool {
        let Some(object) = self.room(units as usize * UNIT) else {
            return false;
        };
        let len = object.len() as u64;
        object[..8].copy_from_slice(&(number + 1).to_le_bytes());
        object[8..HEAD].copy_from_slice(&len.to_le_bytes());
        pattern::fill(seed ^ number, 0, &mut object[HEAD..]);
        true
    }

    /// Stores a copy of an object.
    fn take(&mut self, object: &[u8]) -> Result<(), String> {
        let room = self.room(object.len());
        let room = room.ok_or("more is alive than a space holds")?;
        room.copy_from_slice(object);
        Ok(())
    }

    /// Calls `each` with the number and the bytes of each object, in the order of addresses.
    fn walk(
        &self,
        seed: u64,
        mut each: impl FnMut(u64, &[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut at = 0;
        while at < self.top {
            let head = self.bytes(at..at + UNIT);
            let word = |at: usize| {
                let word = head[at..].first_chunk().expect("a head has two words");
                u64::from_le_bytes(*word)
            };
            let (name, len) = (word(0), word(8) as usize);
            if name == 0 {
                at = self.end(at);
                continue;
            }
            let wrong = || {
                format!(
                    "the object at byte {at:#x} of its space, number {name}, is not as it was \
                     stored"
                )
            };
            let is_length = len.is_multiple_of(UNIT) && len > 0 && at + len <= self.end(at);
            let object = is_length.then(|| self.bytes(at..at + len));
            let object = object.ok_or_else(wrong)?;
            let number = name - 1;
            if pattern::first_difference(seed ^ number, 0, &object[HEAD..]).is_some() {
                return Err(wrong());
            }
            each(number, object)?;
            at += len;
        }
        Ok(())
    }

    /// Returns the end of the chunk that byte `at` lies in, or of the space.
    fn end(&self, at: usize) -> usize {
        ((at / CHUNK_BYTES + 1) * CHUNK_BYTES).min(self.memory.pages() * PAGE)
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        let (pages, within) = place(range);
        &self.memory.bytes(pages)[within]
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let (pages, within) = place(range);
        &mut self.memory.bytes_mut(pages)[within]
    }
}

/// Returns the pages that hold some bytes, and the position of the bytes in them.
fn place(range: Range<usize>) -> (Range<usize>, Range<usize>) {
    let pages = range.start / PAGE..range.end.div_ceil(PAGE);
    let start = range.start % PAGE;
    (pages, start..start + range.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: CollectConfig = CollectConfig {
        mib: 10,
        collections: 4,
        seed: 3,
    };

    #[test]
    fn a_collection_is_a_phase_and_the_sum_is_the_same_each_time() {
        let mut marks = Vec::new();
        let sum = run(&CONFIG, &mut |mark| marks.push(mark)).unwrap();
        assert_eq!(marks, [16, 17, 18, 19, 35]);
        assert!(sum.is_some());
        assert_eq!(run(&CONFIG, &mut |_| {}).unwrap(), sum);
        let other = CollectConfig { seed: 4, ..CONFIG };
        assert_ne!(run(&other, &mut |_| {}).unwrap(), sum);
    }

    #[test]
    fn objects_are_met_in_order_and_none_lies_in_two_chunks() {
        let mut space = Space::new(5).unwrap();
        let mut random = Random::new(1);
        let mut count = 0;
        while space.allocate(count, 1 + random.below(UNITS_MAX), 7) {
            count += 1;
        }
        let mut met = 0;
        space
            .walk(7, |number, _| {
                assert_eq!(number, met);
                met += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!(met, count);
        assert!(count > 2000, "{count} objects in 5 MiB");
    }

    #[test]
    fn a_changed_object_is_found_in_head_and_body() {
        let changed = |at: usize| {
            let mut space = Space::new(2).unwrap();
            space.allocate(0, 4, 7);
            space.allocate(1, 4, 7);
            space.bytes_mut(at..at + 1)[0] ^= 1;
            space.walk(7, |_, _| Ok(())).unwrap_err()
        };
        for at in [256, 264, 300, 511] {
            assert!(changed(at).contains("at byte 0x100"), "byte {at}");
        }
    }

    #[test]
    fn odd_heap_size_is_refused() {
        let odd = CollectConfig { mib: 3, ..CONFIG };
        assert!(run(&odd, &mut |_| {}).unwrap_err().contains("halves"));
    }
}
