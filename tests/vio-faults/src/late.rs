//! Late accesses: a device that touches a buffer again which its driver has taken back.
//!
//! The device remembers the data buffer of each read or write that it has completed, and touches
//! all of them when a driver asks for it, by a read of one of two sectors. It begins with the first
//! of these: what a kernel has read before is not touched. A buffer is one that nothing used again:
//! an address that any later access comes near, as a header, data, a status or a table, is
//! forgotten at once, since it may be mapped anew.
//!
//! **The age of a buffer** counts, on this machine's monotonic clock, from the header of the first
//! request behind the one that used it. By then a driver that has one request in flight has
//! released the buffer, so that the time since is never longer than the driver's own count of it.
//!
//! **The rule.** An access to a buffer younger than the limit is *early*, and counted: whether the
//! IOMMU lets it through, and how old the buffer was. One to a buffer of the limit's age or more is
//! *late*, and has to be blocked, if the driver has asked by the second sector; the buffer is
//! forgotten then. By that it says that it has waited by its own clock and not merely been held up:
//! a driver can remove nothing while its processor does not run, which its host may see to. One
//! that it has asked for by the first sector is *unjudged*, and counted by itself.
//!
//! Requests of drivers that have several in flight leave no buffer: which of them a status belongs
//! to is not known here.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use guest_mem::{Access, Dma, Iova, Stop};
use vio::blk::request::kind;

/// Bytes that a rogue access writes.
pub const ROGUE_BYTES: [u8; 8] = [0xee; 8];
/// Buffers remembered; beyond that no more are.
const MAX_BUFFERS: usize = 4096;
/// Ages of which accesses are counted apart; what is beyond is counted in the sums alone.
const MAX_AGES: usize = 4096;
/// Granule of the IOMMU, in bytes.
const PAGE: u64 = 4096;

/// Accesses, by their outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    /// The IOMMU refused them.
    pub blocked: u64,
    /// They went through.
    pub allowed: u64,
}

impl Attempts {
    fn add(&mut self, is_allowed: bool) {
        match is_allowed {
            true => self.allowed += 1,
            false => self.blocked += 1,
        }
    }
}

/// Counts of accesses to buffers that the driver had taken back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LateStats {
    /// To buffers younger than the limit.
    pub early: Attempts,
    /// To buffers of the limit's age or more, when the driver had waited.
    pub late: Attempts,
    /// To such buffers, when it had not said so.
    pub unjudged: Attempts,
    /// Age of the oldest buffer that was reached, in ms.
    pub allowed_max_ms: Option<u64>,
    /// Age of the youngest buffer that was not, in ms.
    pub blocked_min_ms: Option<u64>,
    /// Accesses by the age of the buffer, in ms.
    pub ages: BTreeMap<u64, Attempts>,
}

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Early,
    Late,
    Unjudged,
}

impl LateStats {
    fn add(&mut self, age: Duration, due: Due, is_allowed: bool) {
        let of_kind = match due {
            Due::Early => &mut self.early,
            Due::Late => &mut self.late,
            Due::Unjudged => &mut self.unjudged,
        };
        of_kind.add(is_allowed);
        // An hour is below 2^22 ms.
        let ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        match is_allowed {
            true => self.allowed_max_ms = self.allowed_max_ms.max(Some(ms)),
            false => {
                let youngest = self.blocked_min_ms.map_or(ms, |least| least.min(ms));
                self.blocked_min_ms = Some(youngest);
            }
        }
        if self.ages.len() < MAX_AGES || self.ages.contains_key(&ms) {
            self.ages.entry(ms).or_default().add(is_allowed);
        }
    }
}

/// A clock that only goes forward, from any origin.
pub type Clock = Box<dyn Fn() -> Duration + Send>;

/// Returns this machine's monotonic clock, from now on.
pub fn monotonic() -> Clock {
    let origin = Instant::now();
    Box::new(move || origin.elapsed())
}

/// A buffer that its driver has taken back.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    iova: Iova,
    /// The device may write it, and not read.
    is_writable: bool,
    /// When the driver had released it for certain.
    released: Option<Duration>,
}

/// The one request that is in flight.
#[derive(Clone, Copy, Debug)]
struct Current {
    is_write: bool,
    /// Its data buffer.
    iova: Option<Iova>,
}

/// Options of late accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateOptions {
    /// A read that starts here has all buffers touched.
    pub probe: u64,
    /// So has one that starts here, behind which stands that the driver has waited.
    pub judge: u64,
    /// Age of a buffer from which on an access to it is late.
    pub limit: Duration,
    /// No buffer is touched after so many late accesses.
    pub most: u64,
}

/// Buffers of completed requests, and how far an attack has come.
pub(crate) struct Late {
    options: LateOptions,
    clock: Clock,
    /// A trigger was read.
    is_armed: bool,
    /// By the last trigger the driver says that it has waited.
    is_judged: bool,
    /// By page.
    buffers: BTreeMap<u64, Buffer>,
    /// Requests whose header was read, and whose status was not written.
    in_flight: usize,
    /// Header of the last of them.
    header: Option<Iova>,
    /// While there is one, and it leaves a buffer.
    current: Option<Current>,
    /// Pages to be touched before the next status is written.
    due: Vec<u64>,
}

impl Late {
    pub(crate) fn new(options: LateOptions, clock: Clock) -> Self {
        Self {
            options,
            clock,
            is_armed: false,
            is_judged: false,
            buffers: BTreeMap::new(),
            in_flight: 0,
            header: None,
            current: None,
            due: Vec::new(),
        }
    }

    /// A driver is gone, and with it what it had mapped.
    pub(crate) fn reset(&mut self) {
        self.is_armed = false;
        self.buffers.clear();
        self.in_flight = 0;
        self.header = None;
        self.current = None;
        self.due.clear();
    }

    /// A request's header was read: its kind, and where it starts.
    pub(crate) fn see_header(&mut self, iova: Iova, kind: u32, sector: u64) {
        if self.in_flight > 0 && self.header == Some(iova) {
            // The same request, looked at again: what was reached meanwhile was its table.
            if let Some(current) = &mut self.current {
                current.iova = None;
            }
            return;
        }
        if self.in_flight == 0 {
            let now = (self.clock)();
            for buffer in self.buffers.values_mut() {
                buffer.released.get_or_insert(now);
            }
        }
        self.in_flight += 1;
        self.header = Some(iova);
        let LateOptions { probe, judge, .. } = self.options;
        let is_trigger = kind == kind::IN && (sector == probe || sector == judge);
        let is_transfer = matches!(kind, kind::IN | kind::OUT);
        let is_kept = self.is_armed && self.in_flight == 1 && is_transfer && !is_trigger;
        self.current = is_kept.then_some(Current {
            is_write: kind == kind::OUT,
            iova: None,
        });
        if is_trigger {
            self.is_armed = true;
            self.is_judged = sector == judge;
            self.due = self.buffers.keys().copied().collect();
        }
    }

    /// The device used `len` bytes at `iova`, which are no candidate any more.
    pub(crate) fn touch(&mut self, iova: Iova, len: usize) {
        let last = iova
            .raw()
            .saturating_add(u64::try_from(len).unwrap_or(u64::MAX).saturating_sub(1));
        let pages = iova.raw() / PAGE..=last / PAGE;
        while let Some((&page, _)) = self.buffers.range(pages.clone()).next() {
            self.buffers.remove(&page);
        }
    }

    /// A request's data were reached at `iova`.
    pub(crate) fn see_data(&mut self, iova: Iova) {
        if let Some(current) = &mut self.current {
            current.iova.get_or_insert(iova);
        }
    }

    /// A status was written: a request is complete.
    pub(crate) fn see_status(&mut self) {
        let is_alone = self.in_flight == 1;
        self.in_flight = self.in_flight.saturating_sub(1);
        self.header = None;
        let current = self.current.take().filter(|_| is_alone);
        if let Some(current) = current
            && let Some(iova) = current.iova
            && self.buffers.len() < MAX_BUFFERS
        {
            let buffer = Buffer {
                iova,
                is_writable: !current.is_write,
                released: None,
            };
            self.buffers.insert(iova.raw() / PAGE, buffer);
        }
    }

    /// Touches the buffers that are due.
    pub(crate) fn make(&mut self, dma: &mut impl Dma, stats: &mut LateStats) -> Access<()> {
        while let Some(&page) = self.due.last() {
            if stats.late.blocked + stats.late.allowed >= self.options.most {
                self.buffers.clear();
                self.due.clear();
                break;
            }
            let buffer = self.buffers.get(&page).copied();
            if let Some(buffer) = buffer
                && let Some(released) = buffer.released
            {
                // Before the access: what is late by this was late when it was made.
                let age = (self.clock)().saturating_sub(released);
                let outcome = match buffer.is_writable {
                    true => dma.write(buffer.iova, &ROGUE_BYTES),
                    false => dma.read(buffer.iova, &mut [0; ROGUE_BYTES.len()]),
                };
                let is_allowed = match outcome {
                    Ok(()) => true,
                    Err(Stop::Fault(_)) => false,
                    Err(pending) => return Err(pending),
                };
                let due = match (age >= self.options.limit, self.is_judged) {
                    (false, _) => Due::Early,
                    (true, true) => Due::Late,
                    (true, false) => Due::Unjudged,
                };
                stats.add(age, due, is_allowed);
                if due == Due::Late {
                    self.buffers.remove(&page);
                }
            }
            self.due.pop();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_counted_by_kind_and_by_age() {
        let mut stats = LateStats::default();
        for (ms, due, is_allowed) in [
            (0, Due::Early, true),
            (99, Due::Early, true),
            (99, Due::Early, false),
            (100, Due::Late, false),
            (250, Due::Late, true),
            (300, Due::Unjudged, true),
        ] {
            stats.add(Duration::from_millis(ms), due, is_allowed);
        }
        let attempts = |blocked, allowed| Attempts { blocked, allowed };
        assert_eq!((stats.early, stats.late), (attempts(1, 2), attempts(1, 1)));
        assert_eq!(stats.unjudged, attempts(0, 1));
        assert_eq!(stats.allowed_max_ms, Some(300));
        assert_eq!(stats.blocked_min_ms, Some(99));
        assert_eq!(stats.ages[&99], attempts(1, 1));
    }

    #[test]
    fn no_more_ages_are_kept_than_the_bound() {
        let mut stats = LateStats::default();
        for ms in 0..2 * MAX_AGES as u64 {
            stats.add(Duration::from_millis(ms), Due::Late, false);
        }
        assert_eq!(stats.ages.len(), MAX_AGES);
        assert_eq!(stats.late.blocked, 2 * MAX_AGES as u64);
    }
}
