//! A signal presses the guest's power button, and ends the machine only if the guest does not.

use std::io::{Read, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::NamedTempFile;

use crate::program::{END_LIMIT, Program, has_kvm, run};
use spawned::guest::Steps;

/// Longer than within what two signals are one.
const A_WHILE: Duration = Duration::from_millis(400);

struct Machine {
    program: Program,
    output: std::fs::File,
    _kernel: NamedTempFile,
}

/// A machine whose guest says `!` and then does these steps; `None`: skipped.
fn machine(steps: fn(Steps) -> Steps, more: &[&str]) -> Option<Machine> {
    if !has_kvm() {
        return None;
    }
    let mut kernel = NamedTempFile::new().unwrap();
    let steps = steps(Steps::default().listen_to_button().say(b'!'));
    kernel.write_all(&steps.kernel()).unwrap();
    let mut command = run(kernel.path());
    command
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut program = Program::start(command, true);
    let output = program.output().into();
    let mut machine = Machine {
        program,
        output,
        _kernel: kernel,
    };
    machine.hear(b'!');
    Some(machine)
}

impl Machine {
    /// Waits for the guest's next word.
    fn hear(&mut self, word: u8) {
        let mut said = [0];
        self.output.read_exact(&mut said).unwrap();
        assert_eq!(said, [word]);
    }
}

#[test]
fn a_first_sigterm_presses_the_button_and_a_second_ends_at_once() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let Some(mut machine) = machine(|steps| steps.wait_for_button().say(b'p'), &[]) else {
            return;
        };
        machine.program.signal(signal);
        machine.hear(b'p');
        // The guest has received the button, and does nothing about it.
        std::thread::sleep(A_WHILE);
        assert!(machine.program.is_alive(), "{}", machine.program.said());
        let ended = machine.program.ends_by(signal, 128 + signal.as_raw());
        assert!(ended.said.contains("power button"), "{}", ended.said);
    }
}

#[test]
fn a_guest_that_powers_off_when_the_button_is_pressed_ends_the_machine_with_status_0() {
    let Some(machine) = machine(|steps| steps.wait_for_button().power_off(), &[]) else {
        return;
    };
    let ended = machine.program.ends_by(Signal::TERM, 0);
    assert!(
        ended.said.contains("powered off, and signal 15"),
        "{}",
        ended.said
    );
}

#[test]
fn without_an_answer_the_stop_timeout_ends_it() {
    let Some(machine) = machine(|steps| steps, &["--stop-timeout", "1"]) else {
        return;
    };
    let since = Instant::now();
    machine.program.signal(Signal::TERM);
    let ended = machine.program.end(since);
    assert_eq!(ended.status, Some(143), "{}", ended.said);
    let limit = Duration::from_secs(1);
    assert!(ended.took >= limit, "{:?}: {}", ended.took, ended.said);
    assert!(
        ended.took < limit + END_LIMIT,
        "{:?}: {}",
        ended.took,
        ended.said
    );
    assert!(ended.said.contains("within 1 s"), "{}", ended.said);
}

#[test]
fn a_guest_that_does_not_listen_is_said_to_and_ends_by_the_timeout() {
    if !has_kvm() {
        return;
    }
    let mut kernel = NamedTempFile::new().unwrap();
    kernel
        .write_all(&Steps::default().say(b'!').kernel())
        .unwrap();
    let mut command = run(kernel.path());
    command
        .args(["--stop-timeout", "1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut program = Program::start(command, true);
    let mut said = [0];
    std::fs::File::from(program.output())
        .read_exact(&mut said)
        .unwrap();
    let since = Instant::now();
    program.signal(Signal::TERM);
    let ended = program.end(since);
    assert_eq!(ended.status, Some(143), "{}", ended.said);
    assert!(ended.said.contains("no driver"), "{}", ended.said);
}

#[test]
fn sigquit_and_a_stop_timeout_of_0_end_without_the_button() {
    for (signal, more) in [
        (Signal::QUIT, &[][..]),
        (Signal::TERM, &["--stop-timeout", "0"]),
    ] {
        let Some(mut machine) = machine(|steps| steps.wait_for_button().say(b'p'), more) else {
            return;
        };
        machine.program.signal(signal);
        let mut said = Vec::new();
        machine.output.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"", "the button was pressed");
        machine
            .program
            .end(Instant::now())
            .check(128 + signal.as_raw());
    }
}
