//! KVM's system and VM descriptors: capabilities, the split irqchip, memory slots.
//!
//! UNSAFETY: registering a memory slot gives KVM a host address. [`Vm`] and [`Vcpu`] keep the
//! mapping alive for as long as KVM may use it.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_mem::{Gpa, GuestRam, Region, SlotMapping};
use kvm_bindings::{
    KVM_CAP_SPLIT_IRQCHIP, KVM_CAP_X2APIC_API, KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK,
    KVM_X2APIC_API_USE_32BIT_IDS, KvmIrqRouting, kvm_enable_cap, kvm_msi,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use platform::ioapic::PINS;
use platform::layout;

/// Reason why KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// There is no /dev/kvm.
    #[error(
        "this host has no /dev/kvm; `exitless-lab lab -- run …` brings an emulated host with one"
    )]
    Missing,
    /// /dev/kvm may not be opened.
    #[error(
        "no permission for /dev/kvm: be root or in the group that owns it (usually `kvm`), and a \
         container has to be given it"
    )]
    Permission,
    /// The processor has neither vmx nor svm.
    #[error(
        "/dev/kvm here is software KVM (no vmx or svm in /proc/cpuinfo) and cannot boot a kernel: \
         use `exitless-lab lab -- run …`"
    )]
    Software,
    /// A capability is absent.
    #[error("this host's KVM lacks {0}")]
    Capability(&'static str),
    /// Guest memory cannot be mapped for a slot.
    #[error("guest memory cannot be mapped for KVM")]
    Mapping(#[source] io::Error),
    /// KVM refused a request.
    #[error("KVM refused {what}{}", advice(source))]
    Refused {
        /// The request that KVM refused.
        what: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
}

/// Returns advice for errors that a sandbox of the host causes; otherwise the empty string.
fn advice(error: &kvm_ioctls::Error) -> &'static str {
    match error.errno() {
        libc::EPERM | libc::EACCES | libc::ENOSYS => {
            " (nothing stands in for it: a seccomp profile has to allow all requests of KVM)"
        }
        _ => "",
    }
}

/// Returns a function for `map_err` that makes the error «KVM refused `what`».
pub fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |source| KvmError::Refused { what, source }
}

/// Returns whether this host's processor lacks hardware virtualization: `/dev/kvm`, if any, is a
/// software implementation of KVM.
pub fn is_software_kvm() -> bool {
    // If the file is unreadable, KVM's own answers decide.
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

/// Opens `/dev/kvm` without any check. A software implementation of KVM suffices for guests in user
/// mode.
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

/// Opens `/dev/kvm` and checks the capabilities that a machine needs. A software implementation of
/// KVM suffices for a guest of a few instructions.
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

/// A virtual machine of KVM, and the host memory in its memory slots.
pub struct Vm {
    // Declared before the mappings, so that it is dropped first: KVM knows their addresses.
    fd: VmFd,
    slots: Mutex<Slots>,
    /// KVM accepts ioeventfds for doorbells; true until it has refused one.
    has_doorbells: AtomicBool,
}

/// The machine's memory slots by number, with their mappings.
struct Slots {
    /// `None`: the number is free.
    mappings: Vec<Option<Arc<SlotMapping>>>,
    /// Number of slots that KVM supports.
    most: usize,
}

impl Slots {
    /// Returns the lowest free slot number.
    fn free(&self) -> Option<usize> {
        let gap = self.mappings.iter().position(Option::is_none);
        let number = gap.unwrap_or(self.mappings.len());
        (number < self.most).then_some(number)
    }
}

/// A memory slot, which [`Vm::unmap`] removes. If the id is dropped instead, the slot stays as long
/// as the machine.
#[derive(Debug)]
pub struct SlotId(usize);

#[cfg(test)]
impl SlotId {
    pub(crate) fn of_test(number: usize) -> Self {
        Self(number)
    }

    pub(crate) fn number(&self) -> usize {
        self.0
    }
}

/// Failure to remove a memory slot: the guest can still access it.
#[derive(Debug, thiserror::Error)]
#[error("a memory slot stays")]
pub struct StillMapped {
    /// The slot, for another attempt.
    pub slot: SlotId,
    /// KVM's error.
    pub source: KvmError,
}

impl Vm {
    /// Creates a machine without an interrupt controller. Its guest receives no interrupts.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn bare(kvm: &Kvm) -> Result<Self, KvmError> {
        let fd = kvm
            .create_vm()
            .map_err(refused("to create a virtual machine"))?;
        fd.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(refused("the identity map address"))?;
        fd.set_tss_address(layout::KVM_TSS as usize)
            .map_err(refused("the TSS address"))?;
        let slots = Slots {
            mappings: Vec::new(),
            most: kvm.get_nr_memslots(),
        };
        Ok(Self {
            fd,
            slots: Mutex::new(slots),
            has_doorbells: AtomicBool::new(true),
        })
    }

    /// Creates a machine with a split irqchip, whose 24-pin I/O APIC is emulated in user space, and
    /// with 32-bit APIC ids.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn new(kvm: &Kvm) -> Result<Self, KvmError> {
        let vm = Self::bare(kvm)?;
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_SPLIT_IRQCHIP,
            ..Default::default()
        };
        cap.args[0] = PINS as u64;
        vm.fd.enable_cap(&cap).map_err(refused("a split irqchip"))?;
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_X2APIC_API,
            ..Default::default()
        };
        cap.args[0] =
            u64::from(KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK);
        vm.fd.enable_cap(&cap).map_err(refused("32-bit APIC ids"))?;
        Ok(vm)
    }

    /// Tests the two requests on which a running guest's interrupts depend, since a later refusal
    /// would leave the guest waiting: MSIs and the table of GSI routes. For a machine whose vCPU 0
    /// has not run.
    ///
    /// # Errors
    /// KVM refuses one of them.
    pub fn try_interrupts(&self) -> Result<(), KvmError> {
        // Sent to a local APIC that is disabled, as after reset: no vCPU accepts the message, and
        // KVM reports no error for that.
        let message = kvm_msi {
            address_lo: 0xfee0_0000,
            data: 0xff,
            ..Default::default()
        };
        self.fd
            .signal_msi(message)
            .map_err(refused("messages for local APICs (KVM_SIGNAL_MSI)"))?;
        let none = KvmIrqRouting::from_entries(&[]).expect("an empty table has room");
        self.fd
            .set_gsi_routing(&none)
            .map_err(refused("routes of interrupts (KVM_SET_GSI_ROUTING)"))
    }

    /// Returns the VM descriptor for the other modules of this crate. They do not create slots or
    /// vCPUs by it: only [`map`](Self::map) and [`Vcpu::new`] do.
    pub(crate) fn fd(&self) -> &VmFd {
        &self.fd
    }

    // Relaxed: written before a second thread exists, and orders no other data.
    pub(crate) fn has_doorbells(&self) -> bool {
        self.has_doorbells.load(Ordering::Relaxed)
    }

    pub(crate) fn go_without_doorbells(&self) {
        self.has_doorbells.store(false, Ordering::Relaxed);
    }

    /// Maps `mapping` into the guest at `gpa` (a multiple of 4 KiB) by a memory slot, until that is
    /// removed or the machine is dropped. `flags` are KVM's, for example `KVM_MEM_READONLY`.
    ///
    /// # Errors
    /// KVM refuses, or has no free slot: nothing has changed.
    pub fn map(
        &self,
        gpa: Gpa,
        mapping: &Arc<SlotMapping>,
        flags: u32,
    ) -> Result<SlotId, KvmError> {
        let mut slots = self.slots();
        let number = slots
            .free()
            .ok_or(KvmError::Capability("memory slots: all are taken"))?;
        let region = kvm_userspace_memory_region {
            slot: number as u32,
            flags,
            guest_phys_addr: gpa.raw(),
            memory_size: mapping.len(),
            userspace_addr: mapping.hva().raw(),
        };
        // SAFETY: `mapping` is shared memory of that size, to which this process keeps no
        // references. `slots` keeps it until KVM has removed the slot, or until the descriptor is
        // closed. vCPUs keep the kernel's machine alive; each holds this machine ([`Vcpu`]).
        unsafe { self.fd.set_user_memory_region(region) }.map_err(refused("a memory slot"))?;
        if number == slots.mappings.len() {
            slots.mappings.push(None);
        }
        slots.mappings[number] = Some(mapping.clone());
        Ok(SlotId(number))
    }

    /// Removes a memory slot. When this call returns, the guest cannot access the memory any more,
    /// and the slot's number is free. It waits for a grace period of KVM (SRCU), until no vCPU is
    /// in the middle of an access.
    ///
    /// # Errors
    /// KVM refuses, for example when out of memory: the slot and its mapping are unchanged.
    pub fn unmap(&self, slot: SlotId) -> Result<(), StillMapped> {
        let mut slots = self.slots();
        let SlotId(number) = slot;
        let Some(Some(mapping)) = slots.mappings.get(number) else {
            // A slot of another machine: a bug of the caller.
            debug_assert!(false, "slot {number} is not this machine's");
            return Ok(());
        };
        let region = kvm_userspace_memory_region {
            slot: number as u32,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: 0,
            userspace_addr: mapping.hva().raw(),
        };
        // SAFETY: of size 0: KVM drops the address that it has and receives none.
        match unsafe { self.fd.set_user_memory_region(region) } {
            Ok(()) => {
                slots.mappings[number] = None;
                Ok(())
            }
            Err(error) => Err(StillMapped {
                slot,
                source: refused("to remove a memory slot")(error),
            }),
        }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps the guest's RAM: makes a mapping and a slot for each region, in their order.
    ///
    /// # Errors
    /// The host has no memory for the mapping, or KVM refuses.
    pub fn map_ram(&self, ram: &GuestRam) -> Result<Vec<Arc<SlotMapping>>, KvmError> {
        let show = |region: &Region| {
            let mapping = ram.slot_mapping(region).map_err(KvmError::Mapping)?;
            let mapping = Arc::new(mapping);
            self.map(region.gpa, &mapping, 0)?;
            Ok(mapping)
        };
        ram.regions().iter().map(show).collect()
    }
}

/// A vCPU. It keeps its machine alive.
pub struct Vcpu {
    // Declared before the machine, so that it is dropped first: the vCPU runs on the machine's
    // memory.
    fd: VcpuFd,
    _vm: Arc<Vm>,
}

impl Vcpu {
    /// Creates the vCPU number `index` of `vm`.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn new(vm: &Arc<Vm>, index: u8) -> Result<Self, KvmError> {
        let fd = vm.fd.create_vcpu(u64::from(index));
        Ok(Self {
            fd: fd.map_err(refused("to create a vCPU"))?,
            _vm: vm.clone(),
        })
    }

    /// Returns the vCPU, for requests that read its state.
    pub fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// Returns the vCPU, for requests that change its state or run it.
    pub fn fd_mut(&mut self) -> &mut VcpuFd {
        &mut self.fd
    }

    /// Returns the vCPU's file descriptor.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `fd`, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.fd.as_raw_fd()) }
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
