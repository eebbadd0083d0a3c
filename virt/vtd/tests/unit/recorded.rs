//! The register script of a real guest, as recorded in `trap`, replayed through all three front ends.
//!
//! Every recorded read must give the recorded value. Addresses that the guest chose (queue, root table) are
//! replaced by ours; the descriptors it submitted are not in the recording, so each submission is replayed as an
//! invalidation and the wait behind it, which is what stock Linux submits.

use crate::common::{DISK, Guest, MODES, Machine, Mode, QUEUE, ROOT, STATUS};
use crate::common::{cc_global, iotlb_global, iotlb_pages, wait_status};
use guest_mem::Gpa;
use vtd::spec::registers as reg;
use vtd::{AccessLen, Config};

const RECORDED: &str = include_str!("data/linux-6.1-trap.txt");

struct Access {
    is_write: bool,
    len: AccessLen,
    offset: u16,
    value: u64,
}

fn recorded() -> Vec<Access> {
    RECORDED
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let mut words = line.split(' ');
            let kind = words.next().expect("access");
            let number = |word: Option<&str>| {
                u64::from_str_radix(word.expect("a number"), 16).expect("hexadecimal")
            };
            Access {
                is_write: kind.starts_with('W'),
                len: if kind.ends_with('8') {
                    AccessLen::B8
                } else {
                    AccessLen::B4
                },
                offset: number(words.next()) as u16,
                value: number(words.next()),
            }
        })
        .collect()
}

fn replay(mode: Mode) -> usize {
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 2);
    let mut m = Machine::new(mode, Config::default(), guest.mem.clone());
    let mut submissions = 0;
    for Access {
        is_write,
        len,
        offset,
        value,
    } in recorded()
    {
        if !is_write {
            m.settle();
            assert_eq!(m.read(offset, len), value, "{mode:?}, read of {offset:#x}");
            continue;
        }
        match offset {
            reg::IQA => m.write(offset, len, QUEUE),
            reg::RTADDR => m.write(offset, len, ROOT),
            reg::IQT if value != 0 => {
                let invalidation = match submissions {
                    0 => cc_global(),
                    1 => iotlb_global(),
                    _ => iotlb_pages(1, 0xffff_f000, 0),
                };
                guest.put(QUEUE + value - 0x20, invalidation);
                guest.put(QUEUE + value - 0x10, wait_status(STATUS, 2));
                m.write(offset, len, value);
                m.settle();
                assert_eq!(m.status(), 2, "{mode:?}, submission {submissions}");
                m.mem.put_u32(Gpa::new(STATUS), 0);
                submissions += 1;
            }
            _ => m.write(offset, len, value),
        }
    }
    m.settle();
    assert!(m.out.messages.is_empty(), "{mode:?}: no interrupt was due");
    submissions
}

#[test]
fn a_stock_kernels_script_reads_the_same_in_every_mode() {
    for mode in MODES {
        // Two flushes at boot and one for each page that was unmapped.
        assert_eq!(replay(mode), 18, "{mode:?}");
    }
}
