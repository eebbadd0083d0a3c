//! `exitless run`: each machine is checked first (`--check`), and then run, with a guest that
//! writes to its disk and powers off.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;

use denied::Denied;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::program::{Program, exitless, has_kvm};
use crate::{Host, Outcome, both, ended, host, host_with, walk};
use spawned::guest::{Ask, Steps};

/// Requests of KVM, by their numbers.
const KVM_GET_STATS_FD: u32 = 0xaece;
const KVM_REGISTER_COALESCED_MMIO: u32 = 0x4010_ae67;
const KVM_CREATE_VCPU: u32 = 0xae41;
const KVM_SET_GSI_ROUTING: u32 = 0x4008_ae6a;
const KVM_IRQFD: u32 = 0x4020_ae76;
const KVM_SIGNAL_MSI: u32 = 0x4020_aea5;
const KVM_IOEVENTFD: u32 = 0x4040_ae79;
/// Request of /dev/net/tun.
const TUNSETIFF: u32 = 0x4004_54ca;
/// `PAGEMAP_SCAN` of /proc/self/pagemap.
const PAGEMAP_SCAN: u32 = 0xc060_6610;

/// A disk that a daemon serves: [`MachineDir::command`] has the rest.
const SERVED: &[&str] = &["served"];
const TAP: &[&str] = &["--net", "tap=exitless-host,create=on"];
const RESIDENT: &[&str] = &["--resident", "64M", "--swap", "path=swap,size=64M"];

fn ioctl(number: u32, errno: i32) -> Denied {
    Denied::default().call_with(libc::SYS_ioctl, 1, number, errno)
}

fn hosts() -> Vec<Host> {
    use Outcome::{Refuses, Works};
    const THREADS: Outcome = Works(Some("raw disks are served by threads"));
    const DOORBELLS: Outcome = Works(Some("no ioeventfd"));
    const RESPONDER: Option<&[&str]> = Some(&["--net", "responder"]);
    let mut hosts = vec![
        host_with(
            "everything, and --resident",
            |_| Denied::default(),
            RESIDENT,
            Works(None),
        ),
        host_with(
            "no io_uring, and --resident",
            |errno| Denied::default().call(libc::SYS_io_uring_setup, errno),
            RESIDENT,
            THREADS,
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
            "no leave for /dev/userfaultfd, and --resident",
            |_| Denied::default().no_device("/dev/userfaultfd"),
            RESIDENT,
            Works(None),
        ),
        host_with(
            "no /proc, and --resident",
            |_| Denied::default().empty("/proc"),
            RESIDENT,
            Refuses(&["--resident", "/proc/self/pagemap"], Some(&[])),
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
            DOORBELLS,
        ),
        host_with(
            "no ioeventfd, and a disk behind a socket",
            |errno| ioctl(KVM_IOEVENTFD, errno),
            SERVED,
            DOORBELLS,
        ),
        host_with(
            "everything, and a disk behind a socket",
            |_| Denied::default(),
            SERVED,
            Works(None),
        ),
        host("no irqfd", |errno| ioctl(KVM_IRQFD, errno), Works(None)),
        host_with(
            "no irqfd, and a disk behind a socket",
            |errno| ioctl(KVM_IRQFD, errno),
            SERVED,
            Refuses(&["KVM_IRQFD", "--disk path="], Some(&[])),
        ),
        host(
            "no messages for local APICs",
            |errno| ioctl(KVM_SIGNAL_MSI, errno),
            Refuses(&["KVM_SIGNAL_MSI", "seccomp profile"], None),
        ),
        host(
            "no routes of interrupts",
            |errno| ioctl(KVM_SET_GSI_ROUTING, errno),
            Refuses(&["KVM_SET_GSI_ROUTING", "seccomp profile"], None),
        ),
        host(
            "no vCPUs",
            |errno| ioctl(KVM_CREATE_VCPU, errno),
            Refuses(&["a vCPU", "seccomp profile"], None),
        ),
        host(
            "no leave for /dev/kvm",
            |_| Denied::default().no_device("/dev/kvm"),
            Refuses(&["/dev/kvm", "a container has to be given it"], None),
        ),
        host(
            "no /proc",
            |_| Denied::default().empty("/proc"),
            Works(None),
        ),
        host_with(
            "everything, and a TAP",
            |_| Denied::default().device("/dev/net/tun"),
            TAP,
            Works(None),
        ),
        host_with(
            "no leave for /dev/net/tun, and a TAP",
            |_| Denied::default().no_device("/dev/net/tun"),
            TAP,
            Refuses(&["/dev/net/tun", "container", "--net responder"], RESPONDER),
        ),
        host_with(
            "no /dev/net/tun, and a TAP",
            |_| Denied::default().empty("/dev/net"),
            TAP,
            Refuses(
                &["/dev/net/tun", "modprobe tun", "--net responder"],
                RESPONDER,
            ),
        ),
        host_with(
            "no TUNSETIFF, and a TAP",
            |errno| ioctl(TUNSETIFF, errno),
            TAP,
            Refuses(&["CAP_NET_ADMIN", "--net responder"], RESPONDER),
        ),
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
            "no getrandom, and --rng",
            |errno| Denied::default().call(libc::SYS_getrandom, errno),
            &["--rng"],
            Refuses(&["refuses getrandom", "seccomp profile"], None),
        ),
        host_with(
            "no sched_setaffinity, and --pin",
            |errno| Denied::default().call(libc::SYS_sched_setaffinity, errno),
            &["--pin", "0"],
            Refuses(&["--pin", "without --pin"], Some(&[])),
        ),
    ];
    hosts.extend(both::hosts().into_iter().map(|both| both.run));
    hosts
}

/// A machine's files: on a disk, not in memory.
pub struct MachineDir(TempDir);

impl MachineDir {
    pub fn new() -> Self {
        let place = Self(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let steps = Steps::default().ask(Ask::Write).wait_for_answer();
        let kernel = steps.power_off().kernel();
        fs::write(place.0.path().join("kernel"), kernel).unwrap();
        place.write_disk();
        place
    }

    pub fn command(&self, denied: Denied, more: &[&str]) -> Command {
        let is_served = more == SERVED;
        let more = if is_served { &[] } else { more };
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
            [if is_served {
                "socket=socket"
            } else {
                "path=disk"
            }]
            .into_iter()
            .chain(keys)
            .collect::<Vec<_>>()
            .join(","),
        );
        command.args(more).current_dir(self.0.path());
        denied.apply(&mut command);
        command
    }

    /// A daemon that serves the disk.
    fn daemon(&self) -> Program {
        let mut command = exitless(&["serve", "--idle", "sleep", "--block"]);
        command.arg("id=disk,path=disk,socket=socket");
        command.current_dir(self.0.path());
        let program = Program::start(command, true);
        program.wait_for("ready: ");
        program
    }

    /// Checks the machine. Returns the output.
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

    /// Runs the machine. Returns the output, without the account at its end.
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
    let place = MachineDir::new();
    let command = |arguments| place.command((host.denied)(errno), arguments);
    let daemon = (host.arguments == SERVED).then(|| place.daemon());
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
    if let Some(daemon) = daemon {
        daemon.ends_by(Signal::TERM, 0);
    }
    match host.advised() {
        Some(arguments) => {
            place.checks(command(&arguments))?;
            place.runs(command(&arguments)).map(drop)
        }
        None => Ok(()),
    }
}

/// At a guest's mark the ledger needs histograms of exits. A host without them is reported once,
/// with an advice that helps, or that names another kernel.
#[test]
fn a_ledger_without_histograms_of_exits_says_what_gives_them() {
    if !has_kvm() {
        return;
    }
    let place = MachineDir::new();
    let kernel = Steps::default().mark(1).mark(1).power_off().kernel();
    fs::write(place.0.path().join("kernel"), kernel).unwrap();
    let said = |denied: Denied| -> Vec<String> {
        let mut command = place.command(denied, &[]);
        command.args(["--ledger", "ledger.json"]);
        let output = ended(command);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{said}");
        let about = |line: &&str| line.contains("histograms of exits");
        said.lines().filter(about).map(str::to_owned).collect()
    };
    let absent = Denied::default().empty("/sys/kernel/tracing");
    if !absent.is_possible() {
        println!("skipped: {absent:?} cannot be had");
        return;
    }
    let lines = said(absent);
    assert_eq!(lines.len(), 1, "{lines:?}");
    let advice = "mount -t tracefs none /sys/kernel/tracing";
    assert!(lines[0].contains(advice), "{lines:?}");
    // As advised.
    let lines = said(Denied::default().tracefs());
    let is_of_kernel =
        |line: &String| line.contains("this kernel has no ") && line.contains("CONFIG_");
    assert!(
        lines.len() <= 1 && lines.iter().all(is_of_kernel),
        "{lines:?}"
    );
    // tracefs that is not to be written.
    for errno in crate::EITHER {
        let lines = said(Denied::default().tracefs().call(libc::SYS_mkdir, errno));
        let is_forbidden = |line: &String| line.contains("no permission for ");
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(
            is_of_kernel(&lines[0]) || is_forbidden(&lines[0]),
            "{lines:?}"
        );
    }
}

#[test]
fn a_machine_works_with_less_or_says_what_to_do() {
    if has_kvm() {
        walk(&hosts(), check);
    }
}
