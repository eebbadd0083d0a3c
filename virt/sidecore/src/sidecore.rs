//! Starting and ending a sidecore.

use std::{io, num::NonZeroU32, panic, sync::mpsc, thread, time::Duration};

use thiserror::Error;

use crate::{
    clock::Nanos,
    handle::Handle,
    idle::{IdlePolicy, IdleState},
    mailbox::{Outbox, mailbox},
    monitor::Watch,
    pause::Pause,
    poller::Poller,
    run::Core,
    stats::{Board, Stats},
    sync::Arc,
    sys::{self, EventFd, ThreadClock},
};

/// A sidecore could not be started.
#[derive(Debug, Error)]
pub enum SpawnError {
    /// No eventfd for its mailbox.
    #[error("cannot create the sidecore's eventfd")]
    EventFd(#[source] io::Error),
    /// No thread.
    #[error("cannot start the sidecore's thread")]
    Thread(#[source] io::Error),
    /// No such CPU, or none this process may use.
    #[error("cannot pin the sidecore to cpu {cpu}")]
    Pin {
        /// The CPU asked for.
        cpu: usize,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The settings of a sidecore to be.
#[derive(Clone, Debug)]
#[must_use]
pub struct SidecoreBuilder {
    name: String,
    cpu: Option<usize>,
    idle: IdlePolicy,
    shares_cpu: bool,
    force_sleep_every: Option<NonZeroU32>,
}

impl SidecoreBuilder {
    /// A sidecore named `name` (its thread shows the first 15 bytes), not pinned, that polls
    /// adaptively.
    pub fn new(name: impl Into<String>) -> Self {
        SidecoreBuilder {
            name: name.into(),
            cpu: None,
            idle: IdlePolicy::adaptive(),
            shares_cpu: false,
            force_sleep_every: None,
        }
    }

    /// Pins its thread to one host CPU.
    pub fn cpu(mut self, cpu: Option<usize>) -> Self {
        self.cpu = cpu;
        self
    }

    /// What it does when idle.
    pub fn idle(mut self, policy: IdlePolicy) -> Self {
        self.idle = policy;
        self
    }

    /// It shares its CPU with threads that wait for it (vCPUs): yields after each idle sweep that
    /// does not sleep, instead of spinning through its time slice.
    pub fn shares_cpu(mut self, shares: bool) -> Self {
        self.shares_cpu = shares;
        self
    }

    /// For tests of the notification paths: sleep at every `n`-th idle sweep, whatever the policy
    /// says, but not while a [`deadline`](Poller::deadline) has passed. Counted in
    /// [`CoreStats::sleeps_forced`](crate::CoreStats::sleeps_forced).
    pub fn force_sleep_every(mut self, n: Option<NonZeroU32>) -> Self {
        self.force_sleep_every = n;
        self
    }

    /// Starts the thread, which owns the pollers until [`Sidecore::stop`] hands them back.
    ///
    /// # Errors
    /// When a resource is refused or the CPU does not exist; nothing runs then.
    pub fn spawn<P: Poller + 'static>(self, pollers: Vec<P>) -> Result<Sidecore<P>, SpawnError>
    where
        P::Message: 'static,
    {
        let (outbox, inbox) = mailbox(EventFd::new().map_err(SpawnError::EventFd)?);
        let pause = Pause::detect();
        let names = pollers
            .iter()
            .map(|poller| poller.name().to_owned())
            .collect();
        let board = Arc::new(Board::new(self.name.clone(), pause.name(), names));
        let (ready, started) = mpsc::sync_channel(1);
        let count = pollers.len();
        let of_thread = Arc::clone(&board);
        let thread = thread::Builder::new()
            .name(self.name)
            .spawn(move || {
                let _end = End(Arc::clone(&of_thread));
                let begun = begin(self.cpu, &of_thread);
                let has_failed = begun.is_err();
                // The receiver waits below.
                let _ = ready.send(begun);
                if has_failed {
                    return pollers;
                }
                let core = Core {
                    pollers,
                    inbox,
                    board: of_thread,
                    // Now, since the time it took to start a thread is not idleness.
                    idle: IdleState::new(self.idle, Nanos::now()),
                    pause,
                    shares_cpu: self.shares_cpu,
                    force_sleep_every: self.force_sleep_every,
                };
                core.run()
            })
            .map_err(SpawnError::Thread)?;
        match started.recv() {
            Ok(Ok(())) => Ok(Sidecore {
                thread: Some(thread),
                outbox,
                board,
                pollers: count,
            }),
            Ok(Err(error)) => {
                // It ends by itself; a panic in dropping it has nobody to tell.
                let _ = thread.join();
                Err(error)
            }
            Err(_) => Err(SpawnError::Thread(io::Error::other(
                "the thread ended at once",
            ))),
        }
    }
}

/// On the new thread, before its loop.
fn begin(cpu: Option<usize>, board: &Board) -> Result<(), SpawnError> {
    if let Some(cpu) = cpu {
        sys::pin_this_thread(cpu).map_err(|source| SpawnError::Pin { cpu, source })?;
    }
    board.begin(ThreadClock::of_this_thread().map_err(SpawnError::Thread)?);
    Ok(())
}

/// Says how the thread ended, also when a poller panics.
struct End(Arc<Board>);

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
    /// Taken when joined.
    thread: Option<thread::JoinHandle<Vec<P>>>,
    outbox: Outbox<P::Message, EventFd>,
    board: Arc<Board>,
    pollers: usize,
}

impl<P: Poller> Sidecore<P> {
    /// A handle to poller number `poller`, in the order given to `spawn`.
    ///
    /// # Panics
    /// When there is no such poller.
    pub fn handle(&self, poller: usize) -> Handle<P::Message> {
        assert!(
            poller < self.pollers,
            "no poller {poller} among {}",
            self.pollers
        );
        Handle::new(self.outbox.clone(), poller)
    }

    /// What it has done so far.
    pub fn stats(&self) -> Stats {
        self.board.snapshot()
    }

    /// CPU time of its thread so far, user and kernel. Over the wall-clock time of the same
    /// interval it is the share of a CPU it uses.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn thread_cpu_time(&self) -> io::Result<Duration> {
        self.board.cpu_time()
    }

    /// What a [`Monitor`](crate::Monitor) needs to watch it, and what outlives it for its
    /// statistics.
    pub fn watch(&self) -> Watch {
        Watch::new(Arc::clone(&self.board), Arc::clone(self.outbox.gate()))
    }

    /// Ends it: messages sent before are delivered, the thread is joined, and the pollers come
    /// back. Calls still waiting for an answer that their poller has kept go on waiting for it.
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
        self.outbox.gate().stop();
        Some(thread.join())
    }
}

impl<P: Poller> Drop for Sidecore<P> {
    fn drop(&mut self) {
        // A poller's panic is the monitor's to report; a panic in a drop would abort.
        self.join();
    }
}
