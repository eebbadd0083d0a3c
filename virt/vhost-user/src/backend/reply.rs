//! Replies that are more than a number, and replies that refuse.

use zerocopy::IntoBytes;

use crate::wire::{ConfigAccess, Head, Inflight, Message, RequestId, VringState, config};

/// Kind of reply to a request that has succeeded.
#[derive(Clone, Copy, Debug)]
pub(super) enum Respond {
    /// By an acknowledgement, if one is asked for.
    Ack,
    /// By a 0 in any case: IOTLB_MSG.
    Zero,
    /// By where the ring stands.
    RingBase(u8),
    Config(ConfigAccess),
    Inflight(Inflight),
}

pub(super) fn base_reply(index: u32, num: u32) -> Message {
    let payload = VringState { index, num }.as_bytes().to_vec();
    Message::new(Head::reply(RequestId::GET_VRING_BASE), payload)
}

pub(super) fn config_reply(access: ConfigAccess, contents: &[u8]) -> Message {
    Message::new(Head::reply(RequestId::GET_CONFIG), config(access, contents))
}

pub(super) fn inflight_reply(inflight: Inflight) -> Message {
    Message::new(
        Head::reply(RequestId::GET_INFLIGHT_FD),
        inflight.raw().as_bytes().to_vec(),
    )
}

/// Returns the reply that refuses this request, where the protocol has one.
pub(super) fn refusal(
    request: RequestId,
    wants_ack: bool,
    respond: Option<Respond>,
) -> Option<Message> {
    match request {
        // A payload of no bytes is the error, says the specification.
        RequestId::GET_CONFIG => Some(Message::new(Head::reply(request), Vec::new())),
        // An empty region, without a descriptor.
        RequestId::GET_INFLIGHT_FD => {
            let (queues, queue_size) = match respond {
                Some(Respond::Inflight(wanted)) => (wanted.queues, wanted.queue_size),
                _ => (0, 0),
            };
            let empty = Inflight {
                mmap_size: 0,
                mmap_offset: 0,
                queues,
                queue_size,
            };
            Some(inflight_reply(empty))
        }
        RequestId::IOTLB_MSG => Some(Message::reply_u64(request, 1)),
        // Any number would be taken for the value asked for. (QEMU does not look into
        // SET_LOG_BASE's reply, and would migrate without the log.)
        RequestId::GET_FEATURES
        | RequestId::GET_PROTOCOL_FEATURES
        | RequestId::GET_QUEUE_NUM
        | RequestId::GET_VRING_BASE
        | RequestId::GET_MAX_MEM_SLOTS
        | RequestId::GET_STATUS
        | RequestId::SET_LOG_BASE => None,
        _ => wants_ack.then(|| Message::reply_u64(request, 1)),
    }
}
