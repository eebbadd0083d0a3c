//! A guest that writes nonsense everywhere it can: no panic, no endless work, and another machine
//! on the same sidecore that serves verified I/O all the while.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use sidecore::{Nanos, Poller};
use vio::blk::Transfer;
use vio::blk::request::kind;
use vtd::AccessLen;

use machine::Op;
use virtio_pci::function::BAR_SIZE;

use super::support::*;

/// Longest that one poll or message may take in a debug build on a busy host. A queue of 32768
/// descriptors that each recheck leases is the worst a trapped write can ask for.
const TURN_LIMIT: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
enum Action {
    Register {
        offset: u16,
        wide: bool,
        value: u64,
    },
    Bar {
        offset: u64,
        bytes: Vec<u8>,
    },
    BarRead {
        offset: u64,
        len: usize,
    },
    Config {
        reg: u16,
        len: u8,
        value: u32,
    },
    Memory {
        at: u64,
        bytes: Vec<u8>,
    },
    Request {
        op: u32,
        sector: u64,
        page: u64,
        len: u32,
    },
    Doorbell,
    Turns(u8),
    /// The sidecore comes to sleep and wakes up.
    Sleep,
}

/// Addresses worth writing down: structures the unit and the device follow, RAM's end, and
/// nonsense.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(ROOT),
        Just(CONTEXTS),
        Just(QUEUE),
        Just(TABLES),
        Just(RINGS),
        Just(RAM - 16),
        (0..RAM).prop_map(|at| at & !7),
        any::<u64>(),
    ]
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        address(),
        (0..64_u32).prop_map(|bit| 1 << bit),
        (address(), 0..0x1000_u64).prop_map(|(at, low)| at & !0xfff | low),
        (address(), 0..8_u64).prop_map(|(at, low)| (at + IOVA).wrapping_add(low)),
    ]
}

/// Address of one of the guest's own structures.
fn place() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0..0x1000_u64).prop_map(|at| RINGS + at % 0x700),
        2 => (0..0x1000_u64).prop_map(|at| QUEUE + at),
        1 => (0..0x200_u64).prop_map(|at| ROOT + at),
        1 => (0..0x200_u64).prop_map(|at| CONTEXTS + at),
        2 => (0..0x4000_u64).prop_map(|at| TABLES + at),
        1 => (0..0x1000_u64).prop_map(|at| HEADERS + at),
    ]
}

fn registers() -> impl Strategy<Value = u16> {
    // Those with effects, twice as often as any.
    prop_oneof![
        prop::sample::select(vec![
            0x18_u16, 0x20, 0x28, 0x34, 0x38, 0x3c, 0x40, 0x80, 0x88, 0x90, 0x9c, 0xa0, 0xf0, 0xf8,
            0x22c,
        ]),
        (0..0x400_u16).prop_map(|at| at * 4 % 0x1000),
    ]
}

fn act() -> impl Strategy<Value = Action> {
    let bytes = || prop::collection::vec(any::<u8>(), 1..24);
    prop_oneof![
        6 => (registers(), any::<bool>(), value()).prop_map(
            |(offset, wide, value)| Action::Register {
                // What KVM lets through to the page is aligned in every mode.
                offset: if wide { offset & !7 } else { offset },
                wide,
                value,
            }
        ),
        2 => (0..BAR_SIZE, prop::collection::vec(any::<u8>(), 1..=8))
            .prop_map(|(offset, bytes)| Action::Bar { offset, bytes }),
        3 => (0..0x38_u64, prop::sample::select(vec![1, 2, 4, 8_usize]), value()).prop_map(
            |(offset, len, value)| Action::Bar {
                offset,
                bytes: value.to_le_bytes()[..len].to_vec(),
            }
        ),
        1 => (0..BAR_SIZE, 1..=8_usize).prop_map(|(offset, len)| Action::BarRead { offset, len }),
        1 => (0..0x400_u16, prop::sample::select(vec![1_u8, 2, 4]), any::<u32>())
            .prop_map(|(at, len, value)| Action::Config { reg: at * 4 % 0x100, len, value }),
        1 => Just(Action::Config { reg: 4, len: 2, value: 6 }),
        8 => (place(), bytes()).prop_map(|(at, bytes)| Action::Memory { at, bytes }),
        4 => (place(), value())
            .prop_map(|(at, value)| Action::Memory {
                at: at & !7,
                bytes: value.to_le_bytes().to_vec(),
            }),
        3 => (
            prop::sample::select(vec![kind::IN, kind::OUT, kind::FLUSH, kind::GET_ID, 13, 77]),
            0..SECTORS,
            0..DATA_PAGES,
            any::<u32>(),
        )
            .prop_map(|(op, sector, page, len)| Action::Request {
                op,
                sector,
                page,
                len: len % 0x3000,
            }),
        2 => Just(Action::Doorbell),
        6 => (1..8_u8).prop_map(Action::Turns),
        1 => Just(Action::Sleep),
    ]
}

/// Every call of the owner, timed.
fn timed(what: &dyn std::fmt::Debug, call: impl FnOnce()) {
    let start = Instant::now();
    call();
    let took = start.elapsed();
    assert!(took < TURN_LIMIT, "{what:?} took {took:?}");
}

fn perform(guest: &mut Guest<ByHand>, act: &Action) {
    match act {
        Action::Register {
            offset,
            wide,
            value,
        } => match wide {
            true => guest.write_register(*offset, AccessLen::B8, *value),
            false => guest.write_register(*offset, AccessLen::B4, *value & 0xffff_ffff),
        },
        Action::Bar { offset, bytes } => guest.bar_write(*offset, bytes),
        Action::BarRead { offset, len } => {
            guest.bar_read(*offset, *len);
        }
        // Its answer may have to wait for the disk.
        &Action::Config { reg, len, value } => {
            let op = Op::ConfigWrite { reg, len, value };
            drop(guest.bus.ask_later(to_function(op)));
        }
        Action::Memory { at, bytes } => guest.put(*at, bytes),
        &Action::Request {
            op,
            sector,
            page,
            len,
        } => {
            if guest.driver.free() >= 3 {
                guest.request(7, op, sector, DATA + 0x1000 * page, len);
            }
        }
        Action::Doorbell => guest.ring_doorbell(),
        Action::Turns(count) => (0..*count).for_each(|_| guest.bus.turn()),
        Action::Sleep => {
            if guest.bus.arm().is_ok() {
                let owner = &mut guest.bus.owner;
                let _ = owner.has_work();
                let _ = owner.deadline();
                owner.disarm();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn nonsense_from_a_guest_harms_no_other(
        mode in prop::sample::select(MODES.to_vec()),
        boots in any::<bool>(),
        acts in prop::collection::vec(act(), 1..80),
    ) {
        let disk = blk(raw_disk(Transfer::Direct), None);
        let (owner, parts) = machine(mode, Duration::from_millis(1), disk);
        let mut hostile = Guest::new(ByHand::new(owner), parts);
        if boots {
            hostile.boot();
            hostile.start_driver();
            hostile.verified_io(0);
        }
        let mut well = Guest::by_hand(mode, LIMIT, mem_disk());
        for (round, act) in acts.iter().enumerate() {
            timed(act, || perform(&mut hostile, act));
            if round % 8 == 0 {
                // The sidecore serves them in turn.
                timed(&"turn", || hostile.bus.turn());
                well.verified_io(round as u64);
            }
        }
        for _ in 0..50 {
            timed(&"turn", || hostile.bus.turn());
        }
        well.verified_io(99);
        prop_assert_eq!(well.counts().faults, 0);
        let _ = hostile.bus.poll_at(Nanos(u64::MAX));
    }
}

/// The worst queue: as many descriptors as it can hold, each for all leases, in one trapped write.
#[test]
fn a_full_queue_of_flushes_takes_bounded_time_in_one_exit() {
    let (device, control) = slow(Transfer::Direct);
    let mut guest = Guest::by_hand(Mode::Trap, NO_LIMIT, device);
    for slot in 0..8 {
        guest.request(slot, kind::IN, slot, DATA + 0x1000 * slot, 512);
    }
    guest.until("all are held", |_| control.held() == 8);
    // A queue of 2^7 pages, in memory that nothing else uses.
    let (at, len) = (0xc0_0000_u64, 0x8_0000_u64);
    for entry in (0..len).step_by(16) {
        guest.put(at + entry, &flush_domain().to_le_bytes());
    }
    use vtd::spec::registers as reg;
    guest.write4(reg::GCMD, 0x8000_0000);
    guest.write8(reg::IQA, at | 7);
    guest.write8(reg::IQT, 0);
    guest.write4(reg::GCMD, 0x8400_0000);
    timed(&"IQT", || guest.write4(reg::IQT, (len - 16) as u32));
    guest.until("the queue is empty", |guest| {
        u64::from(guest.read4(reg::IQH)) == len - 16
    });
    control.set_open(true);
    for _ in 0..8 {
        guest.wait_used();
    }
}
