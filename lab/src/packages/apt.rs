//! `apt-get` and `apt-cache` with lists, archives and state of their own, and `dpkg-deb` that only
//! unpacks.
//!
//! One process at a time works in a cache directory: a file lock that others wait for. Archives
//! stay until they are unpacked, so that an interrupted download is resumed. The machine's list of
//! installed packages is read, to determine which of QEMU's libraries it lacks.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use super::cache::{check_room, full_or, unique};
use super::{
    Kernel, KernelBuild, Version, busybox_dir, find_program, headers_build_dir, headers_dir,
    kernel_dir, qemu_dir, sources,
};
use crate::{LabError, kernel};

/// Package whose newest version is the distribution's kernel without drivers for real hardware.
const KERNEL: &str = "linux-image-cloud-amd64";
const QEMU: &str = "qemu-system-x86";

const HINT: &str =
    "check the network and /etc/apt/sources.list, or install the package and try again";

/// Shortest time between two progress lines of a download.
const PROGRESS: Duration = Duration::from_secs(5);

/// Part to be fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted<'a> {
    Busybox,
    /// A kernel of this series, or the distribution's own.
    Kernel(Option<Version>),
    /// QEMU of this version or a newer one.
    Qemu(Version),
    /// The headers of this kernel.
    Headers(&'a KernelBuild),
}

impl Wanted<'_> {
    fn name(self) -> String {
        match self {
            Self::Busybox => "busybox".into(),
            Self::Kernel(None) => "the distribution's kernel".into(),
            Self::Kernel(Some(series)) => format!("a kernel {series}"),
            Self::Qemu(version) => format!("QEMU {version} or newer"),
            Self::Headers(KernelBuild { release, version }) => {
                format!("the headers of Linux {release}, version {version}")
            }
        }
    }

    fn package(self) -> Cow<'static, str> {
        match self {
            Self::Busybox => "busybox-static".into(),
            Self::Kernel(_) => KERNEL.into(),
            Self::Qemu(_) => QEMU.into(),
            Self::Headers(build) => format!("linux-headers-{}", build.release).into(),
        }
    }

    /// Returns whether this version of the package is suitable. The machine's sources are asked
    /// first: the kernel there is the distribution's own.
    fn will_do(self, version: &str) -> bool {
        match self {
            Self::Busybox | Self::Kernel(None) => true,
            Self::Kernel(Some(series)) => series.is_series_of(version),
            Self::Qemu(at_least) => Version::of_package(version).is_some_and(|v| v >= at_least),
            Self::Headers(build) => build.version == version,
        }
    }

    /// Returns the space that it takes, archive and files together, rounded up, bytes.
    pub(super) fn room(self) -> u64 {
        match self {
            Self::Busybox => 8 << 20,
            Self::Kernel(_) => 320 << 20,
            Self::Qemu(_) => 192 << 20,
            Self::Headers(_) => 128 << 20,
        }
    }

    /// Returns the advice if no source has it.
    fn hint(self) -> String {
        match self {
            Self::Headers(build) => format!(
                "mirrors keep only the newest ones: delete the kernel (the folder of the lab's \
                 cache with \
                 boot/vmlinuz-{}), and the next start fetches one that there are headers for",
                build.release
            ),
            _ => HINT.into(),
        }
    }
}

/// Returns the first missing program of those that fetch and unpack.
pub(super) fn lacking_tool() -> Option<&'static str> {
    let tools = ["apt-get", "apt-cache", "dpkg-deb", "xz"];
    tools.into_iter().find(|tool| find_program(tool).is_none())
}

/// APT, with directories of its own, while this process holds their lock.
pub(super) struct Apt<'a> {
    cache: &'a Path,
    dir: PathBuf,
    notice: &'a dyn Fn(&str),
    /// Lock that is released when the file is closed.
    _lock: File,
}

impl<'a> Apt<'a> {
    /// Waits for the lock.
    pub(super) fn open(cache: &'a Path, notice: &'a dyn Fn(&str)) -> Result<Self, LabError> {
        if let Some(tool) = lacking_tool() {
            return Err(LabError::Package {
                what: "QEMU and a kernel".into(),
                reason: format!("this machine has no `{tool}`"),
                hint:
                    "the lab needs Debian or a derivative (with xz-utils); on other systems use a \
                       host with hardware virtualization"
                        .into(),
            });
        }
        let dir = cache.join("apt");
        fs::create_dir_all(&dir).map_err(LabError::host("create", &dir))?;
        let path = dir.join("lock");
        let at_lock = LabError::host("lock", &path);
        let lock = File::create(&path).map_err(&at_lock)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            notice("another lab is fetching packages; waiting for it");
            flock(&lock, FlockOperation::LockExclusive).map_err(|e| at_lock(e.into()))?;
        }
        Ok(Self {
            cache,
            dir,
            notice,
            _lock: lock,
        })
    }

    /// Fetches and unpacks all of them: from the machine's sources if these have them, the rest
    /// from the suites that follow, the nearest first.
    pub(super) fn fetch(&self, wanted: &[Wanted<'_>]) -> Result<(), LabError> {
        check_room(self.cache, wanted.iter().map(|part| part.room()).sum())?;
        let names: Vec<String> = wanted.iter().map(|part| part.name()).collect();
        (self.notice)(&format!(
            "fetching {} from Debian packages (once) into {}",
            names.join(", "),
            self.cache.display()
        ));
        let machine = sources::of_machine(Path::new("/etc/apt"));
        let mut left = self.fetch_from(&machine, None, wanted)?;
        for (suite, later) in sources::later(&machine) {
            if left.is_empty() {
                break;
            }
            (self.notice)(&format!("looking in {suite}"));
            let all: Vec<sources::Source> = machine.iter().cloned().chain(later).collect();
            left = self.fetch_from(&all, Some(&suite), &left)?;
        }
        let Some(first) = left.first() else {
            return Ok(());
        };
        Err(LabError::Package {
            what: first.name(),
            reason: "neither the machine's sources nor the suites that follow have it".into(),
            hint: first.hint(),
        })
    }

    /// Fetches the parts that these sources have. Returns the others.
    fn fetch_from<'w>(
        &self,
        sources: &[sources::Source],
        suite: Option<&str>,
        wanted: &[Wanted<'w>],
    ) -> Result<Vec<Wanted<'w>>, LabError> {
        let update = self.update(sources)?;
        let mut left = Vec::new();
        for &part in wanted {
            let found = self
                .find(part, suite)
                .map_err(|error| explain(error, &update))?;
            let Some(found) = found else {
                left.push(part);
                continue;
            };
            self.fetch_part(part, &found, suite)
                .map_err(|error| explain(error, &update))?;
        }
        Ok(left)
    }

    /// Reads the lists of these sources. Returns the errors, which may not matter.
    fn update(&self, sources: &[sources::Source]) -> Result<String, LabError> {
        let list = self.dir.join("sources.list.d");
        if list.is_dir() {
            fs::remove_dir_all(&list).map_err(LabError::host("empty", &list))?;
        }
        for dir in [
            &list,
            &self.dir.join("archives/partial"),
            &self.dir.join("lists/partial"),
            &self.dir.join("state"),
        ] {
            fs::create_dir_all(dir).map_err(LabError::host("create", dir))?;
        }
        for source in sources {
            source.put(&list).map_err(LabError::host("write", &list))?;
        }
        let lists = "the package lists";
        match self.run(&self.dir, "apt-get", &["update"], lists) {
            Err(LabError::Package { reason, .. }) => {
                Ok(format!(" (before that, update: {reason})"))
            }
            Err(other) => Err(other),
            Ok(_) => Ok(String::new()),
        }
    }

    /// Returns whether `suite`, of these sources, has this package in a version of `series`.
    pub(super) fn has(
        &self,
        sources: &[sources::Source],
        suite: &str,
        package: &str,
        series: Version,
    ) -> Result<bool, LabError> {
        let update = self.update(sources)?;
        let shown = self.query(&["madison", package], package);
        let shown = shown.map_err(|error| explain(error, &update))?;
        let mut versions = parse_madison(&shown, Some(suite)).into_iter();
        Ok(versions.any(|version| series.is_series_of(&version)))
    }

    /// Returns the packages of this part, and their version; `None` if the sources have no suitable
    /// one.
    fn find(&self, part: Wanted<'_>, suite: Option<&str>) -> Result<Option<Found>, LabError> {
        let package = part.package();
        let shown = self.query(&["madison", &package], &package)?;
        let Some(version) = parse_madison(&shown, suite)
            .into_iter()
            .find(|v| part.will_do(v))
        else {
            return Ok(None);
        };
        let named = format!("{package}={version}");
        let show = || self.query(&["show", &named], &package);
        let named = match part {
            Wanted::Busybox | Wanted::Qemu(_) => vec![named],
            // The package only depends on the one with the files.
            Wanted::Kernel(_) => match parse_kernel_package(&show()?) {
                Some(named) => vec![named],
                None => return Ok(None),
            },
            Wanted::Headers(_) => match parse_headers_packages(&show()?) {
                // All of one version.
                Some(others) => others
                    .map(|other| format!("{other}={version}"))
                    .into_iter()
                    .chain([named])
                    .collect(),
                None => return Ok(None),
            },
        };
        Ok(Some(Found { named, version }))
    }

    fn fetch_part(
        &self,
        part: Wanted<'_>,
        found: &Found,
        suite: Option<&str>,
    ) -> Result<(), LabError> {
        let what = part.name();
        let archives = self.dir.join("archives");
        let mut args = match part {
            Wanted::Qemu(_) => vec![
                "install",
                "--download-only",
                "--no-install-recommends",
                "-y",
                "seabios",
            ],
            // Without its dependencies.
            _ => vec!["download"],
        };
        args.extend(found.named.iter().map(String::as_str));
        if let Some(suite) = suite {
            args.extend(["-t", suite]);
        }
        self.run(&archives, "apt-get", &args, &what)?;
        let to = match part {
            Wanted::Busybox => busybox_dir(self.cache),
            Wanted::Kernel(series) => kernel_dir(self.cache, series),
            Wanted::Headers(build) => headers_dir(self.cache, build),
            Wanted::Qemu(_) => {
                let version = Version::of_package(&found.version);
                qemu_dir(self.cache, version.expect("its version was compared"))
            }
        };
        self.unpack(&archives, &to, part, &what)?;
        // They are unpacked; a later start must not unpack them as part of another directory.
        fs::remove_dir_all(&archives).map_err(LabError::host("empty", &archives))?;
        let partial = archives.join("partial");
        fs::create_dir_all(&partial).map_err(LabError::host("create", partial))
    }

    /// Unpacks all archives into a directory that then becomes `to`.
    fn unpack(
        &self,
        archives: &Path,
        to: &Path,
        part: Wanted<'_>,
        what: &str,
    ) -> Result<(), LabError> {
        (self.notice)(&format!("unpacking {what}"));
        let scratch = self.dir.join(format!("unpack-{}", unique()));
        let unpacked = unpack_all(archives, &scratch, what).and_then(|()| match part {
            Wanted::Kernel(_) => add_vmlinux(&scratch),
            Wanted::Headers(build) => make_headers_relocatable(&scratch, &build.release),
            _ => Ok(()),
        });
        let done = unpacked
            .and_then(|()| fs::rename(&scratch, to).map_err(LabError::host("rename to", to)))
            // The free space must be read before the directory is removed.
            .map_err(|error| full_or(self.cache, error));
        if done.is_err() {
            // Best effort: leftovers only waste space.
            let _ = fs::remove_dir_all(&scratch);
        }
        done
    }

    /// Runs `apt-cache`, and returns its output.
    fn query(&self, args: &[&str], what: &str) -> Result<String, LabError> {
        self.run(&self.dir, "apt-cache", args, what)
    }

    /// Runs a tool of APT to its end, and reports the progress of a download. Returns its output;
    /// the error has the end of its messages.
    fn run(&self, cwd: &Path, tool: &str, args: &[&str], what: &str) -> Result<String, LabError> {
        let mut command = Command::new(tool);
        command
            .current_dir(cwd)
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive");
        for (option, path) in [
            ("Dir::State", "state"),
            ("Dir::State::Lists", "lists"),
            ("Dir::Cache", ""),
            ("Dir::Etc::SourceParts", "sources.list.d"),
        ] {
            let path = self.dir.join(path);
            command
                .arg("-o")
                .arg(format!("{option}={}", path.display()));
        }
        for option in [
            "Dir::Etc::SourceList=-",
            "Dir::State::status=/var/lib/dpkg/status",
            // Other APT processes do not use these directories, and root need not become the user
            // `_apt`.
            "Debug::NoLocking=1",
            "APT::Sandbox::User=root",
            // A mirror that does not answer is retried, but not for ever.
            "Acquire::Retries=3",
            "Acquire::http::Timeout=30",
            "Acquire::https::Timeout=30",
            "APT::Status-Fd=1",
        ] {
            command.args(["-o", option]);
        }
        command.args(args);
        run_tool(&mut command, what, &mut Progress::new(what, self.notice))
            .map_err(|error| full_or(self.cache, error))
    }
}

/// Names of packages as arguments of `apt-get`, and the version that was found.
struct Found {
    named: Vec<String>,
    version: String,
}

/// Adds the errors of reading the lists.
fn explain(error: LabError, update: &str) -> LabError {
    match error {
        LabError::Package { what, reason, hint } => LabError::Package {
            what,
            reason: format!("{reason}{update}"),
            hint,
        },
        other => other,
    }
}

fn unpack_all(archives: &Path, to: &Path, what: &str) -> Result<(), LabError> {
    fs::create_dir_all(to).map_err(LabError::host("create", to))?;
    let entries = fs::read_dir(archives).map_err(LabError::host("read", archives))?;
    for deb in entries.flatten().map(|entry| entry.path()) {
        if deb.extension().is_some_and(|extension| extension == "deb") {
            let mut command = Command::new("dpkg-deb");
            command.arg("-x").arg(&deb).arg(to);
            let done = run_tool(&mut command, what, &mut Progress::new(what, &|_| ()));
            if let Err(error) = done {
                // It would fail the next time too.
                let _ = fs::remove_file(&deb);
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Puts the uncompressed kernel beside the compressed one.
fn add_vmlinux(root: &Path) -> Result<(), LabError> {
    let kernel = Kernel::at(root.to_path_buf()).ok_or_else(|| LabError::Package {
        what: "a kernel".into(),
        reason: "the package has no vmlinuz".into(),
        hint: HINT.into(),
    })?;
    let (vmlinuz, vmlinux) = (kernel.vmlinuz(), kernel.vmlinux());
    let image = fs::read(&vmlinuz).map_err(LabError::host("read", &vmlinuz))?;
    fs::write(&vmlinux, kernel::extract_vmlinux(&image)?).map_err(LabError::host("write", &vmlinux))
}

/// Makes the makefile of the headers unpacked in `root` include its other half by its location, not
/// by the one where a package would be installed.
fn make_headers_relocatable(root: &Path, release: &str) -> Result<(), LabError> {
    let makefile = headers_build_dir(root, release).join("Makefile");
    let text = fs::read_to_string(&makefile).map_err(LabError::host("read", &makefile))?;
    let text = text.replace(
        "include /usr/src/",
        "include $(dir $(lastword $(MAKEFILE_LIST)))../",
    );
    fs::write(&makefile, text).map_err(LabError::host("write", &makefile))
}

/// Converts the status lines of a download into occasional notices.
pub(super) struct Progress<'a> {
    what: &'a str,
    notice: &'a dyn Fn(&str),
    last: Instant,
}

impl<'a> Progress<'a> {
    pub(super) fn new(what: &'a str, notice: &'a dyn Fn(&str)) -> Self {
        let last = Instant::now();
        Self { what, notice, last }
    }

    /// Parses `dlstatus:ITEM:PERCENT:TEXT` (apt's README.progress-reporting); false for any other
    /// line.
    fn hear(&mut self, line: &str) -> bool {
        let Some(status) = line.strip_prefix("dlstatus:") else {
            return false;
        };
        if self.last.elapsed() >= PROGRESS {
            self.last = Instant::now();
            let percent = status.split([':', '.']).nth(1).unwrap_or("?");
            (self.notice)(&format!("{}: {percent} %", self.what));
        }
        true
    }
}

/// Runs a tool to its end. Returns its output without status lines; the error has the end of its
/// messages.
pub(super) fn run_tool(
    command: &mut Command,
    what: &str,
    progress: &mut Progress<'_>,
) -> Result<String, LabError> {
    let failed = |reason: String| LabError::Package {
        what: what.into(),
        reason,
        hint: HINT.into(),
    };
    let program = command.get_program().display().to_string();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| failed(format!("{program}: {e}")))?;
    let mut stderr = child.stderr.take().expect("it was piped");
    let words = thread::spawn(move || {
        let mut words = Vec::new();
        // Text read before a failure is all that there is.
        let _ = stderr.read_to_end(&mut words);
        String::from_utf8_lossy(&words).into_owned()
    });
    let mut out = String::new();
    for line in BufReader::new(child.stdout.take().expect("it was piped")).lines() {
        let line = line.map_err(|e| failed(format!("{program}: {e}")))?;
        if !progress.hear(&line) {
            out.push_str(&line);
            out.push('\n');
        }
    }
    let status = child
        .wait()
        .map_err(|e| failed(format!("{program}: {e}")))?;
    let words = words
        .join()
        .expect("the thread that reads a pipe does not panic");
    if status.success() {
        return Ok(out);
    }
    Err(failed(last_words(&words)))
}

/// Returns the reason why a tool failed, out of its standard error: the lines that it marks as
/// errors, as APT's tools do, else its last lines.
fn last_words(words: &str) -> String {
    let lines: Vec<&str> = words.lines().filter(|l| !l.trim().is_empty()).collect();
    let errors = lines.iter().filter(|line| line.starts_with("E: "));
    let errors: Vec<&str> = errors.take(2).copied().collect();
    match errors.is_empty() {
        true => lines[lines.len().saturating_sub(2)..].join("; "),
        false => errors.join("; "),
    }
}

/// Parses the versions in the output of `apt-cache madison`,
/// `NAME | VERSION | URI SUITE/COMPONENT …`, in its order: newest first. With `suite`, only those
/// in it.
fn parse_madison(shown: &str, suite: Option<&str>) -> Vec<String> {
    let version = |line: &str| {
        let mut columns = line.split('|').map(str::trim);
        let (_, version, source) = (columns.next()?, columns.next()?, columns.next()?);
        let named = source.split_whitespace().nth(1)?.split('/').next()?;
        suite
            .is_none_or(|suite| suite == named)
            .then(|| version.to_owned())
    };
    shown.lines().filter_map(version).collect()
}

/// Parses the first dependency in a package's description: the kernel's own package, for the one
/// that follows releases.
fn parse_kernel_package(shown: &str) -> Option<String> {
    let dependencies = shown
        .lines()
        .find_map(|line| line.strip_prefix("Depends: "))?;
    let name = dependencies.split([',', ' ']).next()?;
    name.starts_with("linux-image-").then(|| name.to_owned())
}

/// Parses the other packages of a set of headers in the description of `linux-headers-RELEASE`;
/// `None` if these two are not both there.
fn parse_headers_packages(shown: &str) -> Option<[String; 2]> {
    let dependencies = shown
        .lines()
        .find_map(|line| line.strip_prefix("Depends: "))?;
    let named = |is_it: &dyn Fn(&str) -> bool| {
        let mut names = dependencies
            .split([',', '|'])
            .filter_map(|it| it.split_whitespace().next());
        names.find(|name| is_it(name)).map(str::to_owned)
    };
    Some([
        named(&|name| name.starts_with("linux-headers-") && name.ends_with("-common"))?,
        named(&|name| name.starts_with("linux-kbuild-"))?,
    ])
}

#[cfg(test)]
mod tests;
