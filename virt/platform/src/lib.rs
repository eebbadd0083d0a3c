//! The fixed parts of an x86 machine, as data and state machines: who answers an access, what an
//! interrupt is, the chips every guest expects, the tables and the kernel it starts from.
//!
//! In reading order:
//! * [`layout`]: where everything is in guest-physical memory and among the ports.
//! * [`bus`]: which device answers an address or a port, and what the access was.
//! * [`interrupt`]: an interrupt message, and whoever takes it to a local APIC; [`doorbell`]: what
//!   the other direction has.
//! * [`memory`]: memory of a device that the guest reaches without an exit.
//! * [`ioapic`], [`power`]: the chips.
//! * [`acpi`]: the tables; [`boot`]: kernel, initial RAM disk and command line into RAM.
//!
//! **Who calls, on which thread.** Tables and boot loading: the builder, once, before the first
//! vCPU runs. Chips: vCPU threads, several at once; each chip guards itself, and no lock is held
//! while an interrupt is sent.
//!
//! **Left out.** Local APICs, vCPUs and memory slots belong to the hypervisor; PCI is the crate
//! `pci`. Nothing here knows which hypervisor it runs under, nor which devices the machine has.

pub mod acpi;
pub mod boot;
pub mod bus;
pub mod doorbell;
pub mod interrupt;
pub mod ioapic;
pub mod layout;
pub mod memory;
pub mod power;
