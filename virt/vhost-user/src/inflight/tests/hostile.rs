//! Hostile front ends and drivers: a tracker returns nothing worse than errors.

use super::*;
use crate::backend::RingLayout;

/// Reads as these flags, whatever is stored.
struct AnyRing(Vec<u8>);

impl PackedRing for AnyRing {
    fn flags(&self, at: u16) -> u16 {
        let byte = self.0[usize::from(at) % self.0.len()];
        u16::from(byte & 1) << 7 | u16::from(byte >> 1 & 1) << 15
    }

    fn set_flags(&mut self, _: u16, _: u16) {}
}

const DESC: PackedDesc = PackedDesc {
    addr: 1,
    len: 2,
    id: 3,
    flags: 0,
};

const START: PackedPosition = PackedPosition { idx: 0, wrap: true };

fn sizes(size: u16) -> PackedSizes {
    PackedSizes {
        desc_num: size,
        ring_size: size,
    }
}

/// A region whose bytes are mostly small numbers, with or without a valid beginning.
fn contents() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 320),
        prop::collection::vec(
            prop_oneof![4 => Just(0_u8), 4 => 0..6_u8, 1 => any::<u8>()],
            320
        ),
    ]
}

fn region(mut bytes: Vec<u8>, size: u16, is_plausible: bool) -> MemRegion {
    if is_plausible {
        bytes[..8].fill(0);
        bytes[8..10].copy_from_slice(&VERSION.to_ne_bytes());
        bytes[10..12].copy_from_slice(&size.to_ne_bytes());
    }
    let mut region = MemRegion::new(bytes.len());
    region.bytes_mut().copy_from_slice(&bytes);
    region
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_split_contents_are_refused_or_can_be_finished(
        bytes in contents(),
        size in 1..9_u16,
        used_idx in prop_oneof![0..9_u16, any::<u16>()],
        is_plausible: bool,
    ) {
        let region = region(bytes, size, is_plausible);
        if let Ok((mut split, recovery)) = Split::recover(region, size, used_idx) {
            for &head in &recovery.heads {
                prop_assert_eq!(split.begin(head), Err(TrackError::InFlight { head }));
                prop_assert_eq!(split.complete(head), Ok(()));
                prop_assert_eq!(split.complete(head), Err(TrackError::NotInFlight { head }));
            }
            let used_idx = split.used_idx_after();
            prop_assert_eq!(used_idx, recovery.next_avail);
            split.commit();
            let (_, recovery) = Split::recover(split.into_region(), size, used_idx).unwrap();
            prop_assert_eq!(recovery.heads, Vec::<u16>::new());
        }
    }

    #[test]
    fn any_packed_contents_are_refused_or_can_be_finished(
        bytes in contents(),
        size in 1..9_u16,
        flags in prop::collection::vec(any::<u8>(), 1..9),
        is_plausible: bool,
    ) {
        let region = region(bytes, size, is_plausible);
        finish_packed(region, size, &mut AnyRing(flags));
    }

    #[test]
    fn a_packed_region_with_some_bytes_changed_is_refused_or_can_be_finished(
        chains in prop::collection::vec(1..4_usize, 0..6),
        completed in 0..4_usize,
        is_advanced: bool,
        changes in prop::collection::vec((0..320_usize, any::<u8>()), 0..4),
        flags in prop::collection::vec(any::<u8>(), 1..9),
    ) {
        let region = MemRegion::new(queue_region_len(RingLayout::Packed, 8));
        let mut ring = AnyRing(flags);
        let (mut packed, _) = Packed::recover(region, sizes(8), START, &mut ring).unwrap();
        let slots: Vec<Slot> = chains
            .iter()
            .filter_map(|&len| packed.begin(&[DESC; 4][..len]).ok())
            .collect();
        for &slot in slots.iter().take(completed) {
            packed.complete(slot).unwrap();
        }
        if is_advanced {
            packed.advance();
        }
        let mut region = packed.into_region();
        for (at, value) in changes {
            let len = region.bytes().len();
            region.bytes_mut()[at % len] = value;
        }
        finish_packed(region, 8, &mut ring);
    }

    /// A tracker whose region is overwritten after every call does what one left alone does.
    #[test]
    fn a_running_tracker_does_not_believe_the_region(
        calls in prop::collection::vec((any::<bool>(), 0..5_u16), 0..40),
        rewrite: u8,
    ) {
        let mortal = |layout| SurvivingRegion::new(queue_region_len(layout, 4));
        let (split_region, packed_region) = (mortal(RingLayout::Split), mortal(RingLayout::Packed));
        let splits = [mortal(RingLayout::Split), split_region.clone()];
        let packeds = [mortal(RingLayout::Packed), packed_region.clone()];
        let mut splits = splits.map(|region| Split::recover(region, 4, 0).unwrap().0);
        let mut ring = AnyRing(vec![0]);
        let mut packeds = packeds
            .map(|region| Packed::recover(region, sizes(4), START, &mut ring).unwrap().0);
        for (is_begin, number) in calls {
            split_region.memory.borrow_mut().bytes_mut().fill(rewrite);
            packed_region.memory.borrow_mut().bytes_mut().fill(rewrite);
            if is_begin {
                let [left, right] = splits.each_mut().map(|split| split.begin(number));
                prop_assert_eq!(left, right);
                let descs = &[DESC; 5][..usize::from(number)];
                let [left, right] = packeds.each_mut().map(|packed| packed.begin(descs));
                prop_assert_eq!(left, right);
            } else {
                let [left, right] = splits.each_mut().map(|split| {
                    let completed = split.complete(number);
                    let used_idx = split.used_idx_after();
                    split.commit();
                    (completed, used_idx)
                });
                prop_assert_eq!(left, right);
                let [left, right] = packeds.each_mut().map(|packed| {
                    let completed = packed.complete(Slot(number));
                    packed.advance();
                    packed.commit();
                    (completed, packed.used())
                });
                prop_assert_eq!(left, right);
            }
        }
    }
}

fn finish_packed(region: MemRegion, size: u16, ring: &mut AnyRing) {
    let Ok((mut packed, recovery)) = Packed::recover(region, sizes(size), START, ring) else {
        return;
    };
    let descs: usize = recovery.requests.iter().map(|one| one.descs.len()).sum();
    assert!(descs <= usize::from(size));
    for request in &recovery.requests {
        packed.complete(request.slot).unwrap();
        packed.complete(request.slot).unwrap_err();
    }
    packed.advance();
    packed.commit();
    assert_eq!(packed.used(), recovery.avail);
    let (mut packed, recovery) =
        Packed::recover(packed.into_region(), sizes(size), START, ring).unwrap();
    assert!(recovery.requests.is_empty());
    // All entries are free again.
    let all = vec![DESC; usize::from(size)];
    packed.begin(&all).unwrap();
}

#[test]
fn drivers_and_callers_out_of_order_are_refused() {
    let region = MemRegion::new(queue_region_len(RingLayout::Split, 4));
    let (mut split, _) = Split::recover(region, 4, 0).unwrap();
    let outside = TrackError::Head {
        head: 4,
        desc_num: 4,
    };
    assert_eq!(split.begin(4), Err(outside.clone()));
    assert_eq!(split.complete(4), Err(outside));
    split.begin(3).unwrap();
    split.complete(3).unwrap();
    assert_eq!(split.begin(3), Err(TrackError::InFlight { head: 3 }));
    split.begin(1).unwrap();
    split.commit();
    split.begin(3).unwrap();

    let region = MemRegion::new(queue_region_len(RingLayout::Packed, 4));
    let mut ring = AnyRing(vec![0]);
    let (mut packed, _) = Packed::recover(region, sizes(4), START, &mut ring).unwrap();
    let one = packed.begin(&[DESC; 3]).unwrap();
    assert!(matches!(
        packed.begin(&[DESC; 2]),
        Err(TrackError::Chain {
            len: 2,
            in_flight: 3,
            ring_size: 4
        })
    ));
    assert!(matches!(packed.begin(&[]), Err(TrackError::Chain { .. })));
    let other = packed.begin(&[DESC]).unwrap();
    packed.complete(one).unwrap();
    packed.commit();
    assert_eq!(packed.begin(&[DESC]), Err(TrackError::BatchOpen));
    packed.advance();
    assert_eq!(packed.complete(other), Err(TrackError::BatchOpen));
    packed.commit();
    assert_eq!(
        packed.complete(one),
        Err(TrackError::NotInFlight { head: 0 })
    );
    packed.begin(&[DESC; 3]).unwrap();
}

#[test]
fn regions_of_another_size_version_or_kind_are_refused() {
    let len = queue_region_len(RingLayout::Split, 4);
    let formatted = || {
        let (split, _) = Split::recover(MemRegion::new(len), 4, 0).unwrap();
        split.into_region()
    };
    let refusal = |region, size, used_idx| Split::recover(region, size, used_idx).unwrap_err();
    assert_eq!(
        refusal(MemRegion::new(len - 1), 4, 0),
        RecoverError::TooSmall {
            size: len - 1,
            needed: len
        }
    );
    for desc_num in [0, 32769] {
        let expected = RecoverError::Size {
            ring_size: desc_num,
            desc_num,
        };
        assert_eq!(refusal(MemRegion::new(1 << 20), desc_num, 0), expected);
    }
    assert_eq!(
        refusal(formatted(), 3, 0),
        RecoverError::corrupt("desc_num", 4_u16)
    );
    assert_eq!(
        refusal(formatted(), 4, 5),
        RecoverError::corrupt("used_idx's distance", 5_u16)
    );
    let mut newer = formatted();
    newer.store_u16(8, 2);
    assert_eq!(
        refusal(newer, 4, 0),
        RecoverError::corrupt("version", 2_u16)
    );
    let mut featured = formatted();
    featured.store_u64(0, 1);
    assert_eq!(
        refusal(featured, 4, 0),
        RecoverError::corrupt("features", 1_u64)
    );
}
