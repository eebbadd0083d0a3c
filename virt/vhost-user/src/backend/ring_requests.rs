//! The session's requests about one ring.

use super::reply::{Respond, base_reply};
use super::ring::{self, Ring, check_addr, check_base, check_size};
use super::session::{Change, RequestOutcome, Session, event};
use super::{Event, Kick, RequestError, SharedFd};
use crate::wire::{RequestId, VringAddr, VringFd, VringState};

impl Session {
    /// The ring a request names.
    fn ring(&self, request: RequestId, index: u32) -> Result<(u8, &Ring), RequestError> {
        let queues = self.config.queues;
        let error = RequestError::RingIndex {
            request,
            index,
            queues,
        };
        match (u8::try_from(index), self.rings.get(index as usize)) {
            (Ok(index), Some(ring)) => Ok((index, ring)),
            _ => Err(error),
        }
    }

    /// The ring a request names, which may not run.
    fn stopped_ring(&self, request: RequestId, index: u32) -> Result<(u8, &Ring), RequestError> {
        match self.ring(request, index)? {
            (index, ring) if ring.is_running => Err(RequestError::Running { request, index }),
            stopped => Ok(stopped),
        }
    }

    pub(super) fn check_none_runs(&self, request: RequestId) -> Result<(), RequestError> {
        let running = (0..=u8::MAX)
            .zip(&self.rings)
            .find(|(_, ring)| ring.is_running);
        match running {
            Some((index, _)) => Err(RequestError::Running { request, index }),
            None => Ok(()),
        }
    }

    pub(super) fn set_vring_num(&self, state: VringState) -> Result<RequestOutcome, RequestError> {
        let request = RequestId::SET_VRING_NUM;
        let (index, ring) = self.stopped_ring(request, state.index)?;
        let layout = ring::layout(self.features);
        let size = check_size(request, index, state.num, layout, self.config.max_ring_size)?;
        let ring = ring.clone();
        Ok(RequestOutcome::Change(Change::Ring(
            index,
            Ring { size, ..ring },
        )))
    }

    pub(super) fn set_vring_addr(&self, addr: VringAddr) -> Result<RequestOutcome, RequestError> {
        let request = RequestId::SET_VRING_ADDR;
        let (index, ring) = self.ring(request, addr.index)?;
        let layout = ring::layout(self.features);
        check_addr(request, index, &addr, layout, ring.size)?;
        let changed = Ring {
            addr: Some(addr),
            ..ring.clone()
        };
        // Under a running ring nothing may change.
        if ring.is_running && ring.addr != changed.addr {
            return Err(RequestError::Running { request, index });
        }
        Ok(ring_change(index, changed, None))
    }

    pub(super) fn set_vring_base(&self, state: VringState) -> Result<RequestOutcome, RequestError> {
        let request = RequestId::SET_VRING_BASE;
        let (index, ring) = self.stopped_ring(request, state.index)?;
        let ring = Ring {
            base: state.num,
            ..ring.clone()
        };
        check_base(request, index, &ring, ring::layout(self.features))?;
        Ok(RequestOutcome::Change(Change::Ring(index, ring)))
    }

    pub(super) fn get_vring_base(&self, index: u32) -> Result<RequestOutcome, RequestError> {
        let (index, ring) = self.ring(RequestId::GET_VRING_BASE, index)?;
        match ring.is_running {
            true => {
                let respond = Respond::RingBase(index);
                Ok(RequestOutcome::Event(
                    Event::RingStopped(index),
                    Change::None,
                    respond,
                ))
            }
            // QEMU stops rings that never ran.
            false => Ok(RequestOutcome::Reply(base_reply(index.into(), ring.base))),
        }
    }

    pub(super) fn set_vring_kick(&self, vring: VringFd) -> Result<RequestOutcome, RequestError> {
        let request = RequestId::SET_VRING_KICK;
        let (index, ring) = self.ring(request, vring.index.into())?;
        let kick = vring.fd.map_or(Kick::Poll, |fd| Kick::Fd(fd.into()));
        if ring.is_running {
            return Ok(event(Event::KickReplaced(index, kick), Change::None));
        }
        if self.regions.is_empty() {
            return Err(RequestError::RingIncomplete {
                request,
                index,
                missing: "memory",
            });
        }
        let max = self.config.max_ring_size;
        let started = ring.start(request, index, kick, self.features, max)?;
        let running = Ring {
            is_running: true,
            ..ring.clone()
        };
        let started = Event::RingStarted(started);
        Ok(ring_change(index, running, Some(started)))
    }

    pub(super) fn set_vring_call(&self, vring: VringFd) -> Result<RequestOutcome, RequestError> {
        let (index, ring) = self.ring(RequestId::SET_VRING_CALL, vring.index.into())?;
        let call: Option<SharedFd> = vring.fd.map(Into::into);
        let changed = Ring {
            call: call.clone(),
            ..ring.clone()
        };
        let told = ring.is_running.then_some(Event::CallReplaced(index, call));
        Ok(ring_change(index, changed, told))
    }

    pub(super) fn set_vring_err(&self, vring: VringFd) -> Result<RequestOutcome, RequestError> {
        let (index, ring) = self.ring(RequestId::SET_VRING_ERR, vring.index.into())?;
        let err: Option<SharedFd> = vring.fd.map(Into::into);
        let changed = Ring {
            err: err.clone(),
            ..ring.clone()
        };
        let told = ring.is_running.then_some(Event::ErrReplaced(index, err));
        Ok(ring_change(index, changed, told))
    }

    /// Sent without bit 30 it has no effect until that bit is acknowledged: such rings are enabled
    /// anyway, and clients that send it all the same are not turned away.
    pub(super) fn set_vring_enable(
        &self,
        index: u32,
        enable: bool,
    ) -> Result<RequestOutcome, RequestError> {
        let (index, ring) = self.ring(RequestId::SET_VRING_ENABLE, index)?;
        let changed = Ring {
            is_enabled: enable,
            ..ring.clone()
        };
        let was = ring::is_enabled(ring.is_enabled, self.features);
        let is = ring::is_enabled(enable, self.features);
        let is_told = ring.is_running && was != is;
        let told = is_told.then_some(Event::RingEnabled(index, is));
        Ok(ring_change(index, changed, told))
    }
}

/// Returns the change to a ring's new state, with the event for the daemon, if there is one.
fn ring_change(index: u8, ring: Ring, told: Option<Event>) -> RequestOutcome {
    let change = Change::Ring(index, ring);
    match told {
        Some(told) => event(told, change),
        None => RequestOutcome::Change(change),
    }
}
