//! Interrupts of the machine: an I/O APIC of our own beside KVM's local APICs ("split irqchip"), and
//! the one door for messages (MSI) into KVM; and eventfds of other processes that KVM makes messages of.

pub mod calls;
pub mod ioapic;
pub mod msi;
