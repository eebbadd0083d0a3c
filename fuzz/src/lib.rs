//! Fuzz targets: what guests and front ends can say, said at random, with a model that knows what
//! must come of it.
//!
//! One module per target, each with a `run` (the body) and `seeds` (valid traffic to begin from,
//! made by code): [`vhost_user_messages`], [`export_session`], [`iotlb_messages`],
//! [`block_requests`], [`split_ring`], [`packed_ring`], [`net_control`], [`iommu_requests`],
//! [`dma_mapper`] (what drivers can ask a mapper for), [`iova_allocators`] (histories of address
//! spaces), [`vfio_info`] (what a kernel says of an IOMMU and a region), [`frame_offloads`]
//! (headers of frames, and segmentation), [`worker_area`] (what a device worker stores into the
//! memory that it shares), and [`self_test`], a planted fault that shows that the set-up finds such
//! things.
//!
//! **How they run.** `scripts/fuzz.sh` (`make fuzz`, `make check`) builds the programs in
//! `targets/` with `--cfg fuzzing` and LLVM's coverage counters, which a stable compiler has too,
//! and links libFuzzer. In any other build they replay the files named on the command line, and
//! `cargo test -p fuzz` runs every seed.
//!
//! **Determinism.** A target reads nothing but its input: no clock, no address, no descriptor
//! number decides anything.
//!
//! Left out: AddressSanitizer (needs a nightly compiler), real threads (a hostile driver's stores
//! come between the device's single accesses instead: see [`racing`]).
#![deny(unsafe_code)]

pub mod block_requests;
pub mod dma_mapper;
pub mod export_session;
mod fds;
pub mod frame_offloads;
mod held_disk;
mod input;
pub mod iommu_requests;
pub mod iotlb_messages;
pub mod iova_allocators;
pub mod net_control;
mod offer;
pub mod packed_ring;
pub mod racing;
mod ring;
mod run;
pub mod self_test;
pub mod split_ring;
pub mod vfio_info;
pub mod vhost_user_messages;
pub mod worker_area;

pub use input::{Input, Script};
#[cfg(not(fuzzing))]
pub use run::replay;
#[cfg(fuzzing)]
pub use run::write_seeds;

/// The program of one target: under libFuzzer with `--cfg fuzzing`, otherwise a replayer of files.
#[macro_export]
macro_rules! target {
    ($($name:tt)*) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(
            init: $crate::write_seeds($($name)*::seeds),
            |data: &[u8]| $($name)*::run(data)
        );

        #[cfg(not(fuzzing))]
        fn main() -> std::process::ExitCode {
            $crate::replay($($name)*::run)
        }
    };
}
