use address::PhysAddr;
use iova::Access;
use proptest::prelude::*;

use super::*;

proptest! {
    /// Few keys in fewer chains: of one key many, in one chain several.
    #[test]
    fn finds_the_youngest_of_a_key_and_no_other(
        places in 1usize..16,
        ops in proptest::collection::vec((0u64..24, any::<bool>(), any::<usize>()), 1..400)
    ) {
        let mut slots = SlotMap::<u64>::new(places);
        // Oldest first: key, place.
        let mut model: Vec<(Key, u32)> = Vec::new();
        for (number, is_insert, at) in ops {
            let key = Key::new(PhysAddr::new(number << 12), 1, Access::Read).unwrap();
            if is_insert {
                let place = slots.insert(key);
                prop_assert_eq!(place.is_some(), model.len() < places);
                model.extend(place.map(|place| (key, place)));
            } else if !model.is_empty() {
                let (_, place) = model.remove(at % model.len());
                let found = slots.locate(place);
                slots.take_out(found);
                slots.give_back(place);
            }
            for number in 0..24 {
                let key = Key::new(PhysAddr::new(number << 12), 1, Access::Read).unwrap();
                let youngest = model.iter().rfind(|known| known.0 == key);
                let found = slots.find(key).map(|found| found.place);
                prop_assert_eq!(found, youngest.map(|known| known.1));
            }
            prop_assert_eq!(slots.oldest(), model.first().map(|known| known.1));
            prop_assert_eq!(slots.occupied() as usize, model.len());
        }
    }
}
