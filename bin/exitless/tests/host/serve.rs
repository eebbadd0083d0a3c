//! `exitless serve`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use denied::Denied;
use rustix::process::Signal;
use tempfile::TempDir;
use vhost_blk::Client;
use vhost_blk::client::{Options, feature};
use vhost_blk::queue::{Extent, Op, Status};
use vhost_user::wire::ProtocolFeatures;

use crate::program::{PATIENCE, Program, exitless};
use crate::{Host, Outcome, ended, host, host_with, walk};

const BLOCK: u32 = 4096;
const IMAGE: u64 = 1 << 20;

fn hosts() -> Vec<Host> {
    use Outcome::{Refuses, Works};
    const THREADS: Outcome = Works(Some("raw disks are served by threads"));
    vec![
        host("everything", |_| Denied::default(), Works(None)),
        host(
            "no io_uring",
            |errno| {
                Denied::default()
                    .call(libc::SYS_io_uring_setup, errno)
                    .call(libc::SYS_io_uring_enter, errno)
                    .call(libc::SYS_io_uring_register, errno)
            },
            THREADS,
        ),
        host(
            "no io_uring_setup",
            |errno| Denied::default().call(libc::SYS_io_uring_setup, errno),
            THREADS,
        ),
        host(
            "no io_uring_enter",
            |errno| Denied::default().call(libc::SYS_io_uring_enter, errno),
            THREADS,
        ),
        host(
            "no io_uring_register",
            |errno| Denied::default().call(libc::SYS_io_uring_register, errno),
            THREADS,
        ),
        host(
            "no REGISTER_EVENTFD",
            |errno| Denied::default().call_with(libc::SYS_io_uring_register, 1, 4, errno),
            THREADS,
        ),
        host(
            "no REGISTER_IOWQ_MAX_WORKERS",
            |errno| Denied::default().call_with(libc::SYS_io_uring_register, 1, 19, errno),
            Works(None),
        ),
        host(
            "no io_uring, no fallocate",
            |errno| {
                Denied::default()
                    .call(libc::SYS_io_uring_setup, errno)
                    .call(libc::SYS_fallocate, errno)
            },
            THREADS,
        ),
        host(
            "no fallocate",
            |errno| Denied::default().call(libc::SYS_fallocate, errno),
            Works(None),
        ),
        host(
            "no AIO",
            |errno| Denied::default().call(libc::SYS_io_setup, errno),
            Works(Some("no AIO context")),
        ),
        host(
            "no preadv2",
            |errno| Denied::default().call(libc::SYS_preadv2, errno),
            Works(None),
        ),
        host(
            "no statx",
            |errno| Denied::default().call(libc::SYS_statx, errno),
            Works(None),
        ),
        host(
            "no fstatfs",
            |errno| Denied::default().call(libc::SYS_fstatfs, errno),
            Refuses(&["refuses fstatfs", "seccomp profile"], None),
        ),
        host(
            "no epoll_pwait2",
            |errno| Denied::default().call(libc::SYS_epoll_pwait2, errno),
            Works(None),
        ),
        host(
            "no prlimit64",
            |errno| Denied::default().call(libc::SYS_prlimit64, errno),
            Works(None),
        ),
        host(
            "no madvise",
            |errno| Denied::default().call(libc::SYS_madvise, errno),
            Works(None),
        ),
        host(
            "no memfd_create",
            |errno| Denied::default().call(libc::SYS_memfd_create, errno),
            Works(Some("no inflight regions")),
        ),
        host(
            "no sched_setaffinity",
            |errno| Denied::default().call(libc::SYS_sched_setaffinity, errno),
            Works(None),
        ),
        host_with(
            "no sched_setaffinity, and --cpu",
            |errno| Denied::default().call(libc::SYS_sched_setaffinity, errno),
            &["--cpu", "0"],
            Refuses(&["cpu 0", "without --cpu"], Some(&[])),
        ),
        host(
            "no OFD locks",
            |errno| {
                Denied::default()
                    .call_with(libc::SYS_fcntl, 1, libc::F_OFD_SETLK as u32, errno)
                    .call_with(libc::SYS_fcntl, 1, libc::F_OFD_GETLK as u32, errno)
            },
            Refuses(&["refuses locks", "locking=off"], Some(&["locking=off"])),
        ),
        host(
            "no clone3",
            |_| Denied::default().call(libc::SYS_clone3, libc::ENOSYS),
            Works(None),
        ),
        host(
            "no membarrier",
            |errno| Denied::default().call(libc::SYS_membarrier, errno),
            Works(Some("writes cannot be watched")),
        ),
        host(
            "no tgkill",
            |errno| Denied::default().call(libc::SYS_tgkill, errno),
            Works(Some("writes cannot be watched")),
        ),
        host(
            "no AIO, no membarrier",
            |errno| {
                Denied::default()
                    .call(libc::SYS_io_setup, errno)
                    .call(libc::SYS_membarrier, errno)
            },
            Works(Some("can hold its core")),
        ),
        host(
            "no eventfd",
            |errno| Denied::default().call(libc::SYS_eventfd2, errno),
            Refuses(&["refuses eventfd", "seccomp profile"], None),
        ),
        host(
            "no epoll",
            |errno| Denied::default().call(libc::SYS_epoll_create1, errno),
            Refuses(&["refuses epoll", "seccomp profile"], None),
        ),
        host(
            "no signalfd",
            |errno| Denied::default().call(libc::SYS_signalfd4, errno),
            Refuses(&["refuses signalfd", "seccomp profile"], None),
        ),
    ]
}

/// Where a daemon's disks and sockets are: on a disk, not in memory.
struct Place(TempDir);

/// Its disks, by their options.
const DISKS: [&str; 2] = ["", ",direct=on,block=4096"];

impl Place {
    fn new() -> Self {
        let place = Self(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        for number in 0..DISKS.len() {
            let file = File::create(place.image(number)).unwrap();
            file.write_all_at(&vec![0x5a; IMAGE as usize], 0).unwrap();
        }
        place
    }

    fn image(&self, number: usize) -> PathBuf {
        self.0.path().join(format!("i{number}"))
    }

    fn socket(&self, number: usize) -> PathBuf {
        self.0.path().join(format!("s{number}"))
    }

    /// A daemon for all of them, on a host that denies this; `more` are further keys of each disk and further arguments.
    fn command(&self, denied: Denied, more: &[&str]) -> Command {
        let mut command = exitless(&["serve", "--idle", "sleep"]);
        let (keys, arguments): (Vec<&str>, Vec<&str>) =
            more.iter().partition(|more| more.contains('='));
        command.args(arguments);
        for (number, options) in DISKS.iter().enumerate() {
            let (socket, path) = (self.socket(number), self.image(number));
            let mut block = format!(
                "id=d{number},socket={},path={}{options}",
                socket.display(),
                path.display()
            );
            for key in &keys {
                block.push(',');
                block.push_str(key);
            }
            command.args(["--block", &block]);
        }
        denied.apply(&mut command);
        command
    }
}

/// What one disk does.
fn exercise(socket: &Path, image: &Path) -> Result<(), String> {
    let mut options = Options::new(4, BLOCK);
    // As QEMU does, where it is offered.
    options.protocol = options.protocol | ProtocolFeatures::INFLIGHT_SHMFD;
    let connected = Client::connect(socket, options);
    let mut client = connected.map_err(|error| format!("connecting: {error}"))?;
    let features = client.features();
    let mut ask = |op: Op, sector: u64, data: &mut [u8]| {
        let bytes = data.len() as u32;
        let status = client.request(op, Extent { sector, bytes }, data);
        match status {
            Ok(Some(Status::Ok)) => Ok(()),
            other => Err(format!("{op:?} at {sector}: {other:?}")),
        }
    };
    let mut data = [0; BLOCK as usize];
    // Twice, so that whatever is made at first use is there the second time.
    for round in 0..2u8 {
        ask(Op::Read, 8, &mut data)?;
        if data != [if round == 0 { 0x5a } else { 0 }; BLOCK as usize] {
            return Err(format!("read {:#x} in round {round}", data[0]));
        }
        ask(Op::Write, 8, &mut [0x70 + round; BLOCK as usize])?;
        ask(Op::Flush, 0, &mut [])?;
        ask(Op::Read, 8, &mut data)?;
        if data != [0x70 + round; BLOCK as usize] {
            return Err(format!("read {:#x} after a write", data[0]));
        }
        let file = File::open(image).unwrap();
        file.read_exact_at(&mut data, 8 * 512).unwrap();
        if data != [0x70 + round; BLOCK as usize] {
            return Err(format!("the file has {:#x}", data[0]));
        }
        if features & feature::WRITE_ZEROES != 0 {
            ask(Op::WriteZeroes, 8, &mut [0; BLOCK as usize])?;
        } else {
            ask(Op::Write, 8, &mut [0; BLOCK as usize])?;
        }
        ask(Op::Read, 8, &mut data)?;
        if data != [0; BLOCK as usize] {
            return Err(format!("read {:#x} after zeroing", data[0]));
        }
        if features & feature::DISCARD != 0 {
            ask(Op::Discard, 16, &mut [0; BLOCK as usize])?;
        }
    }
    Ok(())
}

/// Serves and has both disks do what they do; what it said.
fn serves(place: &Place, command: Command) -> Result<String, String> {
    let mut program = Program::start(command, true);
    let since = Instant::now();
    while !program.said().contains("ready: ") {
        if !program.is_alive() {
            return Err(format!("it ended: {}", program.said()));
        }
        if since.elapsed() > PATIENCE {
            return Err(format!("it never was ready: {}", program.said()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    for number in 0..DISKS.len() {
        let done = exercise(&place.socket(number), &place.image(number));
        done.map_err(|what| format!("disk {number}: {what}; it said {}", program.said()))?;
    }
    let ended = program.ends_by(Signal::TERM, 0);
    Ok(ended.said)
}

fn check(host: &Host, errno: i32) -> Result<(), String> {
    let place = Place::new();
    let command = |arguments| place.command((host.denied)(errno), arguments);
    let mut trial = command(host.arguments);
    trial.arg("--check");
    let tried = ended(trial);
    host.check_refusal(&tried)
        .map_err(|what| format!("--check: {what}"))?;
    if let Outcome::Works(_) = host.outcome {
        if tried.status.code() != Some(0) {
            return Err(format!("--check: {tried:?}"));
        }
        let said = serves(&place, command(host.arguments))?;
        return host.check_said(&said, "ready: ");
    }
    host.check_refusal(&ended(command(host.arguments)))?;
    match host.advised() {
        Some(arguments) => serves(&place, command(&arguments)).map(drop),
        None => Ok(()),
    }
}

/// A block device over a file; detached when dropped.
struct Loop(PathBuf);

impl Loop {
    /// `None`: this host has none for us, which is said.
    fn new(file: &Path) -> Option<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output();
        match output {
            Ok(output) if output.status.success() => {
                let name = String::from_utf8(output.stdout).unwrap();
                Some(Self(PathBuf::from(name.trim())))
            }
            other => {
                println!("skipped: no loop device: {other:?}");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
    }
}

#[test]
fn a_block_device_is_served_without_io_uring() {
    let place = Place::new();
    let Some(device) = Loop::new(&place.image(0)) else {
        return;
    };
    for options in DISKS {
        // What the last one wrote.
        File::options()
            .write(true)
            .open(&device.0)
            .unwrap()
            .write_all_at(&vec![0x5a; IMAGE as usize], 0)
            .unwrap();
        let mut command = exitless(&["serve", "--idle", "sleep", "--block"]);
        let (socket, path) = (place.socket(0), device.0.display());
        command.arg(format!(
            "id=d0,socket={},path={path}{options}",
            socket.display()
        ));
        let denied = Denied::default().call(libc::SYS_io_uring_setup, libc::EPERM);
        denied.apply(&mut command);
        let program = Program::start(command, true);
        program.wait_for("ready: ");
        exercise(&socket, &device.0).unwrap();
        let ended = program.ends_by(Signal::TERM, 0);
        assert_eq!(
            ended.said.matches("served by threads").count(),
            1,
            "{}",
            ended.said
        );
    }
}

#[test]
fn a_daemon_works_with_less_or_says_what_to_do() {
    walk(&hosts(), check);
}
