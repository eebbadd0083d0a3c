//! Virtual machines and block daemons, composed: the parts of the programs.
//!
//! A program is a list of subcommands, and its [`composition`]; all else is here.
//! - [`run`]: one virtual machine on this host's KVM. [`serve`]: block devices for other VMMs.
//!   [`doctor`]: what this host offers to them.
//! - [`device_worker`]: the device model of a disk of a machine, in a process of its own.
//! - [`program`]: from the command line to an exit status. [`help`]: the output of `--help` and
//!   `man`.
//!   [`log`]: the options and the form of the log.
//! - Inside: the end of a process (`ending`), its terminal, its messages (`messages`, `notify`,
//!   `output`), values of options (`values`), ports of network devices (`ports`), facilities that a
//!   host may lack (`lacks`, `resident`).
//!
//! Both programs, `exitless` and `exitless-lab`, are built over this crate, which has their names
//! in messages alone: it is generic over the closed set of a machine's functions, and lets a
//! program wrap disks, stores, memory and sidecores. The product wraps nothing.

mod ending;
mod host_memory;
mod image_format;
mod image_lock;
mod lacks;
mod locked_memory;
mod log_limit;
mod log_line;
mod messages;
mod moved;
mod notify;
mod output;
mod ports;
mod resident;
mod terminal;
mod values;

pub mod composition;
pub mod device_worker;
pub mod doctor;
pub mod help;
pub mod log;
pub mod program;
pub mod run;
pub mod serve;

/// For [`functions!`](crate::functions).
#[doc(hidden)]
pub mod __private {
    pub use machine::functions;
    pub use pv_iommu::{IommuFunction, Request as IommuRequest};
    pub use vio::Remote;
    pub use vio::balloon::Balloon;
    pub use vio::blk::Blk;
    pub use vio::caged::Caged;
    pub use vio::net::Net;
    pub use vio::rng::Rng;
    pub use virtio_pci::VirtioFunction;
}
