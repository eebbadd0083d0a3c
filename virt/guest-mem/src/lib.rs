//! The one door to guest pages: address types, guest RAM, and the per-device, permission-checked,
//! IOMMU-aware view through which every device model reaches memory.
//!
//! (Head comment: see ARCHITECTURE.md; extended by the crate's author.)

mod access;
mod addr;
mod dma;
mod iommu;
mod lease;
mod phys;
mod window;

pub use access::{Access, DmaFault, Perm, Stop, Ticket};
pub use addr::{Gpa, Hva, Iova, PAGE_SIZE, SourceId};
pub use dma::{Dma, Lease};
pub use iommu::{Iommu, NoIommu, Run};
pub use lease::{LeaseId, LeaseTable};
pub use phys::{KeepAlive, PhysMem};
pub use window::Window;
