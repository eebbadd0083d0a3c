//! The mapping workloads: page tables and `DmaMapper`, each on an allocator.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use address::{PAGE_SIZE, PhysAddr};
use anyhow::Result;
use dma_map::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use dma_map::mapper::{Teardown, Window};
use dma_map::table::{HostMemory, IoMap, IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};
use dma_map::{
    DeviceLimits, Direction, DmaMapper, Domain, ManualClock, MapperCore, Mapping, Policy, Segment,
};
use iova::{Access, CoreAllocator, CoreId, IovaAllocator, IovaRange, Request};
use line_probe as probe;
use lines::CachePadded;
use seeded::Random;

use crate::alloc::{WINDOW, claim, random_turns};
use crate::turns::{self, Rounds};
use crate::{PerOp, below};

/// The deferred policy with the queue of 256 entries that workload `ddef` has.
pub const DEFERRED: Policy = Policy::DEFERRED.with_teardown(Teardown::Deferred(Window {
    entries: 256,
    age: Window::DEFAULT.age,
}));

/// The strict policies, each with the greatest number of transfers per operation that it should
/// have.
pub const STRICT: [(&str, Policy, Option<f64>); 2] = [
    ("strict", Policy::STRICT, Some(3.0)),
    ("combining", Policy::STRICT_COMBINING, Some(3.0)),
];

/// Duration of a flush in rounds; in a round every core has one turn. Five rounds stand for 500 ns:
/// a poll of a waiting core takes about 100 ns.
pub const FLUSH_ROUNDS: u64 = 5;

type Table = IoPageTable<VtdSecondLevel, HostMemory>;

fn table() -> Result<Table> {
    let config = TableConfig {
        levels: 4,
        leaves: LeafSizes::FOUR_K,
    };
    Ok(IoPageTable::new(HostMemory::new(), config)?)
}

/// Returns the address of a page of a core's own memory. The areas of two cores are 2^16 pages
/// apart.
fn memory(core: usize, page: usize) -> PhysAddr {
    PhysAddr::new((((core as u64) << 16) + page as u64 + 1) * PAGE_SIZE)
}

/// `map`: each core replaces a random mapped page of its window, without any invalidation.
///
/// # Errors
/// The allocator's or the table's.
pub fn tables<A: IovaAllocator>(allocator: A, cores: usize) -> Result<PerOp> {
    let table = table()?;
    let mut handles = claim(&allocator, cores)?;
    let mut randoms: Vec<_> = (0..cores).map(Random::of_core).collect();
    let make = |handle: &mut A::Core, phys| -> Result<IovaRange> {
        let range = handle.alloc(Request::pages(1))?;
        table.map(range, phys, Access::ReadWrite)?;
        Ok(range)
    };
    let mut held: Vec<Vec<IovaRange>> = Vec::new();
    for (core, handle) in handles.iter_mut().enumerate() {
        let fill = (0..WINDOW).map(|page| make(handle, memory(core, page)));
        held.push(fill.collect::<Result<_>>()?);
    }
    random_turns(cores, (512, 512), |core| {
        let (handle, held) = (&mut handles[core], &mut held[core]);
        let page = below(&mut randoms[core], WINDOW);
        if held.len() == WINDOW {
            let range = held.swap_remove(page);
            table.unmap(range)?;
            handle.free(range)?;
        } else {
            held.push(make(handle, memory(core, page))?);
        }
        Ok(())
    })
}

/// A core's handle, and its mappings, oldest first.
struct Worker<A: IovaAllocator, I: Invalidator> {
    core: usize,
    handle: MapperCore<A, Table, I, ManualClock>,
    held: VecDeque<Mapping>,
    page: usize,
}

impl<A: IovaAllocator, I: Invalidator> Worker<A, I> {
    fn map(&mut self) -> Result<()> {
        self.page = (self.page + 1) % (2 * WINDOW);
        let segment = Segment::new(memory(self.core, self.page), PAGE_SIZE);
        let mapping = self.handle.map(&[segment], Direction::FromDevice)?;
        self.held.push_back(mapping);
        Ok(())
    }

    /// Makes half an operation: ends the oldest mapping, or makes a new one.
    fn turn(&mut self) -> Result<()> {
        if self.held.len() < WINDOW {
            return self.map();
        }
        let oldest = self.held.pop_front();
        Ok(oldest.map_or(Ok(()), |oldest| self.handle.unmap(oldest))?)
    }
}

fn workers<A: IovaAllocator, I: Invalidator>(
    allocator: A,
    invalidator: I,
    cores: usize,
    policy: Policy,
) -> Result<Vec<Worker<A, I>>> {
    let domain = Domain {
        allocator,
        table: table()?,
        invalidator,
        clock: ManualClock::new(),
    };
    let mapper = DmaMapper::new(domain, policy, DeviceLimits::default())?;
    let worker = |core| {
        let mut worker = Worker {
            core,
            handle: mapper.core(CoreId(core))?,
            held: VecDeque::new(),
            page: 0,
        };
        (0..WINDOW).try_for_each(|_| worker.map())?;
        Ok(worker)
    };
    (0..cores).map(worker).collect()
}

/// Workloads `ddef` and `dstr`: each core replaces the oldest of its 256 mappings; no two cores run
/// at once.
///
/// # Errors
/// The mapper's.
pub fn alone<A: IovaAllocator>(allocator: A, cores: usize, policy: Policy) -> Result<PerOp> {
    let hardware = Hardware::new(Rounds::default(), 0);
    let mut workers = workers(allocator, hardware, cores, policy)?;
    random_turns(cores, (1024, 1024), |core| workers[core].turn())
}

/// Hardware that completes one batch after the other, in rounds of the simulated cores. It counts
/// the least that a queue of commands shares: the word by which an entry is claimed, and the lines
/// of the descriptors, one of 16 bytes for each command and one for the wait. Its registers are no
/// cache lines, and each waiting core polls a status word of its own.
struct Hardware {
    rounds: Rounds,
    flush_rounds: u64,
    free_at: AtomicU64,
    tail: CachePadded<lines::AtomicUsize>,
    descriptors: Vec<CachePadded<[u128; 4]>>,
}

impl Hardware {
    fn new(rounds: Rounds, flush_rounds: u64) -> Self {
        Self {
            rounds,
            flush_rounds,
            free_at: AtomicU64::new(0),
            tail: CachePadded::default(),
            descriptors: (0..64).map(|_| CachePadded::default()).collect(),
        }
    }
}

impl Invalidator for Hardware {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        let count = commands.len() + 1;
        let first = self.tail.fetch_add(count, Ordering::Relaxed);
        for at in first..first + count {
            probe::touch_write(&self.descriptors[at / 4 % self.descriptors.len()][at % 4]);
        }
        // One core runs at a time, so no other access comes between the load and the store.
        let free_at = self.free_at.load(Ordering::Relaxed);
        let end = free_at.max(self.rounds.now()) + self.flush_rounds;
        self.free_at.store(end, Ordering::Relaxed);
        Ok(Ticket(end))
    }

    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        Ok(self.rounds.now() >= ticket.0)
    }

    fn is_idle(&self) -> bool {
        // A real unit reads which batch was the last, and then that batch's status.
        self.tail.load(Ordering::Relaxed);
        self.rounds.now() >= self.free_at.load(Ordering::Relaxed)
    }
}

/// Workload `dstr_busy`: all cores at once. A core that waits yields to the next one.
///
/// # Errors
/// The mapper's.
pub fn busy<A: IovaAllocator>(allocator: A, cores: usize, policy: Policy) -> Result<PerOp>
where
    A::Core: Send,
{
    let rounds = Rounds::default();
    let hardware = Hardware::new(rounds.clone(), FLUSH_ROUNDS);
    let mut workers = workers(allocator, hardware, cores, policy)?;
    turns::count(cores, |machine, ops| {
        turns::run(machine, &rounds, &mut workers, |_, worker, hand_over| {
            for _ in 0..2 * ops {
                worker.turn()?;
                hand_over();
            }
            Ok(())
        })
    })
}

#[cfg(test)]
mod tests {
    use iova::TreeAllocator;

    use super::*;
    use crate::aperture;

    fn tree(cores: usize) -> TreeAllocator {
        TreeAllocator::new(aperture().unwrap(), cores).unwrap()
    }

    #[test]
    fn one_core_moves_no_line() {
        assert_eq!(tables(tree(1), 1).unwrap().transfers, 0.0);
        for (_, policy, _) in STRICT {
            assert_eq!(alone(tree(1), 1, policy).unwrap().transfers, 0.0);
            assert_eq!(busy(tree(1), 1, policy).unwrap().transfers, 0.0);
        }
        assert_eq!(alone(tree(1), 1, DEFERRED).unwrap().transfers, 0.0);
    }

    /// A read of the shared line before a core joins a batch would be one transfer more.
    #[test]
    fn two_cores_that_combine_pay_for_less_than_two_lines() {
        let two = busy(crate::chunk(2).unwrap(), 2, Policy::STRICT_COMBINING).unwrap();
        assert!((1.0..2.0).contains(&two.transfers), "{two:?}");
    }

    #[test]
    fn cores_that_share_leaf_tables_pay_for_it_and_counts_repeat() {
        let two = tables(tree(2), 2).unwrap();
        // Besides the transfers of the lock's line in half of the four calls: table entries on the
        // same line as the other core's.
        assert!(two.transfers > 1.2, "{two:?}");
        let busy = || busy(tree(4), 4, Policy::STRICT).unwrap();
        assert_eq!(busy(), busy());
    }
}
