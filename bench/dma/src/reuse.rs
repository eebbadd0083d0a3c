//! The caches of mappings for reuse, with the page sequence of the network card's load.
//!
//! Measured per pair of map and unmap: the processor time of the cache alone (the time of the same
//! loop without a cache is subtracted), the hit rate, and the memory of a mapping in bytes. Each
//! packet advances the clock by 500 ns. The Reverse Translation Cache follows its publication: no
//! bound on the entries, which it keeps for 30 to 40 s, and no hit for a page that is in use. The
//! other caches keep as many entries as they are made for, for 10 ms.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use address::{PAGE_SHIFT, PhysAddr};
use anyhow::Result;
use dma_peers::reuse::{Batch, Counts, Key, OptimisticCache, Released, ReuseCache};
use dma_peers::{CYCLE_NS, LruCache, RESIDENCY_NS, RtcCache};
use iova::{Access, IovaPfn, IovaRange};
use report::{Measured, host};

use crate::measure::Turns;
use crate::nic::sequence::{Op, SLOTS, Sequence, Source};
use crate::record::Record;

/// Simulated time between packets.
const PACKET_NS: u64 = 500;
/// Number of mappings that are torn down together.
const BATCH: usize = 64;

/// Caches that are compared: name in keys, name in the printed table.
pub const STRUCTURES: [(&str, &str); 5] = [
    ("lru256", "LRU, 256"),
    ("optimistic256", "optimistic, 256"),
    ("lru4096", "LRU, 4,096"),
    ("optimistic4096", "optimistic, 4,096"),
    ("rtc", "reverse translation cache, no bound"),
];

fn make(name: &str) -> Box<dyn ReuseCache> {
    match name {
        "lru256" => Box::new(LruCache::new(256, RESIDENCY_NS)),
        "optimistic256" => Box::new(OptimisticCache::new(256, RESIDENCY_NS)),
        "lru4096" => Box::new(LruCache::new(4096, RESIDENCY_NS)),
        "optimistic4096" => Box::new(OptimisticCache::new(4096, RESIDENCY_NS)),
        _ => Box::new(RtcCache::new(CYCLE_NS)),
    }
}

/// Replay of the sequence, with the mappings held at its present position.
struct Player<'a> {
    sequence: &'a Sequence,
    slots: Vec<Option<(Key, IovaRange)>>,
    batch: Batch,
    now_ns: u64,
    turn: u64,
    fresh: u64,
    pairs: u64,
}

impl<'a> Player<'a> {
    fn new(sequence: &'a Sequence) -> Self {
        Self {
            sequence,
            slots: vec![None; SLOTS],
            batch: Batch::with_room(BATCH),
            now_ns: 0,
            turn: 0,
            fresh: 1 << 24,
            pairs: 0,
        }
    }

    fn range(&mut self, pages: u64) -> IovaRange {
        self.fresh += pages;
        IovaRange::new(IovaPfn::new(self.fresh), pages).expect("far below the end")
    }

    /// Replays the sequence once, with `cache` or without one.
    fn turn(&mut self, cache: &mut Option<Box<dyn ReuseCache>>) {
        let sequence = self.sequence;
        let shift = sequence.shift(self.turn);
        let start = if self.turn == 0 {
            &sequence.start[..]
        } else {
            &[]
        };
        for op in start.iter().chain(&sequence.steps) {
            match *op {
                Op::Map {
                    slot,
                    page,
                    pages,
                    is_sent,
                } => {
                    let access = if is_sent { Access::Read } else { Access::Write };
                    let start = PhysAddr::new((page + shift) << PAGE_SHIFT);
                    let key = Key::new(start, u64::from(pages), access)
                        .expect("buffers are small and begin a page");
                    let range = match cache {
                        Some(cache) => cache.acquire(key, self.now_ns).unwrap_or_else(|| {
                            let range = self.range(u64::from(pages));
                            cache.insert(key, range, self.now_ns);
                            range
                        }),
                        None => self.range(u64::from(pages)),
                    };
                    self.slots[slot as usize] = Some((key, black_box(range)));
                }
                Op::Unmap { slot } => {
                    let held = self.slots[slot as usize].take();
                    let (key, range) = held.expect("a sequence maps what it unmaps");
                    self.pairs += 1;
                    if let Some(cache) = cache {
                        let released = cache.release(key, range, self.now_ns, &mut self.batch);
                        black_box(matches!(released, Released::Kept));
                        if !self.batch.is_empty() {
                            cache.torn_down(&mut self.batch, self.now_ns);
                        }
                    }
                }
                Op::Packet => self.now_ns += PACKET_NS,
            }
        }
        self.turn += 1;
    }
}

/// Returns the nanoseconds of a pair of map and unmap, over as many replays as fill `time`; the
/// first is warm-up.
fn time(sequence: &Sequence, name: Option<&str>, time: Duration) -> (f64, Option<Counts>) {
    let mut cache = name.map(make);
    let mut player = Player::new(sequence);
    player.turn(&mut cache);
    let (start, before) = (host::thread_time(), player.pairs);
    loop {
        player.turn(&mut cache);
        let used = host::thread_time() - start;
        if used >= time {
            let ns = used.as_nanos() as f64 / (player.pairs - before) as f64;
            return (ns, cache.map(|cache| cache.counts()));
        }
    }
}

/// Measures the caches, one after the other in each round.
pub fn measure(turns: &Turns, record: &mut Record) {
    if let Err(error) = run(turns, record) {
        println!("\nreuse structures: not measured: {error:#}");
    }
}

fn run(turns: &Turns, record: &mut Record) -> Result<()> {
    let sequence = Arc::new(Sequence::new(Source::Recorded, 1)?);
    let mut loops = Vec::new();
    let mut found = STRUCTURES.map(|_| (Vec::new(), None));
    for _ in 0..turns.runs {
        loops.push(time(&sequence, None, turns.time / 4).0);
        for ((name, _), (ns, counts)) in STRUCTURES.iter().zip(&mut found) {
            let one = time(&sequence, Some(name), turns.time / 4);
            ns.push(one.0);
            *counts = one.1;
        }
    }
    let alone = report::median(loops);
    record.number("reuse_loop_ns", alone, 2);
    println!(
        "\nstructures for reuse, recorded pages; ns of an acquire and a release, the loop's \
         {alone:.1} ns taken off\n\
         {:38} {:>8} {:>8} {:>8} {:>9} {:>10} {:>10}",
        "", "min", "median", "max", "hits, %", "B/mapping", "stale max"
    );
    for ((name, title), (ns, counts)) in STRUCTURES.iter().zip(found) {
        let (Some(ns), Some(counts)) = (Measured::of(ns.iter().map(|ns| ns - alone)), counts)
        else {
            continue;
        };
        let hits = counts.hit_rate();
        let bytes = counts.bytes as f64 / counts.entries.max(1) as f64;
        record.measured(&format!("reuse_{name}_ns"), &ns, 2);
        record.number(&format!("reuse_{name}_hit_rate"), hits, 4);
        record.number(&format!("reuse_{name}_bytes_per_mapping"), bytes, 1);
        record.number(
            &format!("reuse_{name}_stale_max"),
            counts.stale_max as f64,
            0,
        );
        println!(
            "{title:38} {:>8.1} {:>8.1} {:>8.1} {:>9.1} {bytes:>10.0} {:>10}",
            ns.min,
            ns.median,
            ns.max,
            hits * 100.0,
            counts.stale_max
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_structure_finds_what_returns_and_a_larger_one_no_less() {
        let sequence = Sequence::new(Source::Recorded, 1).expect("the recording is whole");
        let rate = |name: &str| {
            let (mut cache, mut player) = (Some(make(name)), Player::new(&sequence));
            player.turn(&mut cache);
            cache.expect("it was made").counts().hit_rate()
        };
        // Several buffers share a page, so that it is in use most of the time, and the reverse
        // translation cache has no hit for a page in use.
        let rates = STRUCTURES.map(|(name, _)| rate(name));
        assert!(
            rates.iter().all(|rate| *rate > 0.2 && *rate < 1.0),
            "{rates:?}"
        );
        assert!(rates[3] >= rates[1] && rates[2] >= rates[0], "{rates:?}");
    }
}
