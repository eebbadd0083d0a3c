//! Controls of the measurements: reads and writes that a host's kernel does and the swapper
//! avoids, done to be counted.

use swap::book::{FaultOrigin, IoPolicy};

/// Reads and writes that are done although they need not be, by VSwapper's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controls {
    /// The content of a page is read that a device is about to overwrite as a whole.
    pub stale_reads: bool,
    /// The content of a page is read that a vCPU is about to overwrite as a whole.
    pub false_reads: bool,
    /// A page that a disk's block equals is written to the store.
    pub silent_writes: bool,
}

impl IoPolicy for Controls {
    fn reads_overwritten(&self, origin: FaultOrigin) -> bool {
        match origin {
            FaultOrigin::Device => self.stale_reads,
            FaultOrigin::Vcpu => self.false_reads,
        }
    }

    fn saves_block_backed(&self) -> bool {
        self.silent_writes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_control_all_is_avoided_and_each_control_is_of_one_thing() {
        let of = |controls: Controls| {
            (
                controls.reads_overwritten(FaultOrigin::Device),
                controls.reads_overwritten(FaultOrigin::Vcpu),
                controls.saves_block_backed(),
            )
        };
        let none = Controls::default();
        assert_eq!(of(none), (false, false, false));
        let stale_reads = Controls {
            stale_reads: true,
            ..none
        };
        assert_eq!(of(stale_reads), (true, false, false));
        let false_reads = Controls {
            false_reads: true,
            ..none
        };
        assert_eq!(of(false_reads), (false, true, false));
        let silent_writes = Controls {
            silent_writes: true,
            ..none
        };
        assert_eq!(of(silent_writes), (false, false, true));
    }
}
