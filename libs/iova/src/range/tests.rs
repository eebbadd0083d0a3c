use super::*;

#[test]
fn a_range_that_wraps_is_not_made() {
    assert!(IovaRange::new(IovaPfn::new(5), 0).is_none());
    assert!(IovaRange::new(IovaPfn::MAX, 2).is_none());
    assert!(IovaRange::new(IovaPfn::MAX, u64::MAX).is_none());
    let all = IovaRange::new(IovaPfn::new(0), 1 << 52).expect("the whole space");
    assert_eq!((all.last(), all.len()), (IovaPfn::MAX, None));
}

#[test]
fn ends_are_inclusive() {
    let range = |first, pages| IovaRange::new(IovaPfn::new(first), pages).expect("fits");
    assert!(range(4, 4).overlaps(range(7, 1)) && !range(4, 4).overlaps(range(8, 1)));
    assert!(range(4, 4).contains(range(4, 4)) && !range(4, 4).contains(range(7, 2)));
}
