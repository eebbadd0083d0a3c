//! Interrupt vectors, and sets of them as the local APIC's registers have them.

/// An interrupt vector, 0 to 255; its upper half is its priority class.
pub type Vector = u8;

/// The priority class of a vector, or of a task-priority register: 0 to 15.
pub(crate) const fn class(priority: u8) -> u8 {
    priority >> 4
}

/// A set of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VectorSet([u64; 4]);

impl VectorSet {
    /// The empty set.
    pub const EMPTY: Self = Self([0; 4]);

    /// The set that eight registers of 32 bits have, the lowest vectors first: the local APIC's
    /// ISR, TMR or IRR.
    #[must_use]
    pub fn from_words(words: [u32; 8]) -> Self {
        Self([0, 1, 2, 3].map(|i| u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32))
    }

    /// The register `index`, 0 to 7; 0 for any other.
    #[must_use]
    pub fn word(&self, index: usize) -> u32 {
        let pair = self.0.get(index / 2).copied().unwrap_or(0);
        (pair >> (index % 2 * 32)) as u32
    }

    /// Puts `vector` in.
    pub fn insert(&mut self, vector: Vector) {
        self.0[usize::from(vector >> 6)] |= 1 << (vector & 63);
    }

    /// Removes `vector`; returns whether it was in the set.
    pub fn remove(&mut self, vector: Vector) -> bool {
        let was = self.contains(vector);
        self.0[usize::from(vector >> 6)] &= !(1 << (vector & 63));
        was
    }

    /// Returns whether `vector` is in the set.
    #[must_use]
    pub const fn contains(&self, vector: Vector) -> bool {
        self.0[(vector >> 6) as usize] >> (vector & 63) & 1 != 0
    }

    /// The highest, which has the highest priority.
    #[must_use]
    pub fn highest(&self) -> Option<Vector> {
        let (index, word) = (0..).zip(self.0).filter(|(_, word)| *word != 0).last()?;
        Some(index * 64 + 63 - word.leading_zeros() as u8)
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == [0; 4]
    }

    /// Returns the number of vectors in the set.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Those in either.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self([0, 1, 2, 3].map(|i| self.0[i] | other.0[i]))
    }

    /// Those that are not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self([0, 1, 2, 3].map(|i| self.0[i] & !other.0[i]))
    }

    /// All, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Vector> + use<> {
        let set = *self;
        (0..=Vector::MAX).filter(move |vector| set.contains(*vector))
    }
}

impl FromIterator<Vector> for VectorSet {
    fn from_iter<I: IntoIterator<Item = Vector>>(vectors: I) -> Self {
        let mut set = Self::EMPTY;
        for vector in vectors {
            set.insert(vector);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_what_was_put_in() {
        let mut set: VectorSet = [0, 31, 32, 63, 64, 255].into_iter().collect();
        assert_eq!((set.len(), set.highest()), (6, Some(255)));
        assert!(set.remove(255) && !set.remove(255));
        assert_eq!(set.highest(), Some(64));
        assert_eq!(
            (set.word(0), set.word(1), set.word(2), set.word(8)),
            (0x8000_0001, 0x8000_0001, 1, 0)
        );
        let words = [0, 1, 2, 3, 4, 5, 6, 7].map(|index| set.word(index));
        assert_eq!(VectorSet::from_words(words), set);
        assert_eq!(VectorSet::EMPTY.highest(), None);
        assert_eq!(
            set.without([0, 31].into_iter().collect()).iter().next(),
            Some(32)
        );
    }
}
