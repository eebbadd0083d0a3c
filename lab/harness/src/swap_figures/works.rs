//! Works of a guest in these figures.

use workload::marker;

use crate::swap_lab::experiment;
use crate::swap_lab::memory_config::LIMIT;
use crate::swap_lab::plan::Plan;

/// Resident MiB of the guests of a sweep.
pub const LIMITS: [u64; 4] = [40, 55, 100, 160];
/// Number of times that the disk is read in a sweep.
const READS: u8 = 2;
/// Number of a compiler's units.
const UNITS: u64 = 96;
/// Bytes of the image: the input, and behind it the output.
pub const IMAGE: u64 = experiment::IMAGE + (32 << 20);
/// MiB of the image that are read.
const MIB: u64 = experiment::IMAGE >> 20;

/// Work of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// Reads its disk in order, with so many MiB resident.
    Read(u64),
    Compile,
    Compress,
    Collect,
}

impl Work {
    /// Returns its name in tables and keys.
    pub fn name(self) -> String {
        match self {
            Self::Read(limit) => format!("read, {limit} MiB"),
            Self::Compile => "compile".into(),
            Self::Compress => "compress".into(),
            Self::Collect => "collect".into(),
        }
    }

    /// Returns its plan.
    pub fn plan(self) -> Plan {
        let seed = experiment::SEED;
        match self {
            Self::Read(limit) => Plan {
                command: "sequential",
                arguments: format!(
                    "/dev/vda --mib {MIB} --iterations {READS} --alloc-mib 0 --seed {seed}"
                ),
                marks: (marker::ITERATION..marker::ITERATION + READS)
                    .chain([marker::ALLOC])
                    .collect(),
                done: format!("phase=read-{} ok", READS - 1),
                killed: "sequential alloc killed",
                limit,
            },
            Self::Compile => Plan::in_phases(
                "compile",
                format!("/dev/vda --mib {MIB} --units {UNITS} --phases 6 --seed {seed}"),
                7,
                "compile killed",
                LIMIT,
            ),
            Self::Compress => Plan::in_phases(
                "compress",
                format!("/dev/vda --mib 48 --window-mib 24 --phases 4 --seed {seed}"),
                5,
                "compress killed",
                LIMIT,
            ),
            Self::Collect => Plan::in_phases(
                "collect",
                format!("--mib 96 --collections 6 --seed {seed}"),
                6,
                "collect killed",
                LIMIT,
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_fits_on_the_image() {
        // A compiler's objects have 64 KiB each at most, a compressor's output is a quarter.
        let put_out = [UNITS << 16, experiment::IMAGE / 4];
        assert!(
            put_out
                .iter()
                .all(|bytes| experiment::IMAGE + bytes <= IMAGE)
        );
    }

    #[test]
    fn a_sweep_has_a_mark_behind_its_last_read() {
        let plan = Work::Read(40).plan();
        assert_eq!((plan.marks.as_slice(), plan.limit), (&[16, 17, 32][..], 40));
    }
}
