//! Sending.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::wire::{HEADER_LEN, MAX_FDS, Message};

/// Bytes that may wait unless configured. Replies have tens of bytes, and a front end reads each
/// before it asks again; one that lets this many pile up does not read at all.
pub const DEFAULT_BACKLOG: usize = 64 << 10;

/// Reason why a message cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The peer does not read: the backlog is full. The message is not queued.
    #[error("{backlog} bytes wait already, {len} more do not fit in {max}")]
    Backlog {
        /// Bytes that wait.
        backlog: usize,
        /// Bytes of the message.
        len: usize,
        /// The bound.
        max: usize,
    },
    /// More descriptors than a message may carry. The message is not queued.
    #[error("{fds} descriptors with one message, at most {MAX_FDS} allowed")]
    TooManyFds {
        /// Descriptors of the message.
        fds: usize,
    },
    /// The system call failed.
    #[error("sendmsg failed")]
    Socket(#[source] std::io::Error),
}

/// Outcome of [`Sender::flush`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushed {
    /// Nothing waits.
    All,
    /// The socket takes no more: try again when it is writable.
    Partly,
}

/// A message of which `sent` bytes are out; its descriptors go with the first of them.
#[derive(Debug)]
struct Waiting {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

/// Sends messages in order, keeping what the socket does not take.
#[derive(Debug)]
pub struct Sender {
    queue: VecDeque<Waiting>,
    /// Unsent bytes in `queue`.
    backlog: usize,
    max_backlog: usize,
}

impl Default for Sender {
    fn default() -> Self {
        Self::new(DEFAULT_BACKLOG)
    }
}

impl Sender {
    /// A sender that keeps at most `max_backlog` bytes.
    pub const fn new(max_backlog: usize) -> Self {
        Self {
            queue: VecDeque::new(),
            backlog: 0,
            max_backlog,
        }
    }

    /// Bytes that wait.
    pub const fn backlog(&self) -> usize {
        self.backlog
    }

    /// Queues a message; [`Sender::flush`] sends it.
    ///
    /// # Errors
    /// The message is dropped, with its descriptors, where it does not fit.
    pub fn push(&mut self, message: Message) -> Result<(), SendError> {
        let (len, fds) = (HEADER_LEN + message.payload.len(), message.fds.len());
        if fds > MAX_FDS {
            return Err(SendError::TooManyFds { fds });
        }
        if len > self.max_backlog - self.backlog {
            let (backlog, max) = (self.backlog, self.max_backlog);
            return Err(SendError::Backlog { backlog, len, max });
        }
        self.backlog += len;
        let bytes = message.to_bytes();
        self.queue.push_back(Waiting {
            bytes,
            sent: 0,
            fds: message.fds,
        });
        Ok(())
    }

    /// Sends as much as the socket takes. Never blocks, whatever the socket's own mode, and raises
    /// no SIGPIPE.
    ///
    /// # Errors
    /// The socket failed: the peer is gone.
    pub fn flush(&mut self, socket: impl AsFd) -> Result<Flushed, SendError> {
        while let Some(waiting) = self.queue.front_mut() {
            match write(&socket, &waiting.bytes[waiting.sent..], &waiting.fds) {
                Ok(len) => {
                    waiting.sent += len;
                    self.backlog -= len;
                    // They travelled with the first byte; sent again, they would come twice.
                    waiting.fds.clear();
                    if waiting.sent == waiting.bytes.len() {
                        self.queue.pop_front();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Flushed::Partly),
                Err(errno) => return Err(SendError::Socket(errno.into())),
            }
        }
        Ok(Flushed::All)
    }
}

/// One `sendmsg`; at least one byte is sent where it succeeds, because `bytes` is not empty.
fn write(socket: impl AsFd, bytes: &[u8], fds: &[OwnedFd]) -> Result<usize, Errno> {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut control = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut control);
    if !fds.is_empty() {
        let has_room = control.push(SendAncillaryMessage::ScmRights(&fds));
        assert!(has_room, "`push` accepted no more than MAX_FDS");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}
