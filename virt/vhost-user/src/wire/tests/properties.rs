//! Any request, any payload.

use proptest::prelude::*;

use super::*;

fn any_region() -> impl Strategy<Value = MemRegion> {
    any::<[u64; 4]>().prop_map(|[guest_addr, size, user_addr, mmap_offset]| MemRegion {
        guest_addr,
        size,
        user_addr,
        mmap_offset,
    })
}

fn any_config() -> impl Strategy<Value = (ConfigAccess, Vec<u8>)> {
    (1..=MAX_CONFIG, any::<bool>(), any::<u32>()).prop_map(|(size, migration, at)| {
        let kind = if migration {
            ConfigKind::Migration
        } else {
            ConfigKind::Writable
        };
        let offset = at % (MAX_CONFIG - size + 1);
        (
            ConfigAccess { offset, size, kind },
            vec![at as u8; size as usize],
        )
    })
}

fn any_iotlb() -> impl Strategy<Value = IotlbMessage> {
    (
        any::<u64>(),
        0..1_u64 << 40,
        0..1_u64 << 47,
        0..4_u8,
        any::<bool>(),
    )
        .prop_map(|(first, more, user_addr, access, is_update)| {
            let access = [
                IotlbAccess::None,
                IotlbAccess::Read,
                IotlbAccess::Write,
                IotlbAccess::ReadWrite,
            ][usize::from(access)];
            let range = IotlbRange {
                first,
                last: first.saturating_add(more),
            };
            match is_update {
                true => IotlbMessage::Update {
                    range,
                    user_addr,
                    access,
                },
                false => IotlbMessage::Invalidate { range },
            }
        })
}

fn any_request() -> impl Strategy<Value = Request> {
    let state = any::<[u32; 2]>().prop_map(|[index, num]| VringState { index, num });
    let vring = any::<(u8, bool)>().prop_map(|(index, has)| VringFd {
        index,
        fd: has.then(fd),
    });
    let addr = any::<(u32, [u64; 3])>().prop_map(|(index, [desc, avail, used])| VringAddr {
        index,
        desc,
        avail,
        used,
    });
    let inflight =
        any::<(u64, u64, u16, u16)>().prop_map(|(mmap_size, mmap_offset, queues, queue_size)| {
            Inflight {
                mmap_size,
                mmap_offset,
                queues,
                queue_size,
            }
        });
    let table = prop::collection::vec(any_region().prop_map(|region| (region, fd())), 0..=8);
    let (state2, vring2, vring3) = (state.clone(), vring.clone(), vring.clone());
    let inflight2 = inflight.clone();
    prop_oneof![
        any::<u64>().prop_map(Request::SetFeatures),
        any::<u64>().prop_map(|bits| Request::SetProtocolFeatures(ProtocolFeatures(bits))),
        table.prop_map(Request::SetMemTable),
        state.prop_map(Request::SetVringNum),
        state2.prop_map(Request::SetVringBase),
        addr.prop_map(Request::SetVringAddr),
        vring.prop_map(Request::SetVringKick),
        vring2.prop_map(Request::SetVringCall),
        vring3.prop_map(Request::SetVringErr),
        any::<(u32, bool)>().prop_map(|(index, enable)| Request::SetVringEnable { index, enable }),
        any_config().prop_map(|(access, contents)| Request::SetConfig(access, contents)),
        inflight.prop_map(Request::GetInflightFd),
        inflight2.prop_map(|inflight| Request::SetInflightFd(inflight, fd())),
        any_region().prop_map(|region| Request::AddMemReg(region, fd())),
        any_iotlb().prop_map(Request::Iotlb),
    ]
}

proptest! {
    #[test]
    fn every_request_decodes_to_itself(request in any_request(), need_reply: bool) {
        let (shown, id) = (format!("{request:?}"), request.id());
        let message = request.encode(need_reply);
        prop_assert_eq!(message.head, Head::request(id, need_reply));
        prop_assert_eq!(format!("{:?}", Request::decode(message).unwrap()), shown);
    }

    #[test]
    fn no_payload_panics(id in 0..45_u32, payload: Vec<u8>, fds in 0..3_usize) {
        let fds = (0..fds).map(|_| fd()).collect();
        let _ = Request::decode(Message { head: Head::request(RequestId(id), true), payload, fds });
    }
}
