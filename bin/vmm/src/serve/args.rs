//! The command line of `exitless serve`.

use std::path::PathBuf;

use clap::Args;

const EXAMPLES: &str = "\
Guest memory must be shared with the daemon: QEMU share=on, Cloud Hypervisor --memory shared=on.

A front end whose daemon is killed and started again goes on where it was, if it reconnects.

When all devices can be reached the daemon says `ready: serving …` on standard error, and tells a service manager (READY=1 to \
NOTIFY_SOCKET: Type=notify of systemd); before that no socket is there.

Examples:
  One disk for a QEMU guest, the daemon first:
    exitless serve --block id=disk0,path=debian.qcow2,format=qcow2,socket=/tmp/disk0.sock &
    qemu-system-x86_64 -accel kvm -m 1G -machine q35,memory-backend=mem \\
        -object memory-backend-memfd,id=mem,size=1G,share=on \\
        -chardev socket,id=c0,path=/tmp/disk0.sock,reconnect=1 \\
        -device vhost-user-blk-pci,chardev=c0

  Two disks on host CPU 3; the second at most 2000 requests a second, with half the first one's share:
    exitless serve --cpu 3 --block id=a,path=a.raw,socket=a.sock,weight=2 \\
        --block id=b,path=b.raw,socket=b.sock,iops=2000

  Two guests on a switch, each with its own address; a third one that reaches neither:
    exitless serve --net id=a,socket=a.sock,switch=s,mac=52:54:00:00:00:01 \\
        --net id=b,socket=b.sock,switch=s,mac=52:54:00:00:00:02 --net id=c,socket=c.sock,switch=s,vlan=2

  The same as a file, checked, and served:
    exitless serve --config serve.toml --check
    exitless serve --config serve.toml

  The file, serve.toml:
    [cores]
    cpus = \"3\"
    idle = \"adaptive\"

    [[block]]
    id = \"a\"
    path = \"a.raw\"
    socket = \"a.sock\"
    weight = 2

    [[block]]
    id = \"b\"
    path = \"b.raw\"
    socket = \"b.sock\"
    iops = \"2000\"

Exit status:
  0  Ended by SIGTERM, SIGINT, SIGHUP or SIGQUIT; with --check: all could be served now.
  1  A failure under way.
  2  Nothing started, or with --check: nothing would; one line on standard error says why.
  4  A core panicked.
  5  Ended at once by a second signal.

Signals:
  SIGTERM, SIGINT, SIGHUP, SIGQUIT  End the daemon within two seconds, with what is in flight finished and shown to its drivers; only \
storage that the host holds makes it wait, and is named on standard error. Another one, 0.2 s later or more, ends it at once: a \
successor resumes from the inflight regions.
  SIGUSR1  Writes the counters; a device that does not say its own within a second is marked with no_answer.

Environment:
  RUST_LOG  What the log has, where --log is not given: see there.
  NOTIFY_SOCKET  Where a service manager is told that all devices can be reached.
  NO_COLOR  If it is set and not empty, help is not coloured.

Files:
  serve.toml  What --config names, 4 MiB at most: [cores] with cpus, count, idle and coalesce-us; [[block]], [[net]] and [[switch]] \
with the keys of --block, --net and --switch, where switches are true and false; and stats. Numbers are numbers, or texts with a unit: bps = \"10M\".

Notes:
  QEMU says `ring restore failed: -22` when a daemon has been started again, which is harmless: nobody is left to ask how far a ring \
had got, so it takes that from the ring itself, and the inflight region has the rest.
  QEMU before 9.1 may fall silent for good when the daemon ends in the milliseconds of its new handshake, after it has connected again: \
it says `vhost_backend_init failed`, the next daemon has its connection and no message, and the guest's disk hangs until QEMU is started \
again. Use 9.1 or newer; or let nothing end the daemon within reconnect= and a few seconds of its start.
  Behind QEMU's intel-iommu (iommu_platform=on, with or without ats=on): QEMU 7.2 tells no server of what a guest unmaps lazily, so with it the guest has to be strict (caching-mode=on, or iommu.strict=1); 8.0 and newer tell.";

const BLOCK_HELP: &str = "\
A block device; repeat for more. A list of these, without blanks; the first three must be there:

    id=NAME                 its name, and the serial number that the guest sees, at most 20 characters
    socket=PATH             where front ends connect
    path=FILE|ram:SIZE|null:SIZE
    mode=OCTAL              the socket's permissions
    group=NAME|GID          the socket's group
    format=raw|qcow2        what is in the file
    readonly=on|off         on: the guest may not write
    direct=on|off           on: past the host's page cache (O_DIRECT)
    block=512|4096          bytes of a logical block
    locking=on|off          off: without locks
    backing=on|off          on: a qcow2 image may have a backing file
    barriers=on|off         off: without the syncs that keep a qcow2 image's tables in order
    queues=N                1 to 16
    queue-size=N            entries of a ring at most, a power of two to 1024
    packed=on|off           off: packed rings are not offered
    weight=N                its share of a core beside other busy devices, 1 to 1000
    iops=N, iops-burst=N    requests a second, and how many at once after a rest
    bps=N, bps-burst=N      bytes a second, and how many at once after a rest

Sizes and numbers are digits, or digits with K, M, G or T (powers of 1024): iops=2K is 2048 requests a second.

mode and group are there before anybody can connect: to connect takes permission to write. Without mode it is what the umask leaves \
(022: the daemon's user alone can connect), and 0660 where a group is named; in a file both are texts (mode = \"0660\"). ram is a disk \
in memory that is gone afterwards, null one that moves no data: both for measurements. Without format a file is raw, and refused if it \
begins as a qcow2 image: nothing is guessed, since a guest may write that into its raw disk. direct needs block=4096 on storage in \
blocks of 4096 bytes. barriers=off spares the first write to each cluster a wait for the disk: then a power cut may lose older data that \
were flushed, or the image; the death of the daemon alone may not. Files are locked as QEMU locks them: one writer, or any number of \
readers; a lock is waited for (2 s if somebody can be seen to hold it, 30 s for what a killed process left in flight). locking=off goes \
without, and then nothing keeps two writers apart. bps counts what is discarded and zeroed, too.";

const NET_HELP: &str = "\
Serve a network device (and serve others, by giving the option again).

    id=NAME                 its name in log and counters
    socket=PATH             vhost-user socket to listen on
    mode=OCTAL, group=NAME  as for --block
    switch=NAME             frames go to and from the other devices that name this switch
    tap=NAME                frames go to this TAP interface, which has to be there, and come from it
    sink                    every frame is taken, and forgotten
    source                  frames come as fast as there are buffers for them
    frame=N                 their length in bytes, 60 to 1518 (60)
    loop                    every frame comes back
    vlan=N                  switch: its VLAN, 1 to 4094 (1); with trunk that of frames without a tag (none)
    trunk=LIST|all          switch: VLANs whose frames have tags here, such as 10+20-29
    isolated=on|off         switch: on: reaches only devices that are not isolated
    mac=ADDRESS+…           switch: sends from these addresses only, and no other device does
    flood-group=N           switch: frames a second to groups, broadcasts among them (1000)
    flood-unknown=N         switch: frames a second to addresses that the switch does not know (1000)
    pairs=N                 pairs of queues, 1 to 64 (1 of loop and switch); above 1 a TAP interface is one that was made with multi_queue
    mtu=N                   largest packet over TAP, 68 to 65535, no more than the interface's, which it is unless said otherwise
    queue-size=N            entries of a ring at most, a power of two to 1024
    packed=on|off           off: packed rings are not offered, which stand still if this daemon is killed (split ones go on): QEMU keeps
                            no record for network devices of where it stood
    weight=N                its share of a core beside other busy devices, 1 to 1000
    fps=N, fps-burst=N      frames a second, of both directions together, and how many at once after a rest
    bps=N, bps-burst=N      bytes a second, the same way
    pcap=FILE               every frame is written to this new file too, for tcpdump and Wireshark
    pcap-max=SIZE           its size at most, 4K to 1T (64M); frames behind that are not written
    pcap-replace=on|off     on: a file that is there is replaced, not refused

A switch is there because devices name it; --switch sets what is particular to it. Its devices are all on one core, where their \
frames are copied from guest to guest, and they move to another one together. It learns which addresses are where. What a guest leaves \
over (checksums, segmentation) is done for a receiver that does not do it.

Address, control queue, and the MTU that the guest reads are the front end's own. sink, source and loop are for measurements.

Over TAP a guest leaves checksums and the division of up to 64 KiB into packets to the host, UDP's only where the host has it (Linux 6.2): \
the front end has to offer it (QEMU does: csum=, host_tso4=, mrg_rxbuf= and their like of its device). The interface is the daemon's while it \
runs, and has to be up for frames to pass; one that is deleted ends its device's frames alone, and is logged. A capture is of frames as the \
guest sends and gets them, with checksums that are not complete yet (Wireshark marks them); it has what guests send and is readable by its \
owner alone. Writing it may make the core wait.";

const SWITCH_HELP: &str = "\
Settings of a switch between network devices (--net …,switch=NAME); repeat for more. Without it a switch has the values in brackets.

    id=NAME                 its name
    ageing=SECONDS          an address that nobody sends from for so long is forgotten (300)
    move-hold=MS            an address stays where it is until it has been quiet for so long (1000): nobody takes over one in use
    addresses=N             addresses learned of one device at most; one more takes the place of its oldest (1024)
    tap=NAME                the host is on the switch by this TAP interface, which has to be there
    vlan=N, trunk=LIST, flood-group=N, flood-unknown=N
                            of that port, as for --net";

/// Arguments of `exitless serve`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct ServeArgs {
    /// Read cores and devices from this TOML file; flags are added to it and take precedence.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// A block device: see `--help`.
    #[arg(long, value_name = "KEY=VALUE,…", long_help = BLOCK_HELP)]
    pub block: Vec<String>,

    /// A network device: see `--help`.
    #[arg(long, value_name = "KEY=VALUE,…", long_help = NET_HELP)]
    pub net: Vec<String>,

    /// Settings of a switch between network devices: see `--help`.
    #[arg(long, value_name = "KEY=VALUE,…", long_help = SWITCH_HELP)]
    pub switch: Vec<String>,

    /// Host CPUs to pin the cores to, one each: `3` or `2,4-6`.
    #[arg(long, visible_alias = "pin", value_name = "LIST")]
    pub cpu: Option<String>,

    /// Greatest number of cores that are used; those beyond the first are started and stopped by
    /// load.
    #[arg(long, visible_alias = "sidecores", value_name = "N")]
    pub cores: Option<usize>,

    /// Policy of an idle core: `adaptive` (up to 59.5 % of the core wherever 5 ns of it save 1 ns
    /// of latency, all of it where 1 ns does; sleeps otherwise), `adaptive:PRICE` (nanoseconds of
    /// CPU worth one nanosecond of latency, 0.01 to 100, for any part of the core), `poll`,
    /// `sleep`, `spin:MICROSECONDS`.
    #[arg(long, value_name = "POLICY")]
    pub idle: Option<String>,

    /// Microseconds a call to a guest may wait for further completions under load; 0 switches
    /// coalescing off.
    #[arg(long, value_name = "US")]
    pub coalesce: Option<u64>,

    /// Only check whether all could be served now: what a start would refuse is refused, with its
    /// words and status, but images are neither locked nor changed, nothing is waited for, and
    /// nothing is left.
    #[arg(long)]
    pub check: bool,

    /// Write counters of cores and devices to this file, as JSON, when the daemon ends and at
    /// SIGUSR1. Each time a new file takes the place of the old one.
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
}
