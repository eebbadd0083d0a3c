//! Processors of the guest, as interrupt destinations address them.
//!
//! A destination is resolved to the guest's processors that it addresses, and a separate command
//! with the physical APIC id is composed for each. So a broadcast, a logical destination or a
//! shorthand never reaches a core that is not the guest's.

/// Largest number of processors of a guest.
pub const PROCESSORS_MAX: usize = 4;

/// APIC identifiers of the guest's processors, by processor number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Processors {
    ids: [u32; PROCESSORS_MAX],
    len: usize,
}

impl Processors {
    /// Creates the list from these identifiers, up to the bound.
    pub fn new(ids: impl IntoIterator<Item = u32>) -> Self {
        let mut all = Self::default();
        for (slot, id) in all.ids.iter_mut().zip(ids) {
            *slot = id;
            all.len += 1;
        }
        all
    }

    /// Number of processors.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The identifier of the processor `index`.
    #[must_use]
    pub fn id(&self, index: usize) -> Option<u32> {
        self.ids[..self.len].get(index).copied()
    }

    /// Returns the processors for whose identifiers `is_meant` is true.
    fn which(&self, mut is_meant: impl FnMut(u32) -> bool) -> Targets {
        let mut targets = Targets::default();
        for (index, id) in self.ids[..self.len].iter().enumerate() {
            if is_meant(*id) {
                targets.0 |= 1 << index;
            }
        }
        targets
    }

    /// Returns the set of all processors.
    #[must_use]
    pub fn all(&self) -> Targets {
        self.which(|_| true)
    }

    /// Returns the processors that an 8-bit destination of a message or an I/O APIC pin addresses.
    /// Physical: one identifier, or all for 0xff. Logical: a bit for each processor (flat model).
    #[must_use]
    pub fn of_byte(&self, to: u32, is_logical: bool) -> Targets {
        self.which(|id| match is_logical {
            true => to >> (id & 7) & 1 != 0,
            false => to == id || to == 0xff,
        })
    }

    /// Returns the processors that a 32-bit x2APIC destination addresses. All ones: all processors.
    /// Physical: one identifier. Logical: a cluster of sixteen, and a bit for each in it.
    #[must_use]
    pub fn of_word(&self, to: u32, is_logical: bool) -> Targets {
        self.which(|id| match is_logical {
            _ if to == u32::MAX => true,
            true => to >> 16 == id >> 4 && to >> (id & 15) & 1 != 0,
            false => to == id,
        })
    }
}

/// Set of the guest's processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Targets(u32);

impl Targets {
    /// Creates a set of one processor.
    #[must_use]
    pub const fn one(index: usize) -> Self {
        Self(1 << index)
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the processor `index` is among them.
    #[must_use]
    pub const fn contains(self, index: usize) -> bool {
        self.0 >> index & 1 != 0
    }

    /// Returns the set without the processor `index`.
    #[must_use]
    pub const fn without(self, index: usize) -> Self {
        Self(self.0 & !(1 << index))
    }

    /// Returns the lowest number in the set.
    #[must_use]
    pub fn first(self) -> Option<usize> {
        self.iter().next()
    }

    /// Returns the numbers in the set, in order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..PROCESSORS_MAX).filter(move |index| self.contains(*index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_names_processors_of_the_guests_and_no_others() {
        let guests = Processors::new([0, 1]);
        // For all 8-bit values, and in either mode.
        for to in 0..=0xff {
            for is_logical in [false, true] {
                let all = guests.of_byte(to, is_logical);
                assert!(all.iter().all(|index| index < 2), "{to:#x}");
                let named = match is_logical {
                    true => to & 3,
                    false if to == 0xff => 3,
                    false => {
                        if to < 2 {
                            1 << to
                        } else {
                            0
                        }
                    }
                };
                assert_eq!(all, Targets(named), "{to:#x} {is_logical}");
            }
        }
        assert_eq!(guests.of_word(0x1_0001, true), Targets(0));
        assert_eq!(guests.of_word(0xffff, true), Targets(3));
        assert_eq!(guests.of_word(u32::MAX, false), Targets(3));
        assert_eq!(guests.of_word(2, false), Targets(0));
        // Identifiers that differ from the processors' numbers.
        let guests = Processors::new([4, 0x12]);
        assert_eq!(guests.of_word(0x12, false), Targets(2));
        assert_eq!(guests.of_word(0x1_0004, true), Targets(2));
        assert_eq!(guests.of_word(0x10, true), Targets(1));
        assert_eq!((guests.id(1), guests.id(2)), (Some(0x12), None));
        assert_eq!(Processors::new(0..99).len(), PROCESSORS_MAX);
    }
}
