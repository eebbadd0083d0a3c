//! Events, and the session's state.

use super::*;
use crate::wire::{IotlbAccess, IotlbMessage, IotlbRange};

fn running() -> Peer {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    peer.start();
    peer
}

#[test]
fn descriptors_of_a_running_ring_are_swapped() {
    let mut peer = running();
    let event = peer.ok(Request::SetVringKick(VringFd { index: 0, fd: None }));
    assert!(matches!(event, Some(Event::KickReplaced(0, Kick::Poll))));
    let event = peer.ok(Request::SetVringCall(kick(0)));
    assert!(matches!(event, Some(Event::CallReplaced(0, Some(_)))));
    let event = peer.ok(Request::SetVringErr(VringFd { index: 0, fd: None }));
    assert!(matches!(event, Some(Event::ErrReplaced(0, None))));
}

#[test]
fn enabling_twice_is_one_event() {
    let mut peer = running();
    let enable = |enable| Request::SetVringEnable { index: 0, enable };
    assert!(matches!(
        peer.ok(enable(true)),
        Some(Event::RingEnabled(0, true))
    ));
    assert!(peer.ok(enable(true)).is_none());
    assert!(matches!(
        peer.ok(enable(false)),
        Some(Event::RingEnabled(0, false))
    ));
}

#[test]
fn reset_forgets_rings_and_features_and_keeps_memory_and_call() {
    let mut peer = running();
    peer.ok(Request::SetVringCall(kick(0)));
    assert!(matches!(peer.ok(Request::ResetDevice), Some(Event::Reset)));
    assert_eq!(peer.session.features(), 0);
    assert_eq!(peer.session.protocol_features(), SUPPORTED);
    assert_refused!(
        peer,
        Request::SetVringKick(kick(0)),
        RequestError::RingIncomplete {
            missing: "size",
            ..
        }
    );
    peer.ok(Request::SetFeatures(
        DEVICE_BITS | feature::PROTOCOL_FEATURES,
    ));
    peer.ok(Request::SetVringNum(state(0, 64)));
    peer.ok(Request::SetVringAddr(addr(0)));
    let ring = peer.start();
    assert!(ring.call.is_some() && !ring.is_enabled);
}

#[test]
fn reset_owner_disables_rings_only_where_they_can_be_enabled_again() {
    let mut peer = running();
    peer.ok(Request::SetVringEnable {
        index: 0,
        enable: true,
    });
    assert!(matches!(
        peer.ok(Request::ResetOwner),
        Some(Event::RingsDisabled)
    ));
    let event = peer.ok(Request::SetVringEnable {
        index: 0,
        enable: true,
    });
    assert!(matches!(event, Some(Event::RingEnabled(0, true))));
    let mut without_bit_30 = Peer::new();
    without_bit_30.negotiate(DEVICE_BITS);
    assert!(without_bit_30.ok(Request::ResetOwner).is_none());
}

#[test]
fn event_refused_by_the_daemon_changes_nothing() {
    let mut peer = Peer::new();
    peer.describe(DEVICE_BITS);
    let refuse = |peer: &mut Peer, request: Request| {
        let id = request.id();
        assert!(matches!(
            peer.session.handle(request.encode(true)),
            Ok(Step::Event(_))
        ));
        let reply = peer
            .session
            .finish(Err(Refusal("no".into())))
            .unwrap()
            .unwrap();
        assert!(matches!(
            Reply::decode(id, reply),
            Ok(Reply::Ack { is_ok: false })
        ));
    };
    refuse(&mut peer, Request::AddMemReg(HIGH, fd()));
    let Some(Event::Memory(regions)) = peer.ok(Request::AddMemReg(HIGH, fd())) else {
        panic!("the first try left the region in the table");
    };
    assert_eq!(regions.len(), 2);
    refuse(&mut peer, Request::SetVringKick(kick(0)));
    peer.start();
    refuse(
        &mut peer,
        Request::SetVringEnable {
            index: 0,
            enable: true,
        },
    );
    let event = peer.ok(Request::SetVringEnable {
        index: 0,
        enable: true,
    });
    assert!(event.is_some(), "still to be enabled");
}

#[test]
fn a_region_that_stays_keeps_its_descriptor() {
    let mut peer = Peer::new();
    peer.negotiate(DEVICE_BITS);
    let memory = |event| match event {
        Some(Event::Memory(regions)) => regions,
        other => panic!("{other:?}"),
    };
    let one = memory(peer.ok(Request::AddMemReg(HIGH, fd())));
    let two = memory(peer.ok(Request::AddMemReg(LOW, fd())));
    assert!(Arc::ptr_eq(&one[0].fd, &two[1].fd));
    let left = memory(peer.ok(Request::RemMemReg(MemRegion {
        mmap_offset: 99,
        ..HIGH
    })));
    assert_eq!(left.iter().map(|r| r.place).collect::<Vec<_>>(), [LOW]);
}

#[test]
fn iotlb_updates_inside_memory_pass_and_are_acknowledged_unasked() {
    let mut peer = Peer::new();
    peer.negotiate(DEVICE_BITS | feature::ACCESS_PLATFORM);
    peer.ok(Request::SetMemTable(vec![(LOW, fd()), (HIGH, fd())]));
    let update = |user_addr: u64, len: u64| {
        let range = IotlbRange {
            first: 0x1000,
            last: 0x1000 + len - 1,
        };
        Request::Iotlb(IotlbMessage::Update {
            range,
            user_addr,
            access: IotlbAccess::ReadWrite,
        })
    };
    // The user addresses of the two regions touch: one update may span them.
    let event = peer.ok(update(HIGH.user_addr - 0x1000, 0x2000));
    assert!(matches!(event, Some(Event::IotlbUpdate { .. })));
    let end = HIGH.user_addr + HIGH.size;
    peer.ok(update(end - 0x1000, 0x1000));
    for (user_addr, len) in [(end - 0x1000, 0x1001), (LOW.user_addr - 1, 2), (end, 1)] {
        assert_refused!(
            peer,
            update(user_addr, len),
            RequestError::Value {
                field: "user address",
                ..
            }
        );
    }
    let all = IotlbRange {
        first: 0,
        last: u64::MAX,
    };
    let event = peer.ok(Request::Iotlb(IotlbMessage::Invalidate { range: all }));
    assert!(matches!(event, Some(Event::IotlbInvalidate(range)) if range == all));
}

#[test]
fn the_daemons_own_mistakes_are_told() {
    let mut peer = Peer::new();
    assert_eq!(
        peer.session.finish(Ok(Answer::Done)).unwrap_err(),
        Fatal::WrongAnswer
    );
    peer.describe(DEVICE_BITS);
    peer.start();
    let stop = Request::GetVringBase { index: 0 }.encode(false);
    assert!(matches!(peer.session.handle(stop), Ok(Step::Event(_))));
    assert!(peer.session.is_waiting());
    let early = peer.session.handle(Request::GetFeatures.encode(false));
    assert!(matches!(
        early,
        Err(Fatal::Unfinished {
            request: RequestId::GET_FEATURES
        })
    ));
    assert_eq!(
        peer.session.finish(Ok(Answer::Done)).unwrap_err(),
        Fatal::WrongAnswer
    );
}

#[test]
fn a_configuration_that_cannot_be_served_is_refused() {
    let with = |change: fn(&mut Config)| {
        let mut config = config();
        change(&mut config);
        Session::new(config).unwrap_err()
    };
    let error = with(|config| config.protocol = ProtocolFeatures::PAGEFAULT);
    assert_eq!(error, ConfigError::Protocol(ProtocolFeatures::PAGEFAULT));
    assert_eq!(
        with(|config| config.queues = 257),
        ConfigError::Range {
            field: "queues",
            value: 257
        }
    );
    assert!(matches!(
        with(|config| config.max_regions = 0),
        ConfigError::Range { .. }
    ));
}
