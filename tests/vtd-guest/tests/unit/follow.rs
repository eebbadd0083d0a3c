//! The search of a range for mappings, by one case for each kind of table. Random tables are in
//! `follow_model`.

use fake_mem::{ArrayMem, PagedMem, PendingMem};
use guest_mem::{
    Attachment, Budget, Found, Gpa, Iommu, Iova, Next, PAGE_SIZE, Perm, PhysMem, SourceId, Stop,
};
use vtd::spec::registers as reg;
use vtd::{AddressWidth, Config, LargePages, Unit};
use vtd_guest::*;

const LAST: u64 = u64::MAX;
const TWO_M: u64 = 1 << 21;
const ONE_G: u64 = 1 << 30;
const SNP: u64 = 1 << 11;

/// Iova, gpa, length, and permissions as the entry's bits.
type Piece = (u64, u64, u64, u64);

fn piece(found: Found) -> Piece {
    let permissions = u64::from(found.can_read) | u64::from(found.can_write) << 1;
    (found.iova.raw(), found.gpa.raw(), found.len, permissions)
}

fn next(unit: &Unit, mem: &impl PhysMem, from: u64, last: u64, budget: &mut Budget) -> Next {
    unit.next_mapping(mem, DISK, Iova::new(from), Iova::new(last), budget)
        .expect("nothing is absent")
}

/// All mappings of a range.
fn search(unit: &Unit, mem: &impl PhysMem, mut from: u64, last: u64) -> Vec<Piece> {
    let mut pieces = Vec::new();
    loop {
        match next(unit, mem, from, last, &mut Budget::unlimited()) {
            Next::None => return pieces,
            Next::Budget(_) => panic!("the budget has no limit"),
            Next::Found(found) => {
                pieces.push(piece(found));
                match found.iova.checked_add(found.len) {
                    Some(after) if after.raw() <= last => from = after.raw(),
                    _ => return pieces,
                }
            }
        }
        assert!(pieces.len() < 10_000, "it does not end");
    }
}

/// A guest with one device behind tables of 4 levels, and their top.
fn guest() -> (Guest, u64) {
    let mut guest = Guest::new();
    let top = guest.page();
    guest.context(DISK, top, 7, 2);
    (guest, top)
}

fn booted(guest: &Guest) -> Machine<ArrayMem> {
    booted_with(guest, Config::default())
}

fn booted_with(guest: &Guest, config: Config) -> Machine<ArrayMem> {
    let mut m = Machine::new(Mode::Trap, config, guest.mem.clone());
    m.boot();
    m
}

#[test]
fn attachment_is_what_the_context_entry_says() {
    let (guest, top) = guest();
    let m = booted(&guest);
    let attachment = |source| {
        m.unit
            .attachment(&m.mem, source)
            .expect("nothing is absent")
    };
    assert_eq!(attachment(DISK), Attachment::Domain(7));
    assert_eq!(attachment(NET), Attachment::Absent);
    assert_eq!(
        attachment(SourceId::new(9, 1, 0)),
        Attachment::Absent,
        "no root entry"
    );
    guest.raw_context(NET, 0x9, 2);
    assert_eq!(attachment(NET), Attachment::PassThrough);
    let malformed = [
        ("pass-through of less than the unit's width", 0x9, 1),
        ("57 bits", top | 1, 3),
        ("device TLB", top | 1 | 1 << 2, 2),
        ("reserved type", top | 1 | 3 << 2, 2),
        ("reserved bit", top | 1 | 1 << 4, 2),
        ("reserved bit above", top | 1, 2 | 1 << 24),
        ("table beyond the host address width", 1 << 50 | 1, 2),
        ("not present", top, 2),
    ];
    for (what, lo, hi) in malformed {
        guest.raw_context(NET, lo, hi);
        assert_eq!(attachment(NET), Attachment::Absent, "{what}");
        let found = m.unit.next_mapping(
            &m.mem,
            NET,
            Iova::new(0),
            Iova::new(LAST),
            &mut Budget::unlimited(),
        );
        assert_eq!(found, Ok(Next::None), "{what}");
    }
    let off = Unit::new(Config::default());
    assert_eq!(off.attachment(&m.mem, DISK), Ok(Attachment::Off));
    assert_eq!(search(&off, &m.mem, 0, LAST), []);
    guest.put(ROOT, u128::from(RAM | 1));
    assert_eq!(attachment(DISK), Attachment::Absent, "contexts outside RAM");
    assert_eq!(search(&m.unit, &m.mem, 0, LAST), []);
}

#[test]
fn pass_through_has_no_mappings() {
    let (guest, _) = guest();
    guest.raw_context(DISK, 0x9, 2);
    let m = booted(&guest);
    assert_eq!(search(&m.unit, &m.mem, 0, LAST), []);
}

#[test]
fn mapping_is_one_leaf_with_the_permissions_of_all_levels() {
    let (mut guest, top) = guest();
    guest.map(top, 4, 0x1000, 0x9000 | RW);
    guest.map(top, 4, 0x2000, 0xa000 | R);
    guest.map(top, 4, 0x4000, 0xc000 | W);
    guest.map_large(top, 4, TWO_M, 2, 0x40_0000 | RW);
    guest.map_large(top, 4, ONE_G, 3, ONE_G | RW);
    guest.map(top, 4, 0xffff_ffff_f000, 0xd000 | RW);
    // Only reads under this entry.
    let entry = Gpa::new(guest.entry(top, 4, 1 << 39, 4));
    guest.map(top, 4, 1 << 39, 0xe000 | RW);
    guest.map(top, 4, (1 << 39) + 0x1000, 0xf000 | W);
    guest.mem.put_u64(entry, guest.mem.get_u64(entry) & !W);
    let m = booted(&guest);
    let all = [
        (0x1000, 0x9000, 0x1000, 3),
        (0x2000, 0xa000, 0x1000, 1),
        (0x4000, 0xc000, 0x1000, 2),
        (TWO_M, 0x40_0000, TWO_M, 3),
        (ONE_G, ONE_G, ONE_G, 3),
        (1 << 39, 0xe000, 0x1000, 1),
        (0xffff_ffff_f000, 0xd000, 0x1000, 3),
    ];
    assert_eq!(search(&m.unit, &m.mem, 0, LAST), all);
    let clipped = search(&m.unit, &m.mem, 0x4800, ONE_G + TWO_M + 6);
    assert_eq!(
        clipped,
        [
            (0x4800, 0xc800, 0x800, 2),
            (TWO_M, 0x40_0000, TWO_M, 3),
            (ONE_G, ONE_G, TWO_M + 7, 3),
        ]
    );
    assert_eq!(
        search(&m.unit, &m.mem, 0x1fff, 0x1fff),
        [(0x1fff, 0x9fff, 1, 3)]
    );
    assert_eq!(search(&m.unit, &m.mem, 0x3000, 0x3fff), []);
    assert_eq!(search(&m.unit, &m.mem, 0x1000, 0xfff), [], "an empty range");
}

#[test]
fn search_leaves_no_trace_and_looks_past_the_caches() {
    let (mut guest, top) = guest();
    guest.map(top, 4, 0x1000, 0x9000 | RW);
    let mut m = booted(&guest);
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x9000, 0x1000);
    // Cached as it was; the tables have something else now.
    guest.map(top, 4, 0x1000, 0xa000 | RW);
    guest.map(top, 4, 0x2000, 0xb000 | RW);
    let stats = m.unit.stats().clone();
    let generation = m.unit.generation(DISK);
    assert_eq!(
        search(&m.unit, &m.mem, 0, LAST),
        [(0x1000, 0xa000, 0x1000, 3), (0x2000, 0xb000, 0x1000, 3)]
    );
    assert_eq!(m.unit.attachment(&m.mem, NET), Ok(Attachment::Absent));
    assert_eq!(*m.unit.stats(), stats);
    assert_eq!(m.unit.generation(DISK), generation);
    assert!(!m.unit.needs_step());
    assert_eq!(m.read4(reg::FSTS), 0, "no fault");
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x9000, 0x1000);
    // A page that only the search has seen misses.
    assert_run(m.translate(DISK, 0x2000, Perm::Read), 0xb000, 0x1000);
    assert_eq!(m.unit.stats().iotlb_misses, stats.iotlb_misses + 1);
}

#[test]
fn hole_of_a_gibibyte_takes_few_reads() {
    let pages = 1 << 18;
    // Where it begins, and the highest entries that are there over it: none, those of level 3, of
    // level 2.
    for from in [0, ONE_G, 5 * ONE_G + 0x12_3000] {
        for level in 2..=4 {
            let (mut guest, top) = guest();
            let last = from + pages * PAGE_SIZE - 1;
            for iova in [from, last] {
                guest.entry(top, 4, iova, level);
            }
            if from != 0 {
                guest.map(top, 4, from - PAGE_SIZE, 0x9000 | RW);
            }
            guest.map(top, 4, last + 1, 0x9000 | RW);
            let m = booted(&guest);
            let mem = PendingMem::never(m.mem.clone());
            let mut budget = Budget::unlimited();
            assert_eq!(next(&m.unit, &mem, from, last, &mut budget), Next::None);
            let reads = mem.accesses();
            println!("from {from:#x}, tables of level {level}: {reads} reads");
            assert!(reads < 2_000, "{reads} reads");
            // Two entries of 16 bytes are two loads each.
            assert_eq!(budget.spent(), (reads - 2) * Budget::ENTRY);
        }
    }
}

#[test]
fn spent_budget_reads_nothing_and_a_small_one_moves_on() {
    let (mut guest, top) = guest();
    guest.map(top, 4, 0x7000, 0x9000 | RW);
    let m = booted(&guest);
    let mem = PendingMem::never(m.mem.clone());
    let spent = &mut Budget::new(0);
    assert_eq!(
        next(&m.unit, &mem, 5, LAST, spent),
        Next::Budget(Iova::new(5))
    );
    assert_eq!(mem.accesses(), 0);
    let mut from = 5;
    for page in 1..=7 {
        let answer = next(&m.unit, &mem, from, LAST, &mut Budget::new(1));
        assert_eq!(answer, Next::Budget(Iova::new(page * PAGE_SIZE)));
        from = page * PAGE_SIZE;
    }
    let Next::Found(found) = next(&m.unit, &mem, from, LAST, &mut Budget::new(1)) else {
        panic!("it is mapped");
    };
    assert_eq!(piece(found), (0x7000, 0x9000, 0x1000, 3));
    // At most the context and one way down past the budget.
    let budget = &mut Budget::new(1);
    next(&m.unit, &mem, from, LAST, budget);
    assert!(budget.spent() <= 6 * Budget::ENTRY);
}

#[test]
fn interrupt_range_is_a_hole_on_either_side() {
    const START: u64 = 0xfee0_0000;
    const END: u64 = 0xfef0_0000;
    let (mut guest, top) = guest();
    // By itself, by a page of 2 MiB, and by one of 1 GiB.
    guest.map_large(top, 4, START, 2, 0x20_0000 | RW);
    guest.map(top, 4, 1 << 39, START | RW);
    guest.map(top, 4, (1 << 39) + 0x1000, 0xfeef_f000 | RW);
    guest.map(top, 4, (1 << 39) + 0x2000, END | RW);
    guest.map_large(top, 4, 2 << 39, 3, (3 * ONE_G) | RW);
    let m = booted(&guest);
    assert_eq!(
        search(&m.unit, &m.mem, 0, LAST),
        [
            (END, 0x30_0000, 0x10_0000, 3),
            ((1 << 39) + 0x2000, END, 0x1000, 3),
            (2 << 39, 3 * ONE_G, START - 3 * ONE_G, 3),
            ((2 << 39) + END - 3 * ONE_G, END, 4 * ONE_G - END, 3),
        ]
    );
    // A part of a page that is nothing else.
    assert_eq!(search(&m.unit, &m.mem, START + 1, END - 1), []);
    assert_eq!(
        search(&m.unit, &m.mem, END - 1, END),
        [(END, 0x30_0000, 1, 3)]
    );

    // A page that has it at its own addresses, with and without having it at those it goes to.
    for gpa in [3 * ONE_G, 7 * ONE_G] {
        guest.map_large(top, 4, 3 * ONE_G, 3, gpa | RW);
        let (start, end) = (START - 3 * ONE_G, END - 3 * ONE_G);
        assert_eq!(
            search(&m.unit, &m.mem, 3 * ONE_G, 4 * ONE_G - 1),
            [(3 * ONE_G, gpa, start, 3), (END, gpa + end, ONE_G - end, 3)]
        );
    }
}

#[test]
fn malformed_entries_are_holes() {
    let malformed = [
        ("table with SNP", 3, R | SNP),
        ("PS at level 4", 4, RW | PS),
        ("table beyond the host address width", 3, RW | 1 << 48),
        ("table outside RAM", 4, RW | RAM),
        ("table outside RAM, level 2", 2, RW | RAM),
        ("TM in a leaf", 1, RW | 1 << 62),
        ("TM in a table", 2, RW | 1 << 62),
        ("misaligned 2 MiB", 2, RW | PS | 0x1000),
        ("misaligned 1 GiB", 3, RW | PS | TWO_M),
        ("page beyond the host address width", 1, RW | 1 << 51),
        ("no permission", 1, 0x9000),
    ];
    for (what, level, pte) in malformed {
        let (mut guest, top) = guest();
        let at = guest.entry(top, 4, 0x4000_0000, level);
        guest.mem.put_u64(Gpa::new(at), pte);
        guest.map(top, 4, 3 << 39, 0x9000 | RW);
        let mut m = booted(&guest);
        let all = search(&m.unit, &m.mem, 0, LAST);
        assert_eq!(all, [(3 << 39, 0x9000, 0x1000, 3)], "{what}");
        assert!(
            m.translate(DISK, 0x4000_0000, Perm::Read).is_err(),
            "{what}"
        );
    }
}

#[test]
fn tables_out_of_ram_are_not_read_entry_by_entry() {
    let (guest, top) = guest();
    for index in 0..512 {
        guest.mem.put_u64(Gpa::new(top + index * 8), RAM | RW);
    }
    let m = booted(&guest);
    let mem = PendingMem::never(m.mem.clone());
    let answer = next(&m.unit, &mem, 0, LAST, &mut Budget::unlimited());
    assert_eq!(answer, Next::None);
    assert!(mem.accesses() < 1_100, "{} reads", mem.accesses());
    guest.context(DISK, RAM, 7, 2);
    let answer = next(&m.unit, &mem, 0, LAST, &mut Budget::unlimited());
    assert_eq!(answer, Next::None);
}

/// Tables that a guest may build to keep a search busy: each slice moves on, and is bounded.
#[test]
fn hostile_tables_neither_stop_nor_hold_a_search() {
    // A table that is its own, in each of its entries or in one.
    for entries in [vec![0x1ff], vec![0], (0..512).collect()] {
        let (guest, top) = guest();
        for index in &entries {
            guest.mem.put_u64(Gpa::new(top + index * 8), top | RW);
        }
        let m = booted(&guest);
        let first: u64 = (0..4).map(|level| entries[0] << (12 + 9 * level)).sum();
        let budget = &mut Budget::unlimited();
        let Next::Found(found) = next(&m.unit, &m.mem, 0, LAST, budget) else {
            panic!("an entry of level 1 is a page");
        };
        assert_eq!(piece(found), (first, top, 0x1000, 3));
        let end = first + 0x1000;
        let more = next(&m.unit, &m.mem, end, LAST, &mut Budget::unlimited());
        assert_eq!(more == Next::None, entries.len() == 1);
    }
    // All upper levels are there, and the one table of pages that they share is empty.
    let (mut guest, top) = guest();
    let tables = [top, guest.page(), guest.page(), guest.page()];
    for pair in tables.windows(2) {
        for index in 0..512 {
            let entry = Gpa::new(pair[0] + index * 8);
            guest.mem.put_u64(entry, pair[1] | RW);
        }
    }
    let m = booted(&guest);
    let mut from = 0;
    for _ in 0..1_000 {
        let budget = &mut Budget::new(100 * Budget::ENTRY);
        match next(&m.unit, &m.mem, from, LAST, budget) {
            Next::Budget(at) => {
                assert!(at.raw() >= from + 80 * PAGE_SIZE, "too slow");
                from = at.raw();
            }
            other => panic!("{other:?}"),
        }
        assert!(budget.spent() <= 107 * Budget::ENTRY);
    }
    // To the very end of what the context can address.
    let from = (1 << 48) - (1 << 20);
    let answer = next(&m.unit, &m.mem, from, LAST, &mut Budget::unlimited());
    assert_eq!(answer, Next::None);
}

#[test]
fn range_past_the_width_of_the_context_is_clipped() {
    for (levels, aw, width) in [(3, 1, 39), (4, 2, 48)] {
        let mut guest = Guest::new();
        let top = guest.page();
        guest.context(DISK, top, 1, aw);
        let end = 1 << width;
        guest.map(top, levels, end - PAGE_SIZE, 0x9000 | RW);
        let m = booted(&guest);
        let want = [(end - PAGE_SIZE, 0x9000, PAGE_SIZE, 3)];
        for last in [end - 1, end, LAST] {
            assert_eq!(search(&m.unit, &m.mem, 0, last), want);
        }
        for from in [end, LAST] {
            assert_eq!(search(&m.unit, &m.mem, from, LAST), []);
        }
    }
}

#[test]
fn absent_table_is_asked_for_once_the_search_stands_at_it() {
    let (mut guest, top) = guest();
    guest.map(top, 4, 0x3000, 0x9000 | RW);
    guest.map(top, 4, TWO_M + 0x3000, 0xa000 | RW);
    let tables = [0x3000, TWO_M + 0x3000].map(|iova| guest.entry(top, 4, iova, 1));
    let m = booted(&guest);
    let mem = PagedMem::new(m.mem.clone());
    mem.evict(Gpa::new(tables[1]), 8);
    let ask = |from| {
        let (from, last) = (Iova::new(from), Iova::new(LAST));
        m.unit
            .next_mapping(&mem, DISK, from, last, &mut Budget::unlimited())
    };
    // Nothing is mapped in front of the absent table, and that is not found out again.
    assert_eq!(ask(0x4000), Ok(Next::Budget(Iova::new(TWO_M))));
    let Err(Stop::Pending(ticket)) = ask(TWO_M) else {
        panic!("it is absent");
    };
    mem.deliver(ticket);
    let Ok(Next::Found(found)) = ask(TWO_M) else {
        panic!("it is there");
    };
    assert_eq!(piece(found), (TWO_M + 0x3000, 0xa000, 0x1000, 3));

    // One that cannot be brought in maps nothing.
    mem.evict(Gpa::new(tables[0]), 8);
    let Err(Stop::Pending(ticket)) = ask(0) else {
        panic!("it is absent");
    };
    mem.fail(ticket);
    let Ok(Next::Found(found)) = ask(0) else {
        panic!("the other one is there");
    };
    assert_eq!(piece(found), (TWO_M + 0x3000, 0xa000, 0x1000, 3));
}

#[test]
fn each_absent_page_on_the_way_is_pending() {
    let (mut guest, top) = guest();
    guest.map(top, 4, 0, 0x9000 | RW);
    let mut pages = vec![ROOT, CONTEXTS];
    for level in 1..=4 {
        pages.push(guest.entry(top, 4, 0, level) & !(PAGE_SIZE - 1));
    }
    let m = booted(&guest);
    let mem = PagedMem::new(m.mem.clone());
    for page in &pages {
        mem.evict(Gpa::new(*page), PAGE_SIZE);
    }
    for _ in &pages {
        let (from, last) = (Iova::new(0), Iova::new(LAST));
        let budget = &mut Budget::unlimited();
        let answer = m.unit.next_mapping(&mem, DISK, from, last, budget);
        let Err(Stop::Pending(ticket)) = answer else {
            panic!("a page is absent: {answer:?}");
        };
        mem.deliver(ticket);
    }
    assert_eq!(search(&m.unit, &mem, 0, LAST), [(0, 0x9000, 0x1000, 3)]);
    mem.evict(Gpa::new(CONTEXTS), PAGE_SIZE);
    let attachment = m.unit.attachment(&mem, DISK);
    assert!(matches!(attachment, Err(Stop::Pending(_))));
}

#[test]
fn large_pages_and_snooping_that_the_host_lacks_are_reserved() {
    let config = |large_pages, snoop_control| Config {
        width: AddressWidth::Bits48,
        large_pages,
        snoop_control,
        ..Config::default()
    };
    // Levels whose leaves are legal.
    for (large_pages, largest) in [
        (LargePages::None, 1),
        (LargePages::TwoM, 2),
        (LargePages::OneG, 3),
    ] {
        for snoop_control in [false, true] {
            for level in 1..=3 {
                for snp in [0, SNP] {
                    let (mut guest, top) = guest();
                    let ps = if level == 1 { 0 } else { PS };
                    let at = guest.entry(top, 4, ONE_G, level);
                    guest.mem.put_u64(Gpa::new(at), ONE_G | RW | ps | snp);
                    let config = config(large_pages, snoop_control);
                    let what = format!("{config:?}, level {level}, SNP {snp:#x}");
                    let mut m = booted_with(&guest, config);
                    let is_legal = level <= largest && (snoop_control || snp == 0);
                    let found = search(&m.unit, &m.mem, 0, LAST);
                    assert_eq!(found.len(), usize::from(is_legal), "{what}");
                    let answer = m.translate(DISK, ONE_G, Perm::Read);
                    assert_eq!(answer.is_ok(), is_legal, "{what}");
                    if !is_legal {
                        // Non-zero reserved field in a second-level entry.
                        assert_record(&mut m, 0, DISK, ONE_G, 0xc, Perm::Read);
                    }
                }
            }
        }
    }
}
