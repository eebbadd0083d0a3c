//! Inflight tracking of split virtqueues: `QueueRegionSplit` of the vhost-user document.

use super::layout::{check_head, entry, head};
use super::{RecoverError, Region, State, TrackError, VERSION};
use crate::backend::RingLayout;

/// Tracker of the requests in flight of one split ring.
#[derive(Debug)]
pub struct Split<R> {
    region: R,
    /// State of each head.
    states: Vec<State>,
    /// Heads returned since the last commit, at most one entry per head.
    batch: Vec<u16>,
    last_batch_head: u16,
    /// `used_idx` of the region: the used ring's index before the batch.
    used_idx: u16,
    /// The document's "global counter".
    counter: u64,
}

/// State that an earlier back end process left in the region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitRecovery {
    /// Heads to be executed again, in the order in which they were taken. They are already marked
    /// as in flight, so [`Split::begin`] is not called for them. Their descriptors are still in the
    /// table: the driver does not change them until they are used.
    pub heads: Vec<u16>,
    /// Index of the next entry of the available ring to take, modulo 2^16: earlier ones are used,
    /// or in `heads`. It replaces the base of SET_VRING_BASE, which a front end can only guess
    /// after a crash.
    pub next_avail: u16,
}

impl<R: Region> Split<R> {
    /// Takes over a region, new or left by an earlier process. `desc_num` is the queue size of the
    /// inflight message, `used_idx` the current `idx` of the used ring. No other process may serve
    /// the ring any more.
    ///
    /// A region that was never used (version 0) starts from `used_idx` with nothing in flight. If
    /// the process dies within the call, a repeated call has the same result.
    ///
    /// # Errors
    /// The region is too small, or its content is impossible. Nothing is stored then.
    pub fn recover(
        mut region: R,
        desc_num: u16,
        used_idx: u16,
    ) -> Result<(Self, SplitRecovery), RecoverError> {
        if check_head(&region, RingLayout::Split, desc_num, desc_num)? {
            format(&mut region, desc_num, used_idx);
        }
        let last_batch_head = region.load_u16(head!(SplitHead.last_batch_head));
        if last_batch_head >= desc_num {
            return Err(RecoverError::corrupt("last_batch_head", last_batch_head));
        }
        let old_used_idx = region.load_u16(head!(SplitHead.used_idx));
        let mut states = vec![State::Free; usize::from(desc_num)];
        let mut taken = Vec::new();
        for (head, state) in (0..desc_num).zip(&mut states) {
            if region.load_u8(entry!(SplitHead, SplitDesc[head].inflight)) != 0 {
                *state = State::InFlight;
                taken.push((
                    region.load_u64(entry!(SplitHead, SplitDesc[head].counter)),
                    head,
                ));
            }
        }
        // The last batch was published, and some of its heads may still be marked as in flight.
        let batch = last_batch(
            &region,
            desc_num,
            last_batch_head,
            used_idx.wrapping_sub(old_used_idx),
        )?;
        for head in batch {
            states[usize::from(head)] = State::Free;
            region.store_u8(entry!(SplitHead, SplitDesc[head].inflight), 0);
        }
        region.store_u16(head!(SplitHead.used_idx), used_idx);

        taken.retain(|&(_, head)| states[usize::from(head)] == State::InFlight);
        taken.sort_unstable();
        let heads: Vec<u16> = taken.iter().map(|&(_, head)| head).collect();
        let recovery = SplitRecovery {
            // At most `desc_num` heads, which fits.
            next_avail: used_idx.wrapping_add(heads.len() as u16),
            heads,
        };
        let tracker = Self {
            region,
            states,
            batch: Vec::with_capacity(usize::from(desc_num)),
            last_batch_head,
            used_idx,
            counter: taken
                .last()
                .map_or(0, |&(counter, _)| counter.wrapping_add(1)),
        };
        Ok((tracker, recovery))
    }

    /// Step "When receiving available buffers": marks `head`, which was read from the available
    /// ring, as in flight. Called in that ring's order, and before the request is executed.
    ///
    /// A batch may be open, unless `head` is in it.
    ///
    /// # Errors
    /// A head outside the ring, or one in flight (the driver may not offer it before it is used,
    /// and it is used only with [`commit`](Self::commit)).
    pub fn begin(&mut self, head: u16) -> Result<(), TrackError> {
        match self.state(head)? {
            State::Free => {}
            State::InFlight | State::InBatch => return Err(TrackError::InFlight { head }),
        }
        self.region
            .store_u64(entry!(SplitHead, SplitDesc[head].counter), self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.region
            .store_u8(entry!(SplitHead, SplitDesc[head].inflight), 1);
        self.states[usize::from(head)] = State::InFlight;
        Ok(())
    }

    /// Step "When supplying used buffers", parts 1 to 3: adds `head` to the batch.
    ///
    /// # Errors
    /// A head that is not in flight, or in the batch already.
    pub fn complete(&mut self, head: u16) -> Result<(), TrackError> {
        match self.state(head)? {
            State::InFlight => {}
            State::Free | State::InBatch => return Err(TrackError::NotInFlight { head }),
        }
        self.region.store_u16(
            entry!(SplitHead, SplitDesc[head].next),
            self.last_batch_head,
        );
        self.region
            .store_u16(head!(SplitHead.last_batch_head), head);
        self.last_batch_head = head;
        self.states[usize::from(head)] = State::InBatch;
        self.batch.push(head);
        Ok(())
    }

    /// Returns the value to store to the used ring's `idx` for the current batch.
    pub fn used_idx_after(&self) -> u16 {
        // At most one entry per head, which fits.
        self.used_idx.wrapping_add(self.batch.len() as u16)
    }

    /// The last two parts of that step, after the used ring's `idx` was stored with release, as
    /// [`used_idx_after`](Self::used_idx_after) returns it: marks the heads of the batch as not in
    /// flight. Does nothing without a batch.
    pub fn commit(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        self.used_idx = self.used_idx_after();
        for head in self.batch.drain(..) {
            self.region
                .store_u8(entry!(SplitHead, SplitDesc[head].inflight), 0);
            self.states[usize::from(head)] = State::Free;
        }
        self.region
            .store_u16(head!(SplitHead.used_idx), self.used_idx);
    }

    /// Returns the region, unchanged.
    pub fn into_region(self) -> R {
        self.region
    }

    fn state(&self, head: u16) -> Result<State, TrackError> {
        let state = self.states.get(usize::from(head));
        state.copied().ok_or(TrackError::Head {
            head,
            // `recover` made one state per descriptor.
            desc_num: self.states.len() as u16,
        })
    }
}

/// Initializes a region that was never used. The version is stored last: it marks the region as
/// used.
fn format(region: &mut impl Region, desc_num: u16, used_idx: u16) {
    for head in 0..desc_num {
        region.store_u8(entry!(SplitHead, SplitDesc[head].inflight), 0);
    }
    region.store_u64(head!(SplitHead.features), 0);
    region.store_u16(head!(SplitHead.desc_num), desc_num);
    region.store_u16(head!(SplitHead.last_batch_head), 0);
    region.store_u16(head!(SplitHead.used_idx), used_idx);
    region.store_u16(head!(SplitHead.version), VERSION);
}

/// Returns the first `len` heads of the list that begins at `last_batch_head`.
fn last_batch(
    region: &impl Region,
    desc_num: u16,
    last_batch_head: u16,
    len: u16,
) -> Result<Vec<u16>, RecoverError> {
    if len > desc_num {
        return Err(RecoverError::corrupt("used_idx's distance", len));
    }
    let mut heads = Vec::with_capacity(usize::from(len));
    let mut head = last_batch_head;
    for _ in 0..len {
        if head >= desc_num {
            return Err(RecoverError::corrupt("next", head));
        }
        heads.push(head);
        head = region.load_u16(entry!(SplitHead, SplitDesc[head].next));
    }
    Ok(heads)
}
