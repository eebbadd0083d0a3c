//! One connected socket: a request, and where the protocol has one, its reply, both bounded in time.
//!
//! Called by the link thread, and by whoever makes the device before that thread exists. A wait ends with the reply, the
//! limit, or the *cancel* descriptor becoming readable, whichever comes first.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use vhost_user::channel::{Flushed, Receiver, Sender};
use vhost_user::frontend::{Reply, expects_reply};
use vhost_user::wire::{Request, RequestId};

use crate::error::CallError;

/// A connected control socket.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    sender: Sender,
    receiver: Receiver,
    cancel: Arc<OwnedFd>,
    /// How long a reply may take; `None`: as long as it takes.
    pub limit: Option<Duration>,
    /// REPLY_ACK is negotiated: every request without a reply of its own asks for one.
    pub acks: bool,
}

impl Connection {
    /// Connects to `path`, without waiting for a listener that is busy.
    pub fn open(path: &Path, cancel: Arc<OwnedFd>, limit: Duration) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self {
            socket,
            sender: Sender::default(),
            receiver: Receiver::default(),
            cancel,
            limit: Some(limit),
            acks: false,
        })
    }

    /// The socket, to see when the back end goes away.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Sends a request and waits for its reply, if there is to be one. `None` where there is none.
    pub fn call(&mut self, request: Request) -> Result<Option<Reply>, CallError> {
        let id = request.id();
        let deadline = self.limit.map(|limit| Instant::now() + limit);
        let asks = self.acks && !expects_reply(id, false);
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
        if !expects_reply(id, asks) {
            return Ok(None);
        }
        loop {
            match self.receiver.receive(&self.socket) {
                Ok(Some(message)) => {
                    let reply = Reply::decode(id, message).map_err(|source| CallError::Reply {
                        request: id,
                        source,
                    })?;
                    return match reply {
                        Reply::Ack { is_ok: false } => Err(CallError::Refused { request: id }),
                        reply => Ok(Some(reply)),
                    };
                }
                Ok(None) => self.wait(id, PollFlags::IN, deadline)?,
                Err(error) => return Err(broken(id, &error)),
            }
        }
    }

    /// A request whose reply is a number.
    pub fn value(&mut self, request: Request) -> Result<u64, CallError> {
        let id = request.id();
        match self.call(request)? {
            Some(Reply::Value(value)) => Ok(value),
            _ => Err(CallError::Refused { request: id }),
        }
    }

    /// Between requests: nothing may come, so what the socket has is its end.
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
        let timeout =
            deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
        let mut fds = [
            PollFd::new(&self.socket, events),
            PollFd::from_borrowed_fd(self.cancel.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) => match self.limit {
                Some(limit) => Err(CallError::Timeout { request, limit }),
                None => Ok(()),
            },
            Ok(_) if !fds[1].revents().is_empty() => Err(CallError::Cancelled { request }),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(broken(request, &errno)),
        }
    }
}

pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        // A wait of more than an hour is over sooner, and goes on.
        tv_sec: time.as_secs().min(3600) as i64,
        tv_nsec: time.subsec_nanos().into(),
    }
}

fn broken(request: RequestId, what: &dyn std::fmt::Display) -> CallError {
    let what = what.to_string();
    CallError::Broken { request, what }
}
