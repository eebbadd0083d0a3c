//! Guests that start with all of their memory, and get a limit when they have started: a boot below
//! the limit would take most of a run.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use workload::pattern::Random;

use super::guest::{Guest, Mode, Outcome, RunningGuest};
use super::host::Host;

/// Returns the name of the file that holds the limit of a guest of this [name](Guest::name), on its
/// host.
fn limit_file(name: &str) -> String {
    format!("limit{name}")
}

/// Microseconds for which a pager waits for vCPUs to report their positions: emulated ones are
/// slow.
pub const PREVENTER_LIMIT_US: u32 = 100_000;
/// Largest number of MiB that a verifying guest may have beyond its least: it gets a random number
/// of them, anew every few seconds.
const MORE: u64 = 96;
/// Largest size of its balloon, MiB, chosen likewise; the guest deflates it if it needs the memory.
const BALLOON: u64 = 64;
/// File that holds the balloon's size, on its host.
const BALLOON_FILE: &str = "balloon";
/// Range of the time between two changes, s.
const STANDS: std::ops::Range<u64> = 3..16;
const SEED: u64 = 51;

/// Returns a guest with a pager that writes to `store` (the value of `--swap`). It waits for a line
/// on its console before it runs `script`.
pub fn guest(host: &Host, mode: Mode, script: &str, store: &str) -> Guest {
    let mut guest = Guest::new(mode, begun(script));
    guest.idle = "sleep";
    guest.flags.extend(flags(host, &guest.name, store));
    guest
}

/// Returns the flags that give a guest of this [name](Guest::name) a pager that writes to `store`.
pub fn flags(host: &Host, name: &str, store: &str) -> impl Iterator<Item = String> {
    let limit = host.path(&limit_file(name));
    let flags = [
        "--resident",
        "256M",
        "--resident-file",
        &limit,
        "--swap",
        store,
        "--preventer-limit",
        &PREVENTER_LIMIT_US.to_string(),
    ];
    flags.map(String::from).into_iter()
}

/// Returns the script, preceded by a wait for a line.
pub fn begun(script: &str) -> String {
    // The computed output is not on the kernel's command line.
    format!("echo has $((1+1)) begun && read go && {script}")
}

/// Starts a guest whose script is [`begun`] by a line, and waits until it waits for it.
pub fn start<'a>(host: &'a Host, guest: &Guest) -> Result<RunningGuest<'a>> {
    // No limit of an earlier guest.
    host.put(&limit_file(&guest.name), b"")?;
    let mut guest = guest.spawn(host)?;
    guest.wait_for("has 2 begun")?;
    Ok(guest)
}

/// Starts a guest that may have so many MiB resident from its script on.
pub fn squeezed<'a>(host: &'a Host, guest: &Guest, limit: u64) -> Result<RunningGuest<'a>> {
    let mut running = start(host, guest)?;
    set_limit_of(host, &guest.name, limit)?;
    go_on(&mut running)?;
    Ok(running)
}

/// Types the line.
pub fn go_on(guest: &mut RunningGuest<'_>) -> Result<()> {
    guest.type_in("\n")
}

/// Sets the resident MiB of a guest from now on.
pub fn set_limit(host: &Host, mib: u64) -> Result<()> {
    set_limit_of(host, "", mib)
}

/// Sets those of the guest of this [name](Guest::name).
pub fn set_limit_of(host: &Host, name: &str, mib: u64) -> Result<()> {
    host.put(&limit_file(name), format!("{mib}M\n").as_bytes())
}

/// A guest that verifies memory and a disk.
#[derive(Clone, Copy)]
pub struct Verify {
    pub mode: Mode,
    pub cpus: u32,
    pub seconds: u32,
    /// Least resident MiB.
    pub limit: u64,
    /// Whether a balloon takes pages and gives them back meanwhile.
    pub has_balloon: bool,
    /// Format of its disk.
    pub disk: VerifiedDisk,
    /// Fault of its store, once (`--fault swap:…`).
    pub fault: Option<&'static str>,
}

impl Verify {
    /// Creates a run with a raw disk and a good store.
    pub fn new(mode: Mode, cpus: u32, seconds: u32) -> Self {
        Self {
            mode,
            cpus,
            seconds,
            limit: 64,
            has_balloon: false,
            disk: VerifiedDisk::Raw,
            fault: None,
        }
    }
}

/// Format of a verified disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifiedDisk {
    /// A file with its blocks, which may back pages.
    Raw,
    /// An image, whose blocks may not.
    Qcow2,
}

impl VerifiedDisk {
    /// Bytes of the disk.
    const BYTES: u64 = 64 << 20;

    /// Creates it, empty. Returns the value of `--disk`.
    fn make(self, host: &Host) -> Result<String> {
        let name = "verified.img";
        let path = host.path(name);
        match self {
            Self::Raw => {
                host.put_zeroes(name, Self::BYTES)?;
                Ok(format!("path={path},direct=on,queues=2"))
            }
            Self::Qcow2 => {
                host.put(name, &empty_image(Self::BYTES)?)?;
                Ok(format!("path={path},format=qcow2,queues=2"))
            }
        }
    }
}

/// Returns a qcow2 image of `bytes` zeroes, as QEMU creates it.
fn empty_image(bytes: u64) -> Result<Vec<u8>> {
    let dir = tempfile::tempdir().context("a directory")?;
    let path = dir.path().join("empty.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&path)
        .arg(bytes.to_string())
        .status()
        .context("starting qemu-img (Debian: qemu-utils)")?;
    ensure!(made.success(), "qemu-img create: {made}");
    fs::read(&path).with_context(|| format!("reading {}", path.display()))
}

/// Result of a verifying run.
pub struct Verified {
    /// Pages and blocks that were compared, in whole or part.
    pub operations: u64,
    /// Last line of the guest.
    pub line: String,
    /// Number of changes of the limit.
    pub changes: u32,
    /// Outcome of the run.
    pub outcome: Outcome,
}

impl Verify {
    /// Verifies memory and a disk of a guest, filled, fragmented and cleared, each page checked,
    /// while the limit goes up and down.
    ///
    /// # Errors
    /// A wrong byte, or the guest did not end.
    pub fn run(self, host: &Host) -> Result<Verified> {
        let Self {
            mode,
            cpus,
            seconds,
            limit,
            has_balloon,
            disk,
            fault,
        } = self;
        // With a balloon, the memory that is left to the guest at least.
        let mib = if has_balloon { 56 } else { 100 };
        let script = format!(
            "workload verify /dev/vda --seconds {seconds} --mib {mib} --threads {cpus} --seed \
             {SEED}"
        );
        let store = format!("path={},size=256M,discard=on", host.path("swap.img"));
        let mut guest = guest(host, mode, &script, &store);
        guest
            .faults
            .extend(fault.map(|fault| format!("swap:{fault}")));
        guest.cpus = cpus;
        guest.disks.push(disk.make(host)?);
        if has_balloon {
            host.put(BALLOON_FILE, b"")?;
            let balloon = format!("target=0,file={}", host.path(BALLOON_FILE));
            guest.flags.extend(["--balloon".into(), balloon]);
        }
        guest.limit = Duration::from_secs(420 + 4 * u64::from(seconds));
        let mut running = squeezed(host, &guest, limit)?;
        let mut random = Random::new(SEED);
        let mut changes = 0;
        loop {
            let stands = STANDS.start + random.below(STANDS.end - STANDS.start);
            // The error of a guest that has ended is reported below.
            let has_ended = running.writes_within(Duration::from_secs(stands), "verify ok");
            if !matches!(has_ended, Ok(false)) {
                break;
            }
            set_limit(host, limit + random.below(MORE + 1))?;
            if has_balloon {
                let size = format!("{}M\n", random.below(BALLOON + 1));
                host.put(BALLOON_FILE, size.as_bytes())?;
            }
            changes += 1;
        }
        let outcome = running.wait()?;
        outcome.check()?;
        let line = outcome.line("verify ok").map(|line| line.trim().to_owned());
        let line = line.with_context(|| format!("it did not verify\n{}", outcome.tail()))?;
        let (_, operations) = line.split_once("operations=").context("no operations")?;
        let operations = operations.split(' ').next().unwrap_or_default();
        let operations = operations
            .parse()
            .with_context(|| format!("no number of operations: {line}"))?;
        Ok(Verified {
            operations,
            line,
            changes,
            outcome,
        })
    }
}
