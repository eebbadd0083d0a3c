//! The threads of the load.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use address::{PAGE_SHIFT, PhysAddr};
use anyhow::Result;
use dma_map::{Clock, Direction, Mapping, Segment};

use super::sequence::{Op, SLOTS, Sequence};
use super::work::Work;
use crate::map::loops::Sink;
use crate::map::rig::{Core, Rig, Table, Time};
use crate::measure::{Task, Tasks};

/// Packets between two looks at the flag.
const PACKETS: u64 = 64;

/// Pages between the memories of two cores.
const APART: u64 = 1 << 30;

/// Most stamps of one thread.
const STAMPS: usize = 1 << 17;

/// Durations of the map and the unmap of a buffer together, nanoseconds.
#[derive(Clone, Default)]
pub struct Stamps(Arc<Mutex<Vec<u64>>>);

impl Stamps {
    /// All of them, of all threads and runs.
    pub fn take(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Packets of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Packets {
    /// Bytes of each.
    pub size: usize,
    /// The least time worked on each.
    pub pad_ns: u64,
}

/// Threads of the load; what the mapper says goes to `sink`, and with `stamps` the time of each map
/// and unmap there.
///
/// # Errors
/// The mapper has not so many cores, or the rings cannot be filled.
pub fn tasks(
    rig: &Arc<Rig<Table>>,
    sequence: &Arc<Sequence>,
    packets: Packets,
    threads: usize,
    sink: &Sink,
    stamps: Option<&Stamps>,
) -> Result<Tasks> {
    let task = |id| -> Result<Box<dyn Task>> {
        let mut load = Load {
            id,
            core: rig.core(id)?,
            sequence: Arc::clone(sequence),
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            at: 0,
            turn: 0,
            base: id as u64 * APART,
            work: Work::new(packets.size, packets.pad_ns),
            time: Time::shared(),
            own: Vec::new(),
            stamps: stamps.cloned().unwrap_or_default(),
            rig: Arc::clone(rig),
            sink: sink.clone(),
        };
        for op in &sequence.start {
            load.step::<false>(*op);
        }
        load.own
            .reserve_exact(if stamps.is_some() { STAMPS } else { 0 });
        Ok(match stamps {
            Some(_) => Box::new(Stamped(load)),
            None => Box::new(load),
        })
    };
    (0..threads).map(task).collect()
}

#[derive(Default)]
struct Slot {
    mapping: Option<Mapping>,
    map_ns: u64,
}

struct Load {
    id: usize,
    core: Core<Table>,
    sequence: Arc<Sequence>,
    slots: Vec<Slot>,
    at: usize,
    turn: u64,
    /// Added to pages in this turn, on this core.
    base: u64,
    work: Work,
    time: Arc<Time>,
    own: Vec<u64>,
    stamps: Stamps,
    rig: Arc<Rig<Table>>,
    sink: Sink,
}

impl Load {
    /// Whether it was a packet.
    #[inline]
    fn step<const STAMPED: bool>(&mut self, op: Op) -> bool {
        match op {
            Op::Map {
                slot,
                page,
                pages,
                is_sent,
            } => {
                let page = page + self.base;
                let start = PhysAddr::new(page << PAGE_SHIFT);
                let segment = Segment::new(start, u64::from(pages) << PAGE_SHIFT);
                let direction = if is_sent {
                    Direction::ToDevice
                } else {
                    Direction::FromDevice
                };
                let before = if STAMPED { self.time.now() } else { 0 };
                let mapping = self.core.map(&[segment], direction);
                let slot = &mut self.slots[slot as usize];
                if STAMPED {
                    slot.map_ns = self.time.now() - before;
                }
                slot.mapping = Some(mapping.expect("the space is far larger than the rings"));
                false
            }
            Op::Unmap { slot } => {
                let slot = &mut self.slots[slot as usize];
                let mapping = slot.mapping.take().expect("a sequence maps what it unmaps");
                let before = if STAMPED { self.time.now() } else { 0 };
                self.core.unmap(mapping).expect("it is mapped");
                if STAMPED && self.own.len() < STAMPS {
                    self.own.push(slot.map_ns + (self.time.now() - before));
                }
                false
            }
            Op::Packet => {
                self.work.packet();
                true
            }
        }
    }

    #[inline]
    fn run<const STAMPED: bool>(&mut self) -> u64 {
        let sequence = Arc::clone(&self.sequence);
        self.rig.tick_when_due();
        let mut packets = 0;
        while packets < PACKETS {
            packets += u64::from(self.step::<STAMPED>(sequence.steps[self.at]));
            self.at += 1;
            if self.at == sequence.steps.len() {
                self.at = 0;
                self.turn += 1;
                self.base = self.id as u64 * APART + sequence.shift(self.turn);
            }
        }
        packets
    }

    fn end(&mut self) {
        if self.id == 0 {
            self.core.publish();
            self.sink.push(self.rig.facts());
        }
        for slot in &mut self.slots {
            if let Some(mapping) = slot.mapping.take() {
                self.core.unmap(mapping).expect("it is mapped");
            }
        }
        self.stamps
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .append(&mut self.own);
    }
}

impl Task for Load {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        self.run::<false>()
    }

    fn finish(&mut self) {
        self.end();
    }
}

struct Stamped(Load);

impl Task for Stamped {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        self.0.run::<true>()
    }

    fn finish(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use super::super::sequence::Source;
    use super::*;
    use crate::map::policies::POLICIES;
    use crate::map::rig::{Costs, table};

    const SMALL: Packets = Packets {
        size: 64,
        pad_ns: 0,
    };

    #[test]
    fn every_policy_carries_the_load_within_its_bound() {
        let sequence = Arc::new(Sequence::new(Source::Recorded, 1).expect("whole"));
        for named in POLICIES {
            let (sink, stamps) = (Sink::default(), Stamps::default());
            let table = table().expect("memory");
            let rig = Rig::new(table, named.policy, Costs::all(0), 2).expect("fits");
            let mut tasks =
                tasks(&rig, &sequence, SMALL, 2, &sink, Some(&stamps)).expect("2 cores");
            for _ in 0..64 {
                for task in &mut tasks {
                    assert_eq!(task.batch(&AtomicBool::new(false)), PACKETS);
                }
            }
            tasks.iter_mut().for_each(|task| task.finish());
            let facts = sink.take();
            let [facts] = &facts[..] else {
                panic!("one mapper, {}", facts.len())
            };
            let name = named.name;
            if name.starts_with("strict") || name == "shared" {
                assert_eq!(facts.risk.stale_max, 0, "{name}");
            }
            if let Some(most) = facts.risk.contract.max_stale {
                assert!(facts.risk.stale_max <= most, "{name}: {:?}", facts.risk);
            }
            assert!(stamps.take().len() > 2000, "{name}");
        }
    }
}
