//! A block device that attacks its guest on request.
//!
//! The trigger is an ordinary request that starts at a chosen sector, which any user of the guest can
//! issue (`dd … skip=SECTOR`). The rogue access is made through the device's own view, while it
//! holds the request: just before it writes a status byte. Then the request completes as it should.
//!
//! The wrapped device knows nothing of it. Its accesses to memory pass through a [`Dma`] that recognizes them by their lengths:
//! a read of 16 bytes is a request's header, what is read or leased behind it are its data, a write of one byte is a
//! status. A request that is looked at twice before it is taken (no room, a wait) attacks all the same once.

use std::os::fd::RawFd;
use std::path::PathBuf;

use guest_mem::{
    Access, Dma, Intent, Iova, KeepAlive, Lease, LeaseId, LeaseStop, Pages, Perm, Run, Stop,
    Ticket, Wanted, Window,
};
use vio::blk::request::{HEADER_LEN, kind};
use vio::ring::{Ring, Violation};
use vio::{
    ActivateError, Activity, CancelReason, DeviceStats, Interrupt, QueueConfig, QueueDevice,
    SavedDevice, Service, StoppedQueue, Visit,
};

/// What the device does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// On a *read* that starts at the trigger sector: writes 8 bytes to an address nobody gave it.
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
}

/// What a rogue access writes.
pub const ROGUE_BYTES: [u8; 8] = [0xee; 8];

/// What came of the attacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RogueStats {
    /// Rogue accesses that the IOMMU refused.
    pub blocked: u64,
    /// Rogue accesses that went through.
    pub allowed: u64,
}

/// A block device that does wrong, or not: `None` is a device like any other.
pub struct Rogue<D> {
    device: D,
    attack: Attack,
}

/// The attack, and how far it has come.
struct Attack {
    fault: Option<Fault>,
    /// The trigger's header was read, its data were not yet.
    is_near: bool,
    /// Where the attack goes that is due.
    target: Option<Iova>,
    /// It was made, and the status byte behind it waits: the request comes once more, and attacks no more.
    is_made: bool,
    stats: RogueStats,
}

impl Attack {
    /// A request's header was read.
    fn see_header(&mut self, header: &[u8]) {
        let (kind, sector) = (header.first_chunk(), header.last_chunk());
        let (Some(&kind), Some(&sector)) = (kind, sector) else {
            return;
        };
        let (kind, sector) = (u32::from_le_bytes(kind), u64::from_le_bytes(sector));
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

    /// A request's data were reached at `iova`.
    fn see_data(&mut self, iova: Iova) {
        if std::mem::take(&mut self.is_near) {
            self.target = Some(iova);
        }
    }

    /// Attacks if that is due.
    fn make(&mut self, dma: &mut impl Dma) -> Access<()> {
        let Some(iova) = self.target else {
            return Ok(());
        };
        match dma.write(iova, &ROGUE_BYTES) {
            Ok(()) => self.stats.allowed += 1,
            Err(Stop::Fault(_)) => self.stats.blocked += 1,
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
            self.attack.see_header(buf);
        } else {
            self.attack.see_data(iova);
        }
        Ok(())
    }

    fn write(&mut self, iova: Iova, buf: &[u8]) -> Access<()> {
        let is_status = buf.len() == 1;
        if is_status {
            self.attack.make(self.dma)?;
        }
        let written = self.dma.write(iova, buf);
        if is_status && !matches!(written, Err(Stop::Pending(_))) {
            self.attack.is_made = false;
        }
        written
    }

    fn generation(&self) -> u64 {
        self.dma.generation()
    }

    fn window(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Window> {
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
        self.attack.see_data(iova);
        self.dma.lease(iova, len, intent)
    }

    fn locate(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Run> {
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

impl<D> Rogue<D> {
    /// `device`, with this fault.
    pub fn new(device: D, fault: Option<Fault>) -> Self {
        Self {
            device,
            attack: Attack {
                fault,
                is_near: false,
                target: None,
                is_made: false,
                stats: RogueStats::default(),
            },
        }
    }

    /// What came of the attacks.
    pub fn attacks(&self) -> RogueStats {
        self.attack.stats
    }
}

impl<D: QueueDevice> QueueDevice for Rogue<D> {
    fn device_type(&self) -> u16 {
        self.device.device_type()
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.device.queue_sizes()
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        self.device.read_config(offset, out);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.device.write_config(offset, data);
    }

    fn config_generation(&self) -> u8 {
        self.device.config_generation()
    }

    fn begin(&mut self, features: u64, keep: KeepAlive) -> Result<(), ActivateError> {
        self.device.begin(features, keep)
    }

    fn add_queue(&mut self, ring: Ring) -> Result<(), ActivateError> {
        self.device.add_queue(ring)
    }

    fn activate(
        &mut self,
        features: u64,
        queues: &[QueueConfig],
        keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        self.device.activate(features, queues, keep)
    }

    fn pause_queue(&mut self, index: u16, is_paused: bool) {
        self.device.pause_queue(index, is_paused);
    }

    fn stop_queue<M: Dma>(
        &mut self,
        index: u16,
        dma: &mut M,
        irq: &mut impl Interrupt,
    ) -> Option<StoppedQueue> {
        let Self { device, attack } = self;
        device.stop_queue(index, &mut Spy { dma, attack }, irq)
    }

    fn set_service(&mut self, service: Service) {
        self.device.set_service(service);
    }

    fn set_memory(&mut self, keep: KeepAlive) {
        self.device.set_memory(keep);
    }

    fn rebind(&mut self) {
        self.device.rebind();
    }

    fn cancel(&mut self, reason: CancelReason) -> u32 {
        self.device.cancel(reason)
    }

    fn reset(&mut self) {
        self.attack.is_near = false;
        self.attack.target = None;
        self.attack.is_made = false;
        self.device.reset();
    }

    fn visit<M: Dma>(
        &mut self,
        dma: &mut M,
        irq: &mut impl Interrupt,
        visit: &mut Visit,
    ) -> Activity {
        let Self { device, attack } = self;
        device.visit(&mut Spy { dma, attack }, irq, visit)
    }

    fn kick(&mut self, queue: u16) {
        self.device.kick(queue);
    }

    fn ticket_done(&mut self, ticket: Ticket) {
        self.device.ticket_done(ticket);
    }

    fn arm<M: Dma>(&mut self, dma: &mut M) {
        self.device.arm(dma);
    }

    fn has_work<M: Dma>(&mut self, dma: &mut M) -> bool {
        self.device.has_work(dma)
    }

    fn disarm<M: Dma>(&mut self, dma: &mut M) {
        self.device.disarm(dma);
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        self.device.wake_fds()
    }

    fn has_more<M: Dma>(&mut self, index: u16, dma: &mut M) -> bool {
        self.device.has_more(index, dma)
    }

    fn opens_at_ns(&self) -> Option<u64> {
        self.device.opens_at_ns()
    }

    fn ring(&mut self, index: u16) -> Option<&mut Ring> {
        self.device.ring(index)
    }

    fn for_each_ring(&mut self, each: impl FnMut(&mut Ring)) {
        self.device.for_each_ring(each);
    }

    fn in_use<M: Dma>(&mut self, dma: &M, pages: &Pages) -> u32 {
        self.device.in_use(dma, pages)
    }

    fn in_flight(&self) -> u32 {
        self.device.in_flight()
    }

    fn touches_memory(&self) -> bool {
        self.device.touches_memory()
    }

    fn needs_reset(&self) -> bool {
        self.device.needs_reset()
    }

    fn violation(&self) -> Option<Violation> {
        self.device.violation()
    }

    fn path(&self) -> Option<PathBuf> {
        self.device.path()
    }

    fn save(&self) -> Option<SavedDevice> {
        self.device.save()
    }

    fn stats(&self) -> DeviceStats {
        self.device.stats()
    }
}
