use alloc::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn full(len: usize) -> Bitmap {
    let set = Bitmap::new(len);
    set.fill(0, len);
    set
}

#[test]
fn runs_cross_words_and_leave_what_they_do_not_need() {
    let set = full(400);
    assert_eq!(set.take_run(130, 8, 64, 399), Some(64));
    assert_eq!(set.take_highest(399), Some(399));
    assert_eq!(set.take_run(64, 6, 0, 398), Some(320));
    assert_eq!(set.take_run(70, 7, 0, 255), None);
    assert_eq!(set.take_run(401, 9, 0, 500), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn takes_what_a_sorted_set_would(
        ops in proptest::collection::vec((0_u8..4, 0_usize..300, 1_usize..140, 0_u32..3), 1..200),
    ) {
        let (set, mut model) = (full(300), (0..300).collect::<BTreeSet<usize>>());
        for (op, at, count, align) in ops {
            match op {
                0 => {
                    set.put(at);
                    model.insert(at);
                }
                1 => prop_assert_eq!(set.take(at), model.remove(&at)),
                2 => {
                    let expected = model.range(..=at).next_back().copied();
                    expected.map(|i| model.remove(&i));
                    prop_assert_eq!(set.take_highest(at), expected);
                }
                _ => {
                    let order = count.next_power_of_two().ilog2() + align;
                    let (align, offset) = (1_usize << order, 64 % (1 << order));
                    let fits = |s: &usize| s % align == offset && (*s..s + count).all(|i| model.contains(&i));
                    let expected = (0..=(at + 1).saturating_sub(count)).rev()
                        .filter(|s| s + count <= at + 1).find(fits);
                    prop_assert_eq!(set.take_run(count, order, offset, at), expected);
                    if let Some(s) = expected {
                        (s..s + count).for_each(|i| { model.remove(&i); });
                    }
                }
            }
        }
    }
}
