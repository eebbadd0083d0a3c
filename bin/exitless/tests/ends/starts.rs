//! Refusals before anything starts, and the messages and notifications when all has started.

use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::process::Signal;
use tempfile::NamedTempFile;

use crate::program::{PATIENCE, Program, exitless, has_kvm, place, run};
use spawned::daemon::DaemonDir;
use spawned::guest::Steps;

/// It ends at once with status 2, having printed all of `words` in one line.
#[track_caller]
fn refuses(command: Command, words: &[&str]) {
    let since = Instant::now();
    let ended = Program::start(command, true).end(since);
    assert_eq!(ended.status, Some(2), "{}", ended.said);
    assert_eq!(ended.said.lines().count(), 1, "{}", ended.said);
    for word in words {
        assert!(ended.said.contains(word), "no {word:?} in: {}", ended.said);
    }
}

#[test]
fn a_check_names_an_image_that_is_missing() {
    let place = place();
    let missing = place.path("missing.raw").display().to_string();
    for format in ["raw", "qcow2"] {
        let disk = format!("path={missing},format={format}");
        let mut check = place.command(&["path=ram:1M".into(), disk]);
        check.arg("--check");
        refuses(check, &["device d1", &missing, "No such file"]);
    }
}

#[test]
fn a_check_names_a_folder_that_is_missing() {
    let place = place();
    let check = |args: &[&str]| {
        let mut command = exitless(&["serve", "--check"]);
        command.args(args);
        command
    };
    let block = format!(
        "id=a,path=ram:1M,socket={}/absent/a",
        place.path("").display()
    );
    refuses(
        check(&["--block", &block]),
        &["device a", "absent/a", "No such file"],
    );
    let block = format!("id=a,path=ram:1M,socket={}", place.path("a").display());
    let args = ["--block", &block, "--stats", "/dev/null/x"];
    refuses(check(&args), &["--stats /dev/null/x cannot be written"]);
}

#[test]
fn a_check_beside_a_daemon_says_what_is_in_use_and_disturbs_nobody() {
    let place = place();
    let disk = format!("path={}", place.image("image").display());
    let program = place.serve(std::slice::from_ref(&disk));
    // Locked, and served: a start would be refused.
    let mut check = place.command(std::slice::from_ref(&disk));
    check.arg("--check");
    refuses(check, &["device d0", "in use: exitless"]);
    let mut check = place.command(&["path=ram:1M".into()]);
    check.arg("--check");
    refuses(check, &["device d0", "is served by another process"]);
    assert!(UnixStream::connect(place.path("d0")).is_ok());
    program.ends_by(Signal::TERM, 0);
    assert_eq!(place.check(1)["devices"]["d0"]["errors"], 0);
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_anything_starts() {
    let place = place();
    let block = format!("id=a,path=ram:1M,socket={}", place.path("a").display());
    let mut serve = exitless(&["serve", "--stats", "/dev/null/x", "--block", &block]);
    serve.stdin(Stdio::null());
    refuses(serve, &["--stats /dev/null/x"]);
    assert!(!place.path("a").exists(), "a socket was made");
}

#[test]
fn no_socket_listens_before_every_image_is_open() {
    let (first, second) = (place(), place());
    let disk = format!("path={}", first.image("image").display());
    let served = first.serve(std::slice::from_ref(&disk));
    let waits = Program::start(second.command(&["path=ram:1M".into(), disk]), true);
    waits.wait_for("waiting for");
    assert!(!second.path("d0").exists(), "a socket that nobody serves");
    served.ends_by(Signal::TERM, 0);
    waits.wait_for("ready");
    waits.ends_by(Signal::TERM, 0);
    second.check(2);
}

#[test]
fn a_daemon_says_when_it_is_ready() {
    let place = place();
    for (disks, line) in [
        (1, "serving 1 device on 1 core\n"),
        (2, "serving 2 devices on 1 core\n"),
    ] {
        let command = place.command(&vec!["path=ram:1M".into(); disks]);
        let program = Program::start(command, true);
        program.wait_for(&format!("exitless: ready: {line}"));
        for number in 0..disks {
            UnixStream::connect(place.path(&format!("d{number}"))).unwrap();
        }
        program.ends_by(Signal::TERM, 0);
        place.check(disks);
    }
}

#[test]
fn a_socket_has_the_mode_and_the_group_that_were_asked_for() {
    let place = place();
    let group = match rustix::process::geteuid().is_root() {
        true => 12_345,
        false => rustix::process::getegid().as_raw(),
    };
    let own = rustix::process::getegid().as_raw();
    for umask in ["0", "077"] {
        let daemon = place.command(&[
            format!("path=ram:1M,mode=0620,group={group}"),
            format!("path=ram:1M,group={group}"),
            "path=ram:1M,mode=666".into(),
        ]);
        let mut command = Command::new("sh");
        let script = format!(r#"umask {umask}; exec "$@""#);
        command
            .args(["-c", &script, "sh"])
            .arg(daemon.get_program())
            .args(daemon.get_args());
        let program = Program::start(command, true);
        program.wait_for("ready");
        let found = ["d0", "d1", "d2"].map(|socket| {
            let about = std::fs::symlink_metadata(place.path(socket)).unwrap();
            (about.mode() & 0o7777, about.gid())
        });
        assert_eq!(found, [(0o620, group), (0o660, group), (0o666, own)]);
        program.ends_by(Signal::TERM, 0);
        place.check(3);
    }
}

#[test]
fn a_check_names_a_group_that_is_not_there() {
    let place = place();
    let mut check = place.command(&["path=ram:1M,group=no-such".into()]);
    check.arg("--check");
    refuses(check, &["--block", "there is no group \"no-such\" here"]);
}

/// A service manager, at a path and at an abstract name, each with what NOTIFY_SOCKET says of it.
fn managers(place: &DaemonDir) -> [(UnixDatagram, String); 2] {
    let path = place.path("notify");
    let name = format!("exitless-test-{}-{}", std::process::id(), path.display());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let managers = [
        (
            UnixDatagram::bind(&path).unwrap(),
            path.display().to_string(),
        ),
        (
            UnixDatagram::bind_addr(&address).unwrap(),
            format!("@{name}"),
        ),
    ];
    for (manager, _) in &managers {
        manager.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    managers
}

#[track_caller]
fn is_told(manager: &UnixDatagram, what: &str) {
    let mut bytes = [0; 256];
    let len = manager.recv(&mut bytes).unwrap();
    let text = String::from_utf8_lossy(&bytes[..len]);
    assert!(text.lines().any(|line| line == what), "{text:?}");
}

#[test]
fn a_service_manager_is_told() {
    let place = place();
    for (manager, name) in managers(&place) {
        let mut command = place.command(&["path=ram:1M".into()]);
        command.env("NOTIFY_SOCKET", name);
        let program = Program::start(command, true);
        is_told(&manager, "READY=1");
        UnixStream::connect(place.path("d0")).unwrap();
        program.signal(Signal::TERM);
        is_told(&manager, "STOPPING=1");
        program.end(Instant::now()).check(0);
    }
}

#[test]
fn a_service_manager_that_cannot_be_told_ends_nothing() {
    let place = place();
    for name in ["relative", "/dev/null", ""] {
        let mut command = place.command(&["path=ram:1M".into()]);
        command.env("NOTIFY_SOCKET", name);
        let program = Program::start(command, true);
        program.wait_for("NOTIFY_SOCKET");
        place.wait_for_socket(0);
        program.ends_by(Signal::TERM, 0);
    }
}

#[test]
fn a_service_manager_is_told_of_a_machine() {
    if !has_kvm() {
        return;
    }
    let mut kernel = NamedTempFile::new().unwrap();
    let guest = Steps::default().say(b'!');
    std::io::Write::write_all(&mut kernel, &guest.kernel()).unwrap();
    let place = place();
    let [(manager, name), _] = managers(&place);
    let mut command = run(kernel.path());
    command.env("NOTIFY_SOCKET", name);
    command.args(["--stop-timeout", "0"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut program = Program::start(command, true);
    is_told(&manager, "READY=1");
    let mut output = std::fs::File::from(program.output());
    output.read_exact(&mut [0]).unwrap();
    program.signal(Signal::TERM);
    is_told(&manager, "STOPPING=1");
    program
        .end(Instant::now())
        .check(128 + Signal::TERM.as_raw());
}
