//! The command line of `exitless run`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use sidecore::IdlePolicy;

const EXAMPLES: &str = "\
A service manager is told when the guest runs (READY=1 to NOTIFY_SOCKET: Type=notify of systemd).

Keys while the console is on a terminal: Ctrl-A x ends the machine, Ctrl-A h helps.

Examples:
  A kernel with an initramfs, and nothing else:
    exitless run --kernel vmlinuz --initrd initramfs.cpio --iommu none

  A disk and a network, behind the emulated VT-d unit (the default: registers logged, one sidecore):
    exitless run --kernel vmlinuz --initrd initrd.img --cmdline 'root=/dev/vda1 console=ttyS0' \\
        --disk path=debian.raw --net responder

  Registers in shared memory, the sidecore alone on host CPU 3, exits counted into a file:
    exitless run --kernel vmlinuz --initrd initramfs.cpio --disk path=disk.raw,queues=2 --cpus 2 \\
        --iommu-mode shared --idle poll --pin 3,0,1 --ledger ledger.json --quiet

  A disk that one core serves to several machines (start its server first: exitless serve --help):
    exitless run --kernel vmlinuz --initrd initramfs.cpio --disk socket=/tmp/disk0.sock

  The host's NVMe drive at 0000:01:00.0, bound to vfio-pci; pages are pinned while the guest has them mapped for DMA:
    exitless run --kernel vmlinuz --initrd initrd.img --cmdline 'root=/dev/nvme0n1p1 console=ttyS0' \\
        --device vfio=0000:01:00.0

  The same beside a limit of memory, with unmaps that complete before the host's:
    exitless run --kernel vmlinuz --initrd initrd.img --memory 2G --resident 800M --swap path=/var/tmp/swap0,size=2G \\
        --device vfio=0000:01:00.0,policy=deferred,window=128,age=5

  A guest that believes it has 512 MiB, of which 100 may be in memory:
    exitless run --kernel vmlinuz --initrd initrd.img --disk path=debian.raw,direct=on --memory 512M \\
        --resident 100M --swap path=/var/tmp/swap0,size=1G --resident-file /run/limit0

  On a host without vmx or svm, inside the emulated one:
    exitless-lab lab -- run --kernel /boot/vmlinuz --initrd /boot/guest.img

  Whether the same could be started here, without starting it:
    exitless run --check --kernel /boot/vmlinuz --initrd /boot/guest.img --disk path=debian.raw

Exit status:
  0  The guest powered off, or Ctrl-A x ended the machine.
  1  A crash, or a failure under way.
  2  Nothing started; one line on standard error says why.
  3  The guest asked for a reset, with --on-reboot exit.
  4  A sidecore stopped answering.
  5  Ended at once by one signal more.
  6  The guest's kernel panicked. QEMU's pvpanic tells of that, for which Linux has the module pvpanic-mmio; a panic before that \
is loaded, or without it, hangs or resets the guest as the kernel's option panic= says, and a crash kernel that is loaded does its work.
  7  The guest asked for a reset, and its machine could not be started again.
  128+n  Ended by signal n.

Signals:
  SIGTERM, SIGINT, SIGHUP  Press the guest's power button (ACPI; Linux has the module `button` for it, and systemd or acpid powers off). \
A guest that does so in time ends the run with status 0. After --stop-timeout, or by another signal, 0.2 s later or more, the machine \
ends whatever its guest is doing, as if its power were cut. That takes two seconds at most; only storage that the host holds makes it \
wait, and is named on standard error. One more signal ends it at once.
  SIGQUIT  Ends the machine without asking its guest.

Environment:
  RUST_LOG  What the log has, where --log is not given: see there.
  NOTIFY_SOCKET  Where a service manager is told that the guest runs.
  NO_COLOR  If it is set and not empty, help is not coloured.

Files:
  /dev/kvm  The host's KVM, for reading and writing.
  /dev/net/tun  With --net tap=NAME.
  /dev/vhost-net  With --net tap=NAME,vhost=on.
  /dev/vfio/vfio, /dev/vfio/N  With --device, of whose group the number is.
  /dev/userfaultfd  With --resident, and with --iommu-mode shared for a sidecore that sleeps; or the system call, where that is allowed.";

const DISK_HELP: &str = "\
A virtio disk, in a file or behind the vhost-user socket of another process; repeat for more. A list of these, without blanks:

    path=FILE               the file or block device; or socket=PATH
    format=raw|qcow2        what is in it
    readonly=on|off         on: a disk that refuses writes
    block=512|4096          bytes of a logical block
    direct=on|off           on: past the host's page cache (O_DIRECT)
    queues=N                1 to 16
    queue-size=N            entries of a ring at most, a power of two to 1024 (256)
    id=TEXT                 the serial number, at most 20 characters
    locking=on|off          off: without locks
    backing=on|off          on: a qcow2 image may have a backing file
    barriers=on|off         off: without the syncs that keep a qcow2 image's tables in order
    worker=on|off|unconfined
                            on: the device model is a process of its own, which sees the bytes of its requests alone
    on-death=restart|fail   of a worker that dies: another one goes on (restart), or the disk needs a reset
    socket=PATH             where another process serves a vhost-user block device

direct needs block=4096 on storage in blocks of 4096 bytes. The file is locked as QEMU locks it, \
one writer or any number of readers, before the machine starts; locking=off goes without, for a file system that has no locks, \
and then nothing keeps two writers apart. What is in the file is said by format, and not guessed: a guest that may write its raw disk \
may make it look like an image that names any of your files. So without format it is raw, and refused if it begins as a qcow2 image. \
With barriers=off a power cut may leave the image corrupt. \
Numbers may have K, M, G or T (powers of 1024).

With worker=on a bug in the device model reaches no memory of the guest's: this process copies what a request gives the device to read, \
and copies its answer back by the guest's mappings as they are then. An unmap never waits for the worker. It has the file, which is raw, and may \
make the system calls of its loop alone (seccomp); a host without that refuses it, unless worker=unconfined. With --resident and \
--mapper on no page stands for a block of such a disk.

The process behind a socket (exitless serve, qemu-storage-daemon, SPDK) has all of guest RAM mapped. With --iommu vtd it has to translate \
by what it is told of the guest's IOMMU, which exitless serve does; others need --iommu none. What the guest unmaps is told to it, and \
the guest's unmap waits for its answer; after three seconds without one it is cut off, and the disk needs a reset. A server that is \
not to be trusted with guest RAM cannot be kept from it by any of this. Of the other keys it has queues, queue-size and id, which is a name for the log: the serial number is the server's. If the server is \
killed and started again, the guest waits and goes on.";

const NET_HELP: &str = "\
A virtio network interface; repeat for more. One of these, and options:

    responder               answers ARP, ping and UDP echo; needs no privileges
    tap=NAME                the host's TAP interface NAME, which must be there
    switch=NAME             a switch between those of the machine's interfaces that name it
    socket=PATH             where another process serves a vhost-user network device
    ip=A.B.C.D              of the responder (10.0.2.2)
    create=on|off           on: the TAP interface is made, for as long as the machine runs
    vhost=on|off            on: the host kernel's vhost-net moves the frames of the TAP interface
    pairs=N                 of a TAP interface: pairs of queues, 1 to 64 (1); above 1 it takes one that was made with multi_queue; of a \
socket 1 to 16; with vhost=on 1
    mtu=N                   largest packet, 68 to 65535; of TAP no more than the interface's, which it is unless said otherwise; of a \
switch 1500 unless said otherwise; of a socket what the guest is told
    mac=XX:XX:XX:XX:XX:XX   the guest's station address
    queue-size=N            entries of a ring at most, a power of two to 1024 (256)
    pcap=FILE               every frame is written to this new file too, for tcpdump and Wireshark
    pcap-max=SIZE           its size at most, 4K to 1T (64M); frames behind that are not written
    pcap-replace=on|off     on: a file that is there is replaced, not refused
    id=TEXT                 of a socket, or with vhost=on: a name for the log

Over TAP and a switch the guest leaves checksums and the division of up to 64 KiB into packets to the host, or to the other guest's \
driver, UDP's only where the host has it (Linux 6.2). A capture is of frames as the guest sends and gets them, with checksums that are not \
complete yet (Wireshark marks them); it has what guests send and is readable by its owner alone; it goes on where the guest's reset starts the machine again. Writing it may make \
the core wait.

What is said of --disk socket=… holds for the process behind a socket too; if it is killed and started again, frames are lost as in any \
network, and the guest goes on. With several pairs the guest gets a control queue, by which it says how many it uses.

With vhost=on no frame passes through this process: a thread of the kernel has all of guest RAM, and takes its processor time from \
this process's control group. It does not poll: doorbells and interrupts are as many as that makes them. It needs /dev/vhost-net \
(modprobe vhost_net); with --iommu vtd it translates by what it is told of the guest's IOMMU. If the interface is deleted, the link is down.";

const DEVICE_HELP: &str = "\
A physical device of the host, given to the guest by VFIO; repeat for more. A list of these, without blanks:

    vfio=ADDRESS            its PCI address: 0000:00:04.0
    policy=POLICY           strict|async|deferred|optimistic=N: when an unmap of the guest completes (strict)
    window=N                of async and deferred: mappings that may be stale (250)
    age=MS                  of all but strict: milliseconds that a mapping may be stale (10)
    policy-file=FILE        a new policy is read from there
    require-dma-domains=on|off
                            on: a guest that passes its IOMMU by gets no DMA
    dma-before-te=on|off    on: DMA to all memory until the guest has turned its IOMMU on

The host must have an IOMMU, and the device must be bound to vfio-pci: `exitless doctor` lists the devices with the commands that \
do it. An address without its domain is completed with 0000.

The guest protects itself: its own kernel maps and unmaps for each request by the emulated IOMMU, and just those pages are pinned; \
all others stay reclaimable, by the host (memory.reclaim, swap) as by --resident. A stock Debian guest does so by itself. \
iommu=pt on its command line maps all of memory, which is pinned then, and a line on standard error says so; require-dma-domains=on \
refuses it, and --resident implies that. A guest without a driver for the IOMMU (intel_iommu=off) gets no DMA, unless dma-before-te=on. \
With --iommu none all memory is pinned at the start.

A map completes when the device can reach the page, and a page is unpinned when it cannot any more, under each policy. They differ \
in when an unmap completes for the guest:

    strict                  when the host has unmapped: nothing is ever stale
    async                   when the host's unmap is queued
    deferred                at once; the host unmaps a window at a time
    optimistic=N            at once; N mappings stay for the guest's next map of the same page

Up to window (or N) mappings are stale then, each for age at most, and a call of the host: in that time a device that misbehaves \
reaches pages that the guest may use for something else. An IOVA that the guest maps to another page is unmapped first. FILE changes the \
policy live: the word that stands in it is taken at the start and whenever it has been written.

--device implies --memory …,thp=off, since a huge page is pinned whole. What is pinned counts against RLIMIT_MEMLOCK, each mapping \
by itself; a map beyond it is refused, with a line that says the limit and what to do. Interrupts must be MSI or MSI-X.";

const MEMORY_HELP: &str = "\
Guest RAM: a size, and options.

    SIZE[,shared=on|off][,thp=on|off]

SIZE is bytes, or with K, M, G or T (powers of 1024). It is in a memory file; with shared=off in anonymous memory, as any program's: there the host \
needs no leave to use huge pages (a memory file's are ruled by /sys/kernel/mm/transparent_hugepage/shmem_enabled), but nobody else \
can be given it: not with --resident or --disk socket=…. thp=off forbids transparent huge pages, as --device does by itself.";

const SWAP_HELP: &str = "\
Where pages go that leave memory and are neither zeroes nor what a disk holds. A list of these, without blanks:

    path=FILE               a new file, or a block device
    size=SIZE               as much as --memory unless given
    file=SIZEFILE           a larger size is read from there
    discard=on|off          on: what is free again is given back

FILE is made, with all its blocks allocated (SIZE; as much as --memory unless given), for its owner only; it has no name from then \
on and goes with the process: what is in it is of no use to anybody else. It must not exist, and its file system must have \
O_DIRECT. A block device is taken as far as SIZE goes; what it held is lost. When it is full the guest is paused, not \
killed, and goes on when the limit is raised (--resident-file) or the store has grown.

file enlarges it live: the size that stands in SIZEFILE (2G) is taken at the start and whenever it has been written. A size below the \
present one, one that the block device does not have, or that finds no room in the file system is refused with a warning, and \
nothing changes.

discard gives back what is behind slots that are not needed any more, a MiB at least at a time, while the store is idle: the blocks of \
a block device, which the kernel has written with zeroes, and unmapped where the device can; or those of a file, which others may take \
then: a guest whose page finds no room is paused until there is some. Off unless given, as swapon's.";

const BALLOON_HELP: &str = "\
A virtio balloon: memory that the guest is asked to do without, and does when it can; the host gets it back. A list of these, without blanks:

    target=SIZE|auto        how much the guest is to give up (0)
    file=FILE               a new target is read from there
    deflate-on-oom=on|off   on: the guest takes memory back rather than kill a program
    reporting=on|off        on: the guest names memory that it does not use

target leaves the guest 64 MiB at least. file changes it live: the size that stands in FILE \
is taken at the start and whenever it has been written. auto decides each second: by 5 % of --memory a step more while the host is \
short (90 % of --resident, else of the process's memory cgroup, else of the host's memory used, or 10 % of the time waited for \
memory) and more than 20 % is available to the guest, less below 10 %, or while the host has plenty. \
What reporting names leaves the host's memory too, without a target. \
The guest's statistics are asked for each second, and stand in the ledger.

No IOMMU stands before this one device: Linux's driver hands it guest-physical addresses, as it does elsewhere. It reads what the \
guest tells it, and writes nothing but the rings of that. Other devices stay confined.";

const HINTS_HELP: &str = "\
What the guest's MAP requests bring about beside their mappings (--iommu virtio). A list of these, without blanks:

    gather=on|off           off: beside --resident, absent pages that a device may read are not asked for at their MAP, but when \
it reaches them
    populate=on|off         on: a thread populates memory ahead of devices, 1 MiB around each MAP
    cache=on|off            off: each access searches for its place in guest RAM anew

A MAP says what devices are about to reach, and none of this delays its answer. With populate=on the sidecore meets no page fault there: \
its first access to a page costs one otherwise. The host has to have that memory, up to all of --memory, also where \
the guest has never touched it; what the guest gives back by --balloon stays given back, but for 1 MiB that was being populated at that \
moment. populate and cache do not go with --resident, whose pager alone brings pages.";

const REBOOT_HELP: &str = "\
What a guest that asks for a reset gets.

restart winds the machine down as at any end, and starts it again in the same process (this program executes itself, for which it needs \
/proc): files, sockets and TAP interfaces are opened again by their names, images are unlocked and locked again. Each time is one line \
on standard error, with its number; nothing limits how often. What was typed and not read is gone. A signal meanwhile ends the run. If the \
machine cannot be started again, the reason is on standard error, and the status is 7. exit ends the run, with status 3.";

/// Arguments of `exitless run`.
#[derive(Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct RunArgs {
    /// Kernel: a bzImage (`vmlinuz`), or an ELF `vmlinux` with a PVH entry.
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,

    /// Initial RAM disk.
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,

    /// Kernel command line.
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "console=ttyS0",
        allow_hyphen_values = true
    )]
    pub cmdline: String,

    /// Guest RAM: bytes, or with K, M, G or T (powers of 1024), and options (see --help).
    #[arg(long, value_name = "SIZE", default_value = "512M", long_help = MEMORY_HELP)]
    pub memory: String,

    /// Size of the part of that which may be in memory at a time, as --memory is written; the rest
    /// is on disks that hold the same, or in --swap. The guest needs no balloon and knows nothing
    /// of it. Needs Linux 6.7 or newer on the host; `exitless doctor` says what else.
    #[arg(long, value_name = "SIZE")]
    pub resident: Option<String>,

    /// Where pages go that are neither zeroes nor on a disk: path=FILE,size=SIZE,file=SIZEFILE (see
    /// --help).
    #[arg(long, value_name = "path=FILE,…", long_help = SWAP_HELP)]
    pub swap: Option<String>,

    /// A limit in place of --resident, read from this file at the start and whenever it has been
    /// written.
    #[arg(long, value_name = "FILE")]
    pub resident_file: Option<PathBuf>,

    /// Drop pages that a disk holds as well, and read them from there.
    #[arg(long, value_enum, default_value_t = MapperArg::On, value_name = "on|off")]
    pub mapper: MapperArg,

    /// Look whether a vCPU is about to overwrite an absent page (REP STOS, REP MOVS), and do not
    /// read it then.
    #[arg(long, value_enum, default_value_t = PreventerArg::On, value_name = "on|off")]
    pub preventer: PreventerArg,

    /// Microseconds that --preventer waits for a vCPU to say what it is about to do: longer where
    /// the host is emulated.
    #[arg(long, value_name = "US", default_value_t = 1000)]
    pub preventer_limit: u64,

    /// A balloon, by which the guest gives memory back: target=SIZE or auto, and options (see
    /// --help).
    #[arg(long, value_name = "target=SIZE|auto,…", long_help = BALLOON_HELP)]
    pub balloon: Option<String>,

    /// Milliseconds between two questions for the balloon's statistics.
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    pub balloon_period: u64,

    /// vCPUs, 1 to 16.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: usize,

    /// A virtio disk: path=FILE or socket=PATH, and options; repeat for more (see --help).
    #[arg(long, value_name = "path=FILE,…", long_help = DISK_HELP)]
    pub disk: Vec<String>,

    /// A virtio network interface: responder, tap=NAME, switch=NAME or socket=PATH; repeat for more
    /// (see --help).
    #[arg(long, value_name = "BACKEND,…", long_help = NET_HELP)]
    pub net: Vec<String>,

    /// A physical device of the host: vfio=ADDRESS, and options; repeat for more (see --help).
    #[arg(long, value_name = "vfio=ADDRESS,…", long_help = DEVICE_HELP)]
    pub device: Vec<String>,

    /// A virtio entropy device, which gives the guest random bytes of the host's: at most 1 MiB
    /// each second.
    #[arg(long)]
    pub rng: bool,

    /// The IOMMU the guest sees.
    ///
    /// With `virtio` the guest asks by a ring that a sidecore polls, and no request exits. Its
    /// kernel needs a driver for virtio-iommu before those of its devices: Linux has one that
    /// Debian's kernels bring from 6.12 on, as a module that belongs into the initramfs
    /// (`echo virtio_iommu >>/etc/initramfs-tools/modules`). Until then no device does DMA. Does
    /// not go with `--device`, `--disk socket=` and `--net socket=` or `vhost=on` yet.
    #[arg(long, value_enum, default_value_t = IommuArg::Vtd)]
    pub iommu: IommuArg,

    /// How the guest reaches the IOMMU: the registers of VT-d (`logged` if nothing else is said,
    /// `shared`, `trap`), or the ring of `--iommu virtio` (`polled`, `trap`).
    #[arg(long, value_enum)]
    pub iommu_mode: Option<IommuModeArg>,

    /// Effects of the MAP requests of `--iommu virtio` besides the mappings: gather=on|off,
    /// populate=on|off, cache=on|off (see --help).
    #[arg(long, value_name = "populate=on,…", long_help = HINTS_HELP)]
    pub iommu_hints: Option<String>,

    /// Host threads that poll the devices. All devices of one VM belong to one of them, so more
    /// than one brings nothing yet.
    #[arg(long, visible_alias = "cores", value_name = "N", default_value_t = 1)]
    pub sidecores: usize,

    /// Host CPUs in order: one for each sidecore, then one for each vCPU. `2,0-1` pins the sidecore
    /// to CPU 2 and two vCPUs to 0 and 1; threads beyond the list float.
    #[arg(long, value_name = "LIST")]
    pub pin: Option<String>,

    /// Policy of an idle sidecore, and of the idle pager.
    #[arg(long, value_enum, default_value_t = IdleArg::Adaptive)]
    pub idle: IdleArg,

    /// Run on software KVM as well, which boots no stock kernel: for guests of a few instructions.
    #[arg(long)]
    pub any_kvm: bool,

    /// Where device data goes: straight into guest memory, or through buffers of ours.
    #[arg(long, value_enum, default_value_t = DmaArg::Direct)]
    pub dma: DmaArg,

    /// Only check that the machine can be started: images are opened and locked, sockets connected
    /// to, and everything is made that the guest needs, but it does not run, and nothing is left
    /// behind. Says what it has found.
    #[arg(long)]
    pub check: bool,

    /// Milliseconds an invalidation or a reset waits for a device before its requests are
    /// cancelled.
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    pub drain_limit: u64,

    /// Seconds without a sign of life from a sidecore after which the machine is ended (status 4).
    #[arg(long, value_name = "S", default_value_t = 2)]
    pub watchdog: u64,

    /// Seconds a signal gives the guest to power off once its power button is pressed; 0: no
    /// button, and the signal ends it.
    #[arg(long, value_name = "S", default_value_t = 90)]
    pub stop_timeout: u64,

    /// Effect of a reset that the guest asks for: the machine starts again, or the run ends (status
    /// 3).
    #[arg(long, value_enum, default_value_t = RebootArg::Restart, long_help = REBOOT_HELP)]
    pub on_reboot: RebootArg,

    /// Write the exit ledger to this file, as JSON: that of the last boot, if the guest has been
    /// started again. Only with this may the guest mark windows (port 0xe0): the first mark sets up
    /// tracepoints of KVM, which cost every guest of this host.
    #[arg(long, value_name = "FILE")]
    pub ledger: Option<PathBuf>,

    /// Do not print the exit ledger at the end. Warnings, and why the machine has ended, are said
    /// all the same.
    #[arg(long)]
    pub quiet: bool,

    /// The serial console: `stdio`, `none`, or a file for its output. What the guest says after a
    /// reset is appended.
    #[arg(long, value_name = "WHERE", default_value = "stdio")]
    pub console: String,
}

/// `--preventer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PreventerArg {
    /// Pages that a vCPU is about to overwrite are not read.
    On,
    /// They are read.
    Off,
}

/// `--mapper`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MapperArg {
    /// Pages may be backed by blocks of disks.
    On,
    /// They are not.
    Off,
}

/// `--iommu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IommuArg {
    /// Intel VT-d.
    Vtd,
    /// Paravirtual (virtio-iommu): for guests that have its driver when their devices appear.
    Virtio,
    /// None: devices reach all of guest RAM.
    None,
}

/// `--iommu-mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IommuModeArg {
    /// Every access, and every kick, exits to the sidecore: the reference.
    Trap,
    /// VT-d: reads do not exit; writes are logged inside the kernel: safe for any guest.
    Logged,
    /// VT-d: plain memory: nothing exits.
    Shared,
    /// Virtio: a sidecore looks at the ring; the guest kicks only one that sleeps.
    Polled,
}

/// `--idle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IdleArg {
    /// Keep polling.
    Poll,
    /// Spin, then pause, then sleep.
    Adaptive,
    /// Sleep at once.
    Sleep,
}

impl IdleArg {
    /// Returns the policy as the runtime knows it.
    pub fn policy(self) -> IdlePolicy {
        match self {
            Self::Poll => IdlePolicy::Poll,
            Self::Adaptive => IdlePolicy::adaptive(),
            Self::Sleep => IdlePolicy::Sleep,
        }
    }
}

/// `--on-reboot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RebootArg {
    /// The machine is started again.
    Restart,
    /// The run ends, with status 3.
    Exit,
}

/// `--dma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DmaArg {
    /// Disk I/O into guest memory, under a lease.
    Direct,
    /// Through a buffer of ours: no lease outlives a poll.
    Bounce,
}
