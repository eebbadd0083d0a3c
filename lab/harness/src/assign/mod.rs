//! The lab with devices to assign: an NVMe controller, a network card and `edu`, behind the
//! emulated host's own IOMMU.
//!
//! [`AssignLab`] starts it, binds devices to VFIO and runs one guest with some of them. The checks
//! of assignment use observations from outside the guest:
//!
//! * [`LockedMemory`]: memory that the program had pinned for its devices, sampled by another
//!   process of the emulated host. Type 1 accounts for it in `VmLck`, by mapping; `VmPin` always
//!   stays 0.
//! * [`FaultLog`]: DMA that the host's IOMMU refused. A guest is not notified of it.
//! * the guest's console and the exit ledger, in [`Outcome`].
//!
//! A [`Session`] is a guest that executes one step after the other, so that the host can sample, or
//! act, between two of them.
//!
//! The devices are used by `workload`, in a guest: its commands for disks accept any block device,
//! `/dev/nvme0n1` as well; `workload udp-echo` through an assigned card reaches the [`EchoPeer`] of
//! this process, behind QEMU's own network; `workload dma-rogue` makes `edu` try accesses that no
//! mapping allows. They run in the emulated host likewise, on a device that is not assigned, or is
//! assigned to the command itself: the kernel's interface is the same.
//!
//! Left out: the correct results for each policy. The tests have them.

mod echo_peer;
mod locked;
pub mod runs;
mod session;

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use lab::assigned::{self, Device, FaultLog};
use lab::{Lab, LabConfig};

pub use crate::system::guest::{Guest, Mode, Outcome, RunningGuest};
pub use crate::system::host::Host;
pub use crate::system::steps::SCRIPT;
pub use echo_peer::EchoPeer;
pub use locked::{LockedMemory, LockedWatch};
pub use session::Session;

/// Bytes of the NVMe controller's namespace.
pub const NAMESPACE_BYTES: u64 = 64 << 20;

/// Gateway of QEMU's own network. Datagrams for it reach this machine's loopback address.
const GATEWAY: &str = "10.0.2.2";
/// Address of the other end of its cable in QEMU's own network.
const ADDRESS: &str = "10.0.2.15/24";

/// An emulated host with devices to assign.
pub struct AssignLab {
    host: Host,
    nvme: String,
    net: String,
    edu: String,
    peer: EchoPeer,
    namespace: PathBuf,
    _dir: tempfile::TempDir,
}

/// Result of a guest with assigned devices.
#[derive(Debug)]
pub struct AssignedRun {
    /// Its console, status and ledger.
    pub outcome: Outcome,
    /// Memory that its program had pinned.
    pub locked: LockedMemory,
    /// DMA that the host's IOMMU refused while it ran.
    pub faults: FaultLog,
}

impl AssignLab {
    /// Starts it. Unmaps of the host's IOMMU take effect at once; further options are in `config`.
    ///
    /// # Errors
    /// The lab does not start, or lacks one of the devices.
    pub fn start(config: LabConfig) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("exitless-assign-")
            .tempdir()
            .context("a directory")?;
        let namespace = dir.path().join("namespace");
        File::create(&namespace)
            .and_then(|file| file.set_len(NAMESPACE_BYTES))
            .context("making the namespace")?;
        let config = assigned::with_nvme(assigned::with_unit(config), &namespace)?;
        let config = assigned::with_edu(assigned::with_net(config));
        let host = Host::lab_with(config)?;
        let lab = lab_of(&host)?;
        let [nvme, net, edu] = [Device::Nvme, Device::Net, Device::Edu].map(|d| d.find(lab));
        Ok(Self {
            nvme: nvme?,
            net: net?,
            edu: edu?,
            peer: EchoPeer::start()?,
            namespace,
            host,
            _dir: dir,
        })
    }

    /// Returns the host of the guests.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Returns the PCI address of a device in the emulated host.
    pub fn address(&self, device: Device) -> &str {
        match device {
            Device::Nvme => &self.nvme,
            Device::Net => &self.net,
            Device::Edu => &self.edu,
        }
    }

    /// Returns the other end of the network card's cable.
    pub fn peer(&self) -> &EchoPeer {
        &self.peer
    }

    /// Returns the file with the content of the NVMe controller's namespace, complete when the lab
    /// has ended.
    pub fn namespace(&self) -> &Path {
        &self.namespace
    }

    /// Unbinds a device from its driver, if it has one, and binds it to vfio-pci.
    ///
    /// # Errors
    /// It is not bound afterwards.
    pub fn bind(&self, device: Device) -> Result<()> {
        let lab = lab_of(&self.host)?;
        Ok(assigned::bind_to_vfio(lab, self.address(device))?)
    }

    /// Returns the DMA that was refused since the start, or since the last call.
    ///
    /// # Errors
    /// The kernel's log could not be read.
    pub fn take_faults(&self) -> Result<FaultLog> {
        Ok(assigned::take_faults(lab_of(&self.host)?)?)
    }

    /// Begins to sample the locked memory of the program of this name, as soon as it runs. Only one
    /// such program may run.
    ///
    /// # Errors
    /// The lab has died.
    pub fn watch_locked(&self, program: &str) -> Result<LockedWatch<'_>> {
        LockedWatch::start(lab_of(&self.host)?, program)
    }

    /// Returns the address and port by which a guest reaches the peer.
    pub fn peer_address(&self) -> String {
        format!("{GATEWAY}:{}", self.peer.port())
    }

    /// Returns a shell script that makes the network card `interface`, in a guest or in the
    /// emulated host, exchange echoes with the peer.
    pub fn network_script(&self, interface: &str, echoes: u32) -> String {
        let port = self.peer.port();
        format!(
            "ip link set {interface} up && ip addr add {ADDRESS} dev {interface} && \
             ping -c 3 -W 5 {GATEWAY} && workload udp-echo {GATEWAY}:{port} --count {echoes}"
        )
    }

    /// Runs a guest with these devices, which are [bound](Self::bind), to its end. The text beside
    /// a device follows the address in the value of `--device`: it is empty, or for example
    /// `,policy=strict`.
    ///
    /// # Errors
    /// The run could not be made or watched. Its status is in its outcome ([`Outcome::check`]).
    pub fn run(&self, guest: &Guest, devices: &[(Device, &str)]) -> Result<AssignedRun> {
        let guest = self.with_devices(guest.clone(), devices)?;
        let locked = self.watch_run(&guest)?;
        let outcome = guest.try_run(&self.host)?;
        let locked = locked
            .finish()
            .with_context(|| format!("sampling VmLck of a run: {}", outcome.tail()))?;
        // A refused run may have ended before the first sample.
        let is_seen = outcome.exit != 0 || !locked.samples().is_empty();
        ensure!(is_seen, "no sample of a run: {}", outcome.tail());
        Ok(AssignedRun {
            outcome,
            locked,
            faults: self.take_faults()?,
        })
    }

    /// Starts a guest with these devices, whose pins are not watched.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn spawn(&self, guest: &Guest, devices: &[(Device, &str)]) -> Result<RunningGuest<'_>> {
        self.with_devices(guest.clone(), devices)?.spawn(&self.host)
    }

    /// Starts a guest with these devices, as [`run`](Self::run) does, that executes steps: its
    /// script is [`SCRIPT`].
    ///
    /// # Errors
    /// It does not get that far.
    pub fn begin(&self, guest: &Guest, devices: &[(Device, &str)]) -> Result<Session<'_>> {
        Session::begin(self, &self.with_devices(guest.clone(), devices)?)
    }

    /// Begins to watch a guest that is started next.
    fn watch_run(&self, guest: &Guest) -> Result<LockedWatch<'_>> {
        self.take_faults()?;
        // A run that is refused writes no ledger, and must not get another run's.
        self.host.script("rm -f /root/ledger-*.json")?;
        self.watch_locked(guest.program().name())
    }

    /// Returns the guest with flags for these devices.
    fn with_devices(&self, mut guest: Guest, devices: &[(Device, &str)]) -> Result<Guest> {
        for (device, options) in devices {
            ensure!(
                options.is_empty() || options.starts_with(','),
                "options {options:?} of {device:?} have to begin with a comma"
            );
            let value = format!("vfio={}{options}", self.address(*device));
            guest.flags.extend(["--device".to_owned(), value]);
        }
        Ok(guest)
    }

    /// Powers the lab off. Returns the peer's count of echoes, and the content of the namespace.
    ///
    /// # Errors
    /// The lab did not shut down properly.
    pub fn shutdown(self) -> Result<(u64, Vec<u8>)> {
        self.host.shutdown()?;
        let content = std::fs::read(&self.namespace).context("reading the namespace")?;
        Ok((self.peer.answered(), content))
    }
}

/// Returns a shell script that binds `edu` to VFIO and makes `workload dma-rogue` drive it with
/// these options: in a guest, over the guest's own IOMMU, or in the emulated host. The program's
/// memory is in large pages.
pub fn rogue_script(options: &str) -> String {
    let (search, bind) = (Device::Edu.search(), assigned::bind_script("$A"));
    format!(
        "lab-load vfio && echo always >/sys/kernel/mm/transparent_hugepage/shmem_enabled && \
         echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts && \
         A=$({search}) && {bind} && workload dma-rogue $A --mask-bits 32 {options}"
    )
}

fn lab_of(host: &Host) -> Result<&Lab> {
    match host {
        Host::Lab(lab) => Ok(lab),
        Host::Native(_) => bail!("devices are assigned in the lab alone"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_of_rogue_dma_fits_into_a_guests_command_line() {
        let script = rogue_script(
            "--pause-ms 2500 --wait-ms 1000 --remap --pieces --count 100 --seed 12345",
        );
        lab::guest_image::run_option(&script).expect("it fits");
    }
}
