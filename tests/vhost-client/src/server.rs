//! Servers as child processes: a command line, sockets, one CPU, and their end.

use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{sched_getaffinity, sched_setaffinity};

use crate::host;

/// Time within which a server's sockets must be there, and within which it must stand still.
const START: Duration = Duration::from_secs(20);

/// Reason why a server does not serve.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ServerError {
    #[error("{program} cannot be started")]
    Start { program: String, source: io::Error },
    #[error("ended with {status}: {last_words}")]
    Ended {
        status: ExitStatus,
        last_words: String,
    },
    #[error("no socket within {START:?}: {last_words}")]
    Silent { last_words: String },
    #[error("it neither stops nor ends")]
    Running,
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// Files of one server, removed when dropped.
#[derive(Debug)]
pub struct Files {
    directory: PathBuf,
    name: String,
    others: Vec<PathBuf>,
}

impl Files {
    /// An empty directory for sockets and a log.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new() -> io::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Short: a socket's path has 108 bytes at most.
        let name = format!("vb{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(&name);
        fs::create_dir_all(&directory)?;
        Ok(Self {
            directory,
            name,
            others: Vec::new(),
        })
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the sockets of so many ports or disks.
    pub fn sockets(&self, count: usize) -> Vec<PathBuf> {
        let socket = |at| self.directory.join(format!("{at}.s"));
        (0..count).map(socket).collect()
    }

    /// A name for a file elsewhere, which is removed too.
    pub fn other(&mut self, directory: &Path) -> PathBuf {
        let path = directory.join(format!("{}-{}", self.name, self.others.len()));
        self.others.push(path.clone());
        path
    }

    /// A word that no other server of this process or another has.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // What was never made cannot be removed.
        let _ = fs::remove_dir_all(&self.directory);
        for other in &self.others {
            let _ = fs::remove_file(other);
        }
    }
}

/// A running server. Killed when dropped; its files go with it.
#[derive(Debug)]
pub struct Server {
    child: Child,
    sockets: Vec<PathBuf>,
    files: Files,
}

impl Server {
    /// Starts a server on a CPU and waits until the last socket takes connections: servers make
    /// them in order.
    ///
    /// # Errors
    /// It is not installed, ended at once, or took too long.
    pub fn start(
        mut command: Command,
        cpu: usize,
        files: Files,
        sockets: Vec<PathBuf>,
    ) -> Result<Self, ServerError> {
        let log = File::create(files.directory.join("log"))?;
        command
            // Open and silent: some programs end when theirs does.
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log);
        // The child inherits this thread's CPU, and so do all threads it makes.
        let before = sched_getaffinity(None).map_err(io::Error::from)?;
        host::pin(cpu)?;
        let child = command.spawn();
        sched_setaffinity(None, &before).map_err(io::Error::from)?;
        let child = child.map_err(|source| ServerError::Start {
            program: command.get_program().to_string_lossy().into_owned(),
            source,
        })?;
        let mut server = Self {
            child,
            sockets,
            files,
        };
        server.wait()?;
        Ok(server)
    }

    fn wait(&mut self) -> Result<(), ServerError> {
        let start = Instant::now();
        loop {
            // The last socket only: each connection here is one more to serve.
            if let Some(last) = self.sockets.last()
                && UnixStream::connect(last).is_ok()
            {
                // It sees that connection end before the next one comes.
                thread::sleep(Duration::from_millis(20));
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                let last_words = self.last_words();
                return Err(ServerError::Ended { status, last_words });
            }
            if start.elapsed() > START {
                let last_words = self.last_words();
                return Err(ServerError::Silent { last_words });
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the sockets of its ports or disks.
    pub fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }

    /// Everything it wrote.
    pub fn log(&self) -> String {
        fs::read_to_string(self.files.directory.join("log")).unwrap_or_default()
    }

    /// The last line it wrote.
    pub fn last_words(&self) -> String {
        let log = self.log();
        let last = log.lines().rfind(|line| !line.trim().is_empty());
        last.unwrap_or("the server said nothing").to_owned()
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("no process"))?;
        Ok(kill_process(pid, signal)?)
    }

    /// Stops its process (SIGSTOP), so that another server has the CPU; done when it stands still.
    ///
    /// # Errors
    /// It is gone, or does not stop.
    pub fn pause(&self) -> Result<(), ServerError> {
        self.signal(Signal::STOP)?;
        let stat = format!("/proc/{}/stat", self.pid());
        let start = Instant::now();
        loop {
            // The state is behind the name, which is in parentheses.
            let text = fs::read_to_string(&stat)?;
            let state = text
                .rsplit_once(") ")
                .and_then(|(_, rest)| rest.chars().next());
            if state == Some('T') {
                return Ok(());
            }
            if state == Some('Z') || start.elapsed() > START {
                return Err(ServerError::Running);
            }
            thread::yield_now();
        }
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// It is gone.
    pub fn resume(&self) -> Result<(), ServerError> {
        Ok(self.signal(Signal::CONT)?)
    }

    /// Asks it to end, by the end of its standard input, then by SIGINT, and waits. What it wrote
    /// in all.
    ///
    /// # Errors
    /// It is gone, or does not end.
    pub fn end(mut self) -> Result<String, ServerError> {
        drop(self.child.stdin.take());
        if !self.ends_within(START / 10)? {
            self.signal(Signal::INT)?;
            if !self.ends_within(START / 2)? {
                return Err(ServerError::Running);
            }
        }
        Ok(self.log())
    }

    fn ends_within(&mut self, limit: Duration) -> io::Result<bool> {
        let start = Instant::now();
        while self.child.try_wait()?.is_none() {
            if start.elapsed() > limit {
                return Ok(false);
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(true)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a program is there: a path, or on PATH.
pub fn is_installed(program: &str) -> bool {
    if program.contains('/') {
        return Path::new(program).is_file();
    }
    let places = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&places).any(|place| place.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<Server, ServerError> {
        let files = Files::new().unwrap();
        let sockets = files.sockets(1);
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Server::start(command, host::cpus().unwrap()[0], files, sockets)
    }

    #[test]
    fn a_server_that_ends_at_once_leaves_its_last_words() {
        let error = shell("echo first; echo no such disk >&2; echo; exit 3").unwrap_err();
        assert!(error.to_string().ends_with("no such disk"), "{error}");
        assert!(matches!(error, ServerError::Ended { .. }));
    }

    #[test]
    fn missing_program_is_known_before_its_start() {
        assert!(is_installed("sh") && is_installed("/bin/sh"));
        assert!(!is_installed("no-such-program") && !is_installed("/bin/no-such-program"));
    }
}
