//! Workloads that the demo and the self-test share, with their checks: a disk with known content,
//! traffic with the built-in responder, a disk that attacks.

use anyhow::{Context, Result, ensure};

use super::guest::{Driver, Guest, Mode, Outcome};
use super::host::Host;

/// Size of a disk, in bytes.
pub const DISK_BYTES: usize = 8 << 20;

/// Sector at which a rogue disk attacks.
const ROGUE_SECTOR: u64 = 64;

const GUEST_IP: &str = "192.168.7.2";
const RESPONDER_IP: &str = "192.168.7.1";
/// Address that echoes datagrams, for a guest with [`add_network`].
pub const ECHO: &str = "192.168.7.1:7";

/// Returns the content of a disk.
pub fn pattern(seed: u64) -> Vec<u8> {
    let mut data = vec![0; DISK_BYTES];
    workload::pattern::fill(seed, 0, &mut data);
    data
}

/// Adds a disk with the content of `seed` to `guest`; `options` begin with a comma.
pub fn add_disk(guest: &mut Guest, host: &Host, seed: u64, options: &str) -> Result<()> {
    let file = format!("disk{}.img", guest.disks.len());
    host.put(&file, &pattern(seed))?;
    guest
        .disks
        .push(format!("path={}{options}", host.path(&file)));
    Ok(())
}

/// Returns the slot of the first disk on the bus: the first one behind the host bridge, or behind
/// an IOMMU that is a device itself.
fn first_disk_slot(mode: Mode) -> usize {
    match mode {
        Mode::Virtio => 2,
        _ => 1,
    }
}

/// Returns a shell word for the node of disk number `index` (from 0) of a guest in `mode`. It is
/// found by its slot: names are given in the order in which drivers are bound, which is not defined
/// with several vCPUs where an IOMMU's driver is loaded late.
pub fn disk_node(mode: Mode, index: usize) -> String {
    let slot = first_disk_slot(mode) + index;
    format!("/dev/$(ls /sys/bus/pci/devices/0000:00:{slot:02x}.0/virtio*/block)")
}

/// Returns the host's content of disk number `index` (from 0) of a guest.
pub fn disk_content(host: &Host, index: usize) -> Result<Vec<u8>> {
    host.get(&format!("disk{index}.img"))
}

/// Gives `guest` a network card, behind which the built-in responder answers.
pub fn add_network(guest: &mut Guest) {
    guest.nets.push(format!("responder,ip={RESPONDER_IP}"));
}

/// Returns a script that gives the network card its address.
pub fn network_up() -> String {
    format!("ip link set eth0 up && ip addr add {GUEST_IP}/24 dev eth0")
}

/// Returns a script of ping and UDP echoes.
pub fn network_script(pings: u32, echoes: u32) -> String {
    format!(
        "{} && ping -c {pings} -W 5 {RESPONDER_IP} && workload udp-echo {ECHO} --count {echoes}",
        network_up()
    )
}

/// Gives `guest` a second network card on a TAP interface, behind which the host's own kernel
/// answers, and appends a ping to the guest's script. Returns false if the host has none: a TAP
/// interface takes privileges.
pub fn add_tap(guest: &mut Guest, host: &Host) -> Result<bool> {
    const HOST_IP: &str = "192.168.9.1";
    const TAP: &str = "tap0";
    if !host.tap(TAP, HOST_IP)? {
        return Ok(false);
    }
    guest.nets.push(format!("tap={TAP}"));
    // The card's control queue: another station address, which the host's side resolves, and
    // reception of every frame. Brackets, since this is on the kernel's command line, which is in
    // its log.
    guest.script.push_str(&format!(
        " && ip link set eth1 address 02:00:00:00:09:02 && ip link set eth1 mtu 1450 && ip link \
         set eth1 up && \
         ip link set eth1 promisc on && ip addr add 192.168.9.2/24 dev eth1 && \
         ping -c 3 -s 1400 -W 5 {HOST_IP} && ip link set eth1 promisc off && \
         ping -c 3 -s 1400 -W 5 {HOST_IP} && ! dmesg | grep -E 'eth1[:] \
         Failed|virtio_ne[t].*[Ff]ail' && echo tap ok"
    ));
    Ok(true)
}

/// Checks the lines that [`network_script`] must leave on the console.
pub fn check_network(outcome: &Outcome) -> Result<()> {
    for text in [" 0% packet loss", "udp-echo ok"] {
        outcome
            .line(text)
            .with_context(|| format!("no {text:?} on the console\n{}", outcome.tail()))?;
    }
    Ok(())
}

/// Attack by a disk.
#[derive(Clone, Copy, Debug)]
pub enum Rogue {
    /// It writes to an address without a mapping.
    Unmapped,
    /// It writes into the buffer of a write request, which it may only read.
    ReadOnly,
}

impl Rogue {
    /// Both attacks.
    pub const ALL: [Rogue; 2] = [Rogue::Unmapped, Rogue::ReadOnly];

    /// Adds such a disk to `guest` and appends the command that triggers it to the guest's script.
    pub fn add(self, guest: &mut Guest, host: &Host) -> Result<()> {
        let device = disk_node(guest.mode, guest.disks.len());
        let (fault, dd) = match self {
            Rogue::Unmapped => (
                "unmapped",
                format!("if={device} of=/dev/null iflag=direct skip={ROGUE_SECTOR}"),
            ),
            Rogue::ReadOnly => (
                "readonly",
                format!("if=/dev/zero of={device} oflag=direct seek={ROGUE_SECTOR}"),
            ),
        };
        guest
            .faults
            .push(format!("disk{}:{fault}", guest.disks.len()));
        add_disk(guest, host, 0, "")?;
        let unit = match guest.mode {
            // With either driver.
            Mode::Virtio => "iommu.virtio0",
            _ => "DMAR",
        };
        // The fault interrupt comes while dd runs; the kernel's log is read afterwards.
        guest.script.push_str(&format!(
            "; dd bs=512 count=1 {dd} && dmesg | grep {unit} | tail -2"
        ));
        Ok(())
    }
}

/// Checks that Linux was notified by the event queue of a blocked write of disk number `index`
/// (from 0), under a paravirtual IOMMU with this driver.
pub fn check_told(outcome: &Outcome, driver: Driver, index: usize) -> Result<()> {
    let endpoint = (first_disk_slot(Mode::Virtio) + index) << 3;
    match driver {
        Driver::Stock => {
            let source = format!("page fault from EP {endpoint} at ");
            check_line(outcome, &[&source, "[W]"])
        }
        Driver::Module(_) => {
            let source = format!("fault: endpoint {endpoint}, no mapping, address ");
            check_line(outcome, &[&source, " write"])
        }
    }
}

/// Checks that Linux logged a blocked write of disk number `index` (from 0).
pub fn check_blocked(outcome: &Outcome, index: usize) -> Result<()> {
    let slot = first_disk_slot(Mode::Shared) + index;
    let source = format!("Request device [00:{slot:02x}.0]");
    let parts = ["DMAR: [DMA Write", &source, "PTE Write access is not set"];
    check_line(outcome, &parts)
}

/// Checks that a line of the console has all of `parts`.
fn check_line(outcome: &Outcome, parts: &[&str]) -> Result<()> {
    let mut lines = outcome.console.lines();
    let is_there = lines.any(|line| parts.iter().all(|part| line.contains(part)));
    ensure!(
        is_there,
        "no line with {parts:?} in the guest's log\n{}",
        outcome.tail()
    );
    Ok(())
}
