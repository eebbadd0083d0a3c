//! Counts of exits to user space by cause: one set per vCPU, written by that vCPU's thread only.
//!
//! To count is a relaxed load and store of the value plus one: no locked instruction. A reader on
//! another thread reads each count untorn, but not all of one instant. Exits that KVM handles
//! itself (timer, HLT, register writes that KVM logs in its coalesced ring) are not counted here:
//! KVM's own statistics have them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use platform::bus::AccessCause;

/// Cause of an exit to user space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum ExitCause {
    /// Access to a VT-d register (in trap mode, or where KVM could not log the write).
    IommuRegister,
    /// Write to a virtio notification register that no ioeventfd took.
    Doorbell,
    /// Such a write to a paravirtual IOMMU.
    IommuDoorbell,
    /// PCI configuration space by memory (ECAM).
    PciConfig,
    /// PCI configuration space by the ports 0xcf8 and 0xcfc.
    PciConfigPort,
    /// Memory access to another device register: BAR, UART, I/O APIC, ACPI.
    OtherDevice,
    /// Access to any port but configuration space and the marker, decoded by a device or not.
    OtherPort,
    /// End of interrupt for a level-triggered I/O APIC pin.
    IoapicEoi,
    /// Write to the marker, by which the guest begins and ends a measurement.
    Marker,
    /// Access to a memory address that no device decodes.
    Unclaimed,
    /// Interruption by a signal: pause, stop, or a stray signal.
    Interrupted,
    /// Any other exit.
    Other,
}

/// Number of causes.
pub const CAUSES: usize = 12;

impl ExitCause {
    /// All causes, in counting order.
    pub const ALL: [ExitCause; CAUSES] = [
        ExitCause::IommuRegister,
        ExitCause::Doorbell,
        ExitCause::IommuDoorbell,
        ExitCause::PciConfig,
        ExitCause::PciConfigPort,
        ExitCause::OtherDevice,
        ExitCause::OtherPort,
        ExitCause::IoapicEoi,
        ExitCause::Marker,
        ExitCause::Unclaimed,
        ExitCause::Interrupted,
        ExitCause::Other,
    ];

    /// Returns the cause of an access to memory.
    pub fn of_memory(met: AccessCause) -> Self {
        match met {
            AccessCause::IommuRegister => Self::IommuRegister,
            AccessCause::Doorbell => Self::Doorbell,
            AccessCause::IommuDoorbell => Self::IommuDoorbell,
            AccessCause::PciConfig => Self::PciConfig,
            AccessCause::Register => Self::OtherDevice,
            AccessCause::Marker => Self::Marker,
            AccessCause::Unclaimed => Self::Unclaimed,
        }
    }

    /// Returns the cause of a port access. KVM reports memory accesses as page faults, but not port
    /// accesses, so the ledger counts them separately.
    pub fn of_port(met: AccessCause) -> Self {
        match met {
            AccessCause::PciConfig => Self::PciConfigPort,
            AccessCause::Register | AccessCause::Unclaimed => Self::OtherPort,
            other => Self::of_memory(other),
        }
    }

    /// Returns the name in tables and reports.
    pub fn name(self) -> &'static str {
        match self {
            ExitCause::IommuRegister => "iommu",
            ExitCause::Doorbell => "doorbell",
            ExitCause::IommuDoorbell => "iommu_doorbell",
            ExitCause::PciConfig => "pci_config",
            ExitCause::PciConfigPort => "pci_config_port",
            ExitCause::OtherDevice => "other_device",
            ExitCause::OtherPort => "other_port",
            ExitCause::IoapicEoi => "ioapic_eoi",
            ExitCause::Marker => "marker",
            ExitCause::Unclaimed => "unclaimed",
            ExitCause::Interrupted => "interrupted",
            ExitCause::Other => "other",
        }
    }
}

/// Exit counts of one vCPU, on cache lines of their own: written by its thread, read by any.
#[derive(Default)]
#[repr(align(128))]
pub struct ExitCounters([AtomicU64; CAUSES]);

impl ExitCounters {
    /// Counts one exit. Only the owning vCPU's thread may call this: of two writers, one would lose
    /// counts.
    #[inline]
    pub fn count(&self, cause: ExitCause) {
        let slot = &self.0[cause as usize];
        // Relaxed: a statistic, which orders nothing. There is one writer, so the load and the
        // store need not be atomic together.
        slot.store(slot.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Returns the present counts.
    pub fn snapshot(&self) -> ExitSnapshot {
        ExitSnapshot(std::array::from_fn(|i| self.0[i].load(Ordering::Relaxed)))
    }
}

/// Counts at one moment. The difference of two snapshots is the count of the time between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitSnapshot([u64; CAUSES]);

impl ExitSnapshot {
    /// Returns the number of exits of this cause.
    pub fn get(&self, cause: ExitCause) -> u64 {
        self.0[cause as usize]
    }

    /// Returns the number of exits of all causes.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// All vCPUs' counters.
#[derive(Clone)]
pub struct ExitLedger(Arc<[ExitCounters]>);

impl ExitLedger {
    /// Creates counters for `cpus` vCPUs, all zero.
    pub fn new(cpus: usize) -> Self {
        Self((0..cpus).map(|_| ExitCounters::default()).collect())
    }

    /// Returns one vCPU's counters.
    pub fn of(&self, cpu: usize) -> &ExitCounters {
        &self.0[cpu]
    }

    /// Returns the sum over all vCPUs.
    pub fn snapshot(&self) -> ExitSnapshot {
        let mut sum = ExitSnapshot::default();
        for counters in self.0.iter() {
            let one = counters.snapshot();
            for (into, add) in sum.0.iter_mut().zip(one.0) {
                *into += add;
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_has_the_exits_of_all_vcpus() {
        let ledger = ExitLedger::new(2);
        ledger.of(0).count(ExitCause::PciConfig);
        ledger.of(0).count(ExitCause::Doorbell);
        ledger.of(1).count(ExitCause::Doorbell);
        let all = ledger.snapshot();
        assert_eq!(all.get(ExitCause::Doorbell), 2);
        assert_eq!(all.get(ExitCause::PciConfig), 1);
        assert_eq!(all.total(), 3);
    }

    #[test]
    fn every_cause_has_its_own_slot() {
        for (index, cause) in ExitCause::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, index);
        }
    }
}
