//! Guest memory access: address types, guest RAM, and the per-device, permission-checked,
//! IOMMU-aware view through which every device model reaches memory.
//!
//! **Path of an access.** A device passes an [`Iova`] to its [`Dma`]. The [`View`] behind it has
//! the [`Iommu`] translate it (to a [`Gpa`], and the length of the mapping from there), then
//! asks [`PhysMem`] for the host memory there ([`Hva`]). The result depends on the duration of the
//! access:
//!
//! | The device wants to | asks for | and later |
//! |---|---|---|
//! | copy a few bytes now | [`Dma::read`], [`Dma::write`] | nothing: done when they return |
//! | poll an index | [`Dma::window`] | [`Window::is_current`], [`Dma::refresh`] |
//! | let the kernel do I/O there | [`Dma::lease`] | [`Dma::release`], before it publishes completion |
//! | copy between buffers in place, in this call | [`Dma::host`], [`VolatileSlice`] | nothing |
//! | say which pages its driver names | [`Dma::locate`] | nothing: nothing was accessed |
//!
//! Every access returns data, [`Stop::Pending`] or [`Stop::Fault`]. An invalidation that revokes a
//! page waits only for leases on it ([`LeaseTable`]); windows are re-checked by generation. An idle
//! core watches a word of the ring ([`WatchWord`]).
//!
//! A host IOMMU that is to show an assigned device the same mappings is fed by
//! [`Iommu::next_mapping`], a search that leaves no trace in the guest's IOMMU.
//!
//! **Memory.** Either ours ([`GuestRam`]: one sealed memory file, which KVM and others map),
//! or that of another process, the VMM, which sent us its files ([`ForeignRam`], with [`DirectMap`]
//! where it keeps the IOMMU to itself, and [`DeviceTlb`] where it hands out translations one by
//! one). That process is not trusted: its table is checked before it is mapped. If it truncates a
//! file, its own guest is lost; other guests are not affected (module `sigbus`).
//!
//! **Threads.** The VM's owner, one thread, has the IOMMU, the devices and the
//! memory, and lends a device its view for one call. So nothing here locks. Memory itself is raced
//! by the guest at any time: words are accessed by single atomic loads and stores, bytes by copies
//! that may tear, and no reference into guest memory ever exists (modules `word` and `mapping`
//! argue this).
//!
//! **Isolation.** A device cannot reach RAM without translation: no [`PhysMem`] here implements
//! [`Dma`], and device code is written against nothing else.
//!
//! **Cost.** Translate-and-lease is inlined into the device: beside the IOMMU's own lookup, a
//! region compare and a slab insertion. A word through a window is a compare and a load. Through
//! [`DirectMap`], a lease, its release and [`keeps_mapped`] take 8 ns together, a copy of 4 KiB
//! hardly more than `memcpy` (module `word`).
//!
//! **Left out:** which pages are resident (a swapper's [`PhysMem`] will pend), dirty tracking, page
//! tables (those belong to the IOMMU crates), KVM. Host and guest are little-endian here, as x86
//! and 64-bit Arm are.
//!
//! ```
//! use guest_mem::{Dma, Gpa, GuestRam, Iova, NoIommu, Perm, PhysMem, SourceId, View};
//!
//! // A device: increments a byte wherever the guest asks.
//! fn device(dma: &mut impl Dma, at: Iova) -> guest_mem::Access<()> {
//!     let mut byte = [0];
//!     dma.read(at, &mut byte)?;
//!     dma.write(at, &[byte[0].wrapping_add(1)])
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The VMM: 16 MiB at 0, and no IOMMU.
//! let ram = GuestRam::new(&[(Gpa::new(0), 16 << 20)])?;
//! let mut iommu = NoIommu::new(64);
//! let mut view = View::new(&mut iommu, &ram, SourceId::new(0, 1, 0));
//! device(&mut view, Iova::new(0x1234)).expect("inside RAM");
//! assert!(device(&mut view, Iova::new(16 << 20)).is_err());
//!
//! // The same byte leased, as for asynchronous I/O, and read by the VMM itself.
//! let lease = view.lease(Iova::new(0x1234), 1, Perm::Read).expect("inside RAM");
//! assert!(guest_mem::keeps_mapped(&ram.keep_alive(), lease.hva, 1));
//! view.release(lease.id);
//! let mut byte = [0];
//! ram.read(Gpa::new(0x1234), &mut byte).expect("inside RAM");
//! assert_eq!(byte, [1]);
//! # Ok(())
//! # }
//! ```

mod access;
mod addr;
mod device_tlb;
mod direct;
mod direct_run;
mod dma;
mod file;
mod follow;
mod foreign;
mod iommu;
mod keep;
mod last_window;
mod lease;
mod map_error;
mod mapping;
mod pages;
mod phys;
mod ram;
mod regpage;
mod reserve;
mod row;
mod shared;
mod sigbus;
mod slot;
mod view;
mod volatile;
mod watch;
mod window;
mod word;

pub use access::{Access, DmaFault, Intent, Perm, Stop, Ticket};
pub use addr::{Gpa, Hva, Iova, PAGE_SIZE, SourceId};
pub use device_tlb::{DeviceTlb, IovaRange, MAX_ENTRIES, MAX_MISSES, Miss, Rights};
pub use direct::DirectMap;
pub use direct_run::DirectRun;
pub use dma::{Dma, Lease, LeaseStop, Wanted};
pub use file::FileError;
pub use follow::{Attachment, Found, Next};
pub use foreign::{ForeignError, ForeignErrorKind, ForeignRam, ForeignRegion, MAX_FOREIGN_BYTES};
pub use iommu::{Iommu, NoIommu, Run, left_in_span};
pub use keep::keeps_mapped;
pub use last_window::LastWindow;
pub use lease::{
    Budget, DRAIN_LIMIT_NS, DrainTimer, Full, LEASE_SPAN, LeaseId, LeaseRecord, LeaseTable, Leases,
    MAX_LEASES, MAX_RESERVE, Part, SHARES,
};
pub use map_error::MapError;
pub use mapping::HugePages;
pub use pages::Pages;
pub use phys::{KeepAlive, LastingPiece, PhysMem};
pub use ram::{GuestRam, RamError, Region};
pub use regpage::{RegPage, RegisterPage};
pub use row::{ReadDescriptors, ReadU16s, WriteDescriptors, WriteUsed};
pub use shared::SharedFile;
pub use slot::SlotMapping;
pub use view::View;
pub use volatile::{MappedRun, VolatileSlice};
pub use watch::WatchWord;
pub use window::Window;
