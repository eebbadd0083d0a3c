//! Words of firmware's tables (ACPI 6.5, §5.2), which are believed within bounds.

/// The most tables, and the most entries of one, that are read.
pub const ITEMS_MAX: usize = 64;
/// The longest table that is believed, bytes.
const LEN_MAX: u32 = 1 << 20;

/// Returns the length of a table in bytes, as it says.
pub fn length(table: u64) -> u32 {
    read32(table + 4).min(LEN_MAX)
}

/// Reads a word of a table.
pub fn read32(address: u64) -> u32 {
    // SAFETY: below 4 GiB everything is mapped, and firmware's tables, and what they point to, are
    // memory.
    unsafe { (address as *const u32).read_unaligned() }
}

/// Reads two words of a table.
pub fn read64(address: u64) -> u64 {
    u64::from(read32(address)) | u64::from(read32(address + 4)) << 32
}
