use super::*;
use crate::IovaPfn;

#[test]
fn only_the_exact_size_of_what_is_allocated_is_out() {
    let most = 1 << 52;
    for turn in [0, 1] {
        let none = State::NONE.at_turn(turn);
        assert!(none.is_none() && !none.is_pinned() && none.turn() == turn);
        assert_eq!(none.order(), None);
        for order in 0..=8 {
            let out = none.handed_out(order);
            let pinned = out.pinned();
            assert_eq!((out.0 & 63, out.turn()), (order as u8, turn));
            assert_eq!(pages_of(order).get(), 1 << order);
            assert!(!out.is_none() && !out.is_pinned() && pinned.is_pinned());
            assert_eq!((out.none(), pinned.none()), (none, none));
            assert_eq!((out.order(), pinned.order()), (Some(order), Some(order)));
            assert_eq!((pinned.unpinned(), pinned.turn()), (out, turn));
            for pages in (1..=1024).chain([1 << 30, most - 1, most]) {
                let range = IovaRange::new(IovaPfn::new(0), pages).expect("in the space");
                assert_eq!(out.is_out_of(range), pages == 1 << order);
                assert_eq!(out.is_of(range), pages == 1 << order);
                assert_eq!(pinned.is_of(range), pages == 1 << order);
                assert!(!none.is_out_of(range) && !pinned.is_out_of(range) && !none.is_of(range));
            }
        }
    }
}

#[test]
fn orders_are_those_of_the_powers_that_hold_the_pages() {
    for pages in (0..2000).chain([u64::MAX, 1 << 32, 1 << 40]) {
        let is_inside = (1..=256).contains(&pages);
        let order = is_inside.then(|| pages.next_power_of_two().trailing_zeros() as usize);
        assert_eq!(order_of(pages), order);
        let exact = order.filter(|order| pages == 1 << order);
        assert_eq!(
            exact_order(pages).filter(|order| *order <= MAX_ORDER),
            exact
        );
    }
}
