//! Interrupts of the machine: an I/O APIC of our own beside KVM's local APICs ("split irqchip"), and
//! the one door for messages (MSI) into KVM.

pub mod ioapic;
pub mod msi;
