//! The single owner of a VM's IOMMU and virtio functions: what its sidecore polls.
//!
//! Everything that reaches a device or the IOMMU from another thread comes here as a [`Request`]: a vCPU's
//! trapped access, a question of the ledger. So nothing here has a lock, translation and invalidation are
//! ordered by program order, and an answer says that the act is done.
//!
//! One sweep: the IOMMU's registers and queue first, so that an unmap is seen before the next translation;
//! then each function. Interrupts and events of the IOMMU leave with its step; leases that ended in this
//! sweep let a parked wait go in the next.
//!
//! Called on the sidecore's thread only. What is slow or may wait (a stop that drains) is a state: the reply
//! is kept and sent when the function is silent, or the machine has ended.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use guest_mem::{GuestRam, KeepAlive, PhysMem, View};
use sidecore::{Activity, AlwaysPoll, ArmError, Nanos, Poller, Reply, Turn, Wakes};
use vtd::{AccessLen, Event};

use super::doorbells::Doorbells;
use super::iommu_port::IommuPort;
use crate::irq::msi::MsiSink;
use crate::ledger::account::OwnerCounts;
use crate::pci::virtio::function::VirtioFunction;

/// Doorbell eventfds are looked at once in this many idle sweeps: a driver that rings although nobody asked
/// (to un-park a queue whose ring faulted) is heard, and an idle sweep stays free of system calls.
const DOORBELL_PERIOD: u32 = 1024;

/// How long requests may hold up an unmap or a stop, unless the user says otherwise.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// The same at the end of the machine, at most: whoever is to be cancelled has had time to finish by itself.
const END_DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// What other threads ask of the owner. `function` counts virtio functions from 0.
pub enum Request {
    /// A vCPU reads configuration space.
    ConfigRead {
        /// Which function.
        function: usize,
        /// Register, bytes.
        reg: u16,
        /// 1, 2 or 4 bytes.
        len: u8,
        /// The value.
        reply: Reply<u32>,
    },
    /// A vCPU writes configuration space; answered when its effect, a drain included, is over.
    ConfigWrite {
        /// Which function.
        function: usize,
        /// Register, bytes.
        reg: u16,
        /// 1, 2 or 4 bytes.
        len: u8,
        /// The value.
        value: u32,
        /// Done.
        reply: Reply<()>,
    },
    /// A vCPU reads the BAR.
    BarRead {
        /// Which function.
        function: usize,
        /// Offset in the BAR.
        offset: u64,
        /// 1 to 8 bytes.
        len: usize,
        /// The bytes; those beyond `len` are zero.
        reply: Reply<[u8; 8]>,
    },
    /// A vCPU writes the BAR.
    BarWrite {
        /// Which function.
        function: usize,
        /// Offset in the BAR.
        offset: u64,
        /// The bytes.
        data: [u8; 8],
        /// How many of them.
        len: usize,
        /// Done.
        reply: Reply<()>,
    },
    /// A vCPU's access to the IOMMU's registers exited.
    IommuRead {
        /// Offset in the register page.
        offset: u16,
        /// Width.
        len: AccessLen,
        /// The value.
        reply: Reply<u64>,
    },
    /// A vCPU's write to the IOMMU's registers exited; answered when all it set off has been done that
    /// needs no lease to end.
    IommuWrite {
        /// Offset in the register page.
        offset: u16,
        /// Width.
        len: AccessLen,
        /// The value.
        value: u64,
        /// Done.
        reply: Reply<()>,
    },
    /// The ledger asks for the counters.
    Counts(Reply<OwnerCounts>),
    /// The machine has ended. Whoever waits for a stop is let go, functions stop for good, and the number of each is sent once
    /// nothing of it is in flight.
    End(Sender<u64>),
}

/// A function, its doorbells, and those who wait for it to stop: at most one question of each vCPU.
struct Slot {
    function: VirtioFunction,
    doorbells: Option<Doorbells>,
    stopping: Vec<Reply<()>>,
    /// When the stop under way will have taken too long; `u64::MAX` once that has been dealt with.
    stop_limit: Option<Nanos>,
    /// The machine's end has been told that this function has ended.
    is_told: bool,
}

impl Slot {
    /// A stop waits for the requests in flight, however slow the storage: the memory of one that cannot be cancelled may still
    /// be written. At the limit the log says so; a reset or the machine's end then cancels what can be, a pause does not,
    /// since what it cancelled would fail in the guest.
    fn watch_stop(&mut self, now: Nanos, limit: Duration, vm: &str) {
        if self.function.is_drained() {
            self.stop_limit = None;
            return;
        }
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let due = *self
            .stop_limit
            .get_or_insert(Nanos(now.0.saturating_add(limit)));
        if now >= due {
            self.stop_limit = Some(Nanos(u64::MAX));
            tracing::warn!(
                vm,
                device = %self.function.source(),
                "a stop waits for requests that the storage has not finished"
            );
            self.function.stop_overdue();
        }
    }
}

/// The owner. See the module's head.
pub struct Owner {
    name: String,
    ram: GuestRam,
    keep: KeepAlive,
    iommu: IommuPort,
    slots: Vec<Slot>,
    messages: Arc<dyn MsiSink>,
    /// Kept for its allocation.
    wake_fds: Vec<(RawFd, u32)>,
    /// They are registered: from `arm` to the poll that follows it, since nobody empties them while it polls.
    is_listening: bool,
    idle_sweeps: u32,
    drain_limit: Duration,
    drain_limits: u64,
    iommu_messages: u64,
    /// The machine has ended: who waits for the functions.
    end: Option<Sender<u64>>,
}

/// Interrupts and events of the IOMMU, while it steps.
pub(super) struct IommuSink<'a> {
    messages: &'a dyn MsiSink,
    sent: u64,
    events: Vec<Event>,
}

impl<'a> IommuSink<'a> {
    fn new(messages: &'a dyn MsiSink) -> Self {
        Self {
            messages,
            sent: 0,
            events: Vec::new(),
        }
    }
}

impl vtd::Sink for IommuSink<'_> {
    fn msi(&mut self, address: u64, data: u32) {
        self.sent += 1;
        self.messages.send(address, data);
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

impl Owner {
    /// Owns `iommu` and, by and by, functions.
    pub fn new(
        name: impl Into<String>,
        ram: GuestRam,
        iommu: IommuPort,
        messages: Arc<dyn MsiSink>,
    ) -> Self {
        Self {
            name: name.into(),
            keep: ram.keep_alive(),
            ram,
            iommu,
            slots: Vec::new(),
            messages,
            wake_fds: Vec::new(),
            is_listening: false,
            idle_sweeps: 0,
            drain_limit: DRAIN_LIMIT,
            drain_limits: 0,
            iommu_messages: 0,
            end: None,
        }
    }

    /// Sets how long a device may take to stop before its requests are cancelled; the IOMMU has its own copy of the
    /// limit, for unmaps.
    #[must_use]
    pub fn with_drain_limit(mut self, limit: Duration) -> Self {
        self.drain_limit = limit;
        self
    }

    /// Adds a function; answers its number in [`Request`]s.
    pub fn add(&mut self, function: VirtioFunction, doorbells: Option<Doorbells>) -> usize {
        self.slots.push(Slot {
            function,
            doorbells,
            stopping: Vec::new(),
            stop_limit: None,
            is_told: false,
        });
        self.slots.len() - 1
    }

    /// Functions added so far.
    pub fn functions(&self) -> usize {
        self.slots.len()
    }

    /// Lets the IOMMU act, and takes what it sends.
    fn with_iommu<R>(
        &mut self,
        act: impl FnOnce(&mut IommuPort, &GuestRam, &mut IommuSink<'_>) -> R,
    ) -> R {
        let mut sink = IommuSink::new(&*self.messages);
        let result = act(&mut self.iommu, &self.ram, &mut sink);
        let IommuSink { sent, events, .. } = sink;
        self.iommu_messages += sent;
        self.take_events(events);
        result
    }

    fn step_iommu(&mut self, now: Nanos) -> Activity {
        if self.with_iommu(|iommu, ram, sink| iommu.poll(ram, now.0, sink)) {
            Activity::Busy
        } else {
            Activity::Idle
        }
    }

    fn take_events(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::DrainLimit { sources } => {
                    self.drain_limits += 1;
                    for slot in &mut self.slots {
                        if sources.contains(&slot.function.source()) {
                            tracing::warn!(
                                vm = %self.name,
                                device = %slot.function.source(),
                                "an unmap waits for a request that does not end; cancelling it"
                            );
                            slot.function.cancel_overdue();
                        }
                    }
                }
            }
        }
    }

    fn poll_functions(&mut self, now: Nanos) -> Activity {
        let mut activity = Activity::Idle;
        for (number, slot) in (0..).zip(&mut self.slots) {
            let mut dma = View::new(&mut self.iommu, &self.ram, slot.function.source());
            if slot.function.poll(&mut dma, &*self.messages, now.0) == vio::Activity::Busy {
                activity = Activity::Busy;
            }
            slot.watch_stop(now, self.drain_limit, &self.name);
            if !slot.stopping.is_empty() && slot.function.is_silent() {
                slot.stopping.drain(..).for_each(|reply| reply.send(()));
            }
            if let Some(end) = &self.end
                && !slot.is_told
                && slot.function.has_ended()
            {
                slot.is_told = true;
                // Nobody may be waiting any more.
                let _ = end.send(number);
            }
        }
        activity
    }

    fn drain_doorbells(&mut self) {
        for slot in &mut self.slots {
            let function = &mut slot.function;
            if let Some(doorbells) = &mut slot.doorbells {
                doorbells.drain(|queue| function.kick(queue));
            }
        }
    }

    fn counts(&mut self) -> OwnerCounts {
        self.drain_doorbells();
        let mut counts = self.iommu.counts();
        counts.interrupts = self.iommu_messages;
        for slot in &self.slots {
            counts.doorbells += slot.doorbells.as_ref().map_or(0, Doorbells::rung);
            counts.requests += slot.function.stats().requests;
            counts.interrupts += slot.function.interrupts();
        }
        counts
    }

    /// A write to the IOMMU that exited: everything it sets off is done before the vCPU goes on, but what
    /// waits for leases, so that a trapped write costs one exit however much it asks for.
    fn iommu_write(&mut self, offset: u16, len: AccessLen, value: u64) {
        let now = Nanos::now();
        self.with_iommu(|iommu, ram, sink| iommu.write((offset, len, value), ram, now.0, sink));
        // Each step does a bounded batch and says whether more can be done at once; a queue has at most
        // 32768 descriptors, so 64 batches of 1024 are enough, and a guest cannot make more of them.
        for _ in 0..64 {
            if self.step_iommu(now) == Activity::Idle {
                break;
            }
        }
    }

    /// Registers everything that may wake it.
    fn listen(&mut self, wakes: &mut Wakes) -> std::io::Result<()> {
        self.is_listening = true;
        self.wake_fds.clear();
        let mut add = |fd| self.wake_fds.push((fd, 0));
        self.iommu.wake_fd().into_iter().for_each(&mut add);
        for slot in &self.slots {
            slot.doorbells
                .iter()
                .flat_map(Doorbells::fds)
                .for_each(&mut add);
            slot.function.wake_fds().into_iter().for_each(&mut add);
        }
        wakes.replace(&self.wake_fds)
    }

    fn config_write(&mut self, at: usize, reg: u16, len: u8, value: u32, reply: Reply<()>) {
        let slot = &mut self.slots[at];
        slot.function
            .config_write(reg, len, value, &self.keep, &*self.messages);
        if let Some(doorbells) = &mut slot.doorbells {
            doorbells.place(slot.function.doorbells());
        }
        if slot.function.is_silent() || self.end.is_some() {
            reply.send(());
        } else {
            slot.stopping.push(reply);
        }
    }
}

impl Poller for Owner {
    type Message = Request;
    type Probe = AlwaysPoll;

    fn detaching(&mut self, wakes: &mut Wakes) {
        wakes.clear();
        self.is_listening = false;
    }

    fn poll(&mut self, turn: &mut Turn<'_>) -> Activity {
        if self.is_listening {
            self.is_listening = false;
            turn.wakes().clear();
        }
        let now = turn.now();
        let iommu = self.step_iommu(now);
        let functions = self.poll_functions(now);
        if iommu == Activity::Busy || functions == Activity::Busy {
            self.idle_sweeps = 0;
            return Activity::Busy;
        }
        self.idle_sweeps = self.idle_sweeps.wrapping_add(1);
        if self.idle_sweeps.is_multiple_of(DOORBELL_PERIOD) {
            self.drain_doorbells();
        }
        Activity::Idle
    }

    fn message(&mut self, request: Request, _turn: &mut Turn<'_>) {
        match request {
            Request::ConfigRead {
                function,
                reg,
                len,
                reply,
            } => {
                reply.send(self.slots[function].function.config_read(reg, len));
            }
            Request::ConfigWrite {
                function,
                reg,
                len,
                value,
                reply,
            } => {
                self.config_write(function, reg, len, value, reply);
            }
            Request::BarRead {
                function,
                offset,
                len,
                reply,
            } => {
                let mut data = [0; 8];
                self.slots[function]
                    .function
                    .bar_read(offset, &mut data[..len.min(8)]);
                reply.send(data);
            }
            Request::BarWrite {
                function,
                offset,
                data,
                len,
                reply,
            } => {
                let function = &mut self.slots[function].function;
                function.bar_write(offset, &data[..len.min(8)], &self.keep, &*self.messages);
                reply.send(());
            }
            Request::IommuRead { offset, len, reply } => reply.send(self.iommu.read(offset, len)),
            Request::IommuWrite {
                offset,
                len,
                value,
                reply,
            } => {
                self.iommu_write(offset, len, value);
                reply.send(());
            }
            Request::Counts(reply) => {
                let counts = self.counts();
                reply.send(counts);
            }
            Request::End(end) => {
                self.end = Some(end);
                self.drain_limit = self.drain_limit.min(END_DRAIN_LIMIT);
                for slot in &mut self.slots {
                    slot.function.end();
                    slot.stop_limit = None;
                    slot.stopping.drain(..).for_each(|reply| reply.send(()));
                }
            }
        }
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        self.iommu.arm().map_err(ArmError::new)?;
        for slot in &mut self.slots {
            let mut dma = View::new(&mut self.iommu, &self.ram, slot.function.source());
            slot.function.arm(&mut dma);
        }
        self.listen(wakes).map_err(|error| {
            self.disarm();
            ArmError::new(error)
        })
    }

    fn has_work(&mut self) -> bool {
        let functions = self.slots.iter_mut().any(|slot| {
            let mut dma = View::new(&mut self.iommu, &self.ram, slot.function.source());
            !slot.stopping.is_empty() || slot.function.has_work(&mut dma)
        });
        // The IOMMU last: a look at a ring may have been refused and recorded, and the guest is to be told.
        functions || self.iommu.has_work()
    }

    fn disarm(&mut self) {
        if let Err(error) = self.iommu.disarm() {
            tracing::error!(vm = %self.name, %error, "the register page cannot be disarmed");
        }
        self.drain_doorbells();
        for slot in &mut self.slots {
            let mut dma = View::new(&mut self.iommu, &self.ram, slot.function.source());
            slot.function.disarm(&mut dma);
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        self.iommu.deadline().map(Nanos)
    }

    fn arm_cost(&self) -> u64 {
        self.iommu.arm_cost()
    }

    fn name(&self) -> &str {
        &self.name
    }
}

#[cfg(test)]
mod tests;
