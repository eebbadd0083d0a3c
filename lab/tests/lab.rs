//! The lab as a whole: starts an emulated host. Needs network on its first run and about half a
//! minute, so that it runs only if `EXITLESS_LAB=1` is set, as in `make test`, and prints a note
//! otherwise.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use lab::{Lab, LabConfig, LabError, Stream};

mod vfio;

/// Returns whether to start labs; prints a note if not.
fn may_start() -> bool {
    let may = std::env::var_os("EXITLESS_LAB").is_some();
    if !may {
        eprintln!("skipped: set EXITLESS_LAB=1 to start the emulated host");
    }
    may
}

fn started(config: &LabConfig) -> Lab {
    let lab = Lab::start(config).expect("the lab starts");
    eprintln!(
        "started in {:.1?}, of which booting {:.1?}",
        lab.start_up(),
        lab.boot_time()
    );
    lab
}

/// Returns the output of a shell inside, which must succeed.
fn sh(lab: &Lab, script: &str) -> String {
    let out = lab.exec("/bin/sh", ["-c", script]).expect("sh runs");
    assert!(out.success(), "{script}: {}", out.stderr_text());
    out.stdout_text()
}

/// All in one lab, since a start takes longer than the tests in it. The doctor needs the program:
/// `EXITLESS_PROGRAM`, else the one that `make build` leaves in target/release.
#[test]
fn a_complete_host() {
    if !may_start() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disks = ["first", "se,cond"].map(|name| dir.path().join(name));
    for disk in &disks {
        std::fs::write(disk, vec![b'.'; 1 << 20]).unwrap();
    }
    // Not executable: it is copied after the start.
    let copied = dir.path().join("copied");
    std::fs::write(&copied, vec![b'c'; 40 << 20]).unwrap();
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/exitless");
    let program = std::env::var("EXITLESS_PROGRAM").unwrap_or_else(|_| default.to_owned());
    let config = LabConfig {
        disks: disks.to_vec(),
        ..LabConfig::default()
    };
    let config = vfio::with_controller(config, dir.path())
        .with_file(&copied, "/root/copied")
        .with_exitless(program);
    let mut lab = started(&config);

    programs_files_and_failures(&lab);
    attached_and_copied_files(&lab, &disks);
    groups_and_compressed_memory(&lab);
    a_suspended_device_keeps_requests(&lab);
    the_doctor_finds_everything(&lab);
    vfio::a_driver_in_user_space(&lab);
    a_late_program_is_killed(&lab);

    let mut terminal = lab.take_terminal().expect("given out once");
    a_program_on_the_terminal_is_waited_for(&lab);
    // The terminal ends with the lab.
    lab.shutdown().unwrap();
    let mut seen = String::new();
    terminal.read_to_string(&mut seen).unwrap();
    assert_eq!(seen.replace('\r', ""), "/dev/hvc0\nlast\n");
}

fn programs_files_and_failures(lab: &Lab) {
    let out = lab
        .exec("/bin/sh", ["-c", "cat; echo err >&2; exit 7"])
        .unwrap();
    assert_eq!((out.status, out.stderr_text().as_str()), (7, "err\n"));
    let out = lab
        .command("/bin/cat")
        .stdin(vec![b'x'; 3 << 20])
        .output()
        .unwrap();
    assert_eq!(out.stdout.len(), 3 << 20);

    // A real KVM with AMD's virtualization and nested paging, and the last CPU kept free.
    let probe = "grep -c svm /proc/cpuinfo; cat /sys/module/kvm_amd/parameters/npt; ls /dev/kvm \
                 /dev/net/tun /dev/userfaultfd; cat /sys/devices/system/cpu/isolated";
    let out = lab.exec("/bin/sh", ["-c", probe]).unwrap();
    assert_eq!(
        out.stdout_text(),
        "3\nY\n/dev/kvm\n/dev/net/tun\n/dev/userfaultfd\n2\n"
    );

    let data: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).collect();
    lab.push_bytes(&data, "/root/deep/er/data", 0o644).unwrap();
    assert_eq!(lab.pull_bytes("/root/deep/er/data").unwrap(), data);
    assert!(matches!(
        lab.pull_bytes("/no/such"),
        Err(LabError::Inside(_))
    ));
    assert!(matches!(
        lab.exec("/no/such", [""; 0]),
        Err(LabError::Inside(_))
    ));
}

fn a_late_program_is_killed(lab: &Lab) {
    let mut seen = Vec::new();
    let late = lab
        .command("/bin/sh")
        .args(["-c", "echo first; sleep 1000"])
        .timeout(Duration::from_secs(2))
        .stream(|stream, data| seen.push((stream, data.to_vec())));
    assert!(
        matches!(&late, Err(LabError::Timeout { seconds: 2, .. })),
        "{late:?}"
    );
    assert_eq!(seen, [(Stream::Stdout, b"first\n".to_vec())]);
    let out = lab
        .exec("/bin/sh", ["-c", "sleep 0.2; pgrep sleep || true"])
        .unwrap();
    assert_eq!(out.stdout_text(), "", "the late program was not killed");
}

fn attached_and_copied_files(lab: &Lab, disks: &[PathBuf]) {
    assert_eq!(
        sh(lab, "stat -c %s copied; tail -c 1 copied"),
        "41943040\nc"
    );
    sh(lab, "echo second | dd of=/dev/vdb conv=notrunc,fsync");
    let read = |disk: &PathBuf| std::fs::read(disk).unwrap();
    assert!(read(&disks[1]).starts_with(b"second\n."));
    assert!(read(&disks[0]).iter().all(|byte| *byte == b'.'));
}

/// Checks the features that tests of memory need.
fn groups_and_compressed_memory(lab: &Lab) {
    sh(
        lab,
        "mkdir /sys/fs/cgroup/small && echo 16777216 > /sys/fs/cgroup/small/memory.max",
    );
    assert_eq!(sh(lab, "cat /sys/fs/cgroup/small/memory.max"), "16777216\n");
    sh(
        lab,
        "lab-load zram && echo 32M > /sys/block/zram0/disksize && mkswap /dev/zram0 && swapon \
         /dev/zram0",
    );
    assert!(sh(lab, "cat /proc/swaps").contains("zram0"));
}

/// Storage that holds requests for as long as a test wants: slow disks are tested with it.
fn a_suspended_device_keeps_requests(lab: &Lab) {
    sh(lab, "lab-load storage && lab-load storage");
    sh(
        lab,
        "head -c 1048576 /dev/zero > backing && losetup /dev/loop0 backing",
    );
    let path = sh(lab, "lab-dm create held 2048 linear '7:0 0'");
    let path = path.trim();
    sh(lab, "lab-dm suspend held");
    let write = format!("echo started; echo kept | dd of={path} bs=512 conv=sync oflag=direct");
    let mut write = lab
        .command("/bin/sh")
        .args(["-c", &write])
        .spawn()
        .expect("sh starts");
    let second = Duration::from_secs(1);
    write
        .wait_until(30 * second, |so_far| {
            so_far.stdout_text().contains("started")
        })
        .expect("the write begins");
    let early = write.wait_until(second, |so_far| !so_far.stderr.is_empty());
    assert!(matches!(early, Err(LabError::Timeout { .. })), "{early:?}");
    assert_eq!(sh(lab, "head -c 4 backing | tr '\\0' 0"), "0000");
    sh(lab, "lab-dm resume held");
    let written = write.wait(30 * second, |_, _| {});
    assert!(written.expect("the write ends").success());
    assert_eq!(sh(lab, "head -c 4 backing"), "kept");
    sh(lab, "lab-dm remove held && losetup -d /dev/loop0");
    let out = lab
        .exec("/bin/lab-dm", ["resume", "held"])
        .expect("it runs");
    assert_eq!(out.status, 1);
    assert!(out.stderr_text().contains("No such device"), "{out:?}");
}

/// Regression test: a program on the terminal seemed to end at once, with status 0 and without its
/// output.
fn a_program_on_the_terminal_is_waited_for(lab: &Lab) {
    let out = lab
        .command("/bin/sh")
        .args(["-c", "tty; sleep 1; echo last; exit 7"])
        .on_terminal()
        .output()
        .unwrap();
    assert_eq!(out.status, 7);
}

fn the_doctor_finds_everything(lab: &Lab) {
    let out = lab.run(["doctor", "--json"]).unwrap();
    let json = out.stdout_text();
    assert!(out.success(), "{json}{}", out.stderr_text());
    assert!(json.contains("\"verdict\": \"native\""), "{json}");
    for good in [
        "svm (AMD-V)",
        "usable, with every capability that `run` uses",
    ] {
        assert!(json.contains(good), "{json}");
    }
}

#[test]
fn a_panic_inside_is_reported_with_the_end_of_the_console() {
    if !may_start() {
        return;
    }
    let lab = started(&LabConfig::default());
    let error = lab
        .exec("/bin/sh", ["-c", "echo c > /proc/sysrq-trigger; sleep 100"])
        .unwrap_err();
    let LabError::Died { during, console } = error else {
        panic!("{error:?}")
    };
    assert!(during.contains("sysrq-trigger"), "{during}");
    assert!(console.contains("sysrq triggered crash"), "{console}");
    // Every later request fails in the same way at once.
    assert!(matches!(
        lab.exec("/bin/true", [""; 0]),
        Err(LabError::Died { .. })
    ));
}
