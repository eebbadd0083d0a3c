//! One boot: its guest, and a daemon if one serves it, execute the episodes of a plan in step with
//! the storage.
//!
//! Times are measured on this machine. They begin with the signal, or when the act appears on the
//! guest's console; where the kernel holds the I/O, when the command that releases the storage has
//! returned. Emulation is slow, so a bound is stretched by the machine's load ([`lab::patience`]).

use std::fmt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use lab::{Output, patience};
use workload::BLOCK;
use workload::acked::{self, LOG_BLOCKS};

use super::disk::Disk;
use super::plan::{Action, EPISODES, Episode, Fault, Plan, Server};
use crate::system::daemon::{Daemon, DaemonPlan};
use crate::system::guest::{Guest, Mode, Outcome, RunningGuest};
use crate::system::host::Host;

/// Longest time from the moment at which the storage permits an end until that end.
pub const BOUND: Duration = Duration::from_secs(5);
/// Delay between two signals that counts as two requests.
const APART: Duration = Duration::from_millis(300);
/// Duration of a wait for storage after which the process must report it.
const NAMED: Duration = Duration::from_secs(3);
/// Time limit for a request to reach storage that holds it, and the period of the checks.
const MET: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(100);
/// Time after which a guest that hangs is killed: for its start, and for each episode.
const START: Duration = Duration::from_secs(90);
const EACH: Duration = Duration::from_secs(45);
/// The disk with the writers' log.
const LOG: &str = "episodes.log";
const DISKS: &str = "/dev/vda,/dev/vdb";

/// Executes a plan. Returns a summary.
pub fn run(plan: &Plan, host: &Host) -> Result<String> {
    let Some(disk) = Disk::make(host, plan)? else {
        return Ok("skipped: device-mapper takes privileges on this host".into());
    };
    host.put(LOG, &vec![0; LOG_BLOCKS as usize * BLOCK])?;
    let mut boot = Boot::start(plan, host, disk)?;
    if let Err(error) = boot.go_through() {
        return Err(anyhow!("{error:#}{}", boot.last_words()));
    }
    let Boot { disk, seen, .. } = boot;
    let content = disk.content()?;
    let writes = acked::judge(&content, &host.get(LOG)?, plan.seed)
        .map_err(|wrong| anyhow!("the disk does not hold what was acknowledged: {wrong}"))?;
    disk.remove()?;
    Ok(format!("{writes} writes, {seen}"))
}

/// Summary of a boot for a reader.
#[derive(Default)]
struct BootSummary {
    /// Longest time that an end took, and its name.
    longest: Duration,
    what: String,
    /// Requests that failed, by the guest's count.
    failed: u64,
    /// Requests that the kernel held when the action began, as far as io_uring tells.
    held: u32,
}

impl fmt::Display for BootSummary {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { failed, held, .. } = self;
        let (what, seconds) = (&self.what, self.longest.as_secs_f64());
        write!(out, "{held} held, {failed} failed")?;
        match what.is_empty() {
            true => Ok(()),
            false => write!(out, "; the longest end, {what}, took {seconds:.1} s"),
        }
    }
}

struct Boot<'a> {
    plan: &'a Plan,
    host: &'a Host,
    disk: Disk<'a>,
    serve: Option<DaemonPlan>,
    daemon: Option<Daemon<'a>>,
    guest: Option<RunningGuest<'a>>,
    /// Whether a request has failed, so that flushes may fail from here on.
    has_failed: bool,
    seen: BootSummary,
}

/// Result of an episode's process: the guest's, or a daemon's.
enum ProcessResult {
    Guest(Outcome),
    Daemon(Output),
}

impl ProcessResult {
    fn status(&self) -> u8 {
        match self {
            Self::Guest(outcome) => outcome.exit,
            Self::Daemon(output) => output.status,
        }
    }

    fn said(&self) -> String {
        match self {
            Self::Guest(outcome) => outcome.log.clone(),
            Self::Daemon(output) => output.stderr_text(),
        }
    }
}

impl<'a> Boot<'a> {
    fn start(plan: &'a Plan, host: &'a Host, disk: Disk<'a>) -> Result<Self> {
        let limit = START + EACH * EPISODES as u32;
        let log = format!("path={}", host.path(LOG));
        // The console belongs to the program alone.
        let script = format!(
            "dmesg -n 1 && workload episodes {DISKS} --seed {}",
            plan.seed
        );
        let (mode, first, serve) = match plan.server {
            Server::Run(mode) => (mode, disk.option(), None),
            Server::Serve => {
                let serve = DaemonPlan {
                    disks: vec![disk.option()],
                    nets: Vec::new(),
                    idle: plan.idle,
                    limit: limit * 2,
                };
                let socket = format!("socket={}", host.path(&DaemonPlan::socket(0)));
                (Mode::None, socket, Some(serve))
            }
        };
        let daemon = serve.as_ref().map(|serve| serve.start(host)).transpose()?;
        let mut guest = Guest::new(mode, script);
        guest.disks = vec![first, log];
        guest.idle = plan.idle;
        guest.limit = limit;
        // SIGTERM ends it: no button.
        guest.flags.extend(["--stop-timeout".into(), "0".into()]);
        let guest = Some(guest.spawn(host)?);
        Ok(Self {
            plan,
            host,
            disk,
            serve,
            daemon,
            guest,
            has_failed: false,
            seen: BootSummary::default(),
        })
    }

    fn go_through(&mut self) -> Result<()> {
        self.guest()?.wait_for_line("episode 0 ready")?;
        for (number, episode) in (1..).zip(&self.plan.episodes) {
            self.episode(number, episode).with_context(|| {
                format!(
                    "episode {number}: {:?} × {:?}",
                    episode.fault, episode.action
                )
            })?;
        }
        if let Some(guest) = &mut self.guest {
            guest.type_in("quit\n")?;
            match self.end_of_guest(EACH)? {
                ProcessResult::Guest(outcome) => outcome.check()?,
                ProcessResult::Daemon(_) => bail!("a guest was waited for"),
            }
        }
        if let Some(daemon) = &self.daemon {
            daemon.signal(libc::SIGTERM)?;
            let asked = Instant::now();
            let ended = self.end_of_process()?;
            self.took("the daemon's end", asked)?;
            ensure!(ended.status() == 0, "{}: {}", ended.status(), ended.said());
        }
        Ok(())
    }

    fn episode(&mut self, number: usize, episode: &Episode) -> Result<()> {
        let Episode { fault, action, .. } = *episode;
        let by_driver = action == Action::Reset;
        let who = if by_driver { "driver" } else { "kernel" };
        let may_fail = self.may_fail(fault);
        self.tell(number, &format!("begin {number} {who} {may_fail}"), "ready")?;
        sleep(episode.until_fault);
        self.disk.misbehave(fault)?;
        if by_driver {
            self.tell(number, "issue", "issued")?;
        }
        sleep(episode.until_action);
        let held = self.held(fault)?;
        self.seen.held += held;
        match action {
            Action::Nothing => {
                sleep(episode.until_good);
                self.disk.mend(fault)?;
            }
            Action::Pause => {
                // An end in this time is found afterwards.
                self.signal(libc::SIGSTOP)?;
                sleep(episode.until_good / 2);
                self.disk.mend(fault)?;
                sleep(episode.until_good / 2);
                self.signal(libc::SIGCONT)?;
            }
            Action::BusMaster | Action::Reset => self.act(number, episode)?,
            Action::Term | Action::TermTwice | Action::Kill | Action::PowerOff => {
                self.end(number, episode, held > 0)?;
            }
        }
        if self.guest.is_none() {
            return Ok(());
        }
        let verdict = self.tell(number, "finish", "over:")?;
        let is_good = verdict.starts_with(&format!("episode {number} over: ok"));
        ensure!(is_good, "{verdict}");
        let failed = verdict.split("failed=").nth(1);
        self.seen.failed += failed.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        Ok(())
    }

    /// Returns the number of requests that the kernel holds; waits for one, up to [`MET`]. Where
    /// threads of the process wait, they are not visible.
    fn held(&self, fault: Fault) -> Result<u32> {
        let start = Instant::now();
        loop {
            let held = match fault {
                Fault::Holds => self.disk.operations_in_kernel()?,
                _ => return Ok(0),
            };
            if held > 0 || start.elapsed() > MET {
                return Ok(held);
            }
            sleep(LOOK);
        }
    }

    fn may_fail(&mut self, fault: Fault) -> &'static str {
        if matches!(fault, Fault::FailsWrites | Fault::FailsAll | Fault::Full) {
            self.has_failed = true;
            return "anything";
        }
        // After a failed flush, all later ones fail.
        match self.has_failed {
            true => "flushes",
            false => "nothing",
        }
    }

    /// Executes the action on the guest's disk.
    fn act(&mut self, number: usize, episode: &Episode) -> Result<()> {
        let act = match episode.action {
            Action::Reset => "reset",
            _ => "bus-master",
        };
        self.tell(number, &format!("act {act}"), "acting")?;
        let mut free = Instant::now();
        let holds = episode.fault.keeps_waiting();
        if holds {
            sleep(episode.until_good);
            self.disk.mend(episode.fault)?;
            free = Instant::now();
        }
        self.guest()?
            .wait_for_line(&format!("episode {number} acted"))?;
        self.took(&format!("{:?} × {act}", episode.fault), free)?;
        if !holds {
            sleep(episode.until_good);
            self.disk.mend(episode.fault)?;
        }
        Ok(())
    }

    /// Ends the process that does the I/O, or the guest; a daemon gets a successor. `has_requests`:
    /// the kernel is known to hold some.
    fn end(&mut self, number: usize, episode: &Episode, has_requests: bool) -> Result<()> {
        let Episode { fault, action, .. } = *episode;
        let holds = fault.keeps_waiting();
        let statuses: &[u8] = match (action, self.plan.server) {
            (Action::PowerOff, _) => {
                self.tell(number, "act power-off", "acting")?;
                &[0]
            }
            (Action::Kill, _) => {
                self.signal(libc::SIGKILL)?;
                &[137]
            }
            (_, server) => {
                self.signal(libc::SIGTERM)?;
                if action == Action::TermTwice {
                    sleep(APART);
                    self.signal(libc::SIGTERM)?;
                }
                match (server, action) {
                    (Server::Run(_), Action::TermTwice) => &[143, 5],
                    (Server::Run(_), _) => &[143],
                    (Server::Serve, Action::TermTwice) => &[0, 5],
                    (Server::Serve, _) => &[0],
                }
            }
        };
        let mut free = Instant::now();
        // A daemon that was killed has a successor at once, which waits for the image.
        let mut successor = None;
        if holds {
            if action == Action::Kill {
                successor = self.successor()?;
            }
            sleep(episode.until_good);
            self.disk.mend(fault)?;
            free = Instant::now();
        }
        let ended = match action {
            Action::PowerOff => self.end_of_guest(BOUND)?,
            _ => self.end_of_process()?,
        };
        self.took(&format!("{fault:?} × {action:?}"), free)?;
        if !holds {
            self.disk.mend(fault)?;
        }
        let (status, said) = (ended.status(), ended.said());
        ensure!(statuses.contains(&status), "ended with {status}: {said}");
        let is_told = said.contains("waiting for storage that does not answer");
        let waits = action == Action::Term
            || action == Action::PowerOff && matches!(self.plan.server, Server::Run(_));
        if has_requests && waits && episode.until_good > NAMED {
            ensure!(is_told, "it did not say what it waited for: {said}");
        }
        if let ProcessResult::Daemon(_) = ended {
            self.daemon = match successor {
                Some(daemon) => Some(daemon),
                None => self.successor()?,
            };
        }
        Ok(())
    }

    /// Starts another daemon, if one serves.
    fn successor(&self) -> Result<Option<Daemon<'a>>> {
        let serve = self.serve.as_ref();
        serve.map(|serve| serve.start_again(self.host)).transpose()
    }

    fn guest(&mut self) -> Result<&mut RunningGuest<'a>> {
        self.guest.as_mut().context("the guest is gone")
    }

    /// Types a line, and waits for the answer that begins with `word`.
    fn tell(&mut self, number: usize, line: &str, word: &str) -> Result<String> {
        let guest = self.guest()?;
        guest.type_in(&format!("{line}\n"))?;
        guest.wait_for_line(&format!("episode {number} {word}"))
    }

    /// Sends a signal to the process that does the I/O.
    fn signal(&mut self, signal: i32) -> Result<()> {
        match &self.daemon {
            Some(daemon) => daemon.signal(signal),
            None => self.guest()?.signal(signal),
        }
    }

    /// Waits for the end of the process that does the I/O; it is killed if it does not end within
    /// [`BOUND`].
    fn end_of_process(&mut self) -> Result<ProcessResult> {
        match self.daemon.take() {
            Some(mut daemon) => {
                daemon.set_limit(BOUND);
                Ok(ProcessResult::Daemon(daemon.wait()?))
            }
            None => self.end_of_guest(BOUND),
        }
    }

    /// Waits for the end of the guest's own process; fails if its writers reported an error.
    fn end_of_guest(&mut self, limit: Duration) -> Result<ProcessResult> {
        let mut guest = self.guest.take().context("the guest is gone")?;
        guest.set_limit(limit);
        let outcome = guest.wait()?;
        let met = outcome
            .console
            .lines()
            .find(|line| line.contains(" wrong: "));
        ensure!(met.is_none(), "{}\n{}", met.unwrap_or(""), outcome.tail());
        Ok(ProcessResult::Guest(outcome))
    }

    /// Notes the duration of `what`, `since` it could end, and checks it against the bound.
    fn took(&mut self, what: &str, since: Instant) -> Result<()> {
        let took = since.elapsed();
        let bound = BOUND.mul_f64(patience::stretch());
        if took > self.seen.longest {
            (self.seen.longest, self.seen.what) = (took, what.to_owned());
        }
        ensure!(
            took <= bound,
            "{what} took {:.1} s of {:.1} s",
            took.as_secs_f64(),
            bound.as_secs_f64()
        );
        Ok(())
    }

    /// Ends the remaining processes, for an error.
    fn last_words(&mut self) -> String {
        let mut words = String::new();
        // The storage may be held: nothing would end.
        for episode in &self.plan.episodes {
            let _ = self.disk.mend(episode.fault);
        }
        if let Some(guest) = self.guest.take() {
            let ended = guest.signal(libc::SIGQUIT).and_then(|()| guest.wait());
            match ended {
                Ok(outcome) => words.push_str(&format!("\n{}", outcome.tail())),
                Err(error) => words.push_str(&format!("\n--- the guest: {error:#}")),
            }
        }
        if let Some(daemon) = self.daemon.take() {
            let ended = daemon.signal(libc::SIGQUIT).and_then(|()| daemon.wait());
            match ended {
                Ok(output) => words.push_str(&format!("\n--- daemon\n{}", output.stderr_text())),
                Err(error) => words.push_str(&format!("\n--- the daemon: {error:#}")),
            }
        }
        words
    }
}
