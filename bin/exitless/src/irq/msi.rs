//! Message-signalled interrupts into KVM's local APICs by `KVM_SIGNAL_MSI`.
//!
//! Any thread may send. KVM takes the message without leaving the kernel again; the target vCPU is
//! kicked where the processor cannot post interrupts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;

/// Where interrupt messages go.
pub trait MsiSink: Send + Sync {
    /// Sends the 32-bit `data` to `address` (`0xFEEx_xxxx`; bits 63:32 hold destination bits 31:8 as
    /// `KVM_CAP_X2APIC_API` defines). A message no local APIC takes is lost, as on hardware.
    fn send(&self, address: u64, data: u32);
}

/// [`MsiSink`] of a KVM machine.
pub struct KvmMsi {
    vm: Arc<VmFd>,
    sent: AtomicU64,
    refused: AtomicU64,
}

impl KvmMsi {
    /// Messages of this machine.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            sent: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// Messages that reached a local APIC.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Messages no local APIC took.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

impl MsiSink for KvmMsi {
    fn send(&self, address: u64, data: u32) {
        let message = kvm_msi {
            address_lo: address as u32,
            address_hi: (address >> 32) as u32,
            data,
            ..Default::default()
        };
        // A guest programs the message, so a refusal is its error and only counted.
        let taken = matches!(self.vm.signal_msi(message), Ok(n) if n > 0);
        let counter = if taken { &self.sent } else { &self.refused };
        // Relaxed: a statistic with several writers.
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
