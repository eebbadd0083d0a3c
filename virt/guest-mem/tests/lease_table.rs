//! The lease table against a naive model, and its documented outcomes one by one.

use std::collections::{BTreeMap, HashSet};

use guest_mem::{
    Access, Budget, DmaFault, Full, Gpa, Iova, LEASE_SPAN, LeaseId, LeaseRecord, LeaseTable,
    Leases, MAX_LEASES, MAX_RESERVE, Pages, Part, Perm, SourceId, Stop, Ticket,
};
use proptest::prelude::*;

const DISK: SourceId = SourceId::new(0, 1, 0);
const NET: SourceId = SourceId::new(0, 2, 0);
const PAGE: u64 = 0x1000;
const PENDING: Stop = Stop::Pending(Ticket(9));

fn begin(table: &mut LeaseTable, source: SourceId, iova: u64) -> Result<LeaseId, Full> {
    begin_long(table, source, iova, 512)
}

fn begin_long(
    table: &mut LeaseTable,
    source: SourceId,
    iova: u64,
    len: u32,
) -> Result<LeaseId, Full> {
    let gpa = Gpa::new(iova + 0x10_0000);
    table.begin(source, Iova::new(iova), gpa, len, Perm::Read)
}

/// Asks about everything at once: `holds` is asked once for each lease.
fn recheck(table: &mut LeaseTable, holds: impl Fn(&LeaseRecord) -> bool) {
    table.recheck_now(None, holds);
}

fn go_on(
    table: &mut LeaseTable,
    budget: &mut Budget,
    select: impl Fn(SourceId) -> bool,
    holds: impl Fn(&LeaseRecord) -> bool,
) -> Access<bool> {
    table.recheck(budget, select, |lease, part, _| {
        part.at = part.end;
        Ok(holds(lease))
    })
}

#[test]
fn full_table_refuses_and_one_end_makes_room() {
    let mut table = LeaseTable::new(2);
    let first = begin(&mut table, DISK, 0).unwrap();
    begin(&mut table, DISK, 1).unwrap();
    assert_eq!(begin(&mut table, DISK, 2), Err(Full { most: 2 }));
    assert!(!table.has_room(DISK, 1));
    table.end(first);
    assert!(table.has_room(DISK, 1) && !table.has_room(DISK, 2));
    begin(&mut table, DISK, 2).unwrap();
    assert_eq!((table.len(), table.max()), (2, 2));
}

#[test]
fn table_without_room_refuses() {
    let mut table = LeaseTable::new(0);
    assert_eq!(begin(&mut table, DISK, 0), Err(Full { most: 0 }));
}

#[test]
#[cfg_attr(miri, ignore = "65536 slots take minutes there")]
fn largest_table_names_every_slot_apart() {
    let mut table = LeaseTable::new(MAX_LEASES);
    // The common leases, and then the reserves of 32 devices.
    let sources = [0; 32767].into_iter();
    let sources = sources.chain((0..32).flat_map(|source| [source; MAX_RESERVE]));
    let ids: HashSet<LeaseId> = (0..)
        .zip(sources)
        .map(|(iova, source)| begin(&mut table, SourceId(source), iova).unwrap())
        .collect();
    assert_eq!((ids.len(), table.len()), (MAX_LEASES, MAX_LEASES));
    for source in 0..33 {
        assert!(begin(&mut table, SourceId(source), 0).is_err());
    }
    ids.into_iter().for_each(|id| table.end(id));
    assert!(table.is_empty());
}

#[test]
fn every_device_gets_its_reserve_whatever_the_others_hold() {
    let mut table = LeaseTable::new(MAX_LEASES);
    let mut held = Vec::new();
    while let Ok(id) = begin(&mut table, DISK, 0) {
        held.push(id);
    }
    assert_eq!(held.len(), 32767 + MAX_RESERVE);
    // As many as the largest request has.
    assert!(table.has_room(NET, MAX_RESERVE) && !table.has_room(NET, MAX_RESERVE + 1));
    let nets: Vec<_> = (0..MAX_RESERVE as u64)
        .map(|at| begin(&mut table, NET, at).unwrap())
        .collect();
    let full = Full {
        most: 32767 + MAX_RESERVE,
    };
    assert_eq!(begin(&mut table, NET, 0), Err(full));
    // A lease that ends returns to where it came from: a common one to the device that asks first,
    // another to its device.
    table.end(held[0]);
    assert!(begin(&mut table, NET, 0).is_ok());
    assert_eq!(begin(&mut table, DISK, 0), Err(full));
    table.end(nets[0]);
    assert_eq!(begin(&mut table, DISK, 0), Err(full));
    assert!(begin(&mut table, NET, 0).is_ok());
}

#[test]
#[should_panic(expected = "not in flight")]
fn ending_twice_panics() {
    let mut table = LeaseTable::new(4);
    let id = begin(&mut table, DISK, 0).unwrap();
    begin(&mut table, DISK, 1).unwrap();
    table.end(id);
    table.end(id);
}

#[test]
#[should_panic(expected = "not in flight")]
fn ending_twice_panics_after_the_slot_was_reused() {
    let mut table = LeaseTable::new(1);
    let id = begin(&mut table, DISK, 0).unwrap();
    table.end(id);
    begin(&mut table, DISK, 0).unwrap();
    table.end(id);
}

#[test]
#[should_panic(expected = "not in flight")]
fn ending_another_tables_lease_panics() {
    let mut other = LeaseTable::new(1);
    let id = begin(&mut other, DISK, 0).unwrap();
    LeaseTable::new(1).end(id);
}

#[test]
fn only_changed_leases_delay_and_each_until_it_ends() {
    let mut table = LeaseTable::new(8);
    let changed = begin(&mut table, DISK, 0x1000).unwrap();
    let unchanged = begin(&mut table, DISK, 0x2000).unwrap();
    recheck(&mut table, |lease| lease.iova.raw() != 0x1000);
    assert_eq!((table.stale(), table.stale_sources()), (1, vec![DISK]));
    table.end(unchanged);
    assert_eq!(table.stale(), 1);
    table.end(changed);
    assert_eq!((table.stale(), table.stale_sources()), (0, vec![]));
}

#[test]
fn lease_in_a_reused_slot_is_fresh() {
    let mut table = LeaseTable::new(1);
    let id = begin(&mut table, DISK, 0x1000).unwrap();
    recheck(&mut table, |_| false);
    table.end(id);
    begin(&mut table, DISK, 0x1000).unwrap();
    assert_eq!(table.stale(), 0);
    assert!(table.iter().all(|lease| !lease.is_stale()));
    // And it is found by the next.
    recheck(&mut table, |_| false);
    assert_eq!(table.stale(), 1);
}

#[test]
fn stale_lease_stays_stale_when_the_page_is_mapped_again() {
    let mut table = LeaseTable::new(1);
    begin(&mut table, DISK, 0x1000).unwrap();
    recheck(&mut table, |_| false);
    recheck(&mut table, |_| panic!("a stale lease is not asked about"));
    assert_eq!(table.stale(), 1);
}

#[test]
fn fault_of_the_walk_means_changed() {
    let mut table = LeaseTable::new(1);
    begin(&mut table, DISK, 0x1000).unwrap();
    table.begin_recheck(None);
    let fault = Err(DmaFault::BadRange.into());
    let answer = table.recheck(&mut Budget::unlimited(), |_| true, |_, _, _| fault);
    assert_eq!((answer, table.stale()), (Ok(true), 1));
}

proptest! {
    /// Against a comparison of every lease in flight with every page.
    #[test]
    fn pages_under_a_lease_are_in_use_until_it_ends(
        steps in prop::collection::vec((0_u64..40 * PAGE, 1_u32..12 * PAGE as u32, any::<bool>()), 1..40),
        pages in prop::collection::vec(0_u64..52, 0..=32),
    ) {
        let mut table = LeaseTable::new(64);
        let mut live: Vec<(LeaseId, u64, u64)> = Vec::new();
        let pages: Vec<_> = pages.into_iter().map(|page| Gpa::new(page * PAGE)).collect();
        let asked = Pages::new(&pages).unwrap();
        for (start, len, ends) in steps {
            if ends && !live.is_empty() {
                let (id, ..) = live.swap_remove(start as usize % live.len());
                table.end(id);
            } else {
                let id = table.begin(DISK, Iova::new(0), Gpa::new(start), len, Perm::Read).unwrap();
                live.push((id, start, start + u64::from(len)));
            }
            let is_used = |page: &Gpa| {
                let page = page.raw()..page.raw() + PAGE;
                live.iter().any(|(_, start, end)| *start < page.end && page.start < *end)
            };
            let wanted = (0..).zip(&pages).map(|(bit, page)| u32::from(is_used(page)) << bit);
            prop_assert_eq!(table.in_use(&asked), wanted.sum::<u32>());
        }
    }
}

#[test]
fn a_part_of_a_lease_is_asked_about_and_no_more() {
    let mut table = LeaseTable::new(64);
    begin_long(&mut table, DISK, 0x1800, 0x4000).unwrap();
    for (first, last, part) in [
        (0, 0x17ff, None),
        (0x1000, 0x1fff, Some((0, 0x800))),
        (0x3000, 0x3fff, Some((0x1800, 0x2800))),
        (0x5000, 0x8fff, Some((0x3800, 0x4000))),
        (0x5800, u64::MAX, None),
    ] {
        let mut asked = None;
        table.begin_recheck(Some((Iova::new(first), Iova::new(last))));
        let answer = table.recheck(
            &mut Budget::unlimited(),
            |_| true,
            |_, part, _| {
                asked = Some((part.at, part.end));
                part.at = part.end;
                Ok(true)
            },
        );
        assert_eq!((answer, asked), (Ok(true), part), "{first:#x}");
    }
}

#[test]
fn a_page_is_looked_for_in_the_leases_of_its_two_mebibytes() {
    let mut table = LeaseTable::new(MAX_LEASES);
    for at in 0..16384 {
        begin(&mut table, DISK, at % 64 * LEASE_SPAN + at / 64 * PAGE).unwrap();
    }
    let ask = |table: &mut LeaseTable, page: u64| {
        let before = table.visits();
        let page = (Iova::new(page), Iova::new(page + PAGE - 1));
        table.begin_recheck(Some(page));
        let asked = std::cell::Cell::new(0);
        let holds = |_: &LeaseRecord| {
            asked.set(asked.get() + 1);
            true
        };
        let answer = go_on(table, &mut Budget::unlimited(), |_| true, holds);
        assert_eq!(answer, Ok(true));
        (asked.get(), table.visits() - before)
    };
    // The first one puts all of them into the index.
    assert_eq!(ask(&mut table, 0).0, 1);
    let (asked, visits) = ask(&mut table, 5 * LEASE_SPAN + 7 * PAGE);
    assert_eq!(asked, 1);
    // 256 leases lie in those 2 MiB; other buckets may share the list.
    assert!((256..1024).contains(&visits), "{visits}");
    let (asked, visits) = ask(&mut table, 500 * LEASE_SPAN);
    assert!(asked == 0 && visits < 1024, "{visits}");
}

#[derive(Clone, Debug)]
enum Op {
    /// From a page of a bucket on.
    Begin {
        source: u16,
        page: u64,
        pages: u64,
    },
    End {
        pick: usize,
    },
    /// The device's leases of odd or even pages are unmapped, and the invalidation is of `range`,
    /// or of everything.
    Revoke {
        source: Option<u16>,
        range: Option<(u64, u64)>,
        odd: bool,
    },
    /// The recheck under way continues for this budget; a walk pends in it at times.
    GoOn {
        budget: u64,
        pends_at: u64,
    },
}

/// Phases in which leases pile up, come and go, and end.
fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Pages of three buckets, close to their bounds.
    let page = || (0..3u64, 0..6u64).prop_map(|(bucket, page)| bucket * 512 + page);
    let one = move |begin: u32, end: u32| {
        prop_oneof![
            begin => (0..3u16, page(), 1..4u64)
                .prop_map(|(source, page, pages)| Op::Begin { source, page, pages }),
            end => any::<usize>().prop_map(|pick| Op::End { pick }),
            1 => (
                prop::option::of(0..3u16),
                prop::option::of((page(), 1..600u64)),
                any::<bool>()
            )
                .prop_map(|(source, range, odd)| Op::Revoke { source, range, odd }),
            3 => (1..40u64, 0..12u64)
                .prop_map(|(budget, pends_at)| Op::GoOn { budget, pends_at }),
        ]
    };
    let phase = move |begin, end| prop::collection::vec(one(begin, end), 1..60);
    let phases = (phase(9, 1), phase(4, 4), phase(1, 9), phase(4, 4));
    phases.prop_map(|(fill, fragment, clear, again)| [fill, fragment, clear, again].concat())
}

#[derive(Clone, Copy, Debug)]
struct Held {
    id: LeaseId,
    source: u16,
    page: u64,
    pages: u64,
    is_stale: bool,
    /// The recheck under way must ask about it.
    is_due: bool,
}

/// Expected content of the table, by order of beginning.
type Model = BTreeMap<u64, Held>;

/// Invalidation under way: its devices and pages, and whether the odd pages are gone, or the even.
#[derive(Clone, Copy, Debug)]
struct PendingInvalidation {
    source: Option<u16>,
    first: u64,
    last: u64,
    odd: bool,
}

impl PendingInvalidation {
    /// Returns whether a part of a lease is rechecked and gone: the naive answer.
    fn revokes(&self, held: &Held) -> bool {
        let is_gone = |page: u64| (page % 2 == 1) == self.odd;
        let pages = held.page.max(self.first)..=(held.page + held.pages - 1).min(self.last);
        self.source.is_none_or(|source| source == held.source) && pages.into_iter().any(is_gone)
    }

    /// Checks a lease as a walk does: page by page.
    fn walk(&self, lease: &LeaseRecord, part: &mut Part, budget: &mut Budget) -> bool {
        while part.at < part.end && !budget.is_spent() {
            let page = (lease.iova.raw() + u64::from(part.at)) / PAGE;
            if (page % 2 == 1) == self.odd {
                return false;
            }
            part.at += PAGE as u32;
            budget.charge(1);
        }
        true
    }
}

fn check(table: &LeaseTable, model: &Model) -> Result<(), TestCaseError> {
    let key = |lease: LeaseRecord| (lease.source.0, lease.iova.raw() / PAGE, lease.is_stale());
    let mut got: Vec<_> = table.iter().map(key).collect();
    let held = model.values();
    let mut want: Vec<_> = held.map(|l| (l.source, l.page, l.is_stale)).collect();
    got.sort_unstable();
    want.sort_unstable();
    prop_assert_eq!(&got, &want);
    prop_assert_eq!(table.len(), model.len());
    prop_assert_eq!(table.stale(), want.iter().filter(|lease| lease.2).count());
    let stale = want.iter().filter(|lease| lease.2);
    let mut sources: Vec<_> = stale.map(|lease| SourceId(lease.0)).collect();
    sources.dedup();
    prop_assert_eq!(table.stale_sources(), sources);
    Ok(())
}

/// Takes over which leases the table has found stale: each of them must have been due.
fn settle(
    table: &LeaseTable,
    model: &mut Model,
    asked: PendingInvalidation,
    is_done: bool,
) -> Result<(), TestCaseError> {
    let stale: Vec<_> = table
        .iter()
        .filter(LeaseRecord::is_stale)
        .map(|lease| (lease.source.0, lease.iova.raw() / PAGE))
        .collect();
    for held in model.values_mut() {
        // Several leases may lie at the same place: all of them are marked alike, once the recheck
        // is over.
        let is_found = stale.contains(&(held.source, held.page));
        if is_done && held.is_due {
            held.is_stale |= asked.revokes(held);
            held.is_due = false;
        }
        prop_assert!(!held.is_stale || is_found, "{:?} was not found", held);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 400 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn table_agrees_with_a_map(max in 1..200usize, ops in ops()) {
        let mut table = LeaseTable::new(max);
        let mut model = Model::new();
        let mut asked: Option<PendingInvalidation> = None;
        for (serial, op) in (0..).zip(ops) {
            match op {
                Op::Begin { source, page, pages } => {
                    // Not while a recheck is under way: whether it asks about a new one is left
                    // open.
                    if asked.is_some() {
                        continue;
                    }
                    let len = (pages * PAGE) as u32;
                    let answer = begin_long(&mut table, SourceId(source), page * PAGE, len);
                    let own = model.values().filter(|held| held.source == source).count();
                    match answer {
                        Ok(id) => {
                            prop_assert!(model.values().all(|held| held.id != id));
                            let held = Held { id, source, page, pages, is_stale: false, is_due: false };
                            model.insert(serial, held);
                        }
                        Err(Full { most }) => {
                            prop_assert!(most <= max);
                            // No device is refused that holds less than the reserve, or while most
                            // of the table is free.
                            prop_assert!(own >= max.div_ceil(64).saturating_sub(1));
                            prop_assert!(model.len() >= max / 2);
                        }
                    }
                }
                Op::End { pick } if !model.is_empty() => {
                    let serial = *model.keys().nth(pick % model.len()).expect("inside");
                    table.end(model.remove(&serial).expect("just found").id);
                }
                Op::End { .. } => {}
                Op::Revoke { source, range, odd } => {
                    if asked.is_some() {
                        continue;
                    }
                    let (first, last) = range.map_or((0, u64::MAX / PAGE), |(page, pages)| (page, page + pages - 1));
                    let range = range.map(|_| (Iova::new(first * PAGE), Iova::new(last * PAGE + PAGE - 1)));
                    table.begin_recheck(range);
                    asked = Some(PendingInvalidation { source, first, last, odd });
                    model.values_mut().for_each(|held| held.is_due = !held.is_stale);
                }
                Op::GoOn { budget, pends_at } => {
                    let Some(now) = asked else { continue };
                    let mut calls = 0;
                    let budget = &mut Budget::new(budget * Budget::VISIT);
                    let select = |source: SourceId| now.source.is_none_or(|only| only == source.0);
                    let answer = table.recheck(budget, select, |lease, part, budget| {
                        calls += 1;
                        match calls == pends_at {
                            true => Err(PENDING),
                            false => Ok(now.walk(lease, part, budget)),
                        }
                    });
                    prop_assert!(matches!(answer, Ok(_) | Err(PENDING)));
                    let is_done = answer == Ok(true);
                    settle(&table, &mut model, now, is_done)?;
                    if is_done {
                        asked = None;
                    }
                }
            }
            if asked.is_none() {
                check(&table, &model)?;
            }
        }
        if let Some(now) = asked {
            let select = |source: SourceId| now.source.is_none_or(|only| only == source.0);
            let answer = table.recheck(&mut Budget::unlimited(), select, |lease, part, budget| {
                Ok(now.walk(lease, part, budget))
            });
            prop_assert_eq!(answer, Ok(true));
            settle(&table, &mut model, now, true)?;
            check(&table, &model)?;
        }
    }
}
