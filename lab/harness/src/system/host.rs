//! Host of a guest: this machine's KVM if it is complete, else the lab.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lab::guest_module::ModuleSources;
use lab::packages::{Needs, Version};
use lab::{Lab, LabConfig, LabError, Output, guest_module, patience};

use super::native::NativeProgram;
use super::programs::{Exitless, Programs};

/// A host that can run `exitless run`.
pub enum Host {
    /// The emulated host.
    Lab(Box<Lab>),
    /// This machine; files are in a directory of their own.
    Native(NativeHost),
}

/// This machine, with the images that a guest needs.
pub struct NativeHost {
    programs: Programs,
    dir: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
}

/// Delay between a program's time limit and its SIGKILL.
const KILLED_AFTER: Duration = Duration::from_secs(30);

/// `--pin` list of a run's sidecore: the CPU that the lab keeps free for it. vCPUs run where the
/// kernel schedules them.
const LAB_PIN: &str = "2";

/// Kernels of a lab; the distribution's where none is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kernels {
    /// Series of the kernels of the host and of its guests.
    pub both: Option<Version>,
    /// Series of its guests' kernel.
    pub guest: Option<Version>,
    /// Module of this workspace that guests have.
    pub module: Option<GuestModule>,
}

/// A kernel module of this workspace, in a guest's image in place of a virtio-iommu driver of the
/// kernel's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestModule {
    /// `guest/iommu-module`, the driver. Linux's own is in the image too.
    Driver,
    /// `guest/iommu-cases`, which tests a device against the specification.
    Cases,
}

impl GuestModule {
    fn sources(self) -> ModuleSources {
        match self {
            Self::Driver => guest_module::iommu_module().into(),
            Self::Cases => guest_module::iommu_cases().into(),
        }
    }
}

impl Host {
    /// Returns whether guests run in the lab: this machine's KVM cannot boot a kernel.
    pub fn is_lab() -> bool {
        kvm::vm::open().is_err()
    }

    /// Starts the best host there is.
    pub fn start() -> Result<Self> {
        if Self::is_lab() {
            Self::lab()
        } else {
            Self::native()
        }
    }

    /// Starts the best host there is, or a lab with these kernels.
    pub fn start_with_kernels(kernels: Kernels) -> Result<Self> {
        if kernels == Kernels::default() {
            return Self::start();
        }
        if !Self::is_lab() && kernels.both.is_none() {
            return Self::native_with(kernels);
        }
        let needs = Needs {
            host_kernel: kernels.both,
            guest_kernel: kernels.guest.or(kernels.both),
            ..Needs::default()
        };
        Self::lab_with(LabConfig {
            needs,
            // A kernel of the host's is requested by tests of the pager only.
            one_thread: kernels.both.is_some(),
            guest_module: kernels.module.map(GuestModule::sources),
            ..LabConfig::default()
        })
    }

    /// Starts the best host there is; a lab has this much memory.
    pub fn start_with_memory(mib: u32) -> Result<Self> {
        if !Self::is_lab() {
            return Self::native();
        }
        Self::lab_with(LabConfig {
            memory_mib: mib,
            ..LabConfig::default()
        })
    }

    /// Starts the best host there is, with these files by name ([`path`](Self::path)); a lab has
    /// this much memory, and these disks: `/dev/vda` and on.
    pub fn start_with_files(
        mib: u32,
        files: &[(PathBuf, &str)],
        disks: Vec<PathBuf>,
    ) -> Result<Self> {
        if Self::is_lab() {
            let inside = |(file, name): &(PathBuf, &str)| (file.clone(), format!("/root/{name}"));
            return Self::lab_with(LabConfig {
                memory_mib: mib,
                files: files.iter().map(inside).collect(),
                disks,
                ..LabConfig::default()
            });
        }
        let host = Self::native()?;
        for (file, name) in files {
            std::os::unix::fs::symlink(file, host.path(name))
                .with_context(|| format!("linking {}", file.display()))?;
        }
        Ok(host)
    }

    /// Starts a lab, whether or not this machine has KVM.
    pub fn lab() -> Result<Self> {
        Self::lab_with(LabConfig::default())
    }

    /// Starts a lab whose kernel and whose guests' kernel are of this series, with these files as
    /// its disks.
    pub fn lab_with_disks(series: Version, disks: Vec<PathBuf>) -> Result<Self> {
        let needs = Needs {
            host_kernel: Some(series),
            guest_kernel: Some(series),
            ..Needs::default()
        };
        Self::lab_with(LabConfig {
            needs,
            disks,
            one_thread: true,
            ..LabConfig::default()
        })
    }

    /// Runs a shell script on the host. Returns its standard output.
    ///
    /// # Errors
    /// Its status was not 0; with its output.
    pub fn script(&self, script: &str) -> Result<String> {
        let (is_good, output, errors) = match self {
            Self::Lab(lab) => {
                let ran = lab.exec("/bin/sh", ["-c", script])?;
                (ran.success(), ran.stdout_text(), ran.stderr_text())
            }
            Self::Native(_) => {
                let ran = std::process::Command::new("/bin/sh")
                    .args(["-c", script])
                    .output()
                    .context("starting sh")?;
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                (ran.status.success(), text(&ran.stdout), text(&ran.stderr))
            }
        };
        ensure!(is_good, "{script}: {output}{errors}");
        Ok(output)
    }

    /// Starts a lab of this configuration, with both programs.
    pub fn lab_with(config: LabConfig) -> Result<Self> {
        let Programs {
            exitless,
            exitless_lab,
        } = Programs::find()?;
        let config = config.with_exitless(exitless);
        let lab = Lab::start(&config.with_exitless_lab(exitless_lab))?;
        Ok(Self::Lab(Box::new(lab)))
    }

    fn native() -> Result<Self> {
        Self::native_with(Kernels::default())
    }

    /// Prepares this machine, with guests of these kernels.
    fn native_with(kernels: Kernels) -> Result<Self> {
        let needs = Needs {
            guest_kernel: kernels.guest,
            ..Needs::default()
        };
        let notice = |line: &str| eprintln!("{line}");
        let packages = lab::packages::Packages::get(&needs, &notice)?;
        let build = |sources| guest_module::build(&sources, packages.guest(), &notice);
        let module = kernels
            .module
            .map(GuestModule::sources)
            .map(build)
            .transpose()?;
        let dir = lab::packages::cache_dir().join(format!("native-{}", std::process::id()));
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        let initrd = dir.join("guest.img");
        let image = match &module {
            Some(module) => lab::guest_image::build_with_module(&packages, module)?,
            None => lab::guest_image::build(&packages)?,
        };
        fs::write(&initrd, image.to_bytes())
            .with_context(|| format!("writing {}", initrd.display()))?;
        Ok(Self::Native(NativeHost {
            programs: Programs::find()?,
            kernel: packages.guest().vmlinuz(),
            initrd,
            dir,
        }))
    }

    /// Returns the label of figures measured here.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Lab(_) => "lab: emulated AMD host (QEMU TCG, kvm-amd); counts only, no times",
            Self::Native(_) => "this machine's KVM",
        }
    }

    /// Returns the path of the stock kernel, which `run` can read.
    pub fn kernel(&self) -> String {
        match self {
            Self::Lab(_) => "/boot/vmlinuz".into(),
            Self::Native(host) => host.kernel.display().to_string(),
        }
    }

    /// Returns the stock kernel.
    pub fn kernel_image(&self) -> Result<Vec<u8>> {
        let path = self.kernel();
        match self {
            Self::Lab(lab) => Ok(lab.pull_bytes(&path)?),
            Self::Native(_) => fs::read(&path).with_context(|| format!("reading {path}")),
        }
    }

    /// Returns the path of the guest's initramfs.
    pub fn initrd(&self) -> String {
        match self {
            Self::Lab(_) => "/boot/guest.img".into(),
            Self::Native(host) => host.initrd.display().to_string(),
        }
    }

    /// Returns the CPU for the sidecore, if one is known to be free.
    pub fn pin(&self) -> Option<&'static str> {
        match self {
            Self::Lab(_) => Some(LAB_PIN),
            Self::Native(_) => None,
        }
    }

    /// Returns the same, and a CPU for one vCPU that takes no ticks while it runs nothing else: for
    /// counts that are compared.
    pub fn quiet_pin(&self) -> Option<&'static str> {
        match self {
            Self::Lab(_) => Some("2,1"),
            Self::Native(_) => None,
        }
    }

    /// Returns the path of a file of this name.
    pub fn path(&self, name: &str) -> String {
        match self {
            Self::Lab(_) => format!("/root/{name}"),
            Self::Native(host) => host.dir.join(name).display().to_string(),
        }
    }

    /// Writes a file.
    pub fn put(&self, name: &str, data: &[u8]) -> Result<()> {
        match self {
            Self::Lab(lab) => Ok(lab.push_bytes(data, &self.path(name), 0o644)?),
            Self::Native(_) => fs::write(self.path(name), data)
                .with_context(|| format!("writing {}", self.path(name))),
        }
    }

    /// Creates a file of `bytes` zeroes that takes no space yet.
    pub fn put_zeroes(&self, name: &str, bytes: u64) -> Result<()> {
        match self {
            Self::Lab(lab) => {
                let made = lab.exec("truncate", ["-s", &bytes.to_string(), &self.path(name)])?;
                ensure!(made.status == 0, "making {name}: {}", made.stderr_text());
                Ok(())
            }
            Self::Native(_) => fs::File::create(self.path(name))
                .and_then(|file| file.set_len(bytes))
                .with_context(|| format!("writing {}", self.path(name))),
        }
    }

    /// Reads a file.
    pub fn get(&self, name: &str) -> Result<Vec<u8>> {
        match self {
            Self::Lab(lab) => Ok(lab.pull_bytes(&self.path(name))?),
            Self::Native(_) => {
                fs::read(self.path(name)).with_context(|| format!("reading {}", self.path(name)))
            }
        }
    }

    /// Returns the release of the kernel whose KVM runs the guests.
    pub fn kernel_release(&self) -> Result<String> {
        match self {
            Self::Lab(lab) => {
                let bytes = lab.pull_bytes("/proc/sys/kernel/osrelease")?;
                Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
            }
            Self::Native(_) => Ok(exit_ledger::conditions::kernel_release()),
        }
    }

    /// Creates the TAP interface `name`, whose host side has the address `ip`, in the lab. Returns
    /// whether it exists: natively it is the user's to create.
    pub fn tap(&self, name: &str, ip: &str) -> Result<bool> {
        let Self::Lab(lab) = self else {
            return Ok(false);
        };
        let script = format!(
            "[ -e /sys/class/net/{name} ] || tunctl -t {name} && ip link set {name} up && \
             ip addr replace {ip}/24 dev {name}"
        );
        let made = lab.exec("/bin/sh", ["-c", &script])?;
        ensure!(made.success(), "making {name}: {}", made.stderr_text());
        Ok(true)
    }

    /// Waits until sockets of these names exist. A daemon creates them when it is ready.
    pub fn wait_for_sockets(&self, names: &[String]) -> Result<()> {
        // 20 s, in steps of a tenth.
        let paths: Vec<String> = names.iter().map(|name| self.path(name)).collect();
        let script = format!(
            "for path in {}; do n=0; until [ -S $path ]; do n=$((n+1)); [ $n -le 200 ] || exit 1; \
             sleep 0.1; done; done",
            paths.join(" ")
        );
        let is_there = self.script(&script);
        is_there.with_context(|| format!("the sockets {} did not appear", names.join(", ")))?;
        Ok(())
    }

    /// Starts `PROGRAM ARGS`. After `limit` it is asked to print the state of its vCPUs and to end
    /// (SIGQUIT: status 131), and it is killed 15 s later.
    pub fn spawn(
        &self,
        program: Exitless,
        args: &[String],
        limit: Duration,
    ) -> Result<Program<'_>> {
        self.spawn_in(None, program, args, limit)
    }

    /// The same, in the control group whose directory is `group`: in the lab only.
    pub fn spawn_in(
        &self,
        group: Option<&str>,
        program: Exitless,
        args: &[String],
        limit: Duration,
    ) -> Result<Program<'_>> {
        // timeout(1) does not take the load into account.
        let seconds = limit.mul_f64(patience::stretch()).as_secs().to_string();
        let guard = ["-s", "QUIT", "-k", "15", &seconds].map(str::to_owned);
        let running = match self {
            Self::Lab(lab) => {
                let command = match group {
                    Some(group) => {
                        const ENTER: &str = "echo $$ > \"$0\"/cgroup.procs && exec timeout \"$@\"";
                        lab.command("/bin/sh").args(["-c", ENTER, group])
                    }
                    None => lab.command("timeout"),
                };
                let command = command.args(guard).args([program.name().to_owned()]);
                Running::Lab(command.args(args.iter().cloned()).spawn()?)
            }
            Self::Native(_) if group.is_some() => bail!("control groups are the lab's alone"),
            Self::Native(host) => Running::Native(NativeProgram::start(
                &guard,
                host.programs.file(program),
                args,
            )?),
        };
        Ok(Program {
            running,
            limit: limit + KILLED_AFTER,
        })
    }

    /// Makes the lab's kernel trace the positions of vCPUs that shut down (a triple fault), and the
    /// exceptions that were injected: KVM resets a vCPU that has shut down, so its registers no
    /// longer show it. No effect natively.
    pub fn note_shutdowns(&self) -> Result<()> {
        // 0x7f: SVM's exit code of a shutdown.
        const SCRIPT: &str = "cd /sys/kernel/tracing/events/kvm && echo 'exit_reason == 0x7f' \
             >kvm_exit/filter && \
                              echo 1 >kvm_exit/enable && echo 1 >kvm_inj_exception/enable";
        if let Self::Lab(lab) = self {
            let noted = lab.exec("/bin/sh", ["-c", SCRIPT])?;
            ensure!(noted.success(), "tracing: {}", noted.stderr_text());
        }
        Ok(())
    }

    /// Returns the trace, for a case that has failed. Empty natively.
    pub fn noted(&self) -> Noted {
        // All counters of memory migration and reclaim that are not 0.
        const SCRIPT: &str = "echo \"--- vCPUs' shutdowns and exceptions\" && tail -n 40 \
             /sys/kernel/tracing/trace && \
                              echo '--- memory moved' && \
                              grep -E '^(pgmigrate|compact|thp|pgsteal)[a-z_]* [^0]' /proc/vmstat";
        let Self::Lab(lab) = self else {
            return Noted::default();
        };
        match lab.exec("/bin/sh", ["-c", SCRIPT]) {
            Ok(said) => Noted::of(said.stdout_text()),
            Err(error) => Noted {
                suspicion: matches!(error, LabError::Died { .. })
                    .then_some("the emulated host ended"),
                text: format!("--- no trace: {error}"),
            },
        }
    }

    /// Powers the lab off, or removes the files.
    pub fn shutdown(self) -> Result<()> {
        match self {
            Self::Lab(lab) => Ok(lab.shutdown()?),
            Self::Native(host) => fs::remove_dir_all(&host.dir)
                .with_context(|| format!("removing {}", host.dir.display())),
        }
    }
}

/// Trace of a lab's kernel for a case that failed.
#[derive(Debug, Default)]
pub struct Noted {
    /// vCPUs that shut down, exceptions injected, memory moved, under headings of their own.
    pub text: String,
    /// Fault of the emulator that may have caused the case's failure: see "What QEMU gets wrong" in
    /// the lab's README.
    pub suspicion: Option<&'static str>,
}

impl Noted {
    fn of(text: String) -> Self {
        let is_shutdown = text.contains("reason shutdown");
        Self {
            suspicion: is_shutdown.then_some("a vCPU shut down (a triple fault)"),
            text,
        }
    }
}

/// A program running on a [`Host`].
pub struct Program<'a> {
    running: Running<'a>,
    limit: Duration,
}

enum Running<'a> {
    Lab(lab::Running<'a>),
    Native(NativeProgram),
}

impl Program<'_> {
    /// Waits until its standard output contains `text`.
    ///
    /// # Errors
    /// It ended before that, or ran out of time; with the end of its output.
    pub fn wait_for(&mut self, text: &str) -> Result<()> {
        self.wait_until(self.limit, |so_far| so_far.contains(text))
            .with_context(|| format!("waiting for {text:?}"))
    }

    /// Waits for a whole line of its standard output that contains `text`. Returns the line from
    /// there to its end.
    ///
    /// # Errors
    /// As [`wait_for`](Self::wait_for).
    pub fn wait_for_line(&mut self, text: &str) -> Result<String> {
        let find = |so_far: &str| {
            let rest = &so_far[so_far.find(text)?..];
            Some(rest[..rest.find('\n')?].trim_end().to_owned())
        };
        self.wait_until(self.limit, |so_far| find(so_far).is_some())
            .with_context(|| format!("waiting for a line with {text:?}"))?;
        find(&self.so_far()).context("what it wrote stays")
    }

    /// Returns whether its standard output has `text` within `time`.
    ///
    /// # Errors
    /// It ended before that.
    pub fn writes_within(&mut self, time: Duration, text: &str) -> Result<bool> {
        match self.wait_until(time, |so_far| so_far.contains(text)) {
            Ok(()) => Ok(true),
            Err(error) => match error.downcast_ref() {
                Some(LabError::Timeout { .. }) => Ok(false),
                _ => Err(error),
            },
        }
    }

    /// Waits until `is_there` is true of its output; [`LabError::Timeout`] after `limit`.
    fn wait_until(&mut self, limit: Duration, is_there: impl Fn(&str) -> bool) -> Result<()> {
        match &mut self.running {
            Running::Lab(program) => {
                Ok(program.wait_until(limit, |so_far| is_there(&so_far.stdout_text()))?)
            }
            Running::Native(program) => program.wait_until(limit, is_there),
        }
    }

    /// Returns its output so far.
    pub fn so_far(&self) -> String {
        match &self.running {
            Running::Lab(program) => program.so_far().stdout_text(),
            Running::Native(program) => program.so_far(),
        }
    }

    /// Writes to its standard input: types on the guest's console.
    pub fn type_in(&mut self, text: &str) -> Result<()> {
        match &mut self.running {
            Running::Lab(program) => Ok(program.write_stdin(text.as_bytes())?),
            Running::Native(program) => program.type_in(text),
        }
    }

    /// Stops it (SIGSTOP): its vCPUs and its sidecore take no more CPU time.
    pub fn pause(&self) -> Result<()> {
        self.signal(libc::SIGSTOP)
    }

    /// Resumes it (SIGCONT).
    pub fn resume(&self) -> Result<()> {
        self.signal(libc::SIGCONT)
    }

    /// Sends it SIGTERM. The lab's `timeout` has become the program itself.
    pub fn terminate(&self) -> Result<()> {
        match &self.running {
            Running::Lab(program) => Ok(program.signal(libc::SIGTERM)?),
            Running::Native(program) => program.terminate(),
        }
    }

    /// Sends it, and `timeout` above it, a signal.
    pub fn signal(&self, signal: i32) -> Result<()> {
        match &self.running {
            Running::Lab(program) => Ok(program.signal(signal)?),
            Running::Native(program) => program.signal(signal),
        }
    }

    /// Sets the time within which it must end, or print an awaited text, from now on.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Waits for its end.
    pub fn wait(self) -> Result<Output> {
        match self.running {
            Running::Lab(program) => {
                program.close_stdin()?;
                Ok(program.wait(self.limit, |_, _| {})?)
            }
            Running::Native(program) => program.wait(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vcpu_that_shut_down_is_suspected_and_an_exception_is_not() {
        let line = "vcpu3-154 [000] 25.431560: kvm_exit: vcpu 3 reason shutdown rip \
             0xffffffffb0873916 info1 0x0";
        assert!(Noted::of(line.into()).suspicion.is_some());
        let line = "vcpu0-151 [001] 12.100000: kvm_inj_exception: #GP (0x0)";
        assert!(Noted::of(line.into()).suspicion.is_none());
    }
}
