//! `exitless-lab selftest`: whole guests and long checks of this build on this host.
//!
//! * `ballooned`: guests that give memory back.
//! * `caged`: guests of disks whose device models are processes.
//! * `case`, `machine`: one case, and what several boot.
//! * `cases`: what is booted, and what must come of it.
//! * `clients`: other people's virtual machines on `exitless serve`.
//! * `debian`: a stock Debian on a disk behind VT-d.
//! * `elf`: kernels in the other format.
//! * `episodes`: storage that misbehaves, at random.
//! * `held`: storage that holds what it was given, for longer than anything waits for.
//! * `journal`: what a soak that was interrupted has passed.
//! * `power`: the power button, guests that reboot, and guests that panic.
//! * `punched`: guests whose memory comes and goes.
//! * `pviommu`: guests behind the paravirtual IOMMU.
//! * `swapped`: guests of which only a part is in memory.
//! * `vhost`: network cards of the host kernel.
//! * `suite`: runs cases, counts, and resumes a soak.
//! * [`payload`]: the native forced-sleep soak, which needs no guest kernel.

mod ballooned;
mod caged;
mod case;
mod cases;
mod clients;
mod debian;
mod elf;
mod episodes;
mod held;
mod journal;
mod machine;
mod net;
pub mod payload;
mod power;
mod punched;
mod pviommu;
mod suite;
mod swapped;
mod verdicts;
mod vhost;

pub use suite::{SelftestArgs, main};
