use super::*;

#[test]
fn a_word_is_kept_as_far_as_there_is_room_lowest_first() {
    for order in 0..=MAX_ORDER {
        for free in [FULL[order], FULL[order] & 0x0011_0001_0110_1011] {
            let mut lists = FreeLists::new();
            lists.open(0, order);
            let list = lists.of(0, order);
            let mut starts: Vec<u64> = bits(free).map(|at| 640 + at).collect();
            assert_eq!(list.keep_all(640, free, order), free);
            // Room for one more and not for two.
            let mut len = list.len();
            while len < LIST_CAPACITY[order] - 1 {
                assert!(list.keep(0));
                starts.push(0);
                len += 1;
            }
            let more = list.keep_all(64, free, order);
            let expected = if len == LIST_CAPACITY[order] {
                0
            } else {
                free & free.wrapping_neg()
            };
            assert_eq!(more, expected);
            starts.extend(bits(more).map(|at| 64 + at));
            assert!(len == LIST_CAPACITY[order] || !list.keep(0));
            let kept: Vec<u64> = (0..list.len()).map(|at| list.get(at)).collect();
            assert_eq!(kept, starts);
            assert_eq!(list.take(), starts.pop());
        }
    }
}

#[test]
fn list_singled_out_keeps_its_ranges() {
    let mut lists = FreeLists::new();
    for lane in 0..MAX_ZONES {
        assert!(lists.open(lane, 0).keep(lane as u64));
    }
    for single in [2, 0, 0, 3] {
        lists.single_out(single);
        for lane in 0..MAX_ZONES {
            assert_eq!(lists.of(lane, 0).newest(), Some(lane as u64));
            assert_eq!(lists.pages(lane), 1);
        }
        assert_eq!(lists.singles.newest(), Some(single as u64));
        assert_eq!(lists.among_others(single, 0).newest(), None);
    }
}
