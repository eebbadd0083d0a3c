//! Windows: staleness, permissions, bounds; and register pages.

use fake_mem::{ArrayMem, FlatDma, PendingDma};
use guest_mem::{Dma, DmaFault, Gpa, Iova, Perm, RegPage, RegisterPage, Stop, Window};

fn dma() -> FlatDma {
    FlatDma::new(ArrayMem::new(64 << 10))
}

const RING: Iova = Iova::new(0x3000);

#[test]
fn words_are_little_endian_and_shared_with_the_guest() {
    let mut dma = dma();
    let read = dma.window(RING, 64, Perm::Read).unwrap();
    let write = dma.window(RING, 64, Perm::Write).unwrap();
    dma.mem().put_u64(Gpa::new(0x3008), 0x0807_0605_0403_0201);
    assert_eq!(read.load_u16(10), 0x0403);
    assert_eq!(read.load_u32_relaxed(12), 0x0807_0605);
    assert_eq!(read.load_u64(8), 0x0807_0605_0403_0201);
    write.store_u16(0, 0xabcd);
    write.store_u32_relaxed(4, 5);
    write.store_u64(16, 6);
    write.write_bytes(61, b"end");
    assert_eq!(dma.mem().get_u64(Gpa::new(0x3000)), 5 << 32 | 0xabcd);
    assert_eq!(dma.mem().get_u64(Gpa::new(0x3010)), 6);
    let mut end = [0; 3];
    read.read_bytes(61, &mut end);
    assert_eq!(&end, b"end");
}

#[test]
fn flush_makes_stale_and_refresh_makes_current() {
    let mut dma = dma();
    let mut window = dma.window(RING, 64, Perm::Read).unwrap();
    assert!(window.is_current(dma.generation()));
    dma.iommu.flush();
    assert!(!window.is_current(dma.generation()));
    dma.refresh(&mut window).unwrap();
    assert!(window.is_current(dma.generation()));
    assert_eq!(window.load_u16(0), 0);
}

#[test]
fn unmapped_window_stays_unusable_until_a_refresh_succeeds() {
    let mut dma = dma();
    let mut window = dma.window(RING, 64, Perm::Read).unwrap();
    dma.iommu.unmap(RING, 64);
    let blocked = Stop::Fault(DmaFault::Blocked { iova: RING });
    assert_eq!(dma.refresh(&mut window), Err(blocked));
    // Also when the generation it would compare with has not moved since.
    assert!(!window.is_current(dma.generation()));
    dma.iommu.allow_all();
    dma.refresh(&mut window).unwrap();
    assert!(window.is_current(dma.generation()));
}

#[test]
#[should_panic(expected = "last refresh failed")]
fn access_after_a_failed_refresh_panics() {
    let mut dma = dma();
    let mut window = dma.window(RING, 64, Perm::Read).unwrap();
    dma.iommu.unmap(RING, 64);
    dma.refresh(&mut window).unwrap_err();
    window.load_u16(0);
}

#[test]
fn refresh_that_pends_closes_and_its_repetition_opens() {
    let mut dma = PendingDma::kth(dma(), 1);
    let mut window = dma.window(RING, 64, Perm::Read).unwrap();
    dma.inner_mut().iommu.flush();
    assert!(matches!(dma.refresh(&mut window), Err(Stop::Pending(_))));
    assert!(!window.is_current(dma.generation()));
    dma.refresh(&mut window).unwrap();
    assert!(window.is_current(dma.generation()));
    assert_eq!((dma.accesses(), dma.take_tickets().len()), (3, 1));
}

#[test]
fn window_across_a_mapping_end_or_empty_is_a_bad_range() {
    let mut dma = dma();
    let bad = Stop::Fault(DmaFault::BadRange);
    let refused = |answer: guest_mem::Access<Window>| answer.err();
    assert_eq!(
        refused(dma.window(Iova::new(0x3ff0), 17, Perm::Read)),
        Some(bad)
    );
    assert_eq!(refused(dma.window(RING, 0, Perm::Read)), Some(bad));
    assert_eq!(
        refused(dma.window(Iova::new(u64::MAX), 2, Perm::Read)),
        Some(bad)
    );
    assert!(dma.window(Iova::new(0x3ff0), 16, Perm::Read).is_ok());
}

#[test]
fn shrunk_mapping_is_noticed_by_refresh() {
    let mut dma = dma();
    let mut window = dma.window(RING, 64, Perm::Read).unwrap();
    dma.iommu.set_page(32);
    assert_eq!(dma.refresh(&mut window), Err(DmaFault::BadRange.into()));
    assert!(!window.is_current(dma.generation()));
}

#[test]
#[should_panic(expected = "permission Read")]
fn store_through_a_read_window_panics() {
    let window = dma().window(RING, 64, Perm::Read).unwrap();
    window.store_u16(0, 1);
}

#[test]
#[should_panic(expected = "permission Write")]
fn load_through_a_write_window_panics() {
    let window = dma().window(RING, 64, Perm::Write).unwrap();
    window.load_u16(0);
}

#[test]
#[should_panic(expected = "outside or misaligned")]
fn load_past_the_end_panics() {
    let window = dma().window(RING, 63, Perm::Read).unwrap();
    window.load_u32(60);
}

#[test]
#[should_panic(expected = "outside or misaligned")]
fn largest_offset_does_not_wrap() {
    let window = dma().window(RING, 64, Perm::Read).unwrap();
    window.load_u64(u32::MAX - 7);
}

#[test]
#[should_panic(expected = "outside or misaligned")]
fn misaligned_word_panics() {
    let window = dma().window(Iova::new(0x3001), 8, Perm::Read).unwrap();
    assert!(!window.is_aligned(2));
    window.load_u16(0);
}

#[test]
fn window_keeps_memory_mapped_by_itself() {
    let mut dma = dma();
    dma.mem().put_u64(Gpa::new(0x3000), 11);
    let window = dma.window(RING, 8, Perm::Read).unwrap();
    drop(dma);
    assert_eq!(window.load_u64(0), 11);
}

fn exercise(page: &impl RegPage) {
    page.store64(0x88, 0x1_0000_0002);
    assert_eq!((page.load32(0x88), page.load32(0x8c)), (2, 1));
    assert_eq!(page.compare_exchange32(0x88, 3, 9), Err(2));
    assert_eq!(page.compare_exchange32(0x88, 2, 9), Ok(2));
    assert_eq!(
        page.compare_exchange64(0x88, 0x1_0000_0009, 4),
        Ok(0x1_0000_0009)
    );
    assert_eq!(page.compare_exchange64(0x88, 0, 1), Err(4));
    page.store32(0xffc, 7);
    assert_eq!(page.load64(0xff8), 7 << 32);
}

#[test]
fn array_page_behaves_as_a_register_page() {
    exercise(&RegisterPage::in_heap());
}

#[test]
#[cfg_attr(miri, ignore = "no memory files there")]
fn register_page_is_shared_through_its_memory_file() {
    use std::os::unix::fs::FileExt;
    let page = RegisterPage::new().unwrap();
    exercise(&page);
    let file = std::fs::File::from(page.memfd().try_clone_to_owned().unwrap());
    // The guest's side of the file: what it stores, the page loads, and the other way round.
    file.write_all_at(&[1, 2, 3, 4], 0x18).unwrap();
    assert_eq!(page.load32(0x18), 0x0403_0201);
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, 0xffc).unwrap();
    assert_eq!(bytes, [7, 0, 0, 0]);
    assert!(page.hva().is_aligned(4096));
}

#[test]
#[should_panic(expected = "offset outside the mapping")]
fn register_past_the_page_panics() {
    RegisterPage::in_heap().load64(0xffc);
}

#[test]
#[should_panic(expected = "misaligned word")]
fn misaligned_register_panics() {
    RegisterPage::in_heap().store64(0x84, 0);
}
