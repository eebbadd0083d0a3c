//! One remapping unit: registers, invalidation queue, table walks, caches, faults, leases.
//!
//! Work flows in from three sides, all on the one thread that owns the unit:
//!
//! * the guest's register accesses ([`Unit::read`], [`Unit::write`]), direct or through a front end
//!   of [`front`](crate::front). They change registers and note work; they never touch memory.
//! * [`Unit::step`], a bounded batch of that work: a switch of translation, register-based
//!   invalidations, then the queue (module `queue`). The completion of an invalidation waits for
//!   *stale leases* (module `leases`) to end: `CAP.DRD` and `CAP.DWD` promise it. That wait is a
//!   state.
//! * devices' translations ([`Iommu::translate`]): context cache, IOTLB, and on a miss the walk
//!   (module `walk`). A refusal is recorded (module `faults`); its interrupt leaves with the next
//!   step.
//!
//! There is no clock, no thread and no lock: `now` comes in as an argument and interrupts go out
//! through [`Sink`]. Guest memory may return `Pending` anywhere; the unit then stays parked on the
//! ticket until [`Unit::ticket_done`] and does the same thing again. A translation that pends
//! leaves that to its device, and starts from the root entry when it is requested again, so no walk
//! result ever outlives an invalidation that came between: only results of one uninterrupted walk
//! are inserted.
//!
//! Caches may hold less than the architecture allows, never more: they are flushed also where
//! ESRTPS=0 would let old entries live on, and not-present entries are never kept (CM only changes
//! `CAP`).
//!
//! Cost of a hit: two cache lines, no atomics, no allocation; `make bench-vtd`.

mod commands;
mod context;
pub(crate) mod faults;
mod follow;
mod iotlb;
mod leases;
mod queue;
pub(crate) mod registers;
mod snapshot;
mod stats;
pub(crate) mod walk;

use guest_mem::{
    Access, Attachment, Budget, DmaFault, DrainTimer, Gpa, Iommu, Iova, LeaseTable, Next,
    PAGE_SIZE, Perm, PhysMem, Run, SourceId, Stop, Ticket, left_in_span,
};

use crate::config::Config;
use crate::spec::invalidate::WaitDescriptor;
use commands::Commands;
use context::ContextCache;
use faults::{Event as EventRegisters, Faults, Recorded};
use iotlb::{DomainTag, Iotlb};
use leases::{AskedBy, Scope};
use registers::Registers;
pub use registers::{FRCD, IOTLB, IVA, MAX_ADDRESS_MASK, MAX_FAULT_RECORDS};
pub use stats::Stats;
pub use walk::HOST_ADDRESS_WIDTH;
use walk::{
    Context, ContextKind, Mapping, WalkFault, WalkStop, Walker, permission_bit,
    touches_interrupt_range,
};

/// Length of a register access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessLen {
    /// 4 bytes.
    B4,
    /// 8 bytes.
    B8,
}

impl AccessLen {
    /// Length in bytes.
    pub const fn bytes(self) -> u16 {
        match self {
            Self::B4 => 4,
            Self::B8 => 8,
        }
    }

    /// From a length in bytes; other lengths are no register access.
    pub const fn from_bytes(bytes: usize) -> Option<Self> {
        match bytes {
            4 => Some(Self::B4),
            8 => Some(Self::B8),
            _ => None,
        }
    }
}

/// Receiver of a unit's interrupts and events.
pub trait Sink {
    /// Delivers this message-signalled interrupt. It is the unit's own and is never remapped.
    fn msi(&mut self, address: u64, data: u32);
    /// Delivers an event on which the VMM should act.
    fn event(&mut self, event: Event);
    /// Notifies the followers of the mappings that the caches have dropped `what`. Returns the
    /// number of followers that hold the invalidation's completion (the WAIT, CCMD.ICC, IVT,
    /// GSTS.TES) until each has released it by [`Unit::release`]. The unit has no time limit for
    /// that: a completion without the follower's release would be an unmap that has not happened.
    /// May be called twice for one invalidation.
    fn invalidated(&mut self, what: &Invalidation) -> u32 {
        let _ = what;
        0
    }
}

/// Scope of an invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// Everything.
    All,
    /// A domain.
    Domain(u16),
    /// Attachments of requesters: those that equal the id but for the bits of the mask.
    Sources(SourceId, u16),
    /// Pages of a domain: `len` bytes from `iova`.
    Pages {
        /// The domain.
        did: u16,
        /// First address.
        iova: Iova,
        /// Bytes.
        len: u64,
    },
}

/// Event on which the VMM should act.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An invalidation has waited `drain_limit_ns` for these devices to end stale leases. Sent once
    /// per wait; the wait stays parked until they have. Cancel their requests.
    DrainLimit {
        /// Devices that hold stale leases, each once.
        sources: Vec<SourceId>,
    },
}

/// State of the unit after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More can be done at once.
    Busy,
    /// Nothing to do until the guest or a device does something.
    Idle,
    /// Work is under way that continues only after an event outside the unit.
    Parked(Parked),
}

/// Event that a parked unit waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parked {
    /// Stale leases to end; step again after [`Leases::end`](guest_mem::Leases::end), and at
    /// [`Unit::deadline`].
    Drain,
    /// [`Unit::ticket_done`] with this ticket.
    Ticket(Ticket),
}

/// Work of one step, in estimated nanoseconds: 1,000 descriptors, or one that rechecks 6,000
/// leases.
const STEP_BUDGET: u64 = 30_000;

/// Reason why a step stops before its work is done.
enum Halt {
    /// Memory is absent.
    Ticket(Ticket),
    /// The budget is spent.
    Budget,
}

/// One remapping unit. See the head of the module for how work flows.
///
/// ```
/// use vtd::{AccessLen, Config, Unit, spec::registers};
/// let unit = Unit::new(Config::default());
/// assert_eq!(unit.read(registers::VER, AccessLen::B4), 0x10);
/// assert_eq!(unit.read(registers::FECTL, AccessLen::B4), 0x8000_0000); // masked
/// ```
pub struct Unit {
    config: Config,
    registers: Registers,
    pub(crate) faults: Faults,
    /// IECTL and its message.
    pub(crate) completion: EventRegisters,
    /// Translation, as it is in effect; GSTS.TES follows when old accesses have drained.
    te: bool,
    /// Root table latched by SRTP.
    root: Gpa,
    commands: Commands,
    /// A wait descriptor that waits for leases, or for its status page.
    parked_wait: Option<WaitDescriptor>,
    awaited: Option<Ticket>,
    /// The invalidation whose recheck of the leases is under way.
    checking: Option<(AskedBy, Scope)>,
    /// Cost of the work since the last [`Unit::take_cost`], in estimated ns.
    cost: u64,
    drain: DrainTimer,
    /// Holds of invalidations that have not been released.
    holds: u32,
    contexts: ContextCache,
    iotlb: Iotlb,
    leases: LeaseTable,
    generation: u64,
    /// Counts changes that a register page may have to show.
    changes: u64,
    stats: Stats,
}

impl Unit {
    /// A unit after power-on.
    ///
    /// # Panics
    /// If the configuration breaks a bound that its fields state: it comes from the VMM, not a
    /// guest.
    pub fn new(config: Config) -> Self {
        assert!(
            (8..=MAX_FAULT_RECORDS).contains(&config.fault_records),
            "{} fault recording registers",
            config.fault_records
        );
        Self {
            registers: Registers::default(),
            faults: Faults::new(config.fault_records),
            completion: EventRegisters::RESET,
            te: false,
            root: Gpa::new(0),
            commands: Commands::default(),
            parked_wait: None,
            awaited: None,
            checking: None,
            cost: 0,
            drain: DrainTimer::default(),
            holds: 0,
            contexts: ContextCache::new(),
            iotlb: Iotlb::new(),
            leases: LeaseTable::new(config.max_leases),
            generation: 1,
            changes: 0,
            stats: Stats::default(),
            config,
        }
    }

    /// Resets to the power-on state, caches included. Leases in flight and holds stay and still
    /// count: the VMM resets devices first. A ticket still awaited is forgotten.
    pub fn reset(&mut self) {
        let Self {
            config,
            registers,
            faults,
            completion,
            te,
            root,
            commands,
            parked_wait,
            awaited,
            checking,
            cost: _,
            drain,
            holds: _,
            contexts,
            iotlb,
            leases: _,
            generation,
            changes,
            stats: _,
        } = self;
        *registers = Registers::default();
        *faults = Faults::new(config.fault_records);
        *completion = EventRegisters::RESET;
        *te = false;
        *root = Gpa::new(0);
        *commands = Commands::default();
        *parked_wait = None;
        *awaited = None;
        *checking = None;
        *drain = DrainTimer::default();
        contexts.flush_all();
        iotlb.clear();
        *generation += 1;
        *changes += 1;
    }

    /// Returns the parameters of the unit.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Does a bounded batch of the work that registers and queue hold, then sends interrupts.
    /// `now_ns` is any clock that does not go back. Deterministic: the same state, memory and
    /// `now_ns` give the same result.
    pub fn step<M: PhysMem>(&mut self, mem: &M, now_ns: u64, sink: &mut impl Sink) -> Progress {
        let progress = self.run(mem, now_ns, sink, &mut |_| {});
        self.send_messages(sink);
        progress
    }

    /// [`step`](Unit::step) without interrupts, for front ends that show registers in memory:
    /// `publish_iqh` is called before a status word is written, and registers are shown before
    /// [`send_messages`](Unit::send_messages).
    pub(crate) fn run<M: PhysMem>(
        &mut self,
        mem: &M,
        now_ns: u64,
        sink: &mut impl Sink,
        publish_iqh: &mut impl FnMut(u64),
    ) -> Progress {
        if let Some(ticket) = self.awaited {
            return Progress::Parked(Parked::Ticket(ticket));
        }
        let mut budget = Budget::new(STEP_BUDGET);
        let worked = self
            .run_commands(mem, &mut budget, sink)
            .and_then(|()| self.run_queue(mem, &mut budget, sink, publish_iqh));
        self.cost += budget.spent();
        let is_draining = self.is_draining();
        self.watch_drain(is_draining, now_ns, sink);
        match worked {
            Err(Halt::Ticket(ticket)) => {
                self.awaited = Some(ticket);
                Progress::Parked(Parked::Ticket(ticket))
            }
            Err(Halt::Budget) => Progress::Busy,
            Ok(()) if is_draining => Progress::Parked(Parked::Drain),
            Ok(()) => Progress::Idle,
        }
    }

    /// Sends the pending messages of the event registers that are not masked.
    pub(crate) fn send_messages(&mut self, sink: &mut impl Sink) {
        for event in [&mut self.faults.event, &mut self.completion] {
            if let Some((address, data)) = event.take_message() {
                self.stats.messages += 1;
                self.changes += 1;
                sink.msi(address, data);
            }
        }
    }

    pub(crate) fn has_messages(&self) -> bool {
        self.faults.event.has_message() || self.completion.has_message()
    }

    /// Notifies the unit that `ticket` is done. Tickets that it does not await are ignored: they
    /// are a device's, or from before a reset. Call [`step`](Unit::step) next.
    pub fn ticket_done(&mut self, ticket: Ticket) {
        if self.awaited == Some(ticket) {
            self.awaited = None;
        }
    }

    /// Returns whether [`step`](Unit::step) would do something now. Check this after a lease ended,
    /// a ticket was done, a register was written, or a device was refused.
    pub fn needs_step(&self) -> bool {
        self.awaited.is_none() && (self.commands_have_work() || self.queue_has_work())
            || self.has_messages()
    }

    /// Returns the result of a step that finds nothing to do.
    pub(crate) fn standing(&self) -> Progress {
        match self.awaited {
            Some(ticket) => Progress::Parked(Parked::Ticket(ticket)),
            None if self.is_draining() => Progress::Parked(Parked::Drain),
            None => Progress::Idle,
        }
    }

    /// Returns the time at which [`Event::DrainLimit`] is due, in ns, if an invalidation drains:
    /// step again by then.
    pub fn deadline(&self) -> Option<u64> {
        self.drain.deadline(self.config.drain_limit_ns)
    }

    /// Releases `holds` of the holds that [`Sink::invalidated`] has returned. The caller keeps
    /// account of their owners. Call [`step`](Unit::step) next.
    pub fn release(&mut self, holds: u32) {
        debug_assert!(holds <= self.holds, "more is released than is held");
        self.holds = self.holds.saturating_sub(holds);
    }

    /// Whether an invalidation may complete.
    #[inline]
    fn is_drained(&self) -> bool {
        self.leases.stale() == 0 && self.holds == 0
    }

    /// Takes the cost of the steps since the last call, in estimated nanoseconds of the thread that
    /// made them: a core that polls several machines charges it to this one.
    pub fn take_cost(&mut self) -> u64 {
        std::mem::take(&mut self.cost)
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Whether the guest has turned DMA remapping on.
    pub fn is_translating(&self) -> bool {
        self.te
    }

    /// Counts changes that a register page may have to show.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    fn walker(&self) -> Walker {
        Walker {
            root: self.root,
            width: self.config.width,
            large_pages: self.config.large_pages,
            snoop_control: self.config.snoop_control,
        }
    }

    /// Everything but a 4 KiB IOTLB hit.
    #[cold]
    #[inline(never)]
    fn translate_slow<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Access<Run> {
        match self.find(mem, source, iova, perm) {
            Ok(run) => Ok(run),
            Err(WalkStop::Pending(ticket)) => Err(Stop::Pending(ticket)),
            Err(WalkStop::Fault(fault)) => {
                self.record_fault(source, iova, perm, fault);
                Err(DmaFault::Blocked { iova }.into())
            }
        }
    }

    /// Returns the mapping of `iova`; a refusal is not recorded.
    fn find<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Result<Run, WalkStop> {
        if !self.te {
            self.stats.untranslated += 1;
            return Ok(Run {
                gpa: Gpa::new(iova.raw()),
                len: iova.left_in_page(),
            });
        }
        let mapping = self.resolve(mem, source, iova, perm)?;
        let len = if is_cacheable(&mapping, iova) {
            mapping.left(iova)
        } else {
            iova.left_in_page()
        };
        Ok(Run {
            gpa: mapping.gpa(iova),
            len,
        })
    }

    fn resolve<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Result<Mapping, WalkStop> {
        let walker = self.walker();
        let context = match self.contexts.get(source) {
            Some(context) => context,
            None => {
                self.stats.context_walks += 1;
                let context = walker.context(mem, source)?;
                self.cache_context(source, context);
                context
            }
        };
        if context.kind == ContextKind::PassThrough {
            self.stats.untranslated += 1;
            return walker.translate(mem, &context, iova, perm);
        }
        let tag = self.contexts.tag(source);
        if tag != DomainTag::NONE {
            // The small table again, in case only the context was not cached. A permission that an
            // entry lacks may have been granted since: ask the tables.
            let small = self.iotlb.lookup_small(tag, iova);
            let found = small.or_else(|| self.iotlb.lookup_large(tag, iova));
            if let Some(mapping) = found.filter(|mapping| mapping.allows(perm)) {
                self.stats.iotlb_hits += 1;
                return Ok(mapping);
            }
        }
        self.stats.iotlb_misses += 1;
        let mapping = walker.translate(mem, &context, iova, perm)?;
        if tag != DomainTag::NONE && is_cacheable(&mapping, iova) {
            self.iotlb.insert(tag, iova, &mapping);
        }
        Ok(mapping)
    }

    /// Extends the run of `done` bytes at `gpa`, to which `iova` translates, by the mappings that
    /// follow it in memory, up to `len` bytes. Stops before a page that is refused or pends; a call
    /// for the rest, from there on, returns that result.
    #[cold]
    #[inline(never)]
    fn extend<M: PhysMem>(
        &mut self,
        mem: &M,
        (source, perm): (SourceId, Perm),
        iova: Iova,
        gpa: Gpa,
        (mut done, len): (u64, u64),
    ) -> Run {
        let len = len.min(left_in_span(iova));
        while done < len {
            let (Some(at), Some(want)) = (iova.checked_add(done), gpa.checked_add(done)) else {
                break;
            };
            match self.find(mem, source, at, perm) {
                Ok(next) if next.gpa == want => done += next.len,
                _ => break,
            }
        }
        let len = done.min(len);
        Run { gpa, len }
    }

    /// The mappings that follow the one of `iova`, which was found to go to `gpa`: the pages of the
    /// IOTLB first.
    #[inline(never)]
    fn follow<M: PhysMem>(
        &mut self,
        mem: &M,
        (source, perm): (SourceId, Perm),
        iova: Iova,
        gpa: Gpa,
        len: u64,
    ) -> Run {
        let (tag, need) = (self.contexts.tag(source), permission_bit(perm));
        let run = iova.left_in_page();
        // Nothing here wraps: a span is aligned, and inside the context's address width.
        let len = len.min(left_in_span(iova));
        let (at, next) = (iova.raw() + run, gpa.raw() + run);
        let pages = (len - run).div_ceil(PAGE_SIZE);
        let (hits, is_over) = self
            .iotlb
            .follow(tag, Iova::new(at), Gpa::new(next), pages, need);
        self.stats.iotlb_hits += hits;
        let run = run + hits * PAGE_SIZE;
        if is_over {
            let len = run.min(len);
            return Run { gpa, len };
        }
        self.extend(mem, (source, perm), iova, gpa, (run, len))
    }

    fn cache_context(&mut self, source: SourceId, context: Context) {
        if self.iotlb.is_exhausted() {
            self.contexts.flush_all();
            self.iotlb.clear();
        }
        let tag = match (context.kind, self.contexts.domain(context.did)) {
            (ContextKind::PassThrough, _) => DomainTag::NONE,
            (_, None) => self.iotlb.begin_epoch(),
            (_, Some((tag, beyond))) if beyond == context.beyond => tag,
            // Two widths in one domain are a mistake of the guest's. An address may be valid for
            // one and not for the other: nothing is cached.
            (_, Some(_)) => DomainTag::NONE,
        };
        self.contexts.insert(source, context, tag);
    }

    fn record_fault(&mut self, source: SourceId, iova: Iova, perm: Perm, fault: WalkFault) {
        if fault.silent {
            self.stats.faults_silent += 1;
            return;
        }
        match self.faults.record(source, iova, perm, fault.reason) {
            Recorded::New => self.stats.faults_recorded += 1,
            Recorded::Collapsed => self.stats.faults_collapsed += 1,
            Recorded::Overflow => self.stats.faults_dropped += 1,
        }
        self.changes += 1;
    }
}

/// Returns whether the translation of one address in a page is valid for all of the page: not if
/// the page, or the memory that it maps to, touches the interrupt range.
fn is_cacheable(mapping: &Mapping, iova: Iova) -> bool {
    let size = mapping.size.bytes();
    !touches_interrupt_range(iova.align_down(size).raw(), size)
        && !touches_interrupt_range(mapping.page.raw(), size)
}

impl Iommu for Unit {
    #[inline]
    fn translate<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Access<Run> {
        let tag = self.contexts.tag(source);
        if let Some(gpa) = self.iotlb.lookup(tag, iova, permission_bit(perm)) {
            self.stats.iotlb_hits += 1;
            let len = iova.left_in_page();
            return Ok(Run { gpa, len });
        }
        self.translate_slow(mem, source, iova, perm)
    }

    #[inline(always)]
    fn translate_run<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        iova: Iova,
        len: u64,
        perm: Perm,
    ) -> Access<Run> {
        let (tag, need) = (self.contexts.tag(source), permission_bit(perm));
        if let Some(gpa) = self.iotlb.lookup(tag, iova, need) {
            self.stats.iotlb_hits += 1;
            let run = iova.left_in_page();
            if len <= run {
                return Ok(Run { gpa, len });
            }
            if self.iotlb.parts_behind(tag, iova, gpa) {
                return Ok(Run { gpa, len: run });
            }
            return Ok(self.follow(mem, (source, perm), iova, gpa, len));
        }
        let run = self.translate_slow(mem, source, iova, perm)?;
        Ok(self.extend(mem, (source, perm), iova, run.gpa, (run.len, len)))
    }

    /// One counter for the unit: it moves with every invalidation, SRTP, switch of translation and
    /// reset.
    #[inline]
    fn generation(&self, _source: SourceId) -> u64 {
        self.generation
    }

    fn attachment<M: PhysMem>(&self, mem: &M, source: SourceId) -> Access<Attachment> {
        if !self.te {
            return Ok(Attachment::Off);
        }
        self.walker().attachment(mem, source)
    }

    fn next_mapping<M: PhysMem>(
        &self,
        mem: &M,
        source: SourceId,
        from: Iova,
        last: Iova,
        budget: &mut Budget,
    ) -> Access<Next> {
        if !self.te {
            return Ok(Next::None);
        }
        self.walker()
            .next_mapping(mem, source, (from, last), budget)
    }

    type Leases = LeaseTable;

    #[inline(always)]
    fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    #[inline(always)]
    fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases
    }
}
