//! A device that its guest drives although it reaches nothing, since translation is off.
//!
//! The guest's driver only sees that requests time out. So the user is told why, once, when it has
//! lasted for a while: a system that uses its IOMMU turns translation on before its drivers start.

/// How long bus mastering is on without translation before that is said, ns.
const PATIENCE: u64 = 2_000_000_000;

/// For how long it has been so.
#[derive(Debug, Default)]
pub(crate) struct Unreached {
    since: Option<u64>,
    is_said: bool,
}

impl Unreached {
    /// Notes whether it is so at `now`. True once: it is to be said.
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

    /// When it has to be looked at again, ns.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let since = self.since.filter(|_| !self.is_said)?;
        Some(since.saturating_add(PATIENCE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_once_and_when_it_has_lasted() {
        let mut unreached = Unreached::default();
        assert!(!unreached.look(true, 5));
        assert_eq!(unreached.deadline(), Some(5 + PATIENCE));
        assert!(!unreached.look(true, 4 + PATIENCE));
        // Translation came on meanwhile.
        assert!(!unreached.look(false, 5 + PATIENCE));
        assert_eq!(unreached.deadline(), None);
        assert!(!unreached.look(true, 6 + PATIENCE));
        assert!(unreached.look(true, 6 + 2 * PATIENCE));
        assert_eq!(unreached.deadline(), None);
        assert!(!unreached.look(true, 6 + 4 * PATIENCE));
    }
}
