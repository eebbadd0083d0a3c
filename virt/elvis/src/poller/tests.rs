//! Tests of requests, changes of settings between them, and hostile rings; also at random.

use seeded::Random;

use super::*;
use crate::fake::{AVAIL, DATA, Driver, HEADER, SIZE, STATUS, USED, WRITE, config};
use crate::request::SECTOR;

const QUEUE_VECTOR: Vector = 0x41;
const CONFIG_VECTOR: Vector = 0x31;
const HIDDEN: u64 = 0x1_8000;

fn settings() -> Settings {
    Settings {
        epoch: 1,
        queue: Some(config()),
        features: 0,
        queue_entry: Some(1),
        config_entry: Some(0),
        vectors: [Some(CONFIG_VECTOR), Some(QUEUE_VECTOR)],
    }
}

fn disk() -> Vec<u8> {
    (0..64 * SECTOR as usize).map(|at| (at / 7) as u8).collect()
}

fn started() -> (Driver, Poller, Vec<u8>) {
    let (driver, mut poller) = (Driver::new(), Poller::default());
    assert_eq!(
        poller.configure(settings(), &driver.ram),
        Outcome::default()
    );
    (driver, poller, disk())
}

#[test]
fn requests_are_served_and_interrupt() {
    let (mut driver, mut poller, mut disk) = started();
    assert_eq!(poller.poll(&driver.ram, &mut disk), Outcome::default());
    // Read, in pieces that cut sectors.
    driver.request(0, 3, &[(DATA, 100), (DATA + 0x1000, 924)]);
    let outcome = poller.poll(&driver.ram, &mut disk);
    assert_eq!(outcome.send, [None, Some(QUEUE_VECTOR)]);
    assert!(outcome.has_served && outcome.stopped.is_none());
    assert_eq!((driver.status(), driver.used()), (0, (1, 1025)));
    let got = [
        driver.ram.get(DATA, 100),
        driver.ram.get(DATA + 0x1000, 924),
    ]
    .concat();
    assert_eq!(got, disk[3 * 512..5 * 512]);
    // Written, and read back.
    driver.ram.put(DATA, &[0x5a; 512]);
    driver.request(1, 63, &[(DATA, 512)]);
    poller.poll(&driver.ram, &mut disk);
    assert_eq!((driver.status(), driver.used()), (0, (2, 1)));
    assert_eq!(disk[63 * 512..], [0x5a; 512]);
    // Its name.
    driver.request(8, 0, &[(DATA, 20)]);
    poller.poll(&driver.ram, &mut disk);
    assert_eq!((driver.status(), driver.used()), (0, (3, 21)));
    assert!(driver.ram.get(DATA, 20).starts_with(b"exitless"));
}

#[test]
fn absent_sectors_are_answered_by_an_error_and_nothing_is_copied() {
    let before = disk();
    for (what, kind, sector, len, status) in [
        ("behind the end", 0, 64, 512, 1),
        ("across the end", 0, 63, 1024, 1),
        ("a sector that wraps", 0, u64::MAX / 2, 512, 1),
        ("part of a sector", 0, 0, 100, 1),
        ("a write behind the end", 1, 64, 512, 1),
        ("a type that is none", 77, 0, 512, 2),
    ] {
        let (mut driver, mut poller, mut disk) = started();
        driver.ram.put(DATA, &[0xcc; 1024]);
        driver.request(kind, sector, &[(DATA, len)]);
        let outcome = poller.poll(&driver.ram, &mut disk);
        assert_eq!(outcome.send[1], Some(QUEUE_VECTOR), "{what}");
        assert_eq!((driver.status(), driver.used()), (status, (1, 1)), "{what}");
        assert_eq!(driver.ram.get(DATA, 1024), [0xcc; 1024], "{what}");
        assert!(disk == before, "{what}");
    }
}

/// Each stops the queue, once, with a configuration interrupt; the core continues, and a reset
/// restarts the queue.
#[test]
fn a_hostile_ring_stops_its_queue_until_a_reset() {
    type Attack = fn(&mut Driver);
    let attacks: [(&str, Attack); 9] = [
        ("data over the hypervisor's memory", |driver| {
            driver.request(0, 0, &[(HIDDEN, 512)])
        }),
        ("data that end in it", |driver| {
            driver.request(0, 0, &[(HIDDEN - 256, 512)])
        }),
        ("data from it", |driver| {
            driver.request(1, 0, &[(HIDDEN, 512)])
        }),
        ("a header in it", |driver| {
            driver.chain(&[(HIDDEN, 16, 0), (STATUS, 1, WRITE)])
        }),
        ("a status in it", |driver| {
            driver.chain(&[(HEADER, 16, 0), (HIDDEN, 1, WRITE)])
        }),
        ("no status", |driver| driver.chain(&[(HEADER, 16, 0)])),
        ("half a header", |driver| {
            driver.chain(&[(HEADER, 15, 0), (STATUS, 1, WRITE)])
        }),
        ("a loop", |driver| {
            driver.desc(0, (HEADER, 16, 1), 0);
            driver.offer(0);
        }),
        ("an index that jumps", |driver| {
            driver.ram.put(AVAIL + 2, &[0x00, 0x80])
        }),
    ];
    for (what, attack) in attacks {
        let (mut driver, mut poller, mut disk) = started();
        let before = driver.ram.get(HIDDEN, 0x1000);
        attack(&mut driver);
        let outcome = poller.poll(&driver.ram, &mut disk);
        assert!(outcome.stopped.is_some(), "{what}");
        assert_eq!(outcome.send, [Some(CONFIG_VECTOR), None], "{what}");
        assert_eq!(driver.used().0, 0, "{what}");
        assert_eq!(driver.ram.get(HIDDEN, 0x1000), before, "{what}");
        assert!(disk == self::disk(), "{what}");
        driver.request(0, 0, &[(DATA, 512)]);
        assert_eq!(
            poller.poll(&driver.ram, &mut disk),
            Outcome::default(),
            "{what}"
        );
        // Set anew without a reset: still stopped. With one, it is another queue.
        assert_eq!(
            poller.configure(settings(), &driver.ram),
            Outcome::default()
        );
        assert_eq!(
            poller.poll(&driver.ram, &mut disk),
            Outcome::default(),
            "{what}"
        );
        let mut driver = Driver::new();
        let again = Settings {
            epoch: 2,
            ..settings()
        };
        assert_eq!(poller.configure(again, &driver.ram), Outcome::default());
        driver.request(0, 0, &[(DATA, 512)]);
        assert!(poller.poll(&driver.ram, &mut disk).has_served, "{what}");
        assert_eq!(driver.status(), 0, "{what}");
    }
}

#[test]
fn rings_in_the_hypervisors_memory_are_not_served() {
    for (what, change) in [
        (
            "descriptors",
            (|config| config.desc = address::Iova::new(HIDDEN)) as fn(&mut QueueConfig),
        ),
        ("available", |config| {
            config.avail = address::Iova::new(HIDDEN)
        }),
        ("used", |config| config.used = address::Iova::new(HIDDEN)),
        ("misaligned", |config| {
            config.used = address::Iova::new(USED + 2)
        }),
        ("at the end of all addresses", |config| {
            config.desc = address::Iova::new(!0xf)
        }),
    ] {
        let (mut driver, mut poller) = (Driver::new(), Poller::default());
        let mut hostile = config();
        change(&mut hostile);
        let settings = Settings {
            queue: Some(hostile),
            ..settings()
        };
        let first = poller.configure(settings, &driver.ram);
        driver.request(0, 0, &[(DATA, 512)]);
        let then = poller.poll(&driver.ram, &mut disk());
        let stops = [first, then]
            .iter()
            .filter(|outcome| outcome.stopped.is_some())
            .count();
        assert_eq!(stops, 1, "{what}");
        assert_eq!(driver.ram.get(HIDDEN, 0x1000), [0; 0x1000], "{what}");
    }
}

#[test]
fn interrupts_of_masked_entries_are_sent_once_when_they_open() {
    let (mut driver, mut poller, mut disk) = started();
    let masked = Settings {
        vectors: [Some(CONFIG_VECTOR), None],
        ..settings()
    };
    assert_eq!(poller.configure(masked, &driver.ram), Outcome::default());
    driver.request(0, 0, &[(DATA, 512)]);
    assert_eq!(poller.poll(&driver.ram, &mut disk).send, [None, None]);
    assert_eq!(poller.pending(), [false, true]);
    let moved = Settings {
        vectors: [Some(CONFIG_VECTOR), Some(0x51)],
        ..settings()
    };
    assert_eq!(
        poller.configure(moved, &driver.ram).send,
        [None, Some(0x51)]
    );
    assert_eq!(poller.configure(moved, &driver.ram).send, [None, None]);
    // The queue went on where it was.
    driver.request(0, 0, &[(DATA, 512)]);
    assert_eq!(poller.poll(&driver.ram, &mut disk).send, [None, Some(0x51)]);
    assert_eq!(driver.used().0, 2);
}

#[test]
fn nothing_is_touched_while_the_function_is_no_bus_master() {
    let (mut driver, mut poller, mut disk) = started();
    let off = Settings {
        queue: None,
        ..settings()
    };
    poller.configure(off, &driver.ram);
    driver.request(0, 0, &[(DATA, 512)]);
    assert_eq!(poller.poll(&driver.ram, &mut disk), Outcome::default());
    assert_eq!(driver.used().0, 0);
    poller.configure(settings(), &driver.ram);
    assert!(poller.poll(&driver.ram, &mut disk).has_served);
}

/// Any bytes in the rings, any settings in between: bounded, no panic, and the hypervisor's memory
/// as it was.
#[test]
fn no_ring_reaches_what_is_not_the_guests() {
    let mut random = Random::new(2026);
    let mut served = 0;
    for _ in 0..4000 {
        let (mut driver, mut poller, mut disk) = started();
        let canary: Vec<u8> = (0..0x1000).map(|at| at as u8 ^ 0x5a).collect();
        driver.ram.put(HIDDEN, &canary);
        if random.below(4) == 0 {
            driver.request(random.below(2) as u32, random.below(70), &[(DATA, 512)]);
            served += u32::from(poller.poll(&driver.ram, &mut disk).has_served);
        }
        for index in 0..SIZE {
            let places = [
                HEADER,
                STATUS,
                DATA,
                DATA + 0x7f00,
                HIDDEN,
                HIDDEN + 0xf00,
                0x1_fff0,
                u64::MAX,
            ];
            let lens = [1, 15, 16, 512, 1024, 0x200, u32::MAX];
            let piece = (
                places[random.below(8) as usize],
                lens[random.below(7) as usize],
                random.below(4) as u16,
            );
            driver.desc(index, piece, random.below(9) as u16);
        }
        let mut header = [0; 16];
        header[0] = random.below(3) as u8;
        header[8] = random.below(70) as u8;
        driver.ram.put(HEADER, &header);
        for _ in 0..random.below(12) {
            driver.offer(random.below(9) as u16);
            served += u32::from(poller.poll(&driver.ram, &mut disk).has_served);
            if random.below(6) == 0 {
                let other = Settings {
                    epoch: random.below(3) as u32,
                    features: random.below(2) * virtqueue::feature::EVENT_IDX,
                    ..settings()
                };
                poller.configure(other, &driver.ram);
            }
        }
        assert!(driver.ram.get(HIDDEN, 0x1000) == canary);
        assert_eq!(disk.len(), 64 * SECTOR as usize);
    }
    assert!(served > 100, "{served} requests were good ones");
}
