//! The invalidation queue (§6.5.2): executes descriptors between IQH and IQT, in order.
//!
//! Each descriptor is fetched as one 16-byte copy, checked in full, and performed; then IQH moves.
//! A descriptor that is wrong in any bit, cannot be fetched, or a tail outside the queue, sets IQE
//! and raises the fault event; IQH stays on it and nothing more is done until software clears IQE.
//! A wait descriptor completes only when no lease is stale and no follower holds an invalidation;
//! until then the unit is *parked* on a copy of it. Completing moves IQH (published first, see
//! [`Unit::run`]), writes the status word with release, and raises the completion event; with both
//! IF and SW, in that order.
//!
//! Bound: the budget of the step ([`STEP_BUDGET`](super::STEP_BUDGET)), to which descriptors,
//! visits of leases and table walks are charged; a queue of 2^7 pages has 32768 descriptors. If the
//! budget is spent before an invalidation is complete, IQH stays on it, and it continues in the
//! next step.
//!
//! Left out: device-TLB, interrupt-entry and scalable-mode descriptors. The unit does not advertise
//! them, so they are errors.

use guest_mem::{Budget, Gpa, PAGE_SIZE, PhysMem, Stop};

use super::leases::{AskedBy, Scope};
use super::{Halt, Sink, Unit};
use crate::spec::invalidate::{
    ContextDescriptor, DESCRIPTOR_LEN, DescriptorType, IotlbDescriptor, WaitDescriptor,
};
use crate::spec::registers::QueueAddress;

/// Cost of fetching, checking and performing a descriptor, in ns, without the work on leases.
const DESCRIPTOR: u64 = 30;
const STEP: u32 = DESCRIPTOR_LEN as u32;

/// A descriptor that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checked {
    Invalidate(Scope),
    Wait(WaitDescriptor),
}

enum Outcome {
    Done,
    Parked,
    /// The descriptor is malformed: raise IQE.
    Wrong,
}

#[inline]
fn check(bits: u128) -> Option<Checked> {
    match DescriptorType::of(bits) {
        DescriptorType::CONTEXT => {
            let d = ContextDescriptor::from_bits(bits);
            let clean = d.rsvd0() == 0 && d.rsvd1() == 0 && d.rsvd2() == 0;
            let scope = Scope::of_context(d.g(), d.did(), d.sid(), d.fm())?;
            clean.then_some(Checked::Invalidate(scope))
        }
        DescriptorType::IOTLB => {
            let d = IotlbDescriptor::from_bits(bits);
            let clean = d.rsvd0() == 0 && d.rsvd1() == 0 && d.rsvd2() == 0;
            let scope = Scope::of_iotlb(d.g(), d.did(), d.addr(), d.am())?;
            clean.then_some(Checked::Invalidate(scope))
        }
        DescriptorType::WAIT => {
            let d = WaitDescriptor::from_bits(bits);
            let clean = d.rsvd0() == 0 && d.rsvd1() == 0;
            clean.then_some(Checked::Wait(d))
        }
        // DEVICE_TLB and INTERRUPT_ENTRY are not supported (`ECAP.DT` and `ECAP.IR` are clear).
        _ => None,
    }
}

impl Unit {
    /// Applies a change of GCMD.QIE.
    pub(super) fn enable_queue(&mut self, on: bool) {
        self.registers.gsts.set_qies(on);
        self.registers.iqh = 0;
        self.parked_wait = None;
        self.checking = None;
    }

    /// Length of the queue in bytes: 2^QS pages, at most 512 KiB.
    fn queue_len(&self) -> u32 {
        (PAGE_SIZE as u32) << QueueAddress::from_bits(self.registers.iqa).qs()
    }

    #[inline]
    pub(super) fn queue_has_work(&self) -> bool {
        self.registers.gsts.qies()
            && !self.faults.iqe
            && self.registers.iqh != self.registers.iqt
            && (self.parked_wait.is_none() || self.is_drained())
    }

    /// Executes descriptors while there are any and the budget lasts.
    pub(super) fn run_queue<M: PhysMem>(
        &mut self,
        mem: &M,
        budget: &mut Budget,
        sink: &mut impl Sink,
        publish_iqh: &mut impl FnMut(u64),
    ) -> Result<(), Halt> {
        while self.queue_has_work() {
            let len = self.queue_len();
            if self.registers.iqt >= len {
                self.stop_queue();
                return Ok(());
            }
            if budget.is_spent() {
                return Err(Halt::Budget);
            }
            budget.charge(DESCRIPTOR);
            let next = (self.registers.iqh + STEP) % len;
            match self.run_descriptor(mem, next, budget, sink, publish_iqh)? {
                Outcome::Done => {
                    self.registers.iqh = next;
                    self.changes += 1;
                }
                Outcome::Parked => return Ok(()),
                Outcome::Wrong => {
                    self.stop_queue();
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn stop_queue(&mut self) {
        self.parked_wait = None;
        self.checking = None;
        self.faults.raise_iqe();
        self.stats.queue_errors += 1;
        self.changes += 1;
    }

    #[inline]
    fn run_descriptor<M: PhysMem>(
        &mut self,
        mem: &M,
        next: u32,
        budget: &mut Budget,
        sink: &mut impl Sink,
        publish_iqh: &mut impl FnMut(u64),
    ) -> Result<Outcome, Halt> {
        if let Some(wait) = self.parked_wait {
            return self.run_wait(mem, wait, next, publish_iqh);
        }
        let base = QueueAddress::from_bits(self.registers.iqa).iqa() * PAGE_SIZE;
        let Some(at) = Gpa::new(base).checked_add(u64::from(self.registers.iqh)) else {
            return Ok(Outcome::Wrong);
        };
        let bits = match mem.read_u128(at) {
            Ok(bits) => bits,
            Err(Stop::Pending(ticket)) => return Err(Halt::Ticket(ticket)),
            Err(Stop::Fault(_)) => return Ok(Outcome::Wrong),
        };
        match check(bits) {
            None => Ok(Outcome::Wrong),
            Some(Checked::Wait(wait)) => self.run_wait(mem, wait, next, publish_iqh),
            Some(Checked::Invalidate(scope)) => {
                self.invalidate(mem, AskedBy::Queue, scope, budget, sink)?;
                self.stats.count(scope);
                Ok(Outcome::Done)
            }
        }
    }

    /// Every step can be repeated, so if an access pends, this is called again from the start.
    #[inline(never)]
    fn run_wait<M: PhysMem>(
        &mut self,
        mem: &M,
        wait: WaitDescriptor,
        next: u32,
        publish_iqh: &mut impl FnMut(u64),
    ) -> Result<Outcome, Halt> {
        if !self.is_drained() {
            self.stats.waits_parked += u64::from(self.parked_wait.is_none());
            self.parked_wait = Some(wait);
            return Ok(Outcome::Parked);
        }
        if wait.sw() && !self.write_status(mem, wait, next, publish_iqh)? {
            return Ok(Outcome::Wrong);
        }
        if wait.iflag() && !self.registers.iwc {
            self.registers.iwc = true;
            self.completion.ip = true;
        }
        self.parked_wait = None;
        self.end_drain();
        self.stats.waits += 1;
        Ok(Outcome::Done)
    }

    /// Writes the status word. Returns false if it is not in RAM. IQH is published before the word,
    /// because a guest that sees the word may read IQH next. It is published only if the word can
    /// be written, because IQH must stay on a malformed descriptor.
    fn write_status<M: PhysMem>(
        &self,
        mem: &M,
        wait: WaitDescriptor,
        next: u32,
        publish_iqh: &mut impl FnMut(u64),
    ) -> Result<bool, Halt> {
        let at = Gpa::new(wait.addr() << 2);
        let done = mem
            .read_u64(at.align_down(8))
            .map(|_| publish_iqh(u64::from(next)))
            .and_then(|()| mem.store_u32_release(at, wait.data()));
        match done {
            Ok(()) => Ok(true),
            Err(Stop::Pending(ticket)) => Err(Halt::Ticket(ticket)),
            Err(Stop::Fault(_)) => {
                publish_iqh(u64::from(self.registers.iqh));
                Ok(false)
            }
        }
    }
}

#[cfg(test)]
mod tests;
