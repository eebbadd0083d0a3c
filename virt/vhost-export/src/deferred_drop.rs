//! Deferred close: memory and descriptors of a front end are released on other threads.
//!
//! Two operations may take longer than a sidecore can spend, and a front end can provoke both.
//! Unmapping guest memory takes a tenth of a second for every ten GiB that were touched. And the
//! last close of a descriptor runs its file's release operation: a file of a FUSE file system asks
//! its server, a TCP socket with SO_LINGER waits for its peer. Descriptors need not even be
//! received: those of messages that were never read are closed with the socket that they wait in.
//!
//! So a connection that has ended is dropped by a thread of its own, and so is a connection that is
//! turned away, or a message with descriptors of another kind than [`is_harmless`]. Only harmless
//! descriptors ever reach the session, which may close them on the sidecore. A front end whose
//! descriptors cannot be closed occupies up to [`MOST`] threads of its export; then the export
//! takes no more connections until one of these threads has ended.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use rustix::net::{AddressFamily, Shutdown, SocketType, sockopt};
use vhost_user::wire::RequestId;

/// Threads of one export that close.
const MOST: usize = 8;

/// Name by which the kernel shows an eventfd.
pub(crate) const EVENTFD: &str = "anon_inode:[eventfd]";

/// File systems whose files can be closed and queried without another process's part in it: those
/// that `guest-mem` maps.
const LOCAL: [&str; 8] = [
    "tmpfs",
    "hugetlbfs",
    "ramfs",
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
];

/// The closing threads of one export.
#[derive(Debug, Default)]
pub(crate) struct DeferredDrop {
    under_way: Arc<AtomicUsize>,
}

impl DeferredDrop {
    /// Whether so much is being closed that nothing new should be taken.
    pub(crate) fn is_full(&self) -> bool {
        self.under_way.load(Relaxed) >= MOST
    }

    /// Drops `what` on a thread of its own.
    pub(crate) fn close(&self, what: impl Send + 'static) {
        let under_way = Arc::clone(&self.under_way);
        under_way.fetch_add(1, Relaxed);
        let close = move || {
            drop(what);
            under_way.fetch_sub(1, Relaxed);
        };
        // Without a thread it is done here, or with the closure that was not run.
        if thread::Builder::new()
            .name("close".into())
            .spawn(close)
            .is_err()
        {
            self.under_way.fetch_sub(1, Relaxed);
        }
    }
}

/// Whether a descriptor may come with a message of this request: one that [is
/// harmless](is_harmless), or a socket for requests of ours. That one is read from, so descriptors
/// may be in its queue: it is closed elsewhere, wherever it goes.
pub(crate) fn is_taken(request: Option<RequestId>, fd: BorrowedFd<'_>) -> bool {
    match request == Some(RequestId::SET_BACKEND_REQ_FD) && is_unix_stream(fd) {
        true => true,
        false => is_harmless(fd),
    }
}

/// Returns whether a descriptor can be queried and closed without a wait for another process. True
/// of eventfds, memory files, files of local file systems, and connected Unix stream sockets in
/// which nothing waits, nor will.
///
/// Does not query the file itself, since that might wait.
pub(crate) fn is_harmless(fd: BorrowedFd<'_>) -> bool {
    let number = fd.as_raw_fd();
    let Ok(kind) = fs::read_link(format!("/proc/self/fd/{number}")) else {
        return false;
    };
    if kind.as_os_str() == EVENTFD {
        return true;
    }
    if kind.as_os_str().as_encoded_bytes().starts_with(b"socket:") {
        return is_harmless_socket(fd);
    }
    // Only files of tmpfs (memfds among them) and hugetlbfs have seals.
    rustix::fs::fcntl_get_seals(fd).is_ok() || is_local(number)
}

/// Descriptors in its queue would be closed with it: so it must have none, and be unable to get
/// any.
fn is_harmless_socket(fd: BorrowedFd<'_>) -> bool {
    is_unix_stream(fd)
        && rustix::net::shutdown(fd, Shutdown::Read).is_ok()
        && rustix::io::ioctl_fionread(fd) == Ok(0)
}

fn is_unix_stream(fd: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
}

/// Whether the file lies in a local file system mounted in our own name space.
fn is_local(number: i32) -> bool {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    let Some(id) = id.map(str::trim) else {
        return false;
    };
    // `ID parent major:minor root point options… - type source options`, proc(5).
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mount = mounts
        .lines()
        .find(|line| line.split(' ').next() == Some(id));
    let kind = mount
        .and_then(|line| line.split_once(" - "))
        .and_then(|(_, rest)| rest.split(' ').next());
    kind.is_some_and(|kind| LOCAL.contains(&kind))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn eventfds_memory_and_empty_sockets_are_harmless() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(is_harmless(event.as_fd()));
        let memory = memfd_create("socket:[1]", MemfdFlags::CLOEXEC).unwrap();
        assert!(is_harmless(memory.as_fd()));
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(is_harmless(ours.as_fd()));
    }

    #[test]
    fn descriptors_under_another_partys_control_are_not_harmless() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        rustix::io::write(&theirs, &[1]).unwrap();
        assert!(!is_harmless(ours.as_fd()));
        let (datagrams, _) = UnixDatagram::pair().unwrap();
        assert!(!is_harmless(datagrams.as_fd()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!is_harmless(listener.as_fd()));
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!is_harmless(socket.as_fd()));
        let proc = fs::File::open("/proc/self/maps").unwrap();
        assert!(!is_harmless(proc.as_fd()));
    }
}
