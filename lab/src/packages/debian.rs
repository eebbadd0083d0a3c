//! A stock Debian that boots as a distribution does: systemd, udev, the generic kernel with its own
//! initrd, a root on a disk.
//!
//! It is of the machine's own release, made by `mmdebstrap` from the machine's own APT sources,
//! only those for the release and its updates. If the release's backports have a kernel of
//! [`NEWER`], that is installed beside the release's own. It differs from an installed root by a
//! unit that does the jobs named on the kernel's command line (`job.sh`), a disk without partitions
//! or a boot loader, and no user that can log in.
//!
//! Like the other parts it is a directory of [`cache_dir`], `debian-RELEASE-HASH`, made once and
//! complete if it exists. The hash is of the scripts that make it and of their inputs, so that a
//! changed script makes another; packages are those of the day (delete the directory to have it
//! made again). Guests get copies of its images.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::{Apt, Progress, run_tool};
use super::cache::{check_room, full_or, unique};
use super::{Version, cache_dir, find_program, names, sources};
use crate::LabError;

const ROOT: &str = include_str!("debian/root.sh");
const JOB: &str = include_str!("debian/job.sh");
const SERVICE: &str = include_str!("debian/job.service");

/// Packages of the root in addition to those that Debian marks as important.
const PACKAGES: &str = "systemd,systemd-sysv,udev,dbus,libpam-systemd,linux-image-amd64,e2fsprogs,util-linux,iproute2,fio,zstd";
/// Package of the kernel that follows releases.
const KERNEL: &str = "linux-image-amd64";
/// Series of the second kernel.
pub const NEWER: Version = Version::new(6, 12);
/// Size of the image; unwritten parts take no space.
const IMAGE_MIB: u32 = 2048;
/// Space needed while it is made: the root, an archive of it, and two images.
const ROOM: u64 = 5 << 30;

const WHAT: &str = "a Debian root";

/// Programs that make it, in addition to those of any Debian.
const TOOLS: [&str; 4] = ["mmdebstrap", "fakeroot", "mke2fs", "qemu-img"];

/// A Debian, ready to be copied and booted.
#[derive(Debug, Clone)]
pub struct Debian {
    dir: PathBuf,
    /// Releases of its kernels, sorted.
    kernels: Vec<String>,
}

/// A kernel of the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DebianKernel {
    /// The compressed kernel (bzImage).
    pub vmlinuz: PathBuf,
    /// The initrd that Debian's own tools made for it.
    pub initrd: PathBuf,
    /// Its release.
    pub release: String,
}

impl Debian {
    /// Finds or makes it; `notice` receives a line before and during any slow step.
    ///
    /// # Errors
    /// [`LabError::Package`] with the missing package or the failure, and advice;
    /// [`LabError::Full`] for a disk without space.
    pub fn get(notice: &dyn Fn(&str)) -> Result<Self, LabError> {
        let cache = cache_dir();
        let machine = sources::of_machine(Path::new("/etc/apt"));
        let release = sources::release(&machine).ok_or_else(|| LabError::Package {
            what: WHAT.into(),
            reason: "the machine's APT sources name no release of Debian".into(),
            hint: "it is made of the machine's own release, on Debian alone".into(),
        })?;
        let dir = cache.join(format!("debian-{release}-{:016x}", hash()));
        if let Some(found) = Self::at(dir.clone()) {
            return Ok(found);
        }
        check_tools()?;
        let apt = Apt::open(&cache, notice)?;
        // Another process may have made it while this one waited for the lock.
        if let Some(found) = Self::at(dir.clone()) {
            return Ok(found);
        }
        remove_unfinished(&cache);
        check_room(&cache, ROOM)?;
        make(&apt, &machine, release, &dir, notice)?;
        Self::at(dir.clone()).ok_or_else(|| LabError::Package {
            what: WHAT.into(),
            reason: format!("{} is damaged", dir.display()),
            hint: "delete it and start again".into(),
        })
    }

    fn at(dir: PathBuf) -> Option<Self> {
        let kernels: Vec<String> = names(&dir)
            .into_iter()
            .filter_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned))
            .collect();
        (!kernels.is_empty()).then_some(Self { dir, kernels })
    }

    /// Returns its disk: ext4 without partitions, labelled `debian`.
    #[must_use]
    pub fn raw(&self) -> PathBuf {
        self.dir.join("root.img")
    }

    /// Returns the same disk as a qcow2 image.
    #[must_use]
    pub fn qcow2(&self) -> PathBuf {
        self.dir.join("root.qcow2")
    }

    /// Returns the release's own kernel, or the one of this series; `None` if there is none.
    #[must_use]
    pub fn kernel(&self, series: Option<Version>) -> Option<DebianKernel> {
        let is_it = |release: &&String| match series {
            Some(series) => series.is_series_of(release),
            // If there are two, the one from backports is newer.
            None => self.kernels.len() == 1 || !NEWER.is_series_of(release),
        };
        let release = self.kernels.iter().find(is_it)?;
        Some(DebianKernel {
            vmlinuz: self.dir.join(format!("vmlinuz-{release}")),
            initrd: self.dir.join(format!("initrd.img-{release}")),
            release: release.clone(),
        })
    }
}

/// Returns whether a folder of the cache is a root of other scripts than these.
pub(crate) fn is_old(name: &str) -> bool {
    let hash = name
        .strip_prefix("debian-")
        .and_then(|name| name.rsplit_once('-'));
    hash.is_some_and(|(_, it)| it.len() == 16 && it != format!("{:016x}", self::hash()))
}

/// Returns a hash of all inputs of the root.
fn hash() -> u64 {
    let mut hash = DefaultHasher::new();
    (ROOT, JOB, SERVICE, PACKAGES, IMAGE_MIB).hash(&mut hash);
    hash.finish()
}

fn check_tools() -> Result<(), LabError> {
    // mke2fs may not be on a user's PATH; the script looks in these directories too.
    let is_there = |tool: &str| {
        let aside = ["/usr/sbin", "/sbin"].map(|dir| Path::new(dir).join(tool));
        find_program(tool).is_some() || aside.iter().any(|path| path.is_file())
    };
    let missing: Vec<&str> = TOOLS.into_iter().filter(|tool| !is_there(tool)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(LabError::Package {
        what: WHAT.into(),
        reason: format!("this machine has no `{}`", missing.join("`, `")),
        hint: "`scripts/setup.sh debian` installs what is needed".into(),
    })
}

/// Removes leftovers of a killed process: under APT's lock no other process makes a root. A
/// directory that cannot be removed only wastes space.
fn remove_unfinished(cache: &Path) {
    let is_unfinished = |name: &String| name.starts_with("debian-") && name.contains('.');
    for name in names(cache).iter().filter(|name| is_unfinished(name)) {
        let _ = fs::remove_dir_all(cache.join(name));
    }
}

/// Makes it in a directory that is then renamed to `to`. The caller holds APT's lock.
fn make(
    apt: &Apt<'_>,
    machine: &[sources::Source],
    release: &str,
    to: &Path,
    notice: &dyn Fn(&str),
) -> Result<(), LabError> {
    notice(&format!(
        "making {WHAT} of {release} (once, some minutes) in {}",
        to.display()
    ));
    let mut wanted = sources::of_release(machine, release);
    let backports = sources::later(machine).into_iter().next();
    let newer = match backports {
        Some((suite, sources)) if apt.has(&sources, &suite, KERNEL, NEWER)? => {
            wanted.extend(sources);
            suite
        }
        _ => {
            notice(&format!(
                "{release} has no backport of Linux {NEWER}: there is its own kernel alone"
            ));
            "-".into()
        }
    };
    let scratch = to.with_extension(unique());
    let made = run(&scratch, &wanted, [release, &newer])
        .and_then(|()| fs::rename(&scratch, to).map_err(LabError::host("rename to", to)))
        // The free space must be read before the directory is removed.
        .map_err(|error| full_or(&cache_dir(), error));
    if made.is_err() {
        // Best effort: leftovers only waste space.
        let _ = fs::remove_dir_all(&scratch);
    }
    made
}

fn run(dir: &Path, wanted: &[sources::Source], suites: [&str; 2]) -> Result<(), LabError> {
    let list = dir.join("sources");
    fs::create_dir_all(&list).map_err(LabError::host("create", &list))?;
    for source in wanted {
        source.put(&list).map_err(LabError::host("write", &list))?;
    }
    for (name, text) in [("root.sh", ROOT), ("job.sh", JOB), ("job.service", SERVICE)] {
        let path = dir.join(name);
        fs::write(&path, text).map_err(LabError::host("write", &path))?;
    }
    let mut command = Command::new("sh");
    command.current_dir(dir).arg("root.sh").args(suites);
    command.arg(IMAGE_MIB.to_string()).arg(PACKAGES);
    run_tool(&mut command, WHAT, &mut Progress::new(WHAT, &|_| ())).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_kernels(releases: &[&str]) -> Debian {
        Debian {
            dir: "/d".into(),
            kernels: releases.iter().map(|&release| release.into()).collect(),
        }
    }

    #[test]
    fn a_kernel_is_the_releases_own_unless_a_series_is_named() {
        let two = with_kernels(&["6.1.0-56-amd64", "6.12.95+deb12-amd64"]);
        let release = |debian: &Debian, series| debian.kernel(series).map(|kernel| kernel.release);
        assert_eq!(release(&two, None).as_deref(), Some("6.1.0-56-amd64"));
        let newer = two.kernel(Some(NEWER)).expect("it is there");
        assert_eq!(newer.initrd, Path::new("/d/initrd.img-6.12.95+deb12-amd64"));
        // A release whose own kernel is of that series.
        let one = with_kernels(&["6.12.48+deb13-amd64"]);
        assert_eq!(release(&one, None), release(&one, Some(NEWER)));
        let older = with_kernels(&["6.1.0-56-amd64"]);
        assert_eq!(release(&older, Some(NEWER)), None);
    }

    #[test]
    fn a_directory_that_is_not_complete_is_none() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(Debian::at(dir.path().join("nowhere")).is_none());
        assert!(Debian::at(dir.path().into()).is_none());
        fs::write(dir.path().join("vmlinuz-6.1.0-56-amd64"), "").expect("a file");
        assert!(Debian::at(dir.path().into()).is_some());
    }

    #[test]
    fn only_what_was_not_finished_is_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let made = ["debian-bookworm-00ff", "debian-run-Ab1", "qemu-10.0"];
        for name in made.iter().chain(&["debian-bookworm-00ff.77-0"]) {
            fs::create_dir_all(dir.path().join(name).join("root")).expect("a directory");
        }
        remove_unfinished(dir.path());
        assert_eq!(names(dir.path()), made);
    }

    #[test]
    fn the_scripts_are_scripts() {
        for script in [ROOT, JOB] {
            let checked = Command::new("sh").args(["-n", "-c", script]).output();
            let checked = checked.expect("sh starts");
            assert!(
                checked.status.success(),
                "{}",
                String::from_utf8_lossy(&checked.stderr)
            );
        }
    }

    #[test]
    fn a_root_of_other_scripts_is_old() {
        assert!(!is_old(&format!("debian-bookworm-{:016x}", hash())));
        assert!(is_old("debian-bookworm-0123456789abcdef"));
        for other in [
            "debian-bookworm",
            "debian-0123",
            "linux-own",
            "programs-0123456789abcdef",
        ] {
            assert!(!is_old(other), "{other}");
        }
    }
}
