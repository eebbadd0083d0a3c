//! The tree against a map, and nodes that grow and shrink through every kind.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Keys that fork at every depth and fill nodes of every size.
fn a_key() -> impl Strategy<Value = u64> {
    prop_oneof![
        (0u64..400).prop_map(|low| low << 12 | 5),
        (0u64..300, 0u32..8).prop_map(|(byte, at)| (byte & 0xff) << (at * 8)),
        (0u64..60, 0u64..60).prop_map(|(a, b)| a << 32 | b << 16),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn agrees_with_a_btree_map(ops in proptest::collection::vec((a_key(), 0u8..3), 1..1500)) {
        let mut art = Art::EMPTY;
        let mut keys: Vec<u64> = Vec::new();
        let mut model: BTreeMap<u64, u32> = BTreeMap::new();
        for (key, op) in ops {
            // Twice as many insertions as removals: trees get large, and every one is emptied in
            // the end.
            if op < 2 {
                let number = keys.len() as u32;
                keys.push(key);
                let is_new = art.insert(key, number, |n| keys[n as usize]);
                prop_assert_eq!(is_new, !model.contains_key(&key));
                model.entry(key).or_insert(number);
            } else {
                prop_assert_eq!(art.remove(key, |n| keys[n as usize]), model.remove(&key));
            }
            prop_assert_eq!(art.get(key, |n| keys[n as usize]), model.get(&key).copied());
        }
        for (&key, &number) in &model {
            prop_assert_eq!(art.get(key, |n| keys[n as usize]), Some(number));
        }
        for (key, number) in model {
            prop_assert_eq!(art.remove(key, |n| keys[n as usize]), Some(number));
        }
        prop_assert_eq!(art.nodes(), [0; 4]);
        prop_assert_eq!(art.root, Ref::NONE);
    }
}

#[test]
fn a_node_grows_through_every_kind_and_shrinks_back() {
    let mut art = Art::EMPTY;
    let key_of = |n: u32| u64::from(n) << 12;
    let mut seen = Vec::new();
    for n in 0..256 {
        assert!(art.insert(key_of(n), n, key_of));
        seen.push(art.nodes());
    }
    assert!(seen.contains(&[1, 0, 0, 0]) && art.bytes() > 0);
    for n in 0..256 {
        assert_eq!(art.get(key_of(n), key_of), Some(n));
        assert_eq!(art.remove(key_of(n), key_of), Some(n));
        assert_eq!(art.remove(key_of(n), key_of), None);
    }
    assert_eq!(art.nodes(), [0; 4]);
    // Keys n << 12 fork in two bytes: 16 children above, up to 16 below. Bytes alone fill a 256.
    for n in 0..256 {
        assert!(art.insert(u64::from(n), n, u64::from));
    }
    assert_eq!(art.nodes(), [0, 0, 0, 1]);
}
