//! `--fault WHERE:WHAT`: parts of a machine or a daemon that fail on purpose.
//!
//! [`grammar`] reads the options; [`Faulty`] is the composition that they ask for, of crates of
//! `tests/`: disks and stores that do wrong (`vio-faults`), memory whose pages a thread takes away
//! (`punch`). Without an option it composes what `exitless` does, but for one arm in the set of
//! functions.

mod findings;
mod grammar;
mod mute;
mod punched;
mod stale;

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use guest_mem::{GuestRam, Iova, SourceId};
use pv_iommu::IommuFunction;
use sidecore::{FleetBuilder, SidecoreBuilder};
use swap::residency::{AvoidAll, IoPolicy};
use vio::blk::{Blk, BlockIo};
use vio_faults::{FaultyStore, LateOptions, LatencyDisk, PanicDisk, Rogue, RogueDisk};
use virtio_pci::VirtioFunction;
use vmm::composition::{self, Composition, MachineOutline};
use vmm::run::{Assembly, Attached, MachineComposition, MakeFunctions};

pub use grammar::{FAULTS_OF_DAEMONS, FAULTS_OF_MACHINES, Faults, Program};

use findings::Findings;
use grammar::{Attack, DiskFaults};
use mute::{Muting, Silence};
use punched::Punched;
use stale::StaleMapper;

/// The request at which a rogue disk attacks: one that starts at this sector.
const ROGUE_SECTOR: u64 = 64;
/// The same, of a disk that makes late accesses, where the guest has waited for them.
const JUDGE_SECTOR: u64 = 72;
/// Late accesses of a disk.
const MAX_LATE: u64 = 1_000;
/// Address to which a rogue disk writes: far from what a guest of a few GiB maps, inside 39 bits.
const ROGUE_IOVA: u64 = 0x10_0000_0000;

vmm::functions! {
    /// The functions of the lab's machines.
    enum Functions {
        /// A disk that does wrong, for tests of the IOMMU.
        Rogue(VirtioFunction<RogueDisk>),
    }
}

/// A machine or a daemon whose parts fail as asked for.
pub struct Faulty {
    faults: Faults,
    findings: Findings,
}

impl Faulty {
    /// Creates it with these faults.
    pub fn new(faults: Faults) -> Self {
        Self {
            faults,
            findings: Findings::default(),
        }
    }

    fn of_disk(&self, number: usize) -> Option<&DiskFaults> {
        self.faults.disks.get(&number)
    }

    /// Refuses faults of disks that do not exist.
    fn check_disks(&self, count: usize) -> Result<()> {
        let disks = &self.faults.disks;
        let Some(number) = disks.keys().find(|number| **number >= count) else {
            return Ok(());
        };
        match count {
            0 => bail!("--fault disk{number}:…: there is no disk"),
            1 => bail!("--fault disk{number}:…: there is disk0 alone"),
            _ => bail!(
                "--fault disk{number}:…: there are disk0 to disk{}",
                count - 1
            ),
        }
    }
}

impl MakeFunctions<Muting<Functions>> for Faulty {
    fn disk(&self, number: usize, source: SourceId, disk: Blk) -> Muting<Functions> {
        let Some(attack) = self.of_disk(number).and_then(|disk| disk.attack) else {
            return VirtioFunction::new(source, disk).into();
        };
        let sector = ROGUE_SECTOR;
        let fault = match attack {
            Attack::Unmapped => vio_faults::Fault::DmaUnmapped {
                sector,
                iova: Iova::new(ROGUE_IOVA),
            },
            Attack::ReadOnly => vio_faults::Fault::WriteToReadOnly { sector },
            Attack::Late(limit) => vio_faults::Fault::Late(LateOptions {
                probe: sector,
                judge: JUDGE_SECTOR,
                limit,
                most: MAX_LATE,
            }),
        };
        let disk = Rogue::new(disk, Some(fault));
        self.findings.add_disk(number, disk.class().record());
        Muting::never(Functions::Rogue(VirtioFunction::new(source, disk)))
    }

    fn iommu(&self, iommu: IommuFunction) -> Muting<Functions> {
        let Some(mute) = self.faults.mute else {
            return iommu.into();
        };
        let silence = Silence::new(mute, self.findings.add_iommu());
        Muting::new(iommu.into(), silence)
    }
}

impl MachineComposition for Faulty {
    fn attach(&self, assembly: Assembly<'_>) -> Result<Attached> {
        if !self.faults.is_punched {
            return assembly.build::<Muting<Functions>>(self);
        }
        let memory = Punched::new(assembly.pieces())?;
        assembly.build_over::<Muting<Functions>, _>(memory, self)
    }
}

impl Composition for Faulty {
    fn check_machine(&self, machine: &MachineOutline<'_>) -> Result<()> {
        self.check_disks(machine.disks_in_files.len())?;
        let behind_socket = |number: &&usize| !machine.disks_in_files[**number];
        if let Some(number) = self.faults.disks.keys().find(behind_socket) {
            bail!(
                "--fault disk{number}:…: another process serves it (--disk socket=…, or worker=on)"
            );
        }
        if self.faults.is_punched {
            if machine.has_pager {
                bail!(
                    "--fault memory:punch does not go with --resident, whose pager takes pages away"
                );
            }
            if machine.has_balloon {
                bail!("--fault memory:punch does not go with --balloon, which takes pages away");
            }
            if machine.has_devices {
                bail!("--fault memory:punch does not go with --device, whose pages stay in memory");
            }
            if !machine.is_memory_shared {
                bail!(
                    "--fault memory:punch does not go with --memory …,shared=off: it reaches \
                     memory by its file"
                );
            }
        }
        if self.faults.is_as_resident && (machine.has_pager || self.faults.is_punched) {
            bail!(
                "--fault memory:as-resident does not go with --resident or memory:punch, which \
                 imply it"
            );
        }
        if self.faults.store.is_some() && !machine.has_pager {
            bail!("--fault swap:… goes with --resident and --swap");
        }
        if self.faults.mute.is_some() && !machine.has_virtio_iommu {
            bail!("--fault iommu:mute goes with --iommu virtio");
        }
        if self.faults.is_mapper_stale && !(machine.has_pager && machine.has_mapper) {
            bail!("--fault mapper:stale goes with --resident and --mapper on");
        }
        Ok(())
    }

    fn check_daemon(&self, devices: usize) -> Result<()> {
        self.check_disks(devices)
    }

    fn disk(&self, number: usize, io: Box<dyn BlockIo>) -> Result<Box<dyn BlockIo>> {
        let Some(faults) = self.of_disk(number) else {
            return Ok(io);
        };
        let io = match faults.latency {
            Some(latency) => Box::new(LatencyDisk::new(io, latency).context("a timer")?),
            None => io,
        };
        Ok(match faults.panics {
            true => Box::new(PanicDisk::new(io)),
            false => io,
        })
    }

    fn store(&self, io: Box<dyn BlockIo>, ram: &GuestRam) -> Box<dyn BlockIo> {
        match self.faults.store {
            Some(fault) => Box::new(FaultyStore::new(io, ram.clone(), fault)),
            None => io,
        }
    }

    fn io_policy(&self) -> Box<dyn IoPolicy> {
        match self.faults.is_mapper_stale {
            true => Box::new(StaleMapper),
            false => Box::new(AvoidAll),
        }
    }

    fn sidecore(&self, builder: SidecoreBuilder) -> SidecoreBuilder {
        builder.force_sleep_every(self.faults.sleeps)
    }

    fn fleet(&self, builder: FleetBuilder) -> FleetBuilder {
        builder.force_sleep_every(self.faults.sleeps)
    }

    fn moves_pages(&self) -> bool {
        self.faults.is_punched
    }

    fn hides_paravirtual_features(&self) -> bool {
        self.faults.is_as_resident
    }

    fn findings(&self) -> Option<composition::Findings> {
        let findings = self.findings.clone();
        Some(Arc::new(move || findings.read()))
    }
}
