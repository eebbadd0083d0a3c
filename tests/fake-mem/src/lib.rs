//! Test doubles of guest memory and DMA: fake memory, injected waits and injected faults, for the
//! tests of the IOMMU and the devices. Tests of `guest-mem` that need them are here too (`tests/`).
//!
//! * [`ArrayMem`]: guest memory without a memory file; also runs under Miri.
//! * [`FlatDma`]: DMA of a device through an identity-mapped IOMMU in which ranges can be denied.
//! * [`PagedMem`]: memory whose pages are absent until a ticket for them is delivered.
//! * [`PendingMem`], [`PendingDma`]: wrappers whose accesses return `Pending` where the test
//!   chooses.
//!
//! To show that a step survives a wait at *every* access, run it once with `PendingMem::never` and
//! read the number of [`accesses`](PendingMem::accesses). Then run it once per access number `k`
//! with `PendingMem::kth(mem, k)`, and compare the outcomes. `PendingMem::every` waits on each
//! address once in a single run.
//!
//! ```
//! use fake_mem::{ArrayMem, PendingMem};
//! use guest_mem::{Gpa, PhysMem, Stop};
//! // A step under test: chases one pointer.
//! fn step(mem: &impl PhysMem) -> guest_mem::Access<u64> {
//!     let next = mem.read_u64(Gpa::new(0))?;
//!     mem.read_u64(Gpa::new(next))
//! }
//! let mem = ArrayMem::new(4096);
//! mem.put_u64(Gpa::new(0), 64);
//! mem.put_u64(Gpa::new(64), 7);
//!
//! let mem = PendingMem::every(mem);
//! let mut waits = 0;
//! let value = loop {
//!     match step(&mem) {
//!         Err(Stop::Pending(_)) => waits += 1,
//!         done => break done,
//!     }
//! };
//! assert_eq!((value, waits), (Ok(7), 2));
//! ```
#![forbid(unsafe_code)]

mod array;
mod flat;
mod paged;
mod pending;

pub use array::ArrayMem;
pub use flat::{FlatDma, FlatIommu};
pub use paged::PagedMem;
pub use pending::{PendingDma, PendingMem};
