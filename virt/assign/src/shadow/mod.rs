//! Shadow of one device's mappings: its container maps exactly what its guest maps.
//!
//! ```text
//! Function::invalidated ─ task, hold ─▶ begin: read the device's attachment (context entries)
//!              │ a domain                            │ nothing          │ pass-through
//!              ▼                                     ▼                  ▼
//!      check: each mapping of the book         tear all down      tear down, map all of RAM
//!      against the tables ─▶ gone: stale, or unmapped
//!              ▼
//!      fill: each mapping of the tables that the book lacks
//!              ─▶ host memory ─▶ *into the book* ─▶ map
//!              ▼
//!      settle: the calls have returned ─▶ Effects::release(hold)
//! ```
//!
//! **Order.** Map: walk, wait for host memory, *book* (from here a page is in use), call, release.
//! Unmap: call returned and complete, *only then* out of the book, release. Otherwise a page would
//! be evicted under a device. Checks come before fills, so that an IOVA which the guest maps to
//! something else has been unmapped by then; calls are made in the order of submission
//! ([`calls`](crate::calls)).
//!
//! **The exact difference.** Linux invalidates alike after a map and after an unmap: in aligned
//! powers of two, of a whole domain, or of everything. So an invalidation only says where to look,
//! and the tables say what is mapped there. A mapping of type 1 is unmapped as a whole: where a
//! guest unmaps a part of one (halves of a large page), it is unmapped, the rest is mapped again,
//! and that domain continues in pages of 4 KiB. Each run that one invalidation made is one mapping,
//! never merged across invalidations. Mappings that are unmapped together share one call.
//!
//! **Slices.** Each poll has a budget; a table walk, the check of a large mapping and a replay of
//! all of a guest's tables resume where they stopped. If the guest changes a table during a walk,
//! it has to invalidate again: each entry is read once.
//!
//! **Failure.** A map that is refused completes its WAIT; its pages stay out of the device's reach,
//! are counted, and the user gets one line. If an unmap failed, or did less than the book says, or
//! takes longer than a hold may, the device must not reach memory any more: its bus mastering goes
//! off and the device is released (the function does that: [`Shadow::take_failure`]), then the
//! container is closed, by force if its mappings cannot be ended otherwise, and only then WAITs
//! complete.
//!
//! Bounds: `TASKS` (64) tasks (more are joined to one that checks everything), twice as many
//! holds, [`calls::MOST`](crate::calls::MOST) calls under way, `TOGETHER` (1,024) mappings in a
//! call, as many mappings as the container has (65,535).

mod check;
mod fill;
mod teardown;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::RawFd;

use dma_map::risk::Risk;
use guest_mem::{Attachment, Budget, Iommu, Iova, PAGE_SIZE, PhysMem, SourceId, Stop, Ticket};
use machine::{Effects, Hold, HoldId, Invalidation, Progress, Scope};

use crate::calls::{Call, CallId, Caller, Done, MOST};
use crate::container_mappings::{ContainerMappings, Mapping};
use crate::policy::{Account, HostPolicy};
use crate::reach::Reach;
use check::Check;
use fill::Fill;

/// Most invalidations that are handled one by one.
const TASKS: usize = 64;
/// Mappings that one call ends.
const TOGETHER: usize = 1024;
/// Work of one poll, in estimated ns.
const SLICE: u64 = 20_000;
/// Last page of any IOVA.
const LAST_PAGE: u64 = u64::MAX / PAGE_SIZE;

/// Parameters of a shadow.
#[derive(Clone, Debug)]
pub struct Limits {
    /// RAM of the guest: first page and pages, sorted.
    pub ram: Vec<(u64, u64)>,
    /// IOVAs that the host's IOMMU allows: likewise.
    pub allowed: Vec<(u64, u64)>,
    /// A pass-through context maps all of RAM; if not, the device reaches nothing.
    pub allows_pass_through: bool,
    /// All of RAM is mapped while translation is off.
    pub maps_while_off: bool,
}

/// Memory that the device reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No memory.
    Nothing,
    /// All of RAM.
    All,
    /// The memory that the tables of this domain map.
    Domain(u32),
}

/// Counters of a shadow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Invalidations of pages of its domain.
    pub pages_told: u64,
    /// Invalidations of the whole domain.
    pub domains_told: u64,
    /// Invalidations of context entries, and of everything.
    pub others_told: u64,
    /// Calls that map, refused ones included.
    pub maps: u64,
    /// Pages mapped by them.
    pub mapped_pages: u64,
    /// Calls that unmap.
    pub unmaps: u64,
    /// Mappings ended by them.
    pub unmapped: u64,
    /// Stale mappings that the guest mapped again.
    pub hits: u64,
    /// Mappings that had to be made.
    pub misses: u64,
    /// Mappings of which a guest unmapped a part.
    pub cut: u64,
    /// Runs refused since they lie outside RAM.
    pub not_ram: u64,
    /// Runs refused since the host's IOMMU does not allow their IOVAs.
    pub not_allowed: u64,
    /// Runs that the host refused.
    pub refused: u64,
    /// Pass-through contexts.
    pub pass_through: u64,
    /// Times that the device was attached to something else.
    pub attached: u64,
    /// Longest call, ns.
    pub longest_call_ns: u64,
}

/// Scope of an invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Pages of the domain, first and last.
    Pages(u64, u64),
    /// The attachment of the device.
    Attachment,
    /// The attachment, and all mappings.
    Everything,
}

/// Phase of a task.
#[derive(Debug)]
enum Phase {
    Begin,
    /// All mappings are unmapped, for this mode.
    TearDown(Mode),
    Check(Check),
    Fill(Fill),
    /// Done but for calls under way.
    Settle,
}

/// Work caused by one invalidation, or several.
#[derive(Debug)]
struct Task {
    what: What,
    holds: Vec<HoldId>,
    phase: Phase,
    /// The last call that has to return before the task is done.
    until: Option<CallId>,
    /// First pages of mappings that are stale once the holds are released.
    kept: Vec<u64>,
}

impl Task {
    fn new(what: What, holds: Vec<HoldId>) -> Self {
        Self {
            what,
            holds,
            phase: Phase::Begin,
            until: None,
            kept: Vec::new(),
        }
    }
}

/// A call under way.
#[derive(Debug)]
struct UnderWay {
    id: CallId,
    what: HostCall,
    /// Time of submission, in ns.
    since: u64,
}

#[derive(Debug)]
enum HostCall {
    /// The mapping; whether it was refused before.
    Map(Mapping, bool),
    /// Mappings, and since when each is stale in the guest's belief.
    Unmap(Vec<(Mapping, Option<u64>)>),
    Reset,
    Close,
}

/// State of the container.
#[derive(Debug, PartialEq, Eq)]
enum State {
    Open,
    /// No more calls are submitted; the device is yet to be cut off.
    Failed,
    Closing,
    Closed,
}

/// Reason why a task pauses.
enum Pause {
    /// The budget is spent.
    Budget,
    /// The task waits for a call, or for memory.
    Wait,
}

/// See the module's head. All calls come from the owner's thread.
pub struct Shadow<C> {
    source: SourceId,
    limits: Limits,
    policy: HostPolicy,
    caller: C,
    book: ContainerMappings,
    mode: Mode,
    /// Translation is off, and therefore the device reaches nothing.
    is_off: bool,
    /// The guest has cut a mapping of this domain: each page is a mapping of its own.
    is_granular: bool,
    tasks: VecDeque<Task>,
    calls: VecDeque<UnderWay>,
    next_call: u64,
    /// Memory that the task in front waits for.
    awaited: Option<Ticket>,
    account: Account,
    counts: Counts,
    state: State,
    is_resetting: bool,
    failure: Option<String>,
    /// Kinds of refusals that were logged.
    said: LoggedOnce,
    /// A hold has lasted for too long: calls that unmap are watched.
    overdue: bool,
    /// Mappings whose call failed: in reach until the container is closed.
    unended: Vec<(Mapping, Option<u64>)>,
    /// The time of the poll under way, ns.
    now: u64,
}

#[derive(Debug, Default)]
struct LoggedOnce {
    not_ram: bool,
    not_allowed: bool,
    refused: bool,
    pass_through: bool,
}

impl<C: Caller> Shadow<C> {
    /// Creates an empty shadow of the attachment of `source`, with calls made by `caller`. Its
    /// pages are in use in `reach`.
    pub fn new(
        source: SourceId,
        limits: Limits,
        policy: HostPolicy,
        reach: Reach,
        caller: C,
    ) -> Self {
        Self {
            source,
            limits,
            policy,
            caller,
            book: ContainerMappings::new(reach),
            mode: Mode::Nothing,
            is_off: false,
            is_granular: false,
            tasks: VecDeque::new(),
            calls: VecDeque::new(),
            next_call: 0,
            awaited: None,
            account: Account::default(),
            counts: Counts::default(),
            state: State::Open,
            is_resetting: false,
            failure: None,
            said: LoggedOnce::default(),
            overdue: false,
            unended: Vec::new(),
            now: 0,
        }
    }

    /// Notifies the shadow of an invalidation. The following polls handle it, and it is held until
    /// they are done.
    pub fn told(&mut self, what: &Invalidation, hold: HoldId) -> Hold {
        let what = match what.scope {
            Scope::Interrupts => return Hold::No,
            Scope::Range { domain, iova, len } => {
                if self.mode != Mode::Domain(domain) && self.tasks.is_empty() {
                    return Hold::No;
                }
                self.counts.pages_told += 1;
                let first = iova.raw() / PAGE_SIZE;
                let last = iova.raw().saturating_add(len.saturating_sub(1)) / PAGE_SIZE;
                What::Pages(first, last)
            }
            Scope::Domain(domain) => {
                if self.mode != Mode::Domain(domain) && self.tasks.is_empty() {
                    // A context may have come to name it.
                    self.counts.others_told += 1;
                    What::Attachment
                } else {
                    self.counts.domains_told += 1;
                    What::Everything
                }
            }
            Scope::Source(source, ignored) => {
                if (source.0 ^ self.source.0) & !ignored != 0 {
                    return Hold::No;
                }
                self.counts.others_told += 1;
                What::Everything
            }
            Scope::All => {
                self.counts.others_told += 1;
                What::Everything
            }
        };
        if self.state == State::Closed {
            return Hold::No;
        }
        self.add_task(what, hold)
    }

    fn add_task(&mut self, what: What, hold: HoldId) -> Hold {
        // A task that has not begun and has the same scope, or a larger one. Its hold keeps this
        // invalidation's WAIT, too: with a hold for each, a guest could make the list grow.
        if let Some(last) = self.tasks.back_mut()
            && matches!(last.phase, Phase::Begin)
            && (last.what == what || last.what == What::Everything)
        {
            if !last.holds.is_empty() {
                return Hold::No;
            }
            last.holds.push(hold);
            return Hold::Yes;
        }
        let mut new = Task::new(what, vec![hold]);
        if self.tasks.len() >= TASKS {
            // All tasks that have not begun become one that checks everything.
            new.what = What::Everything;
            let mut holds = Vec::new();
            self.tasks.retain_mut(|task| {
                let stays = !matches!(task.phase, Phase::Begin);
                if !stays {
                    holds.append(&mut task.holds);
                }
                stays
            });
            new.holds.splice(0..0, holds);
        }
        self.tasks.push_back(new);
        Hold::Yes
    }

    /// Notifies the shadow that one of its holds has lasted for too long. From then on the
    /// duration of calls that unmap is limited.
    pub fn hold_overdue(&mut self) {
        self.overdue = true;
    }

    /// Reads the device's attachment without an invalidation: at the start, and after a reset of
    /// the function.
    pub fn look(&mut self) {
        if self.state == State::Open {
            let task = Task::new(What::Everything, Vec::new());
            self.tasks.push_back(task);
        }
    }

    /// Sets the policy. Mappings that are stale under the former one are torn down.
    pub fn set_policy(&mut self, policy: HostPolicy) {
        // Closing the container ends all stale mappings.
        if self.state != State::Open {
            return;
        }
        let stale = self.book.some_stale(usize::MAX);
        self.tear_down_stale(stale);
        // They count for the former policy.
        for call in &mut self.calls {
            if let HostCall::Unmap(mappings) = &mut call.what {
                for since in mappings.iter_mut().filter_map(|(_, since)| since.take()) {
                    self.account.end(self.now.saturating_sub(since));
                }
            }
        }
        self.policy = policy;
        self.account = Account::default();
    }

    /// Resets the device, after the calls under way. Its mappings stay.
    pub fn reset_device(&mut self) {
        if self.state == State::Open && !self.is_resetting {
            self.is_resetting = true;
            self.submit(Call::Reset, HostCall::Reset);
        }
    }

    /// Whether a reset is under way.
    pub fn is_resetting(&self) -> bool {
        self.is_resetting
    }

    /// Ends the shadow: tears everything down by closing the container.
    pub fn end(&mut self) {
        self.close();
    }

    /// Whether nothing is in the device's reach any more, for good.
    pub fn has_ended(&self) -> bool {
        self.state == State::Closed
    }

    /// Notifies the shadow that `ticket` is done.
    pub fn ticket_done(&mut self, ticket: Ticket) {
        if self.awaited == Some(ticket) {
            self.awaited = None;
        }
    }

    /// Takes the reason why the device has to be cut off, once. The caller turns bus mastering off,
    /// releases the device, and then [ends](Self::end) the shadow.
    pub fn take_failure(&mut self) -> Option<String> {
        self.failure.take()
    }

    /// Does a bounded batch of work.
    pub fn poll<I: Iommu, M: PhysMem, E>(
        &mut self,
        unit: &I,
        mem: &M,
        now: u64,
        out: &mut Effects<E>,
    ) -> Progress {
        self.now = now;
        let mut progress = self.take_done(mem);
        self.expire();
        let mut budget = Budget::new(SLICE);
        while self.state == State::Open && self.awaited.is_none() {
            let Some(mut task) = self.tasks.pop_front() else {
                break;
            };
            let step = self.go_on(&mut task, unit, mem, &mut budget);
            match step {
                Ok(()) => {
                    progress = Progress::Busy;
                    self.finish(task, out);
                }
                Err(pause) => {
                    self.tasks.push_front(task);
                    if matches!(pause, Pause::Budget) {
                        progress = Progress::Busy;
                    }
                    break;
                }
            }
            if budget.is_spent() {
                progress = Progress::Busy;
                break;
            }
        }
        self.watch_calls();
        if self.state == State::Closed {
            self.release_all(out);
        }
        progress
    }

    /// Whether a poll would find anything.
    pub fn has_work(&mut self) -> bool {
        self.caller.quiet();
        self.caller.has_done()
            || self.state == State::Open
                && self.awaited.is_none()
                && self.tasks.front().is_some_and(|task| self.can_go_on(task))
            || self.state == State::Closed && !self.tasks.is_empty()
            || self.failure.is_some()
    }

    /// Whether a task would do anything now.
    fn can_go_on(&self, task: &Task) -> bool {
        match task.phase {
            Phase::Settle => self.is_over(task.until),
            Phase::Begin | Phase::Check(_) | Phase::TearDown(_) | Phase::Fill(_) => {
                self.calls.len() < MOST
            }
        }
    }

    /// Returns the time of the next poll that is due without an event, in ns.
    pub fn deadline(&self) -> Option<u64> {
        if self.state != State::Open {
            return None;
        }
        let oldest = self.book.oldest_since();
        let expiry = oldest.map(|since| since.saturating_add(self.policy.age_ns()));
        expiry.into_iter().chain(self.call_limit()).min()
    }

    /// Returns a descriptor that is readable when a call has returned.
    pub fn wake_fd(&self) -> Option<RawFd> {
        self.caller.wake_fd()
    }

    /// Figures so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The book.
    pub fn book(&self) -> &ContainerMappings {
        &self.book
    }

    /// Returns the memory that the device reaches.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether translation is off, and the device reaches nothing therefore.
    pub fn is_off(&self) -> bool {
        self.is_off
    }

    /// The policy.
    pub fn policy(&self) -> HostPolicy {
        self.policy
    }

    /// Returns the account of stale mappings together with the bounds of the policy.
    pub fn risk(&self) -> Risk {
        self.account.risk(&self.policy)
    }

    fn go_on<I: Iommu, M: PhysMem>(
        &mut self,
        task: &mut Task,
        unit: &I,
        mem: &M,
        budget: &mut Budget,
    ) -> Result<(), Pause> {
        // Each turn is a phase, of which there are five in a row.
        loop {
            match &mut task.phase {
                Phase::Begin => task.phase = self.begin(task, unit, mem)?,
                Phase::TearDown(mode) => {
                    let mode = *mode;
                    self.tear_down_all(task)?;
                    task.phase = match mode {
                        Mode::All => Phase::Fill(Fill::all_of_ram()),
                        Mode::Domain(_) => Phase::Fill(Fill::of_tables(vec![(0, LAST_PAGE)])),
                        Mode::Nothing => Phase::Settle,
                    };
                }
                Phase::Check(_) => {
                    let ranges = self.check(task, unit, mem, budget)?;
                    task.phase = Phase::Fill(Fill::of_tables(ranges));
                }
                Phase::Fill(_) => {
                    self.fill(task, unit, mem, budget)?;
                    task.phase = Phase::Settle;
                }
                Phase::Settle if self.is_over(task.until) => return Ok(()),
                Phase::Settle => return Err(Pause::Wait),
            }
        }
    }

    /// Determines the first phase of a task.
    fn begin<I: Iommu, M: PhysMem>(
        &mut self,
        task: &mut Task,
        unit: &I,
        mem: &M,
    ) -> Result<Phase, Pause> {
        let what = task.what;
        if let What::Pages(first, last) = what {
            return Ok(match self.mode {
                Mode::Domain(_) => Phase::Check(Check::of(first, last, false)),
                Mode::Nothing | Mode::All => Phase::Settle,
            });
        }
        let attachment = match unit.attachment(mem, self.source) {
            Ok(attachment) => attachment,
            Err(Stop::Pending(ticket)) => return Err(self.wait_for(ticket)),
            // A table outside memory is no table.
            Err(Stop::Fault(_)) => Attachment::Absent,
        };
        let mode = match attachment {
            Attachment::Off if self.limits.maps_while_off => Mode::All,
            Attachment::Off | Attachment::Absent => Mode::Nothing,
            Attachment::PassThrough => self.pass_through(),
            Attachment::Domain(domain) => Mode::Domain(domain),
        };
        self.is_off = attachment == Attachment::Off && mode == Mode::Nothing;
        let old = std::mem::replace(&mut self.mode, mode);
        if old != mode {
            self.counts.attached += 1;
            self.is_granular = false;
            // Unmaps of the old domain that are under way are waited for, under every policy.
            task.until = task.until.max(self.calls.back().map(|call| call.id));
        }
        let has_old = old != mode && self.book.stale() > 0;
        Ok(match mode {
            _ if old == mode && what == What::Attachment => Phase::Settle,
            // From one domain to another, mappings of both stay, and those that the new one lacks
            // are unmapped at once. If the old one has stale mappings, everything is unmapped
            // first.
            Mode::Domain(_) if old != Mode::All && !has_old => {
                Phase::Check(Check::of(0, LAST_PAGE, old != mode))
            }
            Mode::Domain(_) => Phase::TearDown(mode),
            _ if old == mode => Phase::Settle,
            Mode::Nothing | Mode::All => Phase::TearDown(mode),
        })
    }

    #[cold]
    fn pass_through(&mut self) -> Mode {
        self.counts.pass_through += 1;
        let said = std::mem::replace(&mut self.said.pass_through, true);
        if !self.limits.allows_pass_through {
            if !said {
                tracing::warn!(device = %self.source, "the guest asks for a pass-through context, \
                     which is refused: the device reaches nothing");
            }
            return Mode::Nothing;
        }
        if !said {
            tracing::warn!(device = %self.source, "a pass-through context: all of the guest's \
                 memory is pinned, and reached by the device");
        }
        Mode::All
    }

    /// Finishes a task: its invalidations complete.
    fn finish<E>(&mut self, task: Task, out: &mut Effects<E>) {
        for first in task.kept {
            if self.book.count_stale(first) {
                self.account.begin();
            }
        }
        task.holds.into_iter().for_each(|hold| out.release(hold));
        if self.tasks.is_empty() {
            self.overdue = false;
        }
    }

    fn release_all<E>(&mut self, out: &mut Effects<E>) {
        for task in self.tasks.drain(..) {
            task.holds.into_iter().for_each(|hold| out.release(hold));
        }
    }

    /// Returns whether a call has returned.
    fn is_over(&self, until: Option<CallId>) -> bool {
        match (until, self.calls.front()) {
            (Some(until), Some(front)) => front.id > until,
            _ => true,
        }
    }

    fn wait_for(&mut self, ticket: Ticket) -> Pause {
        self.awaited = Some(ticket);
        Pause::Wait
    }

    fn submit(&mut self, call: Call, what: HostCall) -> CallId {
        let id = CallId(self.next_call);
        self.next_call += 1;
        let since = self.now;
        self.calls.push_back(UnderWay { id, what, since });
        self.caller.submit(id, call);
        id
    }

    /// Takes calls that are over.
    fn take_done<M: PhysMem>(&mut self, mem: &M) -> Progress {
        let mut progress = Progress::Idle;
        // Up to the number of calls under way.
        while !self.calls.is_empty()
            && let Some(done) = self.caller.take()
        {
            progress = Progress::Busy;
            self.settle(done, mem);
        }
        progress
    }

    fn settle<M: PhysMem>(&mut self, done: Done, mem: &M) {
        let Some(under_way) = self.calls.pop_front() else {
            return;
        };
        debug_assert_eq!(under_way.id, done.id, "calls are over in their order");
        self.counts.longest_call_ns = self.counts.longest_call_ns.max(done.ns);
        match (under_way.what, done.result) {
            (HostCall::Map(..), Ok(())) => {}
            (HostCall::Map(mapping, was_refused), Err(refusal)) => {
                self.map_refused(mapping, was_refused, refusal, mem);
            }
            (HostCall::Unmap(mappings), Ok(())) => self.unmapped(mappings),
            (HostCall::Unmap(mappings), Err(refusal)) => {
                self.unended.extend(mappings);
                self.fail(&refusal.text);
            }
            (HostCall::Reset, result) => {
                self.is_resetting = false;
                if let Err(refusal) = result {
                    tracing::warn!(device = %self.source, "the device could not be reset: \
                         {}", refusal.text);
                }
            }
            (HostCall::Close, Ok(())) => self.closed(),
            (HostCall::Close, Err(refusal)) => {
                // Its pages stay in use, and the tasks that wait for them keep waiting.
                tracing::error!(device = %self.source, "what was mapped for the device stays in \
                     its reach: {}", refusal.text);
            }
        }
    }
}

fn iova(page: u64) -> Iova {
    Iova::new(page * PAGE_SIZE)
}
