//! Invalidation queue of one unit: free space, tickets, completion, errors.
//!
//! Tickets count up from 1. Ticket *t* has status word *t* mod W, where W is the largest number of
//! batches in flight: half the number of descriptors, since a batch has at least two. *t* is
//! complete when its word holds its low 32 bits: an earlier ticket of that word was *t* − kW, which
//! differs. *t* is also complete when it is below `reclaimed`: a submitter has seen its word, and
//! then reused the descriptors and the word. Tickets below `void_below` are void: they were in
//! flight when the queue stopped, or are older.

use std::sync::atomic::{AtomicU64, Ordering};

use dma_map::Clock;
use dma_map::invalidate::{InvalidateError, Ticket};
use guest_mem::{Gpa, PAGE_SIZE, PhysMem};
use lines::{CachePadded, Lock};
use thiserror::Error;
use vtd::spec::invalidate::DESCRIPTOR_LEN;
use vtd::spec::registers::{
    CAP, Capability, ECAP, ExtendedCapability, FSTS, FaultStatus, GCMD, GSTS, GlobalCommand,
    GlobalStatus, IQA, IQT, QueueAddress,
};

use crate::Registers;
use crate::encode::{BATCH, Encoder};

/// Time between two reads of the fault status register while a batch is awaited, in nanoseconds.
pub const CHECK_NS: u64 = 2_000;

/// Status of [`InvalidateError::Stopped`] if queue or status words are not in memory any more. No
/// bit of FSTS.
pub const MEMORY_LOST: u64 = 1 << 32;

/// FSTS bits that stop the queue.
const ERRORS: u32 = FaultStatus::new()
    .with_iqe(true)
    .with_ice(true)
    .with_ite(true)
    .into_bits();
/// GCMD bits that are levels, at the same positions in GSTS. The others trigger an action.
const LEVELS: u32 = GlobalCommand::new()
    .with_te(true)
    .with_eafl(true)
    .with_qie(true)
    .with_ire(true)
    .with_cfi(true)
    .into_bits();
const QIE: u32 = GlobalCommand::new().with_qie(true).into_bits();

/// Addresses of the queue in the memory that the unit reads, and its time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// First descriptor; aligned to 4096.
    pub queue: Gpa,
    /// QS: the queue has 2^`size` pages of 256 descriptors; 0 to 7.
    pub size: u8,
    /// First of [`status_words`](Self::status_words) words of 4 bytes; aligned to 4.
    pub status: Gpa,
    /// Longest time that the unit may take for one batch, or to make room for one, in nanoseconds.
    pub timeout_ns: u64,
}

impl QueueConfig {
    /// Creates a configuration with one page for the queue and a timeout of 10 s.
    pub const fn new(queue: Gpa, status: Gpa) -> Self {
        Self {
            queue,
            size: 0,
            status,
            timeout_ns: 10_000_000_000,
        }
    }

    /// Number of descriptors in the queue.
    const fn entries(&self) -> u64 {
        (PAGE_SIZE / DESCRIPTOR_LEN) << self.size
    }

    /// Number of status words of 4 bytes: 128 for each page of the queue.
    pub const fn status_words(&self) -> u64 {
        self.entries() / 2
    }
}

/// Reason why a queue was not turned on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum EnableError {
    /// The unit has no queued invalidation.
    #[error("the unit has no queued invalidation (ECAP {ecap:#x})")]
    NoQueue {
        /// Its extended capabilities.
        ecap: u64,
    },
    /// The unit caches entries that are not present, does not read the processor's caches, or has a
    /// write buffer.
    #[error("the unit needs more than invalidations after unmap (CAP {cap:#x}, ECAP {ecap:#x})")]
    Unsupported {
        /// Its capabilities.
        cap: u64,
        /// Its extended capabilities.
        ecap: u64,
    },
    /// The queue is on already: another driver uses it.
    #[error("the unit's queue is in use")]
    InUse,
    /// Sizes or addresses break the rules of [`QueueConfig`], or are not in memory.
    #[error("{config:?} is no place for a queue")]
    Place {
        /// The given configuration.
        config: QueueConfig,
    },
    /// The unit did not answer.
    #[error("the unit did not turn its queue on")]
    NoAnswer(#[source] InvalidateError),
}

/// State of submissions, changed by one submitter at a time.
struct State {
    /// Number of the next ticket.
    next: u64,
    /// Numbers of descriptors written since the queue was turned on, and of those reclaimed.
    written: u64,
    freed: u64,
    /// For each status word: value of `written` after the ticket's wait descriptor.
    ends: Box<[u64]>,
    /// The batch being written.
    batch: Vec<u128>,
    is_stopped: bool,
}

/// The invalidation queue of one unit, shared by its domains. See the [crate documentation](crate).
pub struct InvalidationQueue<R, M, C> {
    registers: R,
    memory: M,
    clock: C,
    config: QueueConfig,
    encoder: Encoder,
    state: CachePadded<Lock<State>>,
    /// Tickets below this are complete, unless they are void. Written with the lock held.
    reclaimed: CachePadded<AtomicU64>,
    /// The last ticket, 0 before the first. Written with the lock held.
    submitted: AtomicU64,
    /// Tickets below this are void. Written with the lock held, before `reclaimed`.
    void_below: AtomicU64,
    /// FSTS bits with which the queue stopped last.
    stopped_with: AtomicU64,
    /// Time of the next read of FSTS, in nanoseconds.
    next_check: AtomicU64,
    /// For each status word: time of the submission of its ticket, in nanoseconds.
    submitted_ns: Box<[AtomicU64]>,
}

impl<R: Registers, M: PhysMem, C: Clock> InvalidationQueue<R, M, C> {
    /// Turns the queue of a unit on. No other code may submit to it, nor write GCMD during the
    /// call; later GCMD may be written through [`with_registers`](Self::with_registers) only.
    /// `memory` must be the memory that the unit reads, and its accesses must not pend. Only the
    /// queue may use the addresses in `config`.
    ///
    /// # Errors
    /// [`EnableError`].
    pub fn enable(
        registers: R,
        memory: M,
        clock: C,
        config: QueueConfig,
    ) -> Result<Self, EnableError> {
        let (cap, ecap) = (registers.read64(CAP), registers.read64(ECAP));
        let capability = Capability::from_bits(cap);
        let extended = ExtendedCapability::from_bits(ecap);
        if !extended.qi() {
            return Err(EnableError::NoQueue { ecap });
        }
        if capability.cm() || capability.rwbf() || !extended.c() {
            return Err(EnableError::Unsupported { cap, ecap });
        }
        if GlobalStatus::from_bits(registers.read32(GSTS)).qies() {
            return Err(EnableError::InUse);
        }
        if config.size > 7
            || !config.queue.is_aligned(PAGE_SIZE)
            || !config.status.is_aligned(4)
            || !is_memory(&memory, &config)
        {
            return Err(EnableError::Place { config });
        }
        let words = config.status_words() as usize;
        let queue = Self {
            registers,
            memory,
            clock,
            config,
            encoder: Encoder::new(capability),
            state: CachePadded::new(Lock::new(State {
                next: 1,
                written: 0,
                freed: 0,
                ends: vec![0; words].into(),
                batch: Vec::with_capacity(BATCH),
                is_stopped: true,
            })),
            reclaimed: CachePadded::new(AtomicU64::new(1)),
            submitted: AtomicU64::new(0),
            void_below: AtomicU64::new(1),
            stopped_with: AtomicU64::new(0),
            next_check: AtomicU64::new(0),
            submitted_ns: (0..words).map(|_| AtomicU64::new(0)).collect(),
        };
        let started = queue.restart(&mut queue.state.lock());
        started.map_err(EnableError::NoAnswer)?;
        Ok(queue)
    }

    /// Calls `f` with the registers while no other thread submits and the queue is not restarted.
    /// For writes of GCMD.
    pub fn with_registers<T>(&self, f: impl FnOnce(&R) -> T) -> T {
        let _state = self.state.lock();
        f(&self.registers)
    }

    /// Invalidates all cached entries, including contexts. Returns when that is complete.
    ///
    /// # Errors
    /// [`InvalidateError`].
    pub fn flush_all(&self) -> Result<(), InvalidateError> {
        self.wait(self.submit(Encoder::all)?)
    }

    /// Writes the descriptors of `encode`, and a wait descriptor, as soon as there is room.
    pub(super) fn submit(
        &self,
        encode: impl Fn(Encoder, &mut Vec<u128>),
    ) -> Result<Ticket, InvalidateError> {
        let mut since = None;
        loop {
            let mut state = self.state.lock();
            if state.is_stopped {
                self.restart(&mut state)?;
            }
            state.batch.clear();
            encode(self.encoder, &mut state.batch);
            debug_assert!(state.batch.len() <= BATCH);
            if self.has_room(&state) || self.reclaim(&mut state)? && self.has_room(&state) {
                return self.write_batch(&mut state);
            }
            drop(state);
            let now = self.clock.now();
            let waited_ns = now.saturating_sub(*since.get_or_insert(now));
            if waited_ns >= self.config.timeout_ns {
                return Err(InvalidateError::TimedOut { waited_ns });
            }
            self.check(now)?;
            self.registers.pause();
        }
    }

    /// Returns whether there is room for the batch and its wait descriptor. A queue whose head
    /// equals its tail is empty, so one entry always stays free.
    fn has_room(&self, state: &State) -> bool {
        let free = self.config.entries() - 1 - (state.written - state.freed);
        let in_flight = state.next - self.reclaimed.load(Ordering::Relaxed);
        (state.batch.len() as u64) < free && in_flight < self.config.status_words()
    }

    /// Reclaims descriptors and status words of completed batches. Returns whether there were any.
    fn reclaim(&self, state: &mut State) -> Result<bool, InvalidateError> {
        let before = self.reclaimed.load(Ordering::Relaxed);
        let mut first = before;
        while first < state.next && self.status(first)? == first as u32 {
            state.freed = state.ends[self.word(first)];
            first += 1;
        }
        // Release: pairs with `poll` in a thread that has not read the status word itself.
        self.reclaimed.store(first, Ordering::Release);
        Ok(first > before)
    }

    fn write_batch(&self, state: &mut State) -> Result<Ticket, InvalidateError> {
        let ticket = state.next;
        let word = self.word(ticket);
        let status = self.config.status.raw() + word as u64 * 4;
        state.batch.push(Encoder::wait(status, ticket as u32));
        let entries = self.config.entries();
        let mut written = state.written;
        for descriptor in &state.batch {
            let at = self.config.queue.raw() + written % entries * DESCRIPTOR_LEN;
            let stored = self.memory.write(Gpa::new(at), &descriptor.to_le_bytes());
            stored.map_err(|_| LOST)?;
            written += 1;
        }
        state.written = written;
        state.ends[word] = written;
        state.next += 1;
        // Relaxed: read only by threads that have the ticket, which this call returns; passing the
        // ticket on orders this store before their load.
        self.submitted_ns[word].store(self.clock.now(), Ordering::Relaxed);
        // With the lock held, so tails are written in order. A tail is at most 512 KiB.
        let tail = (written % entries * DESCRIPTOR_LEN) as u32;
        self.registers.write32(IQT, tail);
        // Relaxed: a hint for `is_idle`.
        self.submitted.store(ticket, Ordering::Relaxed);
        Ok(Ticket(ticket))
    }

    /// Returns whether the unit has completed all batches, or has stopped: then the next submission
    /// returns the reason.
    pub(super) fn is_idle(&self) -> bool {
        let last = self.submitted.load(Ordering::Relaxed);
        // The last batch is void, or complete. Before the first, `last` is 0 and below
        // `void_below`.
        last < self.void_below.load(Ordering::Relaxed)
            || last < self.reclaimed.load(Ordering::Relaxed)
            || self.status(last).is_ok_and(|word| word == last as u32)
    }

    fn word(&self, ticket: u64) -> usize {
        (ticket % self.config.status_words()) as usize
    }

    /// Loads the status word of a ticket.
    fn status(&self, ticket: u64) -> Result<u32, InvalidateError> {
        let at = Gpa::new(self.config.status.raw() + self.word(ticket) as u64 * 4);
        // Acquire: if this load sees the ticket, the unit's earlier stores are visible.
        let pair = self.memory.read_u64(at.align_down(8)).map_err(|_| LOST)?;
        Ok((pair >> (at.offset_in(8) * 8)) as u32)
    }

    /// Returns whether a batch is complete.
    pub(super) fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        let ticket = ticket.0;
        if self.status(ticket)? == ticket as u32 {
            return Ok(true);
        }
        // Acquire, and in this order: if the load of `reclaimed` sees a value past a void ticket,
        // the load of `void_below` sees that the ticket is void.
        let reclaimed = self.reclaimed.load(Ordering::Acquire);
        if ticket < self.void_below.load(Ordering::Acquire) {
            let status = self.stopped_with.load(Ordering::Relaxed);
            return Err(InvalidateError::Stopped { status });
        }
        if ticket < reclaimed {
            return Ok(true);
        }
        let now = self.clock.now();
        self.check(now)?;
        let since = self.submitted_ns[self.word(ticket)].load(Ordering::Relaxed);
        let waited_ns = now.saturating_sub(since);
        if waited_ns >= self.config.timeout_ns {
            return Err(InvalidateError::TimedOut { waited_ns });
        }
        Ok(false)
    }

    /// Waits until a batch is complete.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<(), InvalidateError> {
        while !self.poll(ticket)? {
            self.registers.pause();
        }
        Ok(())
    }

    /// Checks for errors, at most once in [`CHECK_NS`].
    fn check(&self, now: u64) -> Result<(), InvalidateError> {
        if now < self.next_check.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.next_check.store(now + CHECK_NS, Ordering::Relaxed);
        if self.registers.read32(FSTS) & ERRORS == 0 {
            return Ok(());
        }
        let mut state = self.state.lock();
        // Read again: another thread may have cleared the errors and restarted the queue.
        let status = u64::from(self.registers.read32(FSTS) & ERRORS);
        if status == 0 {
            return Ok(());
        }
        state.is_stopped = true;
        self.stopped_with.store(status, Ordering::Relaxed);
        self.void_below.store(state.next, Ordering::Release);
        Err(InvalidateError::Stopped { status })
    }

    /// Turns the queue off, if it is on, and on again. Void tickets stay void. The caller holds the
    /// lock.
    fn restart(&self, state: &mut State) -> Result<(), InvalidateError> {
        self.switch(false)?;
        let errors = self.registers.read32(FSTS) & ERRORS;
        if errors != 0 {
            // RW1C. Cleared before QIE is set, so a thread that reads QIES as set reads these as
            // clear.
            self.registers.write32(FSTS, errors);
        }
        let address = QueueAddress::new()
            .with_qs(self.config.size)
            .with_iqa(self.config.queue.raw() / PAGE_SIZE);
        self.registers.write64(IQT, 0);
        self.registers.write64(IQA, address.into_bits());
        self.switch(true)?;
        (state.written, state.freed) = (0, 0);
        state.is_stopped = false;
        self.reclaimed.store(state.next, Ordering::Release);
        Ok(())
    }

    fn switch(&self, on: bool) -> Result<(), InvalidateError> {
        let is_on = || GlobalStatus::from_bits(self.registers.read32(GSTS)).qies();
        if is_on() == on {
            return Ok(());
        }
        let levels = self.registers.read32(GSTS) & LEVELS & !QIE;
        let command = if on { levels | QIE } else { levels };
        self.registers.write32(GCMD, command);
        let since = self.clock.now();
        while is_on() != on {
            let waited_ns = self.clock.now().saturating_sub(since);
            if waited_ns >= self.config.timeout_ns {
                return Err(InvalidateError::TimedOut { waited_ns });
            }
            self.registers.pause();
        }
        Ok(())
    }
}

const LOST: InvalidateError = InvalidateError::Stopped {
    status: MEMORY_LOST,
};

/// Writes zeroes to the queue and the status words. Returns whether all of them are in memory.
fn is_memory(memory: &impl PhysMem, config: &QueueConfig) -> bool {
    let clear = |from: Gpa, bytes: u64| {
        let zeroes = vec![0; bytes as usize];
        // `status` reads aligned pairs of words.
        memory.write(from, &zeroes).is_ok()
            && memory.read_u64(from.align_down(8)).is_ok()
            && from
                .checked_add(bytes - 1)
                .is_some_and(|last| memory.read_u64(last.align_down(8)).is_ok())
    };
    clear(config.queue, config.entries() * DESCRIPTOR_LEN)
        && clear(config.status, config.status_words() * 4)
}
