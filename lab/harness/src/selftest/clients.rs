//! Real clients of `exitless serve`: the scripts of `tests/clients`, each run a case of its own.
//!
//! A script's last line is its result, or the reason why it failed or was skipped (status 77: a
//! package is missing). The scripts can also be run alone; they receive this program and one set of
//! guest images for all.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};

use crate::system::programs::Programs;

/// Exit status of a script if a package is missing.
const SKIPPED: i32 = 77;

/// One run of a script.
pub struct Client {
    /// Unique name, by which a soak records it.
    pub name: String,
    script: &'static str,
    argument: Option<&'static str>,
    environment: &'static [(&'static str, &'static str)],
}

impl Client {
    fn new(script: &'static str, argument: &'static str) -> Self {
        Self {
            name: format!("client: {script} {argument}"),
            script,
            argument: Some(argument),
            environment: &[],
        }
    }

    /// Returns the run of a script that has one variant only.
    fn alone(script: &'static str) -> Self {
        Self {
            name: format!("client: {script}"),
            script,
            argument: None,
            environment: &[],
        }
    }

    /// Adds these variables.
    fn with(self, environment: &'static [(&'static str, &'static str)]) -> Self {
        Self {
            environment,
            ..self
        }
    }

    /// Adds these variables, and their description to the name.
    fn named(self, what: &str, environment: &'static [(&'static str, &'static str)]) -> Self {
        let name = format!("{}, {what}", self.name);
        Self {
            name,
            ..self.with(environment)
        }
    }

    fn boot(what: &str, environment: &'static [(&'static str, &'static str)]) -> Self {
        Self {
            name: format!("client: boot.sh, {what}"),
            script: "boot.sh",
            argument: None,
            environment,
        }
    }
}

/// Returns a run behind QEMU's IOMMU, through a number of kills.
fn viommu(mode: &'static str, environment: &'static [(&'static str, &'static str)]) -> Client {
    Client::new("viommu.sh", mode).with(environment)
}

/// Environment for a short run of a network device.
const QUICK: &[(&str, &str)] = &[("PINGS", "100"), ("NET_MIB", "2"), ("IPERF", "0")];

/// Returns the runs of `make test`.
pub fn quick() -> Vec<Client> {
    let net = |mode| Client::new("net.sh", mode).with(QUICK);
    vec![
        net("strict-7.2-ats-packed"),
        net("lazy"),
        Client::alone("net-uml.sh").with(QUICK),
        Client::new("qemu.sh", "split-1"),
        Client::new("qemu.sh", "packed-4"),
        Client::new("uml.sh", "qcow2"),
        Client::new("vublk.sh", "poll"),
        Client::new("vublk.sh", "event"),
        Client::boot("the daemon killed once, and once in the firmware", &[]),
        viommu("strict-7.2-ats", &[("SECONDS_IO", "3"), ("KILLS", "0")]),
        viommu("lazy-packed", &[("SECONDS_IO", "4"), ("KILLS", "1")]),
    ]
}

/// Returns the network devices: a thousand pings each, of which none may be lost.
fn networks() -> Vec<Client> {
    const MODES: [&str; 16] = [
        "plain-7.2",
        "plain-7.2-packed",
        "plain",
        "plain-packed",
        "plain-jumbo",
        "strict",
        "strict-ats-packed",
        "strict-7.2",
        "strict-7.2-ats",
        "lazy",
        "lazy-ats",
        "lazy-packed",
        "strict-storm",
        "strict-7.2-ats-storm",
        "lazy-storm",
        "lazy-ats-packed-storm",
    ];
    let mut clients: Vec<_> = MODES.map(|mode| Client::new("net.sh", mode)).into();
    // QEMU has no inflight region for network devices: packed rings stop after a kill.
    for mode in ["plain", "strict-ats", "lazy"] {
        clients.push(Client::new("net.sh", mode).named("five kills", &[("KILLS", "5")]));
    }
    clients.push(Client::alone("net-uml.sh"));
    for rings in ["split", "packed"] {
        clients.push(Client::new("net-vlan.sh", rings));
    }
    for rings in ["split", "split-in-order", "packed", "packed-in-order"] {
        clients.push(Client::new("dpdk.sh", rings));
    }
    clients
}

/// Returns every client, once: the runs of `--clients`.
pub fn verified() -> Vec<Client> {
    let mut clients = networks();
    clients.extend(disks());
    for rings in ["split-1", "packed-4"] {
        clients.push(Client::new("qemu.sh", rings));
    }
    clients.push(Client::new("uml.sh", "qcow2"));
    for mode in ["poll", "event"] {
        clients.push(Client::new("vublk.sh", mode));
    }
    clients
}

/// Returns the disks that a soak runs beside those that boot.
fn disks() -> Vec<Client> {
    let mut clients = vec![
        Client::new("qemu.sh", "split-4"),
        Client::new("qemu.sh", "packed-1"),
        Client::new("uml.sh", "raw"),
    ];
    for mode in [
        "strict",
        "strict-ats",
        "strict-7.2",
        "lazy",
        "lazy-ats-packed",
    ] {
        clients.push(viommu(mode, &[("SECONDS_IO", "20"), ("KILLS", "5")]));
    }
    clients
}

/// Returns the runs of `make soak`.
pub fn soak() -> Vec<Client> {
    let mut clients = networks();
    clients.extend(disks());
    clients.push(Client::boot(
        "10 minutes, the daemon killed 20 times, and 5 times in the firmware",
        &[
            ("DURATION", "600"),
            ("KILLS", "20"),
            ("FIRMWARE_KILLS", "5"),
        ],
    ));
    clients.push(Client::boot(
        "packed rings, 4 queues, 2 minutes, 10 kills",
        &[
            ("DURATION", "120"),
            ("KILLS", "10"),
            ("FIRMWARE_KILLS", "0"),
            ("PACKED", "on"),
            ("QUEUES", "4"),
        ],
    ));
    clients
}

/// Result of a run.
#[derive(Debug)]
pub enum Ran {
    /// Passed, with this result.
    Passed(String),
    /// Skipped, for this reason.
    Skipped(String),
}

/// Writes the files that clients boot. Returns their directory; the error is the reason why there
/// is none.
pub fn guest_files() -> Result<PathBuf, String> {
    let dir = lab::packages::cache_dir().join("clients");
    let written = lab::export::write(&dir, &|line| println!("{line}"));
    written.map(|()| dir).map_err(|error| error.to_string())
}

/// Runs a client with these guest images.
///
/// # Errors
/// The script failed; with its output.
pub fn run(client: &Client, guest: Result<&PathBuf, &String>) -> Result<Ran> {
    let guest = match guest {
        Ok(guest) => guest,
        Err(reason) => return Ok(Ran::Skipped(format!("no guest: {reason}"))),
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/clients")
        .join(client.script);
    let programs = Programs::find()?;
    let out = Command::new("bash")
        .arg(&script)
        .args(client.argument)
        .envs(client.environment.iter().copied())
        .env("EXITLESS", programs.exitless)
        .env("EXITLESS_LAB_PROGRAM", programs.exitless_lab)
        .env("GUEST_DIR", guest)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("running {}", script.display()))?;
    let said = String::from_utf8_lossy(&out.stdout);
    let last = || said.lines().next_back().unwrap_or_default().to_owned();
    match out.status.code() {
        Some(0) => Ok(Ran::Passed(said.lines().collect::<Vec<_>>().join("; "))),
        Some(SKIPPED) => Ok(Ran::Skipped(last().trim_start_matches("skipped: ").into())),
        Some(_) => Err(anyhow!("{said}{}", String::from_utf8_lossy(&out.stderr))),
        None => bail!("{said}it was ended by a signal"),
    }
}
