//! Every layout against bytes worked out from the specification (little-endian hosts), one literal
//! each.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::*;

mod properties;

fn fd() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// The request encodes to these bytes, and they decode to it. (Descriptors keep their numbers on
/// the way, so that the `Debug` text compares everything.)
fn golden(request: Request, need_reply: bool, text: &str) {
    let shown = format!("{request:?}");
    let message = request.encode(need_reply);
    assert_eq!(message.to_bytes(), hex(text), "{shown}");
    assert_eq!(format!("{:?}", Request::decode(message).unwrap()), shown);
}

#[test]
fn requests_without_payload() {
    for (request, number) in [
        (Request::GetFeatures, "01"),
        (Request::SetOwner, "03"),
        (Request::ResetOwner, "04"),
        (Request::GetProtocolFeatures, "0f"),
        (Request::GetQueueNum, "11"),
        (Request::SetBackendReqFd(fd()), "15"),
        (Request::ResetDevice, "22"),
        (Request::GetMaxMemSlots, "24"),
    ] {
        golden(request, false, &format!("{number}000000 01000000 00000000"));
    }
}

#[test]
fn requests_with_a_number() {
    let features = 0x1_4000_0206;
    golden(
        Request::SetFeatures(features),
        true,
        "02000000 09000000 08000000 0602004001000000",
    );
    let protocol = ProtocolFeatures::CONFIG | ProtocolFeatures::REPLY_ACK | ProtocolFeatures::MQ;
    golden(
        Request::SetProtocolFeatures(protocol),
        false,
        "10000000 01000000 08000000 0902000000000000",
    );
    golden(
        Request::SendRarp(0x0000_0605_0403_0201),
        false,
        "13000000 01000000 08000000 0102030405060000",
    );
    golden(
        Request::NetSetMtu(9000),
        true,
        "14000000 09000000 08000000 2823000000000000",
    );
}

#[test]
fn ring_states() {
    let state = VringState {
        index: 2,
        num: 0x8100,
    };
    golden(
        Request::SetVringNum(state),
        false,
        "08000000 01000000 08000000 02000000 00810000",
    );
    golden(
        Request::SetVringBase(state),
        false,
        "0a000000 01000000 08000000 02000000 00810000",
    );
    golden(
        Request::GetVringBase { index: 2 },
        false,
        "0b000000 01000000 08000000 02000000 00000000",
    );
    golden(
        Request::SetVringEnable {
            index: 2,
            enable: true,
        },
        true,
        "12000000 09000000 08000000 02000000 01000000",
    );
}

#[test]
fn ring_addresses_are_in_the_order_descriptor_used_available() {
    let addr = VringAddr {
        index: 1,
        desc: 0x1000,
        used: 0x3000,
        avail: 0x2000,
    };
    golden(
        Request::SetVringAddr(addr),
        false,
        "09000000 01000000 28000000 01000000 00000000 0010000000000000 0030000000000000
         0020000000000000 0000000000000000",
    );
}

#[test]
fn ring_descriptors_and_their_absence() {
    let with = || VringFd {
        index: 3,
        fd: Some(fd()),
    };
    let without = || VringFd {
        index: 255,
        fd: None,
    };
    golden(
        Request::SetVringKick(with()),
        false,
        "0c000000 01000000 08000000 0300000000000000",
    );
    golden(
        Request::SetVringCall(without()),
        false,
        "0d000000 01000000 08000000 ff01000000000000",
    );
    golden(
        Request::SetVringErr(with()),
        true,
        "0e000000 09000000 08000000 0300000000000000",
    );
}

const REGION: MemRegion = MemRegion {
    guest_addr: 0xc_0000,
    size: 0x1_0000,
    user_addr: 0x7f12_3456_7000,
    mmap_offset: 16,
};
const REGION_HEX: &str = "00000c0000000000 0000010000000000 00705634127f0000 1000000000000000";

#[test]
fn memory_regions() {
    golden(
        Request::SetMemTable(vec![(REGION, fd()), (REGION, fd())]),
        false,
        &format!("05000000 01000000 48000000 02000000 00000000 {REGION_HEX} {REGION_HEX}"),
    );
    golden(
        Request::AddMemReg(REGION, fd()),
        true,
        &format!("25000000 09000000 28000000 0000000000000000 {REGION_HEX}"),
    );
    golden(
        Request::RemMemReg(REGION),
        false,
        &format!("26000000 01000000 28000000 0000000000000000 {REGION_HEX}"),
    );
}

#[test]
fn inflight_areas() {
    let inflight = Inflight {
        mmap_size: 0x1080,
        mmap_offset: 0x20,
        queues: 4,
        queue_size: 0x0100,
    };
    golden(
        Request::SetInflightFd(inflight, fd()),
        false,
        "20000000 01000000 18000000 8010000000000000 2000000000000000 0400 0001 00000000",
    );
    golden(
        Request::GetInflightFd(inflight),
        false,
        "1f000000 01000000 18000000 8010000000000000 2000000000000000 0400 0001 00000000",
    );
}

#[test]
fn configuration_space() {
    let access = ConfigAccess {
        offset: 0x14,
        size: 4,
        kind: ConfigKind::Migration,
    };
    golden(
        Request::GetConfig(ConfigAccess {
            kind: ConfigKind::Writable,
            ..access
        }),
        false,
        "18000000 01000000 10000000 14000000 04000000 00000000 00000000",
    );
    golden(
        Request::SetConfig(access, vec![1, 2, 3, 4]),
        false,
        "19000000 01000000 10000000 14000000 04000000 01000000 01020304",
    );
}

#[test]
fn iotlb_messages_of_both_directions() {
    let range = IotlbRange {
        first: 0xffff_f000,
        last: 0x1_0000_0fff,
    };
    let update = IotlbMessage::Update {
        range,
        user_addr: 0x7f00_0000_1000,
        access: IotlbAccess::ReadWrite,
    };
    golden(
        Request::Iotlb(update),
        true,
        "16000000 09000000 20000000 00f0ffff00000000 0020000000000000 001000 00007f0000 03 02
         000000000000",
    );
    golden(
        Request::Iotlb(IotlbMessage::Invalidate { range }),
        true,
        "16000000 09000000 20000000 00f0ffff00000000 0020000000000000 0000000000000000 00 03
         000000000000",
    );
    let miss = IotlbMessage::Miss {
        iova: 0x1234_5000,
        access: IotlbAccess::Write,
    };
    let message = BackendRequest::Iotlb(miss).encode(false);
    assert_eq!(
        message.to_bytes(),
        hex(
            "01000000 01000000 20000000 0050341200000000 0000000000000000 0000000000000000 02 01
             000000000000"
        )
    );
    assert_eq!(
        BackendRequest::decode(&message),
        Ok(BackendRequest::Iotlb(miss))
    );
    let message = BackendRequest::ConfigChange.encode(true);
    assert_eq!(message.to_bytes(), hex("02000000 09000000 00000000"));
    assert_eq!(
        BackendRequest::decode(&message),
        Ok(BackendRequest::ConfigChange)
    );
}

#[test]
fn a_reply_has_flag_four_and_the_version() {
    assert_eq!(
        Message::reply_u64(RequestId::GET_QUEUE_NUM, 0x102).to_bytes(),
        hex("11000000 05000000 08000000 0201000000000000")
    );
}

#[test]
fn feature_bits_are_the_specifications() {
    assert_eq!(feature::PROTOCOL_FEATURES, 0x4000_0000);
    assert_eq!(ProtocolFeatures::REPLY_ACK.0, 0x8);
    assert_eq!(ProtocolFeatures::BACKEND_REQ.0, 0x20);
    assert_eq!(ProtocolFeatures::CONFIG.0, 0x200);
    assert_eq!(ProtocolFeatures::INFLIGHT_SHMFD.0, 0x1000);
    assert_eq!(ProtocolFeatures::RESET_DEVICE.0, 0x2000);
    assert_eq!(ProtocolFeatures::CONFIGURE_MEM_SLOTS.0, 0x8000);
}

fn refused(id: RequestId, payload: &str, fds: usize) -> DecodeError {
    let fds = (0..fds).map(|_| fd()).collect();
    let message = Message {
        head: Head::request(id, false),
        payload: hex(payload),
        fds,
    };
    Request::decode(message).unwrap_err()
}

#[test]
fn size_fields_that_lie_are_refused() {
    let id = RequestId::SET_MEM_TABLE;
    let head = |n: &str| format!("{n} 00000000 {REGION_HEX}");
    assert!(matches!(
        refused(id, &head("02000000"), 2),
        DecodeError::Size { expected: 72, .. }
    ));
    assert!(matches!(
        refused(id, &format!("{} 00", head("01000000")), 1),
        DecodeError::Size { expected: 40, .. }
    ));
    let nine = REGION_HEX.repeat(9);
    assert!(matches!(
        refused(id, &format!("01000000 00000000 {nine}"), 1),
        DecodeError::Size { expected: 40, .. }
    ));
    assert!(matches!(
        refused(id, &head("ffffffff"), 1),
        DecodeError::Field {
            field: "num regions",
            value: 0xffff_ffff,
            ..
        }
    ));
    assert!(matches!(
        refused(id, "01", 0),
        DecodeError::Size { size: 1, .. }
    ));
    let id = RequestId::SET_CONFIG;
    let sized = |size: &str| refused(id, &format!("00000000 {size} 00000000 aabb"), 0);
    assert!(matches!(
        sized("03000000"),
        DecodeError::Size { expected: 15, .. }
    ));
    assert!(matches!(
        sized("ffffffff"),
        DecodeError::Field { field: "size", .. }
    ));
    assert!(matches!(
        refused(id, "ff000000 02000000 00000000 aabb", 0),
        DecodeError::Field {
            field: "offset",
            value: 255,
            ..
        }
    ));
    assert!(matches!(
        refused(RequestId::SET_FEATURES, "00", 0),
        DecodeError::Size { .. }
    ));
}

#[test]
fn room_behind_the_counted_regions_is_passed_over_as_user_mode_linux_sends_it() {
    let message = Message {
        head: Head::request(RequestId::SET_MEM_TABLE, true),
        payload: hex(&format!(
            "01000000 00000000 {REGION_HEX} {}",
            "00".repeat(32)
        )),
        fds: vec![fd()],
    };
    let Ok(Request::SetMemTable(regions)) = Request::decode(message) else {
        panic!("refused");
    };
    assert_eq!(regions.len(), 1);
    assert_eq!(regions[0].0, REGION);
}

#[test]
fn descriptors_missing_or_superfluous_are_refused() {
    let table = format!("01000000 00000000 {REGION_HEX}");
    let region = format!("0000000000000000 {REGION_HEX}");
    for (id, payload, fds, wanted) in [
        (RequestId::SET_MEM_TABLE, table.as_str(), 2, 1),
        (RequestId::SET_MEM_TABLE, &table, 0, 1),
        (RequestId::ADD_MEM_REG, &region, 0, 1),
        (RequestId::SET_VRING_KICK, "0000000000000000", 0, 1),
        (RequestId::SET_VRING_KICK, "0000000000000000", 2, 1),
        (RequestId::SET_BACKEND_REQ_FD, "", 0, 1),
    ] {
        assert_eq!(
            refused(id, payload, fds),
            DecodeError::Fds {
                request: id,
                fds,
                expected: wanted
            }
        );
    }
    let nofd = refused(RequestId::SET_VRING_CALL, "0001000000000000", 1);
    assert!(
        matches!(
            nofd,
            DecodeError::Fds {
                fds: 1,
                expected: 0,
                ..
            }
        ),
        "NOFD with one"
    );
    assert!(matches!(
        refused(RequestId::GET_FEATURES, "", 1),
        DecodeError::Fds { .. }
    ));
    // One is closed unused, for front ends that send it; two are too many.
    let rem = |fds: usize| Message {
        head: Head::request(RequestId::REM_MEM_REG, false),
        payload: hex(&region),
        fds: (0..fds).map(|_| fd()).collect(),
    };
    assert!(matches!(
        Request::decode(rem(1)),
        Ok(Request::RemMemReg(REGION))
    ));
    assert!(Request::decode(rem(2)).is_err());
}

#[test]
fn values_outside_the_specification_are_refused() {
    let field = |id, payload: &str| match refused(id, payload, 0) {
        DecodeError::Field { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(
        field(RequestId::SET_VRING_ENABLE, "00000000 02000000"),
        "num"
    );
    assert_eq!(field(RequestId::SET_VRING_KICK, "0003000000000000"), "u64");
    let iotlb = |size: &str, user: &str, rest: &str| {
        field(
            RequestId::IOTLB_MSG,
            &format!("0010000000000000 {size} {user} {rest} 000000000000"),
        )
    };
    let (page, zero, all) = ("0010000000000000", "0000000000000000", "ffffffffffffffff");
    assert_eq!(iotlb(zero, zero, "03 02"), "size");
    assert_eq!(iotlb(all, zero, "03 02"), "size");
    assert_eq!(iotlb(page, all, "03 02"), "user address");
    assert_eq!(iotlb(page, zero, "04 02"), "permissions flags");
    assert_eq!(iotlb(page, zero, "01 01"), "type");
    assert_eq!(iotlb(page, zero, "01 09"), "type");
    let reply = Message::reply_u64(RequestId::GET_FEATURES, 0);
    assert!(matches!(
        Request::decode(reply),
        Err(DecodeError::Direction { .. })
    ));
    assert!(matches!(
        refused(RequestId(77), "", 0),
        DecodeError::Unknown { .. }
    ));
    assert_eq!(
        refused(RequestId::VRING_KICK, "", 0).to_string(),
        "VRING_KICK is not supported"
    );
}

#[test]
fn an_invalidation_of_size_zero_at_zero_means_everything() {
    let message = Message::new(Head::request(RequestId::IOTLB_MSG, true), {
        let mut payload = vec![0; 32];
        payload[25] = 3;
        payload
    });
    let Ok(Request::Iotlb(IotlbMessage::Invalidate { range })) = Request::decode(message) else {
        panic!("an invalidation");
    };
    assert_eq!(
        range,
        IotlbRange {
            first: 0,
            last: u64::MAX
        }
    );
}
