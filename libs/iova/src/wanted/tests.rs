use super::*;

#[test]
fn sizes_and_alignments_are_checked_once() {
    assert!(Wanted::of(&Request::pages(0)).is_err());
    assert!(Wanted::of(&Request::pages(u64::MAX)).is_err());
    assert!(Wanted::of(&Request::pages((1 << 52) + 1)).is_err());
    assert!(Wanted::of(&Request::pages(1).aligned(53)).is_err());
    let order = |request: Request| Wanted::of(&request).map(|w| w.order);
    assert_eq!(order(Request::pages(1 << 52)), Ok(52));
    assert_eq!(order(Request::pages(3)), Ok(2));
    assert_eq!(order(Request::pages(5).aligned(2)), Ok(3));
    assert_eq!(order(Request::pages(1).aligned(9)), Ok(9));
}

#[test]
fn the_highest_aligned_place_is_found() {
    assert_eq!(place(1, 10, 3, 2), Some(8));
    assert_eq!(place(1, 9, 3, 2), Some(4));
    assert_eq!(place(5, 9, 3, 2), None);
    assert_eq!(place(0, 1, 3, 2), None);
    assert_eq!(place(7, 7, 1, 0), Some(7));
}
