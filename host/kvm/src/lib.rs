//! Linux KVM under the machine library.
//!
//! In reading order:
//! * [`vm`]: opening KVM, the machine, its memory slots; [`cpuid`], [`start_state`]: what a vCPU
//!   starts with.
//! * [`vcpu`]: the loop around `KVM_RUN`; [`exits`]: its counters; [`control`], [`kick`]: pause and
//!   end.
//! * [`msi`], [`routes`], [`lines`]: interrupt messages, and eventfds that are interrupts;
//!   [`doorbells`]: the other direction.
//! * [`coalesced`], [`zones`], [`register_page`]: KVM's log of register writes, dealt out to the
//!   units, and a unit's register page as a memory slot.
//! * [`bar_memory`]: BARs of a device as memory slots; [`vfio_device`]: the devices' groups, for
//!   KVM to know.
//!
//! **Memory slots own what they show** ([`vm::Vm::map`]): each has a mapping of its own, so that
//! nothing done to the guest's view (write protection, missing pages) is met by a device, and the
//! mapping lives until KVM has removed the slot, or as long as the machine or any of its vCPUs.
//!
//! UNSAFETY: memory slots, `kvm_run`, signals, KVM's shared pages; each module says which.

pub mod bar_memory;
pub mod coalesced;
pub mod control;
pub mod cpuid;
pub mod doorbells;
pub mod exits;
pub mod kick;
pub mod lines;
pub mod msi;
pub mod register_page;
pub mod routes;
pub mod start_state;
#[cfg(test)]
mod testing;
pub mod vcpu;
pub mod vfio_device;
pub mod vm;
pub mod zones;

pub use kvm_ioctls::Kvm;
pub use vm::{KvmError, Vcpu, Vm};
