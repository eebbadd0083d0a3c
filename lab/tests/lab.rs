//! The lab as a whole: starts an emulated host. Needs network on its first run and about half a
//! minute, so it runs when `EXITLESS_LAB=1` is set, as `make test` does, and says so otherwise.

use std::io::Read;
use std::time::Duration;

use lab::{Lab, LabConfig, LabError, Stream};

/// The lab, or `None` with a printed reason.
fn lab() -> Option<Lab> {
    if std::env::var_os("EXITLESS_LAB").is_none() {
        eprintln!("skipped: set EXITLESS_LAB=1 to start the emulated host");
        return None;
    }
    let lab = Lab::start(&LabConfig::default()).expect("the lab starts");
    eprintln!(
        "started in {:.1?}, of which booting {:.1?}",
        lab.start_up(),
        lab.boot_time()
    );
    Some(lab)
}

#[test]
fn programs_files_and_failures() {
    let Some(lab) = lab() else { return };

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

    a_suspended_device_keeps_requests(&lab);

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

    lab.shutdown().unwrap();
}

/// What tests of memory and storage need: groups with limits, memory as a swap device, disks that are attached.
#[test]
fn disks_groups_and_compressed_memory() {
    if std::env::var_os("EXITLESS_LAB").is_none() {
        eprintln!("skipped: set EXITLESS_LAB=1 to start the emulated host");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let files = ["first", "se,cond"].map(|name| dir.path().join(name));
    for file in &files {
        std::fs::write(file, vec![b'.'; 1 << 20]).unwrap();
    }
    // No program: it comes after the start.
    let copied = dir.path().join("copied");
    std::fs::write(&copied, vec![b'c'; 40 << 20]).unwrap();
    let config = LabConfig {
        disks: files.to_vec(),
        ..LabConfig::default()
    };
    let lab = Lab::start(&config.with_file(&copied, "/root/copied")).unwrap();
    let sh = |script: &str| {
        let out = lab.exec("/bin/sh", ["-c", script]).unwrap();
        assert!(out.success(), "{script}: {}", out.stderr_text());
        out.stdout_text()
    };
    assert_eq!(sh("stat -c %s copied; tail -c 1 copied"), "41943040\nc");
    sh("echo second | dd of=/dev/vdb conv=notrunc,fsync");
    assert!(std::fs::read(&files[1]).unwrap().starts_with(b"second\n."));
    assert!(
        std::fs::read(&files[0])
            .unwrap()
            .iter()
            .all(|byte| *byte == b'.')
    );
    sh("mkdir /sys/fs/cgroup/small && echo 16777216 > /sys/fs/cgroup/small/memory.max");
    assert_eq!(sh("cat /sys/fs/cgroup/small/memory.max"), "16777216\n");
    sh(
        "lab-load zram && echo 32M > /sys/block/zram0/disksize && mkswap /dev/zram0 && swapon /dev/zram0",
    );
    assert!(sh("cat /proc/swaps").contains("zram0"));
    lab.shutdown().unwrap();
}

/// Storage that holds what it is given for as long as a test wants: what slow disks are tested with.
fn a_suspended_device_keeps_requests(lab: &Lab) {
    let sh = |script: &str| {
        let out = lab.exec("/bin/sh", ["-c", script]).expect("sh runs");
        assert!(out.success(), "{script}: {}", out.stderr_text());
        out.stdout_text()
    };
    sh("lab-load storage && lab-load storage");
    sh("head -c 1048576 /dev/zero > backing && losetup /dev/loop0 backing");
    let path = sh("lab-dm create held 2048 linear '7:0 0'");
    let path = path.trim();
    sh("lab-dm suspend held");
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
    assert_eq!(sh("head -c 4 backing | tr '\\0' 0"), "0000");
    sh("lab-dm resume held");
    let written = write.wait(30 * second, |_, _| {});
    assert!(written.expect("the write ends").success());
    assert_eq!(sh("head -c 4 backing"), "kept");
    sh("lab-dm remove held && losetup -d /dev/loop0");
    let out = lab
        .exec("/bin/lab-dm", ["resume", "held"])
        .expect("it runs");
    assert_eq!(out.status, 1);
    assert!(out.stderr_text().contains("No such device"), "{out:?}");
}

/// A program on the terminal was once started so that it seemed to end at once, with status 0 and its output lost.
#[test]
fn a_program_on_the_terminal_is_waited_for() {
    let Some(mut lab) = lab() else { return };
    let mut terminal = lab.take_terminal().expect("given out once");
    let out = lab
        .command("/bin/sh")
        .args(["-c", "tty; sleep 1; echo last; exit 7"])
        .on_terminal()
        .output()
        .unwrap();
    assert_eq!(out.status, 7);
    // The terminal ends with the lab.
    lab.shutdown().unwrap();
    let mut seen = String::new();
    terminal.read_to_string(&mut seen).unwrap();
    assert_eq!(seen.replace('\r', ""), "/dev/hvc0\nlast\n");
}

#[test]
fn a_panic_inside_is_reported_with_the_end_of_the_console() {
    let Some(lab) = lab() else { return };
    let error = lab
        .exec("/bin/sh", ["-c", "echo c > /proc/sysrq-trigger; sleep 100"])
        .unwrap_err();
    let LabError::Died { during, console } = error else {
        panic!("{error:?}")
    };
    assert!(during.contains("sysrq-trigger"), "{during}");
    assert!(console.contains("sysrq triggered crash"), "{console}");
    // And every later request says the same at once.
    assert!(matches!(
        lab.exec("/bin/true", [""; 0]),
        Err(LabError::Died { .. })
    ));
}

/// Needs the program too: `EXITLESS_PROGRAM`, else what `make build` leaves in target/release.
#[test]
fn the_doctor_inside_finds_a_complete_host() {
    if std::env::var_os("EXITLESS_LAB").is_none() {
        eprintln!("skipped: set EXITLESS_LAB=1 to start the emulated host");
        return;
    }
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/exitless");
    let program = std::env::var("EXITLESS_PROGRAM").unwrap_or_else(|_| default.to_owned());
    let lab = Lab::start(&LabConfig::default().with_exitless(program)).unwrap();
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
    lab.shutdown().unwrap();
}
