//! Every cache against the account of [`world`](super::world).

use proptest::prelude::*;

use super::world::{EARLIEST_NS, IDLE_ONLY, Rules, Step, World, a_step};
use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn optimistic(
        quota in 1usize..24,
        room in 1usize..8,
        steps in proptest::collection::vec(a_step(), 1..600),
    ) {
        // Outside calls take slots in the slab's order: fewer promises about which goes when.
        let rules = Rules { keeps_while_it_can: false, ..IDLE_ONLY };
        World::new(OptimisticCache::new(quota, 100), rules, EARLIEST_NS, room).run(&steps);
    }

    #[test]
    fn optimistic_alone(
        quota in 1usize..24,
        steps in proptest::collection::vec(a_step(), 1..600),
    ) {
        let is_own = |step: &Step| !matches!(step, Step::ExpireOutside | Step::DrainOutside);
        let steps: Vec<_> = steps.into_iter().filter(is_own).collect();
        World::new(OptimisticCache::new(quota, 100), IDLE_ONLY, EARLIEST_NS, 64).run(&steps);
    }

    #[test]
    fn sharing(
        mappings in 1usize..12,
        shards in 1usize..4,
        steps in proptest::collection::vec(a_step(), 1..600),
    ) {
        let rules = Rules { is_sharing: true, finds_all_idle: true, keeps_while_it_can: false };
        let cache = SharingCache::new(SharingTable::new(mappings, shards));
        World::new(cache, rules, 0, 1).run(&steps);
    }
}
