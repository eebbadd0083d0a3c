//! Probe by which a sidecore sees that a guest has made something available: one load per ring.

use sidecore::Probe;
use vio::ring::Watch;

/// The rings of one device. Most have one.
#[derive(Clone, Debug, Default)]
pub struct RingProbe {
    first: Option<Watch>,
    others: Vec<Watch>,
}

impl RingProbe {
    /// Replaces its watches by `watches`; where only the expected values of the words have changed,
    /// nothing is cloned.
    pub(crate) fn follow(&mut self, watches: &[Option<Watch>]) {
        let mut watches = watches.iter().flatten();
        match (&mut self.first, watches.next()) {
            (Some(own), Some(first)) => own.follow(first),
            (own, first) => *own = first.cloned(),
        }
        let mut kept = 0;
        for (at, other) in watches.enumerate() {
            kept = at + 1;
            match self.others.get_mut(at) {
                Some(own) => own.follow(other),
                None => self.others.push(other.clone()),
            }
        }
        self.others.truncate(kept);
    }
}

impl Probe for RingProbe {
    #[inline]
    fn fires(&self) -> bool {
        self.first.as_ref().is_some_and(Watch::fires)
            || (!self.others.is_empty() && self.others.iter().any(Watch::fires))
    }
}
