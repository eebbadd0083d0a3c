//! Number of cores of a fleet, and placement of its pollers: a pure decision over samples of
//! utilisation.
//!
//! ```text
//! a core above `high` for `patience` samples:
//!     a move that lowers the higher of both utilisations by `gain` or more → the best such Move
//!     else it has several pollers, and there may be more cores → AddCore; the moves follow
//! all would fit on one core fewer below `low`, for 4 × `patience` samples → Retire the least used
//! ```
//! Hysteresis: `low` is well below `high`; a mark must be passed in several samples in a row; after
//! each decision the counting starts anew. There is one act per decision, and each move lowers the
//! higher of two utilisations, so moves do not go round in circles.
//!
//! Called by the fleet's controller thread. A limitation: a poller's utilisation on a core that is
//! not full is not known while its core is full.

use std::collections::BTreeMap;

/// Conditions for adding and retiring cores. Utilisations are shares of a core's time, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ControlConfig {
    /// Fewest cores; at least 1.
    pub min_cores: usize,
    /// Most cores; at least 1.
    pub max_cores: usize,
    /// Utilisation above which a core is overloaded. Default 0.85.
    pub high: f64,
    /// Utilisation below which the other cores must stay for one core fewer to be enough. Default
    /// 0.5.
    pub low: f64,
    /// The least by which a move must lower the higher utilisation. Default 0.1.
    pub gain: f64,
    /// Samples in a row above `high`; below `low`, four times as many. Default 3.
    pub patience: u32,
}

impl Default for ControlConfig {
    fn default() -> Self {
        ControlConfig {
            min_cores: 1,
            max_cores: 1,
            high: 0.85,
            low: 0.5,
            gain: 0.1,
            patience: 3,
        }
    }
}

/// Utilisation of a core by one poller since the last sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PollerSample {
    /// Its number.
    pub id: u64,
    /// Its share of the core's time.
    pub utilisation: f64,
}

/// Utilisation of a core since the last sample.
#[derive(Clone, Debug, PartialEq)]
pub struct CoreSample {
    /// The core's number in the fleet.
    pub core: usize,
    /// The share of time in which it had work.
    pub utilisation: f64,
    /// Its pollers.
    pub pollers: Vec<PollerSample>,
}

/// Action to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing.
    Stay,
    /// Start one more core.
    AddCore,
    /// Empty this core and end it.
    Retire {
        /// The core's number.
        core: usize,
    },
    /// Move a poller.
    Move {
        /// The poller's number.
        poller: u64,
        /// Core that it is on.
        from: usize,
        /// Core to move it to.
        to: usize,
    },
}

/// State of the decisions: samples in a row above and below the marks.
#[derive(Clone, Debug)]
pub struct Controller {
    config: ControlConfig,
    /// By core: samples above the high mark in a row.
    above: BTreeMap<usize, u32>,
    /// Samples in a row in which one core fewer would have been enough.
    below: u32,
}

impl Controller {
    /// Creates a controller without samples.
    pub fn new(config: ControlConfig) -> Self {
        Controller {
            config,
            above: BTreeMap::new(),
            below: 0,
        }
    }

    /// Takes one sample of all running cores, and returns the action that it calls for.
    pub fn decide(&mut self, cores: &[CoreSample]) -> Decision {
        self.count(cores);
        let decision = self.relieve(cores).or_else(|| self.retire(cores));
        if let Some(decision) = decision {
            // After a new core its moves are due at once. After a move or a retirement the
            // utilisations must settle.
            if decision != Decision::AddCore {
                self.above.clear();
            }
            self.below = 0;
        }
        decision.unwrap_or(Decision::Stay)
    }

    fn count(&mut self, cores: &[CoreSample]) {
        let high = self.config.high;
        let mut above = std::mem::take(&mut self.above);
        for core in cores.iter().filter(|core| core.utilisation > high) {
            let before = above.remove(&core.core).unwrap_or(0);
            self.above.insert(core.core, before.saturating_add(1));
        }
        let used: f64 = cores.iter().map(|core| core.utilisation).sum();
        let is_enough = cores.len() > self.config.min_cores.max(1)
            && used < self.config.low * (cores.len() - 1) as f64;
        self.below = if is_enough {
            self.below.saturating_add(1)
        } else {
            0
        };
    }

    fn relieve(&self, cores: &[CoreSample]) -> Option<Decision> {
        let is_full = |core: &&CoreSample| {
            self.above.get(&core.core).copied().unwrap_or(0) >= self.config.patience
        };
        let full: Vec<&CoreSample> = cores.iter().filter(is_full).collect();
        let moves = full.iter().filter_map(|from| self.best_move(from, cores));
        if let Some((_, decision)) = moves.max_by(|a, b| a.0.total_cmp(&b.0)) {
            return Some(decision);
        }
        let can_part = full.iter().any(|core| core.pollers.len() > 1);
        (can_part && cores.len() < self.config.max_cores).then_some(Decision::AddCore)
    }

    /// Returns the move away from `from` with the greatest gain, if that is large enough.
    fn best_move(&self, from: &CoreSample, cores: &[CoreSample]) -> Option<(f64, Decision)> {
        let others = cores.iter().filter(|other| other.core != from.core);
        let to = others.min_by(|a, b| a.utilisation.total_cmp(&b.utilisation))?;
        let gain = |poller: &PollerSample| {
            let after = from.utilisation - poller.utilisation;
            let there = to.utilisation + poller.utilisation;
            from.utilisation - after.max(there)
        };
        // Moving the only poller of a core leaves the core empty, and gains nothing.
        let movable = from.pollers.iter().filter(|_| from.pollers.len() > 1);
        let best = movable.max_by(|a, b| gain(a).total_cmp(&gain(b)))?;
        let decision = Decision::Move {
            poller: best.id,
            from: from.core,
            to: to.core,
        };
        (gain(best) >= self.config.gain).then_some((gain(best), decision))
    }

    fn retire(&self, cores: &[CoreSample]) -> Option<Decision> {
        if self.below < self.config.patience.saturating_mul(4) {
            return None;
        }
        let least = |a: &&CoreSample, b: &&CoreSample| {
            // Among equals the youngest.
            a.utilisation
                .total_cmp(&b.utilisation)
                .then(b.core.cmp(&a.core))
        };
        let core = cores.iter().min_by(least)?.core;
        Some(Decision::Retire { core })
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
