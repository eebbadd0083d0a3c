//! Messages over a Unix stream socket, without ever blocking.
//!
//! A stream has no message boundaries, and a sidecore cannot wait for the second half of a header.
//! So [`Receiver`] keeps what it has between calls, and [`Sender`] what the socket did not take.
//! Both give the caller back to its loop: `Ok(None)` and `Ok(Flushed::Partly)` say «when the socket
//! is ready again».
//!
//! Every read asks for no more than the message at hand, so descriptors that come with its bytes
//! are its own. They are received close-on-exec. A message with more than
//! [`MAX_FDS`](crate::wire::MAX_FDS), or whose ancillary data the kernel had to cut, ends the
//! stream; so does a header with another version or a payload above the bound, because nothing
//! behind it can be trusted to be a header.
//!
//! **Bound:** per connection one payload, eight descriptors and the sender's backlog. One call to
//! [`Receiver::receive`] returns at most one message and makes at most a dozen system calls (the
//! kernel joins pieces that carry no descriptors).

mod assembler;
mod receive;
mod send;
#[cfg(test)]
mod tests;

pub use assembler::{Assembler, DEFAULT_MAX_PAYLOAD, FrameError};
pub use receive::{ReceiveError, Receiver};
pub use send::{DEFAULT_BACKLOG, Flushed, SendError, Sender};
