use super::*;

const PAGE: Mapping = Mapping {
    page: Gpa::new(0x5000),
    size: PageSize::FourK,
    permissions: 1,
};

#[test]
fn entries_are_tagged_by_epoch() {
    let mut tlb = Iotlb::new();
    let (one, two) = (tlb.begin_epoch(), tlb.begin_epoch());
    tlb.insert(one, Iova::new(0x1000), &PAGE);
    let gpa = Some(Gpa::new(0x5234));
    assert_eq!(tlb.lookup(one, Iova::new(0x1234), 1), gpa);
    assert_eq!(tlb.lookup(two, Iova::new(0x1234), 1), None);
    assert_eq!(tlb.lookup(one, Iova::new(0x1234), 2), None);
    tlb.flush_pages(two, Iova::new(0x1000), 1);
    assert_eq!(tlb.lookup(one, Iova::new(0x1234), 1), gpa);
    tlb.flush_pages(one, Iova::new(0), 2);
    assert_eq!(tlb.lookup(one, Iova::new(0x1234), 1), None);
}

#[test]
fn epochs_run_out_before_one_is_used_twice() {
    let mut tlb = Iotlb::new();
    tlb.last_epoch = LAST_EPOCH - 1;
    let last = tlb.begin_epoch();
    tlb.insert(last, Iova::new(0xffff_ffff_f000), &PAGE);
    // The highest page number and the highest epoch fill the key without touching each other.
    assert!(tlb.lookup(last, Iova::new(0xffff_ffff_f000), 1).is_some());
    for bit in 48..64 {
        let alias = Iova::new(0xffff_ffff_f000 ^ 1 << bit);
        assert_eq!(tlb.lookup(last, alias, 3), None, "bit {bit}");
    }
    assert!(tlb.is_exhausted());
    tlb.clear();
    assert_eq!(tlb.lookup(last, Iova::new(0xffff_ffff_f000), 1), None);
    assert!(!tlb.is_exhausted());
}

#[test]
fn a_page_flush_drops_the_large_entry_around_it() {
    let mut tlb = Iotlb::new();
    let tag = tlb.begin_epoch();
    for size in [PageSize::TwoM, PageSize::OneG] {
        let mapping = Mapping {
            page: Gpa::new(0x4000_0000),
            size,
            permissions: 3,
        };
        tlb.insert(tag, Iova::new(0x8000_0000), &mapping);
        let inside = Iova::new(0x8000_0000 + size.bytes() - 1);
        assert_eq!(tlb.lookup_large(tag, inside), Some(mapping));
        tlb.flush_pages(tag, Iova::new(0x8001_0000), 16);
        assert_eq!(tlb.lookup_large(tag, Iova::new(0x8000_0000)), None);
    }
}
