//! Guest-physical memory, as the IOMMU and the VMM reach it. No device is given this.

use crate::access::{Access, Intent, Stop};
use crate::addr::{Gpa, Hva};
use crate::pages::Pages;

/// Guest-physical memory.
///
/// Implementations: [`GuestRam`](crate::GuestRam), [`ForeignRam`](crate::ForeignRam), and in tests
/// a plain array and a wrapper that pends at every access. All multi-byte values are little-endian.
///
/// Every method answers [`DmaFault::NotRam`](crate::DmaFault::NotRam) for a range not wholly inside
/// RAM and [`DmaFault::BadRange`](crate::DmaFault::BadRange) for a wrapping or misaligned one, with
/// nothing written.
///
/// **Memory that may be absent** answers [`Stop::Pending`]; whoever was answered that asks again
/// once the ticket is done. What has come in for a ticket stays until then, so that whoever waits
/// gets on however little memory there is; should nobody ask any more (a device was reset), a time
/// or a count of the memory's own choice ends that. What could not be brought in answers as what is
/// not RAM when it is asked for again, so that the access ends as one there would: nobody needs to
/// keep how a ticket ended. A ticket of whoever has been reset meanwhile is forgotten, and its end
/// changes nothing.
pub trait PhysMem {
    /// One aligned 8-byte load, with acquire ordering.
    fn read_u64(&self, gpa: Gpa) -> Access<u64>;

    /// A 16-byte aligned entry as two 8-byte loads, the low half first.
    fn read_u128(&self, gpa: Gpa) -> Access<u128> {
        let lo = self.read_u64(gpa)?;
        let hi = self.read_u64(gpa.checked_add(8).ok_or(crate::DmaFault::BadRange)?)?;
        Ok(u128::from(hi) << 64 | u128::from(lo))
    }

    /// One aligned 4-byte store, with release ordering: whoever sees it sees what was done before.
    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()>;

    /// Copies out; bytes may tear against a writing guest.
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()>;

    /// Copies in; bytes may tear against a reading guest.
    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()>;

    /// The host memory behind `[gpa, gpa + len)`, if that is one contiguous piece of RAM, for what
    /// is intended. `len` ≥ 1.
    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva>;

    /// Bytes, at least 1, that are contiguous in host memory from `gpa` on. Memory that does not
    /// know better answers up to the end of the page.
    fn run(&self, gpa: Gpa) -> Access<u64> {
        let len = gpa.left_in_page();
        match self.host(gpa, len, Intent::Read) {
            Ok(_) => Ok(len),
            Err(stop @ Stop::Pending(_)) => Err(stop),
            // RAM may end inside the page.
            Err(Stop::Fault(_)) => self.host(gpa, 1, Intent::Read).map(|_| 1),
        }
    }

    /// The contiguous piece of RAM around `gpa`, if accesses to it need not be asked for one by
    /// one: all of it is there, and stays, whatever is intended. As it stands: none is.
    #[inline]
    fn lasting_piece(&self, gpa: Gpa) -> Option<LastingPiece> {
        let _ = gpa;
        None
    }

    /// Asks for all of these pieces (address, length of at least 1, what for) at once: `Ok` if they
    /// are all there, and else one ticket for all that are not. What comes in for a ticket stays
    /// until it has been asked for again. Memory that is always there need not say anything else.
    fn gather(&self, pieces: &[(Gpa, u64, Intent)]) -> Access<()> {
        let mut waits = Ok(());
        for &(gpa, len, intent) in pieces {
            // A fault is said to whoever accesses that piece.
            if let Err(stop @ Stop::Pending(_)) = self.host(gpa, len, intent) {
                waits = Err(stop);
            }
        }
        waits
    }

    /// Lets go of those of the pages `mask` that it can do without now, and answers them. No lease
    /// and no window lies in any of them, and the caller is the thread that all accesses come from:
    /// from the next one on they are absent, and whoever evicts them (unmaps, writes out, punches a
    /// hole) knows that no device reaches them. Memory that is always there, as it stands, lets
    /// nothing go.
    ///
    /// An access may ask for the same absent page more than once. Whoever brings pages back must
    /// know which requests are of before the page was let go the last time: such a one makes
    /// nothing present, and its [`Intent::Overwrite`] is void, since what was to fill the page may
    /// have done so before it went.
    fn let_go(&self, pages: &Pages, mask: u32) -> u32 {
        let _ = (pages, mask);
        0
    }

    /// What keeps addresses from [`host`](PhysMem::host) mapped: hold a clone for as long as one is
    /// in use.
    fn keep_alive(&self) -> KeepAlive;
}

/// Contiguous RAM that is always there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastingPiece {
    /// First address.
    pub gpa: Gpa,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Where it lies in this process.
    pub hva: Hva,
}

/// Keeps guest memory mapped in this process while held.
pub type KeepAlive = std::sync::Arc<dyn std::any::Any + Send + Sync>;
