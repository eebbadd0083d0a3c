//! `--fault mapper:stale`: reads and writes that a host kernel's swapping does and this swapper
//! avoids, enabled here so that they can be counted.

use swap::residency::{FaultOrigin, IoPolicy};

/// Policy with the stale reads and silent writes of VSwapper (ASPLOS 2014): a page that a device is
/// about to overwrite is read from the store first, and an unmodified page of which the guest's
/// disk has a copy is written to the store.
#[derive(Clone, Copy, Debug)]
pub struct StaleMapper;

impl IoPolicy for StaleMapper {
    fn reads_overwritten(&self, origin: FaultOrigin) -> bool {
        origin == FaultOrigin::Device
    }

    fn saves_block_backed(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vcpu_s_page_is_not_read_before_it_is_overwritten() {
        let read = [FaultOrigin::Device, FaultOrigin::Vcpu]
            .map(|origin| StaleMapper.reads_overwritten(origin));
        assert_eq!(read, [true, false]);
        assert!(StaleMapper.saves_block_backed());
    }
}
