//! Every cache against the account of [`reuse_world`](crate::testing::reuse_world).

use proptest::prelude::*;

use super::*;
use crate::testing::reuse_world::{EARLIEST_NS, Rules, Step, World, idle_only};

fn a_step() -> impl Strategy<Value = Step> {
    (0..Step::CHOICES, any::<u64>()).prop_map(|(choice, number)| Step::chosen(choice, number))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn optimistic(
        quota in 1usize..24,
        room in 1usize..8,
        steps in proptest::collection::vec(a_step(), 1..600),
    ) {
        // Outside calls take slots in the slab's order: fewer promises about which goes when.
        let rules = Rules { keeps_while_it_can: false, ..idle_only(quota) };
        World::new(OptimisticCache::new(quota, 100), rules, EARLIEST_NS, room).run(&steps);
    }

    #[test]
    fn optimistic_alone(
        quota in 1usize..24,
        steps in proptest::collection::vec(a_step(), 1..600),
    ) {
        let is_own = |step: &Step| !matches!(step, Step::ExpireOutside | Step::DrainOutside);
        let steps: Vec<_> = steps.into_iter().filter(is_own).collect();
        World::new(OptimisticCache::new(quota, 100), idle_only(quota), EARLIEST_NS, 64).run(&steps);
    }

    #[test]
    fn sharing(
        mappings in 1usize..12,
        shards in 1usize..4,
        steps in proptest::collection::vec(a_step(), 1..600),
    ) {
        let contract = RiskContract::STRICT;
        let rules = Rules { contract, is_sharing: true, finds_all_idle: true, keeps_while_it_can: false };
        World::new(SharingTable::new(mappings, shards), rules, 0, 1).run(&steps);
    }
}
