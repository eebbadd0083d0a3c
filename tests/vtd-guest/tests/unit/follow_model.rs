//! The search of a range for mappings against models, over random tables: of any shape, shared,
//! cyclic, malformed.
//!
//! * Page by page: what the walk of a unit of its own says of each page. However the search is
//!   sliced, and whichever tables are absent at first, it says the same.
//! * Tables that change under a search: what it says of each page follows from values that it has
//!   read there.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use fake_mem::{ArrayMem, PagedMem};
use guest_mem::{
    Access, Budget, Found, Gpa, Hva, Intent, Iommu, Iova, KeepAlive, Next, PAGE_SIZE, Perm,
    PhysMem, Stop,
};
use proptest::collection::vec;
use proptest::prelude::*;
use vtd::{Config, LargePages, Unit};
use vtd_guest::*;

const TABLES: usize = 8;
/// Indices that entries and searches share, so that they meet. 503 is the interrupt range's in
/// level 2, under 3 in level 3.
const INDICES: [u64; 7] = [0, 1, 2, 3, 503, 510, 511];
/// Pages that a search may span: more than two tables of level 1.
const SPAN: u64 = 1_300;

#[derive(Clone, Debug)]
enum Value {
    Absent,
    Table(usize, u64),
    Page(u64, u64),
    Large(u32, u64, u64),
    /// A page, with this bit.
    Odd(u32, u64),
    OutsideRam(u64),
    InterruptRange(u64),
}

#[derive(Clone, Debug)]
struct Change {
    table: usize,
    /// `None`: all of them.
    index: Option<u64>,
    value: Value,
}

#[derive(Clone, Debug)]
struct World {
    config: Config,
    is_wide: bool,
    changes: Vec<Change>,
    /// Index at each level where the search begins, from level 4, and how much in front of that.
    base: [u64; 4],
    /// Entries on the way there, from the top as far as they lead to a table.
    path: [Value; 3],
    before: u64,
    len: u64,
}

fn value() -> impl Strategy<Value = Value> {
    let permissions = prop_oneof![3 => Just(RW), 1 => 0..4u64];
    prop_oneof![
        3 => Just(Value::Absent),
        10 => (0..TABLES, permissions.clone()).prop_map(|(t, p)| Value::Table(t, p)),
        6 => (0..64u64, permissions.clone()).prop_map(|(n, p)| Value::Page(n, p)),
        4 => (2..4u32, 0..4u64, permissions.clone()).prop_map(|(l, n, p)| Value::Large(l, n, p)),
        2 => (prop_oneof![Just(7), Just(11), Just(48), Just(51), Just(62)], permissions.clone())
            .prop_map(|(bit, p)| Value::Odd(bit, p)),
        1 => permissions.clone().prop_map(Value::OutsideRam),
        1 => permissions.prop_map(Value::InterruptRange),
    ]
}

fn index() -> impl Strategy<Value = u64> {
    prop_oneof![8 => prop::sample::select(INDICES.to_vec()), 1 => 0..512u64]
}

fn change() -> impl Strategy<Value = Change> {
    let index = prop_oneof![8 => index().prop_map(Some), 1 => Just(None)];
    let change = (0..TABLES, index, value());
    change.prop_map(|(table, index, value)| Change {
        table,
        index,
        value,
    })
}

fn world() -> impl Strategy<Value = World> {
    let large = [LargePages::None, LargePages::TwoM, LargePages::OneG];
    let config = (prop::sample::select(large.to_vec()), any::<bool>()).prop_map(
        |(large_pages, snoop_control)| Config {
            large_pages,
            snoop_control,
            ..Config::default()
        },
    );
    let base = prop_oneof![
        4 => [index(), index(), index(), index()],
        1 => Just([0, 3, 503, 0]),
    ];
    let step = || {
        let permissions = prop_oneof![6 => Just(RW), 1 => 0..4u64];
        let table = (0..TABLES, permissions).prop_map(|(t, p)| Value::Table(t, p));
        let large = (2..4u32, 0..4u64).prop_map(|(l, n)| Value::Large(l, n, RW));
        prop_oneof![10 => table, 1 => large, 1 => value()]
    };
    let path = [step(), step(), step()];
    let before = prop_oneof![Just(0), 0..600 * PAGE_SIZE];
    let len = prop_oneof![1 => 1..3 * PAGE_SIZE, 3 => 1..SPAN * PAGE_SIZE];
    let changes = vec(change(), 0..150);
    let tables = (any::<bool>(), changes, path);
    (config, tables, base, before, len).prop_map(
        |(config, (is_wide, changes, path), mut base, before, len)| {
            // Rarely past the width of 39 bits.
            if !is_wide && base[0] != 511 {
                base[0] = 0;
            }
            World {
                config,
                is_wide,
                changes,
                base,
                path,
                before,
                len,
            }
        },
    )
}

/// The guest's tables: the first is the top.
struct Tables {
    guest: Guest,
    pages: [u64; TABLES],
    levels: u32,
}

impl Tables {
    fn new(world: &World) -> Self {
        let mut guest = Guest::new();
        let pages = [(); TABLES].map(|()| guest.page());
        let (levels, aw): (usize, u64) = if world.is_wide { (4, 2) } else { (3, 1) };
        guest.context(DISK, pages[0], 1, aw);
        let tables = Self {
            guest,
            pages,
            levels: levels as u32,
        };
        for change in &world.changes {
            for (at, value) in tables.stores(change) {
                tables.guest.mem.put_u64(Gpa::new(at), value);
            }
        }
        let mut table = 0;
        let way = world.base.iter().skip(4 - levels).take(levels - 1);
        for (index, value) in way.zip(&world.path) {
            let at = Gpa::new(tables.pages[table] + index * 8);
            tables.guest.mem.put_u64(at, tables.pte(value, *index));
            match value {
                Value::Table(next, _) => table = *next,
                _ => break,
            }
        }
        tables
    }

    fn pte(&self, value: &Value, index: u64) -> u64 {
        match *value {
            Value::Absent => 0,
            Value::Table(table, permissions) => self.pages[table] | permissions,
            Value::Page(n, permissions) => (0x80_0000 + (n + index) * PAGE_SIZE) | permissions,
            // Those of a table that is filled lead to different places, one of them to the
            // interrupt range.
            Value::Large(2, n, permissions) => ((0x7f6 + n + index) << 21) | permissions | PS,
            Value::Large(_, n, permissions) => ((n + index) << 30) | permissions | PS,
            Value::Odd(bit, permissions) => 0x80_0000 | permissions | 1 << bit,
            Value::OutsideRam(permissions) => 1 << 40 | permissions,
            Value::InterruptRange(permissions) => 0xfee0_0000 | permissions,
        }
    }

    fn stores(&self, change: &Change) -> Vec<(u64, u64)> {
        let indices = match change.index {
            Some(index) => index..index + 1,
            None => 0..512,
        };
        let store = |index| {
            let at = self.pages[change.table] + index * 8;
            (at, self.pte(&change.value, index))
        };
        indices.map(store).collect()
    }

    fn unit(&self, world: &World) -> Unit {
        let mut m = Machine::new(Mode::Trap, world.config.clone(), self.guest.mem.clone());
        m.boot();
        m.unit
    }
}

impl World {
    fn range(&self) -> (u64, u64) {
        let base = self.base.iter().fold(0, |base, index| base << 9 | index) << 12;
        let from = base.saturating_sub(self.before);
        (from, from + self.len - 1)
    }
}

fn search(
    unit: &Unit,
    mem: &impl PhysMem,
    (from, last): (u64, u64),
    budget: &mut Budget,
) -> Access<Next> {
    unit.next_mapping(mem, DISK, Iova::new(from), Iova::new(last), budget)
}

/// Returns the address at which to go on after a mapping.
fn after(found: &Found, last: u64) -> Option<u64> {
    let after = found.iova.checked_add(found.len)?;
    Some(after.raw()).filter(|after| *after <= last)
}

/// All mappings of a range, by searches with these budgets in turn; `between` is called when one
/// has got on, `pending` when one has not.
fn collect(
    unit: &Unit,
    mem: &impl PhysMem,
    (mut from, last): (u64, u64),
    budgets: &[u64],
    mut between: impl FnMut(),
    mut pending: impl FnMut(Stop),
) -> Vec<Found> {
    let mut all = Vec::new();
    for budget in budgets.iter().cycle().take(10_000) {
        let mut budget = Budget::new(*budget);
        let answer = search(unit, mem, (from, last), &mut budget);
        match answer {
            Ok(Next::None) => return all,
            Ok(Next::Found(found)) => {
                all.push(found);
                match after(&found, last) {
                    Some(after) => from = after,
                    None => return all,
                }
            }
            Ok(Next::Budget(at)) => {
                assert!(from < at.raw() && at.raw() <= last, "no progress");
                from = at.raw();
            }
            Err(stop) => {
                pending(stop);
                continue;
            }
        }
        between();
    }
    panic!("it does not end");
}

/// Target of each page of a range, by the walk.
fn page_by_page(
    unit: &mut Unit,
    mem: &ArrayMem,
    (from, last): (u64, u64),
) -> BTreeMap<u64, (u64, bool, bool)> {
    let mut pages = BTreeMap::new();
    for number in from / PAGE_SIZE..=last / PAGE_SIZE {
        let iova = Iova::new(number * PAGE_SIZE);
        let [read, write] = [Perm::Read, Perm::Write].map(|perm| {
            let run = unit.translate(mem, DISK, iova, perm);
            run.ok().map(|run| run.gpa.raw())
        });
        if let Some(gpa) = read.or(write) {
            pages.insert(iova.raw(), (gpa, read.is_some(), write.is_some()));
        }
    }
    pages
}

/// The same of what was found. Checks that it lies in the range, in order, and is no more than a
/// leaf.
fn pages_of(all: &[Found], (from, last): (u64, u64)) -> BTreeMap<u64, (u64, bool, bool)> {
    let mut pages = BTreeMap::new();
    let mut at = from;
    for found in all {
        let (iova, gpa, len) = (found.iova.raw(), found.gpa.raw(), found.len);
        assert!(
            len > 0 && at <= iova && iova + (len - 1) <= last,
            "{found:?}"
        );
        assert!(found.can_read || found.can_write, "{found:?}");
        at = iova + len;
        // Whole pages, but for the ends of the range.
        assert!(iova == from || iova % PAGE_SIZE == 0, "{found:?}");
        assert!(at - 1 == last || at % PAGE_SIZE == 0, "{found:?}");
        assert_eq!(iova % PAGE_SIZE, gpa % PAGE_SIZE, "{found:?}");
        for number in iova / PAGE_SIZE..=(at - 1) / PAGE_SIZE {
            let page = number * PAGE_SIZE;
            let to = gpa.wrapping_add(page.wrapping_sub(iova));
            pages.insert(page, (to, found.can_read, found.can_write));
        }
    }
    pages
}

/// Memory that logs each load, and whose tables change at some of them.
struct ChangingMem {
    mem: ArrayMem,
    state: RefCell<Changing>,
}

#[derive(Default)]
struct Changing {
    loads: usize,
    /// Values that were read, by address.
    read: BTreeMap<u64, BTreeSet<u64>>,
    /// Loads since the stores before, and what is stored in front of that load; the next one last.
    stores: Vec<(usize, Vec<(u64, u64)>)>,
}

impl PhysMem for ChangingMem {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        let mut state = self.state.borrow_mut();
        if state.stores.last().is_some_and(|due| due.0 <= state.loads) {
            state.loads = 0;
            for (at, value) in state.stores.pop().expect("there is one").1 {
                self.mem.put_u64(Gpa::new(at), value);
            }
        }
        state.loads += 1;
        let value = self.mem.read_u64(gpa)?;
        state.read.entry(gpa.raw()).or_default().insert(value);
        Ok(value)
    }
    fn store_u32_release(&self, _gpa: Gpa, _value: u32) -> Access<()> {
        unreachable!("a search stores nothing")
    }
    fn read(&self, _gpa: Gpa, _buf: &mut [u8]) -> Access<()> {
        unreachable!("a search reads entries only")
    }
    fn write(&self, _gpa: Gpa, _buf: &[u8]) -> Access<()> {
        unreachable!("a search stores nothing")
    }
    fn host(&self, _gpa: Gpa, _len: u64, _intent: Intent) -> Access<Hva> {
        unreachable!("a search keeps no address")
    }
    fn keep_alive(&self) -> KeepAlive {
        self.mem.keep_alive()
    }
}

/// State of a page that follows from some of the values read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Hole,
    Page(u64, u64),
}

/// A plain walk over values instead of memory, with no code of the engine: every outcome for the
/// page `iova`.
fn outcomes(
    config: &Config,
    read: &BTreeMap<u64, BTreeSet<u64>>,
    iova: u64,
    (table, level, above): (u64, u32, u64),
    found: &mut BTreeSet<Outcome>,
) {
    if table >= RAM {
        found.insert(Outcome::Hole);
        return;
    }
    let shift = 12 + 9 * (level - 1);
    let at = table + (iova >> shift) % 512 * 8;
    for pte in read.get(&at).into_iter().flatten() {
        let permissions = above & pte & 3;
        let address = pte & 0x000f_ffff_ffff_f000;
        let is_leaf = level == 1 || (level < 4 && pte & PS != 0);
        let largest = 1 + config.large_pages as u32;
        let reserved = address >> 48 != 0
            || pte >> 62 & 1 != 0
            || (pte & 1 << 11 != 0 && !(is_leaf && config.snoop_control))
            || (level > 1 && pte & PS != 0 && level > largest)
            || (is_leaf && address % (1 << shift) != 0);
        if permissions == 0 || reserved {
            found.insert(Outcome::Hole);
        } else if is_leaf {
            let gpa = address + iova % (1 << shift);
            let is_message = [iova, gpa].iter().any(|page| page >> 20 == 0xfee);
            found.insert(match is_message {
                true => Outcome::Hole,
                false => Outcome::Page(gpa, permissions),
            });
        } else {
            let below = (address, level - 1, permissions);
            outcomes(config, read, iova, below, found);
        }
    }
}

/// Checks what one search has said of each page against what it has read.
fn check_against_reads(
    tables: &Tables,
    config: &Config,
    read: &BTreeMap<u64, BTreeSet<u64>>,
    (from, last): (u64, u64),
    answer: &Next,
) {
    let (holes_end, found) = match answer {
        Next::None => (last, None),
        Next::Budget(at) => (at.raw() - 1, None),
        Next::Found(found) => (found.iova.raw().wrapping_sub(1), Some(*found)),
    };
    let possible = |iova: u64| {
        let mut outcomes_here = BTreeSet::new();
        let width = 12 + 9 * tables.levels;
        if iova >> width != 0 {
            return [Outcome::Hole].into();
        }
        let top = (tables.pages[0], tables.levels, 3);
        outcomes(config, read, iova, top, &mut outcomes_here);
        outcomes_here
    };
    let is_hole_first = found.is_none_or(|found| found.iova.raw() > from);
    if is_hole_first {
        for number in from / PAGE_SIZE..=holes_end / PAGE_SIZE {
            let page = number * PAGE_SIZE;
            let possible = possible(page);
            assert!(possible.contains(&Outcome::Hole), "{page:#x}: {possible:?}");
        }
    }
    for (page, (gpa, can_read, can_write)) in pages_of(found.as_slice(), (from, last)) {
        let permissions = u64::from(can_read) | u64::from(can_write) << 1;
        let possible = possible(page);
        let said = Outcome::Page(gpa, permissions);
        assert!(
            possible.contains(&said),
            "{page:#x}: {said:?}, {possible:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn sliced_search_says_what_walks_say_page_by_page(
        world in world(),
        budgets in vec(1..200 * Budget::ENTRY, 1..20),
    ) {
        let tables = Tables::new(&world);
        let unit = tables.unit(&world);
        let (mem, range) = (&tables.guest.mem, world.range());
        let whole = collect(&unit, mem, range, &[u64::MAX], || {}, |_| unreachable!());
        let walked = page_by_page(&mut tables.unit(&world), mem, range);
        prop_assert_eq!(pages_of(&whole, range), walked);
        let sliced = collect(&unit, mem, range, &budgets, || {}, |_| unreachable!());
        prop_assert_eq!(sliced, whole);
    }

    /// The first mappings of all that there is, by the pages at both ends of them and of the holes
    /// between.
    #[test]
    fn search_of_everything_skips_holes_only(world in world()) {
        let tables = Tables::new(&world);
        let unit = tables.unit(&world);
        let mem = &tables.guest.mem;
        let mut walked = tables.unit(&world);
        let mut page = |iova: u64| {
            let page = iova & !(PAGE_SIZE - 1);
            page_by_page(&mut walked, mem, (page, page)).remove(&page)
        };
        let mut at = 0;
        // A few tables that lead to each other are up to 2^36 entries.
        let budget = &mut Budget::new(20_000 * Budget::ENTRY);
        for _ in 0..300 {
            let answer = search(&unit, mem, (at, u64::MAX), budget).expect("nothing is absent");
            let hole_last = match answer {
                Next::None => (1 << 48) - 1,
                Next::Budget(at) => at.raw() - 1,
                Next::Found(found) => found.iova.raw().wrapping_sub(1),
            };
            if hole_last.wrapping_add(1) > at {
                for iova in [at, at + (hole_last - at) / 2, hole_last] {
                    prop_assert_eq!(page(iova), None, "{:#x}, {:?}", iova, answer);
                }
            }
            let Next::Found(found) = answer else {
                break;
            };
            for offset in [0, found.len - PAGE_SIZE] {
                let to = (found.gpa.raw() + offset, found.can_read, found.can_write);
                prop_assert_eq!(page(found.iova.raw() + offset), Some(to), "{:?}", found);
            }
            at = found.iova.raw() + found.len;
        }
    }

    #[test]
    fn absent_tables_change_no_result(
        world in world(),
        budgets in vec(1..200 * Budget::ENTRY, 1..20),
        evictions in vec(0..TABLES + 2, 1..20),
    ) {
        let tables = Tables::new(&world);
        let unit = tables.unit(&world);
        let range = world.range();
        let whole = collect(&unit, &tables.guest.mem, range, &[u64::MAX], || {}, |_| unreachable!());
        let mem = PagedMem::new(tables.guest.mem.clone());
        let pages = [ROOT, CONTEXTS].into_iter().chain(tables.pages);
        let pages: Vec<u64> = pages.collect();
        for page in &pages {
            mem.evict(Gpa::new(*page), PAGE_SIZE);
        }
        // What was brought in goes again as soon as a search has got on.
        let mut evictions = evictions.iter().cycle();
        let between = || {
            let page = pages[*evictions.next().expect("a cycle")];
            mem.evict(Gpa::new(page), PAGE_SIZE);
        };
        let mut waits = 0;
        let pending = |stop| match stop {
            Stop::Pending(ticket) => {
                waits += 1;
                mem.deliver(ticket);
            }
            Stop::Fault(fault) => panic!("{fault:?}"),
        };
        let found = collect(&unit, &mem, range, &budgets, between, pending);
        prop_assert_eq!(found, whole);
        prop_assert!(waits > 0);
    }

    #[test]
    fn search_of_tables_that_change_says_what_it_has_read(
        world in world(),
        budgets in vec(1..400 * Budget::ENTRY, 1..20),
        stores in vec((1..40usize, change()), 1..60),
    ) {
        let tables = Tables::new(&world);
        let unit = tables.unit(&world);
        let stores = stores.iter().map(|(loads, change)| (*loads, tables.stores(change)));
        let mem = ChangingMem {
            mem: tables.guest.mem.clone(),
            state: RefCell::new(Changing { stores: stores.collect(), ..Changing::default() }),
        };
        let (mut from, last) = world.range();
        for budget in budgets.iter().cycle().take(10_000) {
            mem.state.borrow_mut().read.clear();
            let mut budget = Budget::new(*budget);
            let answer = search(&unit, &mem, (from, last), &mut budget).expect("nothing is absent");
            let state = mem.state.borrow();
            check_against_reads(&tables, &world.config, &state.read, (from, last), &answer);
            from = match answer {
                Next::None => break,
                Next::Budget(at) => at.raw(),
                Next::Found(found) => match after(&found, last) {
                    Some(after) => after,
                    None => break,
                },
            };
        }
    }
}
