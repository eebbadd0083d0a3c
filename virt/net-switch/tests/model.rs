//! Random frames, ports and times beside a naive model, which keeps a list and searches all of it.

use net_switch::{
    DropReason, FloodLimits, Mac, PortConfig, PortId, Rate, Switch, SwitchConfig, Vid, VidSet,
    VlanMode,
};
use seeded::Random;

const AGEING_NS: u64 = 1_000_000;
const HOLD_NS: u64 = 50_000;
const PER_PORT: usize = 4;
const CONFIG: SwitchConfig = SwitchConfig {
    ageing_ns: AGEING_NS,
    move_hold_ns: HOLD_NS,
    addresses_per_port: PER_PORT,
};

#[derive(Clone, Debug)]
struct FdbEntry {
    vid: u16,
    mac: Mac,
    port: PortId,
    seen: u64,
}

#[derive(Debug)]
struct ModelPort {
    id: PortId,
    config: PortConfig,
    /// Allowed at once and in a second, and when frames were flooded: to groups, to unknown
    /// addresses.
    rate: [(u64, u64); 2],
    tokens: [f64; 2],
    at: u64,
}

#[derive(Debug, Default)]
struct Model {
    ports: Vec<ModelPort>,
    /// Oldest first.
    known: Vec<FdbEntry>,
}

impl Model {
    fn tokens(&mut self, index: usize, kind: usize, now: u64) -> bool {
        let port = &mut self.ports[index];
        let passed = (now - port.at) as f64;
        for kind in 0..2 {
            let (burst, per_second) = port.rate[kind];
            let more = port.tokens[kind] + passed * per_second as f64 / 1e9;
            port.tokens[kind] = more.min(burst as f64);
        }
        port.at = now;
        // Times are such that no level is within rounding of a whole one.
        let is_there = port.tokens[kind] >= 1.0 - 1e-9;
        if is_there {
            port.tokens[kind] -= 1.0;
        }
        is_there
    }

    /// Returns VLAN and ports, and the form of the frame at each.
    fn forward(
        &mut self,
        from: PortId,
        frame: &[u8],
        now: u64,
    ) -> Result<Vec<(PortId, Vec<u8>)>, DropReason> {
        let index = self.ports.iter().position(|port| port.id == from);
        let index = index.ok_or(DropReason::NoPort)?;
        if frame.len() < 14 || (frame[12..14] == [0x81, 0] && frame.len() < 18) {
            return Err(DropReason::Short);
        }
        let to = Mac(frame[..6].try_into().expect("6"));
        let source = Mac(frame[6..12].try_into().expect("6"));
        let is_link = frame[..5] == [1, 0x80, 0xc2, 0, 0] && frame[5] < 16;
        if source.0[0] % 2 == 1 || source.0 == [0; 6] || is_link {
            return Err(DropReason::Address);
        }
        let is_tagged = frame[12..14] == [0x81, 0];
        let tci = if is_tagged {
            u16::from(frame[14]) << 8 | u16::from(frame[15])
        } else {
            0
        };
        let vid = match (&self.ports[index].config.vlan, tci % 4096) {
            (VlanMode::Access(own), 0) => Some(own.get()),
            (VlanMode::Access(_), _) => None,
            (VlanMode::Trunk { native, .. }, 0) => native.map(Vid::get),
            (VlanMode::Trunk { tagged, .. }, vid) => {
                Some(vid).filter(|vid| Vid::new(*vid).is_some_and(|vid| tagged.contains(vid)))
            }
        };
        let vid = vid.ok_or(DropReason::Vlan)?;
        let owner = |mac: Mac| {
            self.ports
                .iter()
                .find(|port| port.config.bound.contains(&mac))
        };
        let is_bound = !self.ports[index].config.bound.is_empty();
        match owner(source) {
            Some(port) if port.id != from => return Err(DropReason::Spoofed),
            None if is_bound => return Err(DropReason::Spoofed),
            _ => {}
        }
        let owner_of_to = owner(to).map(|port| port.id);
        if !is_bound {
            self.learn(vid, source, from, now);
        }
        let is_group = to.0[0] % 2 == 1;
        let learned = self.known.iter().find(|known| {
            (known.vid, known.mac) == (vid, to) && now - known.seen < AGEING_NS && !is_group
        });
        let target = owner_of_to.or(learned.map(|known| known.port));
        if target.is_none() && !self.tokens(index, usize::from(!is_group), now) {
            return Err(if is_group {
                DropReason::GroupLimit
            } else {
                DropReason::UnknownLimit
            });
        }
        let own = &self.ports[index].config;
        let mut out = Vec::new();
        for port in &self.ports {
            let is_wanted = target.is_none_or(|target| target == port.id) && port.id != from;
            let is_apart = own.is_isolated && port.config.is_isolated;
            let tagged = match &port.config.vlan {
                VlanMode::Access(vlan) if vlan.get() == vid => Some(false),
                VlanMode::Trunk {
                    native: Some(native),
                    ..
                } if native.get() == vid => Some(false),
                VlanMode::Trunk { tagged, .. }
                    if tagged.contains(Vid::new(vid).expect("a VLAN")) =>
                {
                    Some(true)
                }
                _ => None,
            };
            if let (true, false, Some(tagged)) = (is_wanted, is_apart, tagged) {
                let mut bytes = frame[..12].to_vec();
                if tagged {
                    bytes.extend([0x81, 0]);
                    bytes.extend((tci & 0xf000 | vid).to_be_bytes());
                }
                bytes.extend(&frame[if is_tagged { 16 } else { 12 }..]);
                out.push((port.id, bytes));
            }
        }
        if out.is_empty() {
            Err(DropReason::NoPort)
        } else {
            Ok(out)
        }
    }

    fn learn(&mut self, vid: u16, mac: Mac, port: PortId, now: u64) {
        let former = self
            .known
            .iter()
            .position(|known| (known.vid, known.mac) == (vid, mac));
        if let Some(former) = former {
            let known = &self.known[former];
            // Two old ones are taken out before; of the port's own, so this one if it is the
            // oldest.
            if known.port != port && now - known.seen < HOLD_NS {
                return;
            }
            self.known.remove(former);
        }
        if self.known.iter().filter(|known| known.port == port).count() == PER_PORT {
            let oldest = self.known.iter().position(|known| known.port == port);
            self.known.remove(oldest.expect("some"));
        }
        self.known.push(FdbEntry {
            vid,
            mac,
            port,
            seen: now,
        });
    }
}

fn random_config(random: &mut Random, bound: Vec<Mac>) -> (PortConfig, [(u64, u64); 2]) {
    let vid = |random: &mut Random| Vid::new(1 + random.below(3) as u16).expect("a VLAN");
    let vlan = if random.chance(0.5) {
        VlanMode::Access(vid(random))
    } else {
        let tagged: VidSet = (0..random.below(3)).map(|_| vid(random)).collect();
        let native = random.chance(0.5).then(|| vid(random));
        VlanMode::Trunk { native, tagged }
    };
    let rate = [0; 2].map(|_| (random.below(20), 1_000 * random.below(1_000)));
    let limit = |(burst, per_second): (u64, u64)| Rate::new(per_second as u32, burst as u32);
    let config = PortConfig {
        vlan,
        bound,
        is_isolated: random.chance(0.3),
        flood: FloodLimits {
            group: limit(rate[0]),
            unknown: limit(rate[1]),
        },
    };
    (config, rate)
}

fn random_mac(random: &mut Random) -> Mac {
    match random.below(20) {
        0 => Mac::BROADCAST,
        1 => Mac([1, 0x80, 0xc2, 0, 0, random.below(32) as u8]),
        2 => Mac([0; 6]),
        _ => Mac([2, 0, 0, 0, 0, random.below(12) as u8]),
    }
}

fn random_frame(random: &mut Random) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend(random_mac(random).0);
    frame.extend(random_mac(random).0);
    if random.chance(0.5) {
        let tci = (random.bits() as u16 & 0xe000) | [0, 1, 2, 3, 4095][random.below(5) as usize];
        frame.extend([0x81, 0]);
        frame.extend(tci.to_be_bytes());
    }
    frame.extend([8, 0, 1, 2, 3, 4]);
    if random.chance(0.05) {
        frame.truncate(random.below(19) as usize);
    }
    frame
}

#[test]
fn any_frames_and_ports_go_as_the_model_says() {
    let mut went = [0u64; 2];
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let mut switch = Switch::new(CONFIG);
        let mut model = Model::default();
        // Multiples of a microsecond, at which no bucket is within rounding of a frame.
        let mut now = 0;
        for step in 0..3_000 {
            let most = if random.chance(0.01) { 2_000 } else { 30 };
            now += random.below(most) * 1_000;
            if model.ports.len() < 2 || random.chance(0.01) && model.ports.len() < 7 {
                let count = random.below(3).saturating_sub(1);
                let bound = (0..count).map(|_| random_mac(&mut random)).collect();
                let (config, rate) = random_config(&mut random, bound);
                let is_free = config.bound.iter().all(|mac| {
                    mac.0[0] & 1 == 0
                        && mac.0 != [0; 6]
                        && !model
                            .ports
                            .iter()
                            .any(|port| port.config.bound.contains(mac))
                });
                let added = switch.add(config.clone(), now);
                assert_eq!(added.is_ok(), is_free);
                if let Ok(id) = added {
                    model
                        .known
                        .retain(|known| !config.bound.contains(&known.mac));
                    let tokens = rate.map(|rate| rate.0 as f64);
                    model.ports.push(ModelPort {
                        id,
                        config,
                        rate,
                        tokens,
                        at: now,
                    });
                    model.ports.sort_by_key(|port| port.id);
                }
            } else if random.chance(0.005) {
                let at = random.below(model.ports.len() as u64) as usize;
                let id = model.ports[at].id;
                model.known.retain(|known| known.port != id);
                if random.chance(0.5) {
                    model.ports.remove(at);
                    switch.remove(id);
                } else {
                    switch.link_down(id);
                }
            }
            if model.ports.is_empty() {
                continue;
            }
            let from = model.ports[random.below(model.ports.len() as u64) as usize].id;
            let frame = random_frame(&mut random);
            // Again, as a burst has it.
            let mut last = None;
            for _ in 0..=random.below(6).saturating_sub(3) {
                let expected = model.forward(from, &frame, now);
                let before = switch.counters(from).forwarded;
                let decided = match last {
                    Some(last) if switch.forward_again(from, &last) => Ok(last),
                    _ => switch.forward(from, &frame[..frame.len().min(18)], now),
                };
                last = decided.ok();
                let got = decided.map(|forward| {
                    let ports = forward.ports.iter();
                    let frames = ports.map(|port| {
                        let retag = switch.retag(&forward, port);
                        let mut bytes = frame[..12].to_vec();
                        bytes.extend(retag.inserts.iter().flatten());
                        bytes.extend(&frame[if retag.removes { 16 } else { 12 }..]);
                        (port, bytes)
                    });
                    frames.collect::<Vec<_>>()
                });
                assert_eq!(
                    got, expected,
                    "seed {seed}, step {step}, {from:?}: {frame:x?}"
                );
                let only = got.iter().flatten().map(|(port, _)| *port);
                let only = Vec::from_iter(only);
                assert_eq!(
                    last.and_then(|last| last.only()),
                    (only.len() == 1).then(|| only[0])
                );
                let counted = switch.counters(from).forwarded - before;
                assert_eq!(counted, u64::from(got.is_ok()));
                went[usize::from(got.is_ok())] += 1;
            }
            for port in &model.ports {
                assert!(switch.learned(port.id).0 <= PER_PORT);
            }
        }
    }
    assert!(went[0] > 10_000 && went[1] > 10_000, "{went:?}");
}
