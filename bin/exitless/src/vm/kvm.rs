//! Opening KVM and creating the machine: capabilities, split irqchip, GSI routes.
//!
//! UNSAFETY: registering memory slots hands host addresses to KVM.

use std::fs;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_mem::{Gpa, GuestRam, Hva};
use kvm_bindings::{
    KVM_CAP_SPLIT_IRQCHIP, KVM_CAP_X2APIC_API, KVM_IRQ_ROUTING_MSI,
    KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK, KVM_X2APIC_API_USE_32BIT_IDS, KvmIrqRouting,
    kvm_enable_cap, kvm_irq_routing_entry, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VmFd};

use super::layout;
use crate::irq::ioapic::{Message, PINS, RouteSink, Routes};

/// Why KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// No device file.
    #[error("this host has no /dev/kvm; `exitless lab -- run …` brings an emulated host with one")]
    Missing,
    /// No permission.
    #[error("no permission for /dev/kvm: be root or in the group that owns it (usually `kvm`)")]
    Permission,
    /// No vmx or svm.
    #[error(
        "/dev/kvm here is software KVM (no vmx or svm in /proc/cpuinfo) and cannot boot a kernel: \
         use `exitless lab -- run …`"
    )]
    Software,
    /// A capability is absent.
    #[error("this host's KVM lacks {0}")]
    Capability(&'static str),
    /// A request was refused.
    #[error("KVM refused {what}")]
    Refused {
        /// The request.
        what: &'static str,
        /// KVM's answer.
        source: kvm_ioctls::Error,
    },
}

/// For `map_err`: KVM refused `what`.
pub fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |source| KvmError::Refused { what, source }
}

/// Whether this host's processor cannot virtualize: `/dev/kvm`, if any, is KVM in software.
pub fn is_software_kvm() -> bool {
    // Unreadable: let KVM speak for itself.
    fs::read_to_string("/proc/cpuinfo").is_ok_and(|info| !has_virtualization(&info))
}

fn has_virtualization(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| {
            line.split_whitespace()
                .any(|flag| flag == "vmx" || flag == "svm")
        })
}

/// Opens `/dev/kvm`, whatever it can do: software KVM runs user-mode code well.
pub fn open_any() -> Result<Kvm, KvmError> {
    Kvm::new().map_err(
        |error| match io::Error::from_raw_os_error(error.errno()).kind() {
            io::ErrorKind::NotFound => KvmError::Missing,
            io::ErrorKind::PermissionDenied => KvmError::Permission,
            _ => refused("to open /dev/kvm")(error),
        },
    )
}

/// Opens `/dev/kvm` and checks that it can run a stock kernel.
pub fn open() -> Result<Kvm, KvmError> {
    let kvm = open_for_programs()?;
    if is_software_kvm() {
        return Err(KvmError::Software);
    }
    Ok(kvm)
}

/// Opens `/dev/kvm` and checks that it has what a machine is made of. Software KVM will do for a guest of a few instructions.
pub fn open_for_programs() -> Result<Kvm, KvmError> {
    let kvm = open_any()?;
    for (cap, name) in [
        (Cap::SplitIrqchip, "KVM_CAP_SPLIT_IRQCHIP"),
        (Cap::X2ApicApi, "KVM_CAP_X2APIC_API"),
        (Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI"),
        (Cap::Irqfd, "KVM_CAP_IRQFD"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
    ] {
        if !kvm.check_extension(cap) {
            return Err(KvmError::Capability(name));
        }
    }
    Ok(kvm)
}

/// Creates the machine: split irqchip with our I/O APIC's 24 pins, 32-bit APIC ids.
pub fn create(kvm: &Kvm) -> Result<Arc<VmFd>, KvmError> {
    let vm = kvm
        .create_vm()
        .map_err(refused("to create a virtual machine"))?;
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(refused("the identity map address"))?;
    vm.set_tss_address(layout::KVM_TSS as usize)
        .map_err(refused("the TSS address"))?;
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_SPLIT_IRQCHIP,
        ..Default::default()
    };
    cap.args[0] = PINS as u64;
    vm.enable_cap(&cap).map_err(refused("a split irqchip"))?;
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_X2APIC_API,
        ..Default::default()
    };
    cap.args[0] = u64::from(KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK);
    vm.enable_cap(&cap).map_err(refused("32-bit APIC ids"))?;
    Ok(Arc::new(vm))
}

/// First memory slot that is not RAM's, for register pages.
pub const FIRST_FREE_SLOT: u32 = 8;

/// Gives the guest its RAM: one memory slot per region, from slot 0.
///
/// # Safety
/// `ram` must stay mapped for as long as `vm` exists: whoever keeps the one keeps a clone of the other.
pub unsafe fn map_ram(vm: &VmFd, ram: &GuestRam) -> Result<(), KvmError> {
    for (slot, region) in (0..).zip(ram.regions()) {
        // SAFETY: the region is this process's own mapping of `len` bytes; the caller keeps it.
        unsafe { map_slot(vm, slot, region.gpa, region.len, region.hva, 0) }?;
    }
    Ok(())
}

/// Sets one memory slot: `len` bytes at `hva` appear at `gpa` (all multiples of 4 KiB; zero bytes remove the slot).
/// `flags` are KVM's, for instance `KVM_MEM_READONLY`.
///
/// # Safety
/// `[hva, hva + len)` must be shared memory mapped in this process until the slot is removed or `vm` closed.
pub unsafe fn map_slot(
    vm: &VmFd,
    slot: u32,
    gpa: Gpa,
    len: u64,
    hva: Hva,
    flags: u32,
) -> Result<(), KvmError> {
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa.raw(),
        memory_size: len,
        userspace_addr: hva.raw(),
    };
    // SAFETY: the caller's promise is what KVM needs.
    unsafe { vm.set_user_memory_region(region) }.map_err(refused("a memory slot"))
}

/// KVM's table of GSI routes. The I/O APIC's level-triggered pins have theirs, from which KVM knows which vectors' ends to
/// report; behind them come those of eventfds that are interrupts.
pub struct KvmRoutes {
    vm: Arc<VmFd>,
    table: Mutex<RouteTable>,
}

/// What KVM has; a change costs a grace period of the host's kernel, so equal tables are not sent again.
struct RouteTable {
    pins: Routes,
    /// Of GSI [`PINS`] and on.
    others: Vec<Option<Message>>,
}

impl KvmRoutes {
    /// Nothing routed.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            table: Mutex::new(RouteTable {
                pins: [None; PINS],
                others: Vec::new(),
            }),
        }
    }

    /// A GSI of its own, without a route. There are few devices, and KVM has 4096.
    pub fn new_gsi(&self) -> u32 {
        let mut table = self.table();
        table.others.push(None);
        (PINS + table.others.len() - 1) as u32
    }

    /// Routes `gsi`, one of [`new_gsi`](Self::new_gsi), to this message. False: KVM refused.
    pub fn route(&self, gsi: u32, message: Message) -> bool {
        let mut table = self.table();
        let at = gsi as usize - PINS;
        let old = table.others[at].replace(message);
        if old == Some(message) {
            return true;
        }
        let taken = self.send(&table);
        if !taken {
            table.others[at] = old;
        }
        taken
    }

    fn table(&self) -> MutexGuard<'_, RouteTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, table: &RouteTable) -> bool {
        let routes = (0..).zip(table.pins.iter().chain(&table.others));
        let entries: Vec<_> = routes
            .filter_map(|(gsi, route)| route.map(|message| route_entry(gsi, message)))
            .collect();
        KvmIrqRouting::from_entries(&entries)
            .is_ok_and(|entries| self.vm.set_gsi_routing(&entries).is_ok())
    }
}

fn route_entry(gsi: u32, (address, data): Message) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        ..Default::default()
    };
    entry.u.msi.address_lo = address as u32;
    entry.u.msi.address_hi = (address >> 32) as u32;
    entry.u.msi.data = data;
    entry
}

impl RouteSink for KvmRoutes {
    fn update(&self, routes: &Routes) {
        let mut table = self.table();
        if table.pins == *routes {
            return;
        }
        let old = std::mem::replace(&mut table.pins, *routes);
        // A refusal (out of memory) costs a level-triggered pin its next interrupts.
        if !self.send(&table) {
            table.pins = old;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_kvm_is_told_by_its_missing_flags() {
        assert!(has_virtualization(
            "processor : 0\nflags\t\t: fpu svm npt\n"
        ));
        assert!(has_virtualization("flags : fpu vmx\n"));
        assert!(!has_virtualization(
            "model name : svm lookalike\nflags : fpu svm_lock\n"
        ));
    }
}
