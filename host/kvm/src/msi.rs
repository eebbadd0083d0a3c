//! Message-signalled interrupts into KVM's local APICs by `KVM_SIGNAL_MSI`.
//!
//! Any thread may send. The requester does not matter to KVM: interrupts are remapped before they
//! come here. KVM takes the message without leaving the kernel again. The target vCPU is kicked
//! where the processor cannot post interrupts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_mem::SourceId;
use kvm_bindings::kvm_msi;
use platform::interrupt::{InterruptSink, Message};

use crate::Vm;

/// [`InterruptSink`] of a KVM machine.
pub struct KvmMsi {
    vm: Arc<Vm>,
    sent: AtomicU64,
    refused: AtomicU64,
}

impl KvmMsi {
    /// Messages of this machine.
    pub fn new(vm: Arc<Vm>) -> Self {
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

impl InterruptSink for KvmMsi {
    fn send(&self, _from: SourceId, message: Message) {
        let message = kvm_msi {
            address_lo: message.address as u32,
            address_hi: (message.address >> 32) as u32,
            data: message.data,
            ..Default::default()
        };
        // A guest programs the message, so a refusal is its error and only counted.
        let taken = matches!(self.vm.fd().signal_msi(message), Ok(n) if n > 0);
        let counter = if taken { &self.sent } else { &self.refused };
        // Relaxed: a statistic with several writers.
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
