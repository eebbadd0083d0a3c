//! Floods from one port, and forbidden actions of a port.

use net_switch::{
    DropReason, FloodLimits, Forward, MAX_PORTS, Mac, PortConfig, PortId, Rate, Switch,
    SwitchConfig, SwitchError, Vid, VidSet, VlanMode,
};
use seeded::Random;

const SECOND: u64 = 1_000_000_000;
/// No limit that a test meets.
const FREE: FloodLimits = FloodLimits {
    group: Rate::new(u32::MAX, u32::MAX),
    unknown: Rate::new(u32::MAX, u32::MAX),
};

fn mac(n: u64) -> Mac {
    let b = n.to_be_bytes();
    Mac([2, b[3], b[4], b[5], b[6], b[7]])
}

fn frame(to: Mac, source: Mac, vid: Option<u16>) -> Vec<u8> {
    let mut frame = [to.0, source.0].concat();
    if let Some(vid) = vid {
        frame.extend([0x81, 0]);
        frame.extend(vid.to_be_bytes());
    }
    frame.extend([8, 0]);
    frame
}

fn port(switch: &mut Switch, config: PortConfig) -> PortId {
    switch.add(config, 0).expect("room for a port")
}

fn free() -> PortConfig {
    PortConfig {
        flood: FREE,
        ..PortConfig::default()
    }
}

fn ports(forward: Result<Forward, DropReason>) -> Vec<PortId> {
    forward.expect("it is forwarded").ports.iter().collect()
}

#[test]
fn a_flood_of_addresses_pushes_out_no_other_ports() {
    let mut switch = Switch::new(SwitchConfig::default());
    let [quiet, hostile, third] = [0; 3].map(|_| port(&mut switch, free()));
    for n in 0..1_000 {
        switch
            .forward(quiet, &frame(Mac::BROADCAST, mac(n), None), 0)
            .expect("forwarded");
    }
    let mut random = Random::new(1);
    for n in 0..1_000_000u64 {
        let source = mac(1 << 39 | random.bits() >> 26);
        let _ = switch.forward(hostile, &frame(mac(n % 1_000), source, None), n);
    }
    // The station of the first port are all known still, and the hostile one has its own room
    // alone.
    for n in 0..1_000 {
        let forward = switch.forward(third, &frame(mac(n), mac(9_999), None), SECOND);
        assert_eq!(ports(forward), [quiet], "{n}");
    }
    assert_eq!(switch.learned(hostile).0, 1_024);
    assert_eq!(switch.learned(quiet), (1_000, 1_000 + 1_024 + 1));
}

#[test]
fn a_flood_of_vlans_takes_no_more_room_than_one_of_addresses() {
    let trunk = || PortConfig {
        vlan: VlanMode::Trunk {
            native: None,
            tagged: VidSet::all(),
        },
        ..free()
    };
    let mut switch = Switch::new(SwitchConfig::default());
    let [quiet, hostile] = [0; 2].map(|_| port(&mut switch, trunk()));
    switch
        .forward(quiet, &frame(Mac::BROADCAST, mac(1), Some(7)), 0)
        .expect("forwarded");
    for n in 0..=u16::MAX {
        let decided = switch.forward(hostile, &frame(Mac::BROADCAST, mac(2), Some(n)), 1);
        // No VLAN, which a trunk without a native one does not take, and the reserved one.
        let is_vid = !matches!(n & 0xfff, 0 | 0xfff);
        assert_eq!(decided.is_ok(), is_vid, "{n:#x}");
    }
    assert_eq!(switch.learned(hostile).0, 1_024);
    let forward = switch.forward(hostile, &frame(mac(1), mac(2), Some(7)), 2);
    assert_eq!(ports(forward), [quiet]);
}

#[test]
fn an_address_in_use_is_not_taken_over_and_a_bound_one_never() {
    let mut switch = Switch::new(SwitchConfig::default());
    let [owner, hostile, third] = [0; 3].map(|_| port(&mut switch, free()));
    let to_owner = frame(mac(1), mac(3), None);
    let taken = frame(Mac::BROADCAST, mac(1), None);
    for ms in 0..5_000u64 {
        let now = ms * SECOND / 1_000;
        if ms % 500 == 0 {
            switch.forward(owner, &taken, now).expect("forwarded");
        }
        let _ = switch.forward(hostile, &taken, now);
        let found = ports(switch.forward(third, &to_owner, now));
        assert_eq!(found, [owner], "an address in use has moved");
    }
    // It has been quiet: a guest that has moved is found where it is.
    switch
        .forward(hostile, &taken, 7 * SECOND)
        .expect("forwarded");
    assert_eq!(
        ports(switch.forward(third, &to_owner, 7 * SECOND)),
        [hostile]
    );

    let bound = port(
        &mut switch,
        PortConfig {
            bound: vec![mac(1)],
            ..free()
        },
    );
    assert_eq!(ports(switch.forward(third, &to_owner, 8 * SECOND)), [bound]);
    assert_eq!(
        switch.forward(hostile, &taken, 9 * SECOND),
        Err(DropReason::Spoofed)
    );
    let other = frame(Mac::BROADCAST, mac(2), None);
    assert_eq!(
        switch.forward(bound, &other, 9 * SECOND),
        Err(DropReason::Spoofed)
    );
    assert_eq!(switch.counters(bound).dropped(DropReason::Spoofed), 1);
    let again = PortConfig {
        bound: vec![mac(1)],
        ..free()
    };
    assert_eq!(switch.add(again, 0), Err(SwitchError::Bound(mac(1))));
    switch.remove(bound);
    assert_eq!(ports(switch.forward(hostile, &taken, 9 * SECOND)).len(), 2);
}

#[test]
fn floods_are_limited_and_what_is_known_is_not() {
    let rate = Rate::new(100, 10);
    let limited = PortConfig {
        flood: FloodLimits {
            group: rate,
            unknown: rate,
        },
        ..PortConfig::default()
    };
    let mut switch = Switch::new(SwitchConfig::default());
    let [noisy, other] = [0; 2].map(|_| port(&mut switch, limited.clone()));
    switch
        .forward(other, &frame(Mac::BROADCAST, mac(2), None), 0)
        .expect("forwarded");
    let (mut group, mut unknown) = (0, 0);
    for n in 0..100_000u64 {
        let now = n * SECOND / 100_000;
        let to_all = frame(Mac::BROADCAST, mac(1), None);
        group += u64::from(switch.forward(noisy, &to_all, now).is_ok());
        let to_none = frame(mac(77), mac(1), None);
        unknown += u64::from(switch.forward(noisy, &to_none, now).is_ok());
        switch
            .forward(noisy, &frame(mac(2), mac(1), None), now)
            .expect("known");
    }
    assert!(
        (109..=110).contains(&group) && (109..=110).contains(&unknown),
        "{group} {unknown}"
    );
    let counters = switch.counters(noisy);
    assert_eq!(counters.dropped(DropReason::GroupLimit), 100_000 - group);
    assert_eq!(counters.flooded, group + unknown);
    // The other port's own budget is untouched.
    switch
        .forward(other, &frame(Mac::BROADCAST, mac(2), None), SECOND)
        .expect("forwarded");
}

#[test]
fn an_access_port_does_not_hop_vlans() {
    let access = |vid| PortConfig {
        vlan: VlanMode::Access(Vid::new(vid).expect("a VLAN")),
        ..free()
    };
    let mut switch = Switch::new(SwitchConfig::default());
    let [ten, _twenty] = [10, 20].map(|vid| port(&mut switch, access(vid)));
    for vid in [10, 20, 1, 4095] {
        let tagged = frame(Mac::BROADCAST, mac(1), Some(vid));
        assert_eq!(
            switch.forward(ten, &tagged, 0),
            Err(DropReason::Vlan),
            "{vid}"
        );
    }
    let untagged = frame(Mac::BROADCAST, mac(1), None);
    assert_eq!(switch.forward(ten, &untagged, 0), Err(DropReason::NoPort));
    // A priority tag is none; it is not passed on to an access port.
    let eleventh = port(&mut switch, access(10));
    let priority = frame(Mac::BROADCAST, mac(1), Some(0x6000));
    let forward = switch.forward(ten, &priority, 0).expect("forwarded");
    let retag = switch.retag(&forward, eleventh);
    assert_eq!((retag.removes, retag.inserts), (true, None));
}

#[test]
fn isolated_ports_reach_an_uplink_and_not_each_other() {
    let isolated = || PortConfig {
        is_isolated: true,
        ..free()
    };
    let mut switch = Switch::new(SwitchConfig::default());
    let [one, two] = [0; 2].map(|_| port(&mut switch, isolated()));
    let uplink = port(&mut switch, free());
    for (from, n) in [(one, 1), (two, 2)] {
        let forward = switch.forward(from, &frame(Mac::BROADCAST, mac(n), None), 0);
        assert_eq!(ports(forward), [uplink]);
    }
    let decided = switch.forward(one, &frame(mac(2), mac(1), None), 0);
    assert_eq!(decided, Err(DropReason::NoPort));
    assert_eq!(
        ports(switch.forward(uplink, &frame(mac(2), mac(3), None), 0)),
        [two]
    );
}

#[test]
fn frames_cut_anywhere_are_short() {
    let mut switch = Switch::new(SwitchConfig::default());
    let trunk = VlanMode::Trunk {
        native: None,
        tagged: VidSet::all(),
    };
    let [one, _two] = [0; 2].map(|_| {
        port(
            &mut switch,
            PortConfig {
                vlan: trunk.clone(),
                ..free()
            },
        )
    });
    let whole = frame(Mac::BROADCAST, mac(1), Some(5));
    for len in 0..18 {
        assert_eq!(
            switch.forward(one, &whole[..len], 0),
            Err(DropReason::Short),
            "{len}"
        );
    }
    assert!(switch.forward(one, &whole, 0).is_ok());
}

#[test]
fn a_switch_is_full_and_a_removed_port_leaves_nothing() {
    let mut switch = Switch::new(SwitchConfig::default());
    let all = Vec::from_iter((0..MAX_PORTS).map(|_| port(&mut switch, free())));
    assert_eq!(switch.add(free(), 0), Err(SwitchError::Full));
    switch
        .forward(all[255], &frame(Mac::BROADCAST, mac(1), None), 0)
        .expect("forwarded");
    switch.remove(all[255]);
    assert_eq!(switch.learned(all[255]), (0, 0));
    assert_eq!(
        switch.forward(all[255], &frame(Mac::BROADCAST, mac(1), None), 0),
        Err(DropReason::NoPort)
    );
    assert_eq!(port(&mut switch, free()), all[255]);
}
