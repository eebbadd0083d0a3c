//! The lease table against a naive model, and its documented outcomes one by one.

use std::cell::Cell;
use std::collections::BTreeMap;

use guest_mem::{
    DmaFault, Gpa, Iova, LeaseId, LeaseTable, MAX_LEASES, Perm, SourceId, Stop, Ticket,
};
use proptest::prelude::*;

const DISK: SourceId = SourceId::new(0, 1, 0);
const NET: SourceId = SourceId::new(0, 2, 0);
const PENDING: Stop = Stop::Pending(Ticket(9));

fn begin(table: &mut LeaseTable, source: SourceId, iova: u64) -> Result<LeaseId, DmaFault> {
    table.begin(
        source,
        Iova::new(iova),
        Gpa::new(iova + 0x10_0000),
        512,
        Perm::Read,
    )
}

#[test]
fn full_table_refuses_and_one_end_makes_room() {
    let mut table = LeaseTable::new(2);
    let first = begin(&mut table, DISK, 0).unwrap();
    begin(&mut table, DISK, 1).unwrap();
    assert_eq!(begin(&mut table, DISK, 2), Err(DmaFault::TooManyLeases));
    table.end(first);
    begin(&mut table, DISK, 2).unwrap();
    assert_eq!((table.len(), table.max()), (2, 2));
}

#[test]
fn table_without_room_refuses() {
    let mut table = LeaseTable::new(0);
    assert_eq!(begin(&mut table, DISK, 0), Err(DmaFault::TooManyLeases));
}

#[test]
#[cfg_attr(miri, ignore = "65536 slots take minutes there")]
fn largest_table_names_every_slot_apart() {
    let mut table = LeaseTable::new(MAX_LEASES);
    let ids: std::collections::HashSet<LeaseId> = (0..MAX_LEASES as u64)
        .map(|iova| begin(&mut table, DISK, iova).unwrap())
        .collect();
    assert_eq!(ids.len(), MAX_LEASES);
    ids.into_iter().for_each(|id| table.end(id));
    assert!(table.is_empty());
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
    table
        .recheck(|_| true, |lease| Ok(lease.iova.raw() != 0x1000))
        .unwrap();
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
    table.recheck(|_| true, |_| Ok(false)).unwrap();
    table.end(id);
    begin(&mut table, DISK, 0x1000).unwrap();
    assert_eq!(table.stale(), 0);
    assert!(table.iter().all(|lease| !lease.is_stale()));
}

#[test]
fn stale_lease_stays_stale_when_the_page_is_mapped_again() {
    let mut table = LeaseTable::new(1);
    begin(&mut table, DISK, 0x1000).unwrap();
    table.recheck(|_| true, |_| Ok(false)).unwrap();
    table
        .recheck(|_| true, |_| panic!("a stale lease is not asked about"))
        .unwrap();
    assert_eq!(table.stale(), 1);
}

#[test]
fn fault_of_the_walk_means_changed() {
    let mut table = LeaseTable::new(1);
    begin(&mut table, DISK, 0x1000).unwrap();
    table
        .recheck(|_| true, |_| Err(DmaFault::BadRange.into()))
        .unwrap();
    assert_eq!(table.stale(), 1);
}

#[test]
fn unselected_leases_are_not_walked() {
    let mut table = LeaseTable::new(4);
    begin(&mut table, DISK, 0x1000).unwrap();
    begin(&mut table, NET, 0x1000).unwrap();
    table
        .recheck(
            |lease| lease.source == NET,
            |lease| {
                assert_eq!(lease.source, NET);
                Ok(false)
            },
        )
        .unwrap();
    assert_eq!(table.stale_sources(), vec![NET]);
}

#[test]
fn recheck_interrupted_at_every_walk_ends_like_an_uninterrupted_one() {
    for pends_at in 0..6 {
        let mut table = LeaseTable::new(8);
        for iova in 0..6 {
            begin(&mut table, DISK, iova).unwrap();
        }
        let calls = Cell::new(0);
        let valid = |lease: &guest_mem::LeaseRecord| {
            let call = calls.replace(calls.get() + 1);
            if call == pends_at {
                return Err(PENDING);
            }
            Ok(lease.iova.raw().is_multiple_of(2))
        };
        assert_eq!(table.recheck(|_| true, valid), Err(PENDING));
        assert_eq!(table.recheck(|_| true, valid), Ok(()));
        assert_eq!(table.stale(), 3, "pending at walk {pends_at}");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Begin {
        source: u16,
        page: u64,
    },
    End {
        pick: usize,
    },
    /// Pages below `page` of this source are unmapped; the walk pends at call `pends_at`, once.
    Revoke {
        source: u16,
        page: u64,
        pends_at: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..3u16, 0..16u64).prop_map(|(source, page)| Op::Begin { source, page }),
        3 => any::<usize>().prop_map(|pick| Op::End { pick }),
        1 => (0..3u16, 0..16u64, 0..12usize)
            .prop_map(|(source, page, pends_at)| Op::Revoke { source, page, pends_at }),
    ]
}

/// What the table should hold: by id in order of beginning, (source, page, stale).
type Model = BTreeMap<u64, (LeaseId, u16, u64, bool)>;

fn check(table: &LeaseTable, model: &Model) -> Result<(), TestCaseError> {
    let key =
        |lease: &guest_mem::LeaseRecord| (lease.source.0, lease.iova.raw() >> 12, lease.is_stale());
    let mut got: Vec<_> = table.iter().map(key).collect();
    let mut want: Vec<_> = model
        .values()
        .map(|&(_, s, p, stale)| (s, p, stale))
        .collect();
    got.sort_unstable();
    want.sort_unstable();
    prop_assert_eq!(&got, &want);
    prop_assert_eq!(table.len(), model.len());
    prop_assert_eq!(table.stale(), want.iter().filter(|lease| lease.2).count());
    let mut sources: Vec<_> = want
        .iter()
        .filter(|lease| lease.2)
        .map(|l| SourceId(l.0))
        .collect();
    sources.sort_unstable();
    sources.dedup();
    prop_assert_eq!(table.stale_sources(), sources);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 400 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn table_agrees_with_a_map(max in 1..9usize, ops in prop::collection::vec(op(), 1..120)) {
        let mut table = LeaseTable::new(max);
        let mut model = Model::new();
        for (serial, op) in ops.into_iter().enumerate() {
            match op {
                Op::Begin { source, page } => {
                    let answer = begin(&mut table, SourceId(source), page << 12);
                    prop_assert_eq!(answer.is_ok(), model.len() < max);
                    if let Ok(id) = answer {
                        prop_assert!(model.values().all(|lease| lease.0 != id));
                        model.insert(serial as u64, (id, source, page, false));
                    }
                }
                Op::End { pick } if !model.is_empty() => {
                    let serial = *model.keys().nth(pick % model.len()).unwrap();
                    table.end(model.remove(&serial).unwrap().0);
                }
                Op::End { .. } => {}
                Op::Revoke { source, page, pends_at } => {
                    let calls = Cell::new(0);
                    let select = |lease: &guest_mem::LeaseRecord| lease.source.0 == source;
                    let valid = |lease: &guest_mem::LeaseRecord| {
                        match calls.replace(calls.get() + 1) == pends_at {
                            true => Err(PENDING),
                            false => Ok(lease.iova.raw() >> 12 >= page),
                        }
                    };
                    if table.recheck(select, valid).is_err() {
                        prop_assert_eq!(table.recheck(select, valid), Ok(()));
                    }
                    for lease in model.values_mut() {
                        lease.3 |= lease.1 == source && lease.2 < page;
                    }
                }
            }
            check(&table, &model)?;
        }
    }
}
