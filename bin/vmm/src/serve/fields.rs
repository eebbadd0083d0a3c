//! Fields that devices of every kind have: checked once, for disks and network devices.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use vio::Rate;

use crate::values::block::MAX_SOCKET;

/// Returns the name of a device or a switch.
///
/// # Errors
/// It is missing, or none that there can be.
pub fn id(id: Option<&String>) -> Result<String> {
    let id = id.cloned().context("it has no id")?;
    if id.is_empty() || id.len() > 20 || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!("id {id:?} is not 1 to 20 printable ASCII characters");
    }
    Ok(id)
}

/// Returns the name and socket of a device.
///
/// # Errors
/// One of them is missing, or none that there can be.
pub fn id_and_socket(name: Option<&String>, socket: Option<&PathBuf>) -> Result<(String, PathBuf)> {
    let id = id(name)?;
    let socket = socket.cloned().context("it has no socket")?;
    let length = socket.as_os_str().as_bytes().len();
    if length == 0 || length > MAX_SOCKET {
        bail!(
            "socket {} has {length} bytes, where a socket's path has 1 to {MAX_SOCKET}",
            socket.display()
        );
    }
    Ok((id, socket))
}

/// Returns a limit.
///
/// # Errors
/// A burst without one, or one of nothing.
pub fn rate(key: &str, per_second: Option<u64>, burst: Option<u64>) -> Result<Option<Rate>> {
    match (per_second, burst) {
        (None, None) => Ok(None),
        (None, Some(_)) => bail!("{key}-burst without {key}"),
        (Some(0), _) => bail!("{key} is at least 1"),
        (Some(_), Some(0)) => bail!("{key}-burst is at least 1"),
        (Some(per_second), burst) => Ok(Some(Rate {
            per_second,
            burst: burst.unwrap_or(0),
        })),
    }
}
