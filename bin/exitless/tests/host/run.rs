//! `exitless run`: each machine is checked first (`--check`), and then run, with a guest that writes to its disk and powers off.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;

use denied::Denied;
use tempfile::TempDir;

use crate::guest::{Ask, Steps};
use crate::program::{exitless, has_kvm};
use crate::{Host, Outcome, ended, host, host_with, walk};

/// Requests of KVM, by their numbers.
const KVM_GET_STATS_FD: u32 = 0xaece;
const KVM_REGISTER_COALESCED_MMIO: u32 = 0x4010_ae67;
const KVM_IRQFD: u32 = 0x4020_ae76;
const KVM_IOEVENTFD: u32 = 0x4040_ae79;
/// `PAGEMAP_SCAN` of /proc/self/pagemap.
const PAGEMAP_SCAN: u32 = 0xc060_6610;

const RESIDENT: &[&str] = &["--resident", "64M", "--swap", "path=swap,size=64M"];

fn ioctl(number: u32, errno: i32) -> Denied {
    Denied::default().call_with(libc::SYS_ioctl, 1, number, errno)
}

fn hosts() -> Vec<Host> {
    use Outcome::{Refuses, Works};
    const THREADS: Outcome = Works(Some("raw disks are served by threads"));
    vec![
        host("everything", |_| Denied::default(), Works(None)),
        host_with(
            "everything, and --resident",
            |_| Denied::default(),
            RESIDENT,
            Works(None),
        ),
        host(
            "no io_uring",
            |errno| {
                Denied::default()
                    .call(libc::SYS_io_uring_setup, errno)
                    .call(libc::SYS_io_uring_enter, errno)
                    .call(libc::SYS_io_uring_register, errno)
            },
            THREADS,
        ),
        host_with(
            "no io_uring, and --resident",
            |errno| Denied::default().call(libc::SYS_io_uring_setup, errno),
            RESIDENT,
            THREADS,
        ),
        host(
            "no io_uring_register",
            |errno| Denied::default().call(libc::SYS_io_uring_register, errno),
            THREADS,
        ),
        host(
            "no fallocate",
            |errno| Denied::default().call(libc::SYS_fallocate, errno),
            Works(None),
        ),
        host_with(
            "no fallocate, and --resident",
            |errno| Denied::default().call(libc::SYS_fallocate, errno),
            RESIDENT,
            Refuses(&["--resident", "seccomp filter"], Some(&[])),
        ),
        host_with(
            "no fallocate that reserves, and --resident",
            |errno| Denied::default().call_with(libc::SYS_fallocate, 1, 0, errno),
            RESIDENT,
            Works(None),
        ),
        host(
            "no memfd_create",
            |errno| Denied::default().call(libc::SYS_memfd_create, errno),
            Refuses(&["refuses memfd_create", "seccomp profile"], None),
        ),
        host_with(
            "no userfaultfd, and --resident",
            |errno| {
                Denied::default()
                    .call(libc::SYS_userfaultfd, errno)
                    // /dev/userfaultfd gives one too.
                    .call_with(libc::SYS_ioctl, 1, 0xaa00, errno)
            },
            RESIDENT,
            Refuses(&["--resident", "userfaultfd"], Some(&[])),
        ),
        host_with(
            "no PAGEMAP_SCAN, and --resident",
            |errno| ioctl(PAGEMAP_SCAN, errno),
            RESIDENT,
            Refuses(&["--resident", "seccomp filter"], Some(&[])),
        ),
        host(
            "no statistics of KVM",
            |errno| ioctl(KVM_GET_STATS_FD, errno),
            Works(Some("no statistics of KVM")),
        ),
        host_with(
            "no coalesced MMIO, and registers logged",
            |errno| ioctl(KVM_REGISTER_COALESCED_MMIO, errno),
            &["--iommu", "vtd"],
            Refuses(
                &["--iommu-mode trap"],
                Some(&["--iommu", "vtd", "--iommu-mode", "trap"]),
            ),
        ),
        host(
            "no ioeventfd",
            |errno| ioctl(KVM_IOEVENTFD, errno),
            Works(None),
        ),
        host("no irqfd", |errno| ioctl(KVM_IRQFD, errno), Works(None)),
        host_with(
            "no inotify, and --resident-file",
            |errno| Denied::default().call(libc::SYS_inotify_init1, errno),
            &[
                "--resident",
                "64M",
                "--swap",
                "path=swap,size=64M",
                "--resident-file",
                "limit",
                "direct=on",
            ],
            Refuses(&["--resident-file", "without it"], Some(RESIDENT)),
        ),
        host_with(
            "no sched_setaffinity, and --pin",
            |errno| Denied::default().call(libc::SYS_sched_setaffinity, errno),
            &["--pin", "0"],
            Refuses(&["--pin", "without --pin"], Some(&[])),
        ),
        host(
            "no OFD locks",
            |errno| {
                Denied::default()
                    .call_with(libc::SYS_fcntl, 1, libc::F_OFD_SETLK as u32, errno)
                    .call_with(libc::SYS_fcntl, 1, libc::F_OFD_GETLK as u32, errno)
            },
            Refuses(&["refuses locks", "locking=off"], Some(&["locking=off"])),
        ),
        host(
            "no preadv2",
            |errno| Denied::default().call(libc::SYS_preadv2, errno),
            Works(None),
        ),
        host(
            "no statx",
            |errno| Denied::default().call(libc::SYS_statx, errno),
            Works(None),
        ),
        host(
            "no epoll_pwait2",
            |errno| Denied::default().call(libc::SYS_epoll_pwait2, errno),
            Works(None),
        ),
        host(
            "no madvise",
            |errno| Denied::default().call(libc::SYS_madvise, errno),
            Works(None),
        ),
        host(
            "no prlimit64",
            |errno| Denied::default().call(libc::SYS_prlimit64, errno),
            Works(None),
        ),
        host(
            "no clone3",
            |_| Denied::default().call(libc::SYS_clone3, libc::ENOSYS),
            Works(None),
        ),
        host(
            "no eventfd",
            |errno| Denied::default().call(libc::SYS_eventfd2, errno),
            Refuses(&["refuses eventfd", "seccomp profile"], None),
        ),
        host(
            "no epoll",
            |errno| Denied::default().call(libc::SYS_epoll_create1, errno),
            Refuses(&["refuses epoll", "seccomp profile"], None),
        ),
        host(
            "no signalfd",
            |errno| Denied::default().call(libc::SYS_signalfd4, errno),
            Refuses(&["refuses signalfd", "seccomp profile"], None),
        ),
    ]
}

/// A machine's files: on a disk, not in memory.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let steps = Steps::default().ask(Ask::Write).wait_for_answer();
        let kernel = steps.power_off().kernel();
        fs::write(place.0.path().join("kernel"), kernel).unwrap();
        place.write_disk();
        place
    }

    fn command(&self, denied: Denied, more: &[&str]) -> Command {
        let (keys, more): (Vec<&str>, Vec<&str>) = more
            .iter()
            .partition(|more| more.starts_with("locking=") || more.starts_with("direct="));
        let mut command = exitless(&["run", "--any-kvm", "--console", "none"]);
        let mut default = |name: &str, value: &str| {
            if !more.contains(&name) {
                command.args([name, value]);
            }
        };
        default("--memory", "128M");
        default("--iommu", "none");
        command.args(["--kernel", "kernel", "--disk"]);
        command.arg(
            ["path=disk"]
                .into_iter()
                .chain(keys)
                .collect::<Vec<_>>()
                .join(","),
        );
        command.args(more).current_dir(self.0.path());
        denied.apply(&mut command);
        command
    }

    /// Checks the machine; what that said.
    fn checks(&self, mut command: Command) -> Result<String, String> {
        let before = self.files();
        command.arg("--check");
        let output = ended(command);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let found = String::from_utf8_lossy(&output.stdout);
        if output.status.code() != Some(0) || !found.ends_with("the machine can be started\n") {
            return Err(format!("--check: {:?}: {found}{said}", output.status));
        }
        assert_eq!(self.files(), before, "--check left something behind");
        Ok(said)
    }

    /// Runs the machine; what that said, without the account at its end.
    fn runs(&self, command: Command) -> Result<String, String> {
        let output = ended(command);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let mut sector = [0; 512];
        let file = File::open(self.0.path().join("disk")).unwrap();
        file.read_exact_at(&mut sector, 0).unwrap();
        if output.status.code() != Some(0) || !sector.starts_with(b"Hell") {
            return Err(format!("{:?}, {:?}: {said}", output.status, &sector[..4]));
        }
        self.write_disk();
        Ok(said)
    }

    /// The disk, as before the first run.
    fn write_disk(&self) {
        fs::write(self.0.path().join("disk"), vec![0x5a; 1 << 20]).unwrap();
    }

    fn files(&self) -> Vec<std::ffi::OsString> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }
}

fn check(host: &Host, errno: i32) -> Result<(), String> {
    let place = Place::new();
    let command = |arguments| place.command((host.denied)(errno), arguments);
    if let Outcome::Works(_) = host.outcome {
        let said = place.checks(command(host.arguments))?;
        host.check_said(&said, "warning: ")?;
        place.runs(command(host.arguments))?;
        return Ok(());
    }
    let mut trial = command(host.arguments);
    trial.arg("--check");
    host.check_refusal(&ended(trial))?;
    host.check_refusal(&ended(command(host.arguments)))?;
    match host.advised() {
        Some(arguments) => {
            place.checks(command(&arguments))?;
            place.runs(command(&arguments)).map(drop)
        }
        None => Ok(()),
    }
}

#[test]
fn a_machine_works_with_less_or_says_what_to_do() {
    if has_kvm() {
        walk(&hosts(), check);
    }
}
