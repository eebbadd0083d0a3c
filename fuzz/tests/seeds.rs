//! Every seed runs through its target, and the planted fault is one. A single test, because
//! descriptors are counted.

use std::panic::catch_unwind;

#[test]
fn seeds_find_nothing_but_what_was_planted() {
    for (seeds, run) in [
        (
            fuzz::vhost_user_messages::seeds as fn() -> Vec<Vec<u8>>,
            fuzz::vhost_user_messages::run as fn(&[u8]),
        ),
        (fuzz::export_session::seeds, fuzz::export_session::run),
        (fuzz::iotlb_messages::seeds, fuzz::iotlb_messages::run),
        (fuzz::block_requests::seeds, fuzz::block_requests::run),
        (fuzz::split_ring::seeds, fuzz::split_ring::run),
        (fuzz::packed_ring::seeds, fuzz::packed_ring::run),
        (fuzz::dma_mapper::seeds, fuzz::dma_mapper::run),
        (fuzz::iova_allocators::seeds, fuzz::iova_allocators::run),
        (fuzz::net_control::seeds, fuzz::net_control::run),
        (fuzz::iommu_requests::seeds, fuzz::iommu_requests::run),
        (fuzz::vfio_info::seeds, fuzz::vfio_info::run),
        (fuzz::frame_offloads::seeds, fuzz::frame_offloads::run),
        (fuzz::worker_area::seeds, fuzz::worker_area::run),
        (fuzz::self_test::seeds, fuzz::self_test::run),
    ] {
        let seeds = seeds();
        assert!(!seeds.is_empty());
        for seed in seeds {
            run(&seed);
            // Cut short anywhere, it is still an input.
            run(&seed[..seed.len() / 2]);
        }
    }
    let misses = fuzz::iotlb_messages::misses();
    assert!(misses > 500, "{misses} misses in all seeds");
    let planted = [0xf3, 0x94, 0x1d, 0x6b, 1, 1 ^ 0x5a];
    catch_unwind(|| fuzz::self_test::run(&planted)).expect_err("it panics");
}
