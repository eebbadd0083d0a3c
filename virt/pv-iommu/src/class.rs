//! The virtio device of type 23: request queue and event queue, without the execution of requests.
//!
//! A request is parsed and checked for its length here, and put into an outbox for the unit; PROBE
//! is answered here. Its chain is held, and its tail remembered, until the unit's answer arrives.
//! The visit after that writes the status and publishes the chain. A buffer that is too short for a
//! tail, or a request of no known type, is returned unwritten, with length 0.
//!
//! Faults wait for event buffers; those beyond [`MAX_REFUSALS`] are counted. A buffer too short for
//! a report is returned with length 0, and the report goes into the next one.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use arrayvec::ArrayVec;
use guest_mem::{Dma, Intent, KeepAlive, Stop};
use machine::RefusedAccess;
use serde::{Deserialize, Serialize};
use vio::poll_budget::cost;
use vio::ring::{Chain, RingStop, Segment, Token, write_row};
use vio::{
    Activity, Context, Device, DeviceClass, Environment, SavedState, ServedQueue, Step, feature,
    read_space,
};

use crate::wire::{
    self, FAULT_LEN, MAX_REQUEST, PROBE_SIZE, ParsedRequest, Request, Status, TAIL_LEN,
};

/// Entries of a queue at most.
const QUEUE_SIZE: u16 = 256;
/// The request queue.
const REQUESTS: u16 = 0;
/// Most faults that wait for event buffers.
pub const MAX_REFUSALS: usize = 64;

/// A virtio-iommu device.
pub type Iommu = Device<IommuClass>;

/// Identity of a request in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// A request of the driver's, in this slot.
    Slot(u32),
    /// A change of bypass mode by the device itself: no driver request waits for it.
    Bypass,
    /// A reset by the device itself: no driver request waits for it.
    Reset,
}

/// A request between its chain and its used element.
#[derive(Clone, Debug)]
struct PendingRequest {
    token: Token,
    /// Its tail: four bytes, in any number of segments.
    tail: ArrayVec<Segment, { TAIL_LEN as usize }>,
    /// Bytes written to the chain, once the tail is written.
    len: u32,
    /// Status of a request that has ended.
    status: u8,
}

/// Device class of virtio-iommu.
pub struct IommuClass {
    endpoints: Vec<RangeInclusive<u16>>,
    /// Features that the driver has accepted.
    features: u64,
    /// Value of the field `bypass` that the driver reads.
    is_bypass: bool,
    /// The driver has written `bypass`, and no request with the value is under way yet.
    is_bypass_news: bool,
    /// A request with the value is under way to the unit.
    is_bypass_asked: bool,
    outbox: VecDeque<(Tag, Request)>,
    /// Requests that the unit has, by slot.
    asked: Vec<Option<PendingRequest>>,
    free: Vec<u32>,
    /// Requests that the unit has answered.
    ended: VecDeque<PendingRequest>,
    refusals: VecDeque<RefusedAccess>,
    lost_refusals: u64,
    chain: Chain,
}

/// Part of the saved state that only this class has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedIommu {
    /// Endpoints that are not attached reach memory.
    pub is_bypass: bool,
}

impl SavedState for SavedIommu {
    const TYPE: u16 = IommuClass::TYPE;
    const VERSION: u32 = 1;
}

impl IommuClass {
    /// Creates a device with these endpoints.
    pub fn new(endpoints: Vec<RangeInclusive<u16>>) -> Self {
        Self {
            endpoints,
            features: 0,
            is_bypass: false,
            is_bypass_news: false,
            is_bypass_asked: false,
            outbox: VecDeque::new(),
            asked: Vec::new(),
            free: Vec::new(),
            ended: VecDeque::new(),
            refusals: VecDeque::new(),
            lost_refusals: 0,
            chain: Chain::new(),
        }
    }

    /// Sets the endpoints, before a driver uses the device.
    pub fn set_endpoints(&mut self, endpoints: Vec<RangeInclusive<u16>>) {
        self.endpoints = endpoints;
    }

    /// Takes the next request for the unit, in the driver's order.
    pub fn take_request(&mut self) -> Option<(Tag, Request)> {
        if std::mem::take(&mut self.is_bypass_news) {
            if self.is_bypass_asked {
                self.is_bypass_news = true;
            } else {
                self.is_bypass_asked = true;
                let request = Request::SetBypass(self.is_bypass);
                self.outbox.push_back((Tag::Bypass, request));
            }
        }
        self.outbox.pop_front()
    }

    /// Records the unit's answer to a request: its status, 0 for success.
    pub fn answer(&mut self, tag: Tag, status: u8) {
        match tag {
            Tag::Slot(slot) => {
                let taken = self.asked.get_mut(slot as usize).and_then(Option::take);
                if let Some(mut taken) = taken {
                    taken.status = status;
                    self.free.push(slot);
                    self.ended.push_back(taken);
                }
            }
            Tag::Bypass => self.is_bypass_asked = false,
            Tag::Reset => {}
        }
    }

    /// Queues a fault report for a refused access; the driver receives it by the event queue.
    pub fn refused(&mut self, access: &RefusedAccess) {
        match self.refusals.len() < MAX_REFUSALS {
            true => self.refusals.push_back(*access),
            false => self.lost_refusals += 1,
        }
    }

    /// Returns the number of refused accesses that are not reported to the driver.
    pub fn lost_refusals(&self) -> u64 {
        self.lost_refusals
    }

    /// Requests that the unit has.
    fn under_way(&self) -> u32 {
        (self.asked.len() - self.free.len()) as u32
    }

    fn serve_request<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        if !queue.peek(cx.dma, &mut self.chain)? {
            return Ok(Activity::Idle);
        }
        let readable = self.chain.readable();
        let mut bytes = [0; MAX_REQUEST];
        let len = bytes.len().min(readable.len() as usize);
        let asked = match readable.read(cx.dma, 0, &mut bytes[..len]) {
            Ok(()) => wire::parse(&bytes[..len], readable.len()),
            Err(Stop::Fault(_)) => None,
            Err(pending) => {
                let wanted = readable.wanted(0, len as u32, Intent::Read);
                return Err(queue.wait_for(cx.dma, pending, wanted));
            }
        };
        let room = self.chain.writable().len();
        cx.visit.take_request(cost::REQUEST);
        match asked {
            Some(ParsedRequest::Probe { endpoint }) if room >= TAIL_LEN => {
                self.probe(endpoint, queue, cx)?;
            }
            Some(ParsedRequest::Unit(request)) if room >= TAIL_LEN => {
                let tail = self.chain.writable().slice(0, TAIL_LEN).collect();
                let token = queue.take(&self.chain)?;
                let taken = PendingRequest {
                    token,
                    tail,
                    len: TAIL_LEN,
                    status: 0,
                };
                self.ask(request, taken);
            }
            _ => {
                cx.stats.errors += 1;
                queue.answer(&self.chain, 0)?;
            }
        }
        cx.stats.requests += 1;
        Ok(Activity::Busy)
    }

    /// Puts a request into the outbox, or answers it if it uses a feature that the driver has not
    /// accepted.
    fn ask(&mut self, request: Request, mut taken: PendingRequest) {
        if !request.is_within(self.features) {
            taken.status = Status::Inval as u8;
            self.ended.push_back(taken);
            return;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.asked.push(None);
            self.asked.len() as u32 - 1
        });
        self.asked[slot as usize] = Some(taken);
        self.outbox.push_back((Tag::Slot(slot), request));
    }

    /// Answers a PROBE request: properties and tail, or the tail alone where the list has no room.
    fn probe<E: Environment>(
        &mut self,
        endpoint: u32,
        queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Result<(), RingStop> {
        let writable = self.chain.writable();
        let has_room = writable.len() >= PROBE_SIZE + TAIL_LEN;
        let refusal = match wire::requester(&self.endpoints, endpoint) {
            _ if !has_room => Some(Status::Inval),
            known => known.err(),
        };
        let mut reply = [0; (PROBE_SIZE + TAIL_LEN) as usize];
        // If no list fits, there is only the tail, wherever the driver expects it.
        let len = if has_room {
            reply.len()
        } else {
            TAIL_LEN as usize
        };
        match refusal {
            None => reply[..PROBE_SIZE as usize].copy_from_slice(&wire::properties()),
            Some(status) => reply[len - TAIL_LEN as usize] = status as u8,
        }
        let (from, bytes) = match has_room {
            true => (0, &reply[..]),
            false => (writable.len() - TAIL_LEN, &reply[..len]),
        };
        // The properties of a refused request are not written, but for the zeroes of the last.
        let written = match writable.write(cx.dma, from, bytes) {
            Ok(()) => from + len as u32,
            Err(Stop::Fault(_)) => 0,
            Err(pending) => {
                let wanted = writable.wanted(from, len as u32, Intent::Write);
                return Err(queue.wait_for(cx.dma, pending, wanted));
            }
        };
        queue.answer(&self.chain, written)
    }

    fn serve_event<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        let Some(&refused) = self.refusals.front() else {
            return Ok(Activity::Idle);
        };
        if !queue.peek(cx.dma, &mut self.chain)? {
            return Ok(Activity::Idle);
        }
        let writable = self.chain.writable();
        let is_write = refused.perm == guest_mem::Perm::Write;
        let endpoint = refused.source.0.into();
        let report = wire::fault(refused.reason, endpoint, refused.iova.raw(), is_write);
        let mut len = 0;
        if writable.len() >= FAULT_LEN {
            match writable.write(cx.dma, 0, &report) {
                Ok(()) => len = FAULT_LEN,
                Err(Stop::Fault(_)) => {}
                Err(pending) => {
                    let wanted = writable.wanted(0, FAULT_LEN, Intent::Write);
                    return Err(queue.wait_for(cx.dma, pending, wanted));
                }
            }
        }
        if len != 0 {
            self.refusals.pop_front();
        }
        cx.visit.take_request(cost::REQUEST);
        queue.answer(&self.chain, len)?;
        Ok(Activity::Busy)
    }
}

impl DeviceClass for IommuClass {
    const TYPE: u16 = 23;
    type Queue = ();
    type Saved = SavedIommu;

    fn features(&self) -> u64 {
        feature::VERSION_1
            | feature::EVENT_IDX
            | feature::RING_PACKED
            | wire::feature::INPUT_RANGE
            | wire::feature::DOMAIN_RANGE
            | wire::feature::MAP_UNMAP
            | wire::feature::PROBE
            | wire::feature::MMIO
            | wire::feature::BYPASS_CONFIG
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        read_space(&wire::config(self.is_bypass), offset, out);
    }

    /// Bit 0 of `bypass`; other bytes are the device's.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let at = wire::CONFIG_BYPASS.checked_sub(offset);
        let byte = at.and_then(|at| data.get(usize::try_from(at).ok()?));
        if let Some(&byte) = byte {
            self.is_bypass = byte & 1 != 0;
            self.is_bypass_news = true;
        }
    }

    fn queue(&self, index: u16, _features: u64) -> Option<()> {
        (index < 2).then_some(())
    }

    fn begin(&mut self, features: u64, _keep: KeepAlive) -> bool {
        self.features = features;
        false
    }

    /// Resets the device: no endpoint is attached from here on. Faults that wait for event buffers
    /// were the former driver's, and are dropped.
    fn reset(&mut self) {
        self.features = 0;
        self.refusals.clear();
        self.ended.clear();
        self.outbox.push_back((Tag::Reset, Request::Reset));
    }

    fn save(&self) -> SavedIommu {
        SavedIommu {
            is_bypass: self.is_bypass,
        }
    }

    fn may_take<D: Dma>(&self, queue: &ServedQueue<()>, _dma: &D) -> bool {
        queue.index() == REQUESTS || !self.refusals.is_empty()
    }

    fn serve<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        match queue.index() {
            REQUESTS => self.serve_request(queue, cx),
            _ => self.serve_event(queue, cx),
        }
    }

    fn finish<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        if queue.index() != REQUESTS {
            return Ok(Activity::Idle);
        }
        let Some(taken) = self.ended.front_mut() else {
            return Ok(Activity::Idle);
        };
        if taken.len != 0 {
            let tail = taken.tail.iter().copied();
            match write_row(cx.dma, tail, &[taken.status, 0, 0, 0]) {
                Ok(()) => {}
                // Not memory any more: the driver sees that nothing was written.
                Err(Stop::Fault(_)) => taken.len = 0,
                Err(pending) => return Err(queue.park(pending)),
            }
        }
        queue.stage(cx.dma, taken.token, taken.len)?;
        self.ended.pop_front();
        Ok(Activity::Busy)
    }

    fn has_taken<D: Dma>(&self, queue: &ServedQueue<()>, _dma: &D) -> bool {
        queue.index() == REQUESTS && !self.ended.is_empty()
    }

    fn is_due(&mut self, queue: &ServedQueue<()>) -> bool {
        queue.index() == REQUESTS || !self.refusals.is_empty()
    }

    fn is_in_flight(&self, queue: &ServedQueue<()>) -> bool {
        queue.index() == REQUESTS && self.under_way() != 0
    }

    fn in_flight(&self, _queues: &[ServedQueue<()>]) -> u32 {
        self.under_way()
    }

    /// Nothing is written but in a visit.
    fn touches_memory(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
