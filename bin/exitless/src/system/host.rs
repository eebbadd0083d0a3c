//! Where a guest runs: this machine's KVM if it is complete, else the lab.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::{Lab, LabConfig, Output};

use super::native::NativeProgram;

/// A machine that can run `exitless run`.
pub enum Host {
    /// The emulated host.
    Lab(Box<Lab>),
    /// This machine; files live in a directory of their own.
    Native(NativeHost),
}

/// This machine, with the images a guest needs.
pub struct NativeHost {
    exitless: PathBuf,
    dir: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
}

/// A program that outlives its limit is killed by then.
const KILLED_AFTER: Duration = Duration::from_secs(30);

/// Which CPUs a run gets, as the `--pin` list: the sidecore's first, then one for each vCPU. The lab keeps CPU 2
/// for the sidecore and CPU 1 free of ticks. All vCPUs share CPU 1: under QEMU 7.2's emulation of SVM, vCPUs
/// that shared CPU 0 with the emulated host's own work ended in a triple fault in 4 of 6 boots with 4 vCPUs;
/// on CPU 1, none of 7 did.
const LAB_PIN: &str = "2,1,1,1,1";

impl Host {
    /// The best there is: this machine where KVM can boot a kernel, the lab elsewhere.
    pub fn start() -> Result<Self> {
        if crate::vm::kvm::open().is_ok() {
            Self::native()
        } else {
            Self::lab()
        }
    }

    /// The same; a lab has this much memory.
    pub fn start_with_memory(mib: u32) -> Result<Self> {
        if crate::vm::kvm::open().is_ok() {
            return Self::native();
        }
        Self::lab_with(LabConfig {
            memory_mib: mib,
            ..LabConfig::default()
        })
    }

    /// The lab, whatever this machine offers.
    pub fn lab() -> Result<Self> {
        Self::lab_with(LabConfig::default())
    }

    fn lab_with(config: LabConfig) -> Result<Self> {
        let exitless = std::env::current_exe().context("finding this program")?;
        let lab = Lab::start(&config.with_exitless(exitless))?;
        Ok(Self::Lab(Box::new(lab)))
    }

    fn native() -> Result<Self> {
        let packages = lab::packages::Packages::get(&|line| eprintln!("{line}"))?;
        let dir = lab::packages::cache_dir().join(format!("native-{}", std::process::id()));
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        let initrd = dir.join("guest.img");
        fs::write(&initrd, lab::guest_image::build(&packages)?.to_bytes())
            .with_context(|| format!("writing {}", initrd.display()))?;
        Ok(Self::Native(NativeHost {
            exitless: std::env::current_exe().context("finding this program")?,
            kernel: packages.vmlinuz(),
            initrd,
            dir,
        }))
    }

    /// What figures measured here are labelled with.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Lab(_) => "lab: emulated AMD host (QEMU TCG, kvm-amd); counts only, no times",
            Self::Native(_) => "this machine's KVM",
        }
    }

    /// Path of the stock kernel, where `run` sees it.
    pub fn kernel(&self) -> String {
        match self {
            Self::Lab(_) => "/boot/vmlinuz".into(),
            Self::Native(host) => host.kernel.display().to_string(),
        }
    }

    /// Path of the guest's initramfs.
    pub fn initrd(&self) -> String {
        match self {
            Self::Lab(_) => "/boot/guest.img".into(),
            Self::Native(host) => host.initrd.display().to_string(),
        }
    }

    /// CPUs for sidecore and vCPUs, where they are known to be free.
    pub fn pin(&self) -> Option<&'static str> {
        match self {
            Self::Lab(_) => Some(LAB_PIN),
            Self::Native(_) => None,
        }
    }

    /// Path of a file of this name.
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

    /// Reads a file.
    pub fn get(&self, name: &str) -> Result<Vec<u8>> {
        match self {
            Self::Lab(lab) => Ok(lab.pull_bytes(&self.path(name))?),
            Self::Native(_) => {
                fs::read(self.path(name)).with_context(|| format!("reading {}", self.path(name)))
            }
        }
    }

    /// Release of the kernel whose KVM runs the guests.
    pub fn kernel_release(&self) -> Result<String> {
        match self {
            Self::Lab(lab) => {
                let bytes = lab.pull_bytes("/proc/sys/kernel/osrelease")?;
                Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
            }
            Self::Native(_) => Ok(crate::ledger::conditions::kernel_release()),
        }
    }

    /// A TAP interface whose host side has the address `ip`, in the lab; none natively, where it is the user's to
    /// make.
    pub fn tap(&self, ip: &str) -> Result<Option<&'static str>> {
        const TAP: &str = "tap0";
        let Self::Lab(lab) = self else {
            return Ok(None);
        };
        let script = format!(
            "[ -e /sys/class/net/{TAP} ] || tunctl -t {TAP} && ip link set {TAP} up && \
             ip addr replace {ip}/24 dev {TAP}"
        );
        let made = lab.exec("/bin/sh", ["-c", &script])?;
        ensure!(made.success(), "making {TAP}: {}", made.stderr_text());
        Ok(Some(TAP))
    }

    /// Waits until sockets of these names are there. A daemon makes them when it is ready.
    pub fn wait_for_sockets(&self, names: &[String]) -> Result<()> {
        // 20 s at a tenth each.
        let paths: Vec<String> = names.iter().map(|name| self.path(name)).collect();
        let script = format!(
            "for path in {}; do n=0; until [ -S $path ]; do n=$((n+1)); [ $n -le 200 ] || exit 1; sleep 0.1; done; done",
            paths.join(" ")
        );
        let is_there = match self {
            Self::Lab(lab) => lab.exec("/bin/sh", ["-c", &script])?.success(),
            Self::Native(_) => std::process::Command::new("/bin/sh")
                .args(["-c", &script])
                .status()
                .context("starting sh")?
                .success(),
        };
        ensure!(is_there, "the sockets {} did not appear", names.join(", "));
        Ok(())
    }

    /// Operations that the kernel has been given by every `exitless` of this host and has not finished: submitted to
    /// their io_urings and not completed (proc(5), fdinfo).
    pub fn operations_in_kernel(&self) -> Result<u32> {
        let script = "for pid in $(pidof exitless); do cat /proc/$pid/fdinfo/*; done 2>/dev/null";
        let text = match self {
            Self::Lab(lab) => lab.exec("/bin/sh", ["-c", script])?.stdout_text(),
            Self::Native(_) => {
                let out = std::process::Command::new("/bin/sh")
                    .args(["-c", script])
                    .output();
                String::from_utf8_lossy(&out.context("starting sh")?.stdout).into_owned()
            }
        };
        Ok(operations_of(&text))
    }

    /// Starts `exitless ARGS`. After `limit` it is asked to say where its vCPUs are and to end (SIGQUIT:
    /// status 131), and killed 15 s later.
    pub fn spawn(&self, args: &[String], limit: Duration) -> Result<Program<'_>> {
        let seconds = limit.as_secs().to_string();
        let guard = ["-s", "QUIT", "-k", "15", &seconds].map(str::to_owned);
        let running = match self {
            Self::Lab(lab) => Running::Lab(
                lab.command("timeout")
                    .args(guard)
                    .args(["exitless".to_owned()])
                    .args(args.iter().cloned())
                    .spawn()?,
            ),
            Self::Native(host) => {
                Running::Native(NativeProgram::start(&guard, &host.exitless, args)?)
            }
        };
        Ok(Program {
            running,
            limit: limit + KILLED_AFTER,
        })
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

/// Operations in flight of all io_urings in the text of fdinfo files: each entry taken from a submission queue gives
/// one entry of the completion queue, whose counts run freely.
fn operations_of(fdinfo: &str) -> u32 {
    let count = |key: &str| {
        let values = fdinfo.lines().filter_map(|line| line.strip_prefix(key));
        values
            .filter_map(|value| value.trim().parse::<u32>().ok())
            .fold(0, u32::wrapping_add)
    };
    count("SqHead:").wrapping_sub(count("CqTail:"))
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
    /// It ended before that, or ran out of time; with its last words.
    pub fn wait_for(&mut self, text: &str) -> Result<()> {
        let limit = self.limit;
        let is_there = self.writes_within(limit, text)?;
        ensure!(is_there, "{}", self.lacks(text));
        Ok(())
    }

    /// Waits for a whole line of its standard output that contains `text`; from there to its end.
    ///
    /// # Errors
    /// As [`wait_for`](Self::wait_for).
    pub fn wait_for_line(&mut self, text: &str) -> Result<String> {
        let limit = self.limit;
        let find = |so_far: &str| {
            let rest = &so_far[so_far.find(text)?..];
            Some(rest[..rest.find('\n')?].trim_end().to_owned())
        };
        let is_there = self.wait_until(limit, |so_far| find(so_far).is_some())?;
        ensure!(is_there, "{}", self.lacks(text));
        find(&self.so_far()).context("what it wrote stays")
    }

    fn lacks(&self, text: &str) -> String {
        let (seconds, so_far) = (self.limit.as_secs(), self.so_far());
        format!("it did not write {text:?} within {seconds} s\n{so_far}")
    }

    /// Whether its standard output has `text` within `time`.
    ///
    /// # Errors
    /// It ended without.
    pub fn writes_within(&mut self, time: Duration, text: &str) -> Result<bool> {
        self.wait_until(time, |so_far| so_far.contains(text))
    }

    fn wait_until(&mut self, limit: Duration, is_there: impl Fn(&str) -> bool) -> Result<bool> {
        match &mut self.running {
            Running::Lab(program) => {
                match program.wait_until(limit, |so_far| is_there(&so_far.stdout_text())) {
                    Err(lab::LabError::Timeout { .. }) => Ok(false),
                    other => Ok(other.map(|()| true)?),
                }
            }
            Running::Native(program) => program.wait_until(limit, is_there),
        }
    }

    /// What it has written so far.
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

    /// Lets it go on.
    pub fn resume(&self) -> Result<()> {
        self.signal(libc::SIGCONT)
    }

    /// Sends it, and `timeout` above it, a signal.
    pub fn signal(&self, signal: i32) -> Result<()> {
        match &self.running {
            Running::Lab(program) => Ok(program.signal(signal)?),
            Running::Native(program) => program.signal(signal),
        }
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
    fn operations_in_flight_are_those_taken_and_not_completed() {
        let ring = |taken: u32, completed: u32| {
            format!(
                "pos:\t0\nflags:\t02000002\nSqMask:\t0xff\nSqHead:\t{taken}\nSqTail:\t{taken}\n\
                 CachedSqHead:\t{taken}\nCqMask:\t0x1ff\nCqHead:\t1\nCqTail:\t{completed}\n\
                 CachedCqTail:\t{completed}\nSQEs:\t0\n"
            )
        };
        let other = "pos:\t0\neventfd-count:                0\n";
        assert_eq!(operations_of(other), 0);
        assert_eq!(operations_of(&(ring(7, 4) + other + &ring(9, 9))), 3);
        assert_eq!(operations_of(&ring(1, u32::MAX)), 2);
    }
}
