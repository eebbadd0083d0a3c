//! Starting and ending a sidecore.

use std::{
    collections::{HashMap, VecDeque},
    io,
    num::NonZeroU32,
    panic,
    sync::mpsc,
    thread,
    time::Duration,
};

use thiserror::Error;

use crate::{
    clock::Nanos,
    drr::{self, Drr},
    handle::{Handle, Route},
    idle::{IdlePolicy, IdleState},
    mailbox::{MailboxReceiver, mailbox},
    monitor::Watch,
    pause::Pause,
    poller::Poller,
    pollers::Pollers,
    run::{Core, epoll_with},
    stats::{SharedStats, Stats},
    sync::Arc,
    sys::{self, EventFd, ThreadClock},
    transit::{CoreCommand, Destination, DetachedPoller, Leaving, PendingDetach, Port},
    wake_calibration::WakeCalibration,
};

/// Error of starting a sidecore.
#[derive(Debug, Error)]
pub enum SpawnError {
    /// The eventfd of its mailbox, or its epoll, could not be created.
    #[error("cannot create the sidecore's eventfd and epoll")]
    EventFd(#[source] io::Error),
    /// No thread could be started.
    #[error("cannot start the sidecore's thread")]
    Thread(#[source] io::Error),
    /// A poller's descriptors cannot be registered.
    #[error("cannot attach {name} to the sidecore")]
    Attach {
        /// Name of the poller.
        name: String,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// There is no such CPU, or this process may not use it.
    #[error("cannot pin the sidecore to cpu {cpu}")]
    Pin {
        /// The requested CPU.
        cpu: usize,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
}

/// Error of adding a poller to a running sidecore.
#[derive(Debug, Error)]
pub enum AddError {
    /// Its descriptors cannot be registered.
    #[error("cannot attach the poller to the sidecore")]
    Attach(#[source] io::Error),
    /// The sidecore has ended.
    #[error("the sidecore has ended")]
    Ended,
}

/// Settings of a sidecore to start.
#[derive(Clone, Debug)]
#[must_use]
pub struct SidecoreBuilder {
    name: String,
    cpu: Option<usize>,
    idle: IdlePolicy,
    shares_cpu: bool,
    force_sleep_every: Option<NonZeroU32>,
    quantum: u64,
}

impl SidecoreBuilder {
    /// Creates the settings of a sidecore named `name` (its thread shows the first 15 bytes), not
    /// pinned, that polls adaptively.
    pub fn new(name: impl Into<String>) -> Self {
        SidecoreBuilder {
            name: name.into(),
            cpu: None,
            idle: IdlePolicy::adaptive(),
            shares_cpu: false,
            force_sleep_every: None,
            quantum: drr::QUANTUM,
        }
    }

    /// Sets another name.
    pub(crate) fn name(mut self, name: String) -> Self {
        self.name = name;
        self
    }

    /// Pins its thread to one host CPU.
    pub fn cpu(mut self, cpu: Option<usize>) -> Self {
        self.cpu = cpu;
        self
    }

    /// Sets the idle policy.
    pub fn idle(mut self, policy: IdlePolicy) -> Self {
        self.idle = policy;
        self
    }

    /// Sets whether it shares its CPU with threads that wait for it (vCPUs). If so, it yields after
    /// each idle sweep that does not sleep, instead of spinning through its time slice.
    pub fn shares_cpu(mut self, shares: bool) -> Self {
        self.shares_cpu = shares;
        self
    }

    /// Sets the quantum: the cost units (nanoseconds) that a poller of weight 1 may use in a round
    /// while others have work. The default is 6,400, 32 small requests. A larger one makes rounds
    /// fewer and lets pollers with much to do wait longer; a poller with little to do is served
    /// first ([`PollContext::others_wait`](crate::PollContext::others_wait)).
    pub fn quantum(mut self, cost: u64) -> Self {
        self.quantum = cost.max(1);
        self
    }

    /// For tests of the notification paths: sleeps at every `n`-th idle sweep, whatever the policy,
    /// unless a [`deadline`](Poller::deadline) has passed. Counted in
    /// [`CoreStats::sleeps_forced`](crate::CoreStats::sleeps_forced).
    pub fn force_sleep_every(mut self, n: Option<NonZeroU32>) -> Self {
        self.force_sleep_every = n;
        self
    }

    /// Starts the thread, which owns the pollers until [`Sidecore::stop`] returns them.
    ///
    /// # Errors
    /// When a resource is refused, the CPU does not exist, or a poller cannot be attached; nothing
    /// runs then.
    pub fn spawn<P: Poller + 'static>(self, pollers: Vec<P>) -> Result<Sidecore<P>, SpawnError>
    where
        P::Message: 'static,
    {
        let (sender, receiver) = mailbox(EventFd::new().map_err(SpawnError::EventFd)?);
        let pause = Pause::detect();
        let shared_stats = Arc::new(SharedStats::new(self.name.clone(), pause.name()));
        let (orders_in, commands) = mpsc::channel();
        let mut handles = Vec::new();
        let newcomers: Vec<_> = pollers
            .into_iter()
            .map(|poller| {
                let route = Route::new(sender.clone());
                handles.push(Handle::new(Arc::clone(&route)));
                DetachedPoller::new(poller, route)
            })
            .collect();
        let (ready, started) = mpsc::sync_channel(1);
        // Without a calibration the policy starts from an assumed cost of a wake-up.
        let calibration = matches!(self.idle, IdlePolicy::Priced(_))
            .then(|| WakeCalibration::new().ok().map(Arc::new))
            .flatten();
        let of_core = calibration.clone();
        let cpu = self.cpu;
        let of_thread = Arc::clone(&shared_stats);
        let thread = thread::Builder::new()
            .name(self.name.clone())
            .spawn(move || {
                let _end = End(Arc::clone(&of_thread));
                let begun = self.begin(of_thread, receiver, commands, pause, newcomers);
                // The receiver of `ready` waits below.
                match begun {
                    Ok(mut core) => {
                        if let Some(calibration) = of_core {
                            core.calibrate_wakes(&calibration);
                        }
                        let _ = ready.send(Ok(()));
                        core.run()
                    }
                    Err(error) => {
                        let _ = ready.send(Err(error));
                        Vec::new()
                    }
                }
            })
            .map_err(SpawnError::Thread)?;
        if let Some(calibration) = calibration {
            // A guest's kick comes from another CPU, which interrupts this one. The cost would
            // differ if the waker ran on the core's own CPU.
            thread::scope(|scope| {
                let waker = thread::Builder::new().spawn_scoped(scope, || {
                    // If there is no other CPU, both share this one, as guests will.
                    let _ = cpu.map(sys::keep_this_thread_off);
                    calibration.wake();
                });
                // Without the waker there is no calibration: the core times out by itself.
                drop(waker);
            });
        }
        match started.recv() {
            Ok(Ok(())) => Ok(Sidecore {
                thread: Some(thread),
                port: Port {
                    sender,
                    commands: orders_in,
                },
                shared_stats,
                handles,
            }),
            Ok(Err(error)) => {
                // The thread ends by itself; a panic while it drops the pollers cannot be reported.
                let _ = thread.join();
                Err(error)
            }
            Err(_) => Err(SpawnError::Thread(io::Error::other(
                "the thread ended at once",
            ))),
        }
    }

    /// Prepares the core on the new thread, before its loop.
    fn begin<P: Poller>(
        &self,
        shared_stats: Arc<SharedStats>,
        receiver: MailboxReceiver<P::Message, EventFd>,
        commands: mpsc::Receiver<CoreCommand<P>>,
        pause: Pause,
        newcomers: Vec<DetachedPoller<P>>,
    ) -> Result<Core<P>, SpawnError> {
        if let Some(cpu) = self.cpu {
            sys::pin_this_thread(cpu).map_err(|source| SpawnError::Pin { cpu, source })?;
        }
        let clock = ThreadClock::of_this_thread().map_err(SpawnError::Thread)?;
        shared_stats.begin(clock);
        let epoll = epoll_with(receiver.gate().notifier()).map_err(SpawnError::EventFd)?;
        let now = Nanos::now();
        let mut core = Core {
            pollers: Pollers::new(),
            members: Vec::new(),
            slots: HashMap::new(),
            drr: Drr::new(self.quantum),
            receiver,
            stash: VecDeque::new(),
            commands,
            leaving: Vec::new(),
            epoll,
            events: sys::no_events(),
            stray: None,
            next_look: now,
            shared_stats,
            idle: IdleState::new(self.idle, now),
            clock,
            pause,
            shares_cpu: self.shares_cpu,
            force_sleep_every: self.force_sleep_every,
            now,
            is_first_after_wake: false,
            requests: 0,
            is_waiting: false,
            idle_sweeps: 0,
            was_busy: false,
            due: Vec::new(),
        };
        for moving in newcomers {
            let name = moving.shared_stats.name.clone();
            core.add(moving)
                .map_err(|source| SpawnError::Attach { name, source })?;
        }
        Ok(core)
    }
}

/// Records the thread's end when dropped, also when a poller panics.
struct End(Arc<SharedStats>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.end(thread::panicking());
    }
}

/// A running sidecore: one thread that owns and polls its pollers.
///
/// Dropping it stops it, as [`stop`](Self::stop) does.
#[derive(Debug)]
pub struct Sidecore<P: Poller> {
    /// `None` once joined.
    thread: Option<thread::JoinHandle<Vec<P>>>,
    port: Port<P>,
    shared_stats: Arc<SharedStats>,
    /// Handles of the pollers given to `spawn`.
    handles: Vec<Handle<P::Message>>,
}

impl<P: Poller> Sidecore<P> {
    /// Returns a handle to poller number `poller`, in the order given to `spawn`.
    ///
    /// # Panics
    /// When there is no such poller.
    pub fn handle(&self, poller: usize) -> Handle<P::Message> {
        let count = self.handles.len();
        assert!(poller < count, "no poller {poller} among {count}");
        self.handles[poller].clone()
    }

    /// Adds a poller to the running sidecore, and waits until it has been attached (or refused)
    /// between two sweeps.
    ///
    /// # Errors
    /// When the poller's descriptors cannot be registered, or the sidecore has ended; the poller is
    /// dropped.
    pub fn add(&self, poller: P) -> Result<Handle<P::Message>, AddError> {
        let route = Route::new(self.port.sender.clone());
        let moving = DetachedPoller::new(poller, Arc::clone(&route));
        let (tx, answer) = mpsc::channel();
        self.port
            .command(CoreCommand::Add(moving, tx))
            .map_err(|_| AddError::Ended)?;
        match answer.recv() {
            Ok(Ok(())) => Ok(Handle::new(route)),
            Ok(Err(error)) => Err(AddError::Attach(error)),
            Err(mpsc::RecvError) => Err(AddError::Ended),
        }
    }

    /// Removes a poller once it [`may_detach`](Poller::may_detach), and waits for that at most
    /// `limit`; messages sent before are delivered first. Returns `None` if it could not be removed
    /// in time, or is not on this sidecore. Sending to a removed poller fails.
    pub fn remove(&self, poller: &Handle<P::Message>, limit: Duration) -> Option<P> {
        self.ask_to_end(poller.id())?.wait(limit, || false)
    }

    /// Requests that a poller be returned to its owner. `None` if this sidecore has ended.
    pub(crate) fn ask_to_end(&self, id: u64) -> Option<PendingDetach<P, P>> {
        PendingDetach::to_leave(&self.port, id, Destination::Owner)
    }

    /// Moves a poller to another sidecore once it [`may_detach`](Poller::may_detach), and waits for
    /// that at most `limit`. Its undelivered messages and its scheduling debt move with it, and its
    /// handles stay valid. Returns false if it stayed, is not on this sidecore, or the other one
    /// has ended.
    pub fn move_to(
        &self,
        poller: &Handle<P::Message>,
        other: &Sidecore<P>,
        limit: Duration,
    ) -> bool {
        let asked = self.ask_to_move(poller.id(), other);
        let moved = asked.and_then(|asked| asked.wait(limit, || false));
        moved.unwrap_or(false)
    }

    /// Requests that a poller move to another sidecore; the answer is whether it has. `None` if
    /// this one has ended.
    pub(crate) fn ask_to_move(
        &self,
        id: u64,
        other: &Sidecore<P>,
    ) -> Option<PendingDetach<P, bool>> {
        let port = other.port.clone();
        PendingDetach::to_leave(&self.port, id, |answer| Destination::Core(port, answer))
    }

    /// Requests that a poller be sent to `to` once it [`may_detach`](Poller::may_detach).
    pub(crate) fn release(&self, id: u64, to: mpsc::Sender<P>) {
        let to = Destination::Owner(to);
        // On a core that has ended, no poller is sent.
        let _ = self.port.command(CoreCommand::Leave(Leaving { id, to }));
    }

    /// Returns the statistics so far.
    pub fn stats(&self) -> Stats {
        self.shared_stats.snapshot()
    }

    /// Returns the CPU time of its thread so far, user and kernel. Divided by the wall-clock time
    /// of the same interval it is the share of a CPU that it uses.
    ///
    /// # Errors
    /// When the kernel refuses to report it.
    pub fn thread_cpu_time(&self) -> io::Result<Duration> {
        self.shared_stats.cpu_time()
    }

    /// Returns its heartbeat and statistics, for a [`Monitor`](crate::Monitor) and for reports;
    /// they outlive the sidecore.
    pub fn watch(&self) -> Watch {
        Watch::new(
            Arc::clone(&self.shared_stats),
            Arc::clone(self.port.sender.gate()),
        )
    }

    /// Ends the sidecore: messages sent before are delivered, the thread is joined, and the pollers
    /// are returned. A caller that waits for a [`Reply`](crate::Reply) which a poller has kept
    /// continues to wait.
    ///
    /// # Panics
    /// With the panic of a poller, if one panicked.
    pub fn stop(mut self) -> Vec<P> {
        match self.join() {
            Some(Ok(pollers)) => pollers,
            Some(Err(payload)) => panic::resume_unwind(payload),
            None => Vec::new(),
        }
    }

    fn join(&mut self) -> Option<thread::Result<Vec<P>>> {
        let thread = self.thread.take()?;
        self.port.sender.gate().stop();
        Some(thread.join())
    }
}

impl<P: Poller> Drop for Sidecore<P> {
    fn drop(&mut self) {
        // A poller's panic is reported by the monitor; a panic in a drop would abort.
        self.join();
    }
}
