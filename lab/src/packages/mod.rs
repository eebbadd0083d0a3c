//! Fetches the parts of the lab as Debian packages, without installing them and without root.
//!
//! [`Needs`] lists the requirements: the oldest version of QEMU, a kernel for the host, a kernel
//! for the guest. Each part has a directory of its own in [`cache_dir`]: `qemu-VERSION`,
//! `linux-own` (the distribution's kernel) or `linux-SERIES`, `busybox`. A directory is renamed to
//! its final name when it is complete; if it exists, the part is complete and is not fetched again.
//! A new part does not change the others.
//!
//! Missing parts are fetched from the machine's own APT sources; if the versions there are too old,
//! from later suites of the same mirror (`sources`). `apt` fetches them with package lists and
//! archives of its own: the machine's package database is read, but not changed.
//!
//! Parts on request are a whole root file system ([`Debian`]), made by `mmdebstrap`, and the
//! headers of a kernel, against which a module is built (`headers`).
//!
//! A `qemu-system-x86_64` on `PATH` is used if it is new enough. Not supported: distributions other
//! than Debian and its derivatives; updates of fetched packages (delete the directory instead).

mod apt;
mod cache;
mod debian;
mod headers;
mod mend;
mod needs;
mod sources;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{LabError, kernel};
use apt::{Apt, Wanted};
pub use cache::cache_dir;
pub(crate) use cache::{full_or, unique, workspace_dir};
pub(crate) use debian::is_old as is_old_debian;
pub use debian::{Debian, DebianKernel, NEWER};
pub(crate) use headers::{Headers, is_old as is_old_headers};
use mend::Mended;
pub use needs::{Needs, Version};

/// Path of QEMU below its directory.
const QEMU_PROGRAM: &str = "usr/bin/qemu-system-x86_64";

/// Name of the file with the result of the check of QEMU's program, in its directory.
const STAMP: &str = "interrupts-delivered-once";
/// Content of that file if the program delivers interrupts once.
const MENDED: &str = "yes\n";

/// The fetched parts of the lab.
#[derive(Debug, Clone)]
pub struct Packages {
    qemu: Qemu,
    host: Kernel,
    guest: Kernel,
    busybox: PathBuf,
}

/// The QEMU to start, which determines how to start it.
#[derive(Debug, Clone)]
enum Qemu {
    /// The machine's own QEMU, from `PATH`.
    Installed(PathBuf, Version),
    /// A QEMU unpacked in the cache, with its libraries.
    Unpacked(PathBuf, Version),
}

/// A kernel unpacked in the cache.
#[derive(Debug, Clone)]
pub struct Kernel {
    root: PathBuf,
    release: String,
}

/// A kernel's release and the version of its package.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct KernelBuild {
    /// `6.1.0-56-cloud-amd64`.
    pub(crate) release: String,
    /// `6.1.192-2`.
    pub(crate) version: String,
}

impl Kernel {
    /// Returns the kernel's release, for example `6.1.0-56-cloud-amd64`.
    #[must_use]
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Returns the compressed kernel (bzImage) of the package.
    #[must_use]
    pub fn vmlinuz(&self) -> PathBuf {
        self.root.join(format!("boot/vmlinuz-{}", self.release))
    }

    /// Returns the uncompressed kernel (ELF, with the PVH entry note).
    #[must_use]
    pub fn vmlinux(&self) -> PathBuf {
        self.root.join(format!("boot/vmlinux-{}", self.release))
    }

    /// Returns the directory of its modules.
    #[must_use]
    pub fn modules(&self) -> PathBuf {
        self.root.join("lib/modules").join(&self.release)
    }

    /// Returns its build.
    ///
    /// # Errors
    /// [`LabError::Package`] if the kernel's image does not name the package's version, so that no
    /// matching headers can be found.
    pub(crate) fn build(&self) -> Result<KernelBuild, LabError> {
        let version = kernel::package_version(&self.vmlinuz())?;
        let version = version.ok_or_else(|| LabError::Package {
            what: format!("the headers of Linux {}", self.release),
            reason: "the kernel does not say which version of a Debian package it is".into(),
            hint: "modules can be built for Debian's own kernels alone".into(),
        })?;
        Ok(KernelBuild {
            release: self.release.clone(),
            version,
        })
    }

    /// Returns the kernel unpacked at `root`, if there is one.
    fn at(root: PathBuf) -> Option<Self> {
        let entries = fs::read_dir(root.join("boot")).ok()?;
        let names = entries
            .flatten()
            .filter_map(|e| e.file_name().into_string().ok());
        let release = names
            .filter_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned))
            .max()?;
        Some(Self { root, release })
    }
}

impl Packages {
    /// Finds or fetches everything; `notice` receives a line before and during any slow step.
    ///
    /// # Errors
    /// [`LabError::Package`] with the package, the failure and advice; [`LabError::Full`] for a
    /// disk without space.
    pub fn get(needs: &Needs, notice: &dyn Fn(&str)) -> Result<Self, LabError> {
        let cache = cache_dir();
        if let Some(found) = find(&cache, needs) {
            return found.with_qemu_mended();
        }
        let apt = Apt::open(&cache, notice)?;
        // Another process may have fetched them while this one waited for the lock.
        let missing = missing(&cache, needs);
        if !missing.is_empty() {
            apt.fetch(&missing)?;
        }
        let found = find(&cache, needs).ok_or_else(|| LabError::Package {
            what: needs.to_string(),
            reason: format!("{} is damaged", cache.display()),
            hint: "delete it and start again".into(),
        });
        found?.with_qemu_mended()
    }

    /// Patches an unpacked QEMU so that it delivers each interrupt once, if the patch applies
    /// ([`mend`]). A stamp file records the result, so that this is done once.
    fn with_qemu_mended(self) -> Result<Self, LabError> {
        let Qemu::Unpacked(root, _) = &self.qemu else {
            return Ok(self);
        };
        let stamp = root.join(STAMP);
        if stamp.exists() {
            return Ok(self);
        }
        let said = match mend::mend(&root.join(QEMU_PROGRAM))? {
            Mended::Yes => MENDED,
            Mended::No => "not found: another build\n",
        };
        fs::write(&stamp, said).map_err(LabError::host("write", &stamp))?;
        Ok(self)
    }

    /// Returns whether QEMU is known to deliver an interrupt once.
    #[must_use]
    pub fn delivers_interrupts_once(&self) -> bool {
        match &self.qemu {
            Qemu::Installed(..) => false,
            Qemu::Unpacked(root, _) => {
                fs::read_to_string(root.join(STAMP)).is_ok_and(|said| said == MENDED)
            }
        }
    }

    /// Returns a warning about faults of this QEMU that a guest may notice, or `None`.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        warning(self.qemu_version(), self.delivers_interrupts_once())
    }

    /// Returns the kernel of the emulated host.
    #[must_use]
    pub fn host(&self) -> &Kernel {
        &self.host
    }

    /// Returns the kernel of guests.
    #[must_use]
    pub fn guest(&self) -> &Kernel {
        &self.guest
    }

    /// Returns the static busybox.
    #[must_use]
    pub fn busybox(&self) -> PathBuf {
        self.busybox.clone()
    }

    /// Returns the version of QEMU.
    #[must_use]
    pub fn qemu_version(&self) -> Version {
        let (Qemu::Installed(_, version) | Qemu::Unpacked(_, version)) = self.qemu;
        version
    }

    /// Returns a command that starts QEMU with its libraries and firmware.
    #[must_use]
    pub fn qemu(&self) -> (PathBuf, Vec<OsString>, Vec<(&'static str, OsString)>) {
        let root = match &self.qemu {
            Qemu::Installed(path, _) => return (path.clone(), Vec::new(), Vec::new()),
            Qemu::Unpacked(root, _) => root,
        };
        let lib_dirs = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|d| root.join(d));
        let library_path = env::join_paths(&lib_dirs).unwrap_or_default();
        let program = root.join(QEMU_PROGRAM);
        let firmware = ["usr/share/seabios", "usr/share/qemu"]
            .into_iter()
            .flat_map(|dir| [OsString::from("-L"), root.join(dir).into_os_string()]);
        // QEMU looks for modules beside its own program. They are not there if the host has these
        // packages installed already.
        let own = lib_dirs[0].join("qemu");
        let modules = if own.join("accel-tcg-x86_64.so").exists() {
            own
        } else {
            "/usr/lib/x86_64-linux-gnu/qemu".into()
        };
        let modules = ("QEMU_MODULE_DIR", modules.into_os_string());
        // A newer C library among the packages needs its own dynamic loader. If /lib is a link into
        // /usr, a package may use either path.
        let loader = lib_dirs
            .iter()
            .map(|dir| dir.join("ld-linux-x86-64.so.2"))
            .find(|path| path.exists());
        if let Some(loader) = loader {
            let mut args = vec![
                "--library-path".into(),
                library_path,
                program.into_os_string(),
            ];
            args.extend(firmware);
            // The library path is no environment variable here: programs that QEMU starts are the
            // machine's, with its C library.
            return (loader, args, vec![modules]);
        }
        let libraries = ("LD_LIBRARY_PATH", library_path);
        (program, firmware.collect(), vec![libraries, modules])
    }
}

/// Returns the effects that this QEMU may have on a guest, as a warning.
fn warning(version: Version, delivers_once: bool) -> Option<String> {
    if version < Needs::QEMU_SOUND {
        return Some(format!(
            "QEMU {version} can lose an interrupt when a guest is entered: a guest with several \
             vCPUs that stalls \
             or ends in a triple fault here may be the lab's fault (QEMU {} is better)",
            Needs::QEMU_SOUND
        ));
    }
    (!delivers_once).then(|| {
        format!(
            "QEMU {version} may deliver an interrupt twice: a guest with several vCPUs that ends \
             in a triple fault here may be \
             the lab's fault (one on PATH comes before the lab's own copy, which is mended; \
             lab/README.md)"
        )
    })
}

/// Returns the reasons why the parts can be neither found nor fetched into `cache`, as far as they
/// can be determined without an attempt.
pub(crate) fn obstacles(cache: &Path, needs: &Needs) -> Vec<String> {
    let mut found = Vec::new();
    let missing = missing(cache, needs);
    if !missing.is_empty() {
        let tool = apt::lacking_tool();
        found.extend(tool.map(|tool| format!("this machine has no {tool}")));
        let needed = missing.iter().map(|part| part.room()).sum();
        if let Err(full) = cache::check_room(cache, needed) {
            found.push(format!("{full}; {} MiB are wanted", needed >> 20));
        }
    }
    // Each start of the lab creates its images in the cache.
    found.extend(cache::not_writable(cache));
    found
}

/// Returns the directory of QEMU.
fn qemu_dir(cache: &Path, version: Version) -> PathBuf {
    cache.join(format!("qemu-{version}"))
}

fn kernel_dir(cache: &Path, series: Option<Version>) -> PathBuf {
    cache.join(match series {
        Some(series) => format!("linux-{series}"),
        None => "linux-own".into(),
    })
}

fn headers_dir(cache: &Path, build: &KernelBuild) -> PathBuf {
    cache.join(format!("headers-{}_{}", build.release, build.version))
}

/// Returns the directory of the architecture-specific half of a kernel's headers below `root`.
fn headers_build_dir(root: &Path, release: &str) -> PathBuf {
    root.join(format!("usr/src/linux-headers-{release}"))
}

fn busybox_dir(cache: &Path) -> PathBuf {
    cache.join("busybox")
}

/// Returns all parts, if all are present.
fn find(cache: &Path, needs: &Needs) -> Option<Packages> {
    let busybox = busybox_dir(cache).join("bin/busybox");
    Some(Packages {
        qemu: find_qemu(cache, needs.qemu)?,
        host: find_kernel(cache, needs.host_kernel)?,
        guest: find_kernel(cache, needs.guest_kernel)?,
        busybox: busybox.is_file().then_some(busybox)?,
    })
}

/// Returns the parts that must be fetched.
fn missing(cache: &Path, needs: &Needs) -> Vec<Wanted<'static>> {
    let mut wanted = Vec::new();
    if !busybox_dir(cache).is_dir() {
        wanted.push(Wanted::Busybox);
    }
    for series in [needs.host_kernel, needs.guest_kernel] {
        let kernel = Wanted::Kernel(series);
        if find_kernel(cache, series).is_none() && !wanted.contains(&kernel) {
            wanted.push(kernel);
        }
    }
    if find_qemu(cache, needs.qemu).is_none() {
        wanted.push(Wanted::Qemu(needs.qemu));
    }
    wanted
}

/// Returns the machine's own QEMU if it is new enough, else the oldest sufficient one in the cache:
/// a newer one, fetched for another test, then does not change the others.
fn find_qemu(cache: &Path, at_least: Version) -> Option<Qemu> {
    installed_qemu(at_least).or_else(|| {
        let versions = names(cache)
            .into_iter()
            .filter_map(|name| name.strip_prefix("qemu-")?.parse::<Version>().ok());
        let version = versions.filter(|version| *version >= at_least).min()?;
        Some(Qemu::Unpacked(qemu_dir(cache, version), version))
    })
}

/// Returns the distribution's kernel, or any of this series.
fn find_kernel(cache: &Path, series: Option<Version>) -> Option<Kernel> {
    let Some(series) = series else {
        return Kernel::at(kernel_dir(cache, None));
    };
    names(cache)
        .into_iter()
        .filter(|name| name.starts_with("linux-"))
        .filter_map(|name| Kernel::at(cache.join(name)))
        .find(|kernel| series.is_series_of(&kernel.release))
}

/// Returns the names in a directory, sorted; none if it does not exist.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// Returns the machine's own QEMU, if it is new enough.
fn installed_qemu(at_least: Version) -> Option<Qemu> {
    let path = find_program("qemu-system-x86_64")?;
    let out = Command::new(&path)
        .arg("--version")
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let version = Version::of_qemu(&String::from_utf8_lossy(&out.stdout))?;
    (version >= at_least).then_some(Qemu::Installed(path, version))
}

/// Returns the path of the program that a shell would start for `name`.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

#[cfg(test)]
mod tests;
