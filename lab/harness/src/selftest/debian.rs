//! A stock Debian, with systemd and the generic kernel of its packages, on a disk behind VT-d or a
//! virtio-iommu.
//!
//! Each case boots a copy of the root that [`lab::packages::Debian`] makes once, in a lab of its
//! own; the root's own unit does the jobs that the kernel's command line names and reports them on
//! the console. Then the VMM is sent SIGTERM, which presses the guest's power button: systemd
//! powers off, and the file system must be clean afterwards. So every case checks that too.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use lab::LabError;
use lab::packages::{Debian, NEWER, Version, cache_dir};

use super::clients::Ran;
use crate::system::guest::{Guest, Mode, Outcome, System};
use crate::system::host::Host;
use crate::system::tools::{text, tool};

/// Memory of a lab that boots it, MiB: beside the guest's memory there are the kernel and the
/// initrd, twice.
const LAB_MIB: u32 = 2560;
const MEMORY: &str = "768M";
/// MiB that fio writes and verifies.
const FIO_MIB: u32 = 64;
/// The same behind a virtio-iommu: Linux's driver waits for each mapping, four to a block, and
/// notifies the device of each.
const FIO_MIB_PARAVIRTUAL: u32 = 8;
const REBOOTS: u32 = 5;
/// Seconds in which the guest has to power off.
const STOP: &str = "600";
/// Time limit of one boot, its jobs and its end.
const BOOT: Duration = Duration::from_secs(900);
/// Prefix of the root's last line ([`lab::guest_image::run_status`]).
const DONE: &str = "exitless-guest: status=";

/// Format of the root's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    Raw,
    Qcow2,
}

/// One case.
#[derive(Clone, Debug)]
pub struct DebianCase {
    /// Unique name, by which a soak records it.
    pub name: String,
    image: Image,
    mode: Mode,
    is_strict: bool,
    cpus: u32,
    kernel: Option<Version>,
    jobs: Jobs,
}

/// Jobs of the root once it is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Jobs {
    Nothing,
    /// Verifies so many MiB.
    Fio(u32),
    Reboots,
}

impl DebianCase {
    fn new(image: Image, is_strict: bool, jobs: Jobs) -> Self {
        let mut case = Self {
            name: String::new(),
            image,
            mode: Mode::Shared,
            is_strict,
            cpus: 2,
            kernel: None,
            jobs,
        };
        if jobs == Jobs::Reboots {
            // Six boots in one lab: with two vCPUs the emulated host seldom survives that long.
            case.cpus = 1;
        }
        case.name = case.describe();
        case
    }

    /// Returns a case with Linux of the newer series, which only boots.
    fn newer(mode: Mode, round: u32) -> Self {
        let mut case = Self::new(Image::Raw, false, Jobs::Nothing);
        (case.mode, case.kernel) = (mode, Some(NEWER));
        case.name = format!("{}, round {round} of 3", case.describe());
        case
    }

    /// Returns a case with fio behind a virtio-iommu, whose driver is in its initrd.
    fn paravirtual() -> Self {
        let mut case = Self::new(Image::Raw, false, Jobs::Fio(FIO_MIB_PARAVIRTUAL));
        (case.mode, case.kernel) = (Mode::Virtio, Some(NEWER));
        case.name = case.describe();
        case
    }

    fn describe(&self) -> String {
        let kernel = self
            .kernel
            .map_or(String::new(), |series| format!(" with Linux {series}"));
        let jobs = match self.jobs {
            Jobs::Nothing => String::new(),
            Jobs::Fio(mib) => format!(", {mib} MiB verified by fio"),
            Jobs::Reboots => format!(", rebooted {REBOOTS} times from inside"),
        };
        let image = match self.image {
            Image::Raw => "raw",
            Image::Qcow2 => "qcow2",
        };
        let policy = if self.is_strict { "strict" } else { "lazy" };
        format!(
            "Debian{kernel} boots{jobs}, and powers off on SIGTERM: {image}, {}, {} vCPU, {policy}",
            self.mode.name(),
            self.cpus
        )
    }

    /// Runs it on a copy of this root.
    ///
    /// # Errors
    /// The guest's output is not as expected, or the emulated host died; with the end of the
    /// console.
    pub fn run(&self, debian: &Debian) -> Result<Ran> {
        let Some(kernel) = debian.kernel(self.kernel) else {
            return Ok(Ran::Skipped("this release has no such kernel".into()));
        };
        let scratch = tempfile::Builder::new()
            .prefix("debian-run-")
            .tempdir_in(cache_dir())
            .context("making a directory for the copy of the root")?;
        let disk = Disk::copy(self.image, debian, scratch.path())?;
        let files = [
            (kernel.vmlinuz, "debian-vmlinuz"),
            (kernel.initrd, "debian-initrd"),
        ];
        let host = Host::start_with_files(LAB_MIB, &files, vec![disk.attached.clone()])?;
        host.note_shutdowns()?;
        let ran = self.boot(&host, &disk).map_err(|error| {
            let noted = host.noted().text;
            anyhow!("{error:#}\n{noted}")
        });
        // The image is complete once the lab has ended; an error of that end matters only if the
        // guest succeeded.
        let ended = host.shutdown();
        let seen = ran?;
        ended?;
        disk.check(scratch.path())?;
        Ok(Ran::Passed(seen))
    }

    fn boot(&self, host: &Host, disk: &Disk) -> Result<String> {
        let mut guest = Guest::new(self.mode, "");
        guest.disks = vec![disk.option(host)?];
        (guest.cpus, guest.is_strict) = (self.cpus, self.is_strict);
        (guest.memory, guest.idle, guest.limit) = (MEMORY, "adaptive", BOOT);
        guest.flags = ["--stop-timeout", STOP].map(str::to_owned).into();
        let mut jobs = String::from("state");
        match self.jobs {
            Jobs::Nothing => {}
            Jobs::Fio(mib) => jobs.push_str(&format!(",fio:{mib}")),
            Jobs::Reboots => {
                jobs.push_str(&format!(",reboot:{REBOOTS}"));
                guest.restarts = true;
                guest.limit = BOOT * (REBOOTS + 1);
            }
        }
        guest.system = Some(System {
            kernel: host.path("debian-vmlinuz"),
            initrd: host.path("debian-initrd"),
            options: format!("root=LABEL=debian ro quiet exitless.job={jobs}"),
        });
        let mut running = guest.spawn(host)?;
        // If it has ended, `check` returns the reason.
        if running.wait_for_line(DONE).is_ok() {
            running.terminate()?;
        }
        let outcome = running.wait()?;
        outcome.check()?;
        self.seen(&outcome)
    }

    /// Returns the state that the root reports, if its output is as expected.
    fn seen(&self, outcome: &Outcome) -> Result<String> {
        let said = |text: &str| {
            let found = outcome
                .line(text)
                .map(|line| line[line.find(text).unwrap_or(0)..].trim());
            found.with_context(|| format!("it did not say {text:?}\n{}", outcome.tail()))
        };
        let state = said("state running")?;
        said(Guest::policy(self.is_strict))?;
        said("reboot: Power down")?;
        let state = match self.mode {
            Mode::Virtio => {
                let maps = outcome.ledger["whole"]["paravirtual"]["maps"].as_u64();
                ensure!(maps > Some(0), "nothing was mapped: {maps:?}");
                format!("{state}; {}", said("root on 0000:00:02.0, IOMMU group ")?)
            }
            _ => state.to_owned(),
        };
        let more = match self.jobs {
            Jobs::Nothing => String::new(),
            Jobs::Fio(_) => {
                said("err= 0")?;
                format!("; {}; {}", said("fio read: ")?, said("fio write: ")?)
            }
            Jobs::Reboots => {
                let last = format!("boot {}: {REBOOTS} files verified", REBOOTS + 1);
                format!("; {}", said(&last)?)
            }
        };
        Ok(format!("{state}{more}"))
    }
}

/// A copy of the root's disk.
struct Disk {
    image: Image,
    /// The copy.
    file: PathBuf,
    /// File that a lab attaches: a raw image as it is, a qcow2 image on a disk with room for it to
    /// grow.
    attached: PathBuf,
}

/// Name of the qcow2 image on that disk, and the disk's mount point.
const QCOW2: &str = "root.qcow2";
const MOUNTED: &str = "/mnt";
/// Size of that disk.
const STORE: &str = "4G";

impl Disk {
    fn copy(image: Image, debian: &Debian, scratch: &Path) -> Result<Self> {
        if image == Image::Raw {
            let file = scratch.join("root.img");
            tool(
                "cp",
                &["--sparse=always", text(&debian.raw())?, text(&file)?],
            )?;
            return Ok(Self {
                image,
                attached: file.clone(),
                file,
            });
        }
        let (below, attached) = (scratch.join("below"), scratch.join("store.img"));
        std::fs::create_dir(&below).context("making a directory for the copy of the root")?;
        let file = below.join(QCOW2);
        tool(
            "cp",
            &["--sparse=always", text(&debian.qcow2())?, text(&file)?],
        )?;
        if Host::is_lab() {
            tool(
                "mke2fs",
                &[
                    "-q",
                    "-t",
                    "ext4",
                    "-d",
                    text(&below)?,
                    text(&attached)?,
                    STORE,
                ],
            )?;
        }
        Ok(Self {
            image,
            file,
            attached,
        })
    }

    /// Returns the value of `--disk`, after it has made the image accessible to `run`.
    fn option(&self, host: &Host) -> Result<String> {
        let is_lab = matches!(host, Host::Lab(_));
        Ok(match self.image {
            Image::Raw if is_lab => "path=/dev/vda".into(),
            Image::Raw => format!("path={}", text(&self.file)?),
            Image::Qcow2 if is_lab => {
                host.script(&format!(
                    "mkdir -p {MOUNTED} && mount -t ext4 /dev/vda {MOUNTED}"
                ))?;
                format!("path={MOUNTED}/{QCOW2},format=qcow2")
            }
            Image::Qcow2 => format!("path={},format=qcow2", text(&self.file)?),
        })
    }

    /// Checks that the file system is clean, and the image whole, once host and guest have ended.
    fn check(&self, scratch: &Path) -> Result<()> {
        if self.image == Image::Raw {
            return tool("e2fsck", &["-f", "-n", text(&self.file)?]).map(drop);
        }
        let raw = scratch.join("raw.img");
        if self.attached.exists() {
            let dump = format!("dump /{QCOW2} {}", text(&self.file)?);
            tool("debugfs", &["-R", &dump, text(&self.attached)?])?;
        }
        tool("qemu-img", &["check", text(&self.file)?])?;
        tool(
            "qemu-img",
            &["convert", "-O", "raw", text(&self.file)?, text(&raw)?],
        )?;
        tool("e2fsck", &["-f", "-n", text(&raw)?]).map(drop)
    }
}

/// Returns the root, from the cache or newly made.
///
/// # Errors
/// Of [`Debian::get`].
pub fn root() -> std::result::Result<Debian, LabError> {
    Debian::get(&|line| println!("{line}"))
}

/// Returns each case once.
pub fn quick() -> Vec<DebianCase> {
    use Image::{Qcow2, Raw};
    let mut cases = vec![DebianCase::new(Raw, false, Jobs::Reboots)];
    for image in [Raw, Qcow2] {
        cases
            .extend([true, false].map(|strict| DebianCase::new(image, strict, Jobs::Fio(FIO_MIB))));
    }
    cases.extend(Mode::VTD.map(|mode| DebianCase::newer(mode, 1)));
    cases.push(DebianCase::paravirtual());
    cases
}

/// Returns the same, and each register mode of the newer kernel twice more.
pub fn soak() -> Vec<DebianCase> {
    let mut cases = quick();
    cases.extend(
        [2, 3]
            .into_iter()
            .flat_map(|round| Mode::VTD.map(|mode| DebianCase::newer(mode, round))),
    );
    cases
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_journal_tells_the_cases_apart() {
        let cases = soak();
        let names: HashSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names.len(), cases.len());
        assert!(
            quick()
                .iter()
                .all(|case| names.contains(case.name.as_str()))
        );
    }

    fn outcome(console: &str) -> Outcome {
        Outcome {
            exit: 0,
            script: Some(0),
            console: console.into(),
            log: String::new(),
            ledger: serde_json::Value::Null,
        }
    }

    #[test]
    fn a_disk_behind_a_virtio_iommu_is_shown_by_guest_and_host() {
        let console = "exitless-guest: state running, up 61.20 s, 6.12.95-amd64, 2 CPU\r\n\
                       exitless-guest: DMA domain TLB invalidation policy: lazy mode\r\n\
                       exitless-guest: fio verified: (groupid=0, jobs=1): err= 0: pid=400\r\n\
                       exitless-guest: fio read: IOPS=9\r\nexitless-guest: fio write: IOPS=8\r\n";
        let down = "[   99.0] reboot: Power down\r\n";
        let group = "exitless-guest: root on 0000:00:02.0, IOMMU group 1\r\n";
        let seen = |console: &str, maps: u64| {
            let mut outcome = outcome(console);
            outcome.ledger = serde_json::json!({ "whole": { "paravirtual": { "maps": maps } } });
            DebianCase::paravirtual().seen(&outcome)
        };
        assert!(seen(&[console, group, down].concat(), 7).is_ok());
        assert!(seen(&[console, group, down].concat(), 0).is_err());
        assert!(seen(&[console, down].concat(), 7).is_err());
    }

    #[test]
    fn case_fails_without_its_jobs_output() {
        let booted = "debian login: exitless-guest: state running, up 61.20 s, 6.1.0-56-amd64, 2 \
             CPU\r\n\
                      exitless-guest: DMA domain TLB invalidation policy: lazy mode\r\n";
        let verified = "exitless-guest: fio verified: (groupid=0, jobs=1): err= 0: pid=400\r\n\
                        exitless-guest: fio read: IOPS=9\r\nexitless-guest: fio write: IOPS=8\r\n";
        let down = "[   99.0] reboot: Power down\r\n";
        let case = |jobs| DebianCase::new(Image::Raw, false, jobs);
        let seen = |jobs, said: &[&str]| case(jobs).seen(&outcome(&said.concat())).ok();
        let state = "state running, up 61.20 s, 6.1.0-56-amd64, 2 CPU";
        assert_eq!(seen(Jobs::Nothing, &[booted, down]).as_deref(), Some(state));
        assert_eq!(seen(Jobs::Nothing, &[booted]), None, "it was cut off");
        assert_eq!(
            seen(Jobs::Fio(FIO_MIB), &[booted, verified, down]),
            Some(format!("{state}; fio read: IOPS=9; fio write: IOPS=8"))
        );
        assert_eq!(seen(Jobs::Fio(FIO_MIB), &[booted, down]), None);
        let errors = verified.replace("err= 0", "err=84");
        assert_eq!(seen(Jobs::Fio(FIO_MIB), &[booted, &errors, down]), None);
        let strict = DebianCase::new(Image::Raw, true, Jobs::Nothing);
        assert!(strict.seen(&outcome(&[booted, down].concat())).is_err());
        let boots = |count: u32| {
            format!(
                "exitless-guest: boot {}: {count} files verified\r\n",
                count + 1
            )
        };
        assert!(seen(Jobs::Reboots, &[booted, &boots(5), down]).is_some());
        assert_eq!(seen(Jobs::Reboots, &[booted, &boots(4), down]), None);
    }
}
