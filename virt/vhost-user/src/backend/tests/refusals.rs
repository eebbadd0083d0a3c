//! Malformed requests: the refusal is reported where the protocol can, and the session goes on.

use super::*;
use crate::wire::{ConfigAccess, ConfigKind, Head};

#[test]
fn a_failure_is_answered_non_zero_and_the_session_goes_on() {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    assert_refused!(
        peer,
        Request::SetVringNum(state(0, 100)),
        RequestError::Ring {
            field: "num",
            value: 100,
            ..
        }
    );
    let unknown = Message::new(Head::request(RequestId(99), true), vec![1]);
    assert!(matches!(
        peer.session.handle(unknown),
        Ok(Step::Refused(..))
    ));
    assert_eq!(peer.start().size, 128);
}

#[test]
fn a_failure_that_cannot_be_told_ends_the_session() {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    for request in [
        Request::SetVringNum(state(0, 100)).encode(false),
        // A number would be taken for the value.
        Request::GetVringBase { index: 9 }.encode(true),
    ] {
        assert!(matches!(
            peer.session.handle(request),
            Err(Fatal::Untold(_))
        ));
    }
    // need_reply counts only with REPLY_ACK.
    let mut peer = Peer::new();
    let refused = peer
        .session
        .handle(Request::SetVringNum(state(0, 100)).encode(true));
    assert!(matches!(refused, Err(Fatal::Untold(_))));
}

#[test]
fn replies_that_can_say_no_say_it() {
    let mut peer = Peer::new();
    peer.negotiate(DEVICE_BITS);
    let access = ConfigAccess {
        offset: 0,
        size: 8,
        kind: ConfigKind::Writable,
    };
    peer.session
        .handle(Request::GetConfig(access).encode(false))
        .unwrap();
    let reply = peer
        .session
        .finish(Err(Refusal("no".into())))
        .unwrap()
        .unwrap();
    assert!(reply.payload.is_empty(), "no payload is the error");
    let wanted = inflight(0, 3, 8);
    let Ok(Step::Refused(error, reply)) = peer
        .session
        .handle(Request::GetInflightFd(wanted).encode(false))
    else {
        panic!("three queues of two");
    };
    assert!(matches!(
        error,
        RequestError::Value {
            field: "num queues",
            value: 3,
            ..
        }
    ));
    let reply = Reply::decode(RequestId::GET_INFLIGHT_FD, reply);
    assert!(matches!(reply, Ok(Reply::Inflight(None))));
}

#[test]
fn features_not_offered_are_refused() {
    let mut peer = Peer::new();
    peer.negotiate(DEVICE_BITS);
    assert_refused!(peer, Request::SetFeatures(DEVICE_BITS | 1 << 63), RequestError::NotOffered { bits, .. } if bits == 1 << 63);
    assert_refused!(
        peer,
        Request::SetProtocolFeatures(ProtocolFeatures::PAGEFAULT),
        RequestError::NotOffered { bits: 0x100, .. }
    );
    assert_eq!(peer.session.features(), DEVICE_BITS);
}

#[test]
fn requests_of_features_not_negotiated_are_refused() {
    let mut peer = Peer::new();
    peer.ok(Request::SetProtocolFeatures(ProtocolFeatures::REPLY_ACK));
    for request in [
        Request::AddMemReg(LOW, fd()),
        Request::ResetDevice,
        Request::SetBackendReqFd(fd()),
        Request::SetInflightFd(inflight(1, 1, 8), fd()),
    ] {
        assert_refused!(peer, request, RequestError::NotNegotiated { .. });
    }
}

#[test]
fn ring_sizes_outside_the_specification_are_refused() {
    let mut peer = Peer::new();
    peer.negotiate(DEVICE_BITS | feature::RING_PACKED);
    peer.ok(Request::SetVringNum(state(0, 100)));
    for size in [0, 1025, 65536, u32::MAX] {
        assert_refused!(
            peer,
            Request::SetVringNum(state(0, size)),
            RequestError::Ring { field: "num", .. }
        );
    }
    // A size that only suits packed rings does not survive a change to split ones.
    peer.ok(Request::SetVringAddr(addr(0)));
    peer.ok(Request::SetMemTable(vec![(LOW, fd())]));
    peer.ok(Request::SetFeatures(DEVICE_BITS));
    assert_refused!(
        peer,
        Request::SetVringKick(kick(0)),
        RequestError::Ring {
            field: "num",
            value: 100,
            ..
        }
    );
}

#[test]
fn misaligned_and_overflowing_ring_addresses_are_refused() {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    let good = addr(0);
    for (bad, wrong) in [
        (
            VringAddr {
                desc: good.desc + 8,
                ..good
            },
            "descriptor",
        ),
        (
            VringAddr {
                avail: good.avail + 1,
                ..good
            },
            "available",
        ),
        (
            VringAddr {
                used: good.used + 2,
                ..good
            },
            "used",
        ),
        (
            VringAddr {
                used: u64::MAX - 3,
                ..good
            },
            "used",
        ),
        (
            VringAddr {
                desc: u64::MAX - 15,
                ..good
            },
            "descriptor",
        ),
    ] {
        assert_refused!(peer, Request::SetVringAddr(bad), RequestError::Ring { field, .. } if field == wrong);
    }
    assert_refused!(
        peer,
        Request::SetVringBase(state(0, 0x1_0000)),
        RequestError::Ring { field: "base", .. }
    );
}

#[test]
fn a_ring_index_out_of_range_is_refused() {
    let mut peer = Peer::new();
    peer.negotiate(DEVICE_BITS);
    for request in [
        Request::SetVringNum(state(2, 8)),
        Request::SetVringBase(state(u32::MAX, 0)),
        Request::SetVringAddr(addr(256)),
        Request::SetVringKick(kick(2)),
        Request::SetVringCall(kick(255)),
        Request::SetVringEnable {
            index: 2,
            enable: true,
        },
    ] {
        assert_refused!(peer, request, RequestError::RingIndex { queues: 2, .. });
    }
}

#[test]
fn a_ring_is_not_started_before_it_is_described() {
    let mut peer = Peer::new();
    peer.negotiate(DEVICE_BITS);
    let mut missing = |request: Option<Request>| {
        if let Some(request) = request {
            peer.ok(request);
        }
        match peer.refused(Request::SetVringKick(kick(0))) {
            RequestError::RingIncomplete { missing, .. } => missing,
            other => panic!("{other}"),
        }
    };
    assert_eq!(missing(None), "memory");
    assert_eq!(
        missing(Some(Request::SetMemTable(vec![(LOW, fd())]))),
        "size"
    );
    assert_eq!(
        missing(Some(Request::SetVringNum(state(0, 8)))),
        "addresses"
    );
}

#[test]
fn a_running_ring_keeps_its_description() {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    peer.start();
    for request in [
        Request::SetVringNum(state(0, 8)),
        Request::SetVringBase(state(0, 8)),
        Request::SetVringAddr(VringAddr {
            desc: addr(0).desc + 16,
            ..addr(0)
        }),
        Request::SetFeatures(DEVICE_BITS),
        Request::SetInflightFd(inflight(1, 1, 8), fd()),
    ] {
        assert_refused!(peer, request, RequestError::Running { index: 0, .. });
    }
}

#[test]
fn memory_regions_that_cannot_be_are_refused() {
    let mut peer = Peer::new();
    peer.negotiate(DEVICE_BITS);
    for (bad, wrong) in [
        (MemRegion { size: 0, ..LOW }, "size"),
        (
            MemRegion {
                guest_addr: u64::MAX - 8,
                ..LOW
            },
            "guest address",
        ),
        (
            MemRegion {
                user_addr: u64::MAX - 8,
                ..LOW
            },
            "user address",
        ),
        (
            MemRegion {
                mmap_offset: i64::MAX as u64,
                ..LOW
            },
            "mmap offset",
        ),
    ] {
        assert_refused!(peer, Request::AddMemReg(bad, fd()), RequestError::RegionRange { field, .. } if field == wrong);
    }
    peer.ok(Request::AddMemReg(LOW, fd()));
    let last = LOW.size - 1;
    for (bad, wrong) in [
        (
            MemRegion {
                guest_addr: last,
                ..HIGH
            },
            "guest",
        ),
        (
            MemRegion {
                user_addr: LOW.user_addr + last,
                ..HIGH
            },
            "user",
        ),
    ] {
        assert_refused!(peer, Request::AddMemReg(bad, fd()), RequestError::RegionOverlap { space, .. } if space == wrong);
    }
    assert_refused!(
        peer,
        Request::RemMemReg(HIGH),
        RequestError::NoSuchRegion { .. }
    );
    let many = (0..4).map(|n| {
        let (guest_addr, user_addr) = (n << 32, n << 32);
        (
            MemRegion {
                guest_addr,
                user_addr,
                ..LOW
            },
            fd(),
        )
    });
    assert_refused!(
        peer,
        Request::SetMemTable(many.collect()),
        RequestError::TooManyRegions {
            regions: 4,
            max: 3,
            ..
        }
    );
}
