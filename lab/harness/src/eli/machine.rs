//! One run of `exitless-hv` under QEMU, from power-on to power-off.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::in_option;
use lab::packages::{Needs, Packages, Version};
use lab::patience::Limit;
use serde_json::{Map, Value};

/// Oldest QEMU that emulates x2APIC in software.
pub const QEMU: Version = Version::new(10, 0);

/// Files that runs need, made once.
pub struct Machine {
    packages: Packages,
    hypervisor: PathBuf,
    attacks: PathBuf,
    initrd: PathBuf,
    disk: PathBuf,
    ram_disk: PathBuf,
    scratch: tempfile::TempDir,
}

/// Configuration of a run.
pub struct Run<'a> {
    /// The hypervisor's command line.
    pub options: String,
    /// The guest.
    pub guest: Guest<'a>,
    /// Processor model of QEMU.
    pub cpu: &'a str,
    /// Whether there is an NVMe controller.
    pub nvme: bool,
    /// Whether it has one interrupt message, which the guest may move, instead of one for each
    /// processor.
    pub one_message: bool,
    /// Whether there is a disk in memory, for the block function.
    pub ram_disk: bool,
    /// Whether there is an IOMMU before the controller.
    pub iommu: bool,
    /// Number of processors.
    pub cpus: u32,
    /// Time limit on an idle machine.
    pub limit: Duration,
}

/// A processor model with all features needed.
pub const CPU: &str = "EPYC,+x2apic";

/// Guest of a run.
#[derive(Clone, Copy)]
pub enum Guest<'a> {
    /// Linux, with these additional options of its command line, and this script.
    Linux(&'a str, &'a str),
    /// The attacking guest, with this command line.
    Attack(&'a str),
    /// A file that is no kernel.
    NoKernel,
    /// Linux, with a command line that is too long.
    LongLine,
}

/// Result of a run.
pub struct Ran {
    /// The guest's serial line.
    pub console: String,
    /// The hypervisor's log.
    pub log: String,
    /// Whether it ended by itself.
    pub ended: bool,
    /// Last output of the emulator, if that failed.
    pub failure: Option<String>,
    /// Largest part of its time for which one of its threads waited for a processor of this
    /// machine: the load by others.
    pub waited: f64,
}

impl Machine {
    /// Prepares runs with the distribution's kernel, or one of `series`, and a disk of `disk_bytes`
    /// with the pattern of [`SEED`].
    pub fn new(
        hypervisor: Option<&Path>,
        series: Option<Version>,
        disk_bytes: usize,
    ) -> Result<Self> {
        let needs = Needs {
            qemu: QEMU,
            guest_kernel: series,
            ..Needs::default()
        };
        let packages = Packages::get(&needs, &|line| eprintln!("{line}"))?;
        let hypervisor = match hypervisor {
            Some(path) => path.to_owned(),
            None => beside("exitless-hv")?,
        };
        ensure!(
            hypervisor.is_file(),
            "no such file: {}",
            hypervisor.display()
        );
        let scratch = tempfile::Builder::new()
            .prefix("exitless-eli-")
            .tempdir()
            .context("a directory")?;
        let initrd = scratch.path().join("guest.img");
        fs::write(&initrd, lab::guest_image::build(&packages)?.to_bytes())
            .context("writing the guest's image")?;
        let disk = scratch.path().join("disk.img");
        let mut content = vec![0; disk_bytes];
        workload::pattern::fill(SEED, 0, &mut content);
        fs::write(&disk, content).context("writing the disk")?;
        let ram_disk = scratch.path().join("ram.img");
        let mut content = vec![0; RAM_DISK_BYTES];
        workload::pattern::fill(SEED, 0, &mut content);
        fs::write(&ram_disk, content).context("writing the disk")?;
        Ok(Self {
            packages,
            hypervisor,
            ram_disk,
            attacks: beside("eli-attacks")?,
            initrd,
            disk,
            scratch,
        })
    }

    /// Returns the release of Linux that it boots.
    pub fn kernel(&self) -> &str {
        self.packages.guest().release()
    }

    /// Returns QEMU's version.
    pub fn qemu(&self) -> Version {
        self.packages.qemu_version()
    }

    /// Executes a run. Several may run at the same time.
    pub fn run(&self, run: &Run<'_>) -> Result<Ran> {
        // Files of its own, removed with it.
        let files = tempfile::Builder::new()
            .prefix("run-")
            .tempdir_in(self.scratch.path())
            .context("a directory")?;
        let file = |name: &str| files.path().join(name);
        let (console, log) = (file("console"), file("log"));
        let (program, arguments, environment) = self.packages.qemu();
        let mut command = Command::new(program);
        command.args(arguments).envs(environment);
        command.args(["-machine", "q35,hpet=on", "-global", "hpet.msi=on"]);
        command.args(["-accel", "tcg,thread=multi", "-cpu", run.cpu, "-m", "1024"]);
        command.args(["-smp", &run.cpus.to_string()]);
        command.args([
            "-display",
            "none",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
        ]);
        command.arg("-serial").arg(with_path("file:", &console));
        command.arg("-debugcon").arg(with_path("file:", &log));
        if run.iommu {
            command.args(["-device", "intel-iommu,intremap=on,eim=on"]);
        }
        if run.nvme {
            command.arg("-drive").arg(with_path(
                "if=none,id=disk,format=raw,snapshot=on,file=",
                &self.disk,
            ));
            let more = if run.one_message { ",msix_qsize=1" } else { "" };
            let device = format!("nvme,drive=disk,serial=exitless{more}");
            command.args(["-device", &device]);
        }
        command.arg("-kernel").arg(&self.hypervisor);
        command.args(["-append", &run.options]);
        let mut modules = self.modules(&run.guest)?;
        if run.ram_disk {
            modules.push(",");
            modules.push(in_option(&self.ram_disk));
            modules.push(" disk");
        }
        command.arg("-initrd").arg(modules);
        let stderr = file("qemu");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(fs::File::create(&stderr).context("a file for QEMU's messages")?);
        let child = command.spawn().context("starting QEMU")?;
        let (status, waited) = wait(child, run.limit)?;
        let read =
            |path: &Path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let ran = Ran {
            console: read(&console).unwrap_or_default(),
            log: read(&log).unwrap_or_default(),
            ended: status.is_some(),
            failure: status.filter(|status| !status.success()).map(|status| {
                let said = read(&stderr).unwrap_or_default();
                format!("{status}: {}", said.lines().last().unwrap_or_default())
            }),
            waited,
        };
        if ran.log.is_empty() {
            bail!(
                "the hypervisor said nothing; QEMU: {}",
                read(&stderr).unwrap_or_default()
            );
        }
        Ok(ran)
    }

    /// Returns QEMU's `-initrd` for a multiboot image: files with their command lines, a comma
    /// between them.
    fn modules(&self, guest: &Guest<'_>) -> Result<OsString> {
        let module = |path: &Path, line: &str| {
            let mut text = in_option(path);
            text.push(in_option(line));
            text
        };
        let kernel = self.packages.guest().vmlinuz();
        Ok(match guest {
            Guest::NoKernel => module(&self.initrd, ""),
            Guest::LongLine => module(&kernel, &" long".repeat(600)),
            Guest::Attack(line) => module(&self.attacks, &format!(" {line}")),
            Guest::Linux(more, script) => {
                let run = lab::guest_image::run_option(script)?;
                let line = format!(" console=ttyS0 quiet panic=-1 {more} {run}");
                let mut text = module(&kernel, &line);
                text.push(",");
                text.push(module(&self.initrd, ""));
                text
            }
        })
    }
}

/// Bytes of the disk in memory, which must lie in the hypervisor's memory, behind kernel and
/// initrd.
pub const RAM_DISK_BYTES: usize = 8 << 20;

/// Seed of the disk's pattern.
pub const SEED: u64 = 1;

/// Finds a file of this name beside this program, or in cargo's directory.
fn beside(name: &str) -> Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    let directory = program
        .parent()
        .context("this program is in no directory")?;
    let path = directory.join(name);
    ensure!(
        path.is_file(),
        "there is no {name} beside this program, in {}: `make build` makes it, `--hypervisor \
         IMAGE` names another",
        directory.display()
    );
    Ok(path)
}

/// Returns an option that ends with a path.
fn with_path(option: &str, path: &Path) -> OsString {
    let mut text = OsString::from(option);
    text.push(in_option(path));
    text
}

/// Waits for the end. Returns the status, if it ended in time, and the part of its time for which a
/// thread of it waited. The limit is longer on a busy machine.
fn wait(mut child: Child, limit: Duration) -> Result<(Option<ExitStatus>, f64)> {
    const STEP: Duration = Duration::from_millis(20);
    let mut limit = Limit::new(limit);
    let (start, mut waited) = (Instant::now(), Duration::ZERO);
    loop {
        if let Some(status) = child.try_wait().context("waiting for QEMU")? {
            let part = waited.as_secs_f64() / start.elapsed().as_secs_f64().max(0.001);
            return Ok((Some(status), part));
        }
        waited = waited.max(longest_wait(child.id()));
        let Some(step) = limit.step() else {
            // Only a machine that hangs is killed here, and it has nothing to save.
            child.kill().context("ending QEMU")?;
            child.wait().context("waiting for QEMU")?;
            return Ok((None, 0.0));
        };
        thread::sleep(step.min(STEP));
    }
}

/// Returns the longest time for which a thread of `process` was ready and had no processor
/// (proc(5), schedstat); zero where the kernel does not say.
fn longest_wait(process: u32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{process}/task"));
    let of = |thread: fs::DirEntry| -> Option<u64> {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().nth(1)?.parse().ok()
    };
    let longest = threads
        .into_iter()
        .flatten()
        .filter_map(|thread| of(thread.ok()?))
        .max();
    Duration::from_nanos(longest.unwrap_or(0))
}

impl Ran {
    /// Returns the last report of this kind.
    pub fn report(&self, kind: &str) -> Result<Report> {
        let last = self
            .reports()
            .filter(|report| report.0["report"] == kind)
            .last();
        last.with_context(|| {
            format!(
                "the hypervisor's log has no report {kind:?}\n{}",
                self.tail()
            )
        })
    }

    /// Returns all reports.
    pub fn reports(&self) -> impl Iterator<Item = Report> {
        let lines = self.log.lines().filter(|line| line.starts_with('{'));
        lines
            .filter_map(|line| serde_json::from_str(line).ok())
            .map(Report)
    }

    /// Returns the end of both logs, for an error.
    pub fn tail(&self) -> String {
        let last = |text: &str| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(12)..].join("\n  ")
        };
        format!(
            "hypervisor:\n  {}\nguest:\n  {}",
            last(&self.log),
            last(&self.console)
        )
    }
}

/// A line of the hypervisor's counts.
pub struct Report(Map<String, Value>);

impl Report {
    /// Sums the counts of reports; for a value that is no count, takes the last report's.
    pub fn sum(reports: impl IntoIterator<Item = Self>) -> Self {
        let mut sum = Map::new();
        for (key, value) in reports.into_iter().flat_map(|report| report.0) {
            let before = sum.get(&key).and_then(Value::as_u64);
            let value = match (before, value.as_u64()) {
                (Some(before), Some(more)) => Value::from(before + more),
                _ => value,
            };
            sum.insert(key, value);
        }
        Self(sum)
    }

    /// Returns a count; 0 if the report omits it, as the hypervisor does for events that it did not
    /// see.
    pub fn count(&self, key: &str) -> u64 {
        self.0.get(key).and_then(Value::as_u64).unwrap_or(0)
    }

    /// Returns a count, if it is there.
    pub fn find(&self, key: &str) -> Option<u64> {
        self.0.get(key).and_then(Value::as_u64)
    }

    /// Returns whether there is such a count.
    pub fn has(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    /// Returns whether it is of this kind.
    pub fn is(&self, kind: &str) -> bool {
        self.0.get("report").and_then(Value::as_str) == Some(kind)
    }

    /// Returns the exits of this cause, by kind.
    pub fn exits_of(&self, cause: &str) -> Vec<(String, u64)> {
        let ending = format!("_{cause}");
        let of = |(key, value): (&String, &Value)| {
            let kind = key.strip_suffix(&ending)?;
            KINDS
                .contains(&kind)
                .then(|| (kind.to_owned(), value.as_u64().unwrap_or(0)))
        };
        self.0.iter().filter_map(of).collect()
    }

    /// Returns their sum.
    pub fn sum_of(&self, cause: &str) -> u64 {
        self.exits_of(cause).iter().map(|(_, count)| count).sum()
    }
}

/// Kinds of exits, by the hypervisor's names.
pub const KINDS: [&str; 16] = [
    "intr", "nmi", "vintr", "np", "gp", "eoi", "timer", "apic", "msr", "cr8", "cpuid", "io", "npf",
    "idtr", "step", "other",
];
