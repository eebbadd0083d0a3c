//! A switch as the daemon serves it, from its configuration on: guests without a VM, over
//! vhost-user.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sidecore::{Fleet, FleetBuilder, Handle, IdlePolicy};
use tempfile::TempDir;
use vhost_export::{Export, ExportConfig};
use vhost_net::drive::{Content, Load, Patience, Report};
use vhost_net::frame::{self, Mac};
use vhost_net::{Driver, Options, PortSpec};

use super::load;
use crate::serve::poller::{Served, ServedMessage};
use crate::serve::prepare;
use crate::serve::purpose::Purpose;

const TIME: Duration = Duration::from_millis(150);
const BROADCAST: Mac = [0xff; 6];

/// A switch on a core of its own.
struct Rig {
    fleet: Fleet<Served>,
    handle: Handle<ServedMessage>,
    folder: TempDir,
}

impl Rig {
    /// With a device for each of these, named from `a` on; `more` are its other keys.
    fn new(devices: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut args = Vec::new();
        for (at, more) in devices.iter().enumerate() {
            let (id, socket) = (name(at), folder.path().join(name(at)));
            let comma = if more.is_empty() { "" } else { "," };
            let socket = socket.display();
            args.push("--net".to_owned());
            args.push(format!("id={id},socket={socket},switch=s{comma}{more}"));
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let config = load(&args).unwrap();
        let (nets, switches) = prepare::nets(&config, Purpose::Start).unwrap();
        let exports = config.nets.iter().zip(nets).map(|(net, device)| {
            let listener = UnixListener::bind(&net.socket).unwrap();
            Export::new(ExportConfig::new(&net.id), device, listener).unwrap()
        });
        let exports = BTreeMap::from([("s".to_owned(), exports.collect())]);
        let mut switches = switches.with_devices(exports);
        let fleet = FleetBuilder::new("switch")
            .idle(IdlePolicy::Spin(50_000))
            .spawn()
            .unwrap();
        let switch = Served::Switch(Box::new(switches.remove(0)));
        let handle = fleet.add(switch).unwrap();
        Self {
            fleet,
            handle,
            folder,
        }
    }

    fn socket(&self, at: usize) -> PathBuf {
        self.folder.path().join(name(at))
    }

    /// Port `at` sends from its own address to that of port `to`.
    fn spec(&self, at: usize, to: usize, load: Load, len: u32) -> PortSpec {
        PortSpec {
            addresses: (address(to), address(at)),
            ..PortSpec::looped(&self.socket(at), Options::new(), load, len)
        }
    }

    /// A number of the switch: of all ports, or of one (`ports/a/flooded`).
    fn count(&self, path: &str) -> u64 {
        let stats = self.handle.call(ServedMessage::Switch).unwrap().to_json();
        let found = stats.pointer(&format!("/{path}"));
        found.and_then(serde_json::Value::as_u64).unwrap()
    }
}

fn name(at: usize) -> String {
    char::from(b'a' + at as u8).to_string()
}

fn address(at: usize) -> Mac {
    frame::mac(1 + at as u8)
}

/// On a machine that others use, too: nothing is lost for being late.
fn driver(specs: &[PortSpec]) -> Driver {
    let mut driver = Driver::connect(specs).unwrap();
    let wait = Duration::from_secs(10);
    driver.set_patience(Patience {
        silence: wait,
        drain: wait,
    });
    driver
}

fn measure(driver: &mut Driver) -> Report {
    let pause = |_, _| {
        std::thread::sleep(Duration::from_micros(20));
        Ok(())
    };
    driver
        .measure_beside(Duration::ZERO, TIME, None, pause)
        .unwrap()
}

/// The addresses of all ports become known: what floods until then arrives several times.
fn learn(driver: &mut Driver) {
    measure(driver);
}

fn is_whole(report: &Report, least: u64) {
    assert_eq!((report.lost(), report.wrong()), (0, 0), "{report:?}");
    for (at, port) in report.ports.iter().enumerate() {
        assert_eq!(port.foreign, 0, "port {at}");
        let counts = &port.counts;
        assert!(
            counts.sent >= least && counts.arrived == counts.sent,
            "port {at}: {counts:?}"
        );
    }
}

#[test]
fn two_guests_reach_each_other_in_short_and_in_long_frames() {
    for (lens, packed) in [
        ([64, 64], false),
        ([64, 1_518], false),
        ([1_518, 1_000], true),
    ] {
        let rig = Rig::new(&["", ""]);
        let spec = |at: usize| {
            let mut spec = rig.spec(at, 1 - at, Load::Window(64), lens[at]);
            if packed {
                spec.options = spec.options.require(vhost_net::ring::feature::PACKED);
            }
            spec
        };
        let mut driver = driver(&[spec(0), spec(1)]);
        learn(&mut driver);
        is_whole(&measure(&mut driver), 200);
        assert_eq!(rig.count("learned"), 2);
        // The first ones, until the other has sent.
        assert!(rig.count("flooded") <= 128);
        assert_eq!(rig.count("overflowed"), 0);
    }
}

#[test]
fn seven_guests_in_a_ring_lose_nothing() {
    let rig = Rig::new(&[""; 7]);
    let spec = |at| rig.spec(at, (at + 1) % 7, Load::Window(16), 64 + 200 * at as u32);
    let mut driver = driver(&(0..7).map(spec).collect::<Vec<_>>());
    learn(&mut driver);
    let flooded = rig.count("flooded");
    is_whole(&measure(&mut driver), 50);
    assert_eq!((rig.count("learned"), rig.count("flooded")), (7, flooded));
}

#[test]
fn a_guest_that_sends_from_anothers_address_is_not_heard() {
    let own = format!("mac={}", text(address(1)));
    let rig = Rig::new(&["", &own, ""]);
    // a says that it is b; c and b talk.
    let spoofed = PortSpec {
        addresses: (address(2), address(1)),
        ..rig.spec(0, 2, Load::Rate(2_000.0), 64)
    };
    let mut honest = driver(&[
        rig.spec(1, 2, Load::Window(8), 64),
        rig.spec(2, 1, Load::Window(8), 64),
    ]);
    learn(&mut honest);
    let mut liar = Driver::connect(&[spoofed]).unwrap();
    std::thread::scope(|scope| {
        let lies = scope.spawn(|| measure(&mut liar));
        is_whole(&measure(&mut honest), 50);
        let report = lies.join().unwrap();
        assert_eq!(report.ports[0].counts.arrived, 0);
        assert!(report.ports[0].taken > 20, "it is served all the same");
    });
    assert!(rig.count("ports/a/dropped/spoofed") > 20);
    assert_eq!(rig.count("ports/a/forwarded"), 0);
}

fn text(mac: Mac) -> String {
    let bytes = mac.map(|byte| format!("{byte:02x}"));
    bytes.join(":")
}

#[test]
fn another_vlan_and_an_isolated_neighbour_hear_nothing() {
    // a and b; c in another VLAN; d and e isolated.
    let rig = Rig::new(&["", "", "vlan=2", "isolated=on", "isolated=on"]);
    let to_all = |at: usize| PortSpec {
        addresses: (BROADCAST, address(at)),
        ..rig.spec(at, 0, Load::Rate(500.0), 64)
    };
    let silent = |at| rig.spec(at, 0, Load::Silent, 64);
    let mut driver =
        Driver::connect(&[to_all(0), silent(1), silent(2), to_all(3), silent(4)]).unwrap();
    driver.set_patience(Patience {
        silence: Duration::from_secs(10),
        drain: Duration::from_millis(200),
    });
    let report = measure(&mut driver);
    let received: Vec<bool> = report
        .ports
        .iter()
        .map(|port| port.received_per_s + port.wrong.duplicate as f64 > 0.0)
        .collect();
    // e receives a's frames, and not d's.
    assert_eq!(received, [true, true, false, true, true], "{report:?}");
    let rig = Rig::new(&["isolated=on", "isolated=on", "vlan=2"]);
    let spec = |at, to| rig.spec(at, to, Load::Rate(500.0), 64);
    let mut driver = Driver::connect(&[spec(0, 1), spec(1, 0), spec(2, 0)]).unwrap();
    let report = measure(&mut driver);
    assert!(
        report.ports.iter().all(|port| port.counts.arrived == 0),
        "{report:?}"
    );
    assert!(rig.count("dropped/no_port") > 50);
}

#[test]
fn flood_of_a_guest_is_limited() {
    let rig = Rig::new(&["flood-group=20,flood-unknown=30", "", ""]);
    let spec = |to| PortSpec {
        addresses: (to, address(0)),
        arrives: false,
        ..rig.spec(0, 1, Load::Rate(20_000.0), 64)
    };
    for (to, limit, reason) in [
        (BROADCAST, 20, "group_limit"),
        (address(9), 30, "unknown_limit"),
    ] {
        let before = rig.count("ports/a/flooded");
        let start = std::time::Instant::now();
        let mut driver = Driver::connect(&[spec(to)]).unwrap();
        let report = measure(&mut driver);
        let seconds = start.elapsed().as_secs_f64();
        // To both others, as one.
        let flooded = rig.count("ports/a/flooded") - before;
        assert!(flooded >= limit, "{flooded}");
        assert!(
            flooded as f64 <= limit as f64 * (1.0 + seconds) + 1.0,
            "{flooded} in {seconds}"
        );
        assert!(report.ports[0].taken > 2 * flooded, "{report:?}");
        assert!(rig.count(&format!("ports/a/dropped/{reason}")) > flooded);
    }
}

/// d takes nothing, and its ring is full; c floods it. a and b notice nothing, and c has its
/// buffers back.
#[test]
fn a_guest_that_takes_nothing_keeps_no_neighbour() {
    for len in [64, 1_000] {
        let rig = Rig::new(&[""; 4]);
        let mut others = driver(&[
            rig.spec(0, 1, Load::Window(16), len),
            rig.spec(1, 0, Load::Window(16), len),
        ]);
        learn(&mut others);
        // It says where it is, and falls silent.
        let mut stalled = driver(&[PortSpec {
            arrives: false,
            ..rig.spec(3, 2, Load::Rate(1_000.0), 64)
        }]);
        measure(&mut stalled);
        // What it flooded until then is in the rings of a and b, and is theirs no more.
        learn(&mut others);
        let mut flood = Driver::connect(&[PortSpec {
            arrives: false,
            ..rig.spec(2, 3, Load::Flood, len)
        }])
        .unwrap();
        std::thread::scope(|scope| {
            let floods = scope.spawn(|| measure(&mut flood));
            is_whole(&measure(&mut others), 50);
            let report = floods.join().unwrap();
            assert!(report.ports[0].taken > 5_000, "{report:?}");
        });
        assert!(rig.count("ports/d/overflowed") > 1_000);
        assert_eq!(
            rig.count("ports/b/overflowed") + rig.count("ports/a/overflowed"),
            0
        );
        drop(stalled);
    }
}

/// c is gone in the middle of what it sends and receives; another one takes its place.
#[test]
fn a_guest_that_dies_takes_its_own_frames_along_and_no_others() {
    let rig = Rig::new(&[""; 3]);
    let back = PortSpec {
        // Of its frames for a, some find a's ring and queue full of c's.
        arrives: false,
        ..rig.spec(1, 0, Load::Rate(5_000.0), 64)
    };
    let mut others = driver(&[rig.spec(0, 1, Load::Window(16), 700), back]);
    learn(&mut others);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lives = scope.spawn(|| {
            let mut lives = 0;
            while !is_over.load(Ordering::Relaxed) {
                for len in [64, 1_500] {
                    let mut frame = [address(0), address(2)].concat();
                    frame.extend([0x12, 0x34]);
                    frame.resize(len, 0);
                    let header = [0; 12];
                    let spec = PortSpec {
                        arrives: false,
                        content: Content::Fixed { header, frame },
                        ..rig.spec(2, 0, Load::Flood, 64)
                    };
                    // One that comes before the last one's end is noticed is turned away.
                    let Ok(mut flood) = Driver::connect(&[spec]) else {
                        continue;
                    };
                    let time = Duration::from_millis(3);
                    let _ = flood.measure(Duration::ZERO, time, None);
                    // Its memory goes with it, whatever is under way.
                    drop(flood);
                    lives += 1;
                }
            }
            lives
        });
        // What c sends to a is foreign there.
        let mut reports = Vec::new();
        while reports.len() < 3 {
            reports.push(measure(&mut others));
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(lives.join().unwrap() >= 3);
        for report in reports {
            let counts = &report.ports[0].counts;
            assert!(
                counts.sent > 20 && counts.arrived == counts.sent,
                "{report:?}"
            );
            assert_eq!(report.wrong(), 0, "{report:?}");
        }
    });
    // And all goes on.
    let mut third = driver(&[rig.spec(2, 1, Load::Window(4), 64)]);
    // Its frames are foreign to the driver of b.
    let pause = Duration::from_millis(50);
    third.set_patience(Patience {
        silence: pause,
        drain: pause,
    });
    measure(&mut third);
    let report = measure(&mut others);
    let counts = &report.ports[0].counts;
    assert!(
        counts.sent > 20 && counts.arrived == counts.sent,
        "{report:?}"
    );
    assert!(rig.count("ports/c/forwarded") > 0 && rig.count("learned") == 3);
}

#[test]
fn a_switch_moves_whole_under_load_and_no_frame_is_torn() {
    let rig = Rig::new(&[""; 4]);
    let second = rig.fleet.add_core().unwrap();
    let first = rig.fleet.core_of(&rig.handle).unwrap();
    let spec = |at: usize| rig.spec(at, at ^ 1, Load::Window(32), [64, 1_518, 300, 1_000][at]);
    let mut driver = driver(&[0, 1, 2, 3].map(spec));
    learn(&mut driver);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let moves = scope.spawn(|| {
            let mut moves = 0;
            while !is_over.load(Ordering::Relaxed) {
                let to = [second, first][moves % 2];
                rig.fleet.move_to(&rig.handle, to).unwrap();
                moves += 1;
                std::thread::sleep(Duration::from_millis(2));
            }
            moves
        });
        for _ in 0..4 {
            is_whole(&measure(&mut driver), 50);
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(moves.join().unwrap() >= 10);
    });
    assert_eq!(rig.count("learned"), 4);
}
