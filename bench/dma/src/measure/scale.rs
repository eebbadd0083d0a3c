//! From this machine to the *reference machine*, on which Linux's figures were measured and for which targets are set, so that
//! a figure can be compared with a target.
//!
//! A figure is given as measured (`_raw`) and scaled by a primitive of the same run:
//! * one thread: nanoseconds × 1.67 / [floor](super::primitives), the floor being measured beside each run;
//! * what crosses between two cores (b-32): nanoseconds × 120 / round trip, measured beside each run as well;
//! * two threads against one: the ratio / the same ratio of a loop of random numbers, in which threads share nothing,
//!   measured in the same turns; what that leaves open is said in [`doubled`](crate::doubled);
//! * **two threads and a flush that takes a fixed time F**: a busy wait takes as long on every machine, so only what
//!   lies beyond it scales. Of an operation's time (wall / operations of both threads) the part `F × commands /
//!   operations` is kept as it is, the rest is multiplied by 120 / round trip. Commands are counted, not assumed:
//!   where several unmaps share one command, each has its part of F. A ratio of two such figures is the ratio of the
//!   scaled ones;
//! * **a share of `off` under a load padded to a fixed time**: the padding and the flushes are kept as they are, the
//!   rest of a packet's time is scaled as one thread's. Loads without padding, and two threads, are given as measured.
//!
//! The ratio of two threads' throughput to one's is twice the inverse of the times' ratio, and scaled through it.

/// The floor on the reference machine, nanoseconds.
pub const REFERENCE_FLOOR_NS: f64 = 1.67;
/// The round trip there, nanoseconds.
pub const REFERENCE_RTT_NS: f64 = 120.0;

/// The primitives of this run, as far as figures are scaled by them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Owner-only pop and push.
    pub floor_ns: f64,
    /// A cache line there and back; `None` where there is one CPU.
    pub rtt_ns: Option<f64>,
}

/// What one thread takes on the reference machine, by the floor measured beside it.
pub fn by_floor(ns: f64, floor_ns: f64) -> f64 {
    ns * REFERENCE_FLOOR_NS / floor_ns
}

/// What crosses between cores takes there, by the round trip measured beside it.
pub fn by_round_trip(ns: f64, rtt_ns: f64) -> f64 {
    ns * REFERENCE_RTT_NS / rtt_ns
}

impl Scale {
    /// The same scale where the floor was measured beside the figure.
    #[must_use]
    pub fn with_floor(self, floor_ns: Option<f64>) -> Self {
        Self {
            floor_ns: floor_ns.unwrap_or(self.floor_ns),
            ..self
        }
    }

    /// What one thread takes.
    pub fn single(&self, ns: f64) -> f64 {
        by_floor(ns, self.floor_ns)
    }

    /// Time of one thread's operation of which `fixed_ns` were waits of fixed length.
    pub fn beyond_wait(&self, ns: f64, fixed_ns: f64) -> f64 {
        let fixed = fixed_ns.clamp(0.0, ns);
        fixed + self.single(ns - fixed)
    }

    /// Time of an operation of which `fixed_ns` were spent in flushes of fixed length.
    pub fn beyond_flush(&self, ns: f64, fixed_ns: f64, rtt_ns: f64) -> f64 {
        let fixed = fixed_ns.clamp(0.0, ns);
        fixed + by_round_trip(ns - fixed, rtt_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Scale = Scale {
        floor_ns: 3.34,
        rtt_ns: Some(240.0),
    };

    #[test]
    fn a_machine_half_as_fast_is_scaled_by_two() {
        assert!((HERE.single(10.0) - 5.0).abs() < 1e-9);
        assert!((by_round_trip(40.0, 240.0) - 20.0).abs() < 1e-9);
    }

    #[test]
    fn the_reference_machine_scales_nothing() {
        let reference = Scale {
            floor_ns: REFERENCE_FLOOR_NS,
            rtt_ns: Some(REFERENCE_RTT_NS),
        };
        assert_eq!(reference.single(21.0), 21.0);
        assert_eq!(by_round_trip(20.0, REFERENCE_RTT_NS), 20.0);
        assert_eq!(
            reference.beyond_flush(676.0, 500.0, REFERENCE_RTT_NS),
            676.0
        );
    }

    #[test]
    fn only_what_lies_beyond_the_flush_scales() {
        // 1,000 ns of which 500 waited: the other 500 are halved.
        assert!((HERE.beyond_flush(1000.0, 500.0, 240.0) - 750.0).abs() < 1e-9);
        // Two operations shared each command of 500 ns.
        assert!((HERE.beyond_flush(400.0, 250.0, 240.0) - 325.0).abs() < 1e-9);
        assert!((HERE.beyond_wait(600.0, 500.0) - 550.0).abs() < 1e-9);
        // A clock that was read a little late takes no time away.
        assert_eq!(HERE.beyond_flush(499.0, 500.0, 240.0), 499.0);
    }
}
