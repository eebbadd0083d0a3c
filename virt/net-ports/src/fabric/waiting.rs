//! Queue of frames that wait for one receiver, in the order in which they came.
//!
//! A short, unmodified frame is stored in a slot of this queue's own ring. Any other frame is
//! stored once for all of its receivers in [`Shared::frames`](super::Shared::frames), and this
//! queue has its index there.

use std::collections::VecDeque;

use super::{QUEUE, SHORT};

/// One queued frame: the length of a short one in the next slot, or the index of a shared one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item {
    Short(u16),
    Place(usize),
}

/// See the module documentation. Bound: [`QUEUE`] frames, and as many slots of [`SHORT`] bytes: 256
/// KiB, allocated with the first short frame.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    items: VecDeque<Item>,
    /// Ring of [`QUEUE`] slots; empty before the first short frame.
    slots: Box<[[u8; SHORT]]>,
    /// Slot of the first short frame, and number of short frames.
    first: usize,
    short: usize,
}

impl Waiting {
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Appends a frame of at most [`SHORT`] bytes. Returns false if there is no room.
    #[inline]
    pub fn push_short(&mut self, bytes: &[u8]) -> bool {
        if self.items.len() == QUEUE {
            return false;
        }
        if self.slots.is_empty() {
            self.slots = vec![[0; SHORT]; QUEUE].into();
        }
        let at = (self.first + self.short) % QUEUE;
        self.slots[at][..bytes.len()].copy_from_slice(bytes);
        self.short += 1;
        self.items.push_back(Item::Short(bytes.len() as u16));
        true
    }

    /// Appends the shared frame at `place`. Returns false if there is no room.
    pub fn push(&mut self, place: usize) -> bool {
        let has_room = self.items.len() < QUEUE;
        if has_room {
            self.items.push_back(Item::Place(place));
        }
        has_room
    }

    /// Returns the bytes of the short frames at the front, up to the first shared one.
    #[inline]
    pub fn short(&self) -> impl Iterator<Item = &[u8]> {
        let items = self.items.iter().enumerate();
        items.map_while(|(nth, item)| match item {
            Item::Short(len) => Some(&self.slots[(self.first + nth) % QUEUE][..usize::from(*len)]),
            Item::Place(_) => None,
        })
    }

    /// Removes the first `count` frames, all of which are short.
    #[inline]
    pub fn drop_short(&mut self, count: usize) {
        self.items.drain(..count);
        self.short -= count;
        self.first = match self.short {
            // An empty queue restarts at slot 0, which is likely in the CPU's cache.
            0 => 0,
            _ => (self.first + count) % QUEUE,
        };
    }

    /// Returns the index of the frame at the front, if it is a shared one.
    pub fn front(&self) -> Option<usize> {
        match self.items.front() {
            Some(Item::Place(place)) => Some(*place),
            Some(Item::Short(_)) | None => None,
        }
    }

    /// Removes and returns that frame.
    pub fn pop_front(&mut self) -> Option<usize> {
        let place = self.front()?;
        self.items.pop_front();
        Some(place)
    }

    /// Returns the position in the queue of the shared frame at `place`.
    pub fn position(&self, place: usize) -> Option<usize> {
        let wanted = Item::Place(place);
        self.items.iter().position(|item| *item == wanted)
    }

    /// Removes the frame at position `at`, which is a shared one.
    pub fn remove(&mut self, at: usize) {
        self.items.remove(at);
    }

    /// Removes all frames, and returns the indices of the shared ones.
    pub fn clear(&mut self) -> Vec<usize> {
        (self.first, self.short) = (0, 0);
        let places = self.items.drain(..).filter_map(|item| match item {
            Item::Place(place) => Some(place),
            Item::Short(_) => None,
        });
        places.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seeded::Random;

    /// Compares the queue with a simple model: both kinds of frames are appended, taken in bursts,
    /// and removed from the middle.
    #[test]
    fn frames_leave_in_the_order_in_which_they_came() {
        let mut random = Random::new(1);
        let mut waiting = Waiting::default();
        let mut model: VecDeque<Result<Vec<u8>, usize>> = VecDeque::new();
        let mut next = 0;
        for phase in 0..40 {
            // Phases that fill and that empty the queue alternate.
            let fills = phase % 2 == 0;
            for _ in 0..1_500 {
                if random.below(4) < if fills { 3 } else { 1 } {
                    next += 1;
                    let frame = match random.below(3) {
                        0 => Err(next),
                        _ => Ok(vec![next as u8; 14 + random.below(200) as usize]),
                    };
                    let taken = match &frame {
                        Ok(bytes) => waiting.push_short(bytes),
                        Err(place) => waiting.push(*place),
                    };
                    assert_eq!(taken, model.len() < QUEUE);
                    if taken {
                        model.push_back(frame);
                    }
                } else if let Some(place) = waiting.front() {
                    assert_eq!(model.pop_front(), Some(Err(place)));
                    assert_eq!(waiting.pop_front(), Some(place));
                } else {
                    let most = random.below(33) as usize;
                    let short = waiting.short().take(most);
                    let short = Vec::from_iter(short.map(<[u8]>::to_vec));
                    for frame in &short {
                        assert_eq!(model.pop_front(), Some(Ok(frame.clone())));
                    }
                    waiting.drop_short(short.len());
                }
                if let Some(Err(place)) = model.get(random.below(64) as usize).cloned() {
                    let at = waiting.position(place).expect("it waits");
                    assert_eq!(model.remove(at), Some(Err(place)));
                    waiting.remove(at);
                }
                assert_eq!(waiting.len(), model.len());
            }
            if phase % 10 == 9 {
                let places = model.drain(..).filter_map(Result::err);
                assert_eq!(waiting.clear(), Vec::from_iter(places));
            }
        }
    }
}
