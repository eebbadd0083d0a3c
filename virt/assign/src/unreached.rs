//! Detection of a device that its guest uses although DMA of the device reaches no memory, because
//! the guest has not enabled translation in its IOMMU.
//!
//! The guest's driver only sees requests time out. So the user gets one warning with the reason. It
//! is delayed, since a system that uses its IOMMU enables translation before its drivers start.

/// Duration of bus mastering without translation after which the warning is due, in ns.
const PATIENCE: u64 = 2_000_000_000;

/// Timer of bus mastering without translation.
#[derive(Debug, Default)]
pub(crate) struct Unreached {
    since: Option<u64>,
    is_said: bool,
}

impl Unreached {
    /// Records whether the condition holds at `now`, in ns. Returns true once: the warning is due.
    pub(crate) fn look(&mut self, is_so: bool, now: u64) -> bool {
        if self.is_said {
            return false;
        }
        if !is_so {
            self.since = None;
            return false;
        }
        let since = *self.since.get_or_insert(now);
        self.is_said = now >= since.saturating_add(PATIENCE);
        self.is_said
    }

    /// Returns the time of the next call of [`look`](Self::look) that is due, in ns.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let since = self.since.filter(|_| !self.is_said)?;
        Some(since.saturating_add(PATIENCE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warning_is_due_once_after_the_delay() {
        let mut unreached = Unreached::default();
        assert!(!unreached.look(true, 5));
        assert_eq!(unreached.deadline(), Some(5 + PATIENCE));
        assert!(!unreached.look(true, 4 + PATIENCE));
        // Translation was enabled meanwhile.
        assert!(!unreached.look(false, 5 + PATIENCE));
        assert_eq!(unreached.deadline(), None);
        assert!(!unreached.look(true, 6 + PATIENCE));
        assert!(unreached.look(true, 6 + 2 * PATIENCE));
        assert_eq!(unreached.deadline(), None);
        assert!(!unreached.look(true, 6 + 4 * PATIENCE));
    }
}
