//! Configuration of a lab, and the QEMU command line that follows from it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::agent::PORT;
use crate::guest_image::COMMAND_LINE_MAX;
use crate::guest_module::ModuleSources;
use crate::packages::Needs;
use crate::{LabError, guest_module};

/// Accelerator. Its cache of translated code has the largest size, MiB, so that it never fills up
/// while guests run: an emulated processor that stops the others to empty it may make them take an
/// interrupt twice (see the README, «What QEMU gets wrong»). A guest adds some 70 MiB; unused parts
/// of the cache take no memory.
const TCG: &str = "tcg,tb-size=2047";

/// Configuration of a lab.
#[derive(Debug, Clone)]
pub struct LabConfig {
    /// Requirements for QEMU and the kernels.
    pub needs: Needs,
    /// Memory of the emulated host, MiB, 512 to 65,536.
    pub memory_mib: u32,
    /// Number of its processors, 1 to 16. With three or more the last is kept free of other work,
    /// for a sidecore, and the last two take no timer ticks while they run a single thread.
    pub cpus: u32,
    /// Whether they take turns in one thread instead of having one each. Less runs in parallel
    /// then, but otherwise QEMU is not correct for a guest whose pages are taken away while it runs
    /// (see the README, «What QEMU gets wrong»). Only if QEMU delivers interrupts once.
    pub one_thread: bool,
    /// Program `exitless` to run inside; `None` if only other programs are needed.
    pub exitless: Option<PathBuf>,
    /// Program `exitless-lab` beside it.
    pub exitless_lab: Option<PathBuf>,
    /// Sources of a kernel module: it is [built](crate::guest_module::build()) for the guests'
    /// kernel, and is in their image as the driver of a virtio-iommu.
    pub guest_module: Option<ModuleSources>,
    /// More files to include: path here, path inside. Programs bring the libraries they link to.
    /// All of them are in the memory of the emulated host.
    pub files: Vec<(PathBuf, String)>,
    /// Files and block devices that are its disks, `/dev/vda` and on: attached, not copied; writes
    /// go to the file here. Images are raw, or qcow2 by their first bytes.
    pub disks: Vec<PathBuf>,
    /// More arguments for QEMU (devices to assign, for example).
    pub qemu_args: Vec<String>,
    /// More options for the emulated host's kernel command line.
    pub kernel_options: String,
    /// Time limit of the start.
    pub start_limit: Duration,
    /// Whether to show the emulated host's console on standard error.
    pub verbose: bool,
}

impl Default for LabConfig {
    fn default() -> Self {
        Self {
            needs: Needs::default(),
            memory_mib: 2048,
            cpus: 3,
            one_thread: false,
            exitless: None,
            exitless_lab: None,
            guest_module: None,
            files: Vec::new(),
            disks: Vec::new(),
            qemu_args: Vec::new(),
            kernel_options: String::new(),
            start_limit: Duration::from_secs(90),
            verbose: false,
        }
    }
}

impl LabConfig {
    /// Sets the `exitless` program to run inside.
    #[must_use]
    pub fn with_exitless(mut self, program: impl Into<PathBuf>) -> Self {
        self.exitless = Some(program.into());
        self
    }

    /// Sets the `exitless-lab` program to run inside.
    #[must_use]
    pub fn with_exitless_lab(mut self, program: impl Into<PathBuf>) -> Self {
        self.exitless_lab = Some(program.into());
        self
    }

    /// Includes a file or program.
    #[must_use]
    pub fn with_file(mut self, host: impl Into<PathBuf>, inside: impl Into<String>) -> Self {
        self.files.push((host.into(), inside.into()));
        self
    }

    /// Checks a user's configuration.
    pub(crate) fn check(&self) -> Result<(), LabError> {
        if !(512..=65_536).contains(&self.memory_mib) {
            let given = self.memory_mib;
            return Err(LabError::Config(format!(
                "memory of {given} MiB is outside 512 to 65536"
            )));
        }
        if !(1..=16).contains(&self.cpus) {
            return Err(LabError::Config(format!(
                "{} CPUs are outside 1 to 16",
                self.cpus
            )));
        }
        for path in self
            .files
            .iter()
            .map(|(host, _)| host)
            .chain(&self.exitless)
            .chain(&self.exitless_lab)
        {
            if !path.is_file() {
                return Err(LabError::Config(format!(
                    "no such file: {}",
                    path.display()
                )));
            }
        }
        if let Some(sources) = &self.guest_module {
            guest_module::check(sources)?;
        }
        for path in &self.disks {
            fs::File::open(path).map_err(LabError::host("open", path))?;
        }
        // The kernel uses the part that fits before a zero byte, and silently drops the rest.
        let line = self.command_line();
        if line.len() >= COMMAND_LINE_MAX || line.contains(['\0', '\n']) {
            return Err(LabError::Config(format!(
                "the kernel command line has to be one line of less than {COMMAND_LINE_MAX} bytes, \
                 and has {}",
                line.len()
            )));
        }
        self.check_room()
    }

    /// Checks that the files fit: they are in a tmpfs of at most half of the memory, beside
    /// programs, kernels and modules.
    fn check_room(&self) -> Result<(), LabError> {
        const OWN_MIB: u64 = 192;
        let len = |path: &PathBuf| fs::metadata(path).map_or(0, |data| data.len());
        let files: u64 = self.files.iter().map(|(host, _)| len(host)).sum();
        let needed = 2 * (files.div_ceil(1 << 20) + OWN_MIB);
        if files == 0 || needed <= u64::from(self.memory_mib) {
            return Ok(());
        }
        Err(LabError::Config(format!(
            "files of {} MiB do not fit into a lab with {} MiB of memory: it needs {} MiB \
             (--memory); a disk image \
             need not be copied, it can be attached (--disk)",
            files >> 20,
            self.memory_mib,
            needed.next_multiple_of(256)
        )))
    }

    /// Returns the kernel command line of the emulated host.
    pub(crate) fn command_line(&self) -> String {
        // quiet: the console is a serial line, and slow. tsc=reliable: all emulated processors read
        // one clock; without it the kernel falls back to a slow one and keeps every tick.
        // cryptomgr.notests: a second and a half of cipher tests. nowatchdog: an emulated processor
        // may be off its host for seconds.
        let mut line = String::from(
            "console=ttyS0 quiet panic=-1 oops=panic mitigations=off tsc=reliable nowatchdog \
             rcupdate.rcu_cpu_stall_suppress=1 cryptomgr.notests",
        );
        if self.cpus >= 3 {
            let last = self.cpus - 1;
            let tickless = format!("{}-{last}", last - 1);
            line.push_str(&format!(
                " isolcpus={last} nohz_full={tickless} rcu_nocbs={tickless}"
            ));
        }
        if !self.kernel_options.is_empty() {
            line.push(' ');
            line.push_str(&self.kernel_options);
        }
        line
    }

    /// Returns QEMU's arguments; `scratch` holds the initramfs and the two sockets. Without
    /// `interrupts_once` each processor has a thread even if one is asked for: taking turns,
    /// processors are asked to leave their loops so often that hardly a guest would survive.
    pub(crate) fn qemu_args(
        &self,
        kernel: &Path,
        scratch: &Scratch,
        interrupts_once: bool,
    ) -> Vec<OsString> {
        let mut args: Vec<OsString> = Vec::new();
        let mut add = |items: &[&str]| args.extend(items.iter().map(OsString::from));
        // AMD's virtualization with nested paging is part of `max`; Intel's cannot be emulated.
        add(&["-machine", "q35", "-cpu", "max"]);
        let threads = match self.one_thread && interrupts_once {
            true => "single",
            false => "multi",
        };
        add(&["-accel", &format!("{TCG},thread={threads}")]);
        add(&[
            "-smp",
            &processors(self.cpus),
            "-m",
            &self.memory_mib.to_string(),
        ]);
        add(&[
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ]);
        add(&["-serial", "stdio", "-device", "virtio-serial-pci"]);
        add(&[
            "-device",
            &format!("virtserialport,chardev=control,name={PORT}"),
        ]);
        add(&["-device", "virtconsole,chardev=tty"]);
        add(&["-append", &self.command_line()]);
        for (id, path) in [("control", scratch.control()), ("tty", scratch.tty())] {
            args.push("-chardev".into());
            args.push(format!("socket,id={id},path={}", path.display()).into());
        }
        args.extend([
            "-kernel".into(),
            kernel.into(),
            "-initrd".into(),
            scratch.initrd().into(),
        ]);
        for (index, path) in self.disks.iter().enumerate() {
            let id = format!("lab-disk{index}");
            args.extend(["-drive".into(), drive(path, &id)]);
            args.extend([
                "-device".into(),
                format!("virtio-blk-pci,drive={id}").into(),
            ]);
        }
        args.extend(self.qemu_args.iter().map(OsString::from));
        args
    }
}

/// Returns the value of `-drive` for a disk.
fn drive(path: &Path, id: &str) -> OsString {
    let mut magic = [0; 4];
    let is_qcow2 = fs::File::open(path)
        .and_then(|mut file| file.read_exact(&mut magic))
        .is_ok_and(|()| magic == *b"QFI\xfb");
    let format = if is_qcow2 { "qcow2" } else { "raw" };
    let mut text = OsString::from(format!(
        "if=none,id={id},format={format},discard=unmap,file="
    ));
    text.push(in_option(path));
    text
}

/// Quotes a text inside one of QEMU's options, where a comma ends an option unless it is doubled.
#[must_use]
pub fn in_option(text: impl AsRef<OsStr>) -> OsString {
    let mut doubled = Vec::new();
    for byte in text.as_ref().as_bytes() {
        doubled.extend(std::iter::repeat_n(*byte, 1 + usize::from(*byte == b',')));
    }
    OsString::from_vec(doubled)
}

/// Files that QEMU needs while it starts.
#[derive(Debug)]
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn initrd(&self) -> PathBuf {
        self.0.join("host.img")
    }
    pub(crate) fn control(&self) -> PathBuf {
        self.0.join("control")
    }
    pub(crate) fn tty(&self) -> PathBuf {
        self.0.join("tty")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // If it stays, it only wastes space.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the value of `-smp` for so many processors. The machine always has room for more than
/// one: for a single processor QEMU's TCG leaves out the fences of locked instructions, and Linux's
/// barrier between its avail index and a device's event index is one of those (x86 `smp_mb()`,
/// virtio 1.2 §2.7.10).
fn processors(count: u32) -> String {
    format!("{count},maxcpus={}", count.max(2))
}

#[cfg(test)]
mod tests;
