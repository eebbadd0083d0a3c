//! Size of the host's memory.

use std::io;

use anyhow::{Context, Result};

/// Returns the RAM of this host in bytes.
///
/// # Errors
/// The system does not say.
pub fn bytes() -> Result<u64> {
    // SAFETY: no pointers; -1 on error.
    let (pages, page) = unsafe {
        (
            libc::sysconf(libc::_SC_PHYS_PAGES),
            libc::sysconf(libc::_SC_PAGESIZE),
        )
    };
    match (u64::try_from(pages), u64::try_from(page)) {
        (Ok(pages), Ok(page)) => Ok(pages * page),
        _ => Err(io::Error::last_os_error()).context("this host's memory cannot be told"),
    }
}
