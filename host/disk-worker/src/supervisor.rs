//! The owner's side: starts a worker process, watches it, and restarts it.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use guest_mem::FileError;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use sidecore::{drain_eventfd, signal_eventfd};
use vio::blk::{BlkConfig, BlkError, BlkFacts, FactsError, worker_shape};
use vio::caged::{Area, Caged, WorkerEvent, WorkerProcess};
use worker_area::Start;

use crate::worker::Confined;
use crate::{HostError, descriptors};

/// Request slots of the shared area, which bound the requests in flight of one disk.
const SLOTS: u32 = 128;
/// Time within which a started worker has to be ready.
const START_LIMIT: Duration = Duration::from_secs(10);
/// Least time between two starts. It bounds the cost of a request that crashes every worker: at
/// most ten processes a second.
const MIN_RESTART_INTERVAL: Duration = Duration::from_millis(100);
/// Number of consecutive workers that end without completing a request, after which no other is
/// started.
const MAX_FAILED_WORKERS: u32 = 3;

/// Settings of a disk's worker process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// The worker runs without a filter of system calls.
    pub is_unconfined: bool,
    /// A worker that dies is replaced by a new one.
    pub restarts: bool,
}

/// A disk that a worker serves.
#[derive(Debug)]
pub struct WorkerDisk {
    /// The program that calls [`serve`](crate::serve).
    pub program: PathBuf,
    /// Arguments behind those that [`start`] adds.
    pub arguments: Vec<OsString>,
    /// The disk's file, opened with the access that the disk needs, and locked.
    pub file: File,
    /// The guest may not write to the disk.
    pub read_only: bool,
    /// The file is opened with `O_DIRECT`.
    pub direct: bool,
    /// Serial number, at most 20 bytes of ASCII.
    pub id: String,
    /// Logical block size, number of queues.
    pub device: BlkConfig,
}

/// Reason why a worker cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The host refuses a resource.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The memory to be shared with the worker cannot be allocated.
    #[error("the worker's memory")]
    Memory(#[source] FileError),
    /// The worker reports why it cannot start, in printable ASCII.
    #[error("the device worker cannot start: {0}")]
    Reported(String),
    /// The process has ended without a report.
    #[error("the device worker has ended at its start")]
    Ended,
    /// The worker is not ready within the limit.
    #[error("the device worker is not ready after {} s", START_LIMIT.as_secs())]
    NotReady,
    /// The facts that the worker reports describe no valid disk.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// The supervisor's thread has ended: a bug of this crate.
    #[error("the worker's thread has ended")]
    Thread,
}

/// Event of a disk's worker, reported for the log of the machine by the supervisor's thread.
#[derive(Debug)]
pub enum Report {
    /// The first worker serves requests.
    Started {
        /// Its process id.
        pid: u32,
        /// Its confinement, as the worker reports it.
        confined: Confined,
    },
    /// The worker has ended, and a new one serves requests.
    Replaced {
        /// Manner of its end, as text.
        how: String,
        /// Process id of the new worker.
        pid: u32,
    },
    /// The worker has ended and is not replaced: the disk reports `DEVICE_NEEDS_RESET` from now on.
    Gone {
        /// Manner of its end, as text.
        how: String,
    },
    /// The worker has ended. Its successor reports a disk with other facts, so it was killed, and
    /// none serves.
    OtherDisk {
        /// Manner of its end, as text.
        how: String,
    },
    /// The worker has ended, and the next one cannot be started.
    NoOther {
        /// Manner of its end, as text.
        how: String,
        /// Reason why the next one cannot be started.
        error: StartError,
    },
}

/// A disk whose worker serves requests, before the device is built.
pub struct Running {
    /// Configuration of the virtio device.
    pub config: BlkConfig,
    /// Facts of the disk as the worker reports them, validated.
    pub facts: BlkFacts,
    /// The memory shared with the worker.
    pub area: Area,
    /// Handle of the worker's process. Dropping it kills the worker, and waits for its end.
    pub process: Box<dyn WorkerProcess>,
}

impl Running {
    /// Returns the virtio device in front of the worker.
    ///
    /// # Errors
    /// The configuration does not fit this disk.
    pub fn into_device(self) -> Result<Caged, BlkError> {
        Caged::new(&self.config, self.facts, self.area, self.process)
    }
}

/// Starts the worker of `disk`, and waits until it serves.
///
/// The program is started as `PROGRAM device-worker --owner PID --block BYTES --id=TEXT
/// [--read-only] [--direct] [--unconfined] ARGUMENTS…`, without environment, and with a socket as
/// standard input. It calls [`serve`](crate::serve) with the [`Options`](crate::Options) that these
/// arguments give. `report` is called on the supervisor's thread, which waits for it to return.
///
/// # Errors
/// The worker does not start; its process has ended.
pub fn start(
    disk: WorkerDisk,
    config: WorkerConfig,
    report: impl FnMut(Report) + Send + 'static,
) -> Result<Running, StartError> {
    let device = disk.device;
    let new_eventfd = || {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        eventfd(0, flags).map_err(HostError::of("an eventfd"))
    };
    let shared = Arc::new(Shared {
        call: new_eventfd()?,
        kick: new_eventfd()?,
        state: Mutex::default(),
        has_events: AtomicBool::new(false),
        has_answered: AtomicBool::new(false),
    });
    let (tell, told) = sync_channel(1);
    let supervisor = Supervisor {
        shared: shared.clone(),
        disk,
        config,
        report: Box::new(report),
    };
    let thread = std::thread::Builder::new()
        .name("device-worker".into())
        .spawn(move || supervisor.run(tell))
        .map_err(HostError::of("a thread"))?;
    let link = Link {
        shared,
        thread: Some(thread),
    };
    let First { area, facts } = told.recv().map_err(|_| StartError::Thread)??;
    Ok(Running {
        config: device,
        facts,
        area,
        process: Box::new(link),
    })
}

/// A worker process that serves requests.
struct Started {
    child: Child,
    area: Area,
    facts: BlkFacts,
    confined: Confined,
}

/// Result of the first start, for the caller of [`start`].
struct First {
    area: Area,
    facts: BlkFacts,
}

/// State that the device and the supervisor's thread share.
#[derive(Default)]
struct State {
    events: VecDeque<WorkerEvent>,
    /// Handle of the worker's process, while there is one.
    pidfd: Option<OwnedFd>,
    /// The device is gone: no worker is started any more.
    is_final: bool,
    /// The device has killed the worker, so a new one is started even if `restarts` is false.
    is_replaced: bool,
}

struct Shared {
    /// Eventfds: `call` wakes the owner, `kick` wakes the worker.
    call: OwnedFd,
    kick: OwnedFd,
    state: Mutex<State>,
    /// `events` is not empty; written under the lock of `state`.
    has_events: AtomicBool,
    /// The worker has completed a request since it was started.
    has_answered: AtomicBool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    fn tell(&self, event: WorkerEvent) {
        let mut state = self.state();
        state.events.push_back(event);
        self.has_events.store(true, Ordering::Release);
        drop(state);
        signal(&self.call);
    }

    /// Kills the worker, if one runs.
    fn kill(state: &State) {
        if let Some(pidfd) = &state.pidfd {
            // An error means that it has ended already.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }
}

/// Signals an eventfd that the worker shares, and may have made blocking.
fn signal(eventfd: &OwnedFd) {
    // It cannot fail: this process made the eventfd.
    let _ = signal_eventfd(eventfd.as_fd());
}

/// The device's handle of the supervisor's thread.
struct Link {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl WorkerProcess for Link {
    fn kick(&mut self) {
        signal(&self.shared.kick);
    }

    fn wake_fd(&self) -> RawFd {
        self.shared.call.as_raw_fd()
    }

    fn drain(&mut self) {
        drain_eventfd(self.shared.call.as_fd());
    }

    fn has_events(&self) -> bool {
        self.shared.has_events.load(Ordering::Acquire)
    }

    fn next_event(&mut self) -> Option<WorkerEvent> {
        let mut state = self.shared.state();
        let event = state.events.pop_front();
        let has_more = !state.events.is_empty();
        self.shared.has_events.store(has_more, Ordering::Release);
        event
    }

    fn record_answer(&mut self) {
        if !self.shared.has_answered.load(Ordering::Relaxed) {
            self.shared.has_answered.store(true, Ordering::Relaxed);
        }
    }

    fn end(&mut self, is_final: bool) {
        let mut state = self.shared.state();
        state.is_final |= is_final;
        // A worker that has already ended is judged by its exit status.
        state.is_replaced |= state.pidfd.is_some();
        Shared::kill(&state);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end(true);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic, and waits for the process only.
            let _ = thread.join();
        }
    }
}

/// The thread that starts the worker and waits for its end.
struct Supervisor {
    shared: Arc<Shared>,
    disk: WorkerDisk,
    config: WorkerConfig,
    report: Box<dyn FnMut(Report) + Send>,
}

impl Supervisor {
    fn run(mut self, tell: SyncSender<Result<First, StartError>>) {
        let Started {
            mut child,
            area,
            facts,
            confined,
        } = match self.start() {
            Ok(started) => started,
            Err(error) => {
                let _ = tell.send(Err(error));
                return;
            }
        };
        let pid = child.id();
        (self.report)(Report::Started { pid, confined });
        // The caller of `start` waits for this. The `Link` that it builds ends the worker when
        // dropped.
        let _ = tell.send(Ok(First { area, facts }));
        let mut fruitless = 0;
        loop {
            let begun = Instant::now();
            let status = child.wait();
            let (is_final, is_replaced) = {
                let mut state = self.shared.state();
                state.pidfd = None;
                (state.is_final, std::mem::take(&mut state.is_replaced))
            };
            self.shared.tell(WorkerEvent::Ended);
            if is_final {
                return;
            }
            let how = status.map_or_else(|error| error.to_string(), how_ended);
            fruitless = match self.shared.has_answered.swap(false, Ordering::Relaxed) {
                true => 0,
                false => fruitless + 1,
            };
            let goes_on = is_replaced || (self.config.restarts && fruitless < MAX_FAILED_WORKERS);
            if !goes_on {
                (self.report)(Report::Gone { how });
                self.shared.tell(WorkerEvent::Gone);
                return;
            }
            // Bounds the number of processes a second; it waits for no event.
            std::thread::sleep(MIN_RESTART_INTERVAL.saturating_sub(begun.elapsed()));
            let started = match self.start() {
                Ok(started) if started.facts == facts => started,
                Ok(other) => {
                    self.discard(other.child);
                    (self.report)(Report::OtherDisk { how });
                    self.shared.tell(WorkerEvent::Gone);
                    return;
                }
                // The device has been dropped meanwhile.
                Err(_) if self.shared.state().is_final => return,
                Err(error) => {
                    (self.report)(Report::NoOther { how, error });
                    self.shared.tell(WorkerEvent::Gone);
                    return;
                }
            };
            child = started.child;
            let pid = child.id();
            (self.report)(Report::Replaced { how, pid });
            self.shared.tell(WorkerEvent::Started(started.area));
        }
    }

    /// Starts one worker, and waits until it serves requests.
    fn start(&self) -> Result<Started, StartError> {
        let shape = worker_shape(SLOTS).expect("an area may have as many slots");
        let area = Area::create(shape).map_err(StartError::Memory)?;
        let (ours, theirs) = UnixStream::pair().map_err(HostError::of("a socket pair"))?;
        let child = self.spawn(theirs.into())?;
        match self.begin(&child, &area, &ours) {
            Ok((facts, confined)) => Ok(Started {
                child,
                area,
                facts,
                confined,
            }),
            Err(error) => {
                self.discard(child);
                Err(error)
            }
        }
    }

    /// Starts the worker's program.
    fn spawn(&self, socket: OwnedFd) -> Result<Child, HostError> {
        let mut command = Command::new(&self.disk.program);
        command.arg("device-worker");
        command.args(["--owner", &std::process::id().to_string()]);
        command.args(["--block", &self.disk.device.logical_block.to_string()]);
        command.arg(format!("--id={}", self.disk.id));
        for (flag, is_set) in [
            ("--read-only", self.disk.read_only),
            ("--direct", self.disk.direct),
            ("--unconfined", self.config.is_unconfined),
        ] {
            if is_set {
                command.arg(flag);
            }
        }
        command.args(&self.disk.arguments);
        command.env_clear();
        command.stdin(Stdio::from(socket));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        // Own process group: signals of the terminal are for the machine only.
        command.process_group(0);
        let started = command.spawn();
        started.map_err(HostError::of("starting the device worker"))
    }

    /// Sends the worker its descriptors, and waits until it serves requests.
    fn begin(
        &self,
        child: &Child,
        area: &Area,
        socket: &UnixStream,
    ) -> Result<(BlkFacts, Confined), StartError> {
        let ready = eventfd(0, EventfdFlags::CLOEXEC).map_err(HostError::of("an eventfd"))?;
        let Shared { kick, call, .. } = &*self.shared;
        let image = self.disk.file.as_fd();
        let given = [
            area.file(),
            kick.as_fd(),
            call.as_fd(),
            ready.as_fd(),
            image,
        ];
        let sent = descriptors::send(socket.as_fd(), given);
        sent.map_err(HostError::of("sending its descriptors"))?;
        self.wait_ready(child, area, &ready)
    }

    /// Kills a worker that is not to serve requests.
    fn discard(&self, mut child: Child) {
        let _ = child.kill();
        let _ = child.wait();
        self.shared.state().pidfd = None;
    }

    /// Waits until the worker reports that it is ready or has failed, or has ended.
    fn wait_ready(
        &self,
        child: &Child,
        area: &Area,
        ready: &OwnedFd,
    ) -> Result<(BlkFacts, Confined), StartError> {
        let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty());
        let pidfd = pidfd.map_err(HostError::of("pidfd_open"))?;
        {
            let own = pidfd.try_clone().map_err(HostError::of("a descriptor"))?;
            let mut state = self.shared.state();
            state.pidfd = Some(own);
            if state.is_final {
                Shared::kill(&state);
            }
        }
        let deadline = Instant::now() + START_LIMIT;
        loop {
            // The worker's end is polled before its report is read, so that a report made before
            // the end is not missed.
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).expect("no more than the limit");
            let mut fds = [
                PollFd::new(&pidfd, PollFlags::IN),
                PollFd::new(ready, PollFlags::IN),
            ];
            match poll(&mut fds, Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(HostError::of("poll")(error).into()),
            }
            let has_ended = !fds[0].revents().is_empty();
            match area.start() {
                Start::Ready(facts) => {
                    let [capacity, alignment, discard, bits, ..] = facts;
                    let disk = BlkFacts::from_words([capacity, alignment, discard, bits])?;
                    return Ok((disk, Confined::of(&facts)));
                }
                Start::Failed(why) => return Err(StartError::Reported(why)),
                Start::Waiting if has_ended => return Err(StartError::Ended),
                Start::Waiting if left.is_zero() => return Err(StartError::NotReady),
                // EINTR, or a word that no correct worker writes: the worker's end or the time
                // limit follows.
                Start::Waiting => {}
            }
        }
    }
}

/// Returns the manner in which a process has ended, as text.
fn how_ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(libc::SIGSYS), _) => "it made a system call that it may not".into(),
        (Some(signal), _) => format!("by signal {signal}"),
        (None, Some(code)) => format!("with status {code}"),
        (None, None) => status.to_string(),
    }
}
