//! Primary fault recording and the two event interrupts (§7.2, §7.3).
//!
//! A refused request fills one recording register, unless a pending one has the same source, page,
//! direction and reason: equal faults collapse, so that a device that repeats a request does not
//! fill the registers. One register always stays empty. Linux walks the registers from FRI until it
//! finds a clear F. If all were set, and its clears not yet seen (the `shared` front end), it would
//! walk in a circle. So the fault that would fill the last register sets PFO instead.
//!
//! An event sets IP; [`Event::take_message`] converts it to one message if it is not masked.
//! `FSTS.PPF` is derived from the F bits, never stored.

use guest_mem::{Iova, PAGE_SIZE, Perm, SourceId};

pub(crate) use crate::saved_state::SavedEvent as Event;
use crate::spec::fault::{FaultReason, FaultRecording};
use crate::spec::registers::{EventControl, FaultStatus};

impl Event {
    /// State after a reset: masked (§11.4.10), since the unprogrammed message would be vector 0 to
    /// CPU 0.
    pub(crate) const RESET: Self = Self {
        im: true,
        ip: false,
        data: 0,
        address: 0,
        upper_address: 0,
    };

    pub(crate) fn control(&self) -> u32 {
        EventControl::new()
            .with_im(self.im)
            .with_ip(self.ip)
            .into_bits()
    }

    pub(crate) fn set_control(&mut self, value: u32) {
        self.im = EventControl::from_bits(value).im();
    }

    /// Whether [`take_message`](Self::take_message) would return a message.
    pub(crate) fn has_message(&self) -> bool {
        self.ip && !self.im
    }

    /// Returns the message to send now, if any, and clears IP.
    pub(crate) fn take_message(&mut self) -> Option<(u64, u32)> {
        if !self.has_message() {
            return None;
        }
        self.ip = false;
        let address = u64::from(self.upper_address) << 32 | u64::from(self.address);
        Some((address, self.data))
    }
}

/// Result of the recording of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recorded {
    New,
    Collapsed,
    /// No register was free: PFO is set.
    Overflow,
}

/// FSTS, FECTL and the recording registers.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    pub(crate) records: Box<[FaultRecording]>,
    /// Index of the recording register for the next fault.
    pub(crate) next: usize,
    pub(crate) pfo: bool,
    pub(crate) iqe: bool,
    pub(crate) event: Event,
}

impl Faults {
    /// Creates `count` recording registers, 2 to 222.
    pub(crate) fn new(count: usize) -> Self {
        Self {
            records: vec![FaultRecording::new(); count].into_boxed_slice(),
            next: 0,
            pfo: false,
            iqe: false,
            event: Event::RESET,
        }
    }

    fn ppf(&self) -> bool {
        self.records.iter().any(FaultRecording::f)
    }

    /// Returns the index of the oldest pending record, at which a driver starts to read. The
    /// specification latches FRI when PPF rises. This is the same value until the driver clears
    /// that record; from then on it is the next pending one.
    fn fri(&self) -> Option<usize> {
        let count = self.records.len();
        let mut from_oldest = (0..count).map(|step| (self.next + step) % count);
        from_oldest.find(|index| self.records[*index].f())
    }

    pub(crate) fn fsts(&self) -> FaultStatus {
        let fri = self.fri();
        FaultStatus::new()
            .with_pfo(self.pfo)
            .with_ppf(fri.is_some())
            .with_iqe(self.iqe)
            // At most 222 registers.
            .with_fri(fri.unwrap_or(0) as u8)
    }

    /// Handles that the guest has cleared records while the page showed it `shown`. If a pending
    /// record is not among those, the guest may have left its loop without it, and since PPF is
    /// still set, the next fault would raise no event. So this raises one.
    pub(crate) fn raise_unseen(&mut self, shown: &[FaultRecording]) {
        let mut pairs = self.records.iter().zip(shown);
        if pairs.any(|(record, shown)| record.f() && record != shown) {
            self.event.ip = true;
        }
    }

    fn is_quiet(&self) -> bool {
        !self.pfo && !self.iqe && !self.ppf()
    }

    /// Records a refused request.
    pub(crate) fn record(
        &mut self,
        source: SourceId,
        iova: Iova,
        perm: Perm,
        reason: FaultReason,
    ) -> Recorded {
        let record = FaultRecording::new()
            .with_fi(iova.raw() / PAGE_SIZE)
            .with_sid(source.0)
            .with_fr(reason)
            .with_t(perm == Perm::Read)
            .with_f(true);
        if self.records.contains(&record) {
            return Recorded::Collapsed;
        }
        let pending = self.records.iter().filter(|record| record.f()).count();
        if self.pfo || pending + 1 >= self.records.len() || self.records[self.next].f() {
            // An overflow raises no event: PPF is set, so an event was raised already.
            self.pfo = true;
            return Recorded::Overflow;
        }
        if self.is_quiet() {
            self.event.ip = true;
        }
        self.records[self.next] = record;
        self.next = (self.next + 1) % self.records.len();
        Recorded::New
    }

    /// Records that the invalidation queue stopped.
    pub(crate) fn raise_iqe(&mut self) {
        if self.is_quiet() {
            self.event.ip = true;
        }
        self.iqe = true;
    }

    /// Applies a write to FSTS: a 1 clears PFO, IQE (ICE, ITE and PRO are never set here).
    pub(crate) fn write_fsts(&mut self, value: u32) {
        let value = FaultStatus::from_bits(value);
        self.pfo &= !value.pfo();
        self.iqe &= !value.iqe();
        self.settle();
    }

    /// Applies a write to the highest dword of recording register `index`.
    pub(crate) fn write_record(&mut self, index: usize, dword: u32) {
        if dword & 1 << 31 != 0 {
            self.records[index].set_f(false);
            self.settle();
        }
    }

    /// Clears the pending event once software has cleared all of its causes.
    fn settle(&mut self) {
        if self.is_quiet() {
            self.event.ip = false;
        }
    }
}
