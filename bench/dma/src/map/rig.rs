//! A mapper ready to be measured: allocator, table, hardware that takes a fixed time, clock, and
//! ticks.
//!
//! The threads that are measured tick themselves, as the timer interrupt of a busy core would: a
//! thread of its own would wait for a CPU, and take one away.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use dma_map::mapper::Teardown;
use dma_map::risk::Counts;
use dma_map::table::{HostMemory, IoMap, IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};
use dma_map::{Clock, DeviceLimits, DmaMapper, Domain, MapperCore, Policy, Risk};
use dma_peers::SerialFlush;
use iova::CoreId;
use lines::{AtomicU64, CachePadded};

use super::policies::STRICT_LOCK;
use crate::alloc::{Best, space};

/// The table that is measured: VT-d second level, four levels, no locks.
pub type Table = IoPageTable<VtdSecondLevel, HostMemory>;
/// The hardware.
pub type Hardware = Arc<SerialFlush<Arc<Time>>>;
/// A mapper over a table.
pub type Mapper<T> = DmaMapper<Best, T, Hardware, Arc<Time>>;
/// One core of it.
pub type Core<T> = MapperCore<Best, T, Hardware, Arc<Time>>;

/// Configuration of the tables.
pub const CONFIG: TableConfig = TableConfig {
    levels: 4,
    leaves: LeafSizes::ONE_G,
};

/// The period of ticks; it adds to the age of stale mappings.
pub const TICK: Duration = Duration::from_millis(1);

/// An empty table.
///
/// # Errors
/// No memory.
pub fn table() -> Result<Table> {
    Ok(Table::new(HostMemory::new(), CONFIG)?)
}

/// Time of all cores: the time-stamp counter, and a coarse time that ticks advance.
pub struct Time {
    precise: report::clock::Clock,
    coarse: CachePadded<AtomicU64>,
}

impl Time {
    /// A clock, calibrated once per program.
    pub fn shared() -> Arc<Self> {
        static PRECISE: std::sync::OnceLock<report::clock::Clock> = std::sync::OnceLock::new();
        let precise = *PRECISE.get_or_init(report::clock::Clock::new);
        // It has been running for as long as the program: at 0, what is stamped before the first
        // tick looked that old.
        let coarse = CachePadded::new(AtomicU64::new(precise.now()));
        Arc::new(Self { precise, coarse })
    }
}

impl Clock for Time {
    #[inline]
    fn now(&self) -> u64 {
        self.precise.now()
    }

    #[inline]
    fn coarse(&self) -> u64 {
        // Relaxed: an old value is an earlier time.
        self.coarse.load(Ordering::Relaxed)
    }

    fn advance(&self, now: u64) {
        self.coarse.fetch_max(now, Ordering::Relaxed);
    }
}

/// Time that the hardware takes for a command, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// For pages.
    pub page_ns: u64,
    /// For a domain or everything.
    pub global_ns: u64,
    /// One flush after the other behind one lock.
    pub is_locked: bool,
}

impl Costs {
    /// Those of the NIC-like load.
    pub const USUAL: Self = Self {
        page_ns: 500,
        global_ns: 1000,
        is_locked: false,
    };

    /// Every command takes as long.
    pub const fn all(ns: u64) -> Self {
        Self {
            page_ns: ns,
            global_ns: ns,
            is_locked: false,
        }
    }

    /// The same as the policy of that name has it.
    pub fn of(self, policy: &str) -> Self {
        Self {
            is_locked: policy == STRICT_LOCK,
            ..self
        }
    }
}

/// Counts of a mapper and its hardware after a run.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Nanoseconds that the hardware was busy: commands × their costs.
    pub flushed_ns: f64,
    /// Commands.
    pub commands: u64,
    /// Pairs of an unmap and a map that the threads did, of all cores together, where the loop
    /// counts them.
    pub pairs: u64,
    /// Stale mappings.
    pub risk: Risk,
    /// Hits and misses, and what had to go.
    pub reuse: Counts,
    /// The longest time between two ticks, nanoseconds: while the machine keeps every thread from
    /// running, no thread ticks, and the bounds on ages hold up to that.
    pub tick_max_ns: u64,
    /// Whether the documented bound held, up to the longest time between two ticks and 100 µs for
    /// what a tick does.
    pub is_within_bound: bool,
}

/// A mapper and its hardware.
pub struct Rig<T: IoMap + 'static> {
    mapper: Mapper<T>,
    costs: Costs,
    pairs: AtomicU64,
    clock: Arc<Time>,
    ticks: CachePadded<Ticks>,
}

/// Times of the last tick and of the longest pause, nanoseconds; the first thread that finds a tick
/// due makes it. No data is passed from one tick to the next: all is relaxed.
#[derive(Default)]
struct Ticks {
    last: AtomicU64,
    longest: AtomicU64,
}

impl<T: IoMap + 'static> Rig<T> {
    /// A mapper for `cores` cores.
    ///
    /// # Errors
    /// The policy does not fit.
    pub fn new(table: T, policy: Policy, costs: Costs, cores: usize) -> Result<Arc<Self>> {
        let clock = Time::shared();
        let mut hardware = SerialFlush::with_costs(clock.clone(), costs.page_ns, costs.global_ns);
        if costs.is_locked {
            hardware = hardware.behind_a_lock();
        }
        let domain = Domain {
            allocator: Best::new(space()?, cores)?,
            table,
            invalidator: Arc::new(hardware),
            clock: clock.clone(),
        };
        Ok(Arc::new(Self {
            mapper: DmaMapper::new(domain, policy, DeviceLimits::default())?,
            costs,
            pairs: AtomicU64::new(0),
            clock,
            ticks: CachePadded::new(Ticks::default()),
        }))
    }

    /// Ticks if the last tick is [`TICK`] old: to be called by every thread of the load every now
    /// and then.
    #[inline]
    pub fn tick_when_due(&self) {
        let now = self.clock.now();
        let last = self.ticks.last.load(Ordering::Relaxed);
        if now.saturating_sub(last) >= TICK.as_nanos() as u64 {
            self.tick(last, now);
        }
    }

    #[cold]
    fn tick(&self, last: u64, now: u64) {
        let order = Ordering::Relaxed;
        if self
            .ticks
            .last
            .compare_exchange(last, now, order, order)
            .is_err()
        {
            // Another thread does.
            return;
        }
        // The hardware here never fails.
        let _ = self.mapper.tick(now);
        // Before the first one nothing was unmapped.
        if last > 0 {
            let took = self.clock.now() - last;
            self.ticks.longest.fetch_max(took, order);
        }
    }

    /// The handle of core `id`.
    ///
    /// # Errors
    /// There is none.
    pub fn core(&self, id: usize) -> Result<Core<T>> {
        Ok(self.mapper.core(CoreId(id))?)
    }

    /// The mapper.
    #[cfg(test)]
    pub fn mapper(&self) -> &Mapper<T> {
        &self.mapper
    }

    /// Counts what a thread did.
    pub fn did(&self, pairs: u64) {
        self.pairs.fetch_add(pairs, Ordering::Relaxed);
    }

    /// Returns the facts of the run so far.
    pub fn facts(&self) -> Facts {
        let risk = self.mapper.risk();
        let (_, commands) = self.mapper.invalidator().counts();
        // Deferred policies flush globally, all others by page; no policy here does both often.
        let is_global = matches!(self.mapper.policy().teardown, Teardown::Deferred(_));
        let each = if is_global {
            self.costs.global_ns
        } else {
            self.costs.page_ns
        };
        let tick_max_ns = self.ticks.longest.load(Ordering::Relaxed);
        Facts {
            flushed_ns: (commands * each) as f64,
            commands,
            pairs: self.pairs.load(Ordering::Relaxed),
            tick_max_ns,
            reuse: self.mapper.reuse_counts(),
            is_within_bound: risk.check(tick_max_ns + 100_000).is_ok(),
            risk,
        }
    }
}
