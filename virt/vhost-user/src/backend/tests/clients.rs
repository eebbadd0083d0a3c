//! Sequences of messages that real clients send.

use super::*;
use crate::wire::{ConfigAccess, ConfigKind};

/// Ring 0 from SET_VRING_NUM to SET_VRING_KICK, in QEMU's order.
fn qemu_starts_ring(peer: &mut Peer, base: u32) -> RingConfig {
    assert!(peer.ok(Request::SetVringNum(state(0, 128))).is_none());
    assert!(peer.ok(Request::SetVringBase(state(0, base))).is_none());
    assert!(peer.ok(Request::SetVringAddr(addr(0))).is_none());
    peer.start()
}

#[test]
fn qemu_7_2_wire_order_ends_in_a_running_ring() {
    let mut peer = Peer::new();
    let offered = peer.value(Request::GetFeatures);
    assert_ne!(offered & feature::PROTOCOL_FEATURES, 0);
    assert_eq!(peer.value(Request::GetProtocolFeatures), SUPPORTED.0);
    peer.ok(Request::SetProtocolFeatures(SUPPORTED));
    assert_eq!(peer.value(Request::GetQueueNum), 2);
    assert_eq!(peer.value(Request::GetMaxMemSlots), 3);
    peer.asks_for_acks = true;
    assert!(matches!(
        peer.ok(Request::SetBackendReqFd(fd())),
        Some(Event::BackendChannel(_))
    ));
    peer.asks_for_acks = false;
    assert!(matches!(peer.ok(Request::SetOwner), Some(Event::Owner)));
    // It asks again, and finds what its IOTLB needs.
    let again = peer.value(Request::GetFeatures);
    assert_eq!(again, offered | feature::ACCESS_PLATFORM);
    assert!(peer.ok(Request::SetVringCall(kick(0))).is_none());
    assert!(peer.ok(Request::SetVringErr(kick(0))).is_none());
    let access = ConfigAccess {
        offset: 0,
        size: 60,
        kind: ConfigKind::Writable,
    };
    let (_, config) = peer.send(Request::GetConfig(access));
    assert!(matches!(config, Some(Reply::Config(Some(bytes))) if bytes == vec![7; 60]));
    let features = DEVICE_BITS | feature::PROTOCOL_FEATURES;
    peer.ok(Request::SetFeatures(features));
    peer.ok(Request::SetFeatures(features));
    peer.asks_for_acks = true;
    peer.ok(Request::AddMemReg(HIGH, fd()));
    let Some(Event::Memory(regions)) = peer.ok(Request::AddMemReg(LOW, fd())) else {
        panic!("no memory");
    };
    assert_eq!(
        regions.iter().map(|r| r.place).collect::<Vec<_>>(),
        [LOW, HIGH]
    );
    peer.asks_for_acks = false;
    let ring = qemu_starts_ring(&mut peer, 0);
    assert_eq!(
        (ring.index, ring.size, ring.layout),
        (0, 128, RingLayout::Split)
    );
    assert_eq!(
        (ring.desc, ring.avail, ring.used),
        (addr(0).desc, addr(0).avail, addr(0).used)
    );
    assert_eq!(ring.base, RingBase::Split(0));
    assert!(ring.call.is_some() && ring.err.is_some() && matches!(ring.kick, Kick::Fd(_)));
    assert!(!ring.is_enabled, "kick comes before enable");
    let enable = Request::SetVringEnable {
        index: 0,
        enable: true,
    };
    assert!(matches!(peer.ok(enable), Some(Event::RingEnabled(0, true))));
}

#[test]
fn the_platform_feature_is_offered_to_those_alone_that_can_be_asked_for_translations() {
    let needed = ProtocolFeatures::REPLY_ACK | ProtocolFeatures::BACKEND_REQ;
    for protocol in [
        None,
        Some(ProtocolFeatures::REPLY_ACK),
        Some(ProtocolFeatures::BACKEND_REQ),
        Some(needed),
    ] {
        let mut peer = Peer::new();
        if let Some(protocol) = protocol {
            peer.ok(Request::SetProtocolFeatures(protocol));
        }
        let is_offered = protocol == Some(needed);
        let offered = peer.value(Request::GetFeatures) & feature::ACCESS_PLATFORM != 0;
        assert_eq!(offered, is_offered, "{protocol:?}");
        let features = DEVICE_BITS | feature::PROTOCOL_FEATURES | feature::ACCESS_PLATFORM;
        let set = peer.message(Request::SetFeatures(features));
        // Where no acknowledgement can be asked for, a refusal ends the session.
        let is_taken = matches!(peer.session.handle(set), Ok(Step::Event(_)));
        assert_eq!(is_taken, is_offered, "{protocol:?}");
    }
}

#[test]
fn uml_asks_for_every_reply_and_never_acks_bit_30_so_rings_are_live_at_kick() {
    let mut peer = Peer::new();
    peer.ok(Request::SetOwner);
    peer.value(Request::GetFeatures);
    peer.value(Request::GetProtocolFeatures);
    // It sets need_reply from the request on that negotiates REPLY_ACK, and waits for that answer
    // too.
    peer.asks_for_acks = true;
    peer.ok(Request::SetProtocolFeatures(
        ProtocolFeatures::REPLY_ACK | ProtocolFeatures::BACKEND_REQ | ProtocolFeatures::CONFIG,
    ));
    peer.ok(Request::SetBackendReqFd(fd()));
    peer.ok(Request::SetFeatures(DEVICE_BITS));
    peer.ok(Request::SetFeatures(DEVICE_BITS));
    peer.ok(Request::SetMemTable(vec![(LOW, fd()), (HIGH, fd())]));
    for index in 0..2_u8 {
        peer.ok(Request::SetVringCall(kick(index)));
        peer.ok(Request::SetVringNum(state(index.into(), 128)));
        peer.ok(Request::SetVringBase(state(index.into(), 0)));
        peer.ok(Request::SetVringAddr(addr(index.into())));
    }
    for index in 0..2 {
        let ring = started(peer.ok(Request::SetVringKick(kick(index))));
        assert!(ring.is_enabled, "no SET_VRING_ENABLE will ever come");
    }
    // A request for a value has its own reply and no second one.
    peer.value(Request::GetFeatures);
}

#[test]
fn seabios_stops_and_starts_rings_whole_cycles() {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    peer.ok(Request::SetVringCall(kick(0)));
    for cycle in 1..4_u16 {
        let ring = qemu_starts_ring(&mut peer, u32::from(cycle) - 1);
        assert_eq!(ring.base, RingBase::Split(cycle - 1));
        assert!(ring.call.is_some(), "the call descriptor outlives a stop");
        peer.ok(Request::SetVringEnable {
            index: 0,
            enable: true,
        });
        peer.ok(Request::SetVringEnable {
            index: 0,
            enable: false,
        });
        peer.base = RingBase::Split(cycle);
        let (event, reply) = peer.send(Request::GetVringBase { index: 0 });
        assert!(matches!(event, Some(Event::RingStopped(0))));
        assert!(
            matches!(reply, Some(Reply::RingBase(VringState { index: 0, num })) if num == u32::from(cycle))
        );
        // The next driver has other features; a stopped ring allows that.
        let features = if cycle % 2 == 0 { DEVICE_BITS } else { 1 << 32 };
        peer.ok(Request::SetFeatures(features | feature::PROTOCOL_FEATURES));
        peer.ok(Request::RemMemReg(LOW));
        peer.ok(Request::AddMemReg(LOW, fd()));
    }
}

#[test]
fn a_stopped_ring_started_by_kick_alone_goes_on_where_it_stood() {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    peer.start();
    peer.base = RingBase::Split(777);
    peer.send(Request::GetVringBase { index: 0 });
    assert_eq!(peer.start().base, RingBase::Split(777));
}

#[test]
fn a_ring_that_never_ran_tells_its_base_without_an_event() {
    let mut peer = Peer::new();
    peer.ok(Request::SetVringBase(state(1, 9)));
    let (event, reply) = peer.send(Request::GetVringBase { index: 1 });
    assert!(event.is_none());
    assert!(matches!(
        reply,
        Some(Reply::RingBase(VringState { index: 1, num: 9 }))
    ));
}

fn packed_peer() -> Peer {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS | feature::RING_PACKED);
    peer
}

fn packed(avail: u16, avail_wrap: bool, used: u16, used_wrap: bool, is_fresh: bool) -> RingBase {
    RingBase::Packed {
        avail,
        avail_wrap,
        used,
        used_wrap,
        is_fresh,
    }
}

#[test]
fn base_0_on_a_fresh_packed_ring_means_wrap_counters_of_one() {
    let ring = packed_peer().start();
    assert_eq!(ring.layout, RingLayout::Packed);
    assert_eq!(ring.base, packed(0, true, 0, true, true));
}

#[test]
fn packed_bases_are_read_in_both_halves() {
    for (num, base) in [
        (0x8000_8000, packed(0, true, 0, true, false)),
        (0x0000_8005, packed(5, true, 5, true, false)),
        (0x8004_0005, packed(5, false, 4, true, false)),
    ] {
        let mut peer = packed_peer();
        peer.ok(Request::SetVringBase(state(0, num)));
        assert_eq!(peer.start().base, base, "{num:#x}");
    }
    assert_eq!(packed(5, false, 4, true, false).to_wire(), 0x8004_0005);
}

#[test]
fn base_0_that_was_our_own_answer_is_meant() {
    let mut peer = packed_peer();
    peer.start();
    peer.base = packed(0, false, 0, false, false);
    peer.send(Request::GetVringBase { index: 0 });
    peer.ok(Request::SetVringBase(state(0, 0)));
    assert_eq!(peer.start().base, packed(0, false, 0, false, false));
}

#[test]
fn kick_without_a_descriptor_means_poll() {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    let ring = started(peer.ok(Request::SetVringKick(VringFd { index: 0, fd: None })));
    assert!(matches!(ring.kick, Kick::Poll));
}

#[test]
fn a_ring_enabled_before_its_kick_starts_enabled() {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    assert!(
        peer.ok(Request::SetVringEnable {
            index: 0,
            enable: true
        })
        .is_none()
    );
    assert!(peer.start().is_enabled);
}

#[test]
fn an_inflight_region_is_made_kept_and_given_back() {
    let mut peer = Peer::new();
    peer.negotiate(DEVICE_BITS);
    let wanted = inflight(0, 2, 128);
    let (event, reply) = peer.send(Request::GetInflightFd(wanted));
    assert!(matches!(event, Some(Event::InflightWanted(got)) if got == wanted));
    let Some(Reply::Inflight(Some((region, fd)))) = reply else {
        panic!("{reply:?}")
    };
    assert_eq!(
        region,
        Inflight {
            mmap_size: 4096,
            ..wanted
        }
    );
    let event = peer.ok(Request::SetInflightFd(region, fd));
    assert!(matches!(event, Some(Event::InflightGiven(got, _)) if got == region));
}

#[test]
fn a_network_device_counts_pairs_and_hears_of_mtu_and_address() {
    let mut peer = Peer::new();
    peer.session = Session::new(Config {
        queues: 5,
        rings_per_queue: 2,
        ..config()
    })
    .unwrap();
    peer.asks_for_acks = true;
    peer.ok(Request::SetProtocolFeatures(SUPPORTED));
    assert_eq!(
        peer.value(Request::GetQueueNum),
        2,
        "the control queue is none"
    );
    peer.ok(Request::SetFeatures(
        DEVICE_BITS | feature::PROTOCOL_FEATURES,
    ));
    // The fifth ring is there all the same.
    assert!(peer.ok(Request::SetVringNum(state(4, 128))).is_none());
    assert!(matches!(
        peer.ok(Request::NetSetMtu(9000)),
        Some(Event::Mtu(9000))
    ));
    let announced = peer.ok(Request::SendRarp(0x0605_0403_0202));
    assert!(matches!(
        announced,
        Some(Event::Announce([2, 2, 3, 4, 5, 6]))
    ));
    for per_queue in [0, 3] {
        let config = Config {
            rings_per_queue: per_queue,
            ..config()
        };
        assert!(Session::new(config).is_err(), "{per_queue} of 2 rings");
    }
    // Neither is accepted without its feature.
    let mut peer = Peer::new();
    peer.ok(Request::SetProtocolFeatures(ProtocolFeatures::REPLY_ACK));
    for request in [Request::NetSetMtu(1500), Request::SendRarp(2)] {
        assert!(matches!(
            peer.refused(request),
            RequestError::NotNegotiated { .. }
        ));
    }
}

#[test]
fn the_mtu_is_offered_to_front_ends_that_would_say_it() {
    for (protocol, is_offered) in [
        (ProtocolFeatures::REPLY_ACK, false),
        (ProtocolFeatures::REPLY_ACK | ProtocolFeatures::MTU, true),
    ] {
        let config = Config {
            features: DEVICE_BITS | feature::NET_MTU,
            ..config()
        };
        let mut peer = Peer::new();
        peer.session = Session::new(config).unwrap();
        assert_eq!(peer.value(Request::GetFeatures) & feature::NET_MTU, 0);
        peer.ok(Request::SetProtocolFeatures(protocol));
        let offered = peer.value(Request::GetFeatures) & feature::NET_MTU != 0;
        assert_eq!(offered, is_offered, "{protocol:?}");
    }
    // Of a device of another kind the bit is another feature.
    let config = Config {
        features: DEVICE_BITS | feature::NET_MTU,
        protocol: SUPPORTED.without(ProtocolFeatures::MTU),
        ..config()
    };
    let mut peer = Peer::new();
    peer.session = Session::new(config).unwrap();
    assert_ne!(peer.value(Request::GetFeatures) & feature::NET_MTU, 0);
}
