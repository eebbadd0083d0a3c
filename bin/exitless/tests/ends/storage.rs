//! `exitless run` with a disk whose storage the kernel holds: it reports that, ends when the
//! storage answers, or at once by a second signal.

use std::fs::File;
use std::io::{Read, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};

use held_fs::{Gate, HeldFs, Kind};
use rustix::process::Signal;
use tempfile::NamedTempFile;

use crate::program::{Program, has_kvm, run, until};
use spawned::guest::{Ask, Steps};

/// Longer than what would happen at once takes.
const A_WHILE: Duration = Duration::from_millis(300);

struct Machine {
    program: Program,
    input: File,
    output: File,
    gate: Gate,
    _fs: HeldFs,
    _kernel: NamedTempFile,
}

/// A machine whose guest has made a request of its disk that is held, and then does `steps` at a
/// byte of input. `None`: skipped.
fn machine(ask: Ask, steps: fn(Steps) -> Steps, disk: &str, more: &[&str]) -> Option<Machine> {
    let fs = HeldFs::mount_or_skip()?;
    if !has_kvm() {
        return None;
    }
    let gate = fs.create("held.raw", 1 << 20);
    // Not the query for hole punching at the start.
    gate.hold(&[Kind::Read, Kind::Write, Kind::Sync]);
    let mut kernel = NamedTempFile::new().unwrap();
    let all = steps(Steps::default().ask(ask).wait_for_typing());
    kernel.write_all(&all.kernel()).unwrap();
    let mut command = run(kernel.path());
    let path = fs.path("held.raw");
    command
        // The format is given, so that the start does not read the file to check it: that read
        // would be held.
        .args([
            "--disk",
            &format!("path={},format=raw{disk}", path.display()),
        ])
        // Storage ends alike whether the guest was asked to power off before or not.
        .args(["--stop-timeout", "0"])
        .args(more)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut program = Program::start(command, true);
    let (input, output) = (program.input(), program.output().into());
    gate.wait_until_held(1);
    Some(Machine {
        program,
        input,
        output,
        gate,
        _fs: fs,
        _kernel: kernel,
    })
}

impl Machine {
    /// Lets the guest go on, and gives it the time that takes.
    fn go_on(&mut self) {
        self.input.write_all(b"g").unwrap();
        std::thread::sleep(A_WHILE);
    }

    /// Lets a guest go on that says `b` and then stops its disk, which takes a moment.
    fn stop_disk(&mut self) {
        self.input.write_all(b"g").unwrap();
        let mut said = [0];
        self.output.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"b");
        std::thread::sleep(A_WHILE);
    }

    /// It says which file it waits for, and waits.
    #[track_caller]
    fn names_the_file(&mut self) {
        self.program.wait_for("waiting for storage");
        assert!(
            self.program.said().contains("held.raw"),
            "{}",
            self.program.said()
        );
        std::thread::sleep(A_WHILE);
        assert!(self.program.is_alive(), "{}", self.program.said());
    }

    /// Lets the storage answer; the machine ends with this status, and everything its console
    /// showed is answered.
    #[track_caller]
    fn ends_with_its_storage(mut self, status: i32) -> String {
        let since = Instant::now();
        self.gate.release();
        self.program.end(since).check(status);
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        text
    }
}

#[test]
fn sigterm_behind_a_stop_that_cannot_drain_ends_when_the_storage_answers() {
    let steps = |steps: Steps| steps.say(b'b').stop_disk().say(b's');
    let Some(mut machine) = machine(Ask::Read, steps, "", &[]) else {
        return;
    };
    machine.stop_disk();
    machine.program.signal(Signal::TERM);
    machine.names_the_file();
    assert_eq!(
        machine.ends_with_its_storage(143),
        "",
        "the stop was answered"
    );
}

#[test]
fn a_second_signal_ends_a_machine_behind_a_stop_that_cannot_drain_at_once() {
    // Past the page cache: what the kernel itself waits for in a write to FUSE no signal ends.
    let steps = |steps: Steps| steps.say(b'b').stop_disk();
    let Some(mut machine) = machine(Ask::Read, steps, ",direct=on", &[]) else {
        return;
    };
    machine.stop_disk();
    machine.program.signal(Signal::TERM);
    machine.names_the_file();
    let ended = machine.program.ends_by(Signal::TERM, 5);
    assert!(ended.said.contains("status 5"), "{}", ended.said);
}

#[test]
fn a_power_off_over_a_held_write_ends_when_it_is_written() {
    let Some(mut machine) = machine(Ask::Write, Steps::power_off, "", &[]) else {
        return;
    };
    machine.go_on();
    machine.names_the_file();
    let contents = machine.gate.contents().try_clone().unwrap();
    machine.ends_with_its_storage(0);
    let mut first = [0; 4];
    std::os::unix::fs::FileExt::read_exact_at(&contents, &mut first, 0).unwrap();
    assert_eq!(&first, b"Hell");
}

#[test]
fn sigterm_over_a_held_flush_ends_when_it_is_done() {
    let Some(mut machine) = machine(Ask::Flush, |steps| steps, "", &[]) else {
        return;
    };
    machine.go_on();
    // Twice at one go, as timeout(1) does: one request.
    machine.program.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(20));
    machine.program.signal(Signal::TERM);
    machine.names_the_file();
    machine.ends_with_its_storage(143);
}

#[test]
fn a_signal_ends_a_power_off_that_has_said_what_it_waits_for_at_once() {
    let Some(mut machine) = machine(Ask::Read, Steps::power_off, ",direct=on", &[]) else {
        return;
    };
    machine.go_on();
    machine.names_the_file();
    machine.program.ends_by(Signal::TERM, 5);
}

#[test]
fn bounced_requests_hold_up_no_bus_master_off() {
    let steps = |steps: Steps| steps.stop_disk().say(b's');
    let Some(mut machine) = machine(Ask::Read, steps, "", &["--dma", "bounce"]) else {
        return;
    };
    machine.input.write_all(b"g").unwrap();
    until("the stop is answered", || {
        rustix::io::ioctl_fionread(&machine.output).unwrap() == 1
    });
    assert!(machine.gate.held() > 0, "the request is with the storage");
    machine.program.signal(Signal::TERM);
    machine.names_the_file();
    machine.ends_with_its_storage(143);
}
