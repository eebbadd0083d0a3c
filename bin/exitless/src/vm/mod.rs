//! The virtual machine: KVM, memory layout, boot, vCPUs, buses.
//!
//! In reading order:
//! * [`layout`]: where everything is in guest-physical memory and among the ports.
//! * [`kvm`]: opening KVM, the machine, memory slots; [`cpuid`], [`start_state`]: what a vCPU starts with.
//! * [`boot`], [`pvh`]: the kernel into RAM.
//! * [`bus`]: who answers an access; [`platform`]: power, reset, marker.
//! * [`vcpu`]: the loop around `KVM_RUN`; [`exits`]: its counters; [`control`], [`kick`]: pause and end.
//! * [`coalesced`]: KVM's log of register writes; [`iommu_slot`]: the register page as a memory slot.

pub mod boot;
pub mod bus;
pub mod coalesced;
pub mod control;
pub mod cpuid;
pub mod doorbells;
pub mod exits;
pub mod iommu_bus;
pub mod iommu_port;
pub mod iommu_slot;
pub mod kick;
pub mod kvm;
pub mod layout;
pub mod owner;
pub mod platform;
mod pvh;
pub mod start_state;
pub mod vcpu;
