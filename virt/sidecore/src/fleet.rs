//! Several sidecores, with pollers that are added, removed, and moved between them.
//!
//! A fleet starts with its minimum number of cores. A poller is added to the core with the fewest,
//! and can be moved; a [`Handle`] reaches its poller on whichever core it is. With a
//! [`ControlConfig`] that allows more cores, a thread samples the cores' statistics and carries out
//! the decisions of the [`Controller`]: starts a core, moves the poller that balances best, empties
//! a core and ends it.
//!
//! Core `n` of a fleet is pinned to the n-th CPU of the list given; those beyond its end are not
//! pinned. Statistics of a poller move with it. A [`Monitor`] given to the builder watches every
//! core that starts.
//!
//! There are two locks. `changes` is held over whole operations that move or remove pollers. Each
//! of them waits until a poller may leave its core; they are rare, and are called by threads that
//! may wait. The lock of the state is held only for as long as a core takes to answer, so a caller
//! that adds a poller, asks for statistics, or ends the fleet does not wait for a move. Ending the
//! fleet aborts a move that is under way. The cores themselves take neither lock.

use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

use thiserror::Error;

use crate::{
    control::{ControlConfig, Controller, CoreSample, Decision, PollerSample},
    handle::Handle,
    idle::IdlePolicy,
    monitor::Monitor,
    poller::Poller,
    sidecore::{AddError, Sidecore, SidecoreBuilder, SpawnError},
    stats::{CoreStats, Stats},
};

/// Limit on the time that a poller may take to leave its core, before a move is aborted.
const MOVE_LIMIT: Duration = Duration::from_secs(2);

/// Error of a move: the poller was not moved.
#[derive(Debug, Error)]
pub enum MoveError {
    /// It is not in this fleet.
    #[error("no such poller in this fleet")]
    NoPoller,
    /// There is no such core, or it has been retired.
    #[error("core {0} does not run")]
    NoCore(usize),
    /// It could not leave in time; it stays on its core and is polled on.
    #[error("the poller did not let go in time")]
    Kept,
}

/// The settings of a fleet.
#[derive(Debug)]
#[must_use]
pub struct FleetBuilder {
    name: String,
    core: SidecoreBuilder,
    cpus: Vec<usize>,
    control: ControlConfig,
    period: Duration,
    monitor: Option<Monitor>,
}

impl FleetBuilder {
    /// Creates the settings of a fleet of one core, whose cores are named `name` and their number.
    pub fn new(name: impl Into<String>) -> Self {
        FleetBuilder {
            name: name.into(),
            core: SidecoreBuilder::new(""),
            cpus: Vec::new(),
            control: ControlConfig::default(),
            period: Duration::from_millis(100),
            monitor: None,
        }
    }

    /// Pins core `n` to the n-th of these CPUs.
    pub fn cpus(mut self, cpus: Vec<usize>) -> Self {
        self.cpus = cpus;
        self
    }

    /// Sets the idle policy of the cores.
    pub fn idle(mut self, policy: IdlePolicy) -> Self {
        self.core = self.core.idle(policy);
        self
    }

    /// See [`SidecoreBuilder::force_sleep_every`].
    pub fn force_sleep_every(mut self, n: Option<std::num::NonZeroU32>) -> Self {
        self.core = self.core.force_sleep_every(n);
        self
    }

    /// Sets the number of cores, and when to add and retire them. The number is constant if
    /// `min_cores` is `max_cores`.
    pub fn control(mut self, control: ControlConfig) -> Self {
        self.control = control;
        self
    }

    /// Sets the time between two samples of the controller. Default 100 ms.
    pub fn control_period(mut self, period: Duration) -> Self {
        self.period = period;
        self
    }

    /// Lets `monitor` watch every core.
    pub fn monitor(mut self, monitor: Monitor) -> Self {
        self.monitor = Some(monitor);
        self
    }

    /// Starts the first cores, without pollers, and the controller, if it may change anything.
    ///
    /// # Errors
    /// When a core cannot be started; those started before end.
    pub fn spawn<P>(self) -> Result<Fleet<P>, SpawnError>
    where
        P: Poller + 'static,
        P::Message: 'static,
    {
        let control = self.control;
        let shared = Arc::new(Shared {
            name: self.name,
            core: self.core,
            cpus: self.cpus,
            monitor: self.monitor,
            changes: Mutex::new(()),
            state: Mutex::new(State {
                cores: BTreeMap::new(),
                homes: BTreeMap::new(),
                counts: FleetCounts::default(),
                retiring: None,
                is_ending: false,
            }),
            ending: Condvar::new(),
        });
        for _ in 0..control.min_cores.max(1) {
            shared.start_core(&mut shared.lock())?;
        }
        let controller = if control.max_cores > control.min_cores.max(1) {
            let of_thread = Arc::clone(&shared);
            let thread = thread::Builder::new()
                .name("controller".to_owned())
                .spawn(move || of_thread.control(Controller::new(control), self.period));
            Some(thread.map_err(SpawnError::Thread)?)
        } else {
            None
        };
        Ok(Fleet { shared, controller })
    }
}

/// Counters of a fleet's cores and moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetCounts {
    /// Cores started, the first ones included.
    pub cores_started: u64,
    /// Cores ended while the fleet went on.
    pub cores_retired: u64,
    /// Moves of pollers.
    pub moves: u64,
    /// Moves that were aborted.
    pub moves_failed: u64,
}

struct State<P: Poller> {
    cores: BTreeMap<usize, Sidecore<P>>,
    /// Poller number to its handle and core.
    homes: BTreeMap<u64, (Handle<P::Message>, usize)>,
    counts: FleetCounts,
    /// A core that is being emptied: no poller is added or moved to it.
    retiring: Option<usize>,
    is_ending: bool,
}

impl<P: Poller> State<P> {
    /// Returns the running core with the fewest pollers, except one that is being emptied.
    fn emptiest(&self) -> Option<usize> {
        let population = |core: usize| self.homes.values().filter(|home| home.1 == core).count();
        let cores = self.cores.keys().copied();
        cores
            .filter(|&core| Some(core) != self.retiring)
            .min_by_key(|&core| population(core))
    }
}

struct Shared<P: Poller> {
    name: String,
    core: SidecoreBuilder,
    cpus: Vec<usize>,
    monitor: Option<Monitor>,
    /// Taken before `state`.
    changes: Mutex<()>,
    state: Mutex<State<P>>,
    /// Notified when the controller is to end.
    ending: Condvar,
}

/// A running fleet. Dropping it stops it.
pub struct Fleet<P: Poller> {
    shared: Arc<Shared<P>>,
    /// Taken when joined.
    controller: Option<thread::JoinHandle<()>>,
}

impl<P> Fleet<P>
where
    P: Poller + 'static,
    P::Message: 'static,
{
    /// Adds a poller to the core with the fewest.
    ///
    /// # Errors
    /// When its descriptors cannot be registered; it is dropped.
    pub fn add(&self, poller: P) -> Result<Handle<P::Message>, AddError> {
        let mut state = self.shared.lock();
        let core = state.emptiest().ok_or(AddError::Ended)?;
        let handle = state.cores[&core].add(poller)?;
        state.homes.insert(handle.id(), (handle.clone(), core));
        Ok(handle)
    }

    /// Removes a poller once it may leave: see [`Sidecore::remove`]. `None` if it could not leave
    /// within `limit`, or is not in this fleet.
    pub fn remove(&self, poller: &Handle<P::Message>, limit: Duration) -> Option<P> {
        let _change = self.shared.begin_change();
        let asked = {
            let state = self.shared.lock();
            let core = state.homes.get(&poller.id())?.1;
            state.cores[&core].ask_to_end(poller.id())?
        };
        let taken = asked.wait(limit, || false)?;
        self.shared.lock().homes.remove(&poller.id());
        Some(taken)
    }

    /// Moves a poller to core `core`, with its undelivered messages; nothing is lost, and its
    /// handles follow.
    ///
    /// # Errors
    /// When it stays where it is.
    pub fn move_to(&self, poller: &Handle<P::Message>, core: usize) -> Result<(), MoveError> {
        self.shared
            .relocate(&self.shared.begin_change(), poller.id(), core)
    }

    /// Returns the core that a poller is on.
    pub fn core_of(&self, poller: &Handle<P::Message>) -> Option<usize> {
        Some(self.shared.lock().homes.get(&poller.id())?.1)
    }

    /// Starts one more core and returns its number.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn add_core(&self) -> Result<usize, SpawnError> {
        self.shared.start_core(&mut self.shared.lock())
    }

    /// Moves a core's pollers to the others and ends it. The last core stays.
    ///
    /// # Errors
    /// When it is the last, or a poller could not leave in time: the core then stays, with its
    /// remaining pollers.
    pub fn retire_core(&self, core: usize) -> Result<(), MoveError> {
        self.shared.retire(&self.shared.begin_change(), core)
    }

    /// Returns the statistics of the running cores, by number.
    pub fn stats(&self) -> Vec<(usize, Stats)> {
        self.shared.stats(&self.shared.lock())
    }

    /// Returns the counters of cores and moves.
    pub fn counts(&self) -> FleetCounts {
        self.shared.lock().counts
    }

    /// Asks all pollers to leave, at the same time. Each is sent to the returned channel as soon as
    /// it [`may_detach`](Poller::may_detach): for an end that drains a poller's requests in flight
    /// on the core that owns it. The channel ends with the last of them, or when a core has
    /// panicked. Pollers are not moved any more; [`stop`](Self::stop) returns those that have not
    /// left.
    pub fn release(&mut self) -> mpsc::Receiver<P> {
        self.end_controller();
        let (to, left) = mpsc::channel();
        let mut state = self.shared.lock();
        for (id, (_, core)) in std::mem::take(&mut state.homes) {
            if let Some(core) = state.cores.get(&core) {
                core.release(id, to.clone());
            }
        }
        left
    }

    /// Ends all cores: messages sent before are delivered, and the pollers come back, core by core.
    ///
    /// # Panics
    /// With the panic of a poller, if one panicked.
    pub fn stop(mut self) -> Vec<P> {
        self.end_controller();
        let cores = std::mem::take(&mut self.shared.lock().cores);
        cores.into_values().flat_map(Sidecore::stop).collect()
    }
}

impl<P: Poller> Fleet<P> {
    fn end_controller(&mut self) {
        if let Some(controller) = self.controller.take() {
            self.shared.lock().is_ending = true;
            self.shared.ending.notify_all();
            // It panics only if a sidecore could not be joined because a poller panicked, which is
            // reported elsewhere.
            let _ = controller.join();
        }
    }
}

impl<P: Poller> Drop for Fleet<P> {
    fn drop(&mut self) {
        self.end_controller();
    }
}

/// Exclusive right to move or remove pollers: the guard of `changes`.
type Change<'a> = MutexGuard<'a, ()>;

impl<P: Poller> Shared<P> {
    fn begin_change(&self) -> Change<'_> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P> Shared<P>
where
    P: Poller + 'static,
    P::Message: 'static,
{
    fn start_core(&self, state: &mut State<P>) -> Result<usize, SpawnError> {
        let is_free = |number: &usize| !state.cores.contains_key(number);
        let number = (0..)
            .find(is_free)
            .expect("there are more numbers than cores");
        let core = self
            .core
            .clone()
            .name(format!("{}{number}", self.name))
            .cpu(self.cpus.get(number).copied())
            .spawn(Vec::new())?;
        if let Some(monitor) = &self.monitor {
            monitor.watch(core.watch());
        }
        state.cores.insert(number, core);
        state.counts.cores_started += 1;
        Ok(number)
    }

    fn relocate(&self, _change: &Change<'_>, id: u64, to: usize) -> Result<(), MoveError> {
        let asked = {
            let state = self.lock();
            let from = state.homes.get(&id).ok_or(MoveError::NoPoller)?.1;
            let target = state.cores.get(&to).ok_or(MoveError::NoCore(to))?;
            if from == to {
                return Ok(());
            }
            state.cores[&from].ask_to_move(id, target)
        };
        let moved = asked.and_then(|asked| asked.wait(MOVE_LIMIT, || self.lock().is_ending));
        let mut state = self.lock();
        if moved != Some(true) {
            state.counts.moves_failed += 1;
            return Err(MoveError::Kept);
        }
        state.counts.moves += 1;
        if let Some(home) = state.homes.get_mut(&id) {
            home.1 = to;
        }
        Ok(())
    }

    fn retire(&self, change: &Change<'_>, core: usize) -> Result<(), MoveError> {
        {
            let mut state = self.lock();
            if !state.cores.contains_key(&core) || state.cores.len() < 2 {
                return Err(MoveError::NoCore(core));
            }
            state.retiring = Some(core);
        }
        let emptied = self.empty(change, core);
        let ended = {
            let mut state = self.lock();
            state.retiring = None;
            emptied?;
            state.counts.cores_retired += 1;
            state.cores.remove(&core)
        };
        drop(ended.map(Sidecore::stop));
        Ok(())
    }

    /// Moves the pollers of a core that retires to the others.
    fn empty(&self, change: &Change<'_>, core: usize) -> Result<(), MoveError> {
        let leaving: Vec<u64> = {
            let state = self.lock();
            let on_it = state.homes.iter().filter(|(_, home)| home.1 == core);
            on_it.map(|(&id, _)| id).collect()
        };
        leaving.into_iter().try_for_each(|id| {
            let to = self.lock().emptiest().ok_or(MoveError::NoCore(core))?;
            self.relocate(change, id, to)
        })
    }

    fn stats(&self, state: &State<P>) -> Vec<(usize, Stats)> {
        let stats = |(&number, core): (&usize, &Sidecore<P>)| (number, core.stats());
        state.cores.iter().map(stats).collect()
    }

    /// Runs the controller's thread.
    fn control(&self, mut controller: Controller, period: Duration) {
        let mut before = Vec::new();
        while let Some(after) = self.wait(period) {
            let sample = sample(&before, &after);
            before = after;
            if sample.is_empty() {
                continue;
            }
            let decision = controller.decide(&sample);
            let change = self.begin_change();
            // A decision that cannot be carried out now is made again if it is still needed.
            let _is_done = match decision {
                Decision::Stay => true,
                Decision::AddCore => self.start_core(&mut self.lock()).is_ok(),
                Decision::Retire { core } => self.retire(&change, core).is_ok(),
                Decision::Move { poller, to, .. } => self.relocate(&change, poller, to).is_ok(),
            };
        }
    }

    /// Waits for `period`; returns the statistics at its end, or `None` if the fleet ends.
    fn wait(&self, period: Duration) -> Option<Vec<(usize, Stats)>> {
        let state = self.lock();
        let waited = self
            .ending
            .wait_timeout_while(state, period, |state| !state.is_ending);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        (!state.is_ending).then(|| self.stats(&state))
    }
}

/// Returns the samples between two snapshots. A core that is not in the first one is left out.
fn sample(before: &[(usize, Stats)], after: &[(usize, Stats)]) -> Vec<CoreSample> {
    let sample = |(core, now): &(usize, Stats)| {
        let earlier = &before.iter().find(|(number, _)| number == core)?.1;
        // A core that was ended and started anew between the two counts from 0.
        let is_same =
            now.core.sweeps_idle >= earlier.core.sweeps_idle && now.core.cost >= earlier.core.cost;
        let start = if is_same {
            earlier.core.clone()
        } else {
            CoreStats::default()
        };
        let utilisation = now.core.utilisation_since(&start);
        let cost = (now.core.cost - start.cost).max(1) as f64;
        let pollers = now.pollers.iter().map(|poller| {
            let past = before
                .iter()
                .flat_map(|(_, stats)| &stats.pollers)
                .find(|past| past.id == poller.id);
            let spent = poller.activity.cost - past.map_or(0, |past| past.activity.cost);
            PollerSample {
                id: poller.id,
                // A poller's charges on another core in this time count too: for one sample its
                // utilisation is too large.
                utilisation: (utilisation * spent as f64 / cost).min(utilisation),
            }
        });
        Some(CoreSample {
            core: *core,
            utilisation,
            pollers: pollers.collect(),
        })
    };
    // The first sample after a core was added has no data on it, so it leads to no decision: a move
    // to that core would be blind.
    let samples: Vec<_> = after.iter().filter_map(sample).collect();
    if samples.len() == after.len() {
        samples
    } else {
        Vec::new()
    }
}
