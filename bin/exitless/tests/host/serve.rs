//! `exitless serve`.

use std::fs::{self, File};
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
use crate::storage::{self, Storage};
use crate::{Host, Outcome, both, ended, host, host_with, walk};

const BLOCK: u32 = 4096;
const IMAGE: u64 = 1 << 20;

/// Request of a block device, by its number.
const BLKSSZGET: u32 = 0x1268;

fn hosts() -> Vec<Host> {
    use Outcome::{Refuses, Works};
    const THREADS: Outcome = Works(Some("raw disks are served by threads"));
    let mut hosts = vec![
        host(
            "no Unix sockets",
            |errno| Denied::default().call_with(libc::SYS_socket, 0, libc::AF_UNIX as u32, errno),
            Refuses(&["refuses Unix sockets", "seccomp profile"], None),
        ),
        host(
            "no FIONBIO",
            |errno| Denied::default().call_with(libc::SYS_ioctl, 1, libc::FIONBIO as u32, errno),
            Refuses(&["refuses FIONBIO", "seccomp profile"], None),
        ),
        host(
            "no bind",
            |errno| Denied::default().call(libc::SYS_bind, errno),
            Refuses(&["refuses bind", "seccomp profile"], None),
        ),
        host(
            "no listen",
            |errno| Denied::default().call(libc::SYS_listen, errno),
            Refuses(&["refuses listen", "seccomp profile"], None),
        ),
        host(
            "no accept4",
            |errno| Denied::default().call(libc::SYS_accept4, errno),
            Refuses(&["refuses accept4", "seccomp profile"], None),
        ),
        host(
            "no sendmsg",
            |errno| Denied::default().call(libc::SYS_sendmsg, errno),
            Refuses(&["refuses sendmsg", "seccomp profile"], None),
        ),
        host(
            "no recvmsg",
            |errno| Denied::default().call(libc::SYS_recvmsg, errno),
            Refuses(&["refuses recvmsg", "seccomp profile"], None),
        ),
        host(
            "no /proc",
            |_| Denied::default().empty("/proc"),
            Refuses(&["/proc/self/fd", "mount -t proc proc /proc"], None),
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
            "no AIO",
            |errno| Denied::default().call(libc::SYS_io_setup, errno),
            Works(Some("no AIO context")),
        ),
        host(
            "no io_submit",
            |errno| Denied::default().call(libc::SYS_io_submit, errno),
            Works(Some("no AIO context")),
        ),
        host(
            "no io_getevents",
            |errno| Denied::default().call(libc::SYS_io_getevents, errno),
            Works(Some("no AIO context")),
        ),
        host_with(
            "no sched_setaffinity, and --cpu",
            |errno| Denied::default().call(libc::SYS_sched_setaffinity, errno),
            &["--cpu", "0"],
            Refuses(&["cpu 0", "without --cpu"], Some(&[])),
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
    ];
    hosts.extend(both::hosts().into_iter().map(|both| both.serve));
    hosts
}

/// Folder of a daemon's disks and sockets: on a disk, not in memory.
struct DaemonDir(TempDir);

/// Its disks, by their options.
const DISKS: [&str; 2] = ["", ",direct=on,block=4096"];

impl DaemonDir {
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

    /// A daemon for all of them, on a host that denies this; `more` are further keys of each disk
    /// and further arguments.
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

/// Exercises one disk, which is full of the byte 0x5a.
fn exercise(program: &Program, socket: &Path, image: &Path) -> Result<(), String> {
    exercise_from(0x5a, program, socket, image)
}

/// Likewise of a disk that is full of the byte `first`.
fn exercise_from(first: u8, program: &Program, socket: &Path, image: &Path) -> Result<(), String> {
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
        if data != [if round == 0 { first } else { 0 }; BLOCK as usize] {
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
    if client.parts().2[0].take_calls() == 0 {
        return Err("no request's end was signalled".into());
    }
    is_idle(program.id())
}

/// Whether a daemon that has nothing to do sleeps.
fn is_idle(pid: u32) -> Result<(), String> {
    const WINDOW: Duration = Duration::from_millis(20);
    let ran = || -> u64 {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
        let ran = tasks.filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok());
        ran.filter_map(|ran| ran.split(' ').next()?.parse::<u64>().ok())
            .sum()
    };
    let mut ran_for = Duration::MAX;
    // The last request's end may still be on its way.
    for _ in 0..5 {
        let before = ran();
        std::thread::sleep(WINDOW);
        ran_for = Duration::from_nanos(ran() - before);
        if ran_for < WINDOW / 4 {
            return Ok(());
        }
    }
    Err(format!("idle, it ran for {ran_for:?} of {WINDOW:?}"))
}

/// Serves, and has both disks make their requests. Returns the output.
fn serves(place: &DaemonDir, command: Command) -> Result<String, String> {
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
        let done = exercise(&program, &place.socket(number), &place.image(number));
        done.map_err(|what| format!("disk {number}: {what}; it said {}", program.said()))?;
    }
    let ended = program.ends_by(Signal::TERM, 0);
    Ok(ended.said)
}

fn check(host: &Host, errno: i32) -> Result<(), String> {
    let place = DaemonDir::new();
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
    /// `None`: this host has none for us; the reason is printed.
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
    let place = DaemonDir::new();
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
        exercise(&program, &socket, &device.0).unwrap();
        let ended = program.ends_by(Signal::TERM, 0);
        assert_eq!(
            ended.said.matches("served by threads").count(),
            1,
            "{}",
            ended.said
        );
    }
}

/// Past the page cache blocks are as large as the sectors below, also where the host does not say
/// so: its kernel is older than statx with DIOALIGN (6.1), or its seccomp filter.
#[test]
fn direct_disks_keep_to_sectors_of_which_the_host_says_nothing() {
    let no_statx = || Denied::default().call(libc::SYS_statx, libc::ENOSYS);
    let no_size = || Denied::default().call_with(libc::SYS_ioctl, 1, BLKSSZGET, libc::EPERM);
    let files = || {
        [
            // Without data only /sys shows the device below; with some a read does.
            ("empty", 0, no_statx()),
            ("filled", 0x5a, no_statx()),
            ("unseen", 0x5a, no_statx().empty("/sys")),
        ]
    };
    let devices = || {
        [
            ("device", 0, no_size()),
            ("unseen", 0, no_size().empty("/sys")),
        ]
    };
    for (storage, hosts) in [
        (Storage::Ext4On4Kn, files().to_vec()),
        (Storage::Ext4, files().to_vec()),
        (Storage::Loop4Kn, devices().to_vec()),
        (Storage::Loop512, devices().to_vec()),
    ] {
        let made = storage::TestStorage::new(storage).and_then(|mut place| {
            let images = hosts.iter().map(|(name, ..)| place.image(name, IMAGE));
            let images: Vec<_> = images.collect::<Result<_, _>>()?;
            Ok((place, images))
        });
        let (place, images) = match made {
            Ok(made) => made,
            Err(reason) => {
                println!("skipped: no {storage:?} here: {reason}");
                continue;
            }
        };
        for ((name, first, denied), image) in hosts.into_iter().zip(images) {
            let fill = || {
                if first != 0 {
                    fs::write(&image, vec![first; IMAGE as usize]).unwrap();
                }
            };
            fill();
            let socket = place.folder().join(format!("{name}.socket"));
            let command = |block: u32| {
                let mut command = exitless(&["serve", "--idle", "sleep", "--block"]);
                command.arg(format!(
                    "id=d0,socket={},path={},direct=on,block={block}",
                    socket.display(),
                    image.display()
                ));
                denied.clone().apply(&mut command);
                command
            };
            for block in [512, 4096] {
                let what = format!("{storage:?}, {name}, block={block}");
                if block < storage.direct_block() {
                    let refused = ended(command(block));
                    let said = String::from_utf8_lossy(&refused.stderr);
                    assert_eq!(refused.status.code(), Some(2), "{what}: {said}");
                    assert!(said.contains("block=4096"), "{what}: {said}");
                    continue;
                }
                let program = Program::start(command(block), true);
                program.wait_for("ready: ");
                exercise_from(first, &program, &socket, &image)
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                program.ends_by(Signal::TERM, 0);
                fill();
            }
        }
    }
}

#[test]
fn a_daemon_works_with_less_or_says_what_to_do() {
    walk(&hosts(), check);
}
