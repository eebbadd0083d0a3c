//! Opening and configuration of TAP interfaces.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;

use net_offload::{HEADER_LEN, Offloads};

/// Reason why a TAP interface cannot be used. Messages leave the interface's name to the caller.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name is longer than the kernel accepts, empty, or has other than printable characters.
    #[error("{0:?} is no interface name (1 to 15 printable characters)")]
    Name(String),
    /// There is no interface of that name, and it is not to be created.
    #[error("there is no such interface")]
    Missing,
    /// `/dev/net/tun` cannot be opened: no such module, or no permission.
    #[error("/dev/net/tun cannot be opened")]
    Open(#[source] io::Error),
    /// The kernel refuses the interface to this user, who needs CAP_NET_ADMIN or an interface
    /// created for this user.
    #[error("no permission")]
    Denied(#[source] io::Error),
    /// Another process has attached to all of its queues.
    #[error("another process has it open")]
    Busy,
    /// The interface is of another kind.
    #[error("it exists and is no TAP interface")]
    Kind,
    /// The interface was created for one queue only.
    #[error("it has one queue")]
    OneQueue,
    /// The interface's MTU is less than the requested one.
    #[error("its MTU is {has}, less than {asked}")]
    Mtu {
        /// The requested MTU.
        asked: u16,
        /// The interface's MTU.
        has: u16,
    },
    /// The kernel refuses the interface for another reason.
    #[error("the host refused it")]
    Attach(#[source] io::Error),
    /// The interface cannot be set up.
    #[error("it cannot be set up")]
    Setup(#[source] io::Error),
}

/// Options for opening an interface.
#[derive(Clone, Copy, Debug)]
pub struct TapOptions<'n> {
    /// Its name.
    pub name: &'n str,
    /// Number of queues, at least 1.
    pub pairs: u16,
    /// Largest packet in bytes, at most the interface's MTU, which is the default.
    pub mtu: Option<u16>,
    /// A missing interface is created, if permitted, and is removed with its queues. If
    pub is_made: bool,
}

/// Properties of an interface.
#[derive(Clone, Debug)]
pub struct Interface {
    pub name: String,
    pub mtu: u16,
    /// The kernel supports UDP segmentation offload (Linux 6.2).
    pub has_uso: bool,
}

/// Converts the result of an ioctl.
pub fn asked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Creates the request for an interface; the name has at most 15 bytes.
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
    /// Opens or creates the interface. Returns it and its queues.
    pub fn open(options: &TapOptions<'_>) -> Result<(Self, Vec<File>), TapError> {
        let (name, pairs) = (options.name, options.pairs.max(1));
        let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
        if name.is_empty() || name.len() > 15 || !name.bytes().all(is_plain) {
            return Err(TapError::Name(name.to_owned()));
        }
        let was_there = is_there(name).map_err(TapError::Setup)?;
        if !was_there && !options.is_made {
            return Err(TapError::Missing);
        }
        let files = match (attach(name, pairs, pairs > 1), pairs) {
            // The kernel refuses to attach with IFF_MULTI_QUEUE to an interface created without it,
            // and vice versa.
            (Err(TapError::Kind), 1) => attach(name, 1, true)?,
            (Err(TapError::Kind), 2..) => {
                return Err(match attach(name, 1, false) {
                    Ok(_) | Err(TapError::Busy) => TapError::OneQueue,
                    Err(error) => error,
                });
            }
            (attached, _) => attached?,
        };
        for file in &files {
            let size = HEADER_LEN as libc::c_int;
            // SAFETY: the argument is an int, which lives through the call.
            asked(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const size) })
                .map_err(TapError::Setup)?;
        }
        let mut has_uso = false;
        if let Some(file) = files.first() {
            has_uso = set_offloads(file, Offloads::ALL.tun_flags()).is_ok();
            set_offloads(file, 0).map_err(TapError::Setup)?;
        }
        if let Some(mtu) = options.mtu.filter(|_| !was_there) {
            set_mtu(name, mtu).map_err(TapError::Setup)?;
        }
        let has = mtu(name).map_err(TapError::Setup)?;
        let mtu = match options.mtu {
            Some(asked) if asked > has => return Err(TapError::Mtu { asked, has }),
            asked => asked.unwrap_or(has),
        };
        let name = name.to_owned();
        Ok((Self { name, mtu, has_uso }, files))
    }
}

fn attach(name: &str, pairs: u16, several: bool) -> Result<Vec<File>, TapError> {
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if several {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    let files = (0..pairs).map(|_| {
        // No call waits. A read that is posted in an io_uring is retried by the kernel when there
        // is a frame. RWF_NOWAIT would have the same effect for each call, but Linux before 6.4
        // refuses it for such a file.
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun");
        let file = file.map_err(TapError::Open)?;
        let mut request = request(name, flags);
        // SAFETY: TUNSETIFF reads and writes an `ifreq`, which `request` is.
        let attached = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        asked(attached).map_err(|error| match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => TapError::Denied(error),
            Some(libc::EBUSY) => TapError::Busy,
            Some(libc::EINVAL) => TapError::Kind,
            _ => TapError::Attach(error),
        })?;
        Ok(file)
    });
    files.collect()
}

/// Sets the offloads, for all queues, that frames may still need when they are read.
pub fn set_offloads(file: &File, flags: u32) -> io::Result<()> {
    let flags = libc::c_ulong::from(flags);
    // SAFETY: the argument is a number.
    asked(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, flags) })
}

/// Makes an ioctl about an interface of this network namespace.
fn about(what: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    // Any socket serves for these requests.
    let socket = UnixDatagram::unbound()?;
    // SAFETY: the requests that are made here read and write an `ifreq`, which `request` is.
    asked(unsafe { libc::ioctl(socket.as_raw_fd(), what, &raw mut *request) })
}

fn is_there(name: &str) -> io::Result<bool> {
    match about(libc::SIOCGIFINDEX, &mut request(name, 0)) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        Err(error) => Err(error),
    }
}

fn mtu(name: &str) -> io::Result<u16> {
    let mut request = request(name, 0);
    about(libc::SIOCGIFMTU, &mut request)?;
    // SAFETY: the kernel has filled in the MTU, and any bytes are a valid integer.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    Ok(mtu.clamp(68, 65_535) as u16)
}

fn set_mtu(name: &str, mtu: u16) -> io::Result<()> {
    let mut request = request(name, 0);
    request.ifr_ifru.ifru_mtu = mtu.into();
    about(libc::SIOCSIFMTU, &mut request)
}
