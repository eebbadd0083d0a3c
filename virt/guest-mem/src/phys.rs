//! Guest-physical memory, as the IOMMU and the VMM reach it. No device is given this.

use crate::access::{Access, Intent, Stop};
use crate::addr::{Gpa, Hva};
use crate::pages::Pages;

/// Guest-physical memory.
///
/// Implementations: [`GuestRam`](crate::GuestRam), [`ForeignRam`](crate::ForeignRam), and in tests
/// a plain array and a wrapper that pends at every access. All multi-byte values are little-endian.
///
/// Every method returns [`DmaFault::NotRam`](crate::DmaFault::NotRam) for a range not wholly inside
/// RAM and [`DmaFault::BadRange`](crate::DmaFault::BadRange) for a wrapping or misaligned one, with
/// nothing written.
///
/// **Memory that may be absent** returns [`Stop::Pending`]; the caller repeats the access once the
/// ticket is done. Pages brought in for a ticket stay until that repeated access, so that it makes
/// progress however little memory there is. If the access is never repeated (a device was reset), a
/// time or a count of the memory's own choice releases the pages. A page that could not be brought
/// in is reported as not RAM when the access is repeated, so that the access ends with that fault:
/// no caller needs to keep the outcome of a ticket. If the device was reset meanwhile, its ticket
/// is forgotten, and the end of that ticket changes nothing.
pub trait PhysMem {
    /// Loads an aligned 8-byte word, with acquire ordering.
    fn read_u64(&self, gpa: Gpa) -> Access<u64>;

    /// Loads a 16-byte aligned entry as two 8-byte loads, the low half first.
    fn read_u128(&self, gpa: Gpa) -> Access<u128> {
        let lo = self.read_u64(gpa)?;
        let hi = self.read_u64(gpa.checked_add(8).ok_or(crate::DmaFault::BadRange)?)?;
        Ok(u128::from(hi) << 64 | u128::from(lo))
    }

    /// Stores an aligned 4-byte word, with release ordering: an acquire load that reads `value`
    /// also sees all earlier stores of this thread.
    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()>;

    /// Copies out; bytes may tear against a writing guest.
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()>;

    /// Copies in; bytes may tear against a reading guest.
    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()>;

    /// Returns the host memory behind `[gpa, gpa + len)`, if that is one contiguous piece of RAM,
    /// for accesses with `intent`. `len` ≥ 1.
    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva>;

    /// Returns the number of bytes, at least 1, that are contiguous in host memory from `gpa` on. A
    /// conservative implementation returns those up to the end of the page.
    fn run(&self, gpa: Gpa) -> Access<u64> {
        let len = gpa.left_in_page();
        match self.host(gpa, len, Intent::Read) {
            Ok(_) => Ok(len),
            Err(stop @ Stop::Pending(_)) => Err(stop),
            // RAM may end inside the page.
            Err(Stop::Fault(_)) => self.host(gpa, 1, Intent::Read).map(|_| 1),
        }
    }

    /// Returns the contiguous piece of RAM around `gpa`, if accesses to it need no request each:
    /// all of it is present, and stays, for any [`Intent`]. By default: none.
    #[inline]
    fn lasting_piece(&self, gpa: Gpa) -> Option<LastingPiece> {
        let _ = gpa;
        None
    }

    /// Requests all of these pieces (address, length of at least 1, purpose) at once: `Ok` if they
    /// are all present, and else one ticket for all that are not. Pages that come in for a ticket
    /// stay until they have been accessed. Memory that is always present need not override this.
    fn gather(&self, pieces: &[(Gpa, u64, Intent)]) -> Access<()> {
        let mut waits = Ok(());
        for &(gpa, len, intent) in pieces {
            // A fault is reported by the access to that piece.
            if let Err(stop @ Stop::Pending(_)) = self.host(gpa, len, intent) {
                waits = Err(stop);
            }
        }
        waits
    }

    /// Releases those of the pages `mask` that can be evicted now, and returns their mask. No lease
    /// and no window lies in any of them, and the caller is the thread that makes all accesses:
    /// from the next access on the pages are absent, and the pager that evicts them (unmaps, writes
    /// out, punches a hole) knows that no device reaches them. By default, for memory that is
    /// always present, nothing is released.
    ///
    /// An access may request the same absent page more than once. A pager that brings pages back
    /// must recognize requests made before the page was last released: such a request makes nothing
    /// present, and its [`Intent::Overwrite`] is void, since the write that was to fill the page
    /// may have happened before the release.
    fn let_go(&self, pages: &Pages, mask: u32) -> u32 {
        let _ = (pages, mask);
        0
    }

    /// Returns the object that keeps addresses from [`host`](PhysMem::host) mapped: hold a clone
    /// for as long as one is in use.
    fn keep_alive(&self) -> KeepAlive;
}

/// Contiguous RAM that is always there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastingPiece {
    /// First address.
    pub gpa: Gpa,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Its address in this process.
    pub hva: Hva,
}

/// Keeps guest memory mapped in this process while held.
pub type KeepAlive = std::sync::Arc<dyn std::any::Any + Send + Sync>;
