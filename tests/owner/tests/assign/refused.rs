//! Maps of the guest to no memory and to reserved IOVAs, and maps that the host's kernel refuses.

use assign::shadow::Counts;
use guest_mem::PAGE_SIZE;
use vfio::Errno;
use vtd_guest::{PS, iotlb_domain};

use crate::memory::REGIONS;
use crate::world::{DATA, MSI_WINDOW, REGISTERS, RESERVED, RW, World, tell};

/// Address in the hole between the two regions: the guest has put a BAR there.
const BAR: u64 = (12 << 20) / PAGE_SIZE;
/// A virtio device's registers, say.
const MMIO: u64 = 0xfe00_0000 / PAGE_SIZE;
const ENOMEM: Errno = Errno(12);
const EFAULT: Errno = Errno(14);
const ENOSPC: Errno = Errno(28);

/// Each is refused by itself: counted, its WAIT completes, its neighbours of the same invalidation
/// are reached, and nothing was asked of the kernel.
#[test]
fn an_address_that_is_no_memory_is_refused_and_its_neighbours_are_reached() {
    let unit = REGISTERS / PAGE_SIZE;
    let end = (REGIONS[1].0 + REGIONS[1].1) / PAGE_SIZE;
    let top = (1 << 46) / PAGE_SIZE;
    // The unit for emulated devices lies one page below this one's.
    for (what, to) in [
        ("a BAR", BAR),
        ("MMIO", MMIO),
        ("the MSI window", MSI_WINDOW.0),
        ("the unit's registers", unit),
        ("the other unit's registers", unit - 1),
        ("the hole's first page", (8 << 20) / PAGE_SIZE),
        (
            "the page before the second region",
            (16 << 20) / PAGE_SIZE - 1,
        ),
        ("the page behind memory", end),
        ("the end of the address space", top - 1),
    ] {
        let mut world = World::strict();
        let table = world.boot()[0];
        world.set(table, 32, DATA, 1, RW);
        world.set(table, 33, to, 1, RW);
        world.set(table, 34, DATA + 1, 1, RW);
        world.flush(&[tell(1, 32, 4)]);
        assert_eq!(world.pages(0), [(32, DATA), (34, DATA + 1)], "{what}");
        // To the unit the MSI window is a hole.
        let counted = u64::from(to != MSI_WINDOW.0);
        assert_eq!(
            (world.counts(0).not_ram, world.calls(0)),
            (counted, 2),
            "{what}"
        );
        assert_eq!(world.in_use(&[to]), [0_u64; 0], "{what}");
        // It can be unmapped like any other.
        world.unmap((table, 1), 32, 4);
        assert_eq!((world.pages(0), world.calls(0)), (vec![], 3), "{what}");
    }
}

/// A run that begins in memory and ends outside, one that begins outside, and a large page over the
/// hole: the part in memory is reached.
#[test]
fn the_part_of_a_run_that_is_memory_is_reached() {
    let mut world = World::strict();
    let table = world.boot()[0];
    let last = (8 << 20) / PAGE_SIZE - 2;
    world.map((table, 1), 64, last, 8, RW);
    assert_eq!(world.pages(0), [(64, last), (65, last + 1)]);
    let first = (16 << 20) / PAGE_SIZE;
    world.map((table, 1), 80, first - 2, 4, RW);
    let behind = world.pages(0).split_off(2);
    assert_eq!(
        behind,
        [(82, first), (83, first + 1)],
        "memory behind what is none is not reached"
    );
    world.unmap((table, 1), 80, 4);
    let entry = world.entry(table, 512, 2);
    world.put(entry, (24 << 20) | RW | PS);
    world.flush(&[tell(1, 512, 512)]);
    assert_eq!(world.pages(0).len(), 2);
    assert_eq!(world.counts(0).not_ram, 3);
}

/// Two reserved ranges: one of the host's IOMMU, and the MSI window, which the unit takes for a
/// hole.
#[test]
fn iovas_that_the_host_does_not_allow_are_refused() {
    for ((first, behind), count) in [(RESERVED, 2), (MSI_WINDOW, 0)] {
        let mut world = World::strict();
        let table = world.boot()[0];
        for page in [first - 1, first, behind - 1, behind] {
            world.map((table, 1), page, DATA + page % 4, 1, RW);
        }
        let reached: Vec<_> = world.pages(0).iter().map(|(page, _)| *page).collect();
        assert_eq!(reached, [first - 1, behind]);
        assert_eq!((world.counts(0).not_allowed, world.calls(0)), (count, 2));
        // A run over both ends.
        world.set(table, first - 8, DATA + 64, 16, RW);
        world.set(table, behind - 8, DATA + 128, 16, RW);
        world.flush(&[iotlb_domain(1)]);
        let is_inside = |(page, _): &(u64, u64)| (first..behind).contains(page);
        assert!(!world.pages(0).iter().any(is_inside));
        assert_eq!(world.pages(0).len(), 16);
    }
}

/// The kernel refuses one of three maps: its WAIT completes, it is not reached and not in use, and
/// the others are as they were.
#[test]
fn a_map_that_the_kernel_refuses_leaves_nothing_and_touches_nothing() {
    for errno in [ENOMEM, ENOSPC, EFAULT, Errno(17), Errno(22)] {
        for refused in 0..3 {
            let mut world = World::strict();
            let table = world.boot()[0];
            world.map((table, 1), 16, DATA, 1, RW);
            let kernel = world.seats[0].kernel.clone();
            kernel.fail_nth(refused, errno);
            let mut wanted = vec![(16, DATA)];
            // Runs of one page each.
            for (at, page) in [(0, 32), (1, 34), (2, 36)] {
                world.set(table, page, DATA + 10 + at, 1, RW);
                if at != refused as u64 {
                    wanted.push((page, DATA + 10 + at));
                }
            }
            world.flush(&[tell(1, 32, 8)]);
            assert_eq!(world.pages(0), wanted, "{errno:?} {refused}");
            let Counts { refused: count, .. } = world.counts(0);
            assert_eq!(count, 1);
            let gone = DATA + 10 + refused as u64;
            assert_eq!(
                world.in_use(&[gone]),
                [0_u64; 0],
                "a map that was refused is in use"
            );
            assert!(!world.seats[0].hardware.device().is_stopped);
            // The guest unmaps it and maps it again.
            let page = 32 + 2 * refused as u64;
            world.unmap((table, 1), page, 1);
            world.map((table, 1), page, gone, 1, RW);
            assert!(world.pages(0).contains(&(page, gone)));
        }
    }
}

/// As many mappings as allowed, as much locked memory as allowed: an unmap of the guest makes room
/// again.
#[test]
fn a_full_container_refuses_what_is_too_much_and_no_more() {
    for by_memory in [false, true] {
        let mut world = World::strict();
        let table = world.boot()[0];
        let kernel = world.seats[0].kernel.clone();
        match by_memory {
            false => kernel.limit_entries(3),
            true => kernel.limit_locked(3 * PAGE_SIZE),
        }
        for at in 0..5 {
            world.map((table, 1), 32 + 2 * at, DATA + 2 * at, 1, RW);
        }
        assert_eq!((world.pages(0).len(), world.counts(0).refused), (3, 2));
        world.unmap((table, 1), 32, 1);
        world.map((table, 1), 64, DATA + 64, 1, RW);
        assert!(world.pages(0).contains(&(64, DATA + 64)));
        // What was refused is found when the guest has everything looked at.
        world.unmap((table, 1), 34, 1);
        world.flush(&[iotlb_domain(1)]);
        assert_eq!(world.pages(0).len(), 3);
    }
}
