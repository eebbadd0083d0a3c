//! `exitless serve` ends in any state of its disks and front ends, and leaves nothing behind.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use held_fs::{HeldFs, Kind};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use spawned::daemon::{DaemonDir, load};
use vhost_blk::queue::{Extent, Op, Status};
use vhost_blk::{Client, RunError};

use crate::program::{PATIENCE, Program, place, until};

const BLOCK: u32 = 4096;

#[test]
fn sigterm_ends_a_daemon_whose_disks_are_busy() {
    let place = place();
    let disks: Vec<String> = (0..4)
        .map(|number| {
            format!(
                "path={},direct=on",
                place.image(&format!("i{number}")).display()
            )
        })
        .collect();
    let program = place.serve(&disks);
    let clients: Vec<_> = (0..4)
        .map(|number| {
            let socket = place.path(&format!("d{number}"));
            std::thread::spawn(move || load(&socket))
        })
        .collect();
    until("every disk is at work", || {
        program.signal(Signal::USR1);
        std::thread::sleep(Duration::from_millis(20));
        // It may not be there yet, or be half written.
        let bytes = std::fs::read(place.path("stats")).unwrap_or_default();
        let stats: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
        (0..4).all(|number| stats["devices"][format!("d{number}")]["requests"].as_u64() > Some(0))
    });
    program.ends_by(Signal::TERM, 0);
    for client in clients {
        let ended = client.join().unwrap();
        assert!(matches!(ended, Err(RunError::HungUp { .. })), "{ended:?}");
    }
    let stats = place.check(4);
    for number in 0..4 {
        let device = &stats["devices"][format!("d{number}")];
        assert!(device["requests"].as_u64().unwrap() > 0, "{stats}");
        assert_eq!(device["cancelled"], 0, "{stats}");
    }
}

/// A daemon with a write of one client that its storage holds, and beside that a RAM disk.
fn held(fs: HeldFs, options: &str) -> (DaemonDir, HeldFs, Program, Client, u16) {
    let place = place();
    let gate = fs.create("held.raw", 1 << 20);
    let disk = format!("path={}{options}", fs.path("held.raw").display());
    let program = place.serve(&[disk, "path=ram:1M".into()]);
    let mut client = place.connect(0, 4);
    gate.hold(&[Kind::Write]);
    let slot = submit(&mut client, Op::Write);
    gate.wait_until_held(1);
    (place, fs, program, client, slot)
}

/// Makes a request of one block at sector 8.
fn submit(client: &mut Client, op: Op) -> u16 {
    let (memory, layout, queues) = client.parts();
    let queue = &mut queues[0];
    let slot = queue.take_slot().unwrap();
    memory.write(layout.data(0, slot), &[0x77; BLOCK as usize]);
    let extent = Extent {
        sector: 8,
        bytes: BLOCK,
    };
    assert!(queue.submit(memory, layout, slot, op, extent, 0));
    queue.publish(memory);
    slot
}

/// Returns the request that has been answered, if one has.
fn answered(client: &mut Client) -> Option<(u16, Status)> {
    let (memory, layout, queues) = client.parts();
    let done = queues[0].complete(memory, layout).unwrap();
    done.map(|done| (done.slot, done.status))
}

/// Storage that holds the thread that asks it is given to threads of the kernel.
#[test]
fn a_disk_that_the_kernel_holds_does_not_hold_its_neighbour() {
    let Some(fs) = HeldFs::mount_waiting_or_skip() else {
        return;
    };
    let (place, fs, _program, mut client, slot) = held(fs, ",direct=on");
    let mut neighbour = place.connect(1, 4);
    let read = submit(&mut neighbour, Op::Read);
    until("the neighbour is answered", || {
        answered(&mut neighbour) == Some((read, Status::Ok))
    });
    assert_eq!(answered(&mut client), None);
    fs.gate("held.raw").release();
    until("the write is answered", || {
        answered(&mut client) == Some((slot, Status::Ok))
    });
}

#[test]
fn sigterm_over_a_held_write_waits_for_it_and_shows_it_to_its_driver() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (place, fs, mut program, mut client, slot) = held(fs, "");
    let gate = fs.gate("held.raw");
    program.signal(Signal::TERM);
    program.wait_for("waiting for storage");
    let said = program.said();
    assert!(said.contains("held.raw") && !said.contains("ram"), "{said}");
    assert!(program.is_alive(), "{said}");
    let since = Instant::now();
    gate.release();
    program.end(since).check(0);
    let shown = answered(&mut client);
    let shown = shown.expect("what has ended is shown before the connection goes");
    assert_eq!(shown, (slot, Status::Ok));
    let mut block = [0; BLOCK as usize];
    gate.contents().read_exact_at(&mut block, 8 * 512).unwrap();
    assert_eq!(block, [0x77; BLOCK as usize]);
    place.check(2);
}

#[test]
fn an_error_of_the_storage_is_said_with_its_file_and_a_flood_of_them_is_not() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let place = place();
    let gate = fs.create("bad.raw", 1 << 20);
    let disk = format!("path={},format=raw,direct=on", fs.path("bad.raw").display());
    let program = place.serve(&[disk]);
    let mut client = place.connect(0, 4);
    const READS: usize = 200;
    (0..READS).for_each(|_| gate.fail_next(Kind::Read, libc::EIO));
    let mut failed = 0;
    while failed < READS {
        submit(&mut client, Op::Read);
        until("an answer", || {
            answered(&mut client).is_some_and(|(slot, status)| {
                assert_eq!(status, Status::IoError);
                client.parts().2[0].release(slot);
                true
            })
        });
        failed += 1;
    }
    let said = program.ends_by(Signal::TERM, 0).said;
    let lines: Vec<_> = said
        .lines()
        .filter(|line| line.contains("bad.raw"))
        .collect();
    let first = lines
        .first()
        .unwrap_or_else(|| panic!("nothing of it: {said}"));
    assert!(first.contains("Read") && first.contains("4096"), "{first}");
    assert!(first.contains("Input/output error"), "{first}");
    // And one more for each second that it took.
    assert!((2..READS / 2).contains(&lines.len()), "{said}");
}

#[test]
fn a_second_signal_ends_a_daemon_over_a_held_write_at_once() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let (_place, _fs, program, _client, _) = held(fs, ",direct=on");
    program.signal(Signal::TERM);
    program.wait_for("waiting for storage");
    program.ends_by(Signal::INT, 5);
}

#[test]
fn a_front_end_that_is_silent_in_mid_message_holds_no_end_up() {
    let place = place();
    let program = place.serve(&["path=ram:1M".into()]);
    let mut socket = UnixStream::connect(place.path("d0")).unwrap();
    // GET_FEATURES has a header of 12 bytes.
    socket.write_all(&[1, 0, 0, 0, 1]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    program.ends_by(Signal::TERM, 0);
    place.check(1);
}

#[test]
fn a_hang_up_ends_a_daemon_in_order_unless_it_was_started_to_ignore_it() {
    let place = place();
    let program = place.serve(&["path=ram:1M".into()]);
    program.ends_by(Signal::HUP, 0);
    place.check(1);

    let daemon = place.command(&["path=ram:1M".into()]);
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"trap '' HUP; exec "$@""#, "sh"])
        .arg(daemon.get_program())
        .args(daemon.get_args());
    let mut program = Program::start(command, true);
    place.wait_for_socket(0);
    program.signal(Signal::HUP);
    std::thread::sleep(Duration::from_millis(200));
    assert!(program.is_alive());
    program.ends_by(Signal::TERM, 0);
    place.check(1);
}

#[test]
fn a_socket_that_a_successor_has_made_in_its_place_is_left_alone() {
    let place = place();
    let program = place.serve(&["path=ram:1M".into(), "path=ram:1M".into()]);
    std::fs::remove_file(place.path("d0")).unwrap();
    let _successor = UnixListener::bind(place.path("d0")).unwrap();
    program.ends_by(Signal::TERM, 0);
    assert!(place.path("d0").exists(), "the successor's socket is gone");
    assert!(!place.path("d1").exists(), "its own is left");
}

/// Processor time of a process so far.
fn cpu_time(pid: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // `utime` and `stime`, in ticks of 10 ms, proc(5); the name, which may hold anything, ends at
    // the last parenthesis.
    let fields = text.rsplit_once(')').unwrap().1.split_whitespace();
    let ticks: u64 = fields
        .skip(11)
        .take(2)
        .map(|n| n.parse::<u64>().unwrap())
        .sum();
    Duration::from_millis(10 * ticks)
}

/// Returns whether a new front end of this device is answered; `false`: it is disconnected.
fn is_answered(socket: &Path) -> (bool, UnixStream) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // GET_FEATURES; disconnected already, perhaps.
    let _ = stream.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let is_answered = match stream.read(&mut [0; 64]) {
        Ok(0) => false,
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
        Err(error) => panic!("neither answered nor hung up on: {error}"),
    };
    (is_answered, stream)
}

/// From now on the process has descriptors below this number only.
fn limit_descriptors(program: &Program, end: Option<u64>) {
    let pid = Pid::from_raw(program.id() as i32);
    let new = Rlimit {
        current: end,
        maximum: getrlimit(Resource::Nofile).maximum,
    };
    prlimit(pid, Resource::Nofile, new).unwrap();
}

#[test]
fn requests_for_which_no_descriptor_is_left_wait_and_end_well_later() {
    let place = place();
    let disk = format!("path={},direct=on", place.image("image").display());
    let program = place.serve(&[disk]);
    let mut client = place.connect(0, 4);
    let all = getrlimit(Resource::Nofile).current;
    // Standard streams are open: there is no other number.
    limit_descriptors(&program, Some(3));
    let requests = [Op::Write, Op::Read, Op::Flush].map(|op| submit(&mut client, op));
    program.wait_for("Too many open files");
    assert_eq!(answered(&mut client), None);
    limit_descriptors(&program, all);
    let mut ended = Vec::new();
    until("all of them are answered", || {
        ended.extend(answered(&mut client));
        ended.len() == requests.len()
    });
    ended.sort_unstable_by_key(|(slot, _)| *slot);
    assert_eq!(ended, requests.map(|slot| (slot, Status::Ok)));
    program.wait_for("go on");
    program.ends_by(Signal::TERM, 0);
    assert_eq!(place.check(1)["devices"]["d0"]["errors"], 0);
}

#[test]
fn a_front_end_for_whom_no_descriptor_is_left_is_hung_up_on() {
    const DEVICES: usize = 12;
    let place = place();
    let program = Program::start(place.command(&vec!["path=ram:1M".into(); DEVICES]), true);
    // No front end has connected yet: the open descriptors stay open.
    program.wait_for("ready");
    let sockets: Vec<_> = (0..DEVICES)
        .map(|number| place.path(&format!("d{number}")))
        .collect();
    let open = std::fs::read_dir(format!("/proc/{}/fd", program.id()))
        .unwrap()
        .count();
    let all = getrlimit(Resource::Nofile).current;
    limit_descriptors(&program, Some(open as u64 + 3));
    let fronts: Vec<_> = sockets.iter().map(|socket| is_answered(socket)).collect();
    let answered = fronts
        .iter()
        .filter(|(is_answered, _)| *is_answered)
        .count();
    assert!((1..DEVICES - 3).contains(&answered), "{answered} answered");
    program.wait_for("no descriptor is free");

    let (cpu, since) = (cpu_time(program.id()), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let used = cpu_time(program.id()) - cpu;
    assert!(
        used < since.elapsed() / 20,
        "{used:?} of {:?}",
        since.elapsed()
    );

    limit_descriptors(&program, all);
    drop(fronts);
    let answers = |socket: &PathBuf| until("it is served again", || is_answered(socket).0);
    sockets.iter().for_each(answers);
    program.ends_by(Signal::TERM, 0);
    place.check(DEVICES);
}

#[test]
fn a_limit_of_descriptors_too_low_for_the_devices_is_said_at_the_start() {
    let place = place();
    let daemon = place.command(&["path=ram:1M".into()]);
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"ulimit -n 40; exec "$@""#, "sh"])
        .arg(daemon.get_program())
        .args(daemon.get_args());
    let program = Program::start(command, true);
    program.wait_for("the limit is 40");
    place.wait_for_socket(0);
    program.ends_by(Signal::TERM, 0);
    place.check(1);
}
