//! A process that runs the guest over files, and is killed at its k-th write. Its requests and
//! their answers are in a log.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::RawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;

use guest_mem::GuestRam;
use rustix::process::{Signal, getpid, kill_process};
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece};
use vio::pass_down;

use super::*;

/// Variables for the child process: the directory of its files, and the write at which it is
/// killed.
const DIR: &str = "SWAP_CRASH_DIR";
const STOP_AT: &str = "SWAP_CRASH_AT";
/// Prefix of its output where the test cannot run.
const SKIPPED: &str = "skipped: ";
const LOG: &str = "log";
const SEED: u64 = 9;

fn image(dir: &Path, disk: usize) -> std::path::PathBuf {
    dir.join(format!("image{disk}"))
}

/// A file whose process ends at a write.
struct Killer {
    below: Box<dyn BlockIo>,
    left: Arc<AtomicU64>,
}

impl Killer {
    /// Counts a request that has been submitted.
    fn count(&mut self, op: Op) {
        // Relaxed: only the number matters.
        if !matches!(op, Op::Read { .. } | Op::Flush)
            && self.left.fetch_sub(1, Ordering::Relaxed) == 1
        {
            // The kernel has the request, and may have executed it.
            self.below.flush();
            kill_process(getpid(), Signal::KILL).expect("one's own process");
        }
    }
}

impl BlockIo for Killer {
    pass_down!();

    fn run_now(&mut self, op: Op, pieces: &[Piece]) -> Option<Outcome> {
        let outcome = self.below.run_now(op, pieces)?;
        self.count(op);
        Some(outcome)
    }

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        self.below.submit(slot, op, pieces);
        self.count(op);
    }

    fn flush(&mut self) {
        self.below.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.below.poll(done);
    }

    fn has_completions(&mut self) -> bool {
        self.below.has_completions()
    }

    fn cancel(&mut self, slot: u32) {
        self.below.cancel(slot);
    }

    fn arm(&mut self) {
        self.below.arm();
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        self.below.wake_fds(fds);
    }
}

/// A log that outlives its process: a line, a write.
struct Log(File);

impl Journal for Log {
    fn record(&self, event: &Event) {
        let mut file = &self.0;
        file.write_all(event.line().as_bytes()).expect("a log");
    }

    fn is_over(&self) -> bool {
        false
    }
}

/// Runs until it is killed, or to the end.
fn run_until_killed(dir: &Path, stop_at: u64) -> Made<()> {
    let left = Arc::new(AtomicU64::new(stop_at));
    let count = |below| -> Box<dyn BlockIo> {
        let left = left.clone();
        Box::new(Killer { below, left })
    };
    let machine = Machine::over(&SHAPE, |_: &GuestRam| {
        let disk = |number| -> Made<Disk> {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).open(image(dir, number))?;
            let Disk { below, image } = support::disk(&file)?;
            let below = count(below);
            Ok(Disk { below, image })
        };
        Ok(Files {
            store: count(support::store(PAGES as u32)?),
            slots: PAGES,
            trims: false,
            disks: (0..DISKS).map(disk).collect::<Made<_>>()?,
        })
    })?;
    let log = OpenOptions::new().append(true).open(dir.join(LOG))?;
    let guest = Arc::new(Guest::new(&machine, Arc::new(Log(log))));
    let (tell, _ended) = channel();
    for worker in start(&guest, SEED, &tell) {
        let outcome = worker.join().expect("it found what it stored");
        assert!(outcome.is_ok(), "only a kill ends it early");
    }
    assert_eq!(machine.stop().pauses, 0);
    Ok(())
}

/// Not a test by itself: the child process of
/// [`a_killed_process_leaves_what_a_power_failure_may_leave`].
#[test]
fn the_process_that_is_killed() {
    let (Some(dir), Ok(stop_at)) = (std::env::var_os(DIR), std::env::var(STOP_AT)) else {
        return;
    };
    let stop_at = stop_at.parse().expect("a number");
    if let Err(error) = run_until_killed(Path::new(&dir), stop_at) {
        eprintln!("{SKIPPED}{error}");
    }
}

#[test]
fn a_killed_process_leaves_what_a_power_failure_may_leave() {
    let program = std::env::current_exe().expect("this program");
    let mut killed = 0;
    for stop_at in [1, 2, 5, 10, 20, 30, 45, 60, 80, 100, u64::MAX] {
        let dir = tempfile::tempdir().expect("a directory");
        for disk in 0..DISKS {
            let file = File::create(image(dir.path(), disk)).expect("an image");
            file.set_len((BLOCKS * PAGE) as u64).expect("its blocks");
        }
        File::create(dir.path().join(LOG)).expect("a log");
        let mut command = Command::new(&program);
        command.args([
            "--exact",
            "processes::the_process_that_is_killed",
            "--nocapture",
        ]);
        command
            .env(DIR, dir.path())
            .env(STOP_AT, stop_at.to_string());
        let output = command.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        if let Some(at) = said.find(SKIPPED) {
            return eprintln!("{}", &said[at..]);
        }
        let is_killed = output.status.signal() == Some(Signal::KILL.as_raw());
        assert!(is_killed || output.status.success(), "{stop_at}: {said}");
        killed += u64::from(is_killed);
        let events = check(dir.path(), stop_at);
        println!("write {stop_at}: killed: {is_killed}, {events} events");
    }
    assert!(killed >= 8, "{killed} were killed");
}

/// Compares the images with the log; returns the number of its events.
fn check(dir: &Path, stop_at: u64) -> usize {
    let mut oracle = new_oracle();
    let log = std::fs::read_to_string(dir.join(LOG)).expect("a log");
    // The last line may be incomplete.
    let whole = log.rfind('\n').map_or("", |end| &log[..end]);
    for line in whole.lines() {
        oracle.record(&Event::parse(line).expect("an event"));
    }
    for disk in 0..DISKS {
        let found = std::fs::read(image(dir, disk)).expect("an image");
        if let Err(error) = oracle.check(disk, &found) {
            panic!("killed at write {stop_at}: {error}");
        }
    }
    whole.lines().count()
}
