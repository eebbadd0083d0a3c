//! A guest that asks for a reset gets its machine again, in the same process, or the end of the
//! run.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::program::{Program, exitless, has_kvm, run, until};
use crate::terminal::{Terminal, modes};
use spawned::guest::{Ask, Steps};

/// A directory with the kernel of a guest.
struct GuestDir(TempDir);

impl GuestDir {
    /// `None`: skipped.
    fn new(steps: Steps) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let place = Self(TempDir::new().unwrap());
        fs::write(place.path("kernel"), steps.kernel()).unwrap();
        Some(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self) -> Command {
        run(&self.path("kernel"))
    }
}

/// A guest that says `b`, and resets when something is typed.
fn on_request(steps: Steps) -> Steps {
    steps.say(b'b').wait_for_typing().reset()
}

/// A machine whose guest resets on request.
struct Machine {
    program: Program,
    input: File,
    output: File,
}

impl Machine {
    /// Up to its first word.
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = Program::start(command, true);
        let mut machine = Self {
            input: program.input(),
            output: program.output().into(),
            program,
        };
        machine.hear();
        machine
    }

    #[track_caller]
    fn hear(&mut self) {
        let mut said = [0];
        let heard = self.output.read_exact(&mut said);
        assert!(heard.is_ok(), "{}", self.program.said());
        assert_eq!(&said, b"b");
    }

    fn ask(&mut self) {
        self.input.write_all(b"g").unwrap();
    }

    /// Returns the number of threads and of descriptors of the process, and its name.
    fn holds(&self) -> (usize, usize, String) {
        let process = PathBuf::from(format!("/proc/{}", self.program.id()));
        let count = |of: &str| fs::read_dir(process.join(of)).unwrap().count();
        let name = fs::read_to_string(process.join("comm")).unwrap();
        (count("task"), count("fd"), name)
    }
}

#[test]
fn a_reboot_starts_the_machine_again() {
    let Some(place) = GuestDir::new(on_request(Steps::default())) else {
        return;
    };
    let mut command = place.run();
    command.args(["--stop-timeout", "0"]);
    let mut machine = Machine::start(command);
    let first = machine.holds();
    assert_eq!(first.2, "exitless\n");
    for restart in 1..=3 {
        machine.ask();
        machine.hear();
        let line = format!("starting its machine again (restart {restart})");
        machine.program.wait_for(&line);
    }
    until(
        "as many threads and descriptors as in the beginning",
        || machine.holds() == first,
    );
    machine.program.ends_by(Signal::TERM, 143);
}

#[test]
fn a_reboot_ends_the_run_on_request_with_status_3() {
    let Some(place) = GuestDir::new(Steps::default().reset()) else {
        return;
    };
    let mut command = place.run();
    command
        .args(["--on-reboot", "exit"])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let ended = Program::start(command, true).end(Instant::now());
    ended.check(3);
    assert!(ended.said.contains("asked for a reset"), "{}", ended.said);
}

#[test]
fn a_signal_during_a_restart_ends_the_run_whenever_it_comes() {
    // It does nothing but reset: a signal meets any part of a restart.
    let Some(place) = GuestDir::new(Steps::default().reset()) else {
        return;
    };
    for at in 0..16 {
        let mut command = place.run();
        command.args(["--console", "none"]).stdin(Stdio::null());
        if at % 2 == 0 {
            command.args(["--stop-timeout", "0"]);
        }
        let program = Program::start(command, true);
        program.wait_for("(restart 2)");
        std::thread::sleep(Duration::from_millis(3 * at));
        program.ends_by(Signal::TERM, 143);
    }
}

#[test]
fn a_signal_between_the_last_look_and_the_restart_ends_the_run() {
    let Some(place) = GuestDir::new(on_request(Steps::default())) else {
        return;
    };
    // Standard error is full, so that the last words wait for their reader, and with them the
    // restart.
    const PIPE: usize = 4096;
    let (_reader, mut writer) = std::io::pipe().unwrap();
    rustix::pipe::fcntl_setpipe_size(&writer, PIPE).unwrap();
    writer.write_all(&[b'.'; PIPE]).unwrap();
    let mut command = place.run();
    command
        .args(["--stop-timeout", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(writer);
    let mut program = Program::start(command, false);
    let mut said = [0];
    File::from(program.output()).read_exact(&mut said).unwrap();
    program.input().write_all(b"g").unwrap();
    std::thread::sleep(Duration::from_millis(250));
    program.ends_by(Signal::TERM, 143);
}

#[test]
fn a_console_in_a_file_goes_on_in_it() {
    let Some(place) = GuestDir::new(Steps::default().say(b'b').reset()) else {
        return;
    };
    let console = place.path("console");
    fs::write(&console, "what was there before").unwrap();
    let mut command = place.run();
    command.arg("--console").arg(&console).stdin(Stdio::null());
    let program = Program::start(command, true);
    program.wait_for("(restart 3)");
    program.ends_by(Signal::TERM, 143);
    let text = fs::read_to_string(&console).unwrap();
    assert!(text.len() >= 3, "{text:?}");
    assert!(text.bytes().all(|byte| byte == b'b'), "{text:?}");
}

#[test]
fn a_machine_that_cannot_be_started_again_has_a_status_of_its_own() {
    let Some(place) = GuestDir::new(on_request(Steps::default())) else {
        return;
    };
    let mut machine = Machine::start(place.run());
    fs::remove_file(place.path("kernel")).unwrap();
    machine.ask();
    let ended = machine.program.end(Instant::now());
    assert_eq!(ended.status, Some(7), "{}", ended.said);
    let words = [
        "asked for a reset, but its machine cannot be started again: kernel",
        "No such file",
        "--on-reboot exit",
    ];
    for word in words {
        assert!(ended.said.contains(word), "no {word:?} in {}", ended.said);
    }
}

#[test]
fn a_program_that_was_replaced_goes_on_as_it_was() {
    let Some(place) = GuestDir::new(on_request(Steps::default())) else {
        return;
    };
    let program = place.path("exitless-copy");
    fs::copy(env!("CARGO_BIN_EXE_exitless"), &program).unwrap();
    let original = place.run();
    let mut command = Command::new(&program);
    command.args(original.get_args());
    let mut machine = Machine::start(command);
    fs::remove_file(&program).unwrap();
    fs::write(&program, "not a program").unwrap();
    machine.ask();
    machine.hear();
    let said = machine.program.said();
    assert!(said.contains("was replaced or removed"), "{said}");
    assert_eq!(machine.holds().2, "exitless-copy\n");
}

#[test]
fn without_proc_it_is_said_why_the_machine_is_not_started_again() {
    let Some(place) = GuestDir::new(on_request(Steps::default())) else {
        return;
    };
    let alone = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", script]);
        command
    };
    let tried = alone("umount -l /proc").output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        return println!("skipped: unmounting /proc takes privileges");
    }
    let original = place.run();
    let mut command = alone("umount -l /proc && exec \"$0\" \"$@\"");
    command
        .arg(original.get_program())
        .args(original.get_args());
    let mut machine = Machine::start(command);
    machine.ask();
    let ended = machine.program.end(Instant::now());
    assert_eq!(ended.status, Some(7), "{}", ended.said);
    assert!(ended.said.contains("is /proc mounted?"), "{}", ended.said);
}

#[test]
fn a_disk_is_locked_again_and_by_the_same_name() {
    let steps = Steps::default().ask(Ask::Read).wait_for_answer();
    let Some(place) = GuestDir::new(on_request(steps)) else {
        return;
    };
    let disk = place.path("disk");
    fs::write(&disk, [0; 1 << 16]).unwrap();
    let disk = format!("path={}", disk.display());
    let mut command = place.run();
    command.args(["--disk", &disk]);
    let mut machine = Machine::start(command);
    machine.ask();
    machine.hear();
    let mut second = place.run();
    second.args(["--disk", &disk]);
    let second = second.output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{said}");
    let holder = format!("in use: exitless (process {})", machine.program.id());
    assert!(said.contains(&holder), "{said}");
}

#[test]
fn a_disk_of_another_process_is_connected_to_again() {
    let steps = Steps::default().ask(Ask::Read).wait_for_answer();
    let Some(place) = GuestDir::new(on_request(steps)) else {
        return;
    };
    let (disk, socket) = (place.path("disk"), place.path("socket"));
    fs::write(&disk, [0; 1 << 16]).unwrap();
    let block = format!("id=d,path={},socket={}", disk.display(), socket.display());
    let daemon = Program::start(
        exitless(&["serve", "--idle", "sleep", "--block", &block]),
        true,
    );
    until("its socket", || socket.exists());
    let mut command = place.run();
    command.args(["--disk", &format!("socket={}", socket.display())]);
    let mut machine = Machine::start(command);
    for _ in 0..3 {
        machine.ask();
        machine.hear();
    }
    drop(machine);
    daemon.ends_by(Signal::TERM, 0);
}

#[test]
fn a_terminal_is_raw_again_and_is_given_back_at_the_end() {
    let Some(place) = GuestDir::new(on_request(Steps::default())) else {
        return;
    };
    let mut terminal = Terminal::open();
    let before = terminal.settings();
    let mut command = place.run();
    terminal.give(&mut command);
    let program = Program::start(command, true);
    for restart in 1..=2 {
        until("raw mode", || terminal.is_raw());
        // Not before the guest is there: what is typed earlier may be for the last one.
        let mut said = [0];
        while said != *b"b" {
            terminal.ours.read_exact(&mut said).unwrap();
        }
        terminal.ours.write_all(b"g").unwrap();
        program.wait_for(&format!("(restart {restart})"));
    }
    until("raw mode", || terminal.is_raw());
    let since = Instant::now();
    terminal.ours.write_all(b"\x01x").unwrap();
    program.end(since).check(0);
    assert_eq!(modes(&terminal.settings()), modes(&before));
}
