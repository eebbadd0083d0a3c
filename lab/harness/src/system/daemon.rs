//! `exitless serve` on a [`Host`]: the sidecore that several guests share.

use std::time::Duration;

use anyhow::{Context, Result};
use lab::Output;
use serde_json::Value;

use super::host::{Host, Program};
use super::programs::Exitless;

/// File that the daemon writes its counters to.
const STATS: &str = "serve-stats.json";

/// A daemon to be run, with a socket for each of its devices.
#[derive(Clone, Debug)]
pub struct DaemonPlan {
    /// Disks: the options of `--block` for each beside id and socket, for instance `path=ram:8M`.
    pub disks: Vec<String>,
    /// Network devices: the options of `--net` for each beside id and socket, for instance
    /// `tap=tap0`.
    pub nets: Vec<String>,
    /// `--idle`.
    pub idle: &'static str,
    /// Time within which it must end.
    pub limit: Duration,
}

impl DaemonPlan {
    /// Returns the name of the socket of disk `index`.
    pub fn socket(index: usize) -> String {
        format!("serve{index}.sock")
    }

    /// Returns the name of the socket of network device `index`.
    pub fn net_socket(index: usize) -> String {
        format!("serve-net{index}.sock")
    }

    /// Returns the names of all sockets.
    fn sockets(&self) -> Vec<String> {
        let disks = (0..self.disks.len()).map(Self::socket);
        disks
            .chain((0..self.nets.len()).map(Self::net_socket))
            .collect()
    }

    fn args(&self, host: &Host) -> Vec<String> {
        let mut args: Vec<String> = ["serve", "--idle", self.idle].map(str::to_owned).into();
        args.extend(["--stats".into(), host.path(STATS)]);
        if let Some(cpu) = host.pin() {
            args.extend(["--cpu".into(), cpu.into()]);
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let socket = host.path(&Self::socket(index));
            args.extend([
                "--block".into(),
                format!("id=disk{index},socket={socket},{disk}"),
            ]);
        }
        for (index, net) in self.nets.iter().enumerate() {
            let socket = host.path(&Self::net_socket(index));
            args.extend([
                "--net".into(),
                format!("id=net{index},socket={socket},{net}"),
            ]);
        }
        args
    }

    /// Starts it, and waits until it serves.
    pub fn start<'a>(&self, host: &'a Host) -> Result<Daemon<'a>> {
        let daemon = self.start_again(host)?;
        if let Err(error) = host.wait_for_sockets(&self.sockets()) {
            daemon.program.signal(libc::SIGTERM)?;
            let output = daemon.program.wait()?;
            return Err(error.context(format!("exitless serve said: {}", output.stderr_text())));
        }
        Ok(daemon)
    }

    /// Starts it in the place of a daemon that was killed: its sockets exist, and are dead.
    pub fn start_again<'a>(&self, host: &'a Host) -> Result<Daemon<'a>> {
        Ok(Daemon {
            program: host.spawn(Exitless::Product, &self.args(host), self.limit)?,
            host,
        })
    }
}

/// Counts of a daemon, over all its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Requests: chains that it has completed.
    pub requests: f64,
    /// Kicks that it received.
    pub kicks: f64,
    /// Calls that it made.
    pub calls: f64,
}

impl Totals {
    /// Sums its counters. A device that did not answer has none.
    pub fn of(stats: &Value) -> Self {
        let sum = |key: &str| -> f64 {
            let devices = stats["devices"].as_object();
            devices
                .into_iter()
                .flatten()
                .filter_map(|(_, device)| device[key].as_f64())
                .sum()
        };
        Self {
            requests: sum("requests"),
            kicks: sum("kicks"),
            calls: sum("calls"),
        }
    }
}

/// A running daemon.
pub struct Daemon<'a> {
    program: Program<'a>,
    host: &'a Host,
}

impl Daemon<'_> {
    /// Kills it, as a crash would.
    pub fn kill(self) -> Result<()> {
        self.signal(libc::SIGKILL)?;
        self.wait().map(drop)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) -> Result<()> {
        self.program.signal(signal)
    }

    /// Sets the time within which it must end from now on.
    pub fn set_limit(&mut self, limit: Duration) {
        self.program.set_limit(limit);
    }

    /// Waits for its end, and returns its output whatever its status.
    pub fn wait(self) -> Result<Output> {
        self.program.wait()
    }

    /// Terminates it in order. Returns its counters, and its messages.
    pub fn end(self) -> Result<(Value, String)> {
        self.signal(libc::SIGTERM)?;
        let said = self.program.wait()?.stderr_text();
        let stats = self
            .host
            .get(STATS)
            .with_context(|| format!("the daemon's counters; it said: {said}"))?;
        Ok((
            serde_json::from_slice(&stats).context("the daemon's counters")?,
            said,
        ))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_daemons_counts_are_those_of_all_its_devices() {
        let stats = json!({ "devices": {
            "net0": { "requests": 10, "kicks": 1, "calls": 5 },
            "disk0": { "requests": 20, "kicks": 0, "calls": 7 },
            "net2": { "no_answer": true },
        } });
        let all = Totals {
            requests: 30.0,
            kicks: 1.0,
            calls: 12.0,
        };
        assert_eq!(Totals::of(&stats), all);
        assert_eq!(Totals::of(&Value::Null), Totals::default());
    }
}
