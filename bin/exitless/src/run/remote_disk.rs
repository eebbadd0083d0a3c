//! `--disk socket=…`, checked: a disk that another process serves over vhost-user.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::bail;

use super::disk::of_disk;
use crate::values::block::{BlockSpec, MAX_SOCKET};
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

impl RemoteDiskConfig {
    /// Checks the `index`-th `--disk`, of which `socket` has been taken.
    pub fn check(socket: &str, mut keys: Keys<'_>, index: usize) -> anyhow::Result<Self> {
        let socket = PathBuf::from(socket);
        let length = socket.as_os_str().as_bytes().len();
        if length == 0 || length > MAX_SOCKET {
            bail!(
                "--disk: socket {socket:?} has {length} bytes, where a socket's path has 1 to {MAX_SOCKET}"
            );
        }
        for key in [
            "path",
            "readonly",
            "block",
            "direct",
            "locking",
            "latency",
            "misbehave",
        ] {
            if keys.take(key).is_some() {
                bail!(
                    "--disk: {key} is for whoever serves socket={}, for instance \
                     exitless serve --block {key}=…",
                    socket.display()
                );
            }
        }
        let spec = BlockSpec::take(&mut keys, &["id", "queues", "queue-size"])?;
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> anyhow::Result<RemoteDiskConfig> {
        let mut keys = Keys::parse("--disk", text).unwrap();
        let socket = keys.take("socket").unwrap();
        RemoteDiskConfig::check(socket, keys, 3)
    }

    #[test]
    fn a_socket_alone_has_one_queue_and_a_name() {
        let disk = check("socket=/tmp/a.sock").unwrap();
        assert_eq!((disk.queues, disk.queue_size), (1, 256));
        assert_eq!(disk.id, "exitless3");
        let disk = check("socket=a,queues=4,queue-size=128,id=blue").unwrap();
        assert_eq!((disk.queues, disk.queue_size), (4, 128));
        assert_eq!(disk.id, "blue");
    }

    #[test]
    fn what_belongs_to_the_server_is_told_so() {
        let error = check("socket=a,readonly=on").unwrap_err().to_string();
        assert!(
            error.contains("exitless serve --block readonly="),
            "{error}"
        );
    }

    #[test]
    fn nonsense_is_refused() {
        let long = format!("socket={}", "x".repeat(108));
        for text in [
            "socket=",
            "socket=a,queues=0",
            "socket=a,queues=17",
            "socket=a,queue-size=100",
            "socket=a,id=",
            "socket=a,colour=red",
            "socket=a,path=b",
            &long,
        ] {
            assert!(check(text).is_err(), "{text}");
        }
    }
}
