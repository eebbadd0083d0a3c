//! Interface through which a device model reaches guest memory.

use crate::access::{Access, DmaFault, Intent, Perm, Stop};
use crate::addr::{Hva, Iova};
use crate::direct_run::DirectRun;
use crate::follow::{Attachment, Next};
use crate::iommu::Run;
use crate::lease::{Budget, Full, LeaseId};
use crate::window::Window;

/// One device's access to guest memory: every address is an IOVA and every access is checked.
///
/// Copy-sized accesses ([`read`](Dma::read), [`write`](Dma::write)) finish before they return, so
/// they need no lease: the invalidation that revokes the page is processed by the same thread,
/// later. An access that outlives the call (asynchronous I/O) holds a [`Lease`].
pub trait Dma {
    /// Copies guest memory into `buf`; a range may cross any number of mappings.
    fn read(&mut self, iova: Iova, buf: &mut [u8]) -> Access<()>;

    /// Copies `buf` into guest memory. On a fault or pend nothing *observable to the ring protocol*
    /// may be assumed about which bytes were written.
    fn write(&mut self, iova: Iova, buf: &[u8]) -> Access<()>;

    /// Changes whenever a [`Window`] of this device may be stale.
    fn generation(&self) -> u64;

    /// A cached pointer to `len` bytes that lie inside one mapping (see [`Window`]). A range
    /// crossing a mapping's end is [`DmaFault::BadRange`](crate::DmaFault::BadRange): ask page by
    /// page.
    fn window(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Window>;

    /// Brings a stale window up to date, cheaply: translates again, replaces the pointer.
    /// After an error the window is unusable until a later refresh succeeds.
    fn refresh(&mut self, window: &mut Window) -> Access<()>;

    /// The first contiguous piece, 1 to `len` bytes, of `[iova, iova + len)`, held until
    /// [`release`](Dma::release): as many mappings as follow each other in memory, as far as the
    /// next multiple of [`LEASE_SPAN`](crate::LEASE_SPAN). Call again from where it ends for the
    /// rest.
    fn lease(
        &mut self,
        iova: Iova,
        len: u32,
        intent: impl Into<Intent>,
    ) -> Result<Lease, LeaseStop>;

    /// Returns the guest-physical address and length of the first contiguous piece, 1 to `len`
    /// bytes, of `[iova, iova + len)`, if the device has `perm` there: as many mappings as follow
    /// each other, as far as a lease reaches. For pages that a driver *names* to its device instead
    /// of having them accessed, as free ones that it reports. It is not checked that the piece is
    /// RAM, nor that it is present: absent pages stay absent. (Only
    /// [`DirectMap`](crate::DirectMap), whose one mapping is memory itself, checks that.)
    ///
    /// The result gives no access to memory: no function available to a device takes such an
    /// address. It is valid until the call into the device returns, since no invalidation is
    /// processed before that; afterwards it has to be requested again.
    fn locate(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Run>;

    /// Returns the address in this process, and the length, of the first contiguous piece, 1 to
    /// `len` bytes, of `[iova, iova + len)`: for copies that finish before the call into the device
    /// returns (see [`VolatileSlice`](crate::VolatileSlice)). The result is valid until then, as no
    /// invalidation is processed and no page evicted before; an access that outlives the call needs
    /// a [`lease`](Dma::lease). Call again from where it ends for the rest.
    fn host(&mut self, iova: Iova, len: u32, intent: Intent) -> Access<(Hva, u32)>;

    /// Returns the piece of memory around `iova` in which [`host`](Dma::host) would succeed for
    /// every request and [`Intent`], until the call into the device returns: a burst of copies
    /// calls this once, and not `host` for each of its buffers. `None` by default: call `host` for
    /// each.
    #[inline]
    fn direct_run(&mut self, iova: Iova) -> Option<DirectRun> {
        let _ = iova;
        None
    }

    /// Reads the attachment of this device, as [`Iommu::attachment`](crate::Iommu::attachment)
    /// does: silently. For a device that hands translations on to another process, and is notified
    /// when they are revoked. By default: translation is off.
    fn attachment(&self) -> Access<Attachment> {
        Ok(Attachment::Off)
    }

    /// Finds the first mapping of this device that has a byte in `from..=last`, as
    /// [`Iommu::next_mapping`](crate::Iommu::next_mapping) does: silently, from the tables as they
    /// are now. By default: none.
    fn next_mapping(&self, from: Iova, last: Iova, budget: &mut Budget) -> Access<Next> {
        let _ = (from, last, budget);
        Ok(Next::None)
    }

    /// Requests the memory of all these ranges at once, where an access to one of them has returned
    /// [`Stop::Pending`] or may do so: a request then waits once, and not for each piece in turn.
    /// Returns `Ok` if all memory is present. A fault is not reported here but by the later access
    /// to that range. Without effect where memory is always present.
    fn gather(&mut self, ranges: impl Iterator<Item = Wanted>) -> Access<()> {
        let _ = ranges;
        Ok(())
    }

    /// Returns whether this device could begin `leases` leases now: the condition to wait for after
    /// [`LeaseStop::Full`].
    fn has_lease_room(&self, leases: usize) -> bool;

    /// Whether an unmap waits for the end of this lease, which is in flight.
    fn is_stale(&self, id: LeaseId) -> bool;

    /// Ends a lease: the device no longer touches those bytes.
    fn release(&mut self, id: LeaseId);
}

/// A range that a device is about to access: address, length in bytes, and purpose.
pub type Wanted = (Iova, u32, Intent);

/// Reason why no lease was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseStop {
    /// The access pends or faults, as any other access.
    Access(Stop),
    /// No more leases can be held now; nothing is wrong with the memory. Release the leases that
    /// the request holds already, so that no two devices wait for each other, and try again when
    /// there is [room](Dma::has_lease_room).
    Full(Full),
}

impl From<Stop> for LeaseStop {
    fn from(stop: Stop) -> Self {
        Self::Access(stop)
    }
}

impl From<DmaFault> for LeaseStop {
    fn from(fault: DmaFault) -> Self {
        Self::Access(Stop::Fault(fault))
    }
}

impl From<Full> for LeaseStop {
    fn from(full: Full) -> Self {
        Self::Full(full)
    }
}

/// Host memory that an asynchronous access may use until its lease is released.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease that is dropped without release delays the guest's unmap for ever"]
pub struct Lease {
    /// Hand this back to [`Dma::release`].
    pub id: LeaseId,
    /// First byte, in this process. Stays mapped while the device holds
    /// [`PhysMem::keep_alive`](crate::PhysMem::keep_alive).
    pub hva: Hva,
    /// Length in bytes, at least 1.
    pub len: u32,
}
