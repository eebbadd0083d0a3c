//! Memory of a device that the guest reaches without an exit: pieces of a function's BARs in memory
//! slots of the hypervisor.

/// Hypervisor's view of the BARs of one function. Called by the decoder of its BARs (a vCPU's
/// thread, with the lock of these BARs held): one call at a time, in the order of the changes.
/// Memory is unmapped before the function receives the write that turns decoding off, and mapped
/// after it has received the one that turns it on.
pub trait PlaceMemory: Send + Sync {
    /// Maps BAR `bar` at this guest-physical address, or nowhere. On return the guest reaches
    /// nothing at the BAR's former address. It may block for as long as the hypervisor needs.
    /// Accesses to memory that cannot be mapped exit.
    fn place(&self, bar: u8, at: Option<u64>);
}
