//! Virtio over PCI, modern interface (Virtio 1.2, §4.1): registers, MSI-X, and the function that joins
//! them to a device.

pub mod common;
pub mod config;
pub mod function;
pub mod msix;
pub mod port;
