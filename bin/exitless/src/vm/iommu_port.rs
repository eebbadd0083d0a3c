//! The VM's IOMMU as its owner holds it: none, or a VT-d unit behind one of three register front ends, with
//! what that front end needs to be woken by.
//!
//! | mode | memory slot | how a write arrives | how a sleeping owner is woken |
//! |---|---|---|---|
//! | trap | none | a message from the vCPU that exited | by the message |
//! | logged | read-only | an entry in KVM's coalesced ring | the zone is unregistered: writes exit and become messages |
//! | shared | writable | it is in the page | the page is write-protected by userfaultfd |
//!
//! Called on the owner's thread only.

mod arm_cost;

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use guest_mem::{
    Access, DmaFault, Gpa, Iommu, Iova, LeaseId, NoIommu, Perm, PhysMem, RegisterPage, Run,
    SourceId,
};
use uffd::{SlotMapping, WriteGate};
use vtd::front::{LogEntry, Logged, Shared};
use vtd::{AccessLen, Progress, Sink, Unit};

use crate::ledger::account::OwnerCounts;
use arm_cost::ArmCost;

/// Entries taken from the log in one poll: KVM's ring holds 169, so one poll empties it.
const LOG_BATCH: usize = 256;

/// KVM's log of writes to a read-only slot, as the owner uses it. The machine implements it over the
/// coalesced-MMIO ring; tests over a list.
pub trait WriteLog: Send {
    /// Hands the waiting entries, at most `max`, to `take`, in order; answers how many.
    fn drain(&mut self, max: usize, take: &mut dyn FnMut(LogEntry)) -> usize;
    /// Whether entries wait.
    fn is_empty(&self) -> bool;
    /// From its return on, writes exit to user space instead of being logged. Entries from before stay.
    fn unregister(&mut self) -> io::Result<()>;
    /// Writes are logged again.
    fn register(&mut self) -> io::Result<()>;
}

/// How the guest reaches the registers.
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

/// Stores that waited at the protected page have been let through, but are not in it yet: a vCPU needs some time to
/// wake up and to try again. Arming before that would stop it once more, and an owner that sleeps at its first
/// idle sweep would do so again and again.
struct Due {
    stores: u64,
    /// The unit's count of register writes before them.
    writes: u64,
    /// No longer than this: a vCPU may be paused, and a store of an equal value is never seen. In ns, known from
    /// the first poll on.
    until: Option<u64>,
}

/// How long stores may be due, in ns: long against the wake-up of a thread, in the lab too.
const DUE_LIMIT: u64 = 100_000_000;

/// What wakes a sleeping owner of a shared page.
enum Gate {
    Watched(WriteGate),
    /// No userfaultfd on this host: the owner never sleeps. Holds the slot's mapping.
    Absent(
        #[expect(dead_code, reason = "held for the slot")] SlotMapping,
        String,
    ),
}

/// A VT-d unit and its front end.
pub struct Vtd {
    unit: Unit,
    front: Front,
    arm_cost: ArmCost,
}

/// The IOMMU of a VM.
pub enum IommuPort {
    /// None: IOVA = GPA.
    None(NoIommu),
    /// An emulated VT-d unit.
    Vtd(Box<Vtd>),
}

impl IommuPort {
    /// No IOMMU; `max_leases` asynchronous pieces in flight.
    pub fn none(max_leases: usize) -> Self {
        Self::None(NoIommu::new(max_leases))
    }

    /// A unit whose registers trap.
    pub fn trap(unit: Unit) -> Self {
        Self::with_front(unit, Front::Trap, 0)
    }

    /// A unit behind a page the guest reads, and a log of its writes. `page` becomes a read-only slot.
    pub fn logged(unit: Unit, page: RegisterPage, log: Box<dyn WriteLog>) -> Self {
        let front = Logged::enter(&unit, &page);
        let front = Front::Logged {
            page,
            front,
            log,
            logged: 0,
            is_armed: false,
        };
        // Two system calls that wait for an SRCU grace period.
        Self::with_front(unit, front, 50_000)
    }

    /// A unit whose page is the guest's memory. `mapping` is what the slot uses.
    pub fn shared(mut unit: Unit, page: RegisterPage, mapping: SlotMapping) -> Self {
        let front = Shared::enter(&mut unit, &page);
        let gate = match WriteGate::new(mapping) {
            Ok(gate) => Gate::Watched(gate),
            Err((mapping, error)) => Gate::Absent(mapping, error.to_string()),
        };
        let front = Front::Shared {
            page,
            front,
            gate,
            faults: 0,
            due: None,
        };
        // Protecting and unprotecting the page.
        Self::with_front(unit, front, 200_000)
    }

    fn with_front(unit: Unit, front: Front, arm_cost_ns: u64) -> Self {
        Self::Vtd(Box::new(Vtd {
            unit,
            front,
            arm_cost: ArmCost::new(arm_cost_ns),
        }))
    }

    /// Takes register writes and does a bounded batch of what they ask for; true when there is more.
    pub fn poll<M: PhysMem>(&mut self, mem: &M, now: u64, sink: &mut impl Sink) -> bool {
        match self {
            Self::None(_) => false,
            Self::Vtd(vtd) => vtd.poll(mem, now, sink),
        }
    }

    /// A register read that exited.
    pub fn read(&self, offset: u16, len: AccessLen) -> u64 {
        match self {
            Self::None(_) => u64::MAX,
            Self::Vtd(vtd) => vtd.unit.read(offset, len),
        }
    }

    /// A register write that exited. What was logged before it comes first. Call [`poll`](Self::poll) next.
    pub fn write<M: PhysMem>(
        &mut self,
        (offset, len, value): (u16, AccessLen, u64),
        mem: &M,
        now: u64,
        sink: &mut impl Sink,
    ) {
        if let Self::Vtd(vtd) = self {
            vtd.take_log(mem, now, sink);
            let Vtd { unit, front, .. } = &mut **vtd;
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
    }

    /// Makes the next register write wake the owner.
    pub fn arm(&mut self) -> io::Result<()> {
        match self {
            Self::None(_) => Ok(()),
            Self::Vtd(vtd) => {
                let timer = ArmCost::start();
                vtd.arm()?;
                vtd.arm_cost.armed(timer);
                Ok(())
            }
        }
    }

    /// After arming: has anything arrived?
    pub fn has_work(&mut self) -> bool {
        match self {
            Self::None(_) => false,
            Self::Vtd(vtd) => vtd.has_work(),
        }
    }

    /// Takes [`arm`](Self::arm) back.
    pub fn disarm(&mut self) -> io::Result<()> {
        match self {
            Self::None(_) => Ok(()),
            Self::Vtd(vtd) => {
                let timer = ArmCost::start();
                vtd.disarm()?;
                vtd.arm_cost.disarmed(timer);
                Ok(())
            }
        }
    }

    /// Readable when an armed page was written.
    pub fn wake_fd(&self) -> Option<RawFd> {
        match self {
            Self::Vtd(vtd) => match &vtd.front {
                Front::Shared {
                    gate: Gate::Watched(gate),
                    ..
                } => Some(gate.as_fd().as_raw_fd()),
                _ => None,
            },
            Self::None(_) => None,
        }
    }

    /// When the unit must be polled again: a wait that nears its drain limit; at once (a moment long past) while a
    /// store is due that has met the protected page.
    pub fn deadline(&self) -> Option<u64> {
        match self {
            Self::None(_) => None,
            Self::Vtd(vtd) if matches!(vtd.front, Front::Shared { due: Some(_), .. }) => Some(0),
            Self::Vtd(vtd) => vtd.unit.deadline(),
        }
    }

    /// What arming and disarming costs, in ns, as measured so far.
    pub fn arm_cost(&self) -> u64 {
        match self {
            Self::None(_) => 0,
            Self::Vtd(vtd) => vtd.arm_cost.ns(),
        }
    }

    /// Counters for the ledger; what is not the IOMMU's is zero.
    pub fn counts(&self) -> OwnerCounts {
        let Self::Vtd(vtd) = self else {
            return OwnerCounts::default();
        };
        let stats = vtd.unit.stats();
        let (logged_writes, gate_faults) = match vtd.front {
            Front::Trap => (0, 0),
            Front::Logged { logged, .. } => (logged, 0),
            Front::Shared { faults, .. } => (0, faults),
        };
        OwnerCounts {
            logged_writes,
            gate_faults,
            iotlb_hits: stats.iotlb_hits,
            iotlb_misses: stats.iotlb_misses,
            walks: stats.iotlb_misses + stats.context_walks + stats.leases_rechecked,
            invalidations: stats.context_invalidations
                + stats.global_invalidations
                + stats.domain_invalidations
                + stats.page_invalidations,
            waits: stats.waits,
            leases_drained: stats.waits_parked,
            faults: stats.faults_recorded + stats.faults_collapsed + stats.faults_dropped,
            ..OwnerCounts::default()
        }
    }
}

impl Vtd {
    fn poll<M: PhysMem>(&mut self, mem: &M, now: u64, sink: &mut impl Sink) -> bool {
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

    /// Applies what KVM has logged, in order, as if each write had trapped.
    fn take_log<M: PhysMem>(&mut self, mem: &M, now: u64, sink: &mut impl Sink) -> usize {
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

    fn arm(&mut self) -> io::Result<()> {
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
                gate: Gate::Absent(_, why),
                ..
            } => Err(io::Error::other(why.clone())),
        }
    }

    fn has_work(&mut self) -> bool {
        // Besides what the guest wrote: a fault to tell it of, or a wait whose last lease has ended.
        self.unit.needs_step()
            || match &self.front {
                Front::Trap => false,
                Front::Logged { log, .. } => !log.is_empty(),
                Front::Shared { page, front, .. } => front.has_stores(&self.unit, page),
            }
    }

    fn disarm(&mut self) -> io::Result<()> {
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

/// Forgets what was due once it has come, or for too long not; until then gives the CPU away after each look. The
/// kernel likes to put a thread that it wakes on the CPU of its waker, where it would wait for our time slice to
/// end: on two CPUs with other load, a wake-up took 0.5 to 7 ms without this and 0.2 to 3 ms with it. On a CPU of its
/// own a sidecore is back at once.
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

impl Iommu for IommuPort {
    #[inline]
    fn translate<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Access<Run> {
        match self {
            Self::None(none) => none.translate(mem, source, iova, perm),
            Self::Vtd(vtd) => vtd.unit.translate(mem, source, iova, perm),
        }
    }

    #[inline]
    fn generation(&self, source: SourceId) -> u64 {
        match self {
            Self::None(none) => none.generation(source),
            Self::Vtd(vtd) => vtd.unit.generation(source),
        }
    }

    #[inline]
    fn lease_begin(
        &mut self,
        source: SourceId,
        iova: Iova,
        gpa: Gpa,
        len: u32,
        perm: Perm,
    ) -> Result<LeaseId, DmaFault> {
        match self {
            Self::None(none) => none.lease_begin(source, iova, gpa, len, perm),
            Self::Vtd(vtd) => vtd.unit.lease_begin(source, iova, gpa, len, perm),
        }
    }

    #[inline]
    fn lease_end(&mut self, id: LeaseId) {
        match self {
            Self::None(none) => none.lease_end(id),
            Self::Vtd(vtd) => vtd.unit.lease_end(id),
        }
    }
}

#[cfg(test)]
mod tests;
