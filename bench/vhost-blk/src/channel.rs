//! The control socket, blocking: a request, and where the protocol has one, its reply.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost_user::channel::{Flushed, Receiver, Sender};
use vhost_user::frontend::{Reply, expects_reply};
use vhost_user::wire::{DecodeError, Inflight, Request, RequestId};

/// Between two tries to connect.
const RETRY: Duration = Duration::from_millis(5);

/// What went wrong on a control socket.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ChannelError {
    #[error("cannot connect to {path}")]
    Connect { path: PathBuf, source: io::Error },
    #[error("{request}: no reply within {timeout:?}")]
    Timeout {
        request: RequestId,
        timeout: Duration,
    },
    #[error("{request}: the connection failed: {what}")]
    Broken { request: RequestId, what: String },
    #[error("{request}: the reply makes no sense")]
    Reply {
        request: RequestId,
        source: DecodeError,
    },
    #[error("{request}: the back end refused")]
    Refused { request: RequestId },
    #[error("{request}: the back end closed the connection, or answered something else")]
    Unexpected { request: RequestId },
}

/// A connected control socket.
#[derive(Debug)]
pub struct Channel {
    socket: UnixStream,
    sender: Sender,
    receiver: Receiver,
    timeout: Duration,
    /// Whether REPLY_ACK is negotiated: every request without a reply of its own asks for one.
    pub acks: bool,
}

impl Channel {
    /// Connects; where nobody listens yet, tries again until `timeout`, which is then also every reply's.
    ///
    /// # Errors
    /// Nobody listened in time.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ChannelError> {
        let start = Instant::now();
        loop {
            match UnixStream::connect(path) {
                Ok(socket) => {
                    return Ok(Self {
                        socket,
                        sender: Sender::default(),
                        receiver: Receiver::default(),
                        timeout,
                        acks: false,
                    });
                }
                Err(source) if start.elapsed() >= timeout => {
                    let path = path.to_owned();
                    return Err(ChannelError::Connect { path, source });
                }
                Err(_) => thread::sleep(RETRY),
            }
        }
    }

    /// Sends a request and waits for its reply, if there is to be one.
    ///
    /// # Errors
    /// The connection broke, or the back end refused or did not answer in time.
    pub fn call(&mut self, request: Request) -> Result<Option<Reply>, ChannelError> {
        let id = request.id();
        let broken = |what: &dyn std::fmt::Display| ChannelError::Broken {
            request: id,
            what: what.to_string(),
        };
        let asks = self.acks && !expects_reply(id, false);
        self.sender
            .push(request.encode(asks))
            .map_err(|error| broken(&error))?;
        while self
            .sender
            .flush(&self.socket)
            .map_err(|error| broken(&error))?
            == Flushed::Partly
        {
            self.wait(id, PollFlags::OUT)?;
        }
        if !expects_reply(id, asks) {
            return Ok(None);
        }
        loop {
            match self.receiver.receive(&self.socket) {
                Ok(Some(message)) => {
                    let reply = Reply::decode(id, message);
                    return match reply.map_err(|source| ChannelError::Reply {
                        request: id,
                        source,
                    })? {
                        Reply::Ack { is_ok: false } => Err(ChannelError::Refused { request: id }),
                        reply => Ok(Some(reply)),
                    };
                }
                Ok(None) => self.wait(id, PollFlags::IN)?,
                Err(error) => return Err(broken(&error)),
            }
        }
    }

    /// A request whose reply is a number.
    ///
    /// # Errors
    /// As [`Channel::call`].
    pub fn value(&mut self, request: Request) -> Result<u64, ChannelError> {
        let id = request.id();
        match self.call(request)? {
            Some(Reply::Value(value)) => Ok(value),
            _ => Err(ChannelError::Unexpected { request: id }),
        }
    }

    /// GET_INFLIGHT_FD.
    ///
    /// # Errors
    /// As [`Channel::call`]; also where the back end has no region to give.
    pub fn inflight(&mut self, wanted: Inflight) -> Result<(Inflight, OwnedFd), ChannelError> {
        match self.call(Request::GetInflightFd(wanted))? {
            Some(Reply::Inflight(Some(region))) => Ok(region),
            _ => Err(ChannelError::Refused {
                request: RequestId::GET_INFLIGHT_FD,
            }),
        }
    }

    /// The socket, to see when the back end goes away.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn wait(&self, request: RequestId, events: PollFlags) -> Result<(), ChannelError> {
        let timeout = Timespec::try_from(self.timeout).unwrap_or(Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        });
        let mut fds = [PollFd::new(&self.socket, events)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => Err(ChannelError::Timeout {
                request,
                timeout: self.timeout,
            }),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(ChannelError::Broken {
                request,
                what: errno.to_string(),
            }),
        }
    }
}
