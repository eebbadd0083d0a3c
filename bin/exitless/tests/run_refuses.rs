//! `exitless run` with a request that cannot start: one line on standard error that names the
//! culprit, exit status 2, nothing started and nothing left behind.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use spawned::files;
use tempfile::TempDir;

/// A directory with a kernel that passes the first checks, an initrd that does, and disks.
struct Files {
    dir: TempDir,
}

impl Files {
    fn new() -> Self {
        let files = Self {
            dir: TempDir::new().unwrap(),
        };
        files.write("kernel", &files::kernel());
        files.write("cut", &files::kernel()[..4000]);
        files.write("initrd", b"070701 and so on");
        files.write("disk", &[0; 8192]);
        files.write("odd", &[0; 1000]);
        files.write("sectors", &[0; 4096 + 512]);
        files.write("empty", b"");
        files.write(
            "text",
            b"not a kernel, nor an initrd, but long enough to be read as one",
        );
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, content: &[u8]) {
        fs::write(self.path(name), content).unwrap();
    }

    /// `exitless run` in the directory, with a good kernel unless `args` name one.
    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_exitless"));
        command.arg("run").current_dir(self.dir.path());
        if !args.contains(&"--kernel") {
            command.args(["--kernel", "kernel"]);
        }
        command.args(args).output().unwrap()
    }

    /// Runs, and demands one line that contains every one of `words`.
    fn refuses(&self, args: &[&str], words: &[&str]) {
        let output = self.run(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert_eq!(text.trim_end().lines().count(), 1, "{args:?}: {text}");
        assert!(output.stdout.is_empty(), "{args:?} wrote to stdout");
        for word in words {
            assert!(text.contains(word), "{args:?}: no {word:?} in: {text}");
        }
    }
}

#[test]
fn a_missing_or_corrupt_kernel() {
    let files = Files::new();
    files.refuses(&["--kernel", "absent"], &["kernel absent", "No such file"]);
    files.refuses(&["--kernel", "empty"], &["kernel empty", "is empty"]);
    files.refuses(&["--kernel", "text"], &["neither a 64-bit bzImage nor"]);
    files.refuses(&["--kernel", "."], &["kernel .", "not a file"]);
    files.refuses(
        &["--kernel", "cut"],
        &["kernel cut", "4000 bytes of the 4096", "cut short"],
    );
}

#[test]
fn a_missing_or_corrupt_initrd() {
    let files = Files::new();
    files.refuses(&["--initrd", "absent"], &["initrd absent", "No such file"]);
    files.refuses(
        &["--initrd", "text"],
        &["initrd text", "neither a cpio archive"],
    );
    files.refuses(&["--initrd", "empty"], &["initrd empty"]);
}

#[test]
fn absurd_memory_sizes() {
    let files = Files::new();
    files.refuses(&["--memory", "1M"], &["--memory 1M", "64 MiB"]);
    files.refuses(&["--memory", "16384T"], &["more than this host has"]);
    files.refuses(&["--memory", "99999999999T"], &["64 bits"]);
    files.refuses(&["--memory", "lots"], &["--memory", "lots"]);
    files.refuses(&["--memory", "100000001"], &["multiple of 2 MiB"]);
}

#[test]
fn anonymous_memory_for_whoever_needs_its_file() {
    let files = Files::new();
    let memory = ["--memory", "256M,shared=off", "--iommu", "none"];
    let with = |args: &[&str], words: &[&str]| {
        files.refuses(
            &[&memory, args].concat(),
            &[&["shared=off"], words].concat(),
        );
    };
    let swap = "path=swap,size=256M";
    with(&["--resident", "64M", "--swap", swap], &["--resident"]);
    with(&["--disk", "socket=nobody"], &["--disk socket"]);
    files.refuses(&["--memory", "256M,shared=no"], &["--memory", "on or off"]);
}

#[test]
fn numbers_out_of_range() {
    let files = Files::new();
    files.refuses(&["--cpus", "0"], &["--cpus is 1 to 16"]);
    files.refuses(&["--cpus", "17"], &["--cpus is 1 to 16"]);
    files.refuses(&["--sidecores", "0"], &["--sidecores"]);
    files.refuses(&["--drain-limit", "0"], &["--drain-limit"]);
    let day = ["--stop-timeout", "86401"];
    files.refuses(&day, &["--stop-timeout is 0 to 86400 s, not 86401"]);
    files.refuses(&["--pin", "0-"], &["--pin"]);
    files.refuses(&["--pin", "0,0,0"], &["3 CPUs for 2 threads"]);
    files.refuses(&["--pin", "1023"], &["no thread can run on CPU 1023"]);
    let long = "x".repeat(2048);
    files.refuses(&["--cmdline", &long], &["2047"]);
    files.refuses(&["--cmdline", "a\nb"], &["printable"]);
}

#[test]
fn disks_of_the_wrong_kind_or_size() {
    let files = Files::new();
    files.refuses(&["--disk", "path=absent"], &["disk absent", "No such file"]);
    files.refuses(&["--disk", "path=odd"], &["1000 bytes", "block size 512"]);
    files.refuses(
        &["--disk", "path=sectors,block=4096"],
        &["4608 bytes", "4096"],
    );
    files.refuses(&["--disk", "path=empty"], &["empty"]);
    files.refuses(&["--disk", "path=."], &["disk ."]);
    files.refuses(
        &["--disk", "path=/dev/null"],
        &["neither a file nor a block device"],
    );
    files.refuses(&["--disk", "disk"], &["path=FILE"]);
    files.refuses(&["--disk", "path=disk,block=1024"], &["512 or 4096"]);
    let image = |more: &str, words: &[&str]| {
        files.refuses(&["--disk", &format!("path=disk,{more}")], words);
    };
    files.write(
        "image",
        b"QFI\xfb and so on, for the five hundred and twelve bytes of a block",
    );
    files.refuses(
        &["--disk", "path=image"],
        &["disk image", "format=qcow2, or format=raw"],
    );
    image("format=vmdk", &["raw or qcow2", "vmdk"]);
    image("format=qcow2,direct=on", &["direct", "raw"]);
    image("backing=on", &["backing", "format=qcow2"]);
    image("format=raw,barriers=off", &["barriers", "format=qcow2"]);
    files.refuses(&["--disk", "path=disk,queues=0"], &["queues is 1 to 16"]);
    files.refuses(
        &["--disk", "path=disk,colour=red"],
        &["unknown key \"colour\""],
    );
    files.refuses(&["--disk", "path=disk,readonly=maybe"], &["on or off"]);
    files.refuses(
        &["--disk", "path=disk,id=longer-than-twenty-characters"],
        &["20"],
    );
}

#[test]
fn devices_that_cannot_be_understood_or_do_not_go_with_the_rest() {
    let files = Files::new();
    let device = |text: &str, more: &[&str], words: &[&str]| {
        files.refuses(&[&["--device", text], more].concat(), words);
    };
    device(
        "vfio=4.0",
        &[],
        &["--device", "4.0", "no PCI address", "exitless doctor"],
    );
    device(
        "vfio=00:04.0,policy=lazy",
        &[],
        &["--device: policy", "strict, async, deferred, optimistic=N"],
    );
    device(
        "vfio=00:04.0",
        &["--device", "vfio=0000:00:04.0"],
        &["vfio=0000:00:04.0 is given twice"],
    );
    device(
        "vfio=00:04.0",
        &["--memory", "64M,thp=on"],
        &["thp=on", "--device", "stays in memory"],
    );
    device(
        "vfio=00:04.0",
        &["--disk", "socket=a"],
        &["--disk socket=a", "--iommu none"],
    );
    device(
        "vfio=00:04.0",
        &["--net", "socket=a"],
        &["--net socket=a", "--iommu none"],
    );
    device(
        "vfio=00:04.0,policy=async",
        &["--iommu", "none"],
        &["policy", "--iommu none has none"],
    );
    device(
        "vfio=00:04.0",
        &["--iommu", "none", "--balloon", "target=0"],
        &["--balloon does not go with --device"],
    );
}

#[test]
fn a_mode_of_the_other_iommu_and_what_does_not_go_with_a_paravirtual_one() {
    let files = Files::new();
    files.refuses(
        &["--iommu-mode", "polled"],
        &["--iommu virtio", "logged, shared and trap"],
    );
    for mode in ["logged", "shared"] {
        files.refuses(
            &["--iommu", "virtio", "--iommu-mode", mode],
            &["--iommu vtd", "polled and trap"],
        );
    }
    let virtio = ["--iommu", "virtio", "--iommu-hints"];
    for (hints, words) in [
        ("populate=yes", "on or off"),
        ("prefetch=on", "prefetch"),
        ("gather=on,gather=on", "twice"),
    ] {
        let flags = [&virtio[..], &[hints]].concat();
        files.refuses(&flags, &["--iommu-hints", words]);
    }
    files.refuses(&["--iommu-hints", "gather=on"], &["--iommu virtio"]);
    for option in [
        ["--disk", "socket=a"],
        ["--net", "socket=a"],
        ["--device", "vfio=00:04.0"],
    ] {
        let [name, value] = option;
        files.refuses(
            &["--iommu", "virtio", name, value],
            &[name, value, "does not go with --iommu virtio yet"],
        );
    }
}

#[test]
fn disks_behind_sockets() {
    let files = Files::new();
    let refuses = |disk: &str, words: &[&str]| {
        files.refuses(&["--iommu", "none", "--disk", disk], words);
    };
    refuses("socket=", &["a socket's path has 1 to 107"]);
    refuses("socket=a.sock,queues=99", &["queues is 1 to 16"]);
    refuses("socket=a.sock,queue-size=100", &["power of two"]);
    refuses("socket=a.sock,path=disk", &["exitless serve --block path="]);
    refuses("socket=a.sock,colour=red", &["unknown key \"colour\""]);
    files.refuses(
        &[
            "--iommu",
            "none",
            "--disk",
            "socket=a.sock",
            "--disk",
            "socket=a.sock,queues=2",
        ],
        &["a.sock", "given twice"],
    );
}

#[test]
fn two_disks_on_one_file_by_any_name() {
    let files = Files::new();
    fs::hard_link(files.path("disk"), files.path("hard")).unwrap();
    std::os::unix::fs::symlink("disk", files.path("soft")).unwrap();
    for other in ["disk", "./disk", "hard", "soft"] {
        let second = format!("path={other}");
        files.refuses(
            &["--disk", "path=disk", "--disk", &second],
            &["are one file"],
        );
    }
    // One that is only read does not help the other.
    files.refuses(
        &["--disk", "path=disk,readonly=on", "--disk", "path=soft"],
        &["disks disk and soft are one file"],
    );
}

#[test]
fn a_tap_that_cannot_be_had() {
    let files = Files::new();
    files.refuses(
        &["--net", "tap=a-name-too-long-for-linux"],
        &["interface name"],
    );
    files.refuses(
        &["--net", "bridge=br0"],
        &["unknown key \"bridge\"", "responder, switch", "tap"],
    );
    files.refuses(
        &["--net", "mac=52:54:00:00:00:01"],
        &["responder, tap=NAME, switch=NAME and socket=PATH"],
    );
    if !has_capability_net_admin() || !Path::new("/dev/net/tun").exists() {
        files.refuses(
            &["--net", "tap=exitless-none,create=on"],
            &["TAP exitless-none"],
        );
    } else {
        println!("skipped: this process may create TAP interfaces");
    }
}

/// A name with a slip in it is no wish for an interface of that name.
#[test]
fn a_tap_that_is_not_there_is_not_made() {
    let files = Files::new();
    let net = ["--net", "tap=exitless-none"];
    files.refuses(
        &net,
        &["TAP exitless-none", "no such interface", "create=on"],
    );
    files.refuses(
        &["--net", "tap=exitless-none,create=off"],
        &["no such interface"],
    );
    files.refuses(
        &["--net", "tap=exitless-none,create=maybe"],
        &["--net: create is on or off"],
    );
    // Of no other kind either.
    files.refuses(&["--net", "tap=lo"], &["TAP lo"]);
    let old = files.path("old.pcap");
    fs::write(&old, "old").unwrap();
    let net = format!("responder,pcap={}", old.display());
    files.refuses(&["--net", &net], &["is there already", "pcap-replace=on"]);
    files.refuses(
        &["--net", "responder,create=on"],
        &["create is for tap=NAME"],
    );
}

fn has_capability_net_admin() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.is_some_and(|hex| u64::from_str_radix(hex.trim(), 16).unwrap() & 1 << 12 != 0)
}

#[test]
fn files_that_cannot_be_written() {
    let files = Files::new();
    files.refuses(
        &["--ledger", "absent/ledger.json"],
        &["ledger absent/ledger.json"],
    );
    files.refuses(
        &["--console", "absent/console"],
        &["console absent/console"],
    );
    files.refuses(&["--ledger", "ledger.json", "--cpus", "0"], &["--cpus"]);
    assert!(!files.path("ledger.json").exists(), "left behind");
}

#[test]
fn software_kvm_points_to_the_lab() {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap();
    let flags = info.lines().filter(|line| line.starts_with("flags"));
    if flags
        .flat_map(str::split_whitespace)
        .any(|flag| flag == "vmx" || flag == "svm")
    {
        println!("skipped: this host has hardware virtualization");
        return;
    }
    Files::new().refuses(&["--iommu", "none"], &["exitless-lab lab -- run"]);
}

#[test]
fn less_memory_than_a_guest_needs_or_what_does_not_go_with_it() {
    let files = Files::new();
    let swap = "path=swap,size=256M";
    let with = |args: &[&str], words: &[&str]| {
        let all = [&["--memory", "256M", "--iommu", "none"], args].concat();
        files.refuses(&all, words);
        assert!(!files.path("swap").exists(), "{args:?} left a store behind");
    };
    with(&["--swap", swap], &["--swap goes with --resident"]);
    with(
        &["--resident-file", "limit"],
        &["--resident-file goes with --resident"],
    );
    with(
        &["--resident", "64M"],
        &["needs a place for the rest", "--swap path=FILE"],
    );
    with(
        &["--resident", "8M", "--swap", swap],
        &["--resident", "16512 KiB"],
    );
    with(
        &["--resident", "18M", "--swap", swap, "--disk", "path=disk"],
        &["--resident", "1 disk ", "21632 KiB"],
    );
    with(
        &["--resident", "a lot", "--swap", swap],
        &["--resident", "is no number"],
    );
    with(
        &["--resident", "64M", "--swap", "size=1G"],
        &["names no file"],
    );
    with(
        &["--resident", "64M", "--swap", "path=swap,colour=red"],
        &["unknown key", "colour"],
    );
    with(
        &["--resident", "64M", "--swap", "path=swap,file="],
        &["--swap: file is empty", "a larger size"],
    );
    with(
        &["--resident", "64M", "--swap", "path=swap,discard=maybe"],
        &["--swap: discard is on or off", "maybe"],
    );
    with(
        &["--resident", "64M", "--swap", swap, "--dma", "bounce"],
        &["--dma bounce"],
    );
    with(
        &["--resident", "64M", "--swap", swap, "--disk", "socket=s"],
        &["socket=s", "does not go with --resident"],
    );

    if let Some(what) = lacks_for_paging() {
        println!("skipped: {what}");
        return with(
            &["--resident", "64M", "--swap", swap],
            &["--resident", &what],
        );
    }
    with(
        &["--resident", "64M", "--swap", "path=disk"],
        &["--swap", "disk: there is a file of this name"],
    );
    with(
        &["--resident", "64M", "--swap", "path=swap,size=1K"],
        &["swap store of 1024 bytes"],
    );
}

#[test]
fn a_balloon_that_no_guest_can_fill() {
    let files = Files::new();
    let with = |balloon: &str, words: &[&str]| {
        files.refuses(&["--memory", "256M", "--balloon", balloon], words);
    };
    with(
        "target=200M",
        &["--balloon: target", "keeps 64 MiB", "192 MiB are the most"],
    );
    with("target=much", &["--balloon: target", "is no number"]);
    with("colour=red", &["--balloon: unknown key \"colour\""]);
    with(
        "target=auto,file=f",
        &["--balloon: target=auto finds the size itself"],
    );
    with("file=", &["--balloon: file is empty"]);
    with(
        "deflate-on-oom=perhaps",
        &["--balloon: deflate-on-oom is on or off"],
    );
    with("reporting=1", &["--balloon: reporting is on or off"]);
    files.refuses(
        &["--balloon", "target=1M", "--balloon-period", "0"],
        &["--balloon-period is 1 to 3600000 ms"],
    );
}

/// Returns the first thing that this host lacks for `--resident`, by `exitless doctor`.
fn lacks_for_paging() -> Option<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_exitless"));
    let output = command.args(["doctor", "--json"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = &report["findings"]["resident"];
    let value = finding["value"].as_str().unwrap();
    let first = value.split("; ").next().unwrap();
    (finding["state"] != "good").then(|| first.to_owned())
}

/// A host whose kernel would do, for root.
#[test]
fn less_memory_than_a_guest_believes_for_a_user_who_may_not_serve_its_faults() {
    let files = Files::new();
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        return println!("skipped: only root can start a program as somebody else");
    }
    let is_allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if is_allowed.is_ok_and(|text| text.trim() == "1") {
        return println!("skipped: on this host everybody may");
    }
    if let Some(what) = lacks_for_paging() {
        return println!("skipped: {what}");
    }
    // Any user could make a store in this directory.
    fs::set_permissions(files.dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // Other users may not read the directory where programs are built. An open program can be
    // started.
    let program = fs::File::open(env!("CARGO_BIN_EXE_exitless")).unwrap();
    let mut command = Command::new(files::inheritable(&program));
    command.arg("run").current_dir(files.dir.path());
    command.args(["--kernel", "kernel", "--memory", "256M", "--iommu", "none"]);
    command.args(["--resident", "64M", "--swap", "path=swap,size=256M"]);
    command.uid(files::NOBODY).gid(files::NOBODY);
    let output = match command.output() {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            return println!("skipped: temporary files are root's alone");
        }
        output => output.unwrap(),
    };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    for word in ["--resident: this user may not serve", "/dev/userfaultfd"] {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
    assert!(!files.path("swap").exists(), "left a store behind");
}
