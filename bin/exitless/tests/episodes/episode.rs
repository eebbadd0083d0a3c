//! One episode.

use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use held_fs::{Gate, HeldFs, Kind};
use report::clock::Clock;
use rustix::process::Signal;
use seeded::Random;
use tempfile::TempDir;
use vhost_blk::checked::{CheckedDisk, Phase};
use vhost_blk::client::Options;
use vhost_blk::verify::Verdict;
use vhost_user::wire::ProtocolFeatures;

use crate::plan::{Action, Backend, Fault, Plan};
use crate::program::{Program, exitless, until};

/// Longest time from the moment at which the storage allows something to end until it has ended.
pub const BOUND: Duration = Duration::from_secs(5);
const BLOCK: u32 = 4096;
const IMAGE: u64 = 4 << 20;
/// Few, so that requests of one block follow each other closely.
const BLOCKS: usize = 96;
/// Time that a slow operation is held.
const SLOW: Duration = Duration::from_millis(7);
/// After the fault, before everything is read.
const AFTERWARDS: Duration = Duration::from_millis(50);

struct Scene<'a> {
    plan: &'a Plan,
    image: PathBuf,
    place: &'a Path,
    clock: Clock,
    random: Random,
    verdict: Verdict,
}

/// Runs it; panics where it does not hold.
pub fn run(plan: &Plan) {
    let fs = HeldFs::mount().unwrap();
    let gate = fs.create("image", 0);
    fill(&gate, plan.backend);
    let place = TempDir::new().unwrap();
    let mut scene = Scene {
        plan,
        image: fs.path("image"),
        place: place.path(),
        clock: Clock::new(),
        random: Random::new(plan.seed),
        verdict: Verdict::default(),
    };
    // Behind the storage: a panic releases that before it waits for the daemon.
    let daemon = scene.serve();
    let _released = fs.release_at_end();
    let mut disk = scene.connect();
    scene.turn_for(&mut disk, plan.before);
    let daemon = std::thread::scope(|scope| {
        let over = Instant::now() + plan.fault_for;
        let gate = &gate;
        let fault = scope.spawn(move || misbehave(gate, plan.fault, over));
        scene.turn_for(&mut disk, plan.until_action);
        let daemon = scene.act(daemon, &mut disk, gate, over);
        let left = over.saturating_duration_since(Instant::now());
        scene.turn_for(&mut disk, left);
        fault.join().unwrap();
        daemon
    });
    scene.turn_for(&mut disk, AFTERWARDS);
    scene.sweep(&mut disk);
    disk.close(&mut scene.verdict).unwrap();
    scene.judge();
    drop(disk);
    let since = Instant::now();
    daemon.signal(Signal::TERM);
    let ended = daemon.end(since);
    assert_eq!(ended.status, Some(0), "{plan:?}: {}", ended.said);
    assert!(ended.took < BOUND, "{plan:?}: {:?}", ended.took);
}

/// The image's bytes, past the file system.
fn fill(gate: &Gate, backend: Backend) {
    static QCOW2: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = match backend {
        Backend::Buffered | Backend::Direct => &vec![0; IMAGE as usize],
        Backend::Qcow2 => QCOW2.get_or_init(|| {
            let dir = TempDir::new().unwrap();
            let path = dir.path().join("image");
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", "qcow2"]).arg(&path);
            let status = command.arg(IMAGE.to_string()).status();
            assert!(status.is_ok_and(|status| status.success()), "qemu-img");
            std::fs::read(path).unwrap()
        }),
    };
    gate.contents().write_all_at(bytes, 0).unwrap();
}

/// Makes the storage fail as `fault` says, until `over`.
fn misbehave(gate: &Gate, fault: Fault, over: Instant) {
    match fault {
        Fault::None => {}
        Fault::Hold(kind) => gate.hold(&[kind]),
        Fault::HoldAll | Fault::Slow => gate.hold(&Kind::ALL),
        Fault::Fail(kind, times, errno) => (0..times).for_each(|_| gate.fail_next(kind, errno)),
    }
    while let Some(left) = over.checked_duration_since(Instant::now()) {
        std::thread::sleep(left.min(SLOW));
        if fault == Fault::Slow {
            gate.let_through(gate.held());
        }
    }
    gate.release();
    gate.fail_no_more();
}

impl Scene<'_> {
    fn socket(&self) -> PathBuf {
        self.place.join("s")
    }

    /// A daemon, once it listens; a predecessor may still have the image.
    fn serve(&self) -> Program {
        let format = match self.plan.backend {
            Backend::Buffered => "",
            Backend::Direct => ",direct=on",
            Backend::Qcow2 => ",format=qcow2",
        };
        let (image, socket) = (self.image.display(), self.socket());
        let block = format!("id=d,path={image}{format},socket={}", socket.display());
        let command = exitless(&["serve", "--idle", self.plan.idle, "--block", &block]);
        Program::start(command, true)
    }

    fn connect(&self) -> CheckedDisk {
        let socket = self.socket();
        until("the socket", || UnixStream::connect(&socket).is_ok());
        let mut options = Options::new(8, BLOCK);
        options.timeout = BOUND + self.plan.fault_for;
        if self.plan.inflight {
            options.require_protocol(ProtocolFeatures::INFLIGHT_SHMFD);
        }
        let mut disk = CheckedDisk::connect(&socket, options, 1, BLOCKS).unwrap();
        disk.set_patience(BOUND + self.plan.fault_for);
        if self.plan.seed.is_multiple_of(2) {
            disk.makes_zeroes();
        }
        disk
    }

    /// Makes requests for so long, and takes the answers that come.
    fn turn_for(&mut self, disk: &mut CheckedDisk, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.turn(disk, Phase::Load);
        }
    }

    fn turn(&mut self, disk: &mut CheckedDisk, phase: Phase) {
        let came = disk.turn(&self.clock, phase, &mut self.random, &mut self.verdict);
        if !came.unwrap_or_else(|error| panic!("{:?}: {error:?}", self.plan)) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Everything comes back, and every block is read.
    fn sweep(&mut self, disk: &mut CheckedDisk) {
        let deadline = Instant::now() + BOUND;
        let mut phase = Phase::Drain;
        while phase == Phase::Drain || disk.outstanding() > 0 || !disk.is_swept() {
            if phase == Phase::Drain && disk.outstanding() == 0 {
                phase = Phase::Sweep;
            }
            self.turn(disk, phase);
            let plan = self.plan;
            assert!(
                Instant::now() < deadline,
                "{plan:?}: {} outstanding in {phase:?}",
                disk.outstanding()
            );
        }
    }

    /// Does what the plan says; the storage allows it to end at `free`.
    fn act(
        &mut self,
        daemon: Program,
        disk: &mut CheckedDisk,
        gate: &Gate,
        free: Instant,
    ) -> Program {
        let plan = self.plan;
        let asked = Instant::now();
        let daemon = match plan.action {
            Action::None => daemon,
            Action::Stop => {
                disk.client().stop().unwrap();
                disk.client().resume().unwrap();
                daemon
            }
            Action::Reset => {
                disk.reset().unwrap();
                daemon
            }
            Action::Reconnect => {
                disk.client().hang_up();
                daemon
            }
            Action::Counters => {
                daemon.signal(Signal::USR1);
                daemon
            }
            Action::Term | Action::TermTwice => {
                daemon.signal(Signal::TERM);
                if plan.action == Action::TermTwice {
                    std::thread::sleep(Duration::from_millis(30));
                    daemon.signal(Signal::TERM);
                }
                let ended = daemon.end(asked);
                assert!(
                    matches!(ended.status, Some(0 | 5)),
                    "{plan:?}: {:?}: {}",
                    ended.status,
                    ended.said
                );
                // An image that cannot be read is refused, rightly.
                gate.fail_no_more();
                self.serve()
            }
            Action::Kill => {
                daemon.signal(Signal::KILL);
                gate.fail_no_more();
                // The successor waits for the image, and that for the storage.
                let successor = self.serve();
                daemon.end(asked);
                successor
            }
        };
        let late = Instant::now().saturating_duration_since(free.max(asked));
        assert!(late < BOUND, "{plan:?}: {late:?} after the storage let it");
        daemon
    }

    fn judge(&self) {
        let (plan, verdict) = (self.plan, &self.verdict);
        let may_fail = matches!(plan.fault, Fault::Fail(..));
        let is_good = if may_fail {
            verdict.damaged + verdict.lost_wakeups + verdict.unanswered + verdict.wrong_bases == 0
        } else {
            verdict.is_good()
        };
        assert!(is_good, "{plan:?}: {verdict}");
        // Of what failed nothing is known.
        let compared = verdict.checked > 0 || may_fail;
        assert!(compared, "{plan:?}: compared nothing");
    }
}
