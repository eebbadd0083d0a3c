//! A running lab: starts QEMU, runs programs inside, copies files, detects its death.
//!
//! Threads: one reads frames and routes them by request number; one reads QEMU's standard output
//! (the emulated host's console), one its standard error; both feed [`Tail`]. All of [`Lab`]'s
//! methods take `&self`, so several threads may run programs in one lab at the same time.
//!
//! QEMU never outlives this process: a small shell between us holds the other end of a pipe and
//! kills QEMU when that pipe closes, whatever ended this process.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::agent::NO_PORT;
use crate::packages::{Packages, unique};
use crate::patience::Limit;
use crate::protocol::{Frame, MAX_PAYLOAD, Message};
use crate::qemu::Scratch;
use crate::{LabConfig, LabError, guest_module, host_image};

mod command;
mod tail;

pub use command::{LabCommand, Output, Running, Stream};
use tail::Tail;

/// Runs QEMU ("$@") and kills it as soon as descriptor 3, our pipe, closes.
const KEEPER: &str = r#"exec 3<&0 </dev/null
"$@" & qemu=$!
( read -r _ <&3; kill -9 $qemu ) >/dev/null 2>&1 & watch=$!
exec 3<&-
wait $qemu 2>/dev/null; status=$?
kill $watch 2>/dev/null
exit $status"#;

/// Time limit of programs, unless [`LabCommand::timeout`] sets another.
pub(crate) const DEFAULT_LIMIT: Duration = Duration::from_secs(300);

/// Number of times that the emulated host is started if the [emulator's own](emulators_own) faults
/// end it.
const STARTS: u32 = 3;

/// Longest time between two frames of a file.
const FILE_LIMIT: Duration = Duration::from_secs(60);

/// A running emulated host.
#[derive(Debug)]
pub struct Lab {
    shared: Arc<Shared>,
    /// Shell that runs QEMU; it is stopped by closing its standard input.
    keeper: Child,
    tty: Option<UnixStream>,
    start_up: Duration,
    boot: Duration,
}

/// State shared by the threads. Lock order: none is held while another is taken.
#[derive(Debug)]
struct Shared {
    wire: Mutex<UnixStream>,
    /// Receivers of answers, by request number; `None` once the lab is dead.
    routes: Mutex<Option<HashMap<u32, Sender<Message>>>>,
    console: Arc<Tail>,
    next_id: AtomicU32,
}

/// Returns the error that ended the emulated host's start, if it is the emulator's own: no work of
/// the lab runs by then. Seen: a panic with QEMU 7.2, once in thousands of starts, and with 10.0
/// its assertion that a memory section named by a translation buffer exists, in two consecutive
/// starts; and a virtio console without its ports, see [`crate::agent`].
fn emulators_own(error: &LabError) -> Option<&'static str> {
    let LabError::Died { console, .. } = error else {
        return None;
    };
    if console.contains("Assertion `") {
        Some("QEMU failed an assertion of its own")
    } else if console.contains("panic") {
        Some("the kernel panicked")
    } else if console.contains(NO_PORT) {
        Some("the agent's port did not appear")
    } else {
        None
    }
}

/// Answers to one request.
#[derive(Debug)]
struct Route {
    id: u32,
    answers: Receiver<Message>,
}

impl Lab {
    /// Starts an emulated host and waits until it accepts commands. A first start fetches Debian
    /// packages (a minute or so); lines about that go to standard error.
    ///
    /// # Errors
    /// [`LabError::Config`], [`LabError::Package`] and [`LabError::Build`] before anything started;
    /// [`LabError::Died`] or [`LabError::Timeout`] with the console's last lines afterwards.
    pub fn start(config: &LabConfig) -> Result<Self, LabError> {
        config.check()?;
        let begin = Instant::now();
        let notice = |line: &str| eprintln!("lab: {line}");
        let packages = Packages::get(&config.needs, &notice)?;
        if let Some(warning) = packages.warning() {
            eprintln!("lab: {warning}");
        }
        let module = config
            .guest_module
            .as_ref()
            .map(|sources| guest_module::build(sources, packages.guest(), &notice))
            .transpose()?;
        let image = host_image::build(&packages, config, module.as_ref())?;
        let mut attempts = 0;
        loop {
            attempts += 1;
            let boot = Instant::now();
            let error = match Self::boot(config, &packages, &image) {
                Ok(mut lab) => {
                    lab.boot = boot.elapsed();
                    lab.copy_files(config)?;
                    lab.start_up = begin.elapsed();
                    return Ok(lab);
                }
                Err(error) => error,
            };
            match emulators_own(&error) {
                Some(why) if attempts < STARTS => {
                    eprintln!("lab: {why} while the emulated host started; starting it once more");
                }
                _ => return Err(error),
            }
        }
    }

    fn boot(
        config: &LabConfig,
        packages: &Packages,
        image: &crate::cpio::Archive,
    ) -> Result<Self, LabError> {
        // Short, because a socket's path has at most 107 bytes.
        let dir = std::env::temp_dir().join(format!("exitless-lab-{}", unique()));
        fs::create_dir(&dir).map_err(LabError::host("create", &dir))?;
        let scratch = Scratch(dir);
        let initrd = scratch.initrd();
        File::create(&initrd)
            .map(io::BufWriter::new)
            .and_then(|mut out| image.write(&mut out).and_then(|()| out.flush()))
            .map_err(LabError::host("write", &initrd))?;
        let listen = |path: PathBuf| {
            UnixListener::bind(&path)
                .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
                .map_err(LabError::host("listen on", path))
        };
        let (control, tty) = (listen(scratch.control())?, listen(scratch.tty())?);

        let (program, args, environment) = packages.qemu();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", KEEPER, "sh"]).arg(&program).args(args);
        command
            .args(config.qemu_args(
                &packages.host().vmlinux(),
                &scratch,
                packages.delivers_interrupts_once(),
            ))
            .envs(environment);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut keeper = command.spawn().map_err(LabError::host("start", &program))?;
        let console = Arc::new(Tail::new(config.verbose));
        console.follow(keeper.stdout.take().expect("stdout was piped"));
        console.follow(keeper.stderr.take().expect("stderr was piped"));

        let mut start = Start {
            keeper,
            console,
            limit: Limit::new(config.start_limit),
            whole: config.start_limit,
        };
        let connected = start
            .accept(&control)
            .and_then(|c| start.accept(&tty).map(|t| (c, t)));
        let (wire, tty) = match connected {
            Ok(streams) => streams,
            Err(error) => return Err(start.abandon(error)),
        };
        let shared = Arc::new(Shared {
            wire: Mutex::new(wire),
            routes: Mutex::new(Some(HashMap::new())),
            console: start.console,
            next_id: AtomicU32::new(1),
        });
        let hello = shared.route_as(0)?;
        shared.clone().read_frames()?;
        let (start_up, boot) = (Duration::ZERO, Duration::ZERO);
        let lab = Self {
            shared,
            keeper: start.keeper,
            tty: Some(tty),
            start_up,
            boot,
        };
        let limit = (&mut start.limit, config.start_limit);
        lab.shared.answer_within(&hello, limit, "it starts")?;
        Ok(lab)
    }

    /// Copies files that are not in the image: unpacking them from there would take memory twice,
    /// and an emulated processor's time.
    fn copy_files(&self, config: &LabConfig) -> Result<(), LabError> {
        let files = config.files.iter();
        for (host, inside) in files.filter(|(host, _)| !host_image::is_program(host)) {
            self.push(host, inside)?;
        }
        Ok(())
    }

    /// Returns the time of the whole start, images included.
    #[must_use]
    pub fn start_up(&self) -> Duration {
        self.start_up
    }

    /// Returns the time from QEMU's start to the agent's greeting.
    #[must_use]
    pub fn boot_time(&self) -> Duration {
        self.boot
    }

    /// Runs `exitless ARGS` inside, for at most 300 s.
    ///
    /// # Errors
    /// See [`LabCommand::output`].
    pub fn run<I, S>(&self, args: I) -> Result<Output, LabError>
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        self.exec("/bin/exitless", args)
    }

    /// Runs a program inside, for at most 300 s.
    ///
    /// # Errors
    /// See [`LabCommand::output`].
    pub fn exec<I, S>(&self, program: &str, args: I) -> Result<Output, LabError>
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        self.command(program).args(args).output()
    }

    /// Prepares a program to run inside, with environment, input, limit or live output.
    #[must_use]
    pub fn command<'a>(&'a self, program: &str) -> LabCommand<'a> {
        LabCommand::new(self, program)
    }

    /// Returns the lab's interactive terminal, for a command started with
    /// [`LabCommand::on_terminal`]; it can be taken once.
    pub fn take_terminal(&mut self) -> Option<UnixStream> {
        self.tty.take()
    }

    /// Returns the last lines of the emulated host's console.
    #[must_use]
    pub fn console(&self) -> String {
        self.shared.console.text()
    }

    /// Copies a file of this machine into the lab, with its permissions.
    ///
    /// # Errors
    /// A file that cannot be read here or written there; a dead lab.
    pub fn push(&self, host: impl AsRef<Path>, inside: &str) -> Result<(), LabError> {
        let host = host.as_ref();
        let mut file = File::open(host).map_err(LabError::host("open", host))?;
        let mode = file
            .metadata()
            .map_err(LabError::host("read", host))?
            .permissions()
            .mode();
        self.push_from(&mut file, inside, mode & 0o777)
            .map_err(|error| match error {
                PushError::Read(source) => LabError::Host {
                    action: "read",
                    path: host.to_path_buf(),
                    source,
                },
                PushError::Lab(error) => error,
            })
    }

    /// Writes these bytes to a file in the lab.
    ///
    /// # Errors
    /// A path that cannot be written; a dead lab.
    pub fn push_bytes(&self, data: &[u8], inside: &str, mode: u32) -> Result<(), LabError> {
        self.push_from(&mut &*data, inside, mode)
            .map_err(|error| match error {
                PushError::Read(source) => unreachable!("reading memory failed: {source}"),
                PushError::Lab(error) => error,
            })
    }

    fn push_from(&self, data: &mut impl Read, inside: &str, mode: u32) -> Result<(), PushError> {
        let route = self.shared.route()?;
        let path = inside.to_owned();
        self.shared.send(route.id, Message::Push { path, mode })?;
        let mut buffer = vec![0; MAX_PAYLOAD];
        loop {
            let count = data.read(&mut buffer).map_err(PushError::Read)?;
            self.shared
                .send(route.id, Message::Data(buffer[..count].to_vec()))?;
            if count == 0 {
                break;
            }
        }
        self.shared.answer(&route, FILE_LIMIT, "a file is copied")?;
        Ok(())
    }

    /// Copies a file of the lab to this machine.
    ///
    /// # Errors
    /// A file that does not exist there or cannot be written here; a dead lab.
    pub fn pull(&self, inside: &str, host: impl AsRef<Path>) -> Result<(), LabError> {
        let host = host.as_ref();
        let data = self.pull_bytes(inside)?;
        fs::write(host, data).map_err(LabError::host("write", host))
    }

    /// Returns the contents of a file of the lab.
    ///
    /// # Errors
    /// A file that does not exist or cannot be read; a dead lab.
    pub fn pull_bytes(&self, inside: &str) -> Result<Vec<u8>, LabError> {
        let route = self.shared.route()?;
        self.shared
            .send(route.id, Message::Pull(inside.to_owned()))?;
        let mut contents = Vec::new();
        loop {
            match self.shared.answer(&route, FILE_LIMIT, "a file is copied")? {
                Message::Data(data) if data.is_empty() => return Ok(contents),
                Message::Data(data) => contents.extend_from_slice(&data),
                other => return Err(LabError::Inside(format!("unexpected answer {other:?}"))),
            }
        }
    }

    /// Powers the emulated host off and waits for its end.
    ///
    /// # Errors
    /// [`LabError::Timeout`] when it did not end within 10 s and had to be killed.
    pub fn shutdown(mut self) -> Result<(), LabError> {
        // A lab that died already needs no message.
        let _ = self.shared.send(0, Message::Shutdown);
        let mut limit = Limit::new(Duration::from_secs(10));
        while limit.step().is_some() {
            if !matches!(self.keeper.try_wait(), Ok(None)) {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Err(self.shared.timeout("its shutdown", Duration::from_secs(10)))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Closing the pipe kills QEMU; waiting leaves no zombie.
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// A QEMU that has not connected yet.
struct Start {
    keeper: Child,
    console: Arc<Tail>,
    limit: Limit,
    /// Limit at the beginning.
    whole: Duration,
}

impl Start {
    /// Waits for QEMU to connect; it may also end, or hang.
    fn accept(&mut self, listener: &UnixListener) -> Result<UnixStream, LabError> {
        let during = || "it starts".to_owned();
        let here = LabError::host("accept from", "QEMU");
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(here)?;
                    return Ok(stream);
                }
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(here(e)),
                Err(_) => {}
            }
            if !matches!(self.keeper.try_wait(), Ok(None)) {
                self.console.wait_for_end(Duration::from_secs(1));
                return Err(LabError::Died {
                    during: during(),
                    console: self.console.text(),
                });
            }
            if self.limit.step().is_none() {
                let console = self.console.text();
                return Err(LabError::Timeout {
                    during: during(),
                    seconds: self.whole.as_secs(),
                    console,
                });
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn abandon(mut self, error: LabError) -> LabError {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
        error
    }
}

enum PushError {
    Read(io::Error),
    Lab(LabError),
}

impl From<LabError> for PushError {
    fn from(error: LabError) -> Self {
        Self::Lab(error)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves its value whole, even if it panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn route(&self) -> Result<Route, LabError> {
        self.route_as(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn route_as(&self, id: u32) -> Result<Route, LabError> {
        let (sender, answers) = mpsc::channel();
        match locked(&self.routes).as_mut() {
            Some(routes) => routes.insert(id, sender),
            None => return Err(self.died("it was idle")),
        };
        Ok(Route { id, answers })
    }

    fn send(&self, id: u32, message: Message) -> Result<(), LabError> {
        let sent = Frame::new(id, message).write(&mut *locked(&self.wire));
        sent.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => LabError::Config(format!("request too long: {error}")),
            _ => self.died("a request was sent"),
        })
    }

    /// Returns the next answer of a route; a refusal is an error.
    fn answer(&self, route: &Route, limit: Duration, during: &str) -> Result<Message, LabError> {
        self.answer_within(route, (&mut Limit::new(limit), limit), during)
    }

    /// Returns the same within the rest of a limit; the whole limit is for the error.
    fn answer_within(
        &self,
        route: &Route,
        (left, whole): (&mut Limit, Duration),
        during: &str,
    ) -> Result<Message, LabError> {
        loop {
            // An answer that is already in the channel is not late.
            let wait = left.step();
            return match route.answers.recv_timeout(wait.unwrap_or_default()) {
                Ok(Message::Refused(reason)) => Err(LabError::Inside(reason)),
                Ok(message) => Ok(message),
                Err(RecvTimeoutError::Timeout) if wait.is_some() => continue,
                Err(RecvTimeoutError::Timeout) => Err(self.timeout(during, whole)),
                Err(RecvTimeoutError::Disconnected) => Err(self.died(during)),
            };
        }
    }

    fn died(&self, during: &str) -> LabError {
        // The end of the console's output may still be on its way.
        self.console.wait_for_end(Duration::from_secs(2));
        LabError::Died {
            during: during.to_owned(),
            console: self.console.text(),
        }
    }

    fn timeout(&self, during: &str, limit: Duration) -> LabError {
        let (during, console) = (during.to_owned(), self.console.text());
        LabError::Timeout {
            during,
            seconds: limit.as_secs(),
            console,
        }
    }

    /// Starts the thread that routes answers until the lab ends.
    fn read_frames(self: Arc<Self>) -> Result<(), LabError> {
        let here = LabError::host("read from", "QEMU");
        let mut wire = locked(&self.wire).try_clone().map_err(&here)?;
        let reader = thread::Builder::new().name("lab-frames".into());
        reader
            .spawn(move || {
                while let Ok(Some(Frame { id, message })) = Frame::read(&mut wire) {
                    let mut routes = locked(&self.routes);
                    let Some(routes) = routes.as_mut() else { break };
                    let last = matches!(message, Message::Exit(_) | Message::Done);
                    // A requester that no longer waits does not need its answers.
                    let lost = routes
                        .get(&id)
                        .is_some_and(|route| route.send(message).is_err());
                    if last || lost {
                        routes.remove(&id);
                    }
                }
                // Dropping the senders ends every wait.
                *locked(&self.routes) = None;
            })
            .map_err(here)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_the_emulator_ended_is_worth_another_and_no_other_is() {
        let died = |console: &str| LabError::Died {
            during: "it starts".into(),
            console: console.into(),
        };
        let assertion = "qemu-system-x86_64: system/physmem.c:2678: iotlb_to_section: Assertion \
             `section_index < d->map.sections_nb' failed.";
        assert!(emulators_own(&died(assertion)).is_some_and(|why| why.contains("assertion")));
        let panic = "Kernel panic - not syncing: Attempted to kill init!";
        assert!(emulators_own(&died(panic)).is_some_and(|why| why.contains("panicked")));
        let port = "lab-agent: no control port after 20s";
        assert!(emulators_own(&died(port)).is_some_and(|why| why.contains("port")));
        assert_eq!(emulators_own(&died("-m 2048: no such option")), None);
        assert_eq!(emulators_own(&LabError::Inside(panic.into())), None);
    }

    /// The error of an expired limit names the limit.
    #[test]
    fn a_qemu_that_never_connects_ran_out_of_its_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("socket")).expect("a socket");
        listener.set_nonblocking(true).expect("a flag");
        let mut keeper = Command::new("/bin/sh");
        keeper.args(["-c", "read line"]);
        let keeper = keeper.stdin(Stdio::piped()).spawn().expect("a shell");
        let mut start = Start {
            keeper,
            console: Arc::new(Tail::new(false)),
            limit: Limit::new(Duration::from_millis(1)),
            whole: Duration::from_secs(90),
        };
        let error = start.accept(&listener).expect_err("nobody connects");
        let text = start.abandon(error).to_string();
        assert!(text.starts_with("it starts: no end after 90 s"), "{text}");
    }
}
