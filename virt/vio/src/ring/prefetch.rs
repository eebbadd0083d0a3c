//! Prefetch for the chains behind one that waits: memory that they will need is asked for
//! meanwhile, so that a row of requests over absent memory waits about as often as one of them
//! would.
//!
//! Each chain is read until something of it is absent, and again when that has come: an indirect
//! table first, then the memory that the device asks for. No chain is taken, and a ticket does
//! nothing but trigger the next look. Bounds: so many chains and so many bytes; each look is
//! charged to the visit.

use std::collections::VecDeque;

use guest_mem::{Access, Dma, Stop, Ticket};

use super::any::Ring;
use super::chain::Chain;
use super::lookahead::Lookahead;
use super::parked::RingStop;
use crate::poll_budget::{PollBudget, cost};

/// Bytes of chains that wait at a time: two of the longest block requests.
const MOST_BYTES: u64 = 8 << 20;

/// One chain that was looked at.
struct PrefetchedChain {
    /// Descriptors in the ring.
    descs: u16,
    bytes: u64,
    /// Ticket of memory that was asked for and has not come.
    waits: Option<Ticket>,
    /// Nothing of it is absent that could be asked for, when last looked.
    is_whole: bool,
}

/// The chains from the next one on that were looked at while it waits.
pub(crate) struct ChainPrefetch {
    chains: VecDeque<PrefetchedChain>,
    most: usize,
    must_look: bool,
}

impl ChainPrefetch {
    /// Looks at so many chains at most.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            chains: VecDeque::new(),
            most,
            must_look: false,
        }
    }

    /// The next chain waits.
    pub(crate) fn begin(&mut self) {
        self.must_look = true;
    }

    /// The next chain was consumed.
    #[inline]
    pub(crate) fn advance(&mut self) {
        if !self.chains.is_empty() {
            self.chains.pop_front();
        }
    }

    /// The next `chains` chains were consumed.
    #[inline]
    pub(crate) fn advance_by(&mut self, chains: usize) {
        if !self.chains.is_empty() {
            self.chains.drain(..chains.min(self.chains.len()));
        }
    }

    /// Memory has come, or never will.
    pub(crate) fn ticket_done(&mut self, ticket: Ticket) {
        let mut waiting = self.chains.iter_mut();
        if let Some(known) = waiting.find(|known| known.waits == Some(ticket)) {
            known.waits = None;
            self.must_look = true;
        }
    }

    /// Whether [`look`](Self::look) would look.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        self.must_look
    }

    /// Goes on with every chain of `ring`, which waits, that has something new. `ask` asks for all
    /// that is known to be wanted of a chain; `chain` is scratch.
    #[cold]
    pub(crate) fn look<D: Dma>(
        &mut self,
        ring: &mut Ring,
        dma: &mut D,
        chain: &mut Chain,
        visit: &mut PollBudget,
        mut ask: impl FnMut(&mut D, &Chain) -> Access<()>,
    ) {
        let mut ahead = Lookahead::default();
        let mut bytes = 0;
        for at in 0..self.most {
            if let Some(known) = self.chains.get(at)
                && (known.waits.is_some() || known.is_whole)
            {
                bytes += if known.is_whole { 0 } else { known.bytes };
                ring.skip(&mut ahead, known.descs);
                continue;
            }
            if visit.is_over() {
                // The next visit goes on.
                return;
            }
            if bytes > MOST_BYTES {
                break;
            }
            visit.charge(cost::REQUEST / 4);
            let waits = match ring.look_ahead(dma, &mut ahead, chain) {
                // The one that waits has asked for itself.
                Ok(true) if at == 0 => None,
                Ok(true) => ask(dma, chain).err(),
                // Its table: asked for as a whole.
                Err(RingStop::Access(stop @ Stop::Pending(_))) if chain.descs() != 0 => Some(stop),
                Ok(false) | Err(_) => break,
            };
            visit.charge(chain.descriptors() as u64 * cost::DESCRIPTOR);
            let waits = match waits {
                Some(Stop::Pending(ticket)) => Some(ticket),
                // A fault is its request's affair.
                Some(Stop::Fault(_)) | None => None,
            };
            let known = PrefetchedChain {
                descs: chain.descs(),
                bytes: chain.bytes(),
                waits,
                is_whole: waits.is_none(),
            };
            bytes += if known.is_whole { 0 } else { known.bytes };
            match self.chains.get_mut(at) {
                Some(old) => *old = known,
                None => self.chains.push_back(known),
            }
        }
        self.must_look = false;
    }
}
