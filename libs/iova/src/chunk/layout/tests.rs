use super::*;
use crate::CHUNK_PAGES;

#[test]
fn starts_of_each_class_are_as_many_as_fit() {
    for (order, full) in FULL.iter().enumerate().take(7) {
        assert_eq!(full.count_ones(), 64 >> order);
        assert!((0..64).all(|bit| full >> bit & 1 == u64::from(bit % (1 << order) == 0)));
    }
}

#[test]
fn large_classes_take_aligned_groups_of_words() {
    let block = new_block(0);
    let chunk = chunk_of(&block, 0);
    chunk.assign(1, 0);
    assert_eq!(chunk.find_open(7, CHUNK_PAGES - 1), Some(2));
    chunk.assign(2, 7);
    assert_eq!((chunk.order(2), chunk.kind(3)), (7, TAIL));
    assert_eq!(chunk.find_open(8, CHUNK_PAGES - 1), Some(4));
    assert_eq!(chunk.find_open(0, CHUNK_PAGES - 1), Some(0));
    chunk.unassign(2, 7);
    chunk.unassign(1, 0);
    assert!(chunk.is_empty());
}

#[test]
fn the_giver_and_what_strangers_mark_outlive_an_owner() {
    let chunk = Chunk::new(3);
    chunk.set_owner(5);
    assert_eq!(chunk.tag(), tag_in(3, 5));
    chunk.tag_word().fetch_or(MARKS, Ordering::Relaxed);
    chunk.set_owner(AWAY);
    assert_eq!(chunk.tag(), tag_in(3, AWAY) | REMOTE_FREER);
    chunk.set_owner(NO_CORE);
    assert_eq!(chunk.tag(), tag_in(3, NO_CORE) | REMOTE_FREER);
    assert_eq!(chunk.lane(), 3);
    chunk.exclusive_freed(0).store(6, Ordering::Relaxed);
    chunk.wipe();
    let turns: Vec<u64> = (0..4).map(|page| chunk.state(page).turn()).collect();
    assert_eq!(turns, [0, 1, 1, 0]);
    assert_eq!(bits(0x8000_0000_0000_0005).collect::<Vec<_>>(), [0, 2, 63]);
}
