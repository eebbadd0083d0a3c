//! Walks through tables made by hand, word by word.

use std::collections::HashMap;

use super::paging::Access::{Fetch, Read, Write};
use super::*;

/// Words at guest-physical addresses; all other words are absent.
struct Words(HashMap<u64, u64>);

impl Words {
    fn new(words: &[(u64, u64)]) -> Self {
        Self(words.iter().copied().collect())
    }
}

impl Memory for Words {
    fn word(&mut self, at: Gpa) -> Option<u64> {
        self.0.get(&at.raw()).copied()
    }

    fn bytes(&mut self, _at: Gpa, _into: &mut [u8]) -> Option<()> {
        panic!("a walk reads words")
    }
}

/// Returns the translation of a linear address by these tables.
fn walk(registers: &Registers, words: &[(u64, u64)], linear: u64, access: Access) -> Option<u64> {
    let paging = Paging::of(registers).expect("64-bit mode");
    let at = paging.translate(&mut Words::new(words), linear, access)?;
    Some(at.raw())
}

/// 0xffff_8880_1234_5678 is entry 0x111 of the PML4, 0 of the PDPT, 0x91 of the directory, 0x145 of
/// the table, byte 0x678.
const LINEAR: u64 = 0xffff_8880_1234_5678;
const PML4E: u64 = 0x1000 + 0x888;
const PDPTE: u64 = 0x2000;
const PDE: u64 = 0x3000 + 0x488;
const PTE: u64 = 0x4000 + 0xa28;

/// As Linux has them: XD, G, D, A, R/W, P in the entry that maps the page.
const FOUR_LEVELS: [(u64, u64); 4] = [
    (PML4E, 0x2063),
    (PDPTE, 0x3063),
    (PDE, 0x4063),
    (PTE, 0x8000_0000_0765_4163),
];

/// Returns the four entries, one of them changed.
fn with(at: u64, change: impl Fn(u64) -> u64) -> Vec<(u64, u64)> {
    let mut words = FOUR_LEVELS.to_vec();
    for (address, entry) in &mut words {
        if *address == at {
            *entry = change(*entry);
        }
    }
    words
}

/// Returns the four entries with U/S set in all.
fn users() -> Vec<(u64, u64)> {
    FOUR_LEVELS.map(|(at, entry)| (at, entry | 4)).to_vec()
}

#[test]
fn four_levels() {
    let words = &FOUR_LEVELS;
    assert_eq!(walk(&kernel(), words, LINEAR, Read), Some(0x0765_4678));
    assert_eq!(walk(&kernel(), words, LINEAR, Write), Some(0x0765_4678));
    // The PCID is no part of the address, nor are the bits of CR3 for tagged addresses.
    let registers = Registers {
        cr3: 0x6000_0000_0000_1abc,
        ..kernel()
    };
    assert_eq!(walk(&registers, words, LINEAR, Read), Some(0x0765_4678));
}

#[test]
fn five_levels() {
    let registers = Registers {
        cr3: 0x9000,
        cr4: 0x1020,
        ..kernel()
    };
    // 0xff11_2222_3333_4444: bits 56:48 are 0x111, 47:39 are 0x44, 38:30 are 0x88, 29:21 are 0x199,
    // 20:12 are 0x134.
    let words = [
        (0x9888, 0x1023),
        (0x1220, 0x2023),
        (0x2440, 0x3023),
        (0x3cc8, 0x4023),
        (0x49a0, 0x000f_ffff_ffff_f063),
    ];
    let linear = 0xff11_2222_3333_4444;
    let gpa = Some(0x000f_ffff_ffff_f444);
    assert_eq!(walk(&registers, &words, linear, Write), gpa);
    // Four levels do not reach that far.
    let four = Registers {
        cr4: 0x20,
        cr3: 0x1000,
        ..registers
    };
    assert_eq!(walk(&four, &words, linear, Write), None);
}

#[test]
fn pages_of_2_mib_and_1_gib() {
    let two = [
        (PML4E, 0x2063),
        (PDPTE, 0x3063),
        // PAT in bit 12 is no part of the address.
        (PDE, 0x8000_0000_4020_11e3),
    ];
    // Bits 20:0 of the linear address are 0x14_5678.
    assert_eq!(walk(&kernel(), &two, LINEAR, Write), Some(0x4034_5678));
    let one = [(PML4E, 0x2063), (PDPTE, 0x1_8000_00e3)];
    // Bits 29:0 are 0x1234_5678.
    assert_eq!(walk(&kernel(), &one, LINEAR, Write), Some(0x1_9234_5678));
    // Bits 20:13 and 29:13 are reserved.
    for bit in 13..=20 {
        let words = [two[0], two[1], (PDE, 0x4020_00e3 ^ 1 << bit)];
        assert_eq!(walk(&kernel(), &words, LINEAR, Read), None, "bit {bit}");
    }
    for bit in 13..=29 {
        let words = [one[0], (PDPTE, 0x1_8000_00e3 ^ 1 << bit)];
        assert_eq!(walk(&kernel(), &words, LINEAR, Read), None, "bit {bit}");
    }
}

#[test]
fn the_upper_tables_map_no_pages() {
    for access in [Read, Write, Fetch] {
        let words = [(PML4E, 0x80_0000_00e3)];
        assert_eq!(walk(&kernel(), &words, LINEAR, access), None);
        let five = Registers {
            cr4: 0x1020,
            ..kernel()
        };
        // Entry 0x1ff of the PML5.
        let words = [(0x1ff8, 0x1_0000_0000_00e3)];
        assert_eq!(walk(&five, &words, LINEAR, access), None);
    }
}

#[test]
fn bit_7_of_a_last_entry_is_a_memory_type() {
    let words = with(PTE, |entry| entry | 0x80);
    assert_eq!(walk(&kernel(), &words, LINEAR, Read), Some(0x0765_4678));
}

#[test]
fn an_absent_table_ends_a_walk() {
    for missing in 0..4 {
        let mut words = FOUR_LEVELS.to_vec();
        words.remove(missing);
        assert_eq!(walk(&kernel(), &words, LINEAR, Read), None, "{missing}");
    }
}

#[test]
fn every_entry_is_present_and_accessed() {
    for (at, _) in FOUR_LEVELS {
        for bit in [0x01, 0x20] {
            let words = with(at, |entry| entry & !bit);
            assert_eq!(walk(&kernel(), &words, LINEAR, Read), None);
            assert_eq!(walk(&kernel(), &words, LINEAR, Write), None);
        }
    }
}

#[test]
fn a_write_needs_permission_in_every_entry_and_dirty_in_the_last() {
    for (at, _) in FOUR_LEVELS {
        let words = with(at, |entry| entry & !0x02);
        assert_eq!(walk(&kernel(), &words, LINEAR, Write), None);
        assert!(walk(&kernel(), &words, LINEAR, Read).is_some());
        let unprotected = Registers {
            cr0: 0x8004_0033,
            ..kernel()
        };
        assert_eq!(walk(&unprotected, &words, LINEAR, Write), None);

        let words = with(at, |entry| entry & !0x40);
        let is_last = at == PTE;
        assert_eq!(walk(&kernel(), &words, LINEAR, Write).is_none(), is_last);
        assert!(walk(&kernel(), &words, LINEAR, Read).is_some());
    }
    let huge = [(PML4E, 0x2023), (PDPTE, 0x3023), (PDE, 0x4020_00a3)];
    assert_eq!(walk(&kernel(), &huge, LINEAR, Write), None);
    assert!(walk(&kernel(), &huge, LINEAR, Read).is_some());
}

#[test]
fn a_user_needs_permission_in_every_entry() {
    for access in [Read, Write] {
        assert!(walk(&user(), &users(), LINEAR, access).is_some());
        for level in 0..4 {
            let mut words = users();
            words[level].1 &= !4;
            assert_eq!(walk(&user(), &words, LINEAR, access), None);
            // A supervisor's page, then.
            assert!(walk(&kernel(), &words, LINEAR, access).is_some());
        }
    }
}

#[test]
fn a_supervisor_reaches_user_pages_if_smap_allows() {
    let lifted = Registers {
        rflags: 0x4_0002,
        ..kernel()
    };
    let without = Registers {
        cr4: 0x20,
        ..kernel()
    };
    for access in [Read, Write] {
        assert_eq!(walk(&kernel(), &users(), LINEAR, access), None);
        assert!(walk(&lifted, &users(), LINEAR, access).is_some());
        assert!(walk(&without, &users(), LINEAR, access).is_some());
    }
    // A user is not meant by it.
    assert!(walk(&user(), &users(), LINEAR, Write).is_some());
}

#[test]
fn code_is_fetched_from_pages_that_are_executable_and_of_the_same_mode() {
    assert_eq!(walk(&kernel(), &FOUR_LEVELS, LINEAR, Fetch), None);
    let executable = with(PTE, |entry| entry & !(1 << 63));
    assert_eq!(
        walk(&kernel(), &executable, LINEAR, Fetch),
        Some(0x0765_4678)
    );
    for (at, _) in FOUR_LEVELS {
        let mut words = executable.clone();
        words
            .iter_mut()
            .filter(|(address, _)| *address == at)
            .for_each(|(_, entry)| *entry |= 1 << 63);
        assert_eq!(walk(&kernel(), &words, LINEAR, Fetch), None);
    }
    let users: Vec<_> = executable
        .iter()
        .map(|(at, entry)| (*at, entry | 4))
        .collect();
    assert!(walk(&user(), &users, LINEAR, Fetch).is_some());
    for rflags in [0x2, 0x4_0002] {
        let registers = Registers { rflags, ..kernel() };
        assert_eq!(walk(&registers, &users, LINEAR, Fetch), None);
    }
}

#[test]
fn execute_disable_is_reserved_until_it_is_enabled() {
    let registers = Registers {
        efer: 0x501,
        ..kernel()
    };
    assert_eq!(walk(&registers, &FOUR_LEVELS, LINEAR, Read), None);
    let words = with(PTE, |entry| entry & !(1 << 63));
    assert!(walk(&registers, &words, LINEAR, Read).is_some());
}

#[test]
fn protection_keys_are_asked_for_user_pages() {
    // Key 5, in bits 62:59 of the last entry.
    let mut words = users();
    words[3].1 |= 5 << 59;
    let with_pkru = |pkru| Registers {
        cr4: 0x40_0020,
        pkru,
        ..user()
    };
    for access in [Read, Write] {
        assert_eq!(walk(&with_pkru(None), &words, LINEAR, access), None);
        assert!(walk(&with_pkru(Some(0)), &words, LINEAR, access).is_some());
        // All keys but 5; then 5's two rights.
        let others = !(3 << 10);
        assert!(walk(&with_pkru(Some(others)), &words, LINEAR, access).is_some());
        for right in [1 << 10, 2 << 10] {
            assert_eq!(walk(&with_pkru(Some(right)), &words, LINEAR, access), None);
            // A supervisor's accesses are restricted by them as well.
            let supervisor = Registers {
                cpl: 0,
                ..with_pkru(Some(right))
            };
            assert_eq!(walk(&supervisor, &words, LINEAR, access), None);
        }
    }
    // A supervisor's page has none.
    let supervisor = Registers {
        cpl: 0,
        ..with_pkru(None)
    };
    assert!(walk(&supervisor, &FOUR_LEVELS, LINEAR, Write).is_some());
    // Without CR4.PKE the bits are ignored.
    assert!(walk(&user(), &words, LINEAR, Write).is_some());
}

#[test]
fn addresses_that_are_not_canonical_are_not_translated() {
    // Entry 0 of everything: 0x0000 up to 0x0000_7fff_ffff_ffff, and from 0xffff_8000_0000_0000 on.
    let canonical = Paging::of(&kernel()).unwrap();
    for (linear, is) in [
        (0, true),
        (0x0000_7fff_ffff_ffff, true),
        (0x0000_8000_0000_0000, false),
        (0x8000_0000_0000_0000, false),
        (0xffff_7fff_ffff_ffff, false),
        (0xffff_8000_0000_0000, true),
        (0xffff_ffff_ffff_ffff, true),
    ] {
        assert_eq!(canonical.is_canonical(linear), is, "{linear:#x}");
    }
    let five = Paging::of(&Registers {
        cr4: 0x1020,
        ..kernel()
    })
    .unwrap();
    for (linear, is) in [
        (0x0000_8000_0000_0000, true),
        (0x00ff_ffff_ffff_ffff, true),
        (0x0100_0000_0000_0000, false),
        (0xfeff_ffff_ffff_ffff, false),
        (0xff00_0000_0000_0000, true),
    ] {
        assert_eq!(five.is_canonical(linear), is, "{linear:#x}");
    }
    // The tables would translate it.
    let linear = LINEAR & 0x0000_ffff_ffff_ffff;
    assert_eq!(walk(&kernel(), &FOUR_LEVELS, linear, Read), None);
}
