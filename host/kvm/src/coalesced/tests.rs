use std::os::fd::AsFd;

use super::*;

#[test]
fn the_ring_has_kvms_170_entries() {
    assert_eq!(ENTRIES, 170);
}

/// A page of ordinary shared memory in the ring's place, with us as the kernel.
#[test]
fn entries_come_out_in_order_across_the_end_and_bounded() {
    let file = tempfile::tempfile().unwrap();
    let offset = PAGE as u64 * u64::from(KVM_COALESCED_MMIO_PAGE_OFFSET);
    file.set_len(offset + PAGE as u64).unwrap();
    let mut ring = CoalescedRing::map(file.as_fd()).unwrap();
    assert!(ring.is_empty());
    let produce = |ring: &CoalescedRing, address: u64| {
        let last = ring.last().load(Ordering::Relaxed);
        let entry = kvm_coalesced_mmio {
            phys_addr: address,
            len: 4,
            data: [1, 2, 3, 4, 5, 6, 7, 8],
            ..Default::default()
        };
        // SAFETY: inside the page, and the consumer is the same thread.
        unsafe {
            let entries =
                (&raw mut (*ring.page.as_ptr()).coalesced_mmio).cast::<kvm_coalesced_mmio>();
            ptr::write_volatile(entries.add(last as usize), entry);
        }
        ring.last().store((last + 1) % ENTRIES, Ordering::Release);
    };
    let mut seen = Vec::new();
    let mut next = 0;
    for _ in 0..5 {
        for _ in 0..100 {
            produce(&ring, next);
            next += 1;
        }
        assert!(!ring.is_empty());
        assert_eq!(ring.drain(60, |address, _| seen.push(address)), 60);
        assert_eq!(ring.drain(60, |address, _| seen.push(address)), 40);
    }
    assert_eq!(seen, (0..500).collect::<Vec<_>>());
    produce(&ring, 7);
    ring.drain(1, |_, data| assert_eq!(data, [1, 2, 3, 4]));
    assert!(ring.is_empty());
}

#[test]
fn nonsense_in_the_page_stays_inside_it() {
    let file = tempfile::tempfile().unwrap();
    let offset = PAGE as u64 * u64::from(KVM_COALESCED_MMIO_PAGE_OFFSET);
    file.set_len(offset + PAGE as u64).unwrap();
    let mut ring = CoalescedRing::map(file.as_fd()).unwrap();
    ring.last().store(u32::MAX, Ordering::Relaxed);
    ring.first().store(u32::MAX - 1, Ordering::Relaxed);
    assert_eq!(ring.drain(1000, |_, _| {}), 1000);
}
