//! Counts of pages, by their last use by devices.

use std::fmt;

use crate::memory::Use;

/// Pages of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByUse([u64; Use::ALL.len()]);

impl ByUse {
    pub(crate) fn add(&mut self, what: Use) {
        self.0[what as usize] += 1;
    }

    /// Returns the pages of all kinds together.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl fmt::Display for ByUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.total())?;
        for (what, count) in Use::ALL.iter().zip(self.0) {
            write!(f, " {}={count}", what.name())?;
        }
        Ok(())
    }
}

/// Counts of a [`Puncher`](crate::Puncher).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages punched out.
    pub punched: ByUse,
    /// Pages brought back for a ticket.
    pub for_devices: ByUse,
    /// Of these, those that were about to be filled as a whole and came back as zeroes.
    pub not_fetched: u64,
    /// Pages brought back for a vCPU, or for the kernel on its behalf.
    pub for_vcpus: ByUse,
    /// Pages that the owner did not release.
    pub refused: u64,
    /// Pages that were in the file although they had been punched out: an access has reached them
    /// past the pager.
    pub trespasses: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "punched: {}; for devices: {}, not fetched {}; for vCPUs: {}; refused {}; trespasses \
             {}",
            self.punched,
            self.for_devices,
            self.not_fetched,
            self.for_vcpus,
            self.refused,
            self.trespasses
        )
    }
}
