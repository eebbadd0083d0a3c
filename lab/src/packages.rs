//! Gets what the lab is made of from Debian packages, without installing them and without root.
//!
//! `apt-get` works on an own state, list and cache directory under the lab's cache
//! (`target/lab/apt`), reads the machine's list of installed packages only to know what QEMU's
//! libraries lack, downloads, and `dpkg-deb -x` unpacks into `target/lab/root-…`. That directory
//! appears by one rename when it is complete, so its existence is the stamp: the second start costs
//! nothing, and of two concurrent first starts one wins and the other throws its copy away.
//!
//! A `qemu-system-x86_64` on `PATH` is used if it is not too old. Left out: other families of
//! distributions; refreshing the packages (delete `target/lab` for that).

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{LabError, kernel};

/// Oldest QEMU whose emulated SVM with nested paging is known to run a Linux guest.
const QEMU_MIN: (u32, u32) = (7, 2);

/// Raise it when the content of the unpacked tree changes.
const LAYOUT: u32 = 1;

/// The unpacked packages.
#[derive(Debug, Clone)]
pub struct Packages {
    root: PathBuf,
    qemu: Qemu,
    kernel_release: String,
}

/// Which QEMU to start, and how.
#[derive(Debug, Clone)]
enum Qemu {
    /// The machine's own, by `PATH`.
    Installed(PathBuf),
    /// The unpacked one, with its libraries.
    Unpacked,
}

impl Packages {
    /// Finds or fetches everything; `notice` hears one line before anything slow.
    ///
    /// # Errors
    /// [`LabError::Package`] names the package, the failure and what to do.
    pub fn get(notice: &dyn Fn(&str)) -> Result<Self, LabError> {
        let cache = cache_dir();
        let installed = installed_qemu();
        let (name, qemu) = match &installed {
            Some(path) => ("kernel", Qemu::Installed(path.clone())),
            None => ("qemu+kernel", Qemu::Unpacked),
        };
        let root = cache.join(format!("root-{LAYOUT}-{name}"));
        if !root.is_dir() {
            notice(
                "fetching QEMU, the kernel and busybox from Debian packages (once, about 60 MB)",
            );
            fetch(&cache, &root, installed.is_none())?;
        }
        let kernel_release = kernel_release(&root)?;
        Ok(Self {
            root,
            qemu,
            kernel_release,
        })
    }

    /// The kernel's release, for example `6.1.0-56-cloud-amd64`.
    #[must_use]
    pub fn kernel_release(&self) -> &str {
        &self.kernel_release
    }

    /// The compressed kernel (bzImage) of the package.
    #[must_use]
    pub fn vmlinuz(&self) -> PathBuf {
        self.root
            .join("boot")
            .join(format!("vmlinuz-{}", self.kernel_release))
    }

    /// The same kernel unpacked from it (ELF, with the PVH entry note).
    #[must_use]
    pub fn vmlinux(&self) -> PathBuf {
        self.root
            .join("boot")
            .join(format!("vmlinux-{}", self.kernel_release))
    }

    /// The directory of the kernel's modules.
    #[must_use]
    pub fn modules(&self) -> PathBuf {
        self.root.join("lib/modules").join(&self.kernel_release)
    }

    /// The static busybox.
    #[must_use]
    pub fn busybox(&self) -> PathBuf {
        self.root.join("bin/busybox")
    }

    /// A command that starts QEMU with its libraries and firmware found.
    #[must_use]
    pub fn qemu(&self) -> (PathBuf, Vec<OsString>, Vec<(&'static str, OsString)>) {
        let Qemu::Unpacked = self.qemu else {
            let Qemu::Installed(path) = &self.qemu else {
                unreachable!("two kinds of QEMU")
            };
            return (path.clone(), Vec::new(), Vec::new());
        };
        let lib_dirs =
            ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|d| self.root.join(d));
        let library_path = env::join_paths(&lib_dirs).unwrap_or_default();
        let program = self.root.join("usr/bin/qemu-system-x86_64");
        let firmware = ["usr/share/seabios", "usr/share/qemu"]
            .into_iter()
            .flat_map(|dir| [OsString::from("-L"), self.root.join(dir).into_os_string()]);
        // QEMU looks beside its own program, where they are not if the host has them installed already.
        let own = lib_dirs[0].join("qemu");
        let modules = if own.join("accel-tcg-x86_64.so").exists() {
            own
        } else {
            "/usr/lib/x86_64-linux-gnu/qemu".into()
        };
        let environment = vec![
            ("LD_LIBRARY_PATH", library_path.clone()),
            ("QEMU_MODULE_DIR", modules.into_os_string()),
        ];
        // A newer C library among the packages needs its own loader.
        let loader = lib_dirs[1].join("ld-linux-x86-64.so.2");
        if loader.exists() {
            let mut args = vec![
                "--library-path".into(),
                library_path,
                program.into_os_string(),
            ];
            args.extend(firmware);
            return (loader, args, environment);
        }
        (program, firmware.collect(), environment)
    }
}

/// Where the lab keeps packages, built guest programs and images: `EXITLESS_LAB_DIR`, else
/// `target/lab` of the source tree this was built from.
#[must_use]
pub fn cache_dir() -> PathBuf {
    env::var_os("EXITLESS_LAB_DIR")
        .map_or_else(|| workspace_dir().join("target/lab"), PathBuf::from)
}

/// A name that no other scratch file of this machine has: process and count.
pub(crate) fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{}-{number}", std::process::id())
}

/// The source tree this was built from.
pub(crate) fn workspace_dir() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

/// The machine's QEMU, if its version is high enough.
fn installed_qemu() -> Option<PathBuf> {
    let path = find_program("qemu-system-x86_64")?;
    let out = Command::new(&path)
        .arg("--version")
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let version = parse_qemu_version(&String::from_utf8_lossy(&out.stdout))?;
    (version >= QEMU_MIN).then_some(path)
}

/// The file a shell would start for `name`.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// `QEMU emulator version 7.2.22 (Debian …)` → (7, 2).
fn parse_qemu_version(text: &str) -> Option<(u32, u32)> {
    let rest = text.split("version ").nth(1)?;
    let mut parts = rest.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn kernel_release(root: &Path) -> Result<String, LabError> {
    let boot = root.join("boot");
    let entries = fs::read_dir(&boot).map_err(LabError::host("read", &boot))?;
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let releases = names.filter_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned));
    releases.max().ok_or_else(|| LabError::Package {
        what: "a kernel".into(),
        reason: format!("no vmlinuz in {}", boot.display()),
        hint: format!("delete {} and start again", root.display()),
    })
}

/// Downloads and unpacks into a scratch directory, then renames it to `root`.
fn fetch(cache: &Path, root: &Path, with_qemu: bool) -> Result<(), LabError> {
    for tool in ["apt-get", "apt-cache", "dpkg-deb", "xz"] {
        if find_program(tool).is_none() {
            return Err(LabError::Package {
                what: "QEMU and a kernel".into(),
                reason: format!("this machine has no `{tool}`"),
                hint:
                    "the lab needs Debian or a derivative (with xz-utils); on other systems use a \
                       host with hardware virtualization"
                        .into(),
            });
        }
    }
    let scratch = cache.join(format!("fetch-{}", unique()));
    let outcome = fetch_into(&scratch, with_qemu).and_then(|unpacked| {
        match fs::rename(&unpacked, root) {
            // Another start finished first: its tree serves.
            Err(_) if root.is_dir() => Ok(()),
            other => other.map_err(LabError::host("rename to", root)),
        }
    });
    // Best effort: what remains is only wasted space.
    let _ = fs::remove_dir_all(&scratch);
    outcome
}

fn fetch_into(scratch: &Path, with_qemu: bool) -> Result<PathBuf, LabError> {
    let debs = scratch.join("cache/archives");
    for dir in [
        &debs.join("partial"),
        &scratch.join("lists/partial"),
        &scratch.join("state"),
    ] {
        fs::create_dir_all(dir).map_err(LabError::host("create", dir))?;
    }
    let apt = Apt { scratch };
    // `update` reports unreachable sources that may not matter; what matters fails below.
    let update = match apt.run("apt-get", &["update"], "the package lists") {
        Err(LabError::Package { reason, .. }) => format!(" (before that, update: {reason})"),
        _ => String::new(),
    };
    let explain = |error: LabError| match error {
        LabError::Package { what, reason, hint } => LabError::Package {
            what,
            reason: format!("{reason}{update}"),
            hint,
        },
        other => other,
    };
    let meta = "linux-image-cloud-amd64";
    let shown = apt
        .run("apt-cache", &["depends", meta], meta)
        .map_err(explain)?;
    let image = parse_kernel_package(&shown).ok_or_else(|| {
        explain(LabError::Package {
            what: meta.into(),
            reason: "this distribution has no such package".into(),
            hint: HINT.into(),
        })
    })?;
    let download = ["download", image.as_str(), "busybox-static"];
    apt.run_in(&debs, "apt-get", &download, "the kernel and busybox")
        .map_err(explain)?;
    if with_qemu {
        let install = [
            "install",
            "--download-only",
            "--no-install-recommends",
            "-y",
            "qemu-system-x86",
            "seabios",
        ];
        apt.run("apt-get", &install, "QEMU").map_err(explain)?;
    }
    let unpacked = scratch.join("root");
    let entries = fs::read_dir(&debs).map_err(LabError::host("read", &debs))?;
    for deb in entries.flatten().map(|entry| entry.path()) {
        if deb.extension().is_some_and(|extension| extension == "deb") {
            let mut command = Command::new("dpkg-deb");
            command.arg("-x").arg(&deb).arg(&unpacked);
            run_tool(&mut command, &deb.display().to_string())?;
        }
    }
    let release = kernel_release(&unpacked)?;
    let vmlinuz = unpacked.join(format!("boot/vmlinuz-{release}"));
    let image = fs::read(&vmlinuz).map_err(LabError::host("read", &vmlinuz))?;
    let vmlinux = unpacked.join(format!("boot/vmlinux-{release}"));
    fs::write(&vmlinux, kernel::extract_vmlinux(&image)?)
        .map_err(LabError::host("write", &vmlinux))?;
    Ok(unpacked)
}

const HINT: &str =
    "check the network and /etc/apt/sources.list, or install the package and try again";

/// `apt-get` and `apt-cache` on directories of their own.
struct Apt<'a> {
    scratch: &'a Path,
}

impl Apt<'_> {
    fn run(&self, program: &str, args: &[&str], what: &str) -> Result<String, LabError> {
        self.run_in(self.scratch, program, args, what)
    }

    fn run_in(
        &self,
        cwd: &Path,
        program: &str,
        args: &[&str],
        what: &str,
    ) -> Result<String, LabError> {
        let mut command = Command::new(program);
        command
            .current_dir(cwd)
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive");
        for (option, dir) in [
            ("Dir::State", "state"),
            ("Dir::State::Lists", "lists"),
            ("Dir::Cache", "cache"),
        ] {
            command
                .arg("-o")
                .arg(format!("{option}={}", self.scratch.join(dir).display()));
        }
        command.args(["-o", "Dir::State::status=/var/lib/dpkg/status"]);
        // Other apt processes are not our concern, and root need not become the user `_apt`.
        command.args(["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root"]);
        command.args(args);
        run_tool(&mut command, what)
    }
}

/// Runs a tool to its end; its output, or its last words in the error.
fn run_tool(command: &mut Command, what: &str) -> Result<String, LabError> {
    let failed = |reason: String| LabError::Package {
        what: what.into(),
        reason,
        hint: HINT.into(),
    };
    let out = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e: io::Error| failed(format!("{}: {e}", command.get_program().display())))?;
    if !out.status.success() {
        let words = String::from_utf8_lossy(&out.stderr);
        let last: Vec<_> = words
            .lines()
            .rev()
            .filter(|l| !l.trim().is_empty())
            .take(2)
            .collect();
        return Err(failed(
            last.into_iter().rev().collect::<Vec<_>>().join("; "),
        ));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// From `apt-cache depends linux-image-cloud-amd64`: the concrete kernel package.
fn parse_kernel_package(depends: &str) -> Option<String> {
    let packages = depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    packages
        .map(str::trim)
        .find(|p| p.starts_with("linux-image-"))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_versions_are_read_from_the_first_line() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright";
        assert_eq!(parse_qemu_version(debian), Some((7, 2)));
        assert_eq!(
            parse_qemu_version("QEMU emulator version 10.0.2"),
            Some((10, 0))
        );
        assert_eq!(parse_qemu_version("something else"), None);
        assert!((5, 2) < QEMU_MIN && (10, 0) >= QEMU_MIN);
    }

    #[test]
    fn the_meta_package_names_the_kernel() {
        let text = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n";
        assert_eq!(
            parse_kernel_package(text).as_deref(),
            Some("linux-image-6.1.0-56-cloud-amd64")
        );
        assert_eq!(parse_kernel_package("linux-image-cloud-amd64\n"), None);
    }
}
