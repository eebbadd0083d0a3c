//! The front end's side: requests and their replies over one socket, in the order that back ends
//! expect, which is QEMU's.
//!
//! ```text
//! Connection::open ─▶ negotiate ─▶ config ─▶ share_memory ─▶ set_features ─▶ give_inflight ─▶ start_rings … stop_ring
//! ```
//! A [`Connection`] is one socket, from its opening to its end. State that outlives it (the memory,
//! the rings' places and descriptors, the [`InflightRegion`]) is kept by its user and sent again
//! over the next one. Replies are read by [`Reply::decode`].
//!
//! Requests of the back end, as a miss of its IOTLB, come over a socket of their own, the
//! [`BackEndChannel`].
//!
//! A back end in a thread, and a front end that asks it for its configuration space:
//!
//! ```
//! use std::{os::unix::net::UnixStream, thread, time::Duration};
//! use vhost_user::backend::{Answer, Config, Event, SUPPORTED, Session, Step};
//! use vhost_user::channel::{Receiver, Sender};
//! use vhost_user::frontend::Connection;
//! use vhost_user::wire::{ProtocolFeatures, feature};
//!
//! let (near, far) = UnixStream::pair()?;
//! let back_end = thread::spawn(move || {
//!     let (features, protocol) = (1 << 32, SUPPORTED); // VIRTIO_F_VERSION_1
//!     let device = Config {
//!         features,
//!         protocol,
//!         queues: 2,
//!         rings_per_queue: 1,
//!         max_ring_size: 256,
//!         max_regions: 8,
//!     };
//!     let mut session = Session::new(device).expect("numbers in their ranges");
//!     let (mut receiver, mut sender) = (Receiver::default(), Sender::default());
//!     // Until the front end closes its end. This socket blocks, so a message is always there; a
//!     // daemon would poll.
//!     while let Ok(message) = receiver.receive(&far) {
//!         let Some(message) = message else { continue };
//!         let reply = match session.handle(message).expect("the front end is in order") {
//!             Step::Event(Event::ConfigRead(access)) => {
//!                 session.finish(Ok(Answer::Config(vec![7; access.size as usize]))).unwrap()
//!             }
//!             Step::Event(_) => session.finish(Ok(Answer::Done)).unwrap(),
//!             Step::Done(reply) => reply,
//!             Step::Refused(_, reply) => Some(reply),
//!         };
//!         if let Some(reply) = reply {
//!             sender.push(reply).and_then(|()| sender.flush(&far)).expect("it listens");
//!         }
//!     }
//! });
//!
//! let mut connection = Connection::over(near.into(), None, Duration::from_secs(5))?;
//! let wanted = ProtocolFeatures::CONFIG | ProtocolFeatures::MQ;
//! let offer = connection.negotiate(Some(wanted))?;
//! assert_eq!((offer.protocol, offer.queues), (wanted, 2));
//! assert_eq!(offer.features, 1 << 32 | feature::PROTOCOL_FEATURES);
//! assert_eq!(connection.config(4)?, [7; 4]);
//! drop(connection);
//! back_end.join().expect("it ends with the connection");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod back_end_channel;
mod connection;
mod error;
mod reply;
mod setup;

pub use back_end_channel::{BackEndChannel, ChannelError};
pub use connection::Connection;
pub use error::CallError;
pub use reply::{Reply, expects_reply};
pub use setup::{InflightRegion, Offer, Ring};
