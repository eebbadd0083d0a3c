//! The control queue: what commands do, cut anywhere, and in any number.

use super::*;
use crate::net::control::class;

const CONTROL: Gpa = Gpa::new(0x3_0000);
const DATA: u64 = 0x20_0000;
const ANSWER: u64 = 0x3_f000;

/// A guest with a control queue behind `pairs` pairs.
struct Controlled {
    guest: Guest,
    control: AnyDriver<ArrayMem>,
    wire: Wire,
}

impl Controlled {
    fn new(pairs: u16, mask: u64) -> Self {
        let wire = Wire::default();
        wire.ends().can = Some(PortCapabilities {
            receive: Offloads::ALL,
            ..PortCapabilities::PLAIN
        });
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        guest.net.reset();
        let net = Net::new(GUEST_MAC, 256, Box::new(wire.clone())).unwrap();
        guest.net = net.with_packed().with_pairs(pairs).unwrap();
        let features = guest.net.features() & mask;
        let index = match features & net_feature::MQ {
            0 => 2,
            _ => 2 * pairs,
        };
        let control = AnyDriver::new(guest.mem.clone(), CONTROL, index, 16, features);
        let mut queues = vec![guest.rx.config(), guest.tx.config(), control.config()];
        if index > 2 {
            let mem = &guest.mem;
            queues.extend((2..index).map(|index| {
                let base = Gpa::new(0x30_0000 + u64::from(index) * 0x1_0000);
                AnyDriver::<ArrayMem>::new(mem.clone(), base, index, 16, features).config()
            }));
        }
        let keep = guest.mem.keep_alive();
        guest.net.activate(features, &queues, keep).unwrap();
        Self {
            guest,
            control,
            wire,
        }
    }

    /// Issues one command; its answer.
    fn command(&mut self, class: u8, command: u8, data: &[u8]) -> u8 {
        let bytes = [&[class, command][..], data].concat();
        self.raw(&[&bytes]).expect("an answer")
    }

    /// Issues these bytes, a buffer each; `None` if the device needs a reset.
    fn raw(&mut self, parts: &[&[u8]]) -> Option<u8> {
        let mut at = DATA;
        let mut buffers = Vec::new();
        for part in parts.iter().filter(|part| !part.is_empty()) {
            self.guest.mem.put(Gpa::new(at), part);
            buffers.push((at, part.len() as u32));
            at += part.len() as u64;
        }
        self.guest.mem.put(Gpa::new(ANSWER), &[0xee]);
        self.control.add(&buffers, &[(ANSWER, 1)]);
        self.guest.poll();
        if self.guest.net.needs_reset() {
            return None;
        }
        let used = self.control.used().expect("the command comes back");
        assert_eq!(used.1, 1);
        Some(self.guest.get(ANSWER, 1)[0])
    }

    /// Whether a frame to `to`, with the tag of `vlan` if there is one, arrives.
    fn arrives(&mut self, to: Mac, vlan: Option<u16>) -> bool {
        let mut frame = ethernet(to, 0x800, &[9; 50]);
        if let Some(id) = vlan {
            let tag = [&[0x81, 0][..], &id.to_be_bytes()].concat();
            frame.splice(12..12, tag);
        }
        self.wire.ends().to_guest.push_back(frame.clone());
        if self.guest.rx.free() > 0 && self.guest.buffers.is_empty() {
            self.guest.give(1, 2048);
        }
        self.guest.poll();
        assert!(self.wire.ends().to_guest.is_empty());
        let got = self.guest.frame();
        if got.is_some() {
            self.guest.buffers.clear();
        }
        got.is_some_and(|(got, _)| got == frame)
    }
}

fn list(entries: &[Mac]) -> Vec<u8> {
    let count = entries.len() as u32;
    [&count.to_le_bytes()[..], &entries.concat()].concat()
}

const GROUP: Mac = [0x01, 0, 0x5e, 0, 0, 1];
const OTHER: Mac = [0x02, 0, 0, 0, 0, 0x77];

#[test]
fn modes_and_tables_decide_what_arrives() {
    both(|mask| {
        let mut it = Controlled::new(1, mask);
        assert!(it.arrives(OTHER, None), "promiscuous at first");
        assert_eq!(it.command(class::RX, 0, &[0]), 0);
        assert!(!it.arrives(OTHER, None) && !it.arrives(GROUP, None));
        assert!(it.arrives(GUEST_MAC, None) && it.arrives([0xff; 6], None));
        let table = [list(&[OTHER]), list(&[GROUP])].concat();
        assert_eq!(it.command(class::MAC, 0, &table), 0);
        assert!(it.arrives(OTHER, None) && it.arrives(GROUP, None));
        // An address of the wrong kind lets nothing pass.
        let table = [list(&[GROUP]), list(&[OTHER])].concat();
        assert_eq!(it.command(class::MAC, 0, &table), 0);
        assert!(!it.arrives(OTHER, None) && !it.arrives(GROUP, None));
        for (mode, to, before, after) in [
            (1, GROUP, false, true),
            (2, OTHER, false, true),
            (3, GROUP, true, false),
            (4, OTHER, true, false),
            (5, [0xff; 6], true, false),
        ] {
            assert_eq!(it.arrives(to, None), before, "mode {mode}");
            assert_eq!(it.command(class::RX, mode, &[1]), 0);
            assert_eq!(it.arrives(to, None), after, "mode {mode}");
        }
        assert_eq!(it.command(class::RX, 6, &[1]), 1);
        assert_eq!(it.command(class::MAC, 1, &OTHER), 0);
        let mut mac = [0; 6];
        it.guest.net.read_config(0, &mut mac);
        assert_eq!(mac, OTHER);
        assert_eq!(it.command(class::MAC, 1, &GROUP), 1);
        assert_eq!(it.command(class::MAC, 1, &[0; 6]), 1);
    });
}

#[test]
fn vlans_pass_one_by_one() {
    both(|mask| {
        let mut it = Controlled::new(1, mask);
        assert!(it.arrives(GUEST_MAC, None) && !it.arrives(GUEST_MAC, Some(7)));
        assert_eq!(it.command(class::VLAN, 0, &7u16.to_le_bytes()), 0);
        assert!(it.arrives(GUEST_MAC, Some(7)) && it.arrives(GUEST_MAC, Some(0xe007)));
        assert!(!it.arrives(GUEST_MAC, Some(8)));
        assert_eq!(it.command(class::VLAN, 1, &7u16.to_le_bytes()), 0);
        assert!(!it.arrives(GUEST_MAC, Some(7)));
        assert_eq!(it.command(class::VLAN, 0, &4095u16.to_le_bytes()), 0);
        assert_eq!(it.command(class::VLAN, 0, &4096u16.to_le_bytes()), 1);
        assert_eq!(it.command(class::VLAN, 2, &7u16.to_le_bytes()), 1);
        let mut it = Controlled::new(1, mask & !net_feature::CTRL_VLAN);
        assert!(it.arrives(GUEST_MAC, Some(7)), "no filter was accepted");
        assert_eq!(it.command(class::VLAN, 0, &7u16.to_le_bytes()), 1);
    });
}

#[test]
fn floods_of_addresses_and_vlans_stay_bounded() {
    let mut it = Controlled::new(1, !0);
    assert_eq!(it.command(class::RX, 0, &[0]), 0);
    let many: Vec<Mac> = (0..5000u32)
        .map(|nth| {
            let [a, b, c, d] = nth.to_be_bytes();
            [2, 0, a, b, c, d]
        })
        .collect();
    let table = [list(&many), list(&[])].concat();
    assert_eq!(it.command(class::MAC, 0, &table), 0);
    assert!(it.arrives(OTHER, None), "too many to compare: all pass");
    assert!(!it.arrives(GROUP, None), "of this kind");
    it.guest.net.set_service(Service::Stopped);
    let saved = it.guest.net.save().unwrap().class;
    assert_eq!(saved.filter.unicast.entries.len(), 0);
    it.guest.net.set_service(Service::Full);
    let table = [list(&many[..MAC_ENTRIES]), list(&[])].concat();
    assert_eq!(it.command(class::MAC, 0, &table), 0);
    assert!(!it.arrives(OTHER, None));
    for id in 0..4096u16 {
        assert_eq!(it.command(class::VLAN, 0, &id.to_le_bytes()), 0);
    }
    it.guest.net.set_service(Service::Stopped);
    let saved = it.guest.net.save().unwrap().class;
    assert_eq!(saved.filter.vlans.map(|words| words.len()), Some(64));
}

#[test]
fn pairs_in_use_are_those_that_were_chosen() {
    both(|mask| {
        let mut it = Controlled::new(4, mask);
        assert_eq!(it.wire.ends().pairs, 0, "one, which it knows");
        let mut pairs = [0; 2];
        it.guest.net.read_config(8, &mut pairs);
        assert_eq!(pairs, [4, 0]);
        assert_eq!(it.command(class::MQ, 0, &3u16.to_le_bytes()), 0);
        assert_eq!(it.wire.ends().pairs, 3);
        for wrong in [0u16, 5, u16::MAX] {
            assert_eq!(it.command(class::MQ, 0, &wrong.to_le_bytes()), 1);
        }
        assert_eq!(it.wire.ends().pairs, 3);
        // Without MQ the control queue is the third.
        let mut it = Controlled::new(4, mask & !net_feature::MQ);
        assert_eq!(it.command(class::MQ, 0, &2u16.to_le_bytes()), 1);
        assert_eq!(it.command(class::RX, 0, &[1]), 0);
    });
}

#[test]
fn offloads_change_at_run_time_within_what_was_accepted() {
    both(|mask| {
        let mut it = Controlled::new(1, mask & !net_feature::GUEST_TSO6);
        let all = it.wire.ends().receiver;
        assert!(all.contains(Offloads::TSO4) && !all.contains(Offloads::TSO6));
        let set = |it: &mut Controlled, bits: u64| {
            it.command(class::GUEST_OFFLOADS, 0, &bits.to_le_bytes())
        };
        assert_eq!(set(&mut it, net_feature::GUEST_CSUM), 0);
        assert_eq!(it.wire.ends().receiver, Offloads::CSUM);
        assert_eq!(
            set(&mut it, net_feature::GUEST_CSUM | net_feature::GUEST_TSO6),
            1
        );
        assert_eq!(set(&mut it, 1 << 40), 1);
        assert_eq!(it.wire.ends().receiver, Offloads::CSUM);
        assert_eq!(set(&mut it, 0), 0);
        assert_eq!(it.wire.ends().receiver, Offloads::NONE);
    });
}

#[test]
fn an_announcement_is_asked_for_until_it_is_acknowledged() {
    both(|mask| {
        let mut it = Controlled::new(1, mask);
        let status = |it: &Controlled| {
            let mut status = [0; 2];
            it.guest.net.read_config(6, &mut status);
            u16::from_le_bytes(status)
        };
        assert_eq!(it.command(class::ANNOUNCE, 0, &[]), 1, "not asked for");
        let generation = it.guest.net.config_generation();
        it.guest.net.announce();
        it.guest.poll();
        assert_eq!((status(&it), it.guest.irq.config), (3, 1));
        assert_ne!(it.guest.net.config_generation(), generation);
        assert_eq!(it.command(class::ANNOUNCE, 0, &[]), 0);
        assert_eq!(status(&it), 1);
    });
}

#[test]
fn a_front_end_announces_its_address_and_says_its_mtu() {
    let wire = Wire::default();
    let mut net = Net::new(GUEST_MAC, 256, Box::new(wire.clone())).unwrap();
    assert!(net.network_request(NetworkRequest::Announce(OTHER)));
    assert!(!net.network_request(NetworkRequest::Announce(GROUP)));
    let sent = std::mem::take(&mut wire.ends().from_guest);
    assert_eq!(sent.len(), 1);
    // RFC 903: asks who it is itself.
    assert_eq!(
        (sent[0].len(), &sent[0][..6], &sent[0][6..12]),
        (60, &[0xff; 6][..], &OTHER[..])
    );
    assert_eq!(sent[0][12..22], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    assert_eq!(
        (&sent[0][22..28], &sent[0][32..38]),
        (&OTHER[..], &OTHER[..])
    );
    for (mtu, is_carried) in [
        (67, false),
        (68, true),
        (1500, true),
        (1501, false),
        (u64::MAX, false),
    ] {
        assert_eq!(
            net.network_request(NetworkRequest::Mtu(mtu)),
            is_carried,
            "{mtu}"
        );
    }
}

#[test]
fn the_link_goes_and_comes_at_run_time() {
    both(|mask| {
        let mut it = Controlled::new(1, mask);
        for (is_down, by_port) in [(true, true), (false, true), (true, false), (false, false)] {
            match by_port {
                true => it.wire.ends().is_down = is_down,
                false => it.guest.net.set_link(!is_down),
            }
            let mut dma = it.guest.dma();
            assert!(it.guest.net.has_work(&mut dma), "to notify the driver");
            let before = it.guest.irq.config;
            it.guest.poll();
            assert_eq!(it.guest.irq.config, before + 1);
            let mut status = [0; 2];
            it.guest.net.read_config(6, &mut status);
            assert_eq!(status, [u8::from(!is_down), 0]);
            let sent = it.wire.ends().from_guest.len();
            it.guest.send(&[7; 60]);
            it.guest.poll();
            assert!(it.guest.tx.used().is_some(), "the buffer comes back");
            let now = it.wire.ends().from_guest.len();
            assert_eq!(now - sent, usize::from(!is_down));
        }
    });
}

/// Right commands, one of each kind.
fn commands() -> Vec<Vec<u8>> {
    let table = [list(&[OTHER, PEER_MAC]), list(&[GROUP])].concat();
    vec![
        vec![class::RX, 0, 0],
        vec![class::RX, 5, 1],
        [&[class::MAC, 0][..], &table].concat(),
        [&[class::MAC, 1][..], &OTHER].concat(),
        vec![class::VLAN, 0, 7, 0],
        vec![class::MQ, 0, 2, 0],
        vec![class::GUEST_OFFLOADS, 0, 2, 0, 0, 0, 0, 0, 0, 0],
    ]
}

#[test]
fn a_command_cut_anywhere_is_refused_or_done_as_a_whole() {
    both(|mask| {
        for command in commands() {
            // Cut off, and longer than it should be.
            for len in (0..command.len()).chain([command.len() + 1]) {
                let mut it = Controlled::new(4, mask);
                let mut bytes = command.clone();
                bytes.resize(len, 0);
                it.guest.net.set_service(Service::Stopped);
                let before = it.guest.net.save().unwrap().class;
                it.guest.net.set_service(Service::Full);
                let answer = match len {
                    // There is no buffer of no bytes.
                    0 => {
                        it.control.add(&[], &[(ANSWER, 1)]);
                        it.guest.poll();
                        None
                    }
                    _ => it.raw(&[&bytes]),
                };
                assert_eq!(
                    answer,
                    (len >= 2).then_some(1),
                    "{command:?} as {len} bytes"
                );
                if len >= 2 {
                    it.guest.net.set_service(Service::Stopped);
                    assert_eq!(it.guest.net.save().unwrap().class, before);
                }
            }
            // The same in any two buffers is the same command.
            for at in 0..=command.len() {
                let mut it = Controlled::new(4, mask);
                let (one, two) = command.split_at(at);
                assert_eq!(it.raw(&[one, two]), Some(0), "{command:?} cut at {at}");
            }
        }
    });
}

#[test]
fn a_command_that_cannot_be_answered_is_not_obeyed() {
    both(|mask| {
        let mut it = Controlled::new(1, mask);
        let mut dma = it.guest.dma();
        dma.iommu
            .deny(Iova::new(ANSWER & !0xfff), 4096, Perm::Write);
        it.guest.mem.put(Gpa::new(DATA), &[class::RX, 0, 0]);
        it.control.add(&[(DATA, 3)], &[(ANSWER, 1)]);
        while it.guest.net.poll(&mut dma, &mut it.guest.irq, 0) == Activity::Busy {}
        assert!(it.control.used().is_some());
        assert!(it.arrives(OTHER, None), "still promiscuous");
        // And without room for an answer it breaks the protocol.
        it.control.add(&[(DATA, 3)], &[]);
        it.guest.poll();
        assert!(it.guest.net.needs_reset());
    });
}

proptest! {
    #[test]
    fn any_bytes_are_answered_and_never_panic(
        pairs in 1u16..4,
        commands in prop::collection::vec(prop::collection::vec(any::<u8>(), 2..40), 1..20),
        mask in any::<u64>(),
    ) {
        let mut it = Controlled::new(pairs, mask | feature::VERSION_1 | net_feature::CTRL_VQ);
        for bytes in commands {
            let mut bytes = bytes;
            bytes[0] %= 7;
            bytes[1] %= 7;
            prop_assert!(it.raw(&[&bytes]).is_some_and(|answer| answer <= 1));
        }
    }
}
