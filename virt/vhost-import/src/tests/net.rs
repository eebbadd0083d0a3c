//! Network devices: properties of the back end, and properties of this side.

use super::*;
use crate::{Class, NetIdentity};
use vhost_user::backend::RingBase;
use vhost_user::wire::ProtocolFeatures;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 7];
const CSUM: u64 = 1;
const MTU: u64 = 1 << 3;
const MAC_BIT: u64 = 1 << 5;
const MRG_RXBUF: u64 = 1 << 15;
const STATUS: u64 = 1 << 16;

/// DPDK's, as far as it matters here: no configuration, no record of requests, one pair.
fn plan() -> Plan {
    Plan {
        features: feature::VERSION_1 | CSUM | MRG_RXBUF,
        protocol: ProtocolFeatures::MQ | ProtocolFeatures::REPLY_ACK,
        queues: 2,
        ..Plan::default()
    }
}

fn guest(back_end: &BackEnd, mtu: Option<u16>) -> Guest {
    let config = ImportConfig {
        class: Class::Net(NetIdentity { mac: MAC, mtu }),
        ..config(back_end.path(), 2)
    };
    Guest::try_connect(config).unwrap()
}

#[test]
fn the_configuration_is_ours_and_the_back_end_hears_of_no_feature_that_it_lacks() {
    let back_end = BackEnd::new(plan());
    let mut guest = guest(&back_end, Some(9000));
    assert_eq!(guest.import.device_type(), 1);
    let own = MAC_BIT | STATUS | MTU;
    let theirs = feature::VERSION_1 | CSUM | MRG_RXBUF;
    assert_eq!(guest.import.features(), own | theirs);
    let mut space = [0xff; 16];
    guest.import.read_config(0, &mut space);
    // §5.1.4: MAC address, link up, one pair, MTU.
    let expected = [0x52, 0x54, 0, 0, 0, 7, 1, 0, 1, 0, 0x28, 0x23, 0, 0, 0, 0];
    assert_eq!(space, expected);
    guest.start();
    eventually("served", || back_end.seen().is_serving(1));
    assert_eq!(back_end.seen().features.last(), Some(&(theirs | 1 << 30)));
}

#[test]
fn without_an_mtu_none_is_offered() {
    let back_end = BackEnd::new(plan());
    let guest = guest(&back_end, None);
    assert_eq!(guest.import.features() & MTU, 0);
}

/// Its receive ring always has buffers, so a back end never dies with quiet rings.
#[test]
fn rings_go_on_at_the_used_index_without_a_record_of_what_was_under_way() {
    let back_end = BackEnd::new(plan());
    let mut guest = guest(&back_end, None);
    guest.start();
    eventually("served", || back_end.seen().is_serving(1));
    guest.set_indices(0, 200, 17);
    guest.set_indices(1, 9, 8);
    let back_end = back_end.restart(plan());
    eventually("served again", || back_end.seen().is_serving(1));
    let bases: Vec<_> = back_end
        .seen()
        .started
        .iter()
        .map(|ring| ring.base)
        .collect();
    assert_eq!(bases, [RingBase::Split(17), RingBase::Split(8)]);
    assert!(!guest.import.needs_reset());
}

#[test]
fn a_back_end_that_has_forgotten_an_offload_is_another_device() {
    let back_end = BackEnd::new(plan());
    let mut guest = guest(&back_end, None);
    guest.start();
    eventually("served", || back_end.seen().is_serving(1));
    let without = Plan {
        features: feature::VERSION_1 | MRG_RXBUF,
        ..plan()
    };
    let back_end = back_end.restart(without);
    eventually("looked at", || back_end.seen().connections >= 3);
    assert!(back_end.seen().started.is_empty());
}

const CTRL_VQ: u64 = 1 << 17;
const MQ: u64 = 1 << 22;

fn pairs_plan() -> Plan {
    Plan {
        features: plan().features | CTRL_VQ | MQ,
        queues: 4,
        ..plan()
    }
}

fn pairs_guest(back_end: &BackEnd) -> Guest {
    let config = ImportConfig {
        class: Class::Net(NetIdentity {
            mac: MAC,
            mtu: None,
        }),
        ..config(back_end.path(), 4)
    };
    Guest::try_connect(config).unwrap()
}

#[test]
fn rings_of_pairs_that_the_driver_does_not_use_are_disabled() {
    let back_end = BackEnd::new(pairs_plan());
    let mut guest = pairs_guest(&back_end);
    assert_eq!(guest.import.pairs(), 2);
    assert_eq!(guest.import.queue_sizes().len(), 5);
    assert_eq!(guest.import.features() & (CTRL_VQ | MQ), CTRL_VQ | MQ);
    let mut pairs = [0; 2];
    guest.import.read_config(8, &mut pairs);
    assert_eq!(u16::from_le_bytes(pairs), 2);
    guest.start();
    let enabled = |back_end: &BackEnd| [0, 1, 2, 3].map(|ring| back_end.seen().is_serving(ring));
    eventually("served", || {
        enabled(&back_end) == [true, true, false, false]
    });
    // The control queue is ours, and the back end knows of none.
    let told = back_end.seen().features.last().copied().unwrap();
    assert_eq!(told & (CTRL_VQ | MQ), MQ);
    guest.import.set_pairs(2);
    eventually("two pairs", || enabled(&back_end) == [true; 4]);
    // What was chosen holds for a back end that comes later.
    let back_end = back_end.restart(pairs_plan());
    eventually("served again", || enabled(&back_end) == [true; 4]);
    guest.import.set_pairs(1);
    eventually("one pair", || {
        enabled(&back_end) == [true, true, false, false]
    });
    // And not for the next driver.
    guest.import.set_pairs(2);
    eventually("two pairs", || enabled(&back_end) == [true; 4]);
    guest.stop();
    guest.import.reset();
    back_end.seen().enabled.clear();
    guest.start();
    eventually("the next driver", || {
        enabled(&back_end) == [true, true, false, false]
    });
}

#[test]
fn a_back_end_of_fewer_pairs_is_refused() {
    let back_end = BackEnd::new(Plan {
        // It counts pairs.
        queues: 1,
        ..plan()
    });
    let config = ImportConfig {
        class: Class::Net(NetIdentity {
            mac: MAC,
            mtu: None,
        }),
        ..config(back_end.path(), 4)
    };
    let error = Guest::try_connect(config).map(drop).unwrap_err();
    assert!(matches!(error, ImportError::Queues { .. }), "{error}");
}

#[test]
fn the_mtu_is_told_where_it_is_wanted_and_the_guest_is_announced_after_a_restart() {
    let wants = Plan {
        protocol: plan().protocol | ProtocolFeatures::MTU | ProtocolFeatures::RARP,
        ..plan()
    };
    let back_end = BackEnd::new(wants.clone());
    let mut guest = guest(&back_end, Some(9000));
    guest.start();
    eventually("served", || back_end.seen().is_serving(1));
    assert_eq!(back_end.seen().mtu, [9000]);
    assert!(back_end.seen().announced.is_empty(), "it has been nowhere");
    let back_end = back_end.restart(wants.clone());
    eventually("announced", || back_end.seen().announced == [MAC]);
    drop(guest);
    let refuses = Plan {
        refuses_mtu: true,
        ..wants
    };
    let back_end = back_end.restart(refuses);
    let config = ImportConfig {
        class: Class::Net(NetIdentity {
            mac: MAC,
            mtu: Some(9000),
        }),
        ..config(back_end.path(), 2)
    };
    let error = Guest::try_connect(config).map(drop).unwrap_err();
    assert!(matches!(error, ImportError::Mtu { mtu: 9000 }), "{error}");
}
