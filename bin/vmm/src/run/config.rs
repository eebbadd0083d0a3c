//! The checked request from which the machine is built.
//!
//! Nothing here starts anything; files are opened and kept open, so that what was checked is what
//! is used.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};

use super::args::{DmaArg, IdleArg, IommuArg, IommuModeArg, MapperArg, RebootArg, RunArgs};
use super::balloon::BalloonSpec;
use super::device::{self, DeviceConfig};
use super::disks::{self, Disk};
use super::hints::HintsConfig;
use super::net::{self, NetBackend, NetConfig};
use super::ram::{MIN_MEMORY, RamConfig};
use super::swapped::SwapConfig;
use crate::composition::{Composition, MachineOutline};
use crate::locked_memory::LockedMemory;
use crate::values::{counted, size};
use crate::{lacks, output, ports};
use platform::boot::{self, KernelKind};

/// Most vCPUs.
const MAX_CPUS: usize = 16;
/// Most sidecores: one VM's devices cannot feed more.
const MAX_SIDECORES: usize = 16;

/// Longest time a guest may be given to power off: a day.
const MAX_STOP_TIMEOUT: u64 = 86_400;

/// Place of the serial console.
#[derive(Debug)]
pub enum ConsoleConfig {
    /// Standard input and output.
    Stdio,
    /// Nowhere.
    None,
    /// Its output in this file.
    File(File),
}

/// Which host CPUs threads are pinned to.
#[derive(Debug, Default)]
pub struct PinPlan {
    cpus: Vec<usize>,
    sidecores: usize,
}

impl PinPlan {
    /// Returns the host CPU of a sidecore.
    pub fn sidecore(&self, index: usize) -> Option<usize> {
        self.cpus[..self.sidecores.min(self.cpus.len())]
            .get(index)
            .copied()
    }

    /// Returns the host CPU of a vCPU.
    pub fn vcpu(&self, index: usize) -> Option<usize> {
        self.cpus.get(self.sidecores + index).copied()
    }
}

/// A checked request.
#[derive(Debug)]
pub struct Config {
    /// The kernel, open, and what it is.
    pub kernel: (File, KernelKind),
    /// The initial RAM disk, open.
    pub initrd: Option<File>,
    /// Kernel command line.
    pub cmdline: String,
    /// RAM.
    pub ram: RamConfig,
    /// Only some of it is in memory.
    pub swap: Option<SwapConfig>,
    /// The guest may be asked to give up some of it.
    pub balloon: Option<BalloonSpec>,
    /// vCPUs, 1 to 16.
    pub cpus: u8,
    /// Disks, on different files and sockets.
    pub disks: Vec<Disk>,
    /// Network interfaces.
    pub nets: Vec<NetConfig>,
    /// Physical devices, with different addresses.
    pub devices: Vec<DeviceConfig>,
    /// There is an entropy device.
    pub rng: bool,
    /// The VT-d unit's register mode; `None` without an IOMMU.
    pub iommu: Remapping,
    /// Effects of the guest's MAP requests besides the mappings.
    pub hints: HintsConfig,
    /// Sidecores, 1 to 16.
    pub sidecores: usize,
    /// Host CPUs.
    pub pin: PinPlan,
    /// Policy of an idle sidecore.
    pub idle: IdleArg,
    /// Software KVM will do.
    pub any_kvm: bool,
    /// Pages of guest memory come and go one by one.
    pub pages_move: bool,
    /// The guest is offered no more of KVM's paravirtual features than one whose pages move.
    pub hides_paravirtual_features: bool,
    /// Where device data goes.
    pub dma: DmaArg,
    /// Longest time that an invalidation waits for a device.
    pub drain_limit: Duration,
    /// Longest time without a sign of life of a sidecore.
    pub watchdog: Duration,
    /// Time that the guest has to power off when a signal asks for it; zero: it is not asked.
    pub stop_timeout: Duration,
    /// Effect of a reset that the guest asks for.
    pub on_reboot: RebootArg,
    /// Number of times that the machine has been started again.
    pub restarts: u64,
    /// It is only built, and not run.
    pub is_check: bool,
    /// Where the exit ledger goes.
    pub ledger: Option<PathBuf>,
    /// It is not printed at the end.
    pub is_quiet: bool,
    /// The console.
    pub console: ConsoleConfig,
}

impl Config {
    /// Checks everything that can be checked without starting anything, for a machine of this
    /// composition that has been started again so often.
    pub fn check(
        args: &RunArgs,
        restarts: u64,
        composition: &dyn Composition,
    ) -> anyhow::Result<Self> {
        let kernel = kernel(&args.kernel)?;
        let initrd = args.initrd.as_deref().map(initrd).transpose()?;
        let mut ram = RamConfig::check(&args.memory)?;
        let memory = ram.bytes;
        if !(1..=MAX_CPUS).contains(&args.cpus) {
            bail!("--cpus is 1 to {MAX_CPUS}, not {}", args.cpus);
        }
        if !(1..=MAX_SIDECORES).contains(&args.sidecores) {
            bail!(
                "--sidecores is 1 to {MAX_SIDECORES}, not {}",
                args.sidecores
            );
        }
        if !(1..=600_000).contains(&args.drain_limit) {
            bail!("--drain-limit is 1 to 600000 ms, not {}", args.drain_limit);
        }
        if !(1..=3600).contains(&args.watchdog) {
            bail!("--watchdog is 1 to 3600 s, not {}", args.watchdog);
        }
        if args.stop_timeout > MAX_STOP_TIMEOUT {
            bail!(
                "--stop-timeout is 0 to {MAX_STOP_TIMEOUT} s, not {}",
                args.stop_timeout
            );
        }
        let pin = pin(args)?;
        let disks = disks::check(&args.disk)?;
        let nets = (0..)
            .zip(&args.net)
            .map(|(index, text)| NetConfig::check(text, index))
            .collect::<Result<Vec<_>, _>>()?;
        let balloon = BalloonSpec::check(args, memory, MIN_MEMORY)?;
        // The host bridge has slot 0; slot 31 stays free for the I/O APIC's source-id.
        let others = usize::from(balloon.is_some()) + usize::from(args.rng) + args.device.len();
        let functions = disks.len() + nets.len() + others;
        if functions > 30 {
            bail!("{functions} devices, but the PCI bus has 30 free slots");
        }
        let devices = device::check(args, ram, &LockedMemory::probe())?;
        if !devices.is_empty() {
            ram.forbid_huge_pages("--device")?;
        }
        if let Some(path) = &args.ledger {
            output::check("--ledger", path)?;
        }
        let swap = SwapConfig::check(args, memory, &disks)?;
        if swap.is_some() {
            ram.shared_for("--resident")?;
        }
        if disks.iter().any(|disk| matches!(disk, Disk::Remote(_))) {
            ram.shared_for("--disk socket=…")?;
        }
        net::check_sockets(&nets, &disks)?;
        let captures = nets.iter().filter_map(|net| net.capture.as_ref());
        ports::check_captures(captures).context("--net")?;
        check_remote_beside_devices(args, &disks, &nets)?;
        check_paravirtual(args, &disks, &nets)?;
        if swap.is_some()
            && let Some(option) = nets.iter().find_map(NetConfig::remote)
        {
            bail!(
                "{option} and --resident exclude each other: its server has all of memory in use"
            );
        }
        if nets
            .iter()
            .any(|net| matches!(net.backend, NetBackend::Socket { .. }))
        {
            ram.shared_for("--net socket=…")?;
        }
        composition.check_machine(&MachineOutline {
            disks_in_files: &disks::in_files(&disks),
            is_memory_shared: ram.is_shared,
            has_pager: swap.is_some(),
            has_mapper: args.mapper == MapperArg::On,
            has_balloon: balloon.is_some(),
            has_devices: !devices.is_empty(),
            has_virtio_iommu: args.iommu == IommuArg::Virtio,
        })?;
        let pages_move = swap.is_some() || composition.moves_pages();
        let hints = HintsConfig::check(args, pages_move)?;
        // What may have to wait comes last.
        let disks = disks::lock(disks)?;
        Ok(Self {
            kernel,
            initrd,
            cmdline: cmdline(&args.cmdline)?,
            ram,
            pages_move,
            hides_paravirtual_features: pages_move || composition.hides_paravirtual_features(),
            swap,
            balloon,
            cpus: args.cpus as u8,
            disks,
            nets,
            devices,
            rng: args.rng,
            iommu: Remapping::of(args.iommu, args.iommu_mode)?,
            hints,
            sidecores: args.sidecores,
            pin,
            idle: args.idle,
            any_kvm: args.any_kvm,
            dma: args.dma,
            drain_limit: Duration::from_millis(args.drain_limit),
            watchdog: Duration::from_secs(args.watchdog),
            stop_timeout: Duration::from_secs(args.stop_timeout),
            on_reboot: args.on_reboot,
            restarts,
            is_check: args.check,
            ledger: args.ledger.clone(),
            is_quiet: args.quiet,
            console: match args.check {
                true => try_console(&args.console)?,
                false => console(&args.console, restarts > 0)?,
            },
        })
    }
}

/// Kind of IOMMU between the guest's devices and its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remapping {
    /// Nothing.
    None,
    /// Emulated VT-d units, whose registers the guest reaches so.
    Vtd(IommuMode),
    /// A paravirtual unit, whose requests are taken so.
    Virtio(RingMode),
}

/// Access of the guest to the registers of a VT-d unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IommuMode {
    /// Every access exits to the sidecore: the reference.
    Trap,
    /// Reads do not exit; writes are logged inside the kernel: safe for any guest.
    Logged,
    /// Plain memory: nothing exits.
    Shared,
}

/// Access of the guest to a paravirtual unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingMode {
    /// A sidecore polls its ring.
    Polled,
    /// Every request is kicked, and every kick exits: the reference.
    Trap,
}

impl Remapping {
    /// Returns the kind that the flags ask for.
    ///
    /// # Errors
    /// The mode is the other IOMMU's.
    pub fn of(iommu: IommuArg, mode: Option<IommuModeArg>) -> anyhow::Result<Self> {
        Ok(match (iommu, mode) {
            (IommuArg::None, _) => Self::None,
            (IommuArg::Vtd, None | Some(IommuModeArg::Logged)) => Self::Vtd(IommuMode::Logged),
            (IommuArg::Vtd, Some(IommuModeArg::Trap)) => Self::Vtd(IommuMode::Trap),
            (IommuArg::Vtd, Some(IommuModeArg::Shared)) => Self::Vtd(IommuMode::Shared),
            (IommuArg::Virtio, None | Some(IommuModeArg::Polled)) => Self::Virtio(RingMode::Polled),
            (IommuArg::Virtio, Some(IommuModeArg::Trap)) => Self::Virtio(RingMode::Trap),
            (IommuArg::Vtd, Some(IommuModeArg::Polled)) => {
                bail!("--iommu-mode polled is for --iommu virtio; VT-d has logged, shared and trap")
            }
            (IommuArg::Virtio, Some(IommuModeArg::Logged | IommuModeArg::Shared)) => {
                bail!(
                    "--iommu-mode logged and shared are for --iommu vtd; virtio has polled and trap"
                )
            }
        })
    }

    /// Returns whether there is something.
    pub fn is_there(self) -> bool {
        self != Self::None
    }

    /// Returns the way in which the guest reaches the registers of VT-d units, if it has those.
    pub fn vtd(self) -> Option<IommuMode> {
        match self {
            Self::Vtd(mode) => Some(mode),
            Self::None | Self::Virtio(_) => None,
        }
    }

    /// Returns its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Vtd(IommuMode::Trap) => "trap",
            Self::Vtd(IommuMode::Logged) => "logged",
            Self::Vtd(IommuMode::Shared) => "shared",
            Self::Virtio(RingMode::Polled) => "virtio",
            Self::Virtio(RingMode::Trap) => "virtio-trap",
        }
    }
}

/// Refuses devices that do not work with a paravirtual IOMMU yet: those whose mappings the host's
/// IOMMU or another process follows.
fn check_paravirtual(args: &RunArgs, disks: &[Disk], nets: &[NetConfig]) -> anyhow::Result<()> {
    if args.iommu != IommuArg::Virtio {
        return Ok(());
    }
    let of_devices = args
        .device
        .iter()
        .map(|device| format!("--device {device}"));
    match of_devices.chain(remote_options(disks, nets)).next() {
        Some(option) => {
            bail!("{option} does not go with --iommu virtio yet: use --iommu vtd, or --iommu none")
        }
        None => Ok(()),
    }
}

/// Returns the options by which other processes serve devices.
fn remote_options<'a>(
    disks: &'a [Disk],
    nets: &'a [NetConfig],
) -> impl Iterator<Item = String> + 'a {
    let of_disks = disks.iter().filter_map(|disk| match disk {
        Disk::Remote(disk) => Some(format!("--disk socket={}", disk.socket.display())),
        Disk::File(_) => None,
    });
    of_disks.chain(nets.iter().filter_map(NetConfig::remote))
}

/// Refuses devices that other processes serve beside assigned ones behind the emulated IOMMU.
fn check_remote_beside_devices(
    args: &RunArgs,
    disks: &[Disk],
    nets: &[NetConfig],
) -> anyhow::Result<()> {
    if args.device.is_empty() || args.iommu == IommuArg::None {
        return Ok(());
    }
    match remote_options(disks, nets).next() {
        Some(option) => bail!(
            "{option}: whoever serves it has all of guest RAM in use, and --device behind the \
             emulated VT-d unit keeps \
             memory reclaimable, so the two do not go together yet: add --iommu none"
        ),
        None => Ok(()),
    }
}

/// Opens a regular file for reading; directories, FIFOs and empty files are refused.
fn open(what: &str, path: &Path) -> anyhow::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .with_context(|| format!("{what} {} cannot be opened", path.display()))?;
    let meta = file
        .metadata()
        .with_context(|| format!("{what} {}", path.display()))?;
    if !meta.is_file() {
        bail!("{what} {} is not a file", path.display());
    }
    if meta.len() == 0 {
        bail!("{what} {} is empty", path.display());
    }
    Ok(file)
}

fn kernel(path: &Path) -> anyhow::Result<(File, KernelKind)> {
    let mut file = open("kernel", path)?;
    let kind = boot::kernel_kind(&mut file)
        .with_context(|| format!("kernel {}", path.display()))?
        .with_context(|| {
            format!(
                "kernel {} is neither a 64-bit bzImage nor a 64-bit ELF file",
                path.display()
            )
        })?;
    Ok((file, kind))
}

/// Magic numbers of what Linux takes as an initial RAM disk: cpio (two kinds) and its compressions.
const INITRD_MAGIC: [&[u8]; 9] = [
    b"070701",
    b"070702",
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
    b"\xfd7zXZ",
    b"BZh",
    b"\x5d\x00\x00",
    b"\x89LZO",
    b"\x02\x21\x4c\x18",
];

fn initrd(path: &Path) -> anyhow::Result<File> {
    use std::os::unix::fs::FileExt;
    let file = open("initrd", path)?;
    let mut head = [0u8; 8];
    let len = file
        .read_at(&mut head, 0)
        .with_context(|| format!("initrd {} cannot be read", path.display()))?;
    if !INITRD_MAGIC
        .iter()
        .any(|magic| head[..len].starts_with(magic))
    {
        bail!(
            "initrd {} is neither a cpio archive nor a compressed one",
            path.display()
        );
    }
    Ok(file)
}

fn cmdline(text: &str) -> anyhow::Result<String> {
    // Linux's COMMAND_LINE_SIZE, with the terminator.
    if text.len() > 2047 {
        bail!(
            "--cmdline has {} characters, more than the 2047 Linux takes",
            text.len()
        );
    }
    if !text.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        bail!("--cmdline may hold printable ASCII only");
    }
    Ok(text.to_owned())
}

fn pin(args: &RunArgs) -> anyhow::Result<PinPlan> {
    let Some(text) = &args.pin else {
        return Ok(PinPlan::default());
    };
    let cpus = size::cpu_list(text).context("--pin")?;
    let threads = args.sidecores + args.cpus;
    if cpus.len() > threads {
        bail!(
            "--pin lists {} for {}",
            counted(cpus.len(), "CPU"),
            counted(threads, "thread")
        );
    }
    for cpu in &cpus {
        let tried = try_cpu(*cpu).with_context(|| format!("--pin: no thread can run on CPU {cpu}"));
        lacks::advise(
            tried,
            "without --pin threads run wherever the host lets them",
        )?;
    }
    Ok(PinPlan {
        cpus,
        sidecores: args.sidecores,
    })
}

/// Pins a short-lived thread to this CPU, which is the only sure test: isolated CPUs are in no
/// thread's mask, and yet a thread may move there.
fn try_cpu(cpu: usize) -> io::Result<()> {
    let trial = std::thread::Builder::new().spawn(move || sidecore::pin_this_thread(cpu))?;
    trial
        .join()
        .unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

/// Checks that the console's file can be had; it is neither made nor emptied.
fn try_console(text: &str) -> anyhow::Result<ConsoleConfig> {
    let path = Path::new(text);
    match text {
        "stdio" | "none" => {}
        _ if path.exists() => {
            let opened = File::options().append(true).open(path);
            opened.with_context(|| format!("console {text} cannot be written"))?;
        }
        _ => output::check("--console", path)?,
    }
    Ok(ConsoleConfig::None)
}

/// Opens the console. Its output starts a new file, and goes on in it when the machine has been
/// started again.
fn console(text: &str, goes_on: bool) -> anyhow::Result<ConsoleConfig> {
    match text {
        "stdio" => Ok(ConsoleConfig::Stdio),
        "none" => Ok(ConsoleConfig::None),
        path => File::options()
            .write(true)
            .create(true)
            .append(goes_on)
            .truncate(!goes_on)
            .open(path)
            .with_context(|| format!("console {path} cannot be written"))
            .map(ConsoleConfig::File),
    }
}
