//! Memory of a device that the guest reaches without an exit: pieces of a function's BARs in memory
//! slots of the hypervisor.

/// Hypervisor's view of the BARs of one function. Called by the decoder of its BARs (a vCPU's
/// thread, with the lock of these BARs held): one call at a time, in the order of the changes.
/// Memory goes before the function receives the write that turns decoding off, and comes after it
/// has received the one that turns it on.
pub trait PlaceMemory: Send + Sync {
    /// Shows BAR `bar` at this guest-physical address, or nowhere. On return the guest reaches
    /// nothing where it was before. It may block for as long as the hypervisor needs. What cannot
    /// be shown works as exits.
    fn place(&self, bar: u8, at: Option<u64>);
}
