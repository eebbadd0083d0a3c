use std::collections::BTreeMap;

use super::*;
use crate::testing::Random;

impl Live {
    /// Every first page and word, in no order.
    pub(in crate::tree) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.slots.iter().copied().filter(|&(_, word)| word != 0)
    }
}

#[test]
fn table_agrees_with_a_map() {
    let (mut live, mut map, mut random) = (Live::new(), BTreeMap::new(), Random::new(7));
    for step in 0..200_000u64 {
        // Few keys, so that neighbours collide and wrap around the end.
        let key = random.below(if step < 100_000 { 40 } else { 5000 });
        assert_eq!(live.get(key), map.get(&key).copied());
        match map.remove(&key) {
            Some(_) if step % 3 > 0 => live.remove(key),
            _ => {
                live.set(key, step + 1);
                map.insert(key, step + 1);
            }
        }
        assert_eq!(live.len(), map.len());
    }
    let mut all: Vec<_> = live.iter().collect();
    all.sort_unstable();
    assert_eq!(all, map.into_iter().collect::<Vec<_>>());
}
