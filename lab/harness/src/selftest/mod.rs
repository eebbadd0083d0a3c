//! `exitless-lab selftest`: whole guests and long checks of this build on this host.
//!
//! * `ballooned`: guests that give memory back.
//! * `caged`: guests of disks whose device models are processes.
//! * `case`, `machine`: one case, and the machine of several.
//! * `cases`: the guests that are booted, and their expected outcomes.
//! * `clients`: other projects' virtual machines on `exitless serve`.
//! * `debian`: a stock Debian on a disk behind VT-d.
//! * `elf`: kernels in the other format.
//! * `episodes`: random episodes of faulty storage.
//! * `held`: storage that holds requests for longer than any time limit.
//! * `journal`: cases that an interrupted soak has passed.
//! * `power`: the power button, guests that reboot, and guests that panic.
//! * `punched`: guests whose pages are removed and brought back.
//! * `pviommu`: guests behind the paravirtual IOMMU.
//! * `swapped`: guests of which only a part is resident.
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
