//! Fixed parts of an x86 machine, as data and state machines: address decoding, interrupt messages,
//! the chips that every guest expects, and the tables and the kernel with which it boots.
//!
//! In reading order:
//! * [`layout`]: addresses in guest-physical memory, and port numbers.
//! * [`bus`]: dispatch of an access to the device at its address or port, and kinds of accesses.
//! * [`interrupt`]: interrupt messages, and their receiver, which delivers them to the local APICs;
//!   [`doorbell`]: notifications from the driver to the device.
//! * [`memory`]: memory of a device that the guest reaches without an exit.
//! * [`ioapic`], [`power`]: the chips.
//! * [`acpi`]: the tables; [`boot`]: kernel, initial RAM disk and command line into RAM.
//!
//! **Callers and threads.** Tables and boot loading: the builder, once, before the first vCPU runs.
//! Chips: vCPU threads, several at once. Each chip does its own locking, and no lock is held while
//! an interrupt is sent.
//!
//! **Left out.** Local APICs, vCPUs and memory slots belong to the hypervisor; PCI is the crate
//! `pci`. Nothing here depends on the hypervisor, nor on the machine's devices.

pub mod acpi;
pub mod boot;
pub mod bus;
pub mod doorbell;
pub mod interrupt;
pub mod ioapic;
pub mod layout;
pub mod memory;
pub mod power;
