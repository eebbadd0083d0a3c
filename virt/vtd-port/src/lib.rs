//! VT-d unit behind one of three register front ends, as a remapping unit of a machine's owner,
//! with the wake-up that the front end needs.
//!
//! | mode | memory slot | how a write arrives | how a sleeping owner is woken |
//! |---|---|---|---|
//! | trap | none | a message from the vCPU that exited | by the message |
//! | logged | read-only | an entry in the hypervisor's log | logging is switched off: writes exit and become messages |
//! | shared | writable | it is in the page | the page is write-protected by userfaultfd |
//!
//! The memory slot and the log belong to the hypervisor, which implements [`WriteLog`]. All calls
//! are made on the owner's thread.

mod arm_cost;

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use guest_mem::{PhysMem, RegisterPage, SlotMapping, Ticket};
use machine::{
    Invalidation, Op, RemappingUnit, Scope, TicketResult, UnitControl, UnitEvent, UnitPoll,
    UnitSink,
};
use platform::interrupt::Message;
use uffd::WriteGate;
use vtd::front::{LogEntry, Logged, Shared};
use vtd::{AccessLen, Progress, Stats, Unit};

use arm_cost::ArmCost;

/// Largest number of entries read from the log at once. KVM's ring holds 169, so one poll or access
/// empties it.
const LOG_BATCH: usize = 256;

/// The hypervisor's log of writes to a read-only slot (KVM's coalesced-MMIO ring; in tests a list).
pub trait WriteLog: Send {
    /// Passes the waiting entries to `take`, in order, and returns their number. Of the
    /// hypervisor's log it reads at most `max` entries, which may be writes to other units as well.
    fn drain(&mut self, max: usize, take: &mut dyn FnMut(LogEntry)) -> usize;
    /// Returns whether no entries wait.
    fn is_empty(&self) -> bool;
    /// Stops logging: from the return on, writes exit to user space. Earlier entries stay.
    fn unregister(&mut self) -> io::Result<()>;
    /// Resumes logging of writes.
    fn register(&mut self) -> io::Result<()>;
}

/// Front end by which the guest reaches the registers.
enum Front {
    Trap,
    Logged {
        page: RegisterPage,
        front: Logged,
        log: Box<dyn WriteLog>,
        logged: u64,
        is_armed: bool,
    },
    Shared {
        page: RegisterPage,
        front: Shared,
        gate: Gate,
        faults: u64,
        due: Option<Due>,
    },
}

/// Stores that were blocked by the page's protection and have been unblocked, but have not reached
/// the page yet: a vCPU needs some time to wake up and to repeat the store. Arming before that
/// would block it again, and an owner that sleeps at its first idle sweep would do so repeatedly.
struct Due {
    stores: u64,
    /// The unit's count of register writes before them.
    writes: u64,
    /// End of the wait for them, in ns; set at the first poll. It is needed because a vCPU may be
    /// paused, and because a store of an unchanged value is not detected.
    until: Option<u64>,
}

/// Longest wait for due stores, in ns: long compared with the wake-up of a thread, also in the lab.
const DUE_LIMIT: u64 = 100_000_000;

/// Mechanism by which a store to a shared page wakes a sleeping owner.
enum Gate {
    Watched(WriteGate),
    /// This host has no userfaultfd, for this reason: the owner never sleeps.
    Absent(String),
}

/// A VT-d unit and its front end.
pub struct VtdPort {
    unit: Unit,
    front: Front,
    arm_cost: ArmCost,
}

/// Adapter that forwards a unit's events to a [`UnitSink`].
struct SinkAdapter<'a, S>(&'a mut S);

impl<S: UnitSink> vtd::Sink for SinkAdapter<'_, S> {
    fn msi(&mut self, address: u64, data: u32) {
        self.0.interrupt(Message { address, data });
    }

    fn event(&mut self, event: vtd::Event) {
        let vtd::Event::DrainLimit { sources } = event;
        self.0.event(UnitEvent::DrainLimit { sources });
    }

    #[inline]
    fn invalidated(&mut self, what: &vtd::Invalidation) -> u32 {
        let scope = match *what {
            vtd::Invalidation::All => Scope::All,
            vtd::Invalidation::Domain(did) => Scope::Domain(did.into()),
            vtd::Invalidation::Sources(source, mask) => Scope::Source(source, mask),
            vtd::Invalidation::Pages { did, iova, len } => {
                let domain = did.into();
                Scope::Range { domain, iova, len }
            }
        };
        self.0.invalidated(&Invalidation { scope })
    }
}

impl VtdPort {
    /// Creates a port for a unit whose registers trap.
    pub fn trap(unit: Unit) -> Self {
        Self::with_front(unit, Front::Trap, 0)
    }

    /// Creates a port for a unit behind a page that the guest reads, and a log of the guest's
    /// writes. `page` becomes a read-only slot.
    pub fn logged(unit: Unit, page: RegisterPage, log: Box<dyn WriteLog>) -> Self {
        let front = Logged::enter(&unit, &page);
        let front = Front::Logged {
            page,
            front,
            log,
            logged: 0,
            is_armed: false,
        };
        // Initial cost: two system calls that wait for an SRCU grace period.
        Self::with_front(unit, front, 50_000)
    }

    /// Creates a port for a unit whose register page is guest memory. `mapping` is that of the
    /// slot.
    pub fn shared(mut unit: Unit, page: RegisterPage, mapping: Arc<SlotMapping>) -> Self {
        let front = Shared::enter(&mut unit, &page);
        let gate = match WriteGate::new(mapping) {
            Ok(gate) => Gate::Watched(gate),
            Err(error) => Gate::Absent(error.to_string()),
        };
        let front = Front::Shared {
            page,
            front,
            gate,
            faults: 0,
            due: None,
        };
        // Initial cost: protecting and unprotecting the page.
        Self::with_front(unit, front, 200_000)
    }

    fn with_front(unit: Unit, front: Front, arm_cost_ns: u64) -> Self {
        Self {
            unit,
            front,
            arm_cost: ArmCost::new(arm_cost_ns),
        }
    }

    /// Returns the reason why the guest's stores to the page cannot wake a sleeping owner, so that
    /// the owner never sleeps; `None` if they can.
    pub fn keeps_awake(&self) -> Option<&str> {
        match &self.front {
            Front::Shared {
                gate: Gate::Absent(why),
                ..
            } => Some(why),
            Front::Trap | Front::Logged { .. } | Front::Shared { .. } => None,
        }
    }

    /// Returns the unit's counters.
    pub fn stats(&self) -> &Stats {
        self.unit.stats()
    }

    /// Number of register writes taken from the log. Each is an exit into the kernel.
    pub fn logged_writes(&self) -> u64 {
        match self.front {
            Front::Logged { logged, .. } => logged,
            Front::Trap | Front::Shared { .. } => 0,
        }
    }

    /// Number of stores blocked by the armed page. Each is an exit.
    pub fn gate_faults(&self) -> u64 {
        match self.front {
            Front::Shared { faults, .. } => faults,
            Front::Trap | Front::Logged { .. } => 0,
        }
    }

    fn poll_unit<M: PhysMem>(&mut self, mem: &M, now: u64, sink: &mut impl vtd::Sink) -> bool {
        let taken = self.take_log(mem, now, sink);
        let Self { unit, front, .. } = self;
        let progress = match front {
            Front::Trap => unit.step(mem, now, sink),
            Front::Logged { page, front, .. } => front.step(unit, page, mem, now, sink),
            Front::Shared {
                page, front, due, ..
            } => {
                let progress = front.sweep(unit, page, mem, now, sink);
                if due.is_some() {
                    await_stores(due, unit, now);
                }
                progress
            }
        };
        taken > 0 || progress == Progress::Busy
    }

    /// Applies the logged writes, in order, as if each had trapped.
    fn take_log<M: PhysMem>(&mut self, mem: &M, now: u64, sink: &mut impl vtd::Sink) -> usize {
        let Self { unit, front, .. } = self;
        let Front::Logged {
            page,
            front,
            log,
            logged,
            ..
        } = front
        else {
            return 0;
        };
        let taken = log.drain(LOG_BATCH, &mut |entry| {
            if front.apply(unit, entry) {
                front.step(unit, page, mem, now, sink);
            }
        });
        *logged += taken as u64;
        taken
    }

    /// Applies a register write that exited. Earlier logged writes have been applied.
    fn write(&mut self, offset: u16, len: AccessLen, value: u64) {
        let Self { unit, front, .. } = self;
        match front {
            Front::Logged { front, .. } => {
                let entry = LogEntry {
                    offset,
                    len: len.bytes() as u8,
                    data: value,
                };
                // The caller steps after every write.
                let _ = front.apply(unit, entry);
            }
            Front::Trap | Front::Shared { .. } => unit.write(offset, len, value),
        }
    }

    fn arm_front(&mut self) -> io::Result<()> {
        match &mut self.front {
            Front::Trap => Ok(()),
            Front::Logged { log, is_armed, .. } => {
                log.unregister()?;
                *is_armed = true;
                Ok(())
            }
            Front::Shared {
                gate: Gate::Watched(gate),
                ..
            } => gate.protect(),
            Front::Shared {
                gate: Gate::Absent(why),
                ..
            } => Err(io::Error::other(why.clone())),
        }
    }

    fn disarm_front(&mut self) -> io::Result<()> {
        match &mut self.front {
            Front::Logged { log, is_armed, .. } if *is_armed => {
                log.register()?;
                *is_armed = false;
            }
            Front::Shared {
                gate: Gate::Watched(gate),
                faults,
                due,
                ..
            } => {
                let stores = gate.unprotect()?;
                *faults += stores;
                *due = (stores > 0).then(|| Due {
                    stores,
                    writes: self.unit.stats().register_writes,
                    until: None,
                });
            }
            _ => {}
        }
        Ok(())
    }
}

/// Returns offset and length of a legal register access (VT-d §11.2): 4 or 8 bytes of the page.
fn register(offset: u64, len: u8) -> Option<(u16, AccessLen)> {
    let len = AccessLen::from_bytes(usize::from(len))?;
    Some((u16::try_from(offset).ok()?, len))
}

impl<C> RemappingUnit<C> for VtdPort {
    type Iommu = Unit;

    #[inline]
    fn iommu(&mut self) -> &mut Unit {
        &mut self.unit
    }

    #[inline]
    fn poll<M: PhysMem>(&mut self, mem: &M, now: u64, sink: &mut impl UnitSink) -> UnitPoll {
        let is_busy = self.poll_unit(mem, now, &mut SinkAdapter(sink));
        UnitPoll {
            is_busy,
            cost: self.unit.take_cost(),
        }
    }

    fn access<M: PhysMem>(&mut self, op: Op, mem: &M, now: u64, sink: &mut impl UnitSink) -> u64 {
        match op {
            Op::Read { offset, len, .. } => {
                register(offset, len).map_or(0, |(offset, len)| self.unit.read(offset, len))
            }
            Op::Write {
                offset, len, value, ..
            } => {
                if let Some((offset, len)) = register(offset, len) {
                    self.take_log(mem, now, &mut SinkAdapter(sink));
                    self.write(offset, len, value);
                }
                0
            }
            Op::ConfigRead { .. } | Op::ConfigWrite { .. } => u64::MAX,
        }
    }
}

impl UnitControl for VtdPort {
    fn arm(&mut self) -> io::Result<()> {
        let timer = ArmCost::start();
        self.arm_front()?;
        self.arm_cost.armed(timer);
        Ok(())
    }

    fn disarm(&mut self) -> io::Result<()> {
        let timer = ArmCost::start();
        self.disarm_front()?;
        self.arm_cost.disarmed(timer);
        Ok(())
    }

    /// Returns the average measured so far.
    fn arm_cost(&self) -> u64 {
        self.arm_cost.ns()
    }

    fn wake_fd(&self) -> Option<RawFd> {
        match &self.front {
            Front::Shared {
                gate: Gate::Watched(gate),
                ..
            } => Some(gate.as_fd().as_raw_fd()),
            _ => None,
        }
    }

    fn has_work(&mut self) -> bool {
        // In addition to the guest's writes: a fault to report to the guest, or a wait descriptor
        // whose last lease has ended.
        self.unit.needs_step()
            || match &self.front {
                Front::Trap => false,
                Front::Logged { log, .. } => !log.is_empty(),
                Front::Shared { page, front, .. } => front.has_stores(&self.unit, page),
            }
    }

    /// Returns the time of the unit's next deadline, the drain limit of a wait. While stores are
    /// due, returns 0, which is in the past, so that the owner does not sleep.
    fn deadline(&self) -> Option<u64> {
        match self.front {
            Front::Shared { due: Some(_), .. } => Some(0),
            _ => self.unit.deadline(),
        }
    }

    fn release(&mut self, holds: u32) {
        self.unit.release(holds);
    }

    fn ticket_done(&mut self, ticket: Ticket, _result: TicketResult) {
        self.unit.ticket_done(ticket);
    }
}

/// Clears the due stores once they have reached the page, or after [`DUE_LIMIT`]. Until then yields
/// the CPU after each check: the kernel tends to put a thread that it wakes on the CPU of its
/// waker, where it would wait for this thread's time slice to end. On two CPUs with other load, a
/// wake-up took 0.5 to 7 ms without this and 0.2 to 3 ms with it. On a CPU of its own a sidecore
/// resumes at once.
#[cold]
fn await_stores(due: &mut Option<Due>, unit: &Unit, now: u64) {
    if let Some(pending) = due {
        let until = *pending.until.get_or_insert(now.saturating_add(DUE_LIMIT));
        if unit.stats().register_writes - pending.writes >= pending.stores || now >= until {
            *due = None;
        } else {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests;
