//! Hardware that works on one command at a time, each for a given time: benches measure policies
//! against it.
//!
//! A batch starts when the one before it has ended, and ends when its time is over. A caller that
//! submits while it runs waits for its turn, spinning on the clock. One word holds the moment at
//! which the hardware is free again. This is the "global lock + busy-wait" that strict unmapping
//! costs on serial hardware, but for the hand-over of the lock, which
//! [`SerialFlush::behind_a_lock`] adds, as in stock kernels.
//!
//! Left out: hardware that overlaps commands, and the fetch of descriptors.

use dma_map::Clock;
use dma_map::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use lines::{AtomicU64, CachePadded, Lock, Ordering};

/// Default cost of one page-selective command, in nanoseconds.
pub const PAGE_NS: u64 = 500;
/// Default cost of one domain-wide or global command, in nanoseconds.
pub const GLOBAL_NS: u64 = 1_000;

/// Serial hardware with fixed costs.
#[derive(Debug)]
pub struct SerialFlush<C> {
    clock: C,
    page_ns: u64,
    global_ns: u64,
    /// Number of pages from which a domain-wide command is cheaper.
    domain_from: usize,
    /// End of the last batch, in nanoseconds of the clock. Written by each submitter.
    free_at: CachePadded<AtomicU64>,
    /// Held by the flushing caller, until the batch is complete.
    turn: Option<CachePadded<Lock<()>>>,
    /// Batches and commands so far.
    batches: CachePadded<AtomicU64>,
    commands: AtomicU64,
}

impl<C: Clock> SerialFlush<C> {
    /// Commands that cost [`PAGE_NS`] and [`GLOBAL_NS`].
    pub fn new(clock: C) -> Self {
        Self::with_costs(clock, PAGE_NS, GLOBAL_NS)
    }

    /// Page-selective commands that cost `page_ns`, others `global_ns` nanoseconds.
    pub fn with_costs(clock: C, page_ns: u64, global_ns: u64) -> Self {
        Self {
            clock,
            page_ns,
            global_ns,
            domain_from: (global_ns / page_ns.max(1)) as usize + 1,
            free_at: CachePadded::new(AtomicU64::new(0)),
            turn: None,
            batches: CachePadded::new(AtomicU64::new(0)),
            commands: AtomicU64::new(0),
        }
    }

    /// The same, one flush after the other behind one lock.
    #[must_use]
    pub fn behind_a_lock(mut self) -> Self {
        self.turn = Some(CachePadded::new(Lock::new(())));
        self
    }

    /// Batches and commands submitted so far.
    pub fn counts(&self) -> (u64, u64) {
        (
            self.batches.load(Ordering::Relaxed),
            self.commands.load(Ordering::Relaxed),
        )
    }
}

impl<C: Clock> SerialFlush<C> {
    fn cost(&self, commands: &[Command]) -> u64 {
        let ns = commands.iter().map(|command| match command {
            Command::Pages(_) => self.page_ns,
            Command::Domain | Command::Global => self.global_ns,
        });
        ns.fold(0, u64::saturating_add).max(1)
    }

    /// One attempt, for a batch that takes `cost`.
    #[inline]
    fn begin(&self, commands: &[Command], cost: u64) -> Option<Ticket> {
        let free_at = self.free_at.load(Ordering::Acquire);
        let now = self.clock.now();
        if now < free_at {
            return None;
        }
        let end = now.saturating_add(cost);
        // AcqRel: one submitter after the other, as at a lock. A value never comes twice: `end` is
        // past it.
        self.free_at
            .compare_exchange(free_at, end, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.commands
            .fetch_add(commands.len() as u64, Ordering::Relaxed);
        Some(Ticket(end))
    }
}

impl<C: Clock> Invalidator for SerialFlush<C> {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        let cost = self.cost(commands);
        loop {
            if let Some(ticket) = self.begin(commands, cost) {
                return Ok(ticket);
            }
            lines::spin_loop();
        }
    }

    #[inline]
    fn flush(&self, commands: &[Command]) -> Result<(), InvalidateError> {
        let _turn = self.turn.as_ref().map(|turn| turn.lock());
        self.wait(self.submit(commands)?)
    }

    #[inline]
    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        Ok(self.clock.now() >= ticket.0)
    }

    #[inline]
    fn is_idle(&self) -> bool {
        self.clock.now() >= self.free_at.load(Ordering::Relaxed)
    }

    #[inline]
    fn try_submit(&self, commands: &[Command]) -> Result<Option<Ticket>, InvalidateError> {
        Ok(self.begin(commands, self.cost(commands)))
    }

    fn whole_domain_from(&self) -> usize {
        self.domain_from
    }

    /// Returns the number of pages from which a domain command is cheaper: the pages of a batch
    /// cost what they cost one by one.
    #[inline]
    fn meets_from(&self) -> usize {
        match self.page_ns {
            0 => usize::MAX,
            _ => self.domain_from.max(2),
        }
    }
}
