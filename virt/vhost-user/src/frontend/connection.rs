//! One connected socket: a request, and where the protocol has one, its reply, both bounded in
//! time.
//!
//! One thread's, which blocks. A wait ends with the reply, the limit, or the *cancel* descriptor
//! becoming readable, whichever comes first.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::{CallError, Reply, expects_reply};
use crate::channel::{Flushed, Receiver, Sender};
use crate::wire::{ProtocolFeatures, Request, RequestId};

/// Between two tries to connect while no process listens yet.
const RETRY: Duration = Duration::from_millis(5);

/// A connected control socket.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    sender: Sender,
    receiver: Receiver,
    cancel: Option<Arc<OwnedFd>>,
    /// Time limit of a reply; `None`: no limit.
    pub limit: Option<Duration>,
    /// Acknowledged. With REPLY_ACK every request without a reply of its own asks for one.
    pub(super) protocol: ProtocolFeatures,
    /// Bit 30 is acknowledged: rings are enabled by a request.
    pub(super) enables_rings: bool,
}

impl Drop for Connection {
    /// Ends the connection at once. A child process that is being started holds a copy of every
    /// descriptor until it has begun its program, and a back end turns away the next front end
    /// until the last copy is closed.
    fn drop(&mut self) {
        // The back end may have ended it.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

impl Connection {
    /// Connects to `path`, without waiting for a listener that is busy. Each reply may take
    /// `limit`; a wait for one ends when `cancel` becomes readable.
    ///
    /// # Errors
    /// No process listens, or not now.
    pub fn open(path: &Path, cancel: Option<Arc<OwnedFd>>, limit: Duration) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self::of(socket, cancel, limit))
    }

    /// Over a stream socket that is connected already, which does not block from here on.
    ///
    /// # Errors
    /// The kernel's, of a descriptor that is none of a socket for instance.
    pub fn over(
        socket: OwnedFd,
        cancel: Option<Arc<OwnedFd>>,
        limit: Duration,
    ) -> io::Result<Self> {
        ioctl_fionbio(&socket, true)?;
        Ok(Self::of(socket, cancel, limit))
    }

    fn of(socket: OwnedFd, cancel: Option<Arc<OwnedFd>>, limit: Duration) -> Self {
        Self {
            socket,
            sender: Sender::default(),
            receiver: Receiver::default(),
            cancel,
            limit: Some(limit),
            protocol: ProtocolFeatures::NONE,
            enables_rings: false,
        }
    }

    /// As [`open`](Self::open), again and again for `patience`.
    ///
    /// # Errors
    /// As those of [`open`](Self::open), the last.
    pub fn open_within(
        patience: Duration,
        path: &Path,
        cancel: Option<Arc<OwnedFd>>,
        limit: Duration,
    ) -> io::Result<Self> {
        let start = Instant::now();
        loop {
            match Self::open(path, cancel.clone(), limit) {
                Err(_) if start.elapsed() < patience => thread::sleep(RETRY),
                other => return other,
            }
        }
    }

    /// The socket, to see when the back end goes away.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Sends a request and waits for its reply, if there is to be one. `None` where there is none.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn call(&mut self, request: Request) -> Result<Option<Reply>, CallError> {
        let id = request.id();
        let deadline = self.limit.map(|limit| Instant::now() + limit);
        if !self.send(request)? {
            return Ok(None);
        }
        loop {
            match self.reply(id)? {
                Some(Reply::Ack { is_ok: false }) => {
                    return Err(CallError::Refused { request: id });
                }
                Some(reply) => return Ok(Some(reply)),
                None => self.wait(id, PollFlags::IN, deadline)?,
            }
        }
    }

    /// Sends a request and does not wait for its reply: [`reply`](Self::reply) takes it. Whether
    /// there will be one. Replies come in the order of the requests, so until it is taken nothing
    /// else may be [called](Self::call).
    ///
    /// # Errors
    /// [`CallError`].
    pub fn send(&mut self, request: Request) -> Result<bool, CallError> {
        let id = request.id();
        let deadline = self.limit.map(|limit| Instant::now() + limit);
        let acks = self.protocol.contains(ProtocolFeatures::REPLY_ACK);
        // IOTLB messages are always answered, and not every back end does so unless asked.
        let asks = acks && (!expects_reply(id, false) || id == RequestId::IOTLB_MSG);
        self.sender
            .push(request.encode(asks))
            .map_err(|error| broken(id, &error))?;
        while self
            .sender
            .flush(&self.socket)
            .map_err(|error| broken(id, &error))?
            == Flushed::Partly
        {
            self.wait(id, PollFlags::OUT, deadline)?;
        }
        Ok(expects_reply(id, asks))
    }

    /// Takes the reply to `request`, the oldest that was [sent](Self::send) and has not been
    /// answered, if it has come.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn reply(&mut self, request: RequestId) -> Result<Option<Reply>, CallError> {
        match self.receiver.receive(&self.socket) {
            Ok(Some(message)) => Reply::decode(request, message)
                .map(Some)
                .map_err(|source| CallError::Reply { request, source }),
            Ok(None) => Ok(None),
            Err(error) => Err(broken(request, &error)),
        }
    }

    /// A request whose reply is a number.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn value(&mut self, request: Request) -> Result<u64, CallError> {
        let id = request.id();
        match self.call(request)? {
            Some(Reply::Value(value)) => Ok(value),
            _ => Err(CallError::Refused { request: id }),
        }
    }

    /// Checks the socket between requests: nothing may come then but its end.
    ///
    /// # Errors
    /// The socket has ended, or the back end has sent a message; a description of which.
    pub fn check_idle(&mut self) -> Result<(), String> {
        match self.receiver.receive(&self.socket) {
            Ok(None) => Ok(()),
            Ok(Some(message)) => Err(format!("it sends {} unasked", message.head.request)),
            Err(error) => Err(error.to_string()),
        }
    }

    fn wait(
        &self,
        request: RequestId,
        events: PollFlags,
        deadline: Option<Instant>,
    ) -> Result<(), CallError> {
        // More than a `Timespec` holds is for ever.
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::new(&self.socket, events)];
        if let Some(cancel) = &self.cancel {
            fds.push(PollFd::new(cancel, PollFlags::IN));
        }
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) => match self.limit {
                Some(limit) => Err(CallError::Timeout { request, limit }),
                None => Ok(()),
            },
            Ok(_) if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) => {
                Err(CallError::Cancelled { request })
            }
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(broken(request, &errno)),
        }
    }
}

fn broken(request: RequestId, what: &dyn std::fmt::Display) -> CallError {
    let what = what.to_string();
    CallError::Broken { request, what }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_dropped_connection_ends_though_a_copy_of_its_socket_is_open() {
        let (own, mut other) = UnixStream::pair().expect("a pair");
        let copy = own.try_clone().expect("a descriptor");
        drop(Connection::over(own.into(), None, Duration::ZERO).expect("a socket"));
        other.set_nonblocking(true).expect("a flag");
        assert_eq!(other.read(&mut [0]).expect("it has ended"), 0);
        drop(copy);
    }
}
