//! The front end as an IOMMU: misses are answered well, badly, late or never; updates and
//! invalidations come as they like.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_mem::MAX_MISSES;
use vhost_user::channel::Receiver;
use vhost_user::wire::{
    BackendRequest, BackendRequestId, Head, IotlbAccess, IotlbMessage, IotlbRange, Message,
    Request, RequestId,
};

use crate::Input;

const PAGE: u64 = 0x1000;

/// Misses that front ends have been sent, ever.
pub(crate) static MISSES: AtomicU64 = AtomicU64::new(0);

/// The front end's end of the channel.
pub(super) struct Translations {
    channel: Option<UnixStream>,
    receiver: Receiver,
    /// Misses that were not answered.
    open: usize,
    /// User address of guest address 0.
    user: u64,
}

impl Translations {
    /// And the back end's end.
    pub(super) fn new(user: u64) -> (Self, OwnedFd) {
        let (ours, theirs) = UnixStream::pair().expect("two descriptors");
        ours.set_nonblocking(true).expect("a flag");
        let own = Self {
            channel: Some(ours),
            receiver: Receiver::default(),
            open: 0,
            user,
        };
        (own, theirs.into())
    }

    /// The oldest miss that has not been read.
    fn miss(&mut self) -> Option<(u64, IotlbAccess)> {
        let message = self.receiver.receive(self.channel.as_ref()?).ok()??;
        MISSES.fetch_add(1, Ordering::Relaxed);
        self.open += 1;
        assert!(self.open <= MAX_MISSES, "too much is asked for at a time");
        match BackendRequest::decode(&message) {
            Ok(BackendRequest::Iotlb(IotlbMessage::Miss { iova, access })) => Some((iova, access)),
            other => panic!("{other:?} on the channel"),
        }
    }

    fn answer(&mut self, value: u64) {
        self.open = self.open.saturating_sub(1);
        let message = Message::reply_u64(RequestId(BackendRequestId::IOTLB_MSG.0), value);
        if let Some(channel) = &mut self.channel {
            let _ = channel.write(&message.to_bytes());
        }
    }

    /// One step; what goes over the socket.
    pub(super) fn step(&mut self, input: &mut Input<'_>) -> Vec<Message> {
        let ask = |message| Request::Iotlb(message).encode(true);
        match input.u8() % 10 {
            // As it should be.
            0..=3 => {
                let mut updates = Vec::new();
                while let Some((iova, _)) = self.miss() {
                    let first = iova / PAGE * PAGE;
                    // Beyond memory there is nothing.
                    let is_memory = first < 0x1_0000;
                    if is_memory {
                        let last = first + PAGE - 1;
                        updates.push(ask(IotlbMessage::Update {
                            range: IotlbRange { first, last },
                            user_addr: self.user + first,
                            access: IotlbAccess::ReadWrite,
                        }));
                    }
                    self.answer(u64::from(!is_memory));
                }
                updates
            }
            4 => {
                let _ = self.miss();
                self.answer(u64::from(input.u8() & 1));
                Vec::new()
            }
            5 => {
                let (first, len) = (u64::from(input.u16()) * 16, u64::from(input.u16()) * 16);
                let (first, last) = match len {
                    0 => (0, u64::MAX),
                    len => (first, first + len - 1),
                };
                let range = IotlbRange { first, last };
                vec![ask(IotlbMessage::Invalidate { range })]
            }
            6 | 7 => {
                let (first, len) = (u64::from(input.u16()) * 16, u64::from(input.u16()));
                let user_addr = self.user + u64::from(input.u16()) * 16;
                let access = match input.u8() & 3 {
                    0 => IotlbAccess::None,
                    1 => IotlbAccess::Read,
                    2 => IotlbAccess::Write,
                    _ => IotlbAccess::ReadWrite,
                };
                let last = first + len;
                vec![ask(IotlbMessage::Update {
                    range: IotlbRange { first, last },
                    user_addr,
                    access,
                })]
            }
            // Any bytes in such a message.
            8 => {
                let head = Head::request(RequestId::IOTLB_MSG, true);
                vec![Message::new(head, input.bytes(32).to_vec())]
            }
            _ => {
                let how = input.u8();
                let bytes = input.bytes(usize::from(how >> 3));
                if let Some(channel) = &mut self.channel {
                    let _ = channel.write(bytes);
                }
                if how & 7 == 0 {
                    self.channel = None;
                }
                Vec::new()
            }
        }
    }
}
