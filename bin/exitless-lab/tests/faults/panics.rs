//! A core that panics takes the process with it: guests and front ends learn of it, where they
//! would wait for ever.

use std::io::Write;
use std::process::Stdio;
use std::time::Instant;

use rustix::process::Signal;
use tempfile::NamedTempFile;
use vhost_blk::RunError;

use crate::program::{Program, has_kvm, place, run};
use spawned::daemon::load;
use spawned::guest::{Ask, Steps};

#[test]
fn a_core_that_panics_ends_the_daemon_and_a_successor_serves() {
    let place = place();
    let disks = [
        format!("path={}", place.image("image").display()),
        "path=ram:1M".into(),
    ];
    let mut command = place.command(&disks);
    command.args(["--fault", "disk0:panic"]);
    let program = Program::start(command, true);
    program.wait_for("ready");
    let since = Instant::now();
    let ended = load(&place.path("d0"));
    assert!(matches!(ended, Err(RunError::HungUp { .. })), "{ended:?}");
    let ended = program.end(since);
    ended.check(4);
    assert!(ended.said.contains("with status 4"), "{}", ended.said);
    // Its sockets are dead, its image unlocked.
    let program = place.serve(&disks);
    program.ends_by(Signal::TERM, 0);
    place.check(2);
}

#[test]
fn a_sidecore_that_panics_ends_the_machine() {
    if !has_kvm() {
        return;
    }
    let place = place();
    let mut kernel = NamedTempFile::new().unwrap();
    let guest = Steps::default().ask(Ask::Read).wait_for_typing();
    kernel.write_all(&guest.kernel()).unwrap();
    let mut command = run(kernel.path());
    let disk = format!("path={}", place.image("image").display());
    command
        .args(["--disk", &disk, "--fault", "disk0:panic"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let since = Instant::now();
    let ended = Program::start(command, true).end(since);
    assert_eq!(ended.status, Some(4), "{}", ended.said);
    assert!(ended.said.contains("Panicked"), "{}", ended.said);
}
