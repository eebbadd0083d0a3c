//! `--disk socket=…`, checked: a disk that another process serves over vhost-user.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::bail;

use vhost_import::Class;

use super::disk::of_disk;
use super::remote::{RemoteConfig, Server};
use crate::moved;
use crate::values::block::{BlockSpec, MAX_SOCKET, all_but};
use crate::values::keys::Keys;

/// One disk behind a socket.
#[derive(Debug)]
pub struct RemoteDiskConfig {
    /// The back end's socket.
    pub socket: PathBuf,
    /// Request queues, 1 to 16.
    pub queues: u16,
    /// Entries of each, a power of two.
    pub queue_size: u16,
    /// Its name in the log. What the guest sees as the serial number is the back end's.
    pub id: String,
}

/// The keys of a block device that a disk behind a socket takes here.
const KEYS: [&str; 3] = ["id", "queues", "queue-size"];

impl RemoteDiskConfig {
    /// Checks the `index`-th `--disk`, of which `socket` has been taken.
    pub fn check(socket: &str, mut keys: Keys<'_>, index: usize) -> anyhow::Result<Self> {
        let socket = socket_path("--disk", Path::new(socket))?;
        // The latency is set at the process that serves it.
        moved::refuse_latency(&keys, "serve", "diskN")?;
        // The socket has been taken.
        keys.refuse(all_but(&KEYS).filter(|key| *key != "socket"), |key| {
            format!(
                "for whoever serves socket={}, for instance exitless serve --block {key}=…",
                socket.display()
            )
        })?;
        let spec = BlockSpec::take(&mut keys, &KEYS)?;
        let queues = of_disk(spec.queues())?;
        let queue_size = of_disk(spec.queue_size(256))?;
        let id = match spec.id {
            Some(id) if id.is_empty() => bail!("--disk: id is empty"),
            id => id.unwrap_or_else(|| format!("exitless{index}")),
        };
        keys.finish()?;
        Ok(Self {
            socket,
            queues,
            queue_size,
            id,
        })
    }

    /// Returns the device that serves it.
    pub fn into_remote(self, has_iommu: bool) -> RemoteConfig {
        RemoteConfig {
            server: Server::Socket {
                socket: self.socket,
                class: Class::Block,
            },
            queues: self.queues,
            queue_size: self.queue_size,
            id: self.id,
            has_iommu,
        }
    }
}

/// Returns the path of a back end's socket, of the right length for one.
pub fn socket_path(option: &str, socket: &Path) -> anyhow::Result<PathBuf> {
    let length = socket.as_os_str().as_bytes().len();
    if length == 0 || length > MAX_SOCKET {
        bail!(
            "{option}: socket {socket:?} has {length} bytes, where a socket's path has 1 to \
             {MAX_SOCKET}"
        );
    }
    Ok(socket.to_owned())
}

#[cfg(test)]
mod tests;
