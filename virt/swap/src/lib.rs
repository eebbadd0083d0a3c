//! Memory overcommit without the guest's help: pages of a guest leave memory, and come back when
//! they are accessed.
//!
//! A page whose content a disk of the guest holds as well is dropped unwritten, and read from
//! there. A page that is about to be overwritten as a whole is not read at all. Only the rest goes
//! through a swap store. The guest is not involved. After N. Amit, D. Tsafrir, A. Schuster:
//! *VSwapper: A Memory Swapper for Virtualized Environments* (ASPLOS 2014), whose Swap Mapper and
//! False Reads Preventer these are, without its patches to the host's kernel.
//!
//! * [`residency`]: the decisions about each page. No system call, no thread and no time.
//! * [`frames`]: guest memory, a page at a time: file, mapping, trace of stores.
//! * [`overwrite`]: whether a vCPU is about to overwrite a whole page, and with what. As pure as
//!   `residency`.
//! * [`store`]: the file or block device for pages that are neither in memory nor on a disk.
//!
//! * [`ram`]: the memory as the owner of a machine accesses it, each page present or absent.
//! * [`disk`]: a disk that reports its reads and writes.
//! * [`balloon`]: a balloon that reports discarded pages to the pager.
//! * [`pager`]: the poller that reports events to the book, and carries out its commands.
//!
//! ```text
//! processors ── faults ──────────────────────────▶ pager ── commands ─▶ frames: map, unmap, zero, punch
//! owner ── SwappedRam: wanted, answered ── FIFO ─▶   │ ▲  └─ page_io ─▶ store, images (io_uring)
//!   ├─ MappedDisk: began, ended ──────────┤         └─┴ residency
//!   └─ SwappedBalloon: offered ───────────┘
//! pager ── evict, ticket done, go ─▶ owner
//! ```
//! Left out: stores that overwrite a page in many instructions (the paper's buffer); `docs/swap.md`
//! says what that costs.
#![forbid(unsafe_code)]

pub mod balloon;
mod batch;
pub mod disk;
pub mod frames;
mod link;
pub mod overwrite;
mod page_io;
pub mod pager;
mod preventer;
pub mod ram;
pub mod report;
pub mod residency;
pub mod stopped;
pub mod store;
