//! `exitless run` ends in any state of its console.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::{NamedTempFile, TempDir};

use crate::program::{Program, has_kvm, run, until, wait_until_full};
use crate::terminal::{Terminal, modes};
use spawned::guest::Steps;

/// A kernel file of these steps, as long as it is kept.
fn kernel(steps: Steps) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&steps.kernel()).unwrap();
    file
}

/// A machine whose guest is not asked to power off: these listen to no button.
fn run_unasked(kernel: &Path) -> Command {
    let mut command = run(kernel);
    command.args(["--stop-timeout", "0"]);
    command
}

fn chatterbox() -> NamedTempFile {
    kernel(Steps::default().say_for_ever(b'x'))
}

fn deaf() -> NamedTempFile {
    kernel(Steps::default().say(b'!'))
}

/// Waits for the deaf guest's one word.
fn wait_for_word(output: OwnedFd) -> File {
    let mut output = File::from(output);
    let mut word = [0];
    output.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"!");
    output
}

#[test]
fn sigterm_ends_a_machine_whose_output_nobody_reads() {
    if !has_kvm() {
        return;
    }
    let kernel = chatterbox();
    let machines = [Signal::TERM, Signal::INT, Signal::HUP].map(|signal| {
        let mut command = run_unasked(kernel.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut program = Program::start(command, true);
        let output = program.output();
        (signal, program, output)
    });
    for (signal, program, output) in machines {
        wait_until_full(&output);
        let ended = program.ends_by(signal, 128 + signal.as_raw());
        assert!(ended.said.contains("ended by signal"), "{}", ended.said);
        let mut bytes = Vec::new();
        File::from(output).read_to_end(&mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == b'x'));
    }
}

#[test]
fn sigterm_ends_a_machine_whose_output_and_messages_are_one_full_pipe() {
    if !has_kvm() {
        return;
    }
    let kernel = chatterbox();
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = run_unasked(kernel.path());
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone().unwrap())
        .stderr(writer);
    let program = Program::start(command, false);
    wait_until_full(&reader);
    program.ends_by(Signal::TERM, 143);
}

#[test]
fn sigterm_ends_a_machine_whose_guest_reads_nothing() {
    if !has_kvm() {
        return;
    }
    let kernel = deaf();
    let mut command = run_unasked(kernel.path());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = Program::start(command, true);
    let _output = wait_for_word(program.output());
    // More than the chip takes; the rest waits.
    let mut input = program.input();
    input.write_all(&[b'y'; 1024]).unwrap();
    until("the input is taken up, or its reader waits", || {
        rustix::io::ioctl_fionread(&input).unwrap() < 1024
    });
    std::thread::sleep(Duration::from_millis(100));
    program.ends_by(Signal::TERM, 143);
}

#[test]
fn output_before_a_power_off_reaches_a_late_reader_in_full() {
    if !has_kvm() {
        return;
    }
    let mut steps = Steps::default();
    // More than a pipe holds.
    const BYTES: usize = 5000;
    for _ in 0..BYTES {
        steps = steps.say(b'z');
    }
    let kernel = kernel(steps.power_off());
    let (reader, writer) = std::io::pipe().unwrap();
    rustix::pipe::fcntl_setpipe_size(&writer, 4096).unwrap();
    let mut command = run(kernel.path());
    command.stdin(Stdio::null()).stdout(writer);
    let mut program = Program::start(command, true);
    wait_until_full(&reader);
    assert!(program.is_alive(), "{}", program.said());
    let since = Instant::now();
    let mut bytes: Vec<u8> = Vec::new();
    let mut reader = File::from(OwnedFd::from(reader));
    let mut buffer = [0; 4096];
    loop {
        match reader.read(&mut buffer).unwrap() {
            0 => break,
            len => bytes.extend(&buffer[..len]),
        }
    }
    program.end(since).check(0);
    assert_eq!(bytes.len(), BYTES);
}

#[test]
fn the_escape_key_is_heard_behind_typing_that_the_guest_does_not_read() {
    if !has_kvm() {
        return;
    }
    let kernel = deaf();
    let mut terminal = Terminal::open();
    let before = terminal.settings();
    let mut command = run(kernel.path());
    terminal.give(&mut command);
    let program = Program::start(command, true);
    until("raw mode", || terminal.is_raw());
    terminal.ours.write_all(&[b'y'; 1000]).unwrap();
    until("the typing is taken up", || {
        rustix::io::ioctl_fionread(&terminal.theirs).unwrap() < 900
    });
    std::thread::sleep(Duration::from_millis(100));
    let since = Instant::now();
    terminal.ours.write_all(b"\x01x").unwrap();
    program.end(since).check(0);
    assert_eq!(modes(&terminal.settings()), modes(&before));
}

#[test]
fn the_terminal_is_restored_also_when_it_takes_no_more_output() {
    if !has_kvm() {
        return;
    }
    let kernel = chatterbox();
    let terminal = Terminal::open();
    let before = terminal.settings();
    let mut command = run_unasked(kernel.path());
    terminal.give(&mut command);
    let program = Program::start(command, true);
    wait_until_full(terminal.ours.as_fd());
    assert!(terminal.is_raw());
    program.ends_by(Signal::TERM, 143);
    assert_eq!(modes(&terminal.settings()), modes(&before));
}

#[test]
fn a_status_quit_shows_the_registers_and_ends() {
    if !has_kvm() {
        return;
    }
    let kernel = chatterbox();
    let directory = TempDir::new().unwrap();
    let mut command = run(kernel.path());
    command
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut program = Program::start(command, true);
    let output = program.output();
    wait_until_full(&output);
    let ended = program.ends_by(Signal::QUIT, 131);
    assert!(ended.said.contains("rip"), "{}", ended.said);
}

#[test]
fn a_panic_that_is_told_ends_the_run_with_status_6_unless_a_crash_kernel_goes_on() {
    if !has_kvm() {
        return;
    }
    for (has_crash_kernel, status, text) in [(false, 6, "a"), (true, 0, "ab")] {
        let steps = Steps::default().say(b'a').panic(has_crash_kernel);
        let kernel = kernel(steps.say(b'b').power_off());
        let mut command = run(kernel.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut program = Program::start(command, true);
        let mut output = File::from(program.output());
        let ended = program.end(Instant::now());
        ended.check(status);
        let mut said = String::new();
        output.read_to_string(&mut said).unwrap();
        assert_eq!(said, text, "{}", ended.said);
        let is_told = ended.said.contains("kernel has panicked");
        assert_eq!(is_told, !has_crash_kernel, "{}", ended.said);
    }
}
