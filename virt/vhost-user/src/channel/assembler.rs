//! From pieces to messages: the receiver without its socket.

use std::fmt;
use std::os::fd::OwnedFd;

use crate::wire::{HEADER_LEN, Head, MAX_FDS, Message, RequestId, VERSION};

/// Bytes of payload accepted unless configured: far above any message of the protocol (the longest,
/// SET_CONFIG and SET_MEM_TABLE, stay below 300).
pub const DEFAULT_MAX_PAYLOAD: usize = 4096;

/// The stream cannot be understood any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Another version of the protocol, or no header at all.
    #[error("no message of vhost-user: {request}{}, version {version} where 1 is \
         spoken", AsText(*request))]
    Version {
        /// Request that the header names.
        request: RequestId,
        /// The lower two bits of its flags.
        version: u32,
    },
    /// A payload above the bound.
    #[error("{request}: payload of {size} bytes, at most {max} accepted")]
    TooLong {
        /// Request that the header names.
        request: RequestId,
        /// Bytes announced.
        size: u32,
        /// The bound.
        max: usize,
    },
    /// More descriptors than a message may carry; all of them are closed.
    #[error("more than {MAX_FDS} descriptors with one message")]
    TooManyFds,
    /// It failed before, and is not asked again.
    #[error("the stream failed before")]
    Failed,
}

/// A request's number as the text that its bytes are, where another protocol's text came: ` ('GET
/// ')`.
struct AsText(RequestId);

impl fmt::Display for AsText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.0.to_ne_bytes();
        let is_text = bytes
            .iter()
            .all(|byte| byte.is_ascii_graphic() || b" \r\n\t".contains(byte));
        match std::str::from_utf8(&bytes) {
            Ok(text) if is_text => write!(f, " ('{}')", text.escape_debug()),
            _ => Ok(()),
        }
    }
}

/// An incremental parser of the stream.
///
/// The caller reads at most [`Assembler::space`] bytes and passes the number that came, with their
/// descriptors.
#[derive(Debug)]
pub struct Assembler {
    max_payload: usize,
    header: [u8; HEADER_LEN],
    /// Bytes of the header that are there.
    header_len: usize,
    /// The header, once complete; `payload` has its full size from then on.
    head: Option<Head>,
    payload: Vec<u8>,
    /// Bytes of the payload that are there.
    payload_len: usize,
    fds: Vec<OwnedFd>,
    is_failed: bool,
}

impl Assembler {
    /// A parser that accepts payloads of at most `max_payload` bytes.
    pub const fn new(max_payload: usize) -> Self {
        Self {
            max_payload,
            header: [0; HEADER_LEN],
            header_len: 0,
            head: None,
            payload: Vec::new(),
            payload_len: 0,
            fds: Vec::new(),
            is_failed: false,
        }
    }

    /// Whether part of a message is there.
    pub const fn is_mid_message(&self) -> bool {
        self.header_len > 0
    }

    /// Returns the space for the next bytes: the rest of the header or of the payload, never empty.
    pub fn space(&mut self) -> &mut [u8] {
        match self.head {
            None => &mut self.header[self.header_len..],
            Some(_) => &mut self.payload[self.payload_len..],
        }
    }

    /// The request of the message that the next `len` bytes in [`Assembler::space`] belong to, if
    /// they complete its header.
    pub fn request_with(&self, len: usize) -> Option<RequestId> {
        match self.head {
            Some(head) => Some(head.request),
            None => (self.header_len + len == HEADER_LEN)
                .then(|| Message::parse_header(&self.header).0.request),
        }
    }

    /// Takes note of `len` bytes in [`Assembler::space`] and of the descriptors that came with
    /// them.
    ///
    /// # Errors
    /// See [`FrameError`]. The descriptors are closed, and every later call fails.
    ///
    /// # Panics
    /// If `len` exceeds the space.
    pub fn filled(
        &mut self,
        len: usize,
        fds: impl IntoIterator<Item = OwnedFd>,
    ) -> Result<Option<Message>, FrameError> {
        if self.is_failed {
            return Err(FrameError::Failed);
        }
        let result = self.advance(len, fds);
        if result.is_err() {
            self.fail();
        }
        result
    }

    /// Ends the stream for a reason outside it. A partial message is dropped, its descriptors are
    /// closed.
    pub fn fail(&mut self) {
        self.is_failed = true;
        self.fds.clear();
        self.payload = Vec::new();
        self.payload_len = 0;
        self.head = None;
        // Keeps `space` non-empty.
        self.header_len = 0;
    }

    fn advance(
        &mut self,
        len: usize,
        fds: impl IntoIterator<Item = OwnedFd>,
    ) -> Result<Option<Message>, FrameError> {
        assert!(
            len <= self.space().len(),
            "no more bytes than there was space for"
        );
        for fd in fds {
            if self.fds.len() == MAX_FDS {
                return Err(FrameError::TooManyFds);
            }
            self.fds.push(fd);
        }
        match self.head {
            None => {
                self.header_len += len;
                if self.header_len < HEADER_LEN {
                    return Ok(None);
                }
                let (head, size) = Message::parse_header(&self.header);
                let request = head.request;
                if head.version() != VERSION {
                    return Err(FrameError::Version {
                        request,
                        version: head.version(),
                    });
                }
                let max = self.max_payload;
                if size as usize > max {
                    return Err(FrameError::TooLong { request, size, max });
                }
                self.head = Some(head);
                self.payload = vec![0; size as usize];
                self.payload_len = 0;
            }
            Some(_) => self.payload_len += len,
        }
        if self.payload_len < self.payload.len() {
            return Ok(None);
        }
        self.header_len = 0;
        let payload = std::mem::take(&mut self.payload);
        self.payload_len = 0;
        let fds = std::mem::take(&mut self.fds);
        Ok(self.head.take().map(|head| Message { head, payload, fds }))
    }
}
