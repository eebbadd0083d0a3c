//! A block device that attacks its guest on request.
//!
//! The trigger is an ordinary request that starts at a chosen sector, which any user of the guest
//! can issue (`dd … skip=SECTOR`). The rogue access is made through the device's own view, while it
//! holds the request: just before it writes a status byte. Then the request completes as it should.
//!
//! The device's class is wrapped, which knows nothing of it, and the body around it is that of
//! every device. The class's accesses to memory pass through a [`Dma`] that recognizes them by
//! their lengths: a read of 16 bytes is a request's header, what is read or leased behind it are
//! its data, a write of one byte is a status. A request that is looked at twice before it is taken
//! (no room, a wait) attacks all the same once.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use guest_mem::{
    Access, Dma, Hva, Intent, Iova, Lease, LeaseId, LeaseStop, Perm, Run, Stop, Wanted, Window,
};
use vio::blk::request::{HEADER_LEN, kind};
use vio::blk::{Blk, BlkClass, BlkQueue};
use vio::{Activity, Context, Device, DeviceClass, Environment, ServedQueue, Step, forward_class};

use crate::late::{self, Clock, Late, LateOptions, LateStats, ROGUE_BYTES};

/// Attack of a rogue device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// On a *read* that starts at the trigger sector: writes 8 bytes to an address that no driver
    /// gave it.
    DmaUnmapped {
        /// The trigger.
        sector: u64,
        /// Where to.
        iova: Iova,
    },
    /// On a *write* that starts at the trigger sector: writes 8 bytes into the request's own data
    /// buffer, which the guest has mapped read-only for it.
    WriteToReadOnly {
        /// The trigger.
        sector: u64,
    },
    /// On a *read* that starts at one of two sectors: touches the data buffers of requests that
    /// have completed and that nothing used since, as their requests allowed.
    Late(LateOptions),
}

/// Outcomes of the attacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RogueStats {
    /// Rogue accesses that the IOMMU refused.
    pub blocked: u64,
    /// Rogue accesses that went through.
    pub allowed: u64,
    /// Accesses to buffers that the driver had taken back, which are not among those above.
    pub late: LateStats,
}

/// Counts of a rogue device, for readers on other threads. The device writes them.
#[derive(Clone, Debug, Default)]
pub struct RogueRecord(Arc<Mutex<RogueStats>>);

impl RogueRecord {
    /// Returns the counts so far.
    pub fn stats(&self) -> RogueStats {
        self.change(|stats| stats.clone())
    }

    fn change<T>(&self, change: impl FnOnce(&mut RogueStats) -> T) -> T {
        // Counts are whole after each change.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A block device that does wrong.
pub type RogueDisk = Device<Rogue>;

/// Block device whose class does wrong, or not: without a fault it is one like any other.
pub struct Rogue {
    class: BlkClass,
    attack: Attack,
}

/// The attack, and how far it has come.
struct Attack {
    fault: Option<Fault>,
    /// The trigger's header was read, its data were not yet.
    is_near: bool,
    /// Where the attack goes that is due.
    target: Option<Iova>,
    /// It was made, and the status byte behind it waits: the request comes once more, and attacks
    /// no more.
    is_made: bool,
    /// Of a device that makes late accesses.
    late: Option<Late>,
    record: RogueRecord,
}

impl Attack {
    /// A request's header was read at `iova`.
    fn see_header(&mut self, iova: Iova, header: &[u8]) {
        let (kind, sector) = (header.first_chunk(), header.last_chunk());
        let (Some(&kind), Some(&sector)) = (kind, sector) else {
            return;
        };
        let (kind, sector) = (u32::from_le_bytes(kind), u64::from_le_bytes(sector));
        if let Some(late) = &mut self.late {
            late.touch(iova, header.len());
            late.see_header(iova, kind, sector);
        }
        self.is_near = false;
        if self.is_made {
            return;
        }
        match self.fault {
            Some(Fault::DmaUnmapped {
                sector: trigger,
                iova,
            }) if kind == kind::IN && sector == trigger => self.target = Some(iova),
            Some(Fault::WriteToReadOnly { sector: trigger }) => {
                self.is_near = kind == kind::OUT && sector == trigger;
            }
            _ => {}
        }
    }

    /// A request's data were reached at `iova`, or something else that is none of its header.
    fn see_data(&mut self, iova: Iova, len: usize) {
        if let Some(late) = &mut self.late {
            late.touch(iova, len);
            late.see_data(iova);
        }
        if std::mem::take(&mut self.is_near) {
            self.target = Some(iova);
        }
    }

    /// Something was used at `iova`.
    fn touch(&mut self, iova: Iova, len: usize) {
        if let Some(late) = &mut self.late {
            late.touch(iova, len);
        }
    }

    /// A status was written.
    fn see_status(&mut self) {
        self.is_made = false;
        if let Some(late) = &mut self.late {
            late.see_status();
        }
    }

    /// The driver is gone.
    fn reset(&mut self) {
        self.is_near = false;
        self.target = None;
        self.is_made = false;
        if let Some(late) = &mut self.late {
            late.reset();
        }
    }

    /// Attacks if that is due.
    fn make(&mut self, dma: &mut impl Dma) -> Access<()> {
        if let Some(late) = &mut self.late {
            self.record
                .change(|stats| late.make(dma, &mut stats.late))?;
        }
        let Some(iova) = self.target else {
            return Ok(());
        };
        match dma.write(iova, &ROGUE_BYTES) {
            Ok(()) => self.record.change(|stats| stats.allowed += 1),
            Err(Stop::Fault(_)) => self.record.change(|stats| stats.blocked += 1),
            Err(pending) => return Err(pending),
        }
        self.target = None;
        self.is_made = true;
        Ok(())
    }
}

/// The device's view of memory, looked through.
struct Spy<'a, D> {
    dma: &'a mut D,
    attack: &'a mut Attack,
}

impl<D: Dma> Dma for Spy<'_, D> {
    fn read(&mut self, iova: Iova, buf: &mut [u8]) -> Access<()> {
        self.dma.read(iova, buf)?;
        if buf.len() == HEADER_LEN as usize {
            self.attack.see_header(iova, buf);
        } else {
            self.attack.see_data(iova, buf.len());
        }
        Ok(())
    }

    fn write(&mut self, iova: Iova, buf: &[u8]) -> Access<()> {
        let is_status = buf.len() == 1;
        if is_status {
            self.attack.touch(iova, 1);
            self.attack.make(self.dma)?;
        } else {
            self.attack.see_data(iova, buf.len());
        }
        let written = self.dma.write(iova, buf);
        if is_status && !matches!(written, Err(Stop::Pending(_))) {
            self.attack.see_status();
        }
        written
    }

    fn generation(&self) -> u64 {
        self.dma.generation()
    }

    fn window(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Window> {
        self.attack.touch(iova, len as usize);
        self.dma.window(iova, len, perm)
    }

    fn refresh(&mut self, window: &mut Window) -> Access<()> {
        self.dma.refresh(window)
    }

    fn lease(
        &mut self,
        iova: Iova,
        len: u32,
        intent: impl Into<Intent>,
    ) -> Result<Lease, LeaseStop> {
        self.attack.see_data(iova, len as usize);
        self.dma.lease(iova, len, intent)
    }

    fn host(&mut self, iova: Iova, len: u32, intent: Intent) -> Access<(Hva, u32)> {
        self.attack.see_data(iova, len as usize);
        self.dma.host(iova, len, intent)
    }

    fn locate(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Run> {
        self.attack.touch(iova, len as usize);
        self.dma.locate(iova, len, perm)
    }

    fn gather(&mut self, ranges: impl Iterator<Item = Wanted>) -> Access<()> {
        self.dma.gather(ranges)
    }

    fn has_lease_room(&self, leases: usize) -> bool {
        self.dma.has_lease_room(leases)
    }

    fn is_stale(&self, id: LeaseId) -> bool {
        self.dma.is_stale(id)
    }

    fn release(&mut self, id: LeaseId) {
        self.dma.release(id);
    }
}

/// An environment whose memory is looked through.
struct Spied<'a, E>(PhantomData<&'a E>);

impl<'a, E: Environment> Environment for Spied<'a, E>
where
    E::Dma: 'a,
{
    type Dma = Spy<'a, E::Dma>;
    type Interrupt = E::Interrupt;
}

type Queue = ServedQueue<BlkQueue>;

impl Rogue {
    /// `device`, which has not begun, with this fault.
    pub fn new(device: Blk, fault: Option<Fault>) -> RogueDisk {
        Self::with_clock(device, fault, late::monotonic())
    }

    /// The same; buffers age by this clock.
    pub fn with_clock(device: Blk, fault: Option<Fault>, clock: Clock) -> RogueDisk {
        let late = match fault {
            Some(Fault::Late(options)) => Some(Late::new(options, clock)),
            _ => None,
        };
        Device::of(Self {
            class: device.into_class(),
            attack: Attack {
                fault,
                is_near: false,
                target: None,
                is_made: false,
                late,
                record: RogueRecord::default(),
            },
        })
    }

    /// Outcomes of the attacks.
    pub fn attacks(&self) -> RogueStats {
        self.attack.record.stats()
    }

    /// The same, for readers on other threads.
    pub fn record(&self) -> RogueRecord {
        self.attack.record.clone()
    }
}

impl DeviceClass for Rogue {
    forward_class!(BlkClass);

    fn reset(&mut self) {
        self.attack.reset();
        self.class.reset();
    }

    fn go_on<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        let Self { class, attack } = self;
        cx.with_view::<Spied<'_, E>, _>(|dma| Spy { dma, attack }, |cx| class.go_on(queue, cx))
    }

    fn serve<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        let Self { class, attack } = self;
        cx.with_view::<Spied<'_, E>, _>(|dma| Spy { dma, attack }, |cx| class.serve(queue, cx))
    }

    fn complete<E: Environment>(
        &mut self,
        queues: &mut [Queue],
        cx: &mut Context<'_, E>,
    ) -> Activity {
        self.class.complete(queues, cx)
    }

    fn finish<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        let Self { class, attack } = self;
        cx.with_view::<Spied<'_, E>, _>(|dma| Spy { dma, attack }, |cx| class.finish(queue, cx))
    }
}
