//! The one door to guest pages: address types, guest RAM, and the per-device, permission-checked,
//! IOMMU-aware view through which every device model reaches memory.
//!
//! (Head comment: see ARCHITECTURE.md; extended by the crate's author.)

mod access;
mod addr;
mod dma;
mod iommu;
mod lease;
mod mapping;
mod phys;
mod ram;
mod regpage;
mod view;
mod window;
mod word;

pub use access::{Access, DmaFault, Perm, Stop, Ticket};
pub use addr::{Gpa, Hva, Iova, PAGE_SIZE, SourceId};
pub use dma::{Dma, Lease};
pub use iommu::{Iommu, NoIommu, Run};
pub use lease::{LeaseId, LeaseRecord, LeaseTable, MAX_LEASES};
pub use mapping::{MapError, keeps_mapped};
pub use phys::{KeepAlive, PhysMem};
pub use ram::{GuestRam, RamError, Region};
pub use regpage::{ArrayPage, RegPage, RegisterPage};
pub use view::View;
pub use window::Window;
