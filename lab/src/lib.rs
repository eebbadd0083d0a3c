//! An emulated AMD host for machines without hardware virtualization.
//!
//! **Purpose.** [`Lab::start`] boots Debian's stock cloud kernel in QEMU (`-accel tcg -cpu max`,
//! SVM with nested paging emulated), loads `kvm-amd`, and runs programs inside, on a real
//! `/dev/kvm`. The program under test is usually `exitless run`, whose guest is the same kernel
//! with the image of [`guest_image`]. Words: *L1* or *lab* is the emulated host, *L2* or *guest* is
//! the machine it runs.
//!
//! **Structure.** [`packages`] fetches QEMU, the kernel and busybox from Debian packages and
//! unpacks them in the user's cache directory without installing. [`build`] links the guest's
//! `workload` and the lab's agent statically, [`guest_module`] a kernel module for the guest.
//! [`guest_image`] and [`host_image`] write the two initramfs files with [`cpio`]. [`Lab`] starts
//! QEMU and talks to the agent over a virtio-serial port by the frames of [`protocol`]; the
//! kernel's console is a separate serial line, so kernel messages never mix with a program's
//! output.
//!
//! **Callers.** `exitless-lab lab`, and tests of the whole system:
//!
//! ```no_run
//! use lab::{Lab, LabConfig};
//!
//! let mut lab = Lab::start(&LabConfig::default().with_exitless("target/release/exitless"))?;
//! let out = lab.run(["doctor", "--json"])?;
//! assert!(out.success(), "{}", out.stderr_text());
//! lab.push("disk.img", "/root/disk.img")?;
//! lab.run(["run", "--kernel", "/boot/vmlinuz", "--initrd", "/boot/guest.img"])?;
//! lab.shutdown()?;
//! # Ok::<(), lab::LabError>(())
//! ```
//!
//! **Left out.** Any claim about time: an emulated clock cycle costs what the emulator likes. Count
//! exits and requests in the lab; measure time elsewhere. Machines other than Debian and its
//! derivatives (the packages come through `apt-get`); hosts other than x86-64 Linux.
#![forbid(unsafe_code)]

pub mod agent;
pub mod assigned;
pub mod build;
pub mod cpio;
mod error;
pub mod export;
pub mod guest_image;
pub mod guest_module;
pub mod host_image;
pub mod kernel;
pub mod packages;
pub mod patience;
pub mod protocol;
pub mod prune;
mod qemu;
mod session;

pub use error::LabError;
pub use qemu::{LabConfig, in_option};
pub use session::{Lab, LabCommand, Output, Running, Stream};

/// Returns the reasons why [`Lab::start`] cannot start here, as far as can be determined without
/// trying; empty if there are none. Checks the cache, its disk, tools, sources and built programs,
/// and changes none of them; checks neither memory nor the network.
#[must_use]
pub fn obstacles(needs: &packages::Needs) -> Vec<String> {
    let mut found = packages::obstacles(&packages::cache_dir(), needs);
    found.extend(build::obstacle());
    found
}
