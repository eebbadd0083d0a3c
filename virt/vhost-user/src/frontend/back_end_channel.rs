//! Requests of the back end (section "Back-end communication"): our end of the socket of
//! SET_BACKEND_REQ_FD.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::{CallError, Connection};
use crate::channel::{ReceiveError, Receiver, SendError, Sender};
use crate::wire::{BackendRequest, DecodeError, Message, Request, RequestId};

/// Reason why the channel cannot be used any more. The connection that it belongs to cannot either.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Nothing more can be received.
    #[error("its channel for requests has failed")]
    Receive(#[from] ReceiveError),
    /// It has sent a message that is no request.
    #[error("it asks for what makes no sense")]
    Request(#[from] DecodeError),
    /// It does not read the answers to its requests.
    #[error("it does not take the answers to its requests")]
    Send(#[from] SendError),
}

/// Our end of the channel. Nothing of it blocks.
#[derive(Debug)]
pub struct BackEndChannel {
    socket: OwnedFd,
    receiver: Receiver,
    sender: Sender,
}

impl Connection {
    /// Gives the back end a socket for its requests (BACKEND_REQ has to be negotiated).
    ///
    /// # Errors
    /// [`CallError`].
    pub fn open_channel(&mut self) -> Result<BackEndChannel, CallError> {
        let (own, other) = UnixStream::pair().map_err(CallError::Host)?;
        own.set_nonblocking(true).map_err(CallError::Host)?;
        self.call(Request::SetBackendReqFd(other.into()))?;
        Ok(BackEndChannel {
            socket: own.into(),
            receiver: Receiver::default(),
            sender: Sender::default(),
        })
    }
}

impl BackEndChannel {
    /// The socket, to see when a request has come.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Takes the next request, if one has come, and whether it is to be [answered](Self::answer).
    /// Requests are answered in their order.
    ///
    /// # Errors
    /// [`ChannelError`].
    pub fn receive(&mut self) -> Result<Option<(BackendRequest, bool)>, ChannelError> {
        // Answers that found no room.
        self.sender.flush(&self.socket)?;
        let Some(message) = self.receiver.receive(&self.socket)? else {
            return Ok(None);
        };
        let request = BackendRequest::decode(&message)?;
        Ok(Some((request, message.head.needs_reply())))
    }

    /// Answers `request`: whether it was carried out.
    ///
    /// # Errors
    /// [`ChannelError`].
    pub fn answer(&mut self, request: &BackendRequest, is_done: bool) -> Result<(), ChannelError> {
        let id = RequestId(request.id().0);
        let answer = Message::reply_u64(id, u64::from(!is_done));
        self.sender.push(answer)?;
        self.sender.flush(&self.socket)?;
        Ok(())
    }
}
