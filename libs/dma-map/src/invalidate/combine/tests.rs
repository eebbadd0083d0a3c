use std::vec::Vec;

use iova::IovaPfn;
use lines::AtomicBool;

use super::super::Ticket;
use super::*;

fn range(first: u64, pages: u64) -> IovaRange {
    IovaRange::new(IovaPfn::new(first), pages).unwrap()
}

#[test]
fn an_error_reaches_its_caller_and_the_next_request_works() {
    struct Dead(AtomicBool);
    impl Invalidator for Dead {
        fn submit(&self, _: &[Command]) -> Result<Ticket, InvalidateError> {
            Ok(Ticket(0))
        }
        fn poll(&self, _: Ticket) -> Result<bool, InvalidateError> {
            if self.0.load(Ordering::Relaxed) {
                return Err(InvalidateError::Stopped { status: 0x40 });
            }
            Ok(true)
        }
        fn is_idle(&self) -> bool {
            false
        }
    }
    let combiner = Combiner::new(2, GATHER_LOOKS);
    let dead = Dead(AtomicBool::new(true));
    let error = Err(InvalidateError::Stopped { status: 0x40 });
    // Alone, as long as it is not pressed; then it calls, and no other core comes.
    for _ in 0..2 * CONTENDED {
        assert_eq!(combiner.flush(&dead, 1, range(1, 1)), error);
    }
    dead.0.store(false, Ordering::Relaxed);
    for _ in 0..2 * CONTENDED {
        assert_eq!(combiner.flush(&dead, 1, range(1, 1)), Ok(()));
    }
}

/// Forgets a page when a batch is polled that was submitted after its entry was cleared. Seems busy
/// at most polls.
struct Hardware {
    entries: Vec<AtomicBool>,
    cached: Vec<AtomicBool>,
    looks: AtomicU32,
    batches: AtomicU32,
}

impl Invalidator for Hardware {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        self.batches.fetch_add(1, Ordering::Relaxed);
        let is_named = |page: u64| {
            commands.iter().any(|command| match command {
                Command::Pages(range) => (range.first().raw()..=range.last().raw()).contains(&page),
                _ => true,
            })
        };
        let forgotten = (0..self.entries.len())
            .filter(|page| is_named(*page as u64) && !self.entries[*page].load(Ordering::Relaxed))
            .fold(0, |pages, page| pages | 1 << page);
        Ok(Ticket(forgotten))
    }

    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        if !self.is_idle() {
            return Ok(false);
        }
        for (page, cached) in self.cached.iter().enumerate() {
            if ticket.0 >> page & 1 == 1 {
                cached.store(false, Ordering::Relaxed);
            }
        }
        Ok(true)
    }

    fn is_idle(&self) -> bool {
        let is_idle = self.looks.fetch_add(1, Ordering::Relaxed) & 7 == 0;
        if !is_idle {
            // So that cores meet where there are fewer processors.
            std::thread::yield_now();
        }
        is_idle
    }
}

/// Two pages for each of four cores, in turn: a page that one unmap invalidates too late or not at
/// all is found by the next.
#[test]
fn no_core_returns_before_its_page_is_invalidated() {
    const CORES: usize = 4;
    const UNMAPS: u32 = 5_000;
    let flags = || (0..2 * CORES).map(|_| AtomicBool::new(false)).collect();
    let hardware = Hardware {
        entries: flags(),
        cached: flags(),
        looks: AtomicU32::new(0),
        batches: AtomicU32::new(0),
    };
    let combiner = Combiner::new(CORES, GATHER_LOOKS);
    let start = std::sync::Barrier::new(CORES);
    std::thread::scope(|scope| {
        for core in 0..CORES {
            let (hardware, combiner, start) = (&hardware, &combiner, &start);
            scope.spawn(move || {
                start.wait();
                for unmap in 0..UNMAPS {
                    let page = 2 * core + (unmap % 2) as usize;
                    hardware.cached[page].store(true, Ordering::Relaxed);
                    hardware.entries[page].store(false, Ordering::Relaxed);
                    let done = combiner.flush(hardware, core, range(page as u64, 1));
                    assert_eq!(done, Ok(()));
                    assert!(
                        !hardware.cached[page].load(Ordering::Relaxed),
                        "core {core}"
                    );
                    hardware.entries[page].store(true, Ordering::Relaxed);
                }
            });
        }
    });
    let batches = hardware.batches.load(Ordering::Relaxed);
    assert!(batches < CORES as u32 * UNMAPS, "nobody met: {batches}");
}

fn merged(ranges: impl Iterator<Item = Option<IovaRange>>) -> Vec<Command> {
    let mut ranges: Vec<_> = ranges.collect();
    merge(&mut ranges, &mut [Command::Domain; RANGES]).to_vec()
}

#[test]
fn adjacent_and_overlapping_ranges_share_a_command() {
    let ranges = [(9, 1), (4, 2), (6, 1), (5, 3), (12, 1)];
    let ranges = ranges.map(|(first, pages)| Some(range(first, pages)));
    let expected = [(4, 4), (9, 1), (12, 1)].map(|(f, p)| Command::Pages(range(f, p)));
    assert_eq!(merged(ranges.into_iter()), expected);
}

#[test]
fn an_unknown_range_makes_a_domain() {
    let of = |count: usize| (0..count as u64).rev().map(|at| Some(range(3 * at + 1, 1)));
    assert_eq!(merged(of(RANGES)).len(), RANGES);
    assert_eq!(merged(of(RANGES))[1], Command::Pages(range(4, 1)));
    assert_eq!(merged(of(RANGES - 1).chain([None])), [Command::Domain]);
    assert!(merged(of(0)).is_empty());
}
