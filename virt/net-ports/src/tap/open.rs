//! The one place where a TAP interface is opened.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

use net_offload::{HEADER_LEN, Offloads};

/// Reason why a TAP interface cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// Longer than the kernel takes, empty, or with other than printable characters.
    #[error("{0:?} is no interface name (1 to 15 printable characters)")]
    Name(String),
    /// `/dev/net/tun` cannot be opened: no such module, or no permission.
    #[error("/dev/net/tun cannot be opened")]
    Open(#[source] io::Error),
    /// The kernel refuses the interface: no permission, another process has it, or it is no TAP interface.
    #[error("cannot attach to interface {name:?}")]
    Attach {
        /// The interface.
        name: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The interface was made for one queue only.
    #[error("interface {0:?} has one queue (ip tuntap add … multi_queue makes one with more)")]
    OneQueue(String),
    /// The interface cannot be set up.
    #[error("cannot set up the TAP interface")]
    Setup(#[source] io::Error),
}

/// What is known of an interface.
#[derive(Debug)]
pub struct Interface {
    pub mtu: u16,
    /// The kernel segments UDP (6.2).
    pub has_uso: bool,
}

pub fn asked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A request about an interface; the name is 15 bytes at most.
pub fn request(name: &str, flags: libc::c_int) -> libc::ifreq {
    // SAFETY: all zero bytes are a valid `ifreq`: an array of characters and a union of plain data.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(15)) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    request
}

impl Interface {
    /// The interface, and `pairs` queues of it.
    pub fn open(name: &str, pairs: u16) -> Result<(Self, Vec<File>), TapError> {
        let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
        if name.is_empty() || name.len() > 15 || !name.bytes().all(is_plain) {
            return Err(TapError::Name(name.to_owned()));
        }
        let files = match (Self::attach(name, pairs, pairs > 1), pairs) {
            // One that was made for several queues refuses to be had as one of a single queue.
            (Err(TapError::Attach { source, .. }), 1) if is_invalid(&source) => {
                Self::attach(name, pairs, true)?
            }
            (Err(TapError::Attach { source, .. }), 2..) if is_invalid(&source) => {
                return Err(TapError::OneQueue(name.to_owned()));
            }
            (attached, _) => attached?,
        };
        let mut has_uso = false;
        for file in &files {
            let size = HEADER_LEN as libc::c_int;
            // SAFETY: the argument is an int, which lives through the call.
            asked(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const size) })
                .map_err(TapError::Setup)?;
        }
        if let Some(file) = files.first() {
            has_uso = set_offloads(file, Offloads::ALL.tun_flags()).is_ok();
            set_offloads(file, 0).map_err(TapError::Setup)?;
        }
        let mtu = mtu(name).map_err(TapError::Setup)?;
        Ok((Self { mtu, has_uso }, files))
    }

    fn attach(name: &str, pairs: u16, several: bool) -> Result<Vec<File>, TapError> {
        let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if several {
            flags |= libc::IFF_MULTI_QUEUE;
        }
        let files = (0..pairs).map(|_| {
            // Blocking: a read that is posted in an io_uring waits there, and all others say that they do not.
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/net/tun");
            let file = file.map_err(TapError::Open)?;
            let mut request = request(name, flags);
            // SAFETY: TUNSETIFF reads and writes an `ifreq`, which `request` is.
            let attached =
                unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
            asked(attached).map_err(|source| TapError::Attach {
                name: name.to_owned(),
                source,
            })?;
            Ok(file)
        });
        files.collect()
    }
}

fn is_invalid(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINVAL)
}

/// Sets what the kernel leaves undone in frames that are read, for all queues.
pub fn set_offloads(file: &File, flags: u32) -> io::Result<()> {
    let flags = libc::c_ulong::from(flags);
    // SAFETY: the argument is a number.
    asked(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, flags) })
}

fn mtu(name: &str) -> io::Result<u16> {
    // Any socket will do to ask by.
    let socket = UnixDatagram::unbound()?;
    let mut request = request(name, 0);
    // SAFETY: SIOCGIFMTU reads and writes an `ifreq`, which `request` is.
    asked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) })?;
    // SAFETY: the kernel has filled in the MTU, and any bytes are a valid integer.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    Ok(mtu.clamp(68, 65_535) as u16)
}
