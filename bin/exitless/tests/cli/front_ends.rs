//! A front end that is rejected leaves a line, with the reason, and is counted; one that comes and
//! goes leaves none.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{RunResult, end, exitless, start};

/// A message's header: request, flags (version 1), payload bytes.
fn head(request: u32, flags: u32, size: u32) -> Vec<u8> {
    [request, flags, size].map(u32::to_ne_bytes).concat()
}

fn daemon(folder: &Path, log: &[&str]) -> Child {
    let block = "id=a,path=ram:1M,socket=a.sock";
    let mut command = exitless(folder, &["serve", "--idle", "sleep", "--stats", "stats"]);
    command.args(["--block", block]).args(log);
    let mut daemon = start(&mut command);
    let deadline = Instant::now() + Duration::from_secs(20);
    while UnixStream::connect(folder.join("a.sock")).is_err() {
        assert!(Instant::now() < deadline, "{:?}", daemon.try_wait());
        std::thread::sleep(Duration::from_millis(2));
    }
    daemon
}

/// Connects, sends, and waits until the daemon has disconnected; or disconnects itself.
fn send(folder: &Path, bytes: &[u8], is_hung_up_on: bool) {
    let mut socket = UnixStream::connect(folder.join("a.sock")).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    socket.write_all(bytes).unwrap();
    if !is_hung_up_on {
        socket.shutdown(std::net::Shutdown::Write).unwrap();
    }
    // A reset is an end as well.
    let _ = socket.read_to_end(&mut Vec::new());
}

fn ended(folder: &Path, daemon: Child) -> (RunResult, serde_json::Value) {
    kill_process(Pid::from_child(&daemon), Signal::TERM).unwrap();
    let ended = end(daemon);
    assert_eq!(ended.status, Some(0), "{ended:?}");
    let stats = fs::read(folder.join("stats")).unwrap();
    let stats: serde_json::Value = serde_json::from_slice(&stats).unwrap();
    (ended, stats["devices"]["a"].clone())
}

#[test]
fn each_way_to_break_the_protocol_is_said_and_counted() {
    // Requests: 5 is the table of memory, 8 a ring's size, 1 the features.
    let broken: [(Vec<u8>, bool, &str); 6] = [
        (b"GET / HTTP/1.0\r\n\r\n".to_vec(), true, "('GET ')"),
        (vec![0; 12], true, "version 0"),
        (head(5, 1, u32::MAX), true, "payload of 4294967295 bytes"),
        (head(5, 1, 8)[..7].to_vec(), false, "within a message"),
        (head(5, 1, 8), false, "within a message"),
        ([head(8, 1, 8), vec![0xff; 8]].concat(), true, "refused"),
    ];
    for (bytes, is_hung_up_on, says) in broken {
        let folder = tempfile::tempdir().unwrap();
        let daemon = daemon(folder.path(), &[]);
        send(folder.path(), &bytes, is_hung_up_on);
        let (ended, stats) = ended(folder.path(), daemon);
        let lines = ended
            .error
            .lines()
            .filter(|line| line.contains("warning: "));
        let lines: Vec<_> = lines.collect();
        assert_eq!(lines.len(), 1, "{bytes:?}: {}", ended.error);
        assert!(
            lines[0].starts_with("exitless: warning: a front end broke the protocol"),
            "{lines:?}"
        );
        assert!(lines[0].contains("export=a"), "{lines:?}");
        assert!(lines[0].contains(says), "{says}: {lines:?}");
        assert_eq!(stats["violations"], 1, "{bytes:?}");
    }
}

#[test]
fn a_front_end_that_comes_and_goes_is_no_matter_and_a_thousand_bad_ones_are_a_few_lines() {
    let folder = tempfile::tempdir().unwrap();
    let quiet = daemon(folder.path(), &[]);
    send(folder.path(), b"", false);
    // The features are asked for, and answered.
    send(folder.path(), &head(1, 1, 0), false);
    let (said, stats) = ended(folder.path(), quiet);
    assert!(!said.error.contains("warning"), "{}", said.error);
    assert_eq!(stats["violations"], 0);
    let flooded = daemon(folder.path(), &[]);
    let begin = Instant::now();
    (0..1000).for_each(|_| send(folder.path(), b"GET / HTTP/1.0\r\n\r\n", true));
    let seconds = begin.elapsed().as_secs() as usize;
    let (said, stats) = ended(folder.path(), flooded);
    let lines = said.error.matches("broke the protocol").count();
    // Twenty at once, and one a second.
    assert!((1..=22 + seconds).contains(&lines), "{lines} lines");
    assert_eq!(stats["violations"], 1000);
}

#[test]
fn the_log_is_chosen_by_its_option_or_else_by_the_environment_in_either_form() {
    let folder = tempfile::tempdir().unwrap();
    for (args, variable, has_info) in [
        (&[] as &[&str], None, false),
        (&["--log", "info"], None, true),
        (&[], Some("info"), true),
        (&["--log", "error"], Some("info"), false),
        (&["--log", "vhost_export=info"], Some("off"), true),
    ] {
        for format in ["text", "json"] {
            let mut command = exitless(
                folder.path(),
                &["serve", "--idle", "sleep", "--log-format", format],
            );
            command
                .args(["--block", "id=a,path=ram:1M,socket=a.sock"])
                .args(args);
            if let Some(variable) = variable {
                command.env("RUST_LOG", variable);
            }
            let daemon = start(&mut command);
            let deadline = Instant::now() + Duration::from_secs(20);
            while UnixStream::connect(folder.path().join("a.sock")).is_err() {
                assert!(Instant::now() < deadline);
                std::thread::sleep(Duration::from_millis(2));
            }
            send(folder.path(), b"", false);
            kill_process(Pid::from_child(&daemon), Signal::TERM).unwrap();
            let said = end(daemon).error;
            assert_eq!(
                said.contains("a front end connected"),
                has_info,
                "{args:?} {variable:?}: {said}"
            );
            assert!(said.contains("ready: serving 1 device on 1 core"), "{said}");
            for line in said.lines() {
                match format {
                    "text" => assert!(line.starts_with("exitless: "), "{line}"),
                    _ => {
                        let object: serde_json::Value = serde_json::from_str(line).unwrap();
                        for key in ["time", "level", "target", "message"] {
                            assert!(object[key].is_string(), "{line}");
                        }
                    }
                }
            }
        }
    }
    let refused = end(start(&mut exitless(
        folder.path(),
        &["serve", "--log", "loud"],
    )));
    assert_eq!(refused.status, Some(2));
    assert!(
        refused
            .error
            .contains("a level (off, error, warn, info, debug, trace)"),
        "{refused:?}"
    );
}
