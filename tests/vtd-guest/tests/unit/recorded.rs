//! The register scripts of real guests, as recorded in `trap`, replayed through all three front
//! ends.
//!
//! Every recorded read must give the recorded value. Addresses that the guest chose (queue, root
//! table) are replaced by ours. The descriptors that it submitted are not in a recording, so each
//! submission is replayed as invalidations and the wait behind them, which is what stock Linux
//! submits. Nor are the accesses that faulted: each is made again before the guest first looks
//! whether there was one, as its fault record tells.

use guest_mem::{Gpa, Perm, SourceId, Stop};
use vtd::spec::registers as reg;
use vtd::{AccessLen, Config};
use vtd_guest::{Guest, MODES, Machine, Mode, QUEUE, ROOT, STATUS};
use vtd_guest::{cc_global, iotlb_global, iotlb_pages, wait_status};

/// Bytes of the queue that stock Linux has.
const QUEUE_BYTES: u64 = 0x1000;
/// FSTS: a fault is pending.
const PPF: u64 = 2;
/// The fault recording registers: 16 bytes each, from here up to the unit's IOTLB registers' end.
const RECORDS: std::ops::Range<u16> = 0x220..0x400;
/// Highest doubleword of a record: it holds a fault, of a read.
const FAULT: u64 = 1 << 31;
const IS_READ: u64 = 1 << 30;

#[derive(Clone, Copy)]
struct Access {
    is_write: bool,
    len: AccessLen,
    offset: u16,
    value: u64,
}

fn parse(line: &str) -> Access {
    let mut words = line.split(' ');
    let kind = words.next().expect("access");
    let mut number =
        || u64::from_str_radix(words.next().expect("a number"), 16).expect("hexadecimal");
    Access {
        is_write: kind.starts_with('W'),
        len: match kind.ends_with('8') {
            true => AccessLen::B8,
            false => AccessLen::B4,
        },
        offset: number() as u16,
        value: number(),
    }
}

/// The accesses that faulted before the guest read what begins `rest`: it looks at each record, and
/// clears it.
fn faults(rest: &[Access]) -> Vec<(SourceId, u64, Perm)> {
    let handler = rest
        .split(|access| access.is_write && access.offset == reg::FSTS)
        .next()
        .expect("the first part");
    let read = |offset: u16| {
        let mut reads = handler.iter().filter(|access| !access.is_write);
        reads.find(move |access| access.offset == offset)
    };
    let of_record = |base: u16| {
        let state = read(base + 12)?.value;
        let source = read(base + 8)?.value as u16;
        let iova = read(base)?.value;
        let perm = match state & IS_READ {
            0 => Perm::Write,
            _ => Perm::Read,
        };
        (state & FAULT != 0).then_some((SourceId(source), iova, perm))
    };
    RECORDS.step_by(16).filter_map(of_record).collect()
}

/// Actions of a guest.
#[derive(Debug, Default, PartialEq, Eq)]
struct Did {
    submissions: usize,
    /// Descriptors but for the waits.
    invalidations: u64,
    faults: usize,
}

fn replay(mode: Mode, script: &str) -> Did {
    let mut guest = Guest::new();
    for slot in 1..8 {
        let table = guest.page();
        guest.context(SourceId::new(0, slot, 0), table, 1, 2);
    }
    let mut m = Machine::new(mode, Config::default(), guest.mem.clone());
    let mut did = Did::default();
    let mut tail = 0;
    let mut has_faulted = false;
    let lines = script.lines().filter(|line| !line.starts_with('#'));
    let script: Vec<Access> = lines.map(parse).collect();
    for (at, access) in script.iter().enumerate() {
        let Access {
            is_write,
            len,
            offset,
            value,
        } = *access;
        if !is_write {
            if offset == reg::FSTS && value & PPF != 0 && !has_faulted {
                has_faulted = true;
                for (source, iova, perm) in faults(&script[at..]) {
                    let stopped = m.translate(source, iova, perm);
                    assert!(matches!(stopped, Err(Stop::Fault(_))), "{stopped:?}");
                    did.faults += 1;
                }
                m.settle();
                let told = std::mem::take(&mut m.out.messages);
                assert_eq!(told.len(), 1, "{mode:?}: one interrupt for all of them");
            }
            m.settle();
            assert_eq!(
                m.read(offset, len),
                value,
                "{mode:?}, access {at}, read of {offset:#x}"
            );
            continue;
        }
        match offset {
            reg::IQA => m.write(offset, len, QUEUE),
            reg::RTADDR => m.write(offset, len, ROOT),
            // The queue begins; later this is the end of a round.
            reg::IQT if did.submissions == 0 && value == 0 => m.write(offset, len, value),
            reg::IQT => {
                while (tail + 0x10) % QUEUE_BYTES != value {
                    let invalidation = match did.invalidations {
                        0 => cc_global(),
                        1 => iotlb_global(),
                        _ => iotlb_pages(1, 0xffff_f000, 0),
                    };
                    guest.put(QUEUE + tail, invalidation);
                    did.invalidations += 1;
                    tail = (tail + 0x10) % QUEUE_BYTES;
                }
                guest.put(QUEUE + tail, wait_status(STATUS, 2));
                tail = value;
                m.write(offset, len, value);
                m.settle();
                let submission = did.submissions;
                assert_eq!(m.status(), 2, "{mode:?}, submission {submission}");
                m.mem.put_u32(Gpa::new(STATUS), 0);
                did.submissions += 1;
            }
            reg::FSTS => {
                has_faulted = false;
                m.write(offset, len, value);
            }
            _ => m.write(offset, len, value),
        }
    }
    m.settle();
    assert!(m.out.messages.is_empty(), "{mode:?}: no interrupt was due");
    did
}

/// Replays `script` in every mode.
#[track_caller]
fn check(script: &str, submissions: usize, faults: usize) {
    for mode in MODES {
        let want = Did {
            submissions,
            invalidations: submissions as u64,
            faults,
        };
        assert_eq!(replay(mode, script), want, "{mode:?}");
    }
}

#[test]
fn a_stock_kernels_script_reads_the_same_in_every_mode() {
    // Two flushes at boot and one for each page that was unmapped.
    check(include_str!("data/linux-6.1-trap.txt"), 18, 0);
}

#[test]
fn a_lazy_kernels_script_reads_the_same_in_every_mode() {
    // Most pages have no flush of their own.
    check(include_str!("data/linux-6.1-lazy.txt"), 20, 0);
}

#[test]
fn four_vcpus_that_go_round_the_queue_five_times_read_the_same_in_every_mode() {
    check(include_str!("data/linux-6.1-smp.txt"), 646, 0);
}

#[test]
fn a_kernel_that_handles_faults_reads_the_same_records_in_every_mode() {
    check(include_str!("data/linux-6.1-faults.txt"), 22, 2);
}
