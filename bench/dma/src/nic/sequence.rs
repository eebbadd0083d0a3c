//! The maps and unmaps of the load, packet by packet: made before a run, replayed in it, over and
//! over.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use dma_trace::reuse::{self, Reuse};
use dma_trace::{Access, Action, Event, Trace};

use crate::measure::Random;

/// Buffers of the receive ring.
pub const RING: usize = 512;
/// Transmissions that complete together.
pub const BURST: usize = 32;
/// Packets of a sequence: half received, half sent, whole turns of the ring, whole bursts.
pub const PACKETS: usize = 1 << 16;
/// Packets that a buffer is held after its unmap, on average.
const HELD: f64 = 64.0;

/// The recording that is replayed: of the two the one with less reuse.
const RECORDED: &str = include_str!("../../traces/vmxnet3-6.1.0.txt");

/// One step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Map a buffer.
    Map {
        /// Place of its mapping: the ring's slots first, then the burst's.
        slot: u32,
        /// First page.
        page: u64,
        /// Pages.
        pages: u32,
        /// Sent, not received.
        is_sent: bool,
    },
    /// Unmap what a slot holds.
    Unmap {
        /// The slot.
        slot: u32,
    },
    /// Work on a packet.
    Packet,
}

/// Origin of pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// The recording.
    Recorded,
    /// A page returns with this chance, 0 to 1; otherwise it is one that was never used.
    Forced(f64),
}

/// The steps of a core.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Fills the ring, once.
    pub start: Vec<Op>,
    /// Over and over.
    pub steps: Vec<Op>,
    /// Pages added with every turn, see [`shift`](Self::shift).
    shift: u64,
    /// Number of maps that find what a cache of idle mappings would still have.
    pub reuse: Reuse,
}

/// Added to pages with every turn of the recording: what was new to the kernel is new in every
/// turn, or a recording that is played again would find everything it ever mapped.
const RECORDING_APART: u64 = 1 << 22;
/// The same with every turn of a sequence, and how many turns differ.
const SEQUENCE_APART: u64 = 1 << 26;
const TURNS: u64 = 8;

/// Slots: of the ring and of the burst.
pub const SLOTS: usize = RING + BURST;

impl Sequence {
    /// Makes a sequence; each buffer has at least `pages` pages.
    ///
    /// # Errors
    /// The recording is damaged.
    pub fn new(source: Source, pages: u32) -> Result<Self> {
        let mut supply = Supply::new(source, pages)?;
        let mut start = Vec::new();
        for slot in 0..RING as u32 {
            start.push(supply.map(slot, false, 0));
        }
        let mut steps = Vec::new();
        let mut waiting = 0;
        for packet in 0..PACKETS {
            let now = packet as u64;
            if packet % 2 == 0 {
                let slot = (packet / 2 % RING) as u32;
                steps.push(supply.unmap(slot, now));
                steps.push(Op::Packet);
                steps.push(supply.map(slot, false, now));
            } else {
                steps.push(supply.map((RING + waiting) as u32, true, now));
                steps.push(Op::Packet);
                waiting += 1;
                if waiting == BURST {
                    for slot in RING..RING + BURST {
                        steps.push(supply.unmap(slot as u32, now));
                    }
                    waiting = 0;
                }
            }
        }
        let shift = match source {
            Source::Recorded => SEQUENCE_APART,
            Source::Forced(_) => 0,
        };
        let reuse = reuse_of(&start, &steps, shift);
        Ok(Self {
            start,
            steps,
            shift,
            reuse,
        })
    }

    /// Returns the number that is added to pages in this turn.
    pub fn shift(&self, turn: u64) -> u64 {
        turn % TURNS * self.shift
    }

    /// The share of maps that a cache of 4,096 idle mappings would serve, 0 to 1.
    pub fn reuse_4096(&self) -> f64 {
        self.reuse.idle_4096 as f64 / self.reuse.maps.max(1) as f64
    }

    /// The same with 256.
    pub fn reuse_256(&self) -> f64 {
        self.reuse.idle_256 as f64 / self.reuse.maps.max(1) as f64
    }
}

/// A buffer's pages.
type Buffer = (u64, u32);

/// Supply of buffers, which records the buffer that each packet holds.
struct Supply {
    source: Source,
    pages: u32,
    /// Buffers of the recording: received, sent; and the position in each.
    recorded: [Vec<Buffer>; 2],
    at: [usize; 2],
    random: Random,
    /// Never used so far.
    fresh: u64,
    /// Held until a packet, and free since, by direction.
    held: [BTreeMap<u64, Vec<Buffer>>; 2],
    free: [Vec<Buffer>; 2],
    slots: Vec<(Buffer, bool)>,
}

impl Supply {
    fn new(source: Source, pages: u32) -> Result<Self> {
        let mut recorded = [Vec::new(), Vec::new()];
        if source == Source::Recorded {
            let trace = Trace::parse(RECORDED).context("traces/vmxnet3-6.1.0.txt")?;
            for event in trace.events {
                let way = match (event.action, event.access) {
                    (Action::Map, Access::Write) => 0,
                    (Action::Map, Access::Read) => 1,
                    // Rings stay mapped.
                    _ => continue,
                };
                recorded[way].push((event.pfn, event.pages));
            }
            anyhow::ensure!(
                recorded.iter().all(|way| !way.is_empty()),
                "the recording has packets one way only"
            );
        }
        Ok(Self {
            source,
            pages,
            recorded,
            at: [0; 2],
            random: Random::of_core(7),
            fresh: 1,
            held: Default::default(),
            free: Default::default(),
            slots: vec![((0, 0), false); SLOTS],
        })
    }

    fn map(&mut self, slot: u32, is_sent: bool, now: u64) -> Op {
        let way = usize::from(is_sent);
        let (page, pages) = match self.source {
            Source::Recorded => {
                let of = &self.recorded[way];
                let (page, pages) = of[self.at[way] % of.len()];
                let turn = (self.at[way] / of.len()) as u64;
                self.at[way] += 1;
                // Larger buffers lie as far apart as they are long.
                let page = page * u64::from(self.pages) + turn * RECORDING_APART;
                (page, pages.max(self.pages))
            }
            Source::Forced(chance) => self.forced(way, chance, now),
        };
        self.slots[slot as usize] = ((page, pages), is_sent);
        Op::Map {
            slot,
            page,
            pages,
            is_sent,
        }
    }

    fn forced(&mut self, way: usize, chance: f64, now: u64) -> Buffer {
        while let Some(first) = self.held[way].first_entry()
            && *first.key() <= now
        {
            let buffers = first.remove();
            self.free[way].extend(buffers);
        }
        if self.random.chance(chance)
            && let Some(buffer) = self.free[way].pop()
        {
            return buffer;
        }
        self.fresh += 1;
        (self.fresh * u64::from(self.pages), self.pages)
    }

    fn unmap(&mut self, slot: u32, now: u64) -> Op {
        let (buffer, is_sent) = self.slots[slot as usize];
        if matches!(self.source, Source::Forced(_)) {
            let until = now + self.random.geometric(HELD);
            self.held[usize::from(is_sent)]
                .entry(until)
                .or_default()
                .push(buffer);
        }
        Op::Unmap { slot }
    }
}

/// Counts what a cache would find, by the rule of the recordings. The sequence is counted twice and
/// its first turn subtracted, so that pages that come again in the next turn count as they do in a
/// run.
fn reuse_of(start: &[Op], steps: &[Op], shift: u64) -> Reuse {
    let mut slots = vec![None; SLOTS];
    let mut events = Vec::new();
    let mut add = |ops: &[Op], shift: u64, events: &mut Vec<Event>| {
        for op in ops {
            match *op {
                Op::Map {
                    slot,
                    page,
                    pages,
                    is_sent,
                } => {
                    let access = if is_sent { Access::Read } else { Access::Write };
                    let event = Event {
                        action: Action::Map,
                        access,
                        pfn: page + shift,
                        pages,
                    };
                    slots[slot as usize] = Some(event);
                    events.push(event);
                }
                Op::Unmap { slot } => {
                    let mapped: Option<Event> = slots[slot as usize].take();
                    events.extend(mapped.map(|event| Event {
                        action: Action::Unmap,
                        ..event
                    }));
                }
                Op::Packet => {}
            }
        }
    };
    add(start, 0, &mut events);
    add(steps, 0, &mut events);
    let once = reuse::of(&Trace {
        head: Vec::new(),
        events: events.clone(),
    });
    add(steps, shift, &mut events);
    let twice = reuse::of(&Trace {
        head: Vec::new(),
        events,
    });
    Reuse {
        maps: twice.maps - once.maps,
        live: twice.live - once.live,
        idle_256: twice.idle_256 - once.idle_256,
        idle_4096: twice.idle_4096 - once.idle_4096,
        ever: twice.ever - once.ever,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unmap_has_its_map_and_turns_end_as_they_begin() {
        for source in [Source::Recorded, Source::Forced(0.5)] {
            let sequence = Sequence::new(source, 1).expect("the recording is whole");
            let mut mapped = [false; SLOTS];
            for op in sequence
                .start
                .iter()
                .chain(&sequence.steps)
                .chain(&sequence.steps)
            {
                match *op {
                    Op::Map { slot, .. } => {
                        assert!(!std::mem::replace(&mut mapped[slot as usize], true));
                    }
                    Op::Unmap { slot } => {
                        assert!(std::mem::replace(&mut mapped[slot as usize], false));
                    }
                    Op::Packet => {}
                }
            }
            let (ring, burst) = mapped.split_at(RING);
            assert!(ring.iter().all(|m| *m) && burst.iter().all(|m| !*m));
            let packets = sequence.steps.iter().filter(|op| **op == Op::Packet);
            assert_eq!(packets.count(), PACKETS);
        }
    }

    #[test]
    fn the_forced_rate_is_the_rate() {
        for rate in [0.0, 0.5, 0.92, 1.0] {
            let sequence = Sequence::new(Source::Forced(rate), 1).expect("needs no recording");
            let found = sequence.reuse_4096();
            assert!((found - rate).abs() < 0.02, "{found} for {rate}");
        }
    }

    #[test]
    fn the_recording_returns_most_pages() {
        let sequence = Sequence::new(Source::Recorded, 1).expect("the recording is whole");
        let found = sequence.reuse_4096();
        // The recording's own head says 92.4 %.
        assert!((found - 0.924).abs() < 0.03, "{}", sequence.reuse);
        let wide = Sequence::new(Source::Recorded, 16).expect("the recording is whole");
        let widths = wide.steps.iter().filter_map(|op| match op {
            Op::Map { pages, .. } => Some(*pages),
            _ => None,
        });
        assert_eq!(widths.min(), Some(16));
    }
}
