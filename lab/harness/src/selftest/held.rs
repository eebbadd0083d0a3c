//! Cases with storage that holds requests for seconds: device-mapper suspended under the disk of a
//! guest, which meanwhile clears Bus Master, resets the device, or powers off.
//!
//! Host and guest go in step (`workload held`): the storage is suspended before the guest issues
//! its requests, the guest acts once the kernel of the host has them, and the storage is resumed
//! [`HOLD`] after that. The result therefore does not depend on the speed of the emulated host.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use workload::BLOCK;
use workload::held::{self, Blocks, HeldAction, Kind};

use super::case::Case;
use crate::system::daemon::DaemonPlan;
use crate::system::guest::{Guest, Mode, RunningGuest};
use crate::system::host::Host;
use crate::system::storage::Storage;

/// Time for which requests are held after the guest has begun to act: longer than any limit after
/// which requests were once cancelled or abandoned.
const HOLD: Duration = Duration::from_secs(5);

/// Time limit for requests to reach the kernel, and for the process to end after the release.
const PATIENCE: Duration = Duration::from_secs(60);

const SEED: u64 = 34;

/// One run: the requests that are held, and the guest's action meanwhile.
#[derive(Clone, Copy)]
struct Run {
    kinds: &'static [Kind],
    act: HeldAction,
}

/// Returns runs of these requests, with each act in turn; the last one ends the guest.
fn with_acts(kinds: &'static [Kind], acts: &[HeldAction]) -> Vec<Run> {
    acts.iter().map(|&act| Run { kinds, act }).collect()
}

/// Process that does the guest's I/O.
#[derive(Clone, Copy)]
enum Server {
    /// `exitless run` itself, with this `--dma`.
    Run { mode: Mode, dma: &'static str },
    /// `exitless serve`: a disk that loses Bus Master or is reset has its rings stopped
    /// (GET_VRING_BASE).
    Serve,
}

impl Server {
    fn name(self) -> String {
        match self {
            Self::Run { mode, dma } => format!("{}, dma={dma}", mode.name()),
            Self::Serve => "served by another process".into(),
        }
    }
}

/// Returns the cases of `make test`.
pub fn quick() -> Vec<Case> {
    let server = Server::Run {
        mode: Mode::Shared,
        dma: "direct",
    };
    let runs = with_acts(
        &Kind::ALL,
        &[
            HeldAction::BusMaster,
            HeldAction::Reset,
            HeldAction::PowerOff,
        ],
    );
    vec![case("a read, a write and a flush", server, runs)]
}

/// Returns the cases of `make soak`: each kind alone, so that none hides behind the effects of
/// another.
pub fn soak() -> Vec<Case> {
    let run = |mode, dma| Server::Run { mode, dma };
    let mut cases = Vec::new();
    for server in [
        run(Mode::None, "direct"),
        run(Mode::Shared, "direct"),
        run(Mode::Trap, "bounce"),
        Server::Serve,
    ] {
        let mut acts = vec![HeldAction::Wait, HeldAction::BusMaster, HeldAction::Reset];
        // The end of a machine does not wait for requests of another process.
        if let Server::Run { .. } = server {
            acts.push(HeldAction::PowerOff);
        }
        cases.push(case("a read", server, with_acts(&[Kind::Read], &acts)));
        cases.push(case("a write", server, with_acts(&[Kind::Write], &acts)));
        cases.push(case("a flush", server, with_acts(&[Kind::Flush], &acts)));
    }
    cases
}

fn case(what: &str, server: Server, runs: Vec<Run>) -> Case {
    let name = format!("{what} held for {} s: {}", HOLD.as_secs(), server.name());
    Case::new(name, move |host| {
        let count = runs.len() as u64;
        let bytes = Blocks::needed(count) as usize * BLOCK;
        let mut content = vec![0; bytes];
        workload::pattern::fill(SEED, 0, &mut content);
        let Some(mut storage) = Storage::linear(host, "held", &content)? else {
            return Ok("skipped: device-mapper takes privileges on this host".into());
        };
        play(host, &mut storage, server, &runs)?;
        let content = storage.content()?;
        for (blocks, run) in numbered(&runs) {
            held::check_disk(&content, blocks, SEED, run.act, run.kinds)
                .map_err(|wrong| anyhow!("after run {}: {wrong}", blocks.run))?;
        }
        storage.remove()?;
        Ok(format!("{count} times"))
    })
}

/// Returns each run with its blocks.
fn numbered(runs: &[Run]) -> impl Iterator<Item = (Blocks, &Run)> {
    (1..).map(|run| Blocks { run }).zip(runs)
}

/// Returns one command of `workload` for each run.
fn script(runs: &[Run]) -> String {
    let command = |(blocks, run): (Blocks, &Run)| {
        let mut text = format!("workload held /dev/vda --run {} --seed {SEED}", blocks.run);
        for kind in run.kinds {
            text.push_str(&format!(" --{}", kind.name()));
        }
        if run.act != HeldAction::Wait {
            text.push_str(&format!(" --{}", run.act.name()));
        }
        text
    };
    numbered(runs).map(command).collect::<Vec<_>>().join(" && ")
}

/// Runs a guest with its disk on `storage` to its end, and checks its output.
fn play(host: &Host, storage: &mut Storage<'_>, server: Server, runs: &[Run]) -> Result<()> {
    let file = format!("path={},direct=on", storage.path());
    let limit = Duration::from_secs(120 + 60 * runs.len() as u64);
    match server {
        Server::Run { mode, dma } => {
            let mut guest = Guest::new(mode, script(runs));
            guest.flags.extend(["--dma".into(), dma.into()]);
            guest.disks.push(file);
            guest.limit = limit;
            go_through(host, server, storage, &guest, runs)
        }
        Server::Serve => {
            let plan = DaemonPlan {
                disks: vec![file],
                nets: Vec::new(),
                idle: "adaptive",
                limit: limit + PATIENCE,
            };
            let daemon = plan.start(host)?;
            let mut guest = Guest::new(Mode::None, script(runs));
            let socket = host.path(&DaemonPlan::socket(0));
            guest.disks.push(format!("socket={socket}"));
            guest.idle = "adaptive";
            guest.limit = limit;
            let gone_through = go_through(host, server, storage, &guest, runs);
            let (_, said) = daemon.end()?;
            gone_through.with_context(|| format!("the daemon said: {said}"))?;
            ensure!(!said.contains("cancel"), "the daemon said: {said}");
            Ok(())
        }
    }
}

/// Takes `guest` through all runs, and waits for its end.
fn go_through(
    host: &Host,
    server: Server,
    storage: &mut Storage<'_>,
    guest: &Guest,
    runs: &[Run],
) -> Result<()> {
    let mut guest = guest.spawn(host)?;
    for (blocks, run) in numbered(runs) {
        hold(server, storage, &mut guest, blocks, run).with_context(|| {
            let said = guest.so_far();
            let lines: Vec<&str> = said.lines().filter(|line| line.contains("held")).collect();
            format!("{:?} with {:?}\n{}", run.act, run.kinds, lines.join("\n"))
        })?;
    }
    let released = Instant::now();
    let outcome = guest.wait()?;
    let took = released.elapsed();
    ensure!(
        took < PATIENCE,
        "the process ended {} s after the release",
        took.as_secs()
    );
    let script = match runs.last() {
        Some(run) if run.act == HeldAction::PowerOff => None,
        _ => Some(0),
    };
    outcome.check_script(script)
}

/// Returns whether the guest's act must wait for the storage: the device may still access the
/// guest's memory, or an old write may reach the disk after a newer one.
fn must_wait(server: Server, act: HeldAction) -> bool {
    match (server, act) {
        // Requests whose data go through buffers of ours access no guest memory while the device is
        // stopped.
        (Server::Run { dma, .. }, HeldAction::BusMaster) => dma != "bounce",
        _ => true,
    }
}

/// Takes the guest through one run.
fn hold(
    server: Server,
    storage: &mut Storage<'_>,
    guest: &mut RunningGuest<'_>,
    blocks: Blocks,
    run: &Run,
) -> Result<()> {
    let word = |word: &str| format!("held {} {word}", blocks.run);
    // Either line has this prefix: a guest that cannot go on prints the reason.
    let said = guest.wait_for_line(&word(""))?;
    ensure!(said == word("ready"), "{said}");
    storage.hold()?;
    guest.type_in("\n")?;
    guest.wait_for(&word("issued"))?;
    wait_for_operations(storage, run.kinds.len() as u32)?;
    guest.type_in("\n")?;
    guest.wait_for(&word("acting"))?;
    // Until the storage is resumed no request ends, and the machine does not either.
    let is_early = guest
        .writes_within(HOLD, &word("ended:"))
        .context("it ended while the storage held its requests")?;
    let acted = guest.writes_within(Duration::ZERO, &word("acted:"))?;
    ensure!(!is_early, "a request ended while the storage held it");
    match must_wait(server, run.act) {
        true => ensure!(!acted, "the act was over while requests were in flight"),
        false => ensure!(acted, "the act waited for requests that reach no memory"),
    }
    storage.release()?;
    if run.act == HeldAction::PowerOff {
        return Ok(());
    }
    let verdict = guest.wait_for_line(&word("over:"))?;
    ensure!(verdict == word("over: ok"), "{verdict}");
    Ok(())
}

/// Waits until the kernel of the host has `count` unfinished requests.
fn wait_for_operations(storage: &Storage<'_>, count: u32) -> Result<()> {
    let start = Instant::now();
    loop {
        let now = storage.operations_in_kernel()?;
        if now == count {
            return Ok(());
        }
        ensure!(
            start.elapsed() < PATIENCE,
            "the kernel has {now} operations of {count}"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}
