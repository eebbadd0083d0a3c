use super::*;
use proptest::prelude::*;

proptest! {
    /// Hashes of few values, at both ends of the table, so that runs wrap and gaps close across homes.
    #[test]
    fn finds_what_was_inserted_and_not_removed(
        ops in proptest::collection::vec((0u32..8, 0u32..32, any::<bool>()), 1..400)
    ) {
        let mut index = Index::new(16);
        let mut model: Vec<(u32, u32)> = Vec::new();
        for (spread, place, is_insert) in ops {
            let hash = (spread % 4).wrapping_sub(2) << 27 | spread;
            if is_insert && model.len() < 16 && !model.iter().any(|&(_, p)| p == place) {
                let at = index.find(hash, |p| p == place).unwrap_err();
                index.put(at, hash, place);
                model.push((hash, place));
            } else if let Some(at) = model.iter().position(|&(_, p)| p == place) {
                let (hash, place) = model.swap_remove(at);
                let (at, _) = index.find(hash, |p| p == place).unwrap();
                index.remove(at);
            }
            for &(hash, place) in &model {
                prop_assert_eq!(index.find(hash, |p| p == place).map(|f| f.1), Ok(place));
            }
            prop_assert_eq!(index.entries.iter().filter(|&&e| e != 0).count(), model.len());
        }
    }
}
