//! The used ring that the driver finds after a publish, read as the specification has it.

use vio::ring::RingPosition;

use super::{MEMORY, World};

/// An end that was staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Staged {
    pub(super) head: u16,
    pub(super) len: u32,
}

fn word<const N: usize>(memory: &[u8], at: usize) -> [u8; N] {
    memory[at..at + N].try_into().expect("inside memory")
}

impl World {
    /// The driver did not interfere: `staged` must stand in the ring, from `before` on, and nothing
    /// else is new.
    pub(super) fn check_used(&self, before: RingPosition, old: &[u8]) {
        let memory = self.dma.contents();
        match (before, self.ring.position()) {
            (
                RingPosition::Split {
                    next_avail: old_avail,
                    next_used: first,
                },
                RingPosition::Split {
                    next_avail,
                    next_used,
                },
            ) => {
                let count = self.staged.len() as u16;
                assert_eq!(next_used, first.wrapping_add(count));
                assert_eq!(next_avail, old_avail);
                self.check_split(&memory, first, next_used);
            }
            (
                RingPosition::Packed {
                    avail: old_avail,
                    used: first,
                },
                RingPosition::Packed { avail, used },
            ) => {
                assert_eq!(avail, old_avail);
                self.check_packed(&memory, old, first, used);
            }
            other => panic!("{other:?}"),
        }
    }

    fn check_split(&self, memory: &[u8], first: u16, next: u16) {
        let used = self.config.used.raw() as usize;
        if used + 6 + 8 * usize::from(self.config.size) > MEMORY {
            return;
        }
        assert_eq!(u16::from_le_bytes(word(memory, used + 2)), next);
        // Elements were written when they were staged; the driver may have overwritten them since,
        // unless this is all that was done meanwhile. So they are compared only if the driver has
        // stored nothing since.
        if self.dma.stored() != self.stored_at_stage {
            return;
        }
        for (nth, staged) in (0..).zip(&self.staged) {
            let slot = usize::from(first.wrapping_add(nth) % self.config.size);
            let id = u32::from_le_bytes(word(memory, used + 4 + 8 * slot));
            let len = u32::from_le_bytes(word(memory, used + 8 + 8 * slot));
            assert_eq!((id, len), (staged.head.into(), staged.len));
        }
    }

    /// Used descriptors stand where their chains began; between them nothing is written.
    fn check_packed(&self, memory: &[u8], old: &[u8], first: (u16, bool), next: (u16, bool)) {
        let desc = self.config.desc.raw() as usize;
        let size = self.config.size;
        if desc + 16 * usize::from(size) > MEMORY {
            return;
        }
        let mut at = first;
        let mut found = Vec::new();
        let mut steps = 0;
        // A full lap ends where it began, with the other wrap counter.
        while at != next {
            let place = desc + 16 * usize::from(at.0);
            let rest = u64::from_le_bytes(word(memory, place + 8));
            let flags = (rest >> 48) as u16;
            let is_used = (flags & 1 << 7 != 0) == at.1 && (flags & 1 << 15 != 0) == at.1;
            let is_new = memory[place..place + 16] != old[place..place + 16];
            assert!(!is_new || is_used, "descriptor {} was written", at.0);
            assert_eq!(
                memory[place..place + 8],
                old[place..place + 8],
                "an address"
            );
            if is_used {
                found.push(((rest >> 32) as u16, rest as u32, flags & 2 != 0));
            }
            steps += 1;
            assert!(steps <= size, "further than one lap");
            at = if at.0 + 1 == size {
                (0, !at.1)
            } else {
                (at.0 + 1, at.1)
            };
        }
        // The driver's own descriptors behind the first of a chain may look used; ours are among
        // them, in order.
        let mut found = found.into_iter();
        for staged in &self.staged {
            let want = (staged.head, staged.len, staged.len != 0);
            assert!(found.any(|used| used == want), "{staged:?} is not shown");
        }
    }
}
