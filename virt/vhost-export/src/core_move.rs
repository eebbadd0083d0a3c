//! Move of a device with requests in flight to another core.
//!
//! Requests end on the core where they began, so the device moves when none is in flight. A device
//! that goes on taking requests may never come to that, and one that takes none stands still for as
//! long as its storage needs. So it is served as before, but for short pauses: a device whose
//! storage answers within one of them moves, and any other loses a tenth of its time until the move
//! is given up.
//!
//! No clock is read: the time is an argument, in nanoseconds.

/// Duration of a pause, in which the device takes no requests.
pub(crate) const PAUSE_NS: u64 = 10_000_000;
/// Duration of service between two pauses.
pub(crate) const SERVED_NS: u64 = 9 * PAUSE_NS;

/// State of the move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CoreMove {
    /// No move is requested.
    #[default]
    No,
    /// It takes nothing until then.
    Pauses(u64),
    /// It is served until then.
    IsServed(u64),
    /// It takes nothing any more: it goes.
    Goes,
}

impl CoreMove {
    /// Advances to `now`, at which the move waits for requests in flight. Returns whether the
    /// device takes requests meanwhile.
    pub(crate) fn takes(&mut self, now: u64) -> bool {
        *self = match *self {
            Self::Pauses(until) if until <= now => Self::IsServed(now.saturating_add(SERVED_NS)),
            Self::IsServed(until) if until > now => return true,
            Self::Pauses(_) => return false,
            Self::No | Self::IsServed(_) | Self::Goes => Self::Pauses(now.saturating_add(PAUSE_NS)),
        };
        matches!(self, Self::IsServed(_))
    }

    /// Returns the time at which a pause ends. No event announces it: the core must wake by itself.
    pub(crate) fn pause_end(self) -> Option<u64> {
        match self {
            Self::Pauses(until) => Some(until),
            Self::No | Self::IsServed(_) | Self::Goes => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_move_yet_takes_nothing_for_a_tenth_of_the_time_and_not_longer_at_once()
    {
        const STEP: u64 = PAUSE_NS / 10;
        let mut core_move = CoreMove::default();
        let taken: Vec<bool> = (0..1000).map(|step| core_move.takes(step * STEP)).collect();
        let longest = taken.chunk_by(|a, b| a == b).filter(|same| !same[0]);
        assert_eq!(longest.map(<[bool]>::len).max(), Some(10));
        assert_eq!(taken.iter().filter(|takes| !**takes).count(), 100);
    }

    #[test]
    fn the_end_of_a_pause_wakes_and_the_end_of_service_does_not() {
        let mut core_move = CoreMove::default();
        assert_eq!(core_move.pause_end(), None);
        assert!(!core_move.takes(5));
        assert_eq!(core_move.pause_end(), Some(5 + PAUSE_NS));
        assert!(core_move.takes(5 + PAUSE_NS));
        assert_eq!(core_move.pause_end(), None);
        // However late it is asked.
        assert!(!core_move.takes(u64::MAX - 1));
        assert_eq!(core_move.pause_end(), Some(u64::MAX));
    }
}
