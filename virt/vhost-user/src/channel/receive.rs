//! Receiving.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use super::{Assembler, DEFAULT_MAX_PAYLOAD, FrameError};
use crate::wire::{Message, RequestId};

/// Most descriptors that the kernel sends at once (SCM_MAX_FD). There is room for all of them,
/// though no message may have so many: the kernel would close the others in this thread, without a
/// check of their kind.
const MOST_AT_ONCE: usize = 253;

/// Reason why no message can be received any more.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The peer closed its end.
    #[error("the peer closed the socket{}", if *is_mid_message { " within a message" } else { "" })]
    Closed {
        /// Whether part of a message had come.
        is_mid_message: bool,
    },
    /// A descriptor is of a kind that the owner does not take: see [`Receiver::accepting`].
    #[error("a descriptor of a kind that is not taken")]
    Unaccepted {
        /// All that came with it; closing them is the owner's affair, and may wait.
        fds: Vec<OwnedFd>,
    },
    /// The kernel could not hand over all ancillary data (no descriptor numbers are left); the rest
    /// is closed.
    #[error("ancillary data was truncated")]
    AncillaryTruncated,
    /// The bytes are no message.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The system call failed.
    #[error("recvmsg failed")]
    Socket(#[source] std::io::Error),
}

/// Whether a descriptor is taken that came with this request.
pub type Accepts = fn(Option<RequestId>, BorrowedFd<'_>) -> bool;

/// Receives one message at a time, keeping a part of one between calls.
#[derive(Debug)]
pub struct Receiver {
    assembler: Assembler,
    accepts: Accepts,
}

impl Default for Receiver {
    fn default() -> Self {
        Self::new(DEFAULT_MAX_PAYLOAD)
    }
}

impl Receiver {
    /// A receiver for payloads of at most `max_payload` bytes.
    pub const fn new(max_payload: usize) -> Self {
        Self {
            assembler: Assembler::new(max_payload),
            accepts: |_, _| true,
        }
    }

    /// Every descriptor is passed to `accepts` before anything else is done with it, with the
    /// request that it came with, if that is known already; one that it does not take ends the
    /// stream.
    #[must_use]
    pub fn accepting(self, accepts: Accepts) -> Self {
        Self { accepts, ..self }
    }

    /// The next message, or `None` where the socket has no more for now. Never blocks, whatever the
    /// socket's own mode.
    ///
    /// # Errors
    /// See [`ReceiveError`]: none is worth another try.
    pub fn receive(&mut self, socket: impl AsFd) -> Result<Option<Message>, ReceiveError> {
        loop {
            let (len, is_truncated, fds) = match read(&socket, self.assembler.space()) {
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(ReceiveError::Socket(errno.into())),
            };
            let request = self.assembler.request_with(len);
            if !fds.iter().all(|fd| (self.accepts)(request, fd.as_fd())) {
                self.assembler.fail();
                return Err(ReceiveError::Unaccepted { fds });
            }
            if is_truncated {
                self.assembler.fail();
                return Err(ReceiveError::AncillaryTruncated);
            }
            if len == 0 {
                let is_mid_message = self.assembler.is_mid_message();
                return Err(ReceiveError::Closed { is_mid_message });
            }
            if let Some(message) = self.assembler.filled(len, fds)? {
                return Ok(Some(message));
            }
        }
    }
}

/// One `recvmsg`: bytes, whether descriptors were lost, and those that were not.
fn read(socket: impl AsFd, space: &mut [u8]) -> Result<(usize, bool, Vec<OwnedFd>), Errno> {
    let mut control = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_AT_ONCE))];
    let mut control = RecvAncillaryBuffer::new(&mut control);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = recvmsg(socket, &mut [IoSliceMut::new(space)], &mut control, flags)?;
    let mut fds = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
            fds.extend(rights);
        }
    }
    Ok((
        message.bytes,
        message.flags.contains(ReturnFlags::CTRUNC),
        fds,
    ))
}
