//! The owner's part of a back end behind an IOMMU: translates its misses, and forwards
//! invalidations to it.
//!
//! Translations are read from the guest's current tables, without recording faults and without the
//! unit's caches: the back end itself caches an entry until it is invalidated, as the unit does. An
//! entry has exactly the access that the tables allow. It covers as many pages as are contiguous,
//! or all of a memory region if nothing is translated.
//!
//! **Faults.** An access without a mapping is refused. The unit records it for the guest, as it
//! would an access of the device, but at most [`FAULTS`] in a burst and then one each
//! [`FAULT_EVERY_NS`]: a back end with a million misses fills no log and causes no storm of fault
//! interrupts.
//!
//! **Invalidations** are forwarded only for domains that entries were read from; those of other
//! devices cost nothing.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use guest_mem::{Access, Attachment, Budget, Found, Gpa, Iova, Next, PAGE_SIZE, Perm};
use vhost_user::wire::{IotlbAccess, IotlbRange};
use vio::{RemoteMemory, Revoked};

use crate::exchange::{Command, EVERYTHING, Entry, Exchange, InvalidateOutcome, Question};
use crate::memory::{Indices, Memory, RingPlace};

/// Largest number of questions handled in one poll: at most 16 µs of table reads.
const QUESTIONS: usize = 16;
/// Budget of a lookup of one entry, in ns: one page, and some forty contiguous ones.
const LOOK_NS: u64 = 1_000;
/// Largest size of a translated entry, in bytes.
const SPAN: u64 = 64 * PAGE_SIZE;
/// Largest number of domains that are distinguished. A device is attached to one at a time.
const DOMAINS: usize = 4;
/// Rate limit of recorded refusals: size of a burst, and interval after it.
const FAULTS: u64 = 16;
const FAULT_EVERY_NS: u64 = 100_000_000;

/// Domains of which the back end may cache translations.
#[derive(Debug, Default)]
struct Given {
    /// Session with the back end to which they were given.
    session: u64,
    domains: Vec<u32>,
    /// There are more domains than [`DOMAINS`]: any domain may be one of them.
    is_any: bool,
    /// Untranslated entries were given, too.
    is_identity: bool,
}

/// State of the owner's part. See the module documentation.
#[derive(Debug)]
pub(crate) struct Follower {
    memory: Memory,
    given: Given,
    /// Questions that wait for absent table pages, with their sessions.
    waiting: VecDeque<(u64, Question)>,
    /// Held invalidations, each with its range.
    holds: Vec<(u64, IotlbRange)>,
    /// Held invalidations that are released without the back end's answer.
    dropped: Vec<u64>,
    /// Time from which a full burst of [`FAULTS`] may be recorded again, in nanoseconds.
    whole_at_ns: u64,
}

impl Given {
    fn is_nothing(&self) -> bool {
        !self.is_any && !self.is_identity && self.domains.is_empty()
    }

    fn add(&mut self, session: u64, attachment: Attachment) {
        if self.session != session {
            *self = Self {
                session,
                ..Self::default()
            };
        }
        match attachment {
            Attachment::Off | Attachment::PassThrough => self.is_identity = true,
            Attachment::Domain(domain) if self.domains.contains(&domain) => {}
            Attachment::Domain(domain) if self.domains.len() < DOMAINS => {
                self.domains.push(domain);
            }
            Attachment::Domain(_) => self.is_any = true,
            Attachment::Absent => {}
        }
    }

    /// Returns the range of entries that an invalidation may revoke.
    fn revoked(&self, what: Revoked) -> Option<IotlbRange> {
        if self.is_nothing() {
            return None;
        }
        let has = |domain| self.is_any || self.domains.contains(&domain);
        match what {
            Revoked::Everything => Some(EVERYTHING),
            // An untranslated context has a domain too, which is not known here.
            Revoked::Domain(domain) => (has(domain) || self.is_identity).then_some(EVERYTHING),
            Revoked::Pages {
                domain,
                first,
                last,
            } => {
                let range = IotlbRange {
                    first: first.raw(),
                    last: last.raw().min(EVERYTHING.last),
                };
                (has(domain) && range.first <= range.last).then_some(range)
            }
        }
    }
}

impl Follower {
    pub fn new(memory: Memory) -> Self {
        Self {
            memory,
            given: Given::default(),
            waiting: VecDeque::new(),
            holds: Vec::new(),
            dropped: Vec::new(),
            whole_at_ns: 0,
        }
    }

    /// Whether questions wait for tables.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Answers a bounded number of questions. Returns whether any was answered, and whether there
    /// may be more.
    pub fn serve(
        &mut self,
        exchange: &Exchange,
        memory: &mut dyn RemoteMemory,
        now_ns: u64,
    ) -> (bool, bool) {
        let mut has_told = false;
        let again = std::mem::take(&mut self.waiting);
        let mut left = QUESTIONS;
        let new = std::iter::from_fn(|| {
            left = left.checked_sub(1)?;
            exchange.take_question()
        });
        for (session, question) in again.into_iter().chain(new) {
            if !exchange.is_current(session) {
                continue;
            }
            let answered = match &question {
                &Question::Miss {
                    number,
                    iova,
                    access,
                } => self.miss(exchange, memory, (session, number), (iova, access), now_ns),
                Question::Rings { number, rings } => {
                    self.rings(exchange, memory, (session, *number), rings)
                }
            };
            match answered {
                Ok(()) => has_told = true,
                // The end of its wait is a message, after which this is called again.
                Err(_) => self.waiting.push_back((session, question)),
            }
        }
        (has_told, left == 0)
    }

    fn miss(
        &mut self,
        exchange: &Exchange,
        memory: &mut dyn RemoteMemory,
        (session, miss): (u64, u64),
        (iova, access): (u64, IotlbAccess),
        now_ns: u64,
    ) -> Access<()> {
        let command = match self.look_up(memory, iova, access)? {
            Some((entry, attachment)) => {
                self.given.add(session, attachment);
                let miss = Some(miss);
                Command::Update { miss, entry }
            }
            None => {
                self.record_refusal(memory, iova, access, now_ns);
                Command::Refuse { miss }
            }
        };
        exchange.tell(session, command);
        Ok(())
    }

    /// Answers with the current indices of the rings, after entries for their pages, so that a back
    /// end that starts the rings need not miss them.
    fn rings(
        &mut self,
        exchange: &Exchange,
        memory: &mut dyn RemoteMemory,
        (session, number): (u64, u64),
        rings: &[RingPlace],
    ) -> Access<()> {
        let mut entries = Vec::new();
        for (iova, len, access) in rings.iter().flat_map(RingPlace::areas) {
            let mut at = iova;
            while at - iova < len
                && let Some((entry, attachment)) = self.look_up(memory, at, access)?
            {
                at = entry.range.last + 1;
                entries.push((entry, attachment));
            }
        }
        let mut indices = Some(Vec::new());
        for ring in rings {
            let read = |memory: &mut dyn RemoteMemory, at| match memory.read_u16(Iova::new(at)) {
                Ok(word) => Ok(Some(word)),
                Err(guest_mem::Stop::Fault(_)) => Ok(None),
                Err(stop) => Err(stop),
            };
            let avail = read(memory, ring.avail_idx())?;
            let used = read(memory, ring.used_idx())?;
            indices = match (indices, avail, used) {
                (Some(mut indices), Some(avail), Some(used)) => {
                    indices.push(Indices { avail, used });
                    Some(indices)
                }
                _ => None,
            };
        }
        // Adjacent areas often share a page, or a region.
        let mut told: Vec<Entry> = Vec::new();
        for (entry, attachment) in entries {
            if told.contains(&entry) {
                continue;
            }
            told.push(entry);
            self.given.add(session, attachment);
            exchange.tell(session, Command::Update { miss: None, entry });
        }
        exchange.tell(session, Command::Rings { number, indices });
        Ok(())
    }

    /// Returns the entry for `iova` if it allows the access, and the attachment that it was read
    /// from.
    fn look_up(
        &self,
        memory: &dyn RemoteMemory,
        iova: u64,
        access: IotlbAccess,
    ) -> Access<Option<(Entry, Attachment)>> {
        if iova > EVERYTHING.last {
            return Ok(None);
        }
        let attachment = memory.attachment()?;
        let entry = match attachment {
            Attachment::Absent => None,
            Attachment::Off | Attachment::PassThrough => self.untranslated(iova),
            Attachment::Domain(_) => self.translated(memory, iova)?,
        };
        let entry = entry.filter(|entry| allows(entry.access, access));
        Ok(entry.map(|entry| (entry, attachment)))
    }

    fn untranslated(&self, iova: u64) -> Option<Entry> {
        let region = self.memory.region(Gpa::new(iova))?;
        Some(Entry {
            range: IotlbRange {
                first: *region.start(),
                last: *region.end(),
            },
            gpa: Gpa::new(*region.start()),
            access: IotlbAccess::ReadWrite,
        })
    }

    fn translated(&self, memory: &dyn RemoteMemory, iova: u64) -> Access<Option<Entry>> {
        let page = iova & !(PAGE_SIZE - 1);
        let last = page.saturating_add(SPAN - 1).min(EVERYTHING.last);
        let mut budget = Budget::new(LOOK_NS);
        let first = match memory.next_mapping(Iova::new(page), Iova::new(last), &mut budget)? {
            Next::Found(found) if found.iova.raw() == page => found,
            // Any budget covers the first page: nothing is mapped here.
            Next::Found(_) | Next::None | Next::Budget(_) => return Ok(None),
        };
        let Some(region) = self.memory.region(first.gpa) else {
            return Ok(None);
        };
        let len = extended(memory, &first, last, &mut budget);
        let len = len.min(left(&region, first.gpa));
        Ok(Some(Entry {
            range: IotlbRange {
                first: page,
                last: page + (len - 1),
            },
            gpa: first.gpa,
            access: match (first.can_read, first.can_write) {
                (true, true) => IotlbAccess::ReadWrite,
                (false, true) => IotlbAccess::Write,
                (_, false) => IotlbAccess::Read,
            },
        }))
    }

    fn record_refusal(
        &mut self,
        memory: &mut dyn RemoteMemory,
        iova: u64,
        access: IotlbAccess,
        now_ns: u64,
    ) {
        let whole_at_ns = self.whole_at_ns.max(now_ns);
        if whole_at_ns - now_ns > (FAULTS - 1) * FAULT_EVERY_NS {
            return;
        }
        self.whole_at_ns = whole_at_ns + FAULT_EVERY_NS;
        let perm = match access {
            IotlbAccess::None | IotlbAccess::Read => Perm::Read,
            IotlbAccess::Write | IotlbAccess::ReadWrite => Perm::Write,
        };
        memory.record_refusal(Iova::new(iova), perm);
    }

    /// Forwards an invalidation to the back end, and returns whether it is held until the back end
    /// has answered.
    pub fn invalidated(&mut self, exchange: &Exchange, what: Revoked, hold: u64) -> bool {
        let Some(range) = self.given.revoked(what) else {
            return false;
        };
        match self.tell_revoked(exchange, range, Some(hold)) {
            InvalidateOutcome::Gone | InvalidateOutcome::Joined => false,
            InvalidateOutcome::Held => {
                self.holds.push((hold, range));
                true
            }
        }
    }

    fn tell_revoked(
        &mut self,
        exchange: &Exchange,
        range: IotlbRange,
        hold: Option<u64>,
    ) -> InvalidateOutcome {
        let session = self.given.session;
        let told = exchange.invalidate(session, range, hold);
        if told == InvalidateOutcome::Gone || range == EVERYTHING {
            // Entries given from now on are sent after the invalidation.
            self.given = Given {
                session,
                ..Given::default()
            };
        }
        told
    }

    /// Resets the device: no ring is served, so all holds are released. The back end forgets all
    /// entries before it receives other rings.
    pub fn reset(&mut self, exchange: &Exchange) {
        if !self.given.is_nothing() {
            self.tell_revoked(exchange, EVERYTHING, None);
        }
        self.drop_holds();
    }

    /// Releases all holds without the back end's answer.
    pub fn drop_holds(&mut self) {
        let holds = self.holds.drain(..).map(|(hold, _)| hold);
        self.dropped.extend(holds);
    }

    /// Returns the range of the invalidation held as `hold`.
    pub fn held(&self, hold: u64) -> Option<IotlbRange> {
        let held = self.holds.iter().find(|(name, _)| *name == hold);
        held.map(|(_, range)| *range)
    }

    /// Returns a hold that has ended.
    pub fn take_released(&mut self, exchange: &Exchange) -> Option<u64> {
        if let Some(hold) = self.dropped.pop() {
            return Some(hold);
        }
        loop {
            let hold = exchange.take_released()?;
            let held = self.holds.len();
            self.holds.retain(|(name, _)| *name != hold);
            // A hold that was dropped meanwhile has already ended.
            if self.holds.len() != held {
                return Some(hold);
            }
        }
    }
}

/// Whether an entry of `entry` satisfies a miss of `wanted`.
fn allows(entry: IotlbAccess, wanted: IotlbAccess) -> bool {
    match wanted {
        // Such a miss requests nothing.
        IotlbAccess::None => false,
        IotlbAccess::Read => matches!(entry, IotlbAccess::Read | IotlbAccess::ReadWrite),
        IotlbAccess::Write => matches!(entry, IotlbAccess::Write | IotlbAccess::ReadWrite),
        IotlbAccess::ReadWrite => entry == IotlbAccess::ReadWrite,
    }
}

/// Returns the number of bytes from `gpa` to the end of its region.
fn left(region: &RangeInclusive<u64>, gpa: Gpa) -> u64 {
    region.end() - gpa.raw() + 1
}

/// Returns the number of bytes from `first` on that are mapped contiguously, up to `last` and as
/// far as `budget` lasts. If a table page is absent, the mapping ends before it: a longer one is
/// not worth a wait.
fn extended(memory: &dyn RemoteMemory, first: &Found, last: u64, budget: &mut Budget) -> u64 {
    let mut len = first.len;
    while let Some(at) = first.iova.checked_add(len)
        && at.raw() <= last
        && let Ok(Next::Found(next)) = memory.next_mapping(at, Iova::new(last), budget)
        && next.iova == at
        && Some(next.gpa) == first.gpa.checked_add(len)
        && (next.can_read, next.can_write) == (first.can_read, first.can_write)
    {
        len += next.len;
    }
    len
}
