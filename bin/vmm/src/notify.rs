//! Notifications to a service manager: the program is ready, or it ends (sd_notify(3)).
//!
//! The manager listens on the datagram socket that the environment names in `NOTIFY_SOCKET`: a
//! path, or an abstract name behind an `@`. Without it no notification is sent. Sending never
//! waits: a message for which the manager has no room is lost.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Notifies the manager that the program is ready; `status` is a text for people.
pub fn ready(status: &str) {
    tell(&format!("READY=1\nSTATUS={status}"));
}

/// Notifies the manager that the end has begun.
pub fn stopping() {
    tell("STOPPING=1");
}

fn tell(message: &str) {
    if let Some(name) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = send(&name, message)
    {
        tracing::warn!("the service manager at NOTIFY_SOCKET={name:?} cannot be told: {error}");
    }
}

fn send(name: &OsStr, message: &str) -> io::Result<()> {
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => {
            let what = "neither a path from the root nor an abstract name (@…)";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to_addr(message.as_bytes(), &address).map(drop)
}
