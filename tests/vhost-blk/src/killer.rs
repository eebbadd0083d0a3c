//! A server started by a command line, and killed at random times, so that over many kills every
//! point of its loop is hit.

use std::io;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use seeded::Random;

/// Handle of a server that is killed and restarted.
#[derive(Debug)]
pub struct Killer {
    command: String,
    child: Child,
    left: u32,
    between: (Duration, Duration),
    next: u64,
}

impl Killer {
    /// Starts the server by a shell command, which is executed with `exec`. It is killed `kills`
    /// times, each after a random time between the two limits `between`.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn start(command: &str, kills: u32, between: (Duration, Duration)) -> io::Result<Self> {
        Ok(Self {
            command: command.to_owned(),
            child: spawn(command)?,
            left: kills,
            between,
            next: 0,
        })
    }

    /// Chooses the time of the next kill.
    pub fn plan(&mut self, now: u64, random: &mut Random) {
        let (least, most) = self.between;
        let more = (most.saturating_sub(least).as_nanos() as u64).max(1);
        self.next = now + least.as_nanos() as u64 + random.below(more);
    }

    /// Returns whether it is time for a kill and kills are left.
    pub const fn is_due(&self, now: u64) -> bool {
        self.left > 0 && now >= self.next
    }

    /// Kills the server and restarts it.
    ///
    /// # Errors
    /// The server cannot be killed or started.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.left -= 1;
        self.child = spawn(&self.command)?;
        Ok(())
    }
}

fn spawn(command: &str) -> io::Result<Child> {
    let command = format!("exec {command}");
    Command::new("sh")
        .arg("-c")
        .arg(command)
        .stdin(Stdio::null())
        .spawn()
}

impl Drop for Killer {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
