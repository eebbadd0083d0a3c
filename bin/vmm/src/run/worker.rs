//! A disk whose device model is a process of its own (`--disk …,worker=on`): starting that process,
//! watching it, and starting it again.
//!
//! One thread for each worker starts it and waits for its end; the device, on its sidecore, hears
//! of both by events and an eventfd, and asks for the end by a signal. The kernel kills the worker
//! when that thread dies, so it outlives no owner, however that ends.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
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

use anyhow::{Context, Result, bail};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use sidecore::{drain_eventfd, signal_eventfd};
use vio::blk::{BlkConfig, BlkFacts, worker_shape};
use vio::caged::{Area, Caged, WorkerEvent, WorkerProcess};
use worker_area::Start;

use crate::device_worker::{Confined, descriptors};
use crate::messages::say;

/// Requests in flight of one disk.
const SLOTS: u32 = 128;
/// Time in which a worker has to be ready.
const START_LIMIT: Duration = Duration::from_secs(10);
/// Least time between two starts, so that a request that ends each worker costs the host no more
/// than ten processes a second.
const LEAST_LIFE: Duration = Duration::from_millis(100);
/// Workers in a row that end before they have answered anything, after which there is no other.
const MOST_FRUITLESS: u32 = 3;

/// How a disk's worker is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// It goes without a filter of system calls.
    pub is_unconfined: bool,
    /// Another one takes its place when it dies.
    pub restarts: bool,
}

impl WorkerConfig {
    /// Reads the values of `worker` and `on-death`; `None`: the disk has none.
    ///
    /// # Errors
    /// Names the key and what it may be.
    pub fn check(worker: Option<&str>, on_death: Option<&str>) -> Result<Option<Self>> {
        let is_unconfined = match worker {
            None | Some("off") if on_death.is_some() => bail!("on-death is for worker=on"),
            None | Some("off") => return Ok(None),
            Some("on") => false,
            Some("unconfined") => true,
            Some(other) => bail!("worker is on, off or unconfined, not {other:?}"),
        };
        let restarts = match on_death {
            None | Some("restart") => true,
            Some("fail") => false,
            Some(other) => bail!("on-death is restart or fail, not {other:?}"),
        };
        Ok(Some(Self {
            is_unconfined,
            restarts,
        }))
    }
}

/// A disk that a worker serves.
#[derive(Debug)]
pub struct WorkerDisk {
    /// The program that has the subcommand `device-worker`.
    pub program: PathBuf,
    /// Name of the disk, for messages.
    pub name: String,
    /// Its file, open for what the disk is to do, and locked.
    pub file: File,
    /// The guest may not write.
    pub read_only: bool,
    /// The file passes the host's page cache by.
    pub direct: bool,
    /// Serial number, at most 20 bytes of ASCII.
    pub id: String,
    /// Block size, queues.
    pub device: BlkConfig,
}

/// Starts the worker of `disk`, and makes the device of it.
///
/// # Errors
/// The worker cannot start, or its disk is none.
pub fn start(disk: WorkerDisk, config: WorkerConfig) -> Result<Caged> {
    let device = disk.device;
    let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("an eventfd")?;
    let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("an eventfd")?;
    let shared = Arc::new(Shared {
        call,
        kick,
        state: Mutex::default(),
        has_events: AtomicBool::new(false),
        has_answered: AtomicBool::new(false),
    });
    let (tell, told) = sync_channel(1);
    let supervisor = Supervisor {
        shared: shared.clone(),
        disk,
        config,
    };
    let thread = std::thread::Builder::new()
        .name("device-worker".into())
        .spawn(move || supervisor.run(tell))
        .context("a thread")?;
    let link = Link {
        shared,
        thread: Some(thread),
    };
    let first = told.recv().context("the worker's thread has ended")??;
    Ok(Caged::new(
        &device,
        first.facts,
        first.area,
        Box::new(link),
    )?)
}

/// A worker that serves.
struct Started {
    child: Child,
    area: Area,
    facts: BlkFacts,
    confined: Confined,
}

/// What the first start tells the machine's builder.
struct First {
    area: Area,
    facts: BlkFacts,
}

/// State that the device and the supervisor share.
#[derive(Default)]
struct State {
    events: VecDeque<WorkerEvent>,
    /// The worker's process, while there is one.
    pidfd: Option<OwnedFd>,
    /// There is to be no other.
    is_final: bool,
    /// The device has ended it, so another one is wanted whatever is said of deaths.
    is_replaced: bool,
}

struct Shared {
    /// Wakes the owner; wakes the worker.
    call: OwnedFd,
    kick: OwnedFd,
    state: Mutex<State>,
    /// Whether there are events; written under the lock.
    has_events: AtomicBool,
    /// The worker has answered something since it was started.
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

    /// Kills the worker, if there is one.
    fn kill(state: &State) {
        if let Some(pidfd) = &state.pidfd {
            // One that has ended is gone.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }
}

/// Signals an eventfd that the worker has as well, and may have made blocking.
fn signal(eventfd: &OwnedFd) {
    // It is an eventfd: this process made it.
    let _ = signal_eventfd(eventfd.as_fd());
}

/// The device's side.
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

    fn has_answered(&mut self) {
        if !self.shared.has_answered.load(Ordering::Relaxed) {
            self.shared.has_answered.store(true, Ordering::Relaxed);
        }
    }

    fn end(&mut self, is_final: bool) {
        let mut state = self.shared.state();
        state.is_final |= is_final;
        // One that has ended by itself is judged by that.
        state.is_replaced |= state.pidfd.is_some();
        Shared::kill(&state);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.end(true);
        if let Some(thread) = self.thread.take() {
            // It panics at nothing, and waits for the process alone.
            let _ = thread.join();
        }
    }
}

/// The thread that starts the worker and waits for its end.
struct Supervisor {
    shared: Arc<Shared>,
    disk: WorkerDisk,
    config: WorkerConfig,
}

impl Supervisor {
    fn run(self, tell: SyncSender<Result<First>>) {
        let name = self.disk.name.clone();
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
        say_how_confined(&name, &confined);
        // The machine's builder waits for it; the link that it makes of it ends the worker.
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
            let goes_on = is_replaced || (self.config.restarts && fruitless < MOST_FRUITLESS);
            if !goes_on {
                say!(
                    "disk {name}: its worker has ended ({how}), and the disk needs a reset for ever"
                );
                self.shared.tell(WorkerEvent::Gone);
                return;
            }
            // The bound on processes a second, not a wait for anything.
            std::thread::sleep(LEAST_LIFE.saturating_sub(begun.elapsed()));
            let started = match self.start() {
                Ok(started) if started.facts == facts => started,
                Ok(other) => {
                    self.discard(other.child);
                    say!(
                        "disk {name}: its worker has ended ({how}), and the next one shows another disk"
                    );
                    self.shared.tell(WorkerEvent::Gone);
                    return;
                }
                // The machine has ended meanwhile.
                Err(_) if self.shared.state().is_final => return,
                Err(error) => {
                    say!(
                        "disk {name}: its worker has ended ({how}), and no other starts: {error:#}"
                    );
                    self.shared.tell(WorkerEvent::Gone);
                    return;
                }
            };
            tracing::warn!("disk {name}: its worker has ended ({how}); another one goes on");
            child = started.child;
            self.shared.tell(WorkerEvent::Started(started.area));
        }
    }

    /// Starts one worker, and waits until it serves.
    fn start(&self) -> Result<Started> {
        let area = Area::create(worker_shape(SLOTS)?).context("the worker's memory")?;
        let (ours, theirs) = UnixStream::pair().context("a socket pair")?;
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
        command.env_clear();
        command.stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        // Signals of the terminal are the machine's.
        command.process_group(0);
        let child = command.spawn().context("starting the device worker")?;
        drop(command);
        let ready = eventfd(0, EventfdFlags::CLOEXEC).context("an eventfd")?;
        let Shared { kick, call, .. } = &*self.shared;
        let image = self.disk.file.as_fd();
        let given = [
            area.file(),
            kick.as_fd(),
            call.as_fd(),
            ready.as_fd(),
            image,
        ];
        let sent = descriptors::send(ours.as_fd(), given).context("sending its descriptors");
        let begun = sent.and_then(|()| self.wait_ready(&child, &area, &ready));
        match begun {
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

    /// Ends a worker that is not to serve.
    fn discard(&self, mut child: Child) {
        let _ = child.kill();
        let _ = child.wait();
        self.shared.state().pidfd = None;
    }

    /// Waits until the worker says that it serves, or has ended.
    fn wait_ready(
        &self,
        child: &Child,
        area: &Area,
        ready: &OwnedFd,
    ) -> Result<(BlkFacts, Confined)> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.context("the worker's process")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
        {
            let mut state = self.shared.state();
            state.pidfd = Some(pidfd.try_clone().context("a descriptor")?);
            if state.is_final {
                Shared::kill(&state);
            }
        }
        let deadline = Instant::now() + START_LIMIT;
        loop {
            // Of the end first: what it said before is there then.
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).context("a time")?;
            let mut fds = [
                PollFd::new(&pidfd, PollFlags::IN),
                PollFd::new(ready, PollFlags::IN),
            ];
            match poll(&mut fds, Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error)).context("poll"),
            }
            let has_ended = !fds[0].revents().is_empty();
            match area.start() {
                Start::Ready(facts) => {
                    let [capacity, alignment, discard, bits, ..] = facts;
                    let disk = BlkFacts::from_words([capacity, alignment, discard, bits])?;
                    return Ok((disk, Confined::of(&facts)));
                }
                Start::Failed(why) => {
                    bail!(
                        "the device worker cannot start: {why} (worker=unconfined goes without a filter of system calls, worker=off without a worker)"
                    )
                }
                Start::Waiting if has_ended => bail!("the device worker has ended at its start"),
                Start::Waiting if left.is_zero() => {
                    bail!(
                        "the device worker is not ready after {} s",
                        START_LIMIT.as_secs()
                    )
                }
                // The end of a process is told before what it wrote is looked at once more.
                Start::Waiting => {}
            }
        }
    }
}

/// Says which part of its confinement a worker goes without.
fn say_how_confined(name: &str, confined: &Confined) {
    if confined.namespaces != 0 {
        let errno = i32::try_from(confined.namespaces).unwrap_or(libc::EIO);
        let error = io::Error::from_raw_os_error(errno);
        say!("disk {name}: its worker is in the host's namespaces: {error}");
    }
    if confined.calls == 0 {
        say!("disk {name}: its worker may make any system call");
    }
}

/// How a process has ended, in words.
fn how_ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(libc::SIGSYS), _) => "it made a system call that it may not".into(),
        (Some(signal), _) => format!("by signal {signal}"),
        (None, Some(code)) => format!("with status {code}"),
        (None, None) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_of_worker_and_on_death_is_read() {
        let check = |worker, on_death| {
            WorkerConfig::check(worker, on_death).map_err(|error| error.to_string())
        };
        let on = |is_unconfined, restarts| {
            Ok(Some(WorkerConfig {
                is_unconfined,
                restarts,
            }))
        };
        assert_eq!(check(None, None), Ok(None));
        assert_eq!(check(Some("off"), None), Ok(None));
        assert_eq!(check(Some("on"), None), on(false, true));
        assert_eq!(check(Some("on"), Some("restart")), on(false, true));
        assert_eq!(check(Some("unconfined"), Some("fail")), on(true, false));
        assert_eq!(
            check(None, Some("fail")),
            Err("on-death is for worker=on".into())
        );
        assert!(
            check(Some("yes"), None)
                .unwrap_err()
                .contains("on, off or unconfined")
        );
        assert!(
            check(Some("on"), Some("ignore"))
                .unwrap_err()
                .contains("restart or fail")
        );
    }
}
