//! Events of the session, and their execution.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use guest_mem::{Dma, Intent, Iova, SharedFile};
use sidecore::PollContext;
use vhost_user::backend::{
    Answer, Event, Kick, Refusal, Region, RingBase, RingConfig, RingLayout, SharedFd,
};
use vhost_user::chain;
use vhost_user::inflight::{PackedPosition, PackedRing, region_len, was_in_use};
use vhost_user::wire::Inflight;
use vio::ring::{Parked, Ring, RingPosition, RingStart};
use vio::{
    Device, DeviceClass, NetworkRequest, QueueConfig, QueueDevice, Service, StoppedQueue, feature,
};

use crate::iotlb::StartingRing;
use crate::journal::InflightRegion;
use crate::log::say;
use crate::memory::{Memory, RegionMemory, with_view};
use crate::peer::{Peer, Task};
use crate::queue::{Calls, Notifier, Queue, check_eventfd};

pub(crate) type Outcome = Result<Answer, Refusal>;

impl<M: RegionMemory> Peer<M> {
    /// Does what the event says; `None`: it has become a task.
    pub(crate) fn begin_event(
        &mut self,
        event: Event,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) -> Option<Outcome> {
        let done = Ok(Answer::Done);
        Some(match event {
            Event::Owner | Event::ProtocolFeatures(_) => done,
            Event::Features(features) => self.set_features(features, device, turn),
            Event::Memory(regions) => return self.change_or_wait(regions, device),
            Event::RingStarted(config) => return self.start_or_wait(config, device, turn),
            Event::RingStopped(index) => {
                if let Some(base) = self.cancel_start(index) {
                    self.end_driver(device);
                    return Some(Ok(Answer::RingStopped(base)));
                }
                self.task = Some(Task::StopRing(index));
                return None;
            }
            Event::Mtu(mtu) => ask(device, NetworkRequest::Mtu(mtu)),
            Event::Announce(mac) => ask(device, NetworkRequest::Announce(mac)),
            Event::RingsDisabled => {
                for queue in &self.queues {
                    device.pause_queue(queue.index, true);
                }
                for ring in &mut self.starting {
                    ring.config.is_enabled = false;
                }
                done
            }
            Event::RingEnabled(index, is_enabled) => {
                if let Some(ring) = self.starting(index) {
                    ring.is_enabled = is_enabled;
                }
                device.pause_queue(index.into(), !is_enabled);
                done
            }
            Event::KickReplaced(index, kick) => self
                .replace_kick(index, kick, device, turn)
                .map(|()| Answer::Done),
            Event::CallReplaced(index, call) => self.notifier("call", call.clone()).map(|own| {
                if let Some(ring) = self.starting(index) {
                    ring.call = call;
                }
                if let Some(queue) = self.queue(index) {
                    queue.call = own;
                    // A completion may have been signalled on the old one, or on none.
                    queue.ring_call();
                }
                Answer::Done
            }),
            Event::ErrReplaced(index, err) => self.notifier("error", err.clone()).map(|own| {
                if let Some(ring) = self.starting(index) {
                    ring.err = err;
                }
                if let Some(queue) = self.queue(index) {
                    queue.err = own;
                }
                Answer::Done
            }),
            Event::ConfigRead(access) => {
                let mut bytes = vec![0; access.size as usize];
                device.read_config(access.offset.into(), &mut bytes);
                Ok(Answer::Config(bytes))
            }
            Event::ConfigWrite(access, bytes) => {
                device.write_config(access.offset.into(), &bytes);
                done
            }
            Event::InflightWanted(shape) => self.make_inflight(shape),
            Event::InflightGiven(shape, file) => self.take_inflight(shape, &file),
            Event::Reset => {
                self.task = Some(Task::Reset);
                return None;
            }
            Event::BackendChannel(channel) => self.set_channel(channel, turn),
            Event::IotlbUpdate {
                range,
                user_addr,
                access,
            } => self.update_iotlb(range, user_addr, access),
            Event::IotlbInvalidate(range) => return self.invalidate_iotlb(range),
        })
    }

    fn queue(&mut self, index: u8) -> Option<&mut Queue> {
        self.queues
            .iter_mut()
            .find(|queue| queue.index == u16::from(index))
    }

    /// The driver's features; no ring runs. The device begins with them when its first ring starts:
    /// clients send them twice, and a firmware's differ from the kernel's after it.
    fn set_features(
        &mut self,
        features: u64,
        device: &Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) -> Outcome {
        self.set_translated(features & feature::ACCESS_PLATFORM != 0, turn);
        // Legacy drivers do not acknowledge VERSION_1; on a little-endian machine their rings and
        // requests are the same.
        self.features = (features & device.features()) | feature::VERSION_1;
        Ok(Answer::Done)
    }

    fn change_or_wait(
        &mut self,
        regions: Arc<[Region]>,
        device: &mut Device<impl DeviceClass>,
    ) -> Option<Outcome> {
        let outcome = self.change_memory(&regions, device);
        if outcome.is_none() {
            self.task = Some(Task::Memory(regions));
        }
        outcome
    }

    /// Changes guest memory once nothing is in flight.
    pub(crate) fn change_memory(
        &mut self,
        regions: &Arc<[Region]>,
        device: &mut Device<impl DeviceClass>,
    ) -> Option<Outcome> {
        if device.in_flight() != 0 {
            device.set_service(Service::Finishing);
            return None;
        }
        let outcome = self.memory.set(Arc::clone(regions));
        device.set_service(Service::Full);
        if outcome.is_ok() && self.has_begun {
            device.set_memory(self.memory.keep_alive());
            // Rings that have faulted may be in memory again, and their drivers were notified that
            // no kicks are needed. Tickets for pages that the former memory lacked are never
            // completed.
            device.for_each_ring(|ring| {
                if let Some(Parked::Ticket(ticket)) = ring.parked() {
                    ring.ticket_done(ticket);
                }
                ring.kick();
            });
        }
        Some(outcome.map(|()| Answer::Done))
    }

    /// Starts a ring once what is read of it first is there.
    pub(crate) fn start_or_wait(
        &mut self,
        config: RingConfig,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) -> Option<Outcome> {
        // Translations may come only after the answer.
        if self.memory.is_translated() {
            self.starting.push(StartingRing::new(config));
            return Some(Ok(Answer::Done));
        }
        let read_first = match config.layout {
            // The used index.
            RingLayout::Split => self.memory.ring_addr(config.used).map(|at| (at, 4)),
            // Any descriptor's flags.
            RingLayout::Packed => {
                let len = 16 * u32::from(config.size.max(1));
                self.memory.ring_addr(config.desc).map(|at| (at, len))
            }
        };
        if let Some((at, len)) = read_first
            && let Some(ticket) = self.memory.absent(&[(at, len, Intent::Write)])
        {
            self.task = Some(Task::StartRing(Box::new(config), Some(ticket)));
            return None;
        }
        Some(self.start_ring(config, device, turn).map(|()| Answer::Done))
    }

    pub(crate) fn start_ring(
        &mut self,
        config: RingConfig,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) -> Result<(), Refusal> {
        if let Kick::Fd(fd) = &config.kick {
            check_eventfd("kick", fd)?;
        }
        let call = self.notifier("call", config.call.clone())?;
        let err = self.notifier("error", config.err.clone())?;
        let index = u16::from(config.index);
        let at = |what: &str, user: u64| {
            self.memory.ring_addr(user).ok_or_else(|| {
                Refusal(format!(
                    "the {what} of ring {index} at {user:#x} lies in no memory region"
                ))
            })
        };
        let place = QueueConfig {
            index,
            size: config.size,
            desc: at("descriptor area", config.desc)?,
            avail: at("driver area", config.avail)?,
            used: at("device area", config.used)?,
        };
        // With nothing running it begins anew, whatever it was before: broken, or with another
        // driver.
        if self.queues.is_empty() {
            device
                .begin(self.features, self.memory.keep_alive())
                .map_err(|error| Refusal(chain(&error)))?;
            self.has_begun = true;
        }
        let max = device.queue_sizes()[usize::from(index)];
        let mut ring =
            Ring::new(&place, max, self.features).map_err(|error| Refusal(chain(&error)))?;
        let used_idx = used_index(&mut self.memory, &place, config.layout)?;
        let start = match &self.inflight {
            Some(region) => {
                let mut words = RingWords {
                    memory: &mut self.memory,
                    desc: place.desc,
                };
                let fresh = fresh_position(&config.base);
                let (journal, start) = region.recover(&config, used_idx, fresh, &mut words)?;
                ring.set_journal(journal);
                start
            }
            None => {
                if config.layout == RingLayout::Packed {
                    self.warn_of_use(&config, place.desc);
                }
                start_of(&config.base, used_idx)
            }
        };
        ring.start(start).map_err(|error| {
            Refusal(format!(
                "ring {index} cannot start there: {}",
                chain(&error)
            ))
        })?;
        let replaying = ring.replaying();
        if replaying != 0 {
            say!(
                self.log,
                info,
                ring = index,
                requests = replaying,
                "resuming what a predecessor left"
            );
        }
        let kick = match &config.kick {
            Kick::Fd(fd) => Some(fd.as_raw_fd()),
            Kick::Poll => None,
        };
        if let Some(fd) = kick {
            turn.wakes()
                .add(fd, index.into())
                .map_err(|error| Refusal(format!("ring {index} cannot be waited for: {error}")))?;
        }
        if let Err(error) = device.add_queue(ring) {
            kick.into_iter().for_each(|fd| turn.wakes().remove(fd));
            return Err(Refusal(chain(&error)));
        }
        device.pause_queue(index, !config.is_enabled);
        let mut queue = Queue {
            index,
            kick: config.kick,
            call,
            err,
            call_since: None,
        };
        // A predecessor may have died between publishing and calling.
        queue.ring_call();
        self.queues.push(queue);
        Ok(())
    }

    /// Of a packed ring without an inflight region, which seems to be in use.
    fn warn_of_use(&mut self, config: &RingConfig, desc: Iova) {
        let at = fresh_position(&config.base);
        let words = RingWords {
            memory: &mut self.memory,
            desc,
        };
        if was_in_use(at, config.size, &words) {
            say!(
                self.log,
                warn,
                ring = config.index,
                "a packed ring that was in use begins at its beginning: if its last back end was \
                 killed, nobody \
                 knows where that stood, since the front end keeps no inflight region, and it \
                 stands still \
                 until the guest resets the device \
                 (split rings, packed=off, go on)"
            );
        }
    }

    /// Stops a ring once all chains taken from it are published.
    pub(crate) fn stop_ring(
        &mut self,
        index: u16,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) -> Option<Outcome> {
        let mut calls = Calls {
            queues: &mut self.queues,
            now_ns: turn.now().0,
        };
        let StoppedQueue {
            position,
            unpublished,
        } = with_view!(self.memory, view => device.stop_queue(index, view, &mut calls))?;
        if unpublished != 0 {
            say!(
                self.log,
                warn,
                ring = index,
                requests = unpublished,
                "finished requests cannot be shown to the driver: its ring is broken or outside \
                 memory"
            );
        }
        if let Some(at) = self.queues.iter().position(|queue| queue.index == index) {
            let mut queue = self.queues.remove(at);
            if let Some(fd) = queue.kick_fd() {
                turn.wakes().remove(fd);
            }
            if queue.call_since.is_some() {
                queue.ring_call();
            }
        }
        self.watches.clear();
        self.is_watched = false;
        self.end_driver(device);
        let base = match position {
            RingPosition::Split { next_avail, .. } => RingBase::Split(next_avail),
            RingPosition::Packed { avail, used } => RingBase::Packed {
                avail: avail.0,
                avail_wrap: avail.1,
                used: used.0,
                used_wrap: used.1,
                is_fresh: false,
            },
        };
        Some(Ok(Answer::RingStopped(base)))
    }

    /// The driver has gone if no ring is left: the next one finds the device as it was at first.
    fn end_driver(&mut self, device: &mut Device<impl DeviceClass>) {
        if !self.queues.is_empty() || !self.starting.is_empty() || device.in_flight() != 0 {
            return;
        }
        device.reset();
        self.has_begun = false;
        if self.channel.is_some()
            && let Some(tlb) = self.memory.tlb()
        {
            tlb.open();
        }
    }

    /// Forgets all rings and the device's state once nothing is in flight, and returns whether it
    /// has. Completions until then are still published.
    pub(crate) fn reset(
        &mut self,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) -> bool {
        device.set_service(Service::Finishing);
        if device.in_flight() != 0 {
            return false;
        }
        for queue in self.queues.drain(..) {
            if let Some(fd) = queue.kick_fd() {
                turn.wakes().remove(fd);
            }
        }
        self.watches.clear();
        self.is_watched = false;
        self.has_begun = false;
        self.features = feature::VERSION_1;
        self.inflight = None;
        self.starting.clear();
        device.reset();
        // Nothing is acknowledged any more.
        self.set_translated(false, turn);
        true
    }

    fn replace_kick(
        &mut self,
        index: u8,
        kick: Kick,
        device: &mut Device<impl DeviceClass>,
        turn: &mut PollContext<'_>,
    ) -> Result<(), Refusal> {
        if let Kick::Fd(fd) = &kick {
            check_eventfd("kick", fd)?;
        }
        if let Some(ring) = self.starting(index) {
            ring.kick = kick;
            return Ok(());
        }
        let Some(queue) = self.queue(index) else {
            return Ok(());
        };
        // The old one stays if the new one cannot be had; both are open, so they have different
        // numbers.
        if let Kick::Fd(fd) = &kick {
            turn.wakes()
                .add(fd.as_raw_fd(), index.into())
                .map_err(|error| Refusal(format!("ring {index} cannot be waited for: {error}")))?;
        }
        if let Some(old) = queue.kick_fd() {
            turn.wakes().remove(old);
        }
        queue.kick = kick;
        device.kick(index.into());
        Ok(())
    }

    /// Makes an inflight region for the front end to keep.
    fn make_inflight(&mut self, shape: Inflight) -> Outcome {
        let layout = self.layout();
        let refuse = |reason: String| Refusal(format!("no inflight region: {reason}"));
        let len = region_len(layout, shape.queues, shape.queue_size)
            .ok_or_else(|| refuse(format!("{shape:?} is too large")))?;
        let file = SharedFile::create(len).map_err(|error| refuse(chain(&error)))?;
        let fd: OwnedFd = file
            .file()
            .try_clone_to_owned()
            .map_err(|error| refuse(error.to_string()))?;
        self.inflight = Some(InflightRegion::new(file, shape));
        Ok(Answer::Inflight {
            fd,
            mmap_size: len,
            mmap_offset: 0,
        })
    }

    /// Takes an inflight region back that the front end has kept.
    fn take_inflight(&mut self, shape: Inflight, file: &SharedFd) -> Outcome {
        let refuse =
            |reason: String| Refusal(format!("the inflight region cannot be used: {reason}"));
        let fd = file
            .try_clone()
            .map_err(|error| refuse(error.to_string()))?;
        let file = SharedFile::open(fd, shape.mmap_offset, shape.mmap_size)
            .map_err(|error| refuse(chain(&error)))?;
        self.inflight = Some(InflightRegion::new(file, shape));
        Ok(Answer::Done)
    }

    pub(crate) fn notifier(
        &self,
        what: &str,
        fd: Option<SharedFd>,
    ) -> Result<Option<Notifier>, Refusal> {
        fd.map(|fd| Notifier::accept(what, fd, &self.permit))
            .transpose()
    }

    fn layout(&self) -> RingLayout {
        if self.session.features() & feature::RING_PACKED != 0 {
            RingLayout::Packed
        } else {
            RingLayout::Split
        }
    }
}

/// Asks a network device for something.
fn ask(device: &mut Device<impl DeviceClass>, request: NetworkRequest) -> Outcome {
    match device.network_request(request) {
        true => Ok(Answer::Done),
        false => Err(Refusal(format!("{request:?} cannot be done"))),
    }
}

/// A split ring's used index as it stands in memory; 0 for packed rings, which have none.
fn used_index<M: RegionMemory>(
    memory: &mut Memory<M>,
    place: &QueueConfig,
    layout: RingLayout,
) -> Result<u16, Refusal> {
    if layout == RingLayout::Packed {
        return Ok(0);
    }
    let mut bytes = [0; 2];
    let at = place.used.checked_add(2);
    at.and_then(|at| with_view!(memory, view => view.read(at, &mut bytes)).ok())
        .ok_or_else(|| {
            Refusal(format!(
                "the used ring of ring {} cannot be read",
                place.index
            ))
        })?;
    Ok(u16::from_le_bytes(bytes))
}

/// Returns the start of a ring without an inflight region. The used index is the one in memory,
/// since SET_VRING_BASE does not carry it.
fn start_of(base: &RingBase, used_idx: u16) -> RingStart {
    match *base {
        RingBase::Split(next_avail) => RingStart::Split {
            next_avail,
            next_used: used_idx,
            replay: Vec::new(),
        },
        RingBase::Packed {
            avail,
            avail_wrap,
            used,
            used_wrap,
            ..
        } => RingStart::Packed {
            avail: (avail, avail_wrap),
            used: (used, used_wrap),
            replay: Vec::new(),
        },
    }
}

/// Returns the start of a packed ring whose inflight region was never used.
fn fresh_position(base: &RingBase) -> PackedPosition {
    match *base {
        RingBase::Packed {
            avail, avail_wrap, ..
        } => PackedPosition {
            idx: avail,
            wrap: avail_wrap,
        },
        RingBase::Split(_) => PackedPosition { idx: 0, wrap: true },
    }
}

/// A packed ring's flags in guest memory, for the recovery.
struct RingWords<'a, M> {
    memory: &'a mut Memory<M>,
    desc: Iova,
}

impl<M> RingWords<'_, M> {
    fn at(&self, index: u16) -> Option<Iova> {
        self.desc.checked_add(u64::from(index) * 16 + 14)
    }
}

impl<M: RegionMemory> PackedRing for RingWords<'_, M> {
    fn flags(&self, index: u16) -> u16 {
        let mut bytes = [0; 2];
        // A ring outside memory is found to be so when it is served.
        if let Some(at) = self.at(index) {
            let _ = self.memory.peek(at, &mut bytes);
        }
        u16::from_le_bytes(bytes)
    }

    fn set_flags(&mut self, index: u16, flags: u16) {
        if let Some(at) = self.at(index) {
            let _ = with_view!(self.memory, view => view.write(at, &flags.to_le_bytes()));
        }
    }
}
