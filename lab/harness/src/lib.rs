//! Whole guests, run by `exitless` as a user runs it, and observed from outside.
//!
//! `exitless-lab` has these as commands and uses nothing else of them; they start `exitless` as a
//! process, in the lab or here, with the flags that a user would give, or `exitless-lab` for a
//! guest whose parts fail on purpose.
//!
//! * `report_file`: files of figures.
//! * `system`: a guest, a daemon, a host, storage with faults.
//! * [`demo`]: exits with no IOMMU and in each register mode, side by side.
//! * [`selftest`]: cases and their expected outcomes.
//! * [`pviommu_lab`]: requests and exits of a disk behind the paravirtual IOMMU.
//! * [`serve_lab`]: exits of guests that share one daemon.
//! * [`serve_net_lab`]: the same of their network, beside the kernel's vhost-net.
//! * [`swap_lab`]: pages moved for guests with too little memory.
//! * [`swap_figures`]: the same by memory allowed, by program, and of four at once.
//! * [`eli`]: exits of a guest under `exitless-hv`, and attacks on that.
//! * [`assign`]: guests with devices of the emulated host; memory pinned for them, refused DMA.
//! * [`assign_lab`]: costs of such guests, by the guest's policy, the host's and the register mode.
//! * [`lab_cmd`]: a command of the user's in the lab.
//!
//! Left out: all functions of a machine. The forced-sleep payload, which has no guest kernel,
//! builds a machine of the library's parts itself.

pub mod assign;
pub mod assign_lab;
pub mod demo;
pub mod eli;
mod judged;
pub mod lab_cmd;
pub mod pviommu_lab;
mod report_file;
pub mod selftest;
pub mod serve_lab;
pub mod serve_net_lab;
pub mod swap_figures;
pub mod swap_lab;
mod system;
