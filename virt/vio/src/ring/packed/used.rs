//! Giving chains back.

use guest_mem::{Access, Dma, WriteDescriptors};

use super::position::Position;
use super::{EVENT_DESC, EVENT_DISABLE, PackedQueue, REST, Used};
use crate::ring::chain::{DESC_F_WRITE, DESC_SIZE, Violation};
use crate::ring::order::CompletedChain;
use crate::ring::parked::RingStop;
use crate::ring::token::Token;

impl Used {
    /// Offset in the ring of the word that makes the descriptor used.
    fn offset(&self) -> u32 {
        DESC_SIZE * u32::from(self.at.idx()) + REST
    }

    /// `len`, `id` and `flags`. The length counts only beside WRITE (§2.8.5).
    fn word(&self) -> u64 {
        let write = if self.len == 0 { 0 } else { DESC_F_WRITE };
        let flags = self.at.used_flags() | write;
        u64::from(flags) << 48 | u64::from(self.id) << 32 | u64::from(self.len)
    }
}

impl PackedQueue {
    /// [`Ring::stage`](crate::ring::Ring::stage).
    #[inline]
    pub(in crate::ring) fn give_back(&mut self, token: Token, len: u32) {
        if let Some(order) = &mut self.order {
            order.end(CompletedChain { token, len });
            return;
        }
        let before = self.staged_descs.get();
        let descs = before + token.descs();
        assert!(
            descs <= self.outstanding.get(),
            "more chains staged than were taken"
        );
        self.staged.push(Used {
            at: self.next_used.advanced(before, self.size),
            id: token.id(),
            slot: token.slot(),
            len,
        });
        self.staged_descs.set(descs);
    }

    /// Used descriptors that the next publish covers.
    #[inline]
    pub(in crate::ring) fn staged(&self) -> u16 {
        match &self.order {
            Some(order) => order.ready(),
            // No more than were taken.
            None => self.staged.len() as u16,
        }
    }

    /// Publishes all staged descriptors to the driver. Returns the position at which they begin, if
    /// there are any. Parks on a stop, with nothing published.
    #[inline]
    pub(in crate::ring) fn publish<D: Dma>(
        &mut self,
        dma: &mut D,
    ) -> Result<Option<Position>, RingStop> {
        let chains = self.staged();
        if chains == 0 {
            return Ok(None);
        }
        if self.is_broken {
            return Err(Violation::Journal.into());
        }
        if let Some(order) = &self.order {
            self.staged.clear();
            for (run, CompletedChain { token, len }) in order.entries(self.journal.is_some()) {
                self.staged.push(Used {
                    at: self.next_used.advanced(run.start, self.size),
                    id: token.id(),
                    slot: token.slot(),
                    len,
                });
                self.staged_descs.set(run.end);
            }
        }
        let generation = dma.generation();
        let made = self.make_current(dma);
        self.park_state.or_park(made)?;
        // From here on nothing can stop: the journal's batch is closed before the ring is written.
        if let Some(journal) = &mut self.journal {
            for used in &self.staged {
                journal.complete(used.id, used.slot);
            }
            journal.advance();
        }
        self.write(generation);
        if let Some(journal) = &mut self.journal {
            journal.commit();
        }
        let old = self.next_used;
        self.next_used = old.advanced(self.staged_descs.get(), self.size);
        self.outstanding
            .set(self.outstanding.get() - self.staged_descs.get());
        self.taken.set(self.taken.get() - chains);
        self.staged.clear();
        self.staged_descs.set(0);
        if let Some(order) = &mut self.order {
            order.published();
        }
        Ok(Some(old))
    }

    /// Every window that the batch needs.
    #[inline]
    fn make_current<D: Dma>(&mut self, dma: &mut D) -> Access<()> {
        for used in &self.staged {
            self.desc_used.at(dma, used.offset())?;
            if self.desc_used.whole(dma.generation()).is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Stores all used descriptors but the first, then the first, which publishes all of them.
    #[inline]
    fn write(&mut self, generation: u64) {
        let Some((first, others)) = self.staged.split_first() else {
            return;
        };
        let whole = self.desc_used.whole(generation);
        match whole.and_then(|window| WriteDescriptors::new(window, self.size.into())) {
            Some(table) => {
                for used in others {
                    table.store_second_relaxed(used.at.idx(), used.word());
                }
            }
            None => {
                for used in others {
                    let (window, at) = self.desc_used.held(used.offset(), generation);
                    window.store_u64_relaxed(at, used.word());
                }
            }
        }
        let (window, at) = self.desc_used.held(first.offset(), generation);
        // Release: a driver that sees it sees the others and the buffers' bytes.
        window.store_u64(at, first.word());
    }

    /// Whether the driver wants an interrupt for the descriptors published from `old` on (§2.8.10).
    #[inline]
    pub(in crate::ring) fn wants_interrupt<D: Dma>(
        &mut self,
        dma: &mut D,
        old: Position,
    ) -> Access<bool> {
        let (window, at) = self.driver.at(dma, 0)?;
        // One load, as the two halves belong together.
        let event = window.load_u32(at);
        Ok(match (event >> 16) as u16 & 3 {
            EVENT_DISABLE => false,
            EVENT_DESC if self.event_idx => {
                let event = Position::from((event as u16 & 0x7fff, event & 0x8000 != 0));
                // Did we step over the event? One that is nowhere costs an interrupt.
                event.idx() >= self.size
                    || old.distance(event, self.size) < old.distance(self.next_used, self.size)
            }
            _ => true,
        })
    }
}
