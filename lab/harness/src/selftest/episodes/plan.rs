//! Plan of a guest's boot and its episodes, drawn from its seed.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use workload::pattern::Random;

use crate::system::guest::Mode;
use crate::system::storage::Make;

/// Largest number of episodes of a boot.
pub const EPISODES: usize = 4;

/// Process that does the guest's I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// `exitless run`, with its registers in this mode.
    Run(Mode),
    /// `exitless serve`; the guest has no IOMMU.
    Serve,
}

/// Image of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// The device itself.
    Device(Cache),
    /// A raw file with holes on ext4 on the device.
    File(Cache),
    /// A qcow2 file there.
    Qcow2,
}

/// Access to a raw image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    Buffered,
    Direct,
}

/// Fault of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Nothing,
    /// The kernel holds requests.
    Holds,
    /// Every request takes so many milliseconds.
    Slow(u32),
    /// Writes and flushes fail (EIO).
    FailsWrites,
    /// All requests fail (EIO).
    FailsAll,
    /// The file system is full (ENOSPC).
    Full,
}

impl Fault {
    /// Returns whether an end waits for the storage, so that its bound begins when the fault ends.
    pub fn keeps_waiting(self) -> bool {
        matches!(self, Self::Holds | Self::Slow(_))
    }
}

/// Action during the fault, on the guest's disk or on the process that does its I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// The guest clears Bus Master and sets it again.
    BusMaster,
    /// It resets the disk, with requests in flight.
    Reset,
    /// The process is stopped, and goes on (SIGSTOP, SIGCONT).
    Pause,
    /// SIGTERM.
    Term,
    /// SIGTERM, twice.
    TermTwice,
    /// SIGKILL.
    Kill,
    /// The guest powers off.
    PowerOff,
}

impl Action {
    /// Returns whether the guest ends with it. A daemon that ends has a successor.
    pub fn ends_guest(self, server: Server) -> bool {
        match self {
            Self::Nothing | Self::BusMaster | Self::Reset | Self::Pause => false,
            Self::Term | Self::TermTwice | Self::Kill => matches!(server, Server::Run(_)),
            Self::PowerOff => true,
        }
    }
}

/// An episode.
#[derive(Clone, Copy, Debug)]
pub struct Episode {
    pub fault: Fault,
    pub action: Action,
    /// Time from the first writes to the fault.
    pub until_fault: Duration,
    /// Time from the fault to the action.
    pub until_action: Duration,
    /// Time from the action to the end of the fault.
    pub until_good: Duration,
}

/// A boot.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub server: Server,
    pub idle: &'static str,
    pub image: Image,
    pub make: Make,
    pub episodes: Vec<Episode>,
}

impl Plan {
    /// Draws the boot of this seed.
    pub fn new(seed: u64) -> Self {
        let mut draw = Draw(Random::new(seed));
        let server = match draw.below(3) {
            0 => Server::Serve,
            _ => Server::Run(draw.one(&Mode::ALL)),
        };
        let image = draw.one(&[
            Image::Device(Cache::Buffered),
            Image::Device(Cache::Direct),
            Image::Device(Cache::Direct),
            Image::File(Cache::Buffered),
            Image::File(Cache::Direct),
            Image::Qcow2,
        ]);
        let make = Make {
            sector: draw.one(&[512, 4096]),
            is_encrypted: draw.below(3) == 0,
        };
        let mut plan = Self {
            seed,
            server,
            idle: draw.one(&["poll", "adaptive", "sleep"]),
            image,
            make,
            episodes: Vec::new(),
        };
        while plan.episodes.len() < EPISODES {
            let episode = draw.episode(image);
            plan.episodes.push(episode);
            if episode.action.ends_guest(server) {
                break;
            }
        }
        plan
    }

    /// Returns the names of its parts, for counting.
    pub fn parts(&self) -> Vec<String> {
        let server = match self.server {
            Server::Run(mode) => format!("run {}", mode.name()),
            Server::Serve => "serve".into(),
        };
        let make = match self.make.is_encrypted {
            true => "encrypted",
            false => "plain",
        };
        vec![
            server,
            self.idle.into(),
            format!("{:?}", self.image),
            format!("{} bytes, {make}", self.make.sector),
        ]
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "seed {}: {}", self.seed, self.parts().join(", "))?;
        for (number, episode) in (1..).zip(&self.episodes) {
            let before = if number == 1 { ": " } else { "; " };
            write!(out, "{before}{:?} × {:?}", episode.fault, episode.action)?;
        }
        Ok(())
    }
}

/// Returns boots from the seed `first` on, that have `count` episodes together, or a few more.
pub fn plans(first: u64, count: usize) -> Vec<Plan> {
    let mut left = count;
    let boots = (first..).map(Plan::new).take_while(|plan| {
        let is_wanted = left > 0;
        left = left.saturating_sub(plan.episodes.len());
        is_wanted
    });
    boots.collect()
}

/// Renders the frequency of each part in the episodes of `plans`, for a reader.
pub fn tally(plans: &[Plan]) -> String {
    let mut met = BTreeMap::<String, usize>::new();
    for plan in plans {
        for part in plan.parts() {
            *met.entry(part).or_default() += plan.episodes.len();
        }
        for Episode { fault, action, .. } in &plan.episodes {
            // The largest duration is all that is counted.
            let fault = match fault {
                Fault::Slow(_) => "Slow".into(),
                fault => format!("{fault:?}"),
            };
            *met.entry(format!("storage {fault}")).or_default() += 1;
            *met.entry(format!("then {action:?}")).or_default() += 1;
        }
    }
    let episodes: usize = plans.iter().map(|plan| plan.episodes.len()).sum();
    let parts: Vec<String> = met
        .iter()
        .map(|(part, times)| format!("{part} {times}"))
        .collect();
    format!(
        "{episodes} episodes in {} boots: {}",
        plans.len(),
        parts.join("; ")
    )
}

struct Draw(Random);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0.below(end)
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.below(of.len() as u64)).expect("an index")]
    }

    fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from))
    }

    fn episode(&mut self, image: Image) -> Episode {
        let slow = Fault::Slow(u32::try_from(50 + self.below(250)).expect("below 300"));
        let more: &[Fault] = match image {
            // If the page cache cannot be written back, its data are dropped, and the next flush
            // fails: a write that a guest has been acknowledged may be lost then. ext4 accepts no
            // more writes once its journal has failed.
            Image::Device(Cache::Direct) => &[Fault::FailsWrites, Fault::FailsAll],
            Image::Device(Cache::Buffered) => &[],
            Image::File(_) | Image::Qcow2 => &[Fault::Full, Fault::Full],
        };
        let always = [
            Fault::Nothing,
            Fault::Holds,
            Fault::Holds,
            Fault::Holds,
            slow,
        ];
        Episode {
            fault: self.one(&[&always[..], more].concat()),
            action: self.one(&[
                Action::Nothing,
                Action::BusMaster,
                Action::Reset,
                Action::Pause,
                Action::Term,
                Action::TermTwice,
                Action::Kill,
                Action::PowerOff,
            ]),
            until_fault: self.millis(0, 500),
            until_action: self.millis(0, 1500),
            until_good: self.millis(500, 4000),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_boot_each_time_and_only_its_last_episode_ends_the_guest() {
        for seed in 0..200 {
            let plan = Plan::new(seed);
            assert_eq!(plan.to_string(), Plan::new(seed).to_string());
            let ends = |episode: &Episode| episode.action.ends_guest(plan.server);
            let (_, before) = plan.episodes.split_last().expect("one at least");
            assert!(!before.iter().any(ends), "{plan}");
            assert!(plan.episodes.len() <= EPISODES);
        }
    }

    #[test]
    fn boots_have_as_many_episodes_as_asked_for() {
        let plans = plans(7, 50);
        let episodes: usize = plans.iter().map(|plan| plan.episodes.len()).sum();
        assert!((50..50 + EPISODES).contains(&episodes), "{episodes}");
        assert_eq!(plans[0].seed, 7);
    }

    #[test]
    fn hundred_boots_meet_every_part() {
        let plans: Vec<Plan> = (0..100).map(Plan::new).collect();
        let tally = tally(&plans);
        for part in [
            "run none",
            "run trap",
            "run logged",
            "run shared",
            "serve",
            "poll",
            "adaptive",
            "sleep",
            "Device(Buffered)",
            "Device(Direct)",
            "File(Buffered)",
            "File(Direct)",
            "Qcow2",
            "512 bytes, plain",
            "512 bytes, encrypted",
            "4096 bytes, plain",
            "4096 bytes, encrypted",
            "storage Nothing",
            "storage Holds",
            "storage Slow",
            "storage FailsWrites",
            "storage FailsAll",
            "storage Full",
            "then Nothing",
            "then BusMaster",
            "then Reset",
            "then Pause",
            "then Term ",
            "then TermTwice",
            "then Kill",
            "then PowerOff",
        ] {
            assert!(tally.contains(part), "no {part:?} in: {tally}");
        }
    }
}
