//! Real clients of `exitless serve`: the scripts of `tests/clients`, each run a case of its own.
//!
//! A script's last words are what was seen, or why it failed or was skipped (status 77: a package is missing). The
//! scripts run alone just as well; they are given this program and one set of guest images for all.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};

use super::suite::Tally;

/// What a script ends with when a package is missing.
const SKIPPED: i32 = 77;

/// One run of a script.
pub struct Client {
    /// Unique; what a soak remembers it by.
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

    fn boot(what: &str, environment: &'static [(&'static str, &'static str)]) -> Self {
        Self {
            name: format!("client: boot.sh, {what}"),
            script: "boot.sh",
            argument: None,
            environment,
        }
    }
}

/// What `make test` runs.
pub fn quick() -> Vec<Client> {
    vec![
        Client::new("qemu.sh", "split-1"),
        Client::new("qemu.sh", "packed-4"),
        Client::new("uml.sh", "qcow2"),
        Client::new("vublk.sh", "poll"),
        Client::new("vublk.sh", "event"),
        Client::boot("the daemon killed once, and once in the firmware", &[]),
    ]
}

/// What `make soak` runs.
pub fn soak() -> Vec<Client> {
    let mut clients = vec![
        Client::new("qemu.sh", "split-4"),
        Client::new("qemu.sh", "packed-1"),
        Client::new("uml.sh", "raw"),
    ];
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

/// Runs those that have not passed before.
///
/// # Errors
/// The journal cannot be written.
pub fn run(clients: &[Client], tally: &mut Tally) -> Result<()> {
    let left: Vec<_> = clients
        .iter()
        .filter(|client| !tally.has_passed(&client.name))
        .collect();
    if left.is_empty() {
        return Ok(());
    }
    let guest = lab::packages::cache_dir().join("clients");
    let exported = lab::export::write(&guest, &|line| println!("{line}"));
    for client in left {
        if let Err(reason) = &exported {
            println!("skipped {}: no guest: {reason}", client.name);
            continue;
        }
        let start = Instant::now();
        match run_one(client, &guest) {
            Ok(Ran::Skipped(reason)) => println!("skipped {}: {reason}", client.name),
            Ok(Ran::Passed(seen)) => tally.record(&client.name, Ok(seen), start)?,
            Err(error) => tally.record(&client.name, Err(error), start)?,
        }
    }
    Ok(())
}

enum Ran {
    Passed(String),
    Skipped(String),
}

fn run_one(client: &Client, guest: &Path) -> Result<Ran> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/clients")
        .join(client.script);
    let exitless: PathBuf = std::env::current_exe().context("finding this program")?;
    let out = Command::new("bash")
        .arg(&script)
        .args(client.argument)
        .envs(client.environment.iter().copied())
        .env("EXITLESS", exitless)
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
