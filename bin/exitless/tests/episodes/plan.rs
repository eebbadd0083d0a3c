//! Plan of an episode, drawn from its seed.

use std::time::Duration;

use held_fs::Kind;
use seeded::Random;

/// Storage behind the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Buffered,
    Direct,
    Qcow2,
}

/// Fault of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Operations of this kind are held until the fault is over.
    Hold(Kind),
    /// So are all.
    HoldAll,
    /// Each is held for some milliseconds.
    Slow,
    /// So many of this kind fail, with this errno.
    Fail(Kind, u32, i32),
}

/// Action during the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    None,
    /// The front end stops the rings, as a VMM does that pauses its guest, and resumes them.
    Stop,
    /// It resets the device.
    Reset,
    /// It goes, and comes again.
    Reconnect,
    /// The daemon is asked for its counters.
    Counters,
    /// The daemon ends in order; another takes over.
    Term,
    /// It receives a second signal to end, which ends it at once.
    TermTwice,
    /// It is killed.
    Kill,
}

/// An episode.
#[derive(Debug)]
pub struct Plan {
    pub seed: u64,
    pub backend: Backend,
    pub fault: Fault,
    pub action: Action,
    pub idle: &'static str,
    /// Requests in flight outlive the daemon.
    pub inflight: bool,
    /// From the first request to the fault.
    pub before: Duration,
    /// From the fault to the action.
    pub until_action: Duration,
    pub fault_for: Duration,
}

impl Plan {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let of = |random: &mut Random, count: usize| random.below(count as u64) as usize;
        let millis = |random: &mut Random, end| Duration::from_millis(random.below(end));
        let kinds = [Kind::Read, Kind::Write, Kind::Sync];
        let kind = kinds[of(&mut random, kinds.len())];
        let backends = [Backend::Buffered, Backend::Direct, Backend::Qcow2];
        let failures = 1 + random.below(20) as u32;
        let faults = [
            Fault::None,
            Fault::Hold(kind),
            Fault::Hold(kind),
            Fault::HoldAll,
            Fault::Slow,
            Fault::Fail(kind, failures, libc::EIO),
            Fault::Fail(Kind::Write, failures, libc::ENOSPC),
        ];
        let actions = [
            Action::None,
            Action::Stop,
            Action::Reset,
            Action::Reconnect,
            Action::Counters,
            Action::Term,
            Action::TermTwice,
            Action::Kill,
        ];
        let policies = ["adaptive", "poll", "sleep", "spin:50"];
        Self {
            seed,
            backend: backends[of(&mut random, backends.len())],
            fault: faults[of(&mut random, faults.len())],
            action: actions[of(&mut random, actions.len())],
            idle: policies[of(&mut random, policies.len())],
            inflight: random.chance(0.5),
            before: millis(&mut random, 60),
            until_action: millis(&mut random, 120),
            fault_for: Duration::from_millis(100) + millis(&mut random, 500),
        }
    }

    /// Returns names of the parts of the plan, for counting.
    pub fn parts(&self) -> [String; 3] {
        let fault = match self.fault {
            Fault::Fail(kind, _, errno) => format!("Fail({kind:?}, {errno})"),
            fault => format!("{fault:?}"),
        };
        let (backend, action) = (self.backend, self.action);
        [format!("{backend:?}"), fault, format!("{action:?}")]
    }
}
