//! The agent: starts programs and moves files inside the emulated host, on request.
//!
//! Started by the image's `/init` ([`crate::host_image`]) as the only other long-lived process. It
//! owns the virtio-serial port [`PORT`]. One thread reads frames and never blocks on a program;
//! each program has a thread per pipe and one that waits. When the host's end closes, because it is
//! done or was killed, the agent returns and `/init` powers the emulated host off.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::protocol::{Frame, Message, Spawn};

/// Name of the virtio-serial port.
pub const PORT: &str = "exitless.control";

/// Beginning of the error where that does not appear.
pub(crate) const NO_PORT: &str = "no control port";

/// The interactive terminal, a virtio console.
const TTY: &str = "/dev/hvc0";

/// Where programs start when the request names no directory.
const HOME: &str = "/root";

/// Bytes read from a pipe or file at a time.
const CHUNK: usize = 1 << 16;

/// Serves requests until the host closes the port or asks for shutdown.
///
/// # Errors
/// The port does not appear within 20 s, or fails.
pub fn serve() -> io::Result<()> {
    let port = OpenOptions::new()
        .read(true)
        .write(true)
        .open(find_port()?)?;
    let wire = Wire(Arc::new(Mutex::new(port.try_clone()?)));
    let mut input = Patient {
        port,
        connected: false,
    };
    wire.send(0, Message::Hello)?;
    let mut agent = Agent {
        wire,
        programs: HashMap::new(),
        incoming: HashMap::new(),
    };
    while let Some(frame) = Frame::read(&mut input)? {
        if frame.message == Message::Shutdown {
            break;
        }
        agent.handle(frame)?;
    }
    Ok(())
}

/// Returns the device of [`PORT`], which the driver creates some time after its module was loaded.
///
/// On a loaded machine the port was seen not to appear at all, three times in some hundreds of
/// starts; binding its driver again did not help, and the reason is not known. The console says how
/// far the driver has come, and the lab starts the emulated host once more.
fn find_port() -> io::Result<PathBuf> {
    const LIMIT: Duration = Duration::from_secs(20);
    let deadline = Instant::now() + LIMIT;
    while Instant::now() < deadline {
        if let Some(device) = look_for_port() {
            return Ok(device);
        }
        thread::sleep(Duration::from_millis(5));
    }
    say_ports();
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("{NO_PORT} after {LIMIT:?}"),
    ))
}

/// Prints the ports that there are, with their names, and the interrupts of virtio devices.
fn say_ports() {
    for entry in fs::read_dir("/sys/class/virtio-ports")
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = fs::read_to_string(entry.path().join("name"));
        let device = Path::new("/dev").join(entry.file_name());
        let exists = device.exists();
        eprintln!(
            "lab-agent: {}: name {name:?}, exists {exists}",
            device.display()
        );
    }
    let interrupts = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    for line in interrupts.lines().filter(|line| line.contains("virtio")) {
        eprintln!("lab-agent: {line}");
    }
}

fn look_for_port() -> Option<PathBuf> {
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    ports.flatten().find_map(|entry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        let device = Path::new("/dev").join(entry.file_name());
        (name.trim() == PORT && device.exists()).then_some(device)
    })
}

/// Reads the port. Before the driver has heard that the host's end is open, a read returns nothing;
/// only after the first byte does nothing mean the end.
struct Patient {
    port: File,
    connected: bool,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let count = self.port.read(buffer)?;
            if count > 0 {
                self.connected = true;
            }
            if count > 0 || self.connected || Instant::now() > deadline {
                return Ok(count);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The port's sending side, shared by all threads; a frame goes out whole.
#[derive(Clone)]
struct Wire(Arc<Mutex<File>>);

impl Wire {
    fn send(&self, id: u32, message: Message) -> io::Result<()> {
        let mut port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Frame::new(id, message).write(&mut *port)
    }
}

struct Agent {
    wire: Wire,
    programs: HashMap<u32, Program>,
    incoming: HashMap<u32, Incoming>,
}

struct Program {
    group: u32,
    stdin: Option<Sender<Vec<u8>>>,
}

struct Incoming {
    path: PathBuf,
    file: File,
}

impl Agent {
    fn handle(&mut self, Frame { id, message }: Frame) -> io::Result<()> {
        match message {
            Message::Spawn(spawn) => match start(&spawn) {
                Ok(child) => {
                    let program = follow(id, child, &self.wire);
                    self.programs.insert(id, program);
                    Ok(())
                }
                Err(error) => {
                    let what = spawn.argv.first().cloned().unwrap_or_default();
                    self.wire.send(
                        id,
                        Message::Refused(format!("cannot start {what}: {error}")),
                    )
                }
            },
            Message::Stdin(data) => {
                if let Some(program) = self.programs.get_mut(&id) {
                    if data.is_empty() {
                        program.stdin = None;
                    } else if let Some(stdin) = &program.stdin {
                        // A program that closed its input does not want the rest.
                        let _ = stdin.send(data);
                    }
                }
                Ok(())
            }
            Message::Signal(signal) => {
                if let Some(program) = self.programs.get(&id) {
                    kill_group(program.group, signal);
                }
                Ok(())
            }
            Message::Push { path, mode } => {
                let created = create(Path::new(&path), mode);
                self.answer_push(id, PathBuf::from(path), created)
            }
            Message::Data(data) => self.receive(id, &data),
            Message::Pull(path) => {
                let wire = self.wire.clone();
                thread::spawn(move || send_file(id, Path::new(&path), &wire));
                Ok(())
            }
            // The agent's own messages, or handled by the caller: nothing to do here.
            Message::Hello
            | Message::Stdout(_)
            | Message::Stderr(_)
            | Message::Exit(_)
            | Message::Done
            | Message::Refused(_)
            | Message::Shutdown => Ok(()),
        }
    }

    fn answer_push(&mut self, id: u32, path: PathBuf, made: io::Result<File>) -> io::Result<()> {
        match made {
            Ok(file) => {
                self.incoming.insert(id, Incoming { path, file });
                Ok(())
            }
            Err(e) => self
                .wire
                .send(id, Message::Refused(format!("{}: {e}", path.display()))),
        }
    }

    fn receive(&mut self, id: u32, data: &[u8]) -> io::Result<()> {
        // Data of a push that was refused: already answered.
        let Some(incoming) = self.incoming.get_mut(&id) else {
            return Ok(());
        };
        let answer = if data.is_empty() {
            Some(Message::Done)
        } else {
            let path = incoming.path.display();
            incoming
                .file
                .write_all(data)
                .err()
                .map(|e| Message::Refused(format!("{path}: {e}")))
        };
        if let Some(answer) = answer {
            self.incoming.remove(&id);
            self.wire.send(id, answer)?;
        }
        Ok(())
    }
}

fn create(path: &Path, mode: u32) -> io::Result<File> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    // A program being replaced may be running; unlinking leaves it alone.
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
}

fn start(spawn: &Spawn) -> io::Result<Child> {
    let (program, args) = spawn
        .argv
        .split_first()
        .filter(|(program, _)| !program.is_empty())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no program named"))?;
    let mut command = if spawn.tty {
        // A new session whose controlling terminal is the console, so that ^C and job control work.
        // The session is a group of its own too; a child that already led a group would have to
        // fork, and would seem to end at once.
        let mut command = Command::new("/bin/busybox");
        let tty = OpenOptions::new().read(true).write(true).open(TTY)?;
        command.args(["setsid", "-c", program]);
        command
            .stdin(tty.try_clone()?)
            .stdout(tty.try_clone()?)
            .stderr(tty);
        command
    } else {
        let mut command = Command::new(program);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        command
    };
    command.args(args);
    command.current_dir(if spawn.cwd.is_empty() {
        HOME
    } else {
        &spawn.cwd
    });
    for variable in &spawn.env {
        let (name, value) = variable.split_once('=').unwrap_or((variable, ""));
        command.env(name, value);
    }
    command.spawn()
}

/// Attaches threads to a started program.
fn follow(id: u32, mut child: Child, wire: &Wire) -> Program {
    let group = child.id();
    let stdin = child.stdin.take().map(|mut pipe| {
        let (sender, receiver) = mpsc::channel::<Vec<u8>>();
        thread::spawn(move || receiver.iter().try_for_each(|data| pipe.write_all(&data)));
        sender
    });
    let pipes: Vec<JoinHandle<()>> = [
        child
            .stdout
            .take()
            .map(|pipe| forward(id, pipe, wire.clone(), Message::Stdout)),
        child
            .stderr
            .take()
            .map(|pipe| forward(id, pipe, wire.clone(), Message::Stderr)),
    ]
    .into_iter()
    .flatten()
    .collect();
    let wire = wire.clone();
    thread::spawn(move || {
        let status = child.wait();
        for pipe in pipes {
            // A panicking forwarder has already lost the port; the status still counts.
            let _ = pipe.join();
        }
        let code = status.map_or(255, |status| match status.signal() {
            Some(signal) => 128_u8.wrapping_add(signal.to_le_bytes()[0]),
            None => status.code().unwrap_or(255).to_le_bytes()[0],
        });
        // The port only fails when the host is gone; then `serve` ends everything.
        let _ = wire.send(id, Message::Exit(code));
    });
    Program { group, stdin }
}

fn forward(
    id: u32,
    mut pipe: impl Read + Send + 'static,
    wire: Wire,
    wrap: fn(Vec<u8>) -> Message,
) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        while let Ok(count) = pipe.read(&mut buffer) {
            if count == 0 || wire.send(id, wrap(buffer[..count].to_vec())).is_err() {
                break;
            }
        }
    })
}

fn kill_group(group: u32, signal: i32) {
    // No safe wrapper for kill(2) in std; busybox has one. A group already gone is no error.
    let _ = Command::new("/bin/busybox")
        .args(["kill", &format!("-{signal}"), "--", &format!("-{group}")])
        .stderr(Stdio::null())
        .status();
}

fn send_file(id: u32, path: &Path, wire: &Wire) {
    let sent = File::open(path).and_then(|mut file| {
        let mut buffer = vec![0; CHUNK];
        loop {
            let count = file.read(&mut buffer)?;
            wire.send(id, Message::Data(buffer[..count].to_vec()))?;
            if count == 0 {
                return Ok(());
            }
        }
    });
    if let Err(error) = sent {
        // If this fails too, the host is gone.
        let _ = wire.send(id, Message::Refused(format!("{}: {error}", path.display())));
    }
}
