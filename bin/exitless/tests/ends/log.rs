//! Bounds on the log of a machine whose guest provokes messages.

use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use crate::program::{Program, has_kvm, run};
use spawned::guest::Steps;

#[test]
fn ten_thousand_refused_starts_leave_a_bounded_log() {
    if !has_kvm() {
        return;
    }
    let mut kernel = NamedTempFile::new().unwrap();
    let steps = Steps::default().start_badly(10_000).power_off();
    kernel.write_all(&steps.kernel()).unwrap();
    let mut command = run(kernel.path());
    let disk = NamedTempFile::new().unwrap();
    disk.as_file().set_len(1 << 20).unwrap();
    let path = format!("path={}", disk.path().display());
    command.args(["--disk", &path]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let start = Instant::now();
    let mut program = Program::start(command, true);
    // Ninety thousand exits, which take as long as they take.
    while program.is_alive() && start.elapsed() < Duration::from_secs(180) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let seconds = start.elapsed().as_secs() as usize;
    let ended = program.end(Instant::now());
    assert_eq!(ended.status, Some(0), "{}", ended.said);
    let refused = ended.said.matches("device refused to start").count();
    // Twenty, and one for each second that it takes.
    assert!(
        (20..=21 + seconds).contains(&refused),
        "{refused}: {}",
        ended.said
    );
    // No start is forgotten: a line that was not printed was counted.
    let left_out = ended.said.lines().filter_map(|line| {
        let (count, place) = line.strip_prefix("exitless: ")?.split_once(' ')?;
        let is_left_out = place.starts_with("more messages of virtio_pci::function:");
        is_left_out.then(|| count.parse::<usize>().unwrap())
    });
    assert_eq!(refused + left_out.sum::<usize>(), 10_000, "{}", ended.said);
}
