//! CPUID of the guest: the features that KVM supports here, with topology, and without those that
//! the machine does not offer.
//!
//! Follows Intel SDM volume 2 (CPUID) and AMD APM volume 3 appendix E. KVM's own leaves
//! (0x4000_0000: signature, kvmclock, PV end of interrupt, …) come from `KVM_GET_SUPPORTED_CPUID`
//! as they are; they let a guest use x2APIC without interrupt remapping. Removed: nested
//! virtualization, performance counters (an NMI watchdog would only add exits), MSI extended
//! destination ids (they belong to a machine without interrupt remapping but more than 255 vCPUs).

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

use crate::vm::{KvmError, refused};

const KVM_FEATURES: u32 = 0x4000_0001;
/// `KVM_FEATURE_MSI_EXT_DEST_ID`.
const KVM_MSI_EXT_DEST_ID: u32 = 1 << 15;

/// Asynchronous page faults (`KVM_FEATURE_ASYNC_PF`, `_VMEXIT`, `_INT`): the guest would run
/// something else while a page comes, and its faults would be a kernel thread's. Time that was
/// stolen, and end of interrupt by a word in memory (`KVM_FEATURE_STEAL_TIME`, `_PV_EOI`): stores
/// that KVM makes by itself, where a vCPU that is kicked spins until the page has come.
const DISTURBED_BY_MOVING_PAGES: u32 = 1 << 4 | 1 << 10 | 1 << 14 | 1 << 5 | 1 << 6;

/// Takes away what does not go with memory whose pages come and go.
pub fn hide_what_moving_pages_disturb(supported: &mut CpuId) {
    for entry in supported.as_mut_slice() {
        if entry.function == KVM_FEATURES {
            set(&mut entry.eax, DISTURBED_BY_MOVING_PAGES, false);
        }
    }
}

/// Returns the CPUID that this host's KVM supports.
pub fn supported(kvm: &Kvm) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(refused("to list its CPUID"))
}

/// Returns the number of bits of the guest-physical addresses that a guest of this CPUID can use
/// (leaf 0x8000_0008): EAX 7:0, or 23:16 where the host translates fewer than its processor has.
pub fn physical_address_bits(cpuid: &CpuId) -> u8 {
    /// Bits of a processor that does not report them (AMD APM volume 3, Intel SDM volume 2: 36 with
    /// PAE).
    const UNTOLD: u8 = 36;
    let leaf = cpuid.as_slice().iter().find(|e| e.function == 0x8000_0008);
    leaf.map_or(UNTOLD, |entry| match entry.eax.to_le_bytes() {
        [bits, _, 0, _] => bits,
        [bits, _, guest, _] => bits.min(guest),
    })
}

/// Returns the number of bits of an APIC id below the package, for `cpus` vCPUs in one package.
fn core_bits(cpus: u8) -> u32 {
    u32::from(cpus).next_power_of_two().trailing_zeros()
}

fn set(word: &mut u32, mask: u32, on: bool) {
    if on {
        *word |= mask;
    } else {
        *word &= !mask;
    }
}

fn adapt(entry: &mut kvm_cpuid_entry2, apic_id: u8, cpus: u8) {
    let bits = core_bits(cpus);
    match entry.function {
        1 => {
            entry.ebx = entry.ebx & 0x0000_ffff | 1 << (16 + bits) | u32::from(apic_id) << 24;
            set(&mut entry.edx, 1 << 28, cpus > 1);
            // VMX off; x2APIC, TSC deadline timer and "under a hypervisor" on: KVM's local APIC has
            // them all.
            set(&mut entry.ecx, 1 << 5, false);
            set(&mut entry.ecx, 1 << 21 | 1 << 24 | 1 << 31, true);
        }
        // Cache leaves: cores in the package (Intel); no cache is shared between vCPUs, as far as
        // they know.
        4 => entry.eax = entry.eax & 0x0000_3fff | ((1 << bits) - 1) << 26,
        // Performance counters.
        0xa => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        KVM_FEATURES => set(&mut entry.eax, KVM_MSI_EXT_DEST_ID, false),
        0x8000_0001 => {
            // SVM (2), and AMD's performance counter extensions (23, 24, 28).
            set(&mut entry.ecx, 1 << 2 | 1 << 23 | 1 << 24 | 1 << 28, false);
            // CmpLegacy: the logical processors of leaf 1 are cores.
            set(&mut entry.ecx, 1 << 1, cpus > 1);
        }
        0x8000_0008 => entry.ecx = bits << 12 | u32::from(cpus - 1),
        // AMD performance monitoring version 2.
        0x8000_0022 => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        0x8000_001d => entry.eax &= 0x0000_3fff,
        0x8000_001e => {
            (entry.eax, entry.ebx, entry.ecx) = (u32::from(apic_id), u32::from(apic_id), 0);
        }
        _ => {}
    }
}

/// Returns the extended topology (leaves 0xB and 0x1F): one thread per core, all cores in one
/// package.
fn topology(leaf: u32, apic_id: u8, cpus: u8) -> [kvm_cpuid_entry2; 3] {
    let level = |index: u32, kind: u32, shift: u32, count: u32| kvm_cpuid_entry2 {
        function: leaf,
        index,
        // KVM_CPUID_FLAG_SIGNIFCANT_INDEX
        flags: 1,
        eax: shift,
        ebx: count,
        ecx: index | kind << 8,
        edx: u32::from(apic_id),
        ..Default::default()
    };
    [
        level(0, 1, 0, 1),
        level(1, 2, core_bits(cpus), u32::from(cpus)),
        level(2, 0, 0, 0),
    ]
}

/// Returns the CPUID of the vCPU with this APIC id among `cpus`.
pub fn for_vcpu(supported: &CpuId, apic_id: u8, cpus: u8) -> CpuId {
    let mut entries: Vec<_> = supported
        .as_slice()
        .iter()
        .filter(|entry| !matches!(entry.function, 0xb | 0x1f))
        .copied()
        .collect();
    for entry in &mut entries {
        adapt(entry, apic_id, cpus);
    }
    // Leaf 0 has the highest basic leaf; Linux reads 0xB only up to there.
    let highest = entries
        .iter()
        .find(|e| e.function == 0)
        .map_or(0, |e| e.eax);
    for leaf in [0xb, 0x1f] {
        if leaf <= highest {
            entries.extend(topology(leaf, apic_id, cpus));
        }
    }
    entries.truncate(KVM_MAX_CPUID_ENTRIES);
    CpuId::from_entries(&entries).expect("at most KVM_MAX_CPUID_ENTRIES entries")
}

#[cfg(test)]
mod tests;
