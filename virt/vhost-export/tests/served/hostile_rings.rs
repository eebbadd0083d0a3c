//! Rings that no driver would write. After each the device has a defined state, a guest beside it
//! notices nothing, the core can sleep, and the same connection can stop the ring and start it
//! anew.

use crate::common::front::{Front, copy, event, fd};
use crate::common::raw::{Desc, INDIRECT, NEXT, NOWHERE, WRITE};
use crate::common::{BLOCK, Disk, Guest, Server, feature, options, until};
use seeded::Random;
use sidecore::IdlePolicy;
use vhost_user::wire::Request;

/// How an attack ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// The device needs a reset, and says so on the error descriptor.
    Broken,
    /// The ring is parked until the next kick: one of its own addresses, or an indirect table, lies
    /// in no memory.
    Parked,
    /// The request ends with this status.
    Status(u8),
}

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

struct Scene {
    server: Server,
    neighbour: Guest,
}

impl Scene {
    fn new(idle: IdlePolicy) -> Self {
        let server = Server::start(idle, vec![Disk::ram("target"), Disk::ram("neighbour")]);
        let neighbour = server.guest(1, options(feature::EVENT_IDX, 2, 8));
        Self { server, neighbour }
    }

    /// One attack, and the state after it.
    #[track_caller]
    fn attack(&mut self, what: &str, features: u64, end: End, attack: impl FnOnce(&mut Front)) {
        let before = self.server.stats(0).device;
        let mut front = Front::running(&self.server.path(0), features, 1, 8);
        let err = event();
        front.call(Request::SetVringErr(fd(0, Some(copy(&err)))));
        attack(&mut front);
        match end {
            End::Broken => {
                let mut count = [0; 8];
                until(&format!("{what}: the error is signalled"), || {
                    rustix::io::read(&err, &mut count).is_ok()
                });
                self.server
                    .until(0, what, |stats| stats.device.violations > before.violations);
            }
            End::Parked => self.server.until(0, what, |stats| {
                stats.device.ring_faults > before.ring_faults
            }),
            End::Status(status) => {
                until(&format!("{what}: it ends"), || front.status() != 0xff);
                assert_eq!(front.status(), status, "{what}");
            }
        }
        self.check(what);
        // A guest that resets its device gets a working one.
        front.restart();
        front.io().verify(8);
        // So does one that has lost its connection.
        drop(front);
        let mut front = Front::running(&self.server.path(0), feature::PACKED, 1, 8);
        front.io().verify(8);
    }

    #[track_caller]
    fn check(&mut self, what: &str) {
        self.neighbour.verify(8);
        // A core that is woken again and again without an end would never stay for 2 ms.
        until(&format!("{what}: the core sleeps"), || {
            let before = self.server.core().stats().core;
            std::thread::sleep(std::time::Duration::from_millis(2));
            let after = self.server.core().stats().core;
            after.sleeps <= before.sleeps + 1
        });
    }
}

/// A whole read request in descriptors 0 to 2, changed by the caller.
fn read(front: &Front) -> [Desc; 3] {
    let (header, status, data) = front.request(0, 0);
    [
        Desc(header, 16, NEXT, 1),
        Desc(data, BLOCK, NEXT | WRITE, 2),
        Desc(status, 1, WRITE, 0),
    ]
}

/// Offers what `change` makes of a read request.
fn changed(change: impl FnOnce(&Front, &mut [Desc; 3])) -> impl FnOnce(&mut Front) {
    move |front| {
        let mut descs = read(front);
        change(front, &mut descs);
        front.descs(&descs);
        front.avail(&[0]);
    }
}

const SPLIT: u64 = feature::EVENT_IDX | feature::INDIRECT;

#[test]
fn chains_that_loop_or_lead_nowhere() {
    let mut scene = Scene::new(IdlePolicy::Sleep);
    let mut broken = |what: &str, attack: &dyn Fn(&mut Front)| {
        scene.attack(what, SPLIT, End::Broken, attack);
    };
    broken("a loop of one", &|front| {
        changed(|_, descs| descs[0].3 = 0)(front)
    });
    broken("a loop of two", &|front| {
        changed(|_, descs| descs[2] = Desc(descs[2].0, 1, WRITE | NEXT, 1))(front);
    });
    broken("a head outside the table", &|front| front.avail(&[256]));
    broken("a head far outside the table", &|front| {
        front.avail(&[u16::MAX])
    });
    broken("a link outside the table", &|front| {
        changed(|_, descs| descs[1].3 = 300)(front);
    });
    broken("an index one too far", &|front| front.jump(257));
    broken("an index far too far", &|front| front.jump(40_000));
    broken("an index that goes back", &|front| {
        changed(|_, _| {})(front);
        until("the first is served", || front.used() == 1);
        front.jump(0);
    });
    broken("readable behind writable", &|front| {
        changed(|_, descs| descs[2].2 = 0)(front);
    });
    broken("no status", &|front| {
        changed(|_, descs| descs[0].2 = 0)(front);
    });
    broken("half a header", &|front| {
        changed(|_, descs| descs[0].1 = 8)(front);
    });
    broken("an empty chain", &|front| front.avail(&[100]));
}

#[test]
fn lengths_and_addresses_that_make_no_sense() {
    let mut scene = Scene::new(IdlePolicy::Sleep);
    let mut run = |what: &str, end: End, change: &dyn Fn(&Front, &mut [Desc; 3])| {
        scene.attack(what, SPLIT, end, changed(change));
    };
    run("zero bytes", End::Broken, &|_, descs| descs[1].1 = 0);
    run("a header of zero bytes", End::Broken, &|_, descs| {
        descs[0].1 = 0
    });
    run("a status of zero bytes", End::Broken, &|_, descs| {
        descs[2].1 = 0
    });
    run("4 GiB in one", End::Broken, &|_, descs| {
        descs[1].1 = u32::MAX
    });
    run("wrapping around", End::Broken, &|_, descs| {
        descs[1].0 = u64::MAX - 100
    });
    run("a header nowhere", End::Status(IOERR), &|_, descs| {
        descs[0].0 = NOWHERE
    });
    run("data nowhere", End::Status(IOERR), &|_, descs| {
        descs[1].0 = NOWHERE
    });
    run("a status nowhere", End::Broken, &|_, descs| {
        descs[2].0 = NOWHERE
    });
    run(
        "data over the end of a region",
        End::Status(IOERR),
        &|front, descs| {
            let last = front.regions()[1];
            descs[1].0 = last.guest_addr + last.size - 512;
        },
    );
    run("no whole sector", End::Status(IOERR), &|_, descs| {
        descs[1].1 = 1000
    });
    run(
        "past the end of the disk",
        End::Status(IOERR),
        &|front, descs| {
            *descs = read(front);
            front.request(0, 1 << 40);
        },
    );
    run(
        "a sector that overflows",
        End::Status(IOERR),
        &|front, _| {
            front.request(0, u64::MAX);
        },
    );
    run("an unknown type", End::Status(UNSUPP), &|front, _| {
        front.request(77, 0);
    });
    run(
        "more than a transfer may have",
        End::Status(IOERR),
        &|_, descs| descs[1].1 = (4 << 20) + 512,
    );
}

/// However it is cut, it is one row of bytes (virtio 1.2 §2.7.4.1).
#[test]
fn a_header_of_sixteen_descriptors_is_a_header() {
    let mut scene = Scene::new(IdlePolicy::Sleep);
    scene.attack("one byte each", SPLIT, End::Status(OK), |front| {
        let (header, status, data) = front.request(0, 0);
        for at in 0..16 {
            front.desc(at, Desc(header + u64::from(at), 1, NEXT, at + 1));
        }
        // Data in sectors that lie apart, one of them cut, and the status behind the last byte of
        // data.
        front.desc(16, Desc(data, 511, NEXT | WRITE, 17));
        front.desc(17, Desc(data + 2048, 513, NEXT | WRITE, 18));
        front.desc(18, Desc(status, 1, WRITE, 0));
        front.avail(&[0]);
    });
    scene.attack("header and data in one", SPLIT, End::Status(OK), |front| {
        let (header, status, _) = front.request(1, 0);
        // What is behind the header is written to the disk.
        front.desc(0, Desc(header, 16 + 512, NEXT, 1));
        front.desc(1, Desc(status, 1, WRITE, 0));
        front.avail(&[0]);
    });
}

#[test]
fn indirect_tables_of_every_odd_kind() {
    let mut scene = Scene::new(IdlePolicy::Sleep);
    let mut run = |what: &str, end: End, offer: &dyn Fn(&Front, usize, u64)| {
        scene.attack(what, SPLIT, end, |front: &mut Front| {
            let table = front.layout.table(0, 0);
            for (at, desc) in read(front).into_iter().enumerate() {
                front.put(table.offset + 16 * at, desc);
            }
            offer(front, table.offset, table.addr);
            front.avail(&[0]);
        });
    };
    let plain = |front: &Front, addr, len| front.desc(0, Desc(addr, len, INDIRECT, 0));
    run("a proper one", End::Status(OK), &|front, _, addr| {
        plain(front, addr, 48);
    });
    run("no entry", End::Broken, &|front, _, addr| {
        plain(front, addr, 0);
    });
    for len in [8, 17, 47, 16 * 1025, 0xffff_fff0, u32::MAX] {
        run("odd lengths", End::Broken, &|front, _, addr| {
            plain(front, addr, len);
        });
    }
    run("nowhere", End::Parked, &|front, _, _| {
        plain(front, NOWHERE, 48);
    });
    run("partly nowhere", End::Parked, &|front, _, _| {
        let last = front.regions()[1];
        plain(front, last.guest_addr + last.size - 16, 48);
    });
    run("wrapping", End::Parked, &|front, _, _| {
        plain(front, u64::MAX - 15, 48);
    });
    run("nested", End::Broken, &|front, at, addr| {
        front.put(at, Desc(addr, 48, INDIRECT, 0));
        plain(front, addr, 48);
    });
    run("a loop inside", End::Broken, &|front, at, addr| {
        let header = front.layout.gpa(front.layout.header(0, 0));
        front.put(at, Desc(header, 16, NEXT, 0));
        plain(front, addr, 48);
    });
    run("a link out of it", End::Broken, &|front, at, addr| {
        let header = front.layout.gpa(front.layout.header(0, 0));
        front.put(at, Desc(header, 16, NEXT, 3));
        plain(front, addr, 48);
    });
    run("with NEXT", End::Broken, &|front, _, addr| {
        front.desc(0, Desc(addr, 48, INDIRECT | NEXT, 1));
    });
    run(
        "written by the device",
        End::Status(OK),
        &|front, _, addr| {
            // The flag means nothing here (§2.7.5.3.2).
            front.desc(0, Desc(addr, 48, INDIRECT | WRITE, 0));
        },
    );
    // Misaligned: the specification asks nothing of it, so it is read as it is.
    run("misaligned", End::Status(OK), &|front, at, addr| {
        let mut bytes = [0; 48];
        front.memory.read(at, &mut bytes);
        for (to, byte) in bytes.into_iter().enumerate() {
            let order = std::sync::atomic::Ordering::Relaxed;
            front.memory.store_u8(at + 1 + to, byte, order);
        }
        plain(front, addr + 1, 48);
    });
    scene.attack("not negotiated", feature::EVENT_IDX, End::Broken, |front| {
        let table = front.layout.table(0, 0);
        front.desc(0, Desc(table.addr, 48, INDIRECT, 0));
        front.avail(&[0]);
    });
}

/// One chain made available as often as the ring has entries.
#[test]
fn a_chain_offered_over_and_over() {
    let mut scene = Scene::new(IdlePolicy::Sleep);
    scene.attack("all the same", SPLIT, End::Status(OK), |front| {
        let descs = read(front);
        front.descs(&descs);
        front.avail(&[0; 256]);
        until("all of them come back", || front.used() == 256);
    });
}

/// Areas on top of each other: the device's own writes change what it reads.
#[test]
fn areas_that_overlap() {
    let mut scene = Scene::new(IdlePolicy::Sleep);
    for offset in [0, 16, 4096, 4096 + 4] {
        let mut front = Front::sharing(&scene.server.path(0), SPLIT, 1, 8);
        front.describe(0);
        let places = front.layout.places(0);
        front.call(Request::SetVringAddr(vhost_user::wire::VringAddr {
            index: 0,
            desc: front.layout.user(places.desc),
            avail: front.layout.user(places.driver),
            used: front.layout.user(offset),
        }));
        front.call(front.kick_request(0));
        front.enable(0, true);
        let descs = read(&front);
        front.descs(&descs);
        for _ in 0..20 {
            front.avail(&[0, 1, 2]);
            scene.check("overlapping areas");
        }
        front.restart();
        front.io().verify(8);
    }
}

/// VIRTQ_DESC_F_AVAIL of a packed ring's first lap.
const AVAIL: u16 = 1 << 7;

#[test]
fn packed_rings_of_every_odd_kind() {
    let mut scene = Scene::new(IdlePolicy::Sleep);
    let features = feature::PACKED | feature::INDIRECT;
    let mut run = |what: &str, end: End, offer: &dyn Fn(&mut Front)| {
        scene.attack(what, features, end, |front: &mut Front| {
            offer(front);
            front.queues[0].kick();
        });
    };
    run("a chain as long as the ring", End::Broken, &|front| {
        let (header, ..) = front.request(0, 0);
        for at in 0..256 {
            front.packed(at, header, 16, 0, AVAIL | NEXT);
        }
    });
    run("zero bytes", End::Broken, &|front| {
        let (header, ..) = front.request(0, 0);
        front.packed(0, header, 0, 0, AVAIL);
    });
    run("only a header", End::Broken, &|front| {
        let (header, ..) = front.request(0, 0);
        front.packed(0, header, 16, 0, AVAIL);
    });
    run("indirect with NEXT", End::Broken, &|front| {
        let table = front.layout.table(0, 0);
        front.packed(0, table.addr, 48, 0, AVAIL | NEXT | INDIRECT);
        front.packed(1, table.addr, 48, 0, AVAIL | INDIRECT);
    });
    run(
        "an indirect table of half an entry",
        End::Broken,
        &|front| {
            let table = front.layout.table(0, 0);
            front.packed(0, table.addr, 24, 0, AVAIL | INDIRECT);
        },
    );
    run("a huge indirect table", End::Broken, &|front| {
        let table = front.layout.table(0, 0);
        front.packed(0, table.addr, 0xffff_fff0, 0, AVAIL | INDIRECT);
    });
    run("a header nowhere", End::Status(IOERR), &|front| {
        let (_, status, _) = front.request(0, 0);
        front.packed(1, status, 1, 0, AVAIL | WRITE);
        front.packed(0, NOWHERE, 16, 0, AVAIL | NEXT);
    });
    run("wrapping", End::Broken, &|front| {
        let (_, status, _) = front.request(0, 0);
        front.packed(1, status, 1, 0, AVAIL | WRITE);
        front.packed(0, u64::MAX - 4, 16, 0, AVAIL | NEXT);
    });
}

/// Bytes at random in rings and requests, while the device looks.
#[test]
fn noise_breaks_nothing_but_its_own_device() {
    let mut scene = Scene::new(IdlePolicy::Sleep);
    let mut random = Random::new(20_260_101);
    for round in 0..120 {
        let features = match round % 4 {
            0 => SPLIT,
            1 => feature::PACKED | feature::INDIRECT | feature::EVENT_IDX,
            2 => feature::IN_ORDER,
            _ => feature::PACKED | feature::IN_ORDER,
        };
        let mut front = Front::running(&scene.server.path(0), features, 1, 8);
        let len = front.layout.rings_len() + 4096;
        for _ in 0..20 {
            for _ in 0..64 {
                let at = random.below(len as u64 / 8) as usize * 8;
                let word = match random.below(3) {
                    0 => random.below(u64::MAX),
                    // Something that looks like an address, and like flags.
                    1 => front.layout.gpa(random.below(len as u64) as usize),
                    _ => random.below(1 << 20) | random.below(8) << 32 | random.below(256) << 48,
                };
                let order = std::sync::atomic::Ordering::Relaxed;
                front.memory.store_u64(at, word, order);
            }
            // A plausible index, so that not all ends there.
            let idx = random.below(300) as u16;
            if features & feature::PACKED == 0 {
                front.jump(idx);
            } else {
                front.queues[0].kick();
            }
        }
        if round % 10 == 0 {
            scene.check("noise");
        }
        front.restart();
        front.io().verify(4);
    }
}

/// Ring addresses where no memory is, or not enough of it.
#[test]
fn rings_outside_memory_are_refused_or_rest() {
    let mut scene = Scene::new(IdlePolicy::Sleep);
    let path = scene.server.path(0);
    let last = !4095;
    let mut front = Front::sharing(&path, SPLIT, 1, 8);
    let user = front.layout.user(0);
    let end = front.regions()[0].user_addr + front.regions()[0].size;
    for (desc, avail, used, is_taken) in [
        (NOWHERE, user, user, false),
        (user, NOWHERE, user, false),
        (user, user, NOWHERE, false),
        (last, user, user, false),
        (user, user, last, false),
        // In memory with their first byte only.
        (end - 16, user, user + 4096, true),
        (user, end - 2, user + 4096, true),
        (user, user, end - 4, true),
    ] {
        front.describe(0);
        let addr = vhost_user::wire::VringAddr {
            index: 0,
            desc,
            avail,
            used,
        };
        let addressed = front.connection.call(Request::SetVringAddr(addr));
        if addressed.is_ok() {
            let request = front.kick_request(0);
            let started = front.connection.call(request);
            if !is_taken {
                started.expect_err("no memory there");
            } else if started.is_ok() {
                front.enable(0, true);
                front.queues[0].kick();
                scene.check("a ring over the end of memory");
                front.stop(0);
            }
        } else {
            assert!(!is_taken, "{desc:#x} {avail:#x} {used:#x}");
        }
    }
    front.fresh_rings();
    front.serve(0);
    front.io().verify(8);
    scene.check("rings outside memory");
}
