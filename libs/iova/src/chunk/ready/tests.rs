use super::*;

#[test]
fn a_word_is_kept_as_far_as_there_is_room_lowest_first() {
    for order in 0..=MAX_ORDER {
        let class = class_of(0, order);
        for free in [FULL[order], FULL[order] & 0x0011_0001_0110_1011] {
            let mut ready = Ready::new();
            ready.open(class);
            let stack = ready.of(class);
            let mut starts: Vec<u64> = bits(free).map(|at| 640 + at).collect();
            assert_eq!(stack.keep_all(640, free, order), free);
            // Room for one more and not for two.
            let mut len = stack.len();
            while len < READY[order] - 1 {
                assert!(stack.keep(0));
                starts.push(0);
                len += 1;
            }
            let more = stack.keep_all(64, free, order);
            let expected = if len == READY[order] {
                0
            } else {
                free & free.wrapping_neg()
            };
            assert_eq!(more, expected);
            starts.extend(bits(more).map(|at| 64 + at));
            assert!(len == READY[order] || !stack.keep(0));
            let kept: Vec<u64> = (0..stack.len()).map(|at| stack.get(at)).collect();
            assert_eq!(kept, starts);
            assert_eq!(stack.take(), starts.pop());
        }
    }
}
