use super::*;

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
                assert_eq!(out.is_out(pages), pages == 1 << order);
                assert!(!none.is_out(pages) && !pinned.is_out(pages));
            }
            for pages in 1..=256 {
                assert_eq!(pinned.is_pinned_out(pages), pages == 1 << order);
                assert!(!none.is_pinned_out(pages) && !out.is_pinned_out(pages));
            }
        }
    }
}
