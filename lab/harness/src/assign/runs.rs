//! Runs whose figures are reported as well as tested: VMMs killed at random points, and memory
//! reclaimed under load.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::assigned::Device;
use workload::pattern::Random;

use super::{AssignLab, AssignedRun, Guest, Mode, SCRIPT, Session};

/// Namespace of the drive, in a guest or the emulated host.
const DISK: &str = "/dev/nvme0n1";
/// Bytes of it that hold the pattern, and the same in blocks.
const PATTERN: usize = 4 << 20;
const BLOCKS: usize = PATTERN >> 12;
/// Seed of the pattern.
const SEED: u64 = 7;
/// One kill in so many comes at a random time of a guest's start.
const EARLY: u64 = 5;

/// Result of a run of kills.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kills {
    /// Pages that were pinned at each kill.
    pub held: Vec<i64>,
    /// Kills after which no page was pinned, and the next guest found its devices, and its drive
    /// usable.
    pub clean: usize,
}

/// Returns the pages that the emulated host's kernel has pinned for devices' drivers: the sum of
/// the counters of its processors.
fn pinned_pages(lab: &AssignLab) -> Result<i64> {
    let script =
        "echo 1 >/proc/sys/vm/stat_refresh; sed -n 's/^nr_foll_pin_[a-z]* //p' /proc/vmstat";
    let text = lab.host().script(script)?;
    let numbers = text
        .lines()
        .map(str::parse)
        .collect::<Result<Vec<i64>, _>>();
    match numbers.as_deref() {
        Ok([acquired, released]) => Ok(acquired - released),
        _ => anyhow::bail!("{text:?} is no two counts"),
    }
}

/// Kills a VMM `kills` times (SIGKILL) while its guest starts, reads and writes; the last guest
/// runs to its end. All devices are [bound](AssignLab::bind).
///
/// # Errors
/// A guest found its devices unusable, or the lab died: nothing later is of use.
pub fn kill_at_random_points(lab: &AssignLab, kills: u64, seed: u64) -> Result<Kills> {
    let devices = [Device::Nvme, Device::Net, Device::Edu].map(|device| (device, ""));
    let before = pinned_pages(lab)?;
    let again = format!(
        "workload mixed {DISK} --seconds 1 --depth 8 --skip {BLOCKS} && \
         workload check-pattern {DISK} --bytes {PATTERN} --seed {SEED}"
    );
    let mut guest = Guest::new(
        Mode::Shared,
        format!(
            "workload write-pattern {DISK} --bytes {PATTERN} --seed {SEED} && {again} && echo \
             usable $((1+1)) && \
             while workload mixed {DISK} --seconds 20 --depth 8 --skip {BLOCKS}; do :; done"
        ),
    );
    guest.limit = Duration::from_secs(300);
    let (mut random, mut of) = (Random::new(seed), Kills::default());
    // A kill is clean if the next guest has found its drive usable.
    let mut left = Vec::new();
    for kill in 0..kills {
        let mut running = lab.spawn(&guest, &devices)?;
        let is_early = kill % EARLY == 1;
        let wait = 500 + random.below(if is_early { 10_000 } else { 2000 });
        if !is_early {
            running.wait_for("usable 2").with_context(|| {
                format!("the guest after kill {kill} of {kills}: {:?}", of.held)
            })?;
        }
        std::thread::sleep(Duration::from_millis(wait));
        let held = pinned_pages(lab)? - before;
        ensure!(
            is_early || held > 0,
            "nothing is pinned for a guest that works"
        );
        running.signal(libc::SIGKILL)?;
        let outcome = running.wait()?;
        ensure!(outcome.exit != 0, "it had ended: {}", outcome.tail());
        let now = pinned_pages(lab)? - before;
        eprintln!("kill {kill}, {wait} ms: pages pinned {held}, then {now}");
        of.held.push(held);
        left.push(now);
    }
    guest.script = again;
    let run = lab.run(&guest, &devices)?;
    run.outcome.check()?;
    ensure!(run.faults.is_empty(), "{}", run.faults);
    of.clean = left.iter().filter(|pages| **pages == 0).count();
    Ok(of)
}

/// Result of a run whose memory was reclaimed under load.
#[derive(Debug)]
pub struct Reclaimed {
    /// Bytes of guest memory.
    pub memory: u64,
    /// Bytes that its group had at first.
    pub full: u64,
    /// Bytes that it had at most, in any sample while its memory was reclaimed.
    pub most: u64,
    /// Number of samples.
    pub looks: usize,
    /// Duration, s.
    pub seconds: u64,
    /// Requests that were verified meanwhile.
    pub requests: u64,
    /// KiB that were locked after the drive had lost its driver.
    pub locked_after_detach_kib: u64,
    /// The run.
    pub run: AssignedRun,
}

impl Reclaimed {
    /// Returns the most that was in memory, in percent of the guest's memory.
    pub fn resident_percent(&self) -> f64 {
        self.most as f64 * 100.0 / self.memory as f64
    }
}

/// Keeps the memory of a guest with an assigned drive below half by `memory.reclaim`, while the
/// guest reads and writes for at least `seconds`, and at least `requests` times. All of its user's
/// memory has been used before. The drive is [bound](AssignLab::bind).
///
/// # Errors
/// A request came back wrong, or the run could not be made.
pub fn reclaim_under_load(lab: &AssignLab, seconds: u64, requests: u64) -> Result<Reclaimed> {
    /// MiB of the guest, and those of them that its user fills.
    const MEMORY: u64 = 256;
    const FILLED: u64 = 170;
    let host = lab.host();
    host.script(
        "lab-load zram && echo 512M >/sys/block/zram0/disksize && mkswap /dev/zram0 && \
         swapon /dev/zram0",
    )?;
    let group = host.script("mktemp -d /sys/fs/cgroup/run.XXXXXX")?;
    let group = group.trim();
    let mut guest = Guest::new(Mode::Shared, SCRIPT);
    guest.limit = Duration::from_secs(900);
    guest.group = Some(group.to_owned());
    let mut session = lab.begin(&guest, &[(Device::Nvme, "")])?;
    session.run(&format!("workload age --mib {FILLED}"))?;
    let text = host.script(&format!("cat {group}/memory.current"))?;
    let full: u64 = text.trim().parse().context("memory.current")?;
    let goal = (MEMORY << 20) * 45 / 100;
    // A request for more than can be reclaimed is no error: the kernel says EAGAIN then. The log
    // has the size before each turn.
    host.script(&format!(
        "echo $(({full} - {goal})) >{group}/memory.reclaim; cd /root && rm -f enough && : \
         >reclaims; \
         (while [ ! -e enough ]; do read -r now <{group}/memory.current; echo $now >>reclaims; \
         [ $now -le {goal} ] || echo $((now - {goal})) >{group}/memory.reclaim; sleep 0.3; done) \
         </dev/null >/dev/null 2>&1 &"
    ))?;
    let (seconds, requests) = verified(&mut session, seconds, requests)?;
    let looks = host.script("cat /root/reclaims && : >/root/enough")?;
    let looks = looks
        .lines()
        .map(str::parse)
        .collect::<Result<Vec<u64>, _>>();
    let looks = looks.context("looks at memory.current")?;
    session.run(&format!(
        "for a in $({}); do echo $a >/sys/bus/pci/devices/$a/driver/unbind || exit 1; done",
        Device::Nvme.search()
    ))?;
    let locked_after_detach_kib = session.locked()?;
    let run = session.end()?;
    run.outcome.check()?;
    Ok(Reclaimed {
        memory: MEMORY << 20,
        full,
        most: looks.iter().copied().max().context("no look")?,
        looks: looks.len(),
        seconds,
        requests,
        locked_after_detach_kib,
        run,
    })
}

/// Makes verified requests until both `seconds` and `requests` are reached. Returns both numbers.
fn verified(session: &mut Session<'_>, seconds: u64, requests: u64) -> Result<(u64, u64)> {
    /// Turns of twenty seconds at most.
    const TURNS: u64 = 15;
    let (began, mut done) = (Instant::now(), 0);
    for seed in 0..TURNS {
        let said = session.run(&format!(
            "workload mixed {DISK} --seconds 20 --depth 8 --seed {seed}"
        ))?;
        let line = said.lines().find(|line| line.starts_with("mixed ok"));
        let line = line.with_context(|| format!("nothing was verified: {said}"))?;
        for key in ["reads=", "writes="] {
            let words = line.split_whitespace();
            let number = words.filter_map(|word| word.strip_prefix(key)).next();
            let number = number.and_then(|number| number.parse::<u64>().ok());
            done += number.with_context(|| format!("no {key} in {line:?}"))?;
        }
        let took = began.elapsed().as_secs();
        if took >= seconds && done >= requests {
            return Ok((took, done));
        }
    }
    anyhow::bail!("{done} requests in {TURNS} turns")
}
