//! A kernel as the back end: three methods, its own errors, whole mappings only.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use std::error::Error;
use std::sync::Mutex;

use address::Iova;
use iova::{Access, CoreId};

use super::*;
use crate::ManualClock;
use crate::invalidate::NullInvalidator;
use crate::table::{IoMap, MapError, Translation, UnmapError};

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("errno {0}")]
struct Errno(i32);

const EFAULT: Errno = Errno(14);
const EINVAL: Errno = Errno(22);
const ENOSPC: Errno = Errno(28);

/// Model of VFIO type 1: a bound on mappings, and only whole ones are unmapped.
struct Kernel {
    /// By first page: pages, memory, access.
    mappings: Mutex<BTreeMap<u64, (u64, u64, Access)>>,
    most: usize,
}

/// Address without memory behind it.
const BAD: PhysAddr = PhysAddr::new(0xdead_0000);

impl IoMap for Arc<Kernel> {
    type Error = Errno;

    fn map(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError<Errno>> {
        let mut mappings = self.mappings.lock().unwrap();
        if phys == BAD {
            return Err(MapError::Backend(EFAULT));
        }
        if mappings.len() == self.most {
            return Err(MapError::Full(ENOSPC));
        }
        let overlaps =
            |(first, (pages, ..)): (&u64, &(u64, u64, Access))| first + pages > range.first().raw();
        assert!(
            !mappings
                .range(..=range.last().raw())
                .next_back()
                .is_some_and(overlaps)
        );
        mappings.insert(range.first().raw(), (range.pages(), phys.raw(), access));
        Ok(())
    }

    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError<Errno>> {
        let mut mappings = self.mappings.lock().unwrap();
        let mut next = range.first().raw();
        while next <= range.last().raw() {
            match mappings.get(&next) {
                Some((pages, ..)) if next + pages <= range.last().raw() + 1 => next += pages,
                _ => return Err(UnmapError::Backend(EINVAL)),
            }
        }
        mappings.retain(|first, _| !(range.first().raw()..=range.last().raw()).contains(first));
        Ok(())
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let mappings = self.mappings.lock().unwrap();
        let page = iova.raw() >> 12;
        let (first, &(pages, phys, access)) = mappings.range(..=page).next_back()?;
        (page < first + pages).then(|| Translation {
            phys: PhysAddr::new(phys + (iova.raw() - (first << 12))),
            access,
            leaf_pages: 1,
        })
    }
}

type KernelMapper = DmaMapper<TreeAllocator, Arc<Kernel>, NullInvalidator, ManualClock>;

fn over_a_kernel(policy: Policy, most: usize) -> (Arc<Kernel>, KernelMapper) {
    let kernel = Arc::new(Kernel {
        mappings: Mutex::default(),
        most,
    });
    let domain = Domain {
        allocator: space(1 << 12, 2),
        table: Arc::clone(&kernel),
        invalidator: NullInvalidator,
        clock: ManualClock::new(),
    };
    let mapper = DmaMapper::new(domain, policy, DeviceLimits::default()).unwrap();
    (kernel, mapper)
}

#[test]
fn an_ioctls_errno_reaches_the_driver() {
    let (_, mapper) = over_a_kernel(Policy::STRICT, 8);
    let mut core = mapper.core(CoreId(0)).unwrap();
    let refused = core.map(&[Segment::new(BAD, 4096)], Direction::ToDevice);
    let refused = refused.unwrap_err();
    assert_eq!(refused, DmaMapError::Table(MapError::Backend(EFAULT)));
    let errno = refused.source().and_then(Error::source).unwrap();
    assert_eq!(errno.downcast_ref(), Some(&EFAULT));
    assert_eq!(mapper.allocator_stats().live_ranges, 0);
}

/// Also lists that fail halfway, and whatever length the caller names.
#[test]
fn a_kernel_is_asked_for_whole_mappings_only() {
    for policy in policies() {
        let (kernel, mapper) = over_a_kernel(policy, 1 << 10);
        let mut core = mapper.core(CoreId(0)).unwrap();
        let mut out = Vec::new();
        let to = Direction::ToDevice;
        let three = Segment::new(PhysAddr::new(0x10_0800), 0x2000);
        let mut live = Vec::new();
        for round in 0..40 {
            live.push(
                core.map_list(
                    &DeviceLimits::default(),
                    &[page(round), three, page(round + 9)],
                    to,
                    &mut out,
                )
                .unwrap(),
            );
            live.push(core.map(&[three], to).unwrap());
            let halfway = core.map_list(
                &DeviceLimits::default(),
                &[page(1), three, Segment::new(BAD, 4096)],
                to,
                &mut out,
            );
            assert!(matches!(
                halfway,
                Err(DmaMapError::Table(MapError::Backend(EFAULT)))
            ));
            let one = live.swap_remove(live.len() / 2);
            // Less than it has, and more.
            for len in [4096, one.len() + 4096] {
                assert!(core.unmap_at(one.iova(), len).is_err(), "{policy:?}");
            }
            core.unmap(one).unwrap();
        }
        for one in live {
            core.unmap_at(one.iova(), one.len()).unwrap();
        }
        core.park().unwrap();
        assert_eq!(kernel.mappings.lock().unwrap().len(), 0, "{policy:?}");
    }
}

#[test]
fn a_kernel_that_is_full_gets_back_what_is_idle() {
    let (kernel, mapper) = over_a_kernel(Policy::optimistic(256), 4);
    let mut core = mapper.core(CoreId(0)).unwrap();
    let mut held = None;
    for number in 0..32 {
        let mapped = core.map(&[page(number)], Direction::ToDevice);
        let mapped = mapped.expect("at most one is in use");
        if let Some(before) = held.replace(mapped) {
            core.unmap(before).unwrap();
        }
    }
    let rest: Vec<_> = (40..43)
        .map(|number| core.map(&[page(number)], Direction::ToDevice).unwrap())
        .collect();
    let full = core.map(&[page(50)], Direction::ToDevice);
    assert_eq!(full, Err(DmaMapError::Table(MapError::Full(ENOSPC))));
    assert_eq!(kernel.mappings.lock().unwrap().len(), rest.len() + 1);
    rest.into_iter()
        .chain(held)
        .for_each(|one| core.unmap(one).unwrap());
}
