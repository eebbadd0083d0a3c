use std::os::fd::AsFd;

use super::*;

#[test]
fn the_ring_has_kvms_170_entries() {
    assert_eq!(ENTRIES, 170);
}

/// KVM's side of a ring, which is a page of ordinary shared memory.
pub(crate) struct FakeKvm {
    /// Ours, beside the consumer's.
    page: CoalescedRing,
    _file: std::fs::File,
}

impl FakeKvm {
    /// A ring that is empty, and its consumer's end.
    pub(crate) fn new() -> (Self, CoalescedRing) {
        let file = tempfile::tempfile().unwrap();
        let offset = PAGE as u64 * u64::from(KVM_COALESCED_MMIO_PAGE_OFFSET);
        file.set_len(offset + PAGE as u64).unwrap();
        let map = || CoalescedRing::map(file.as_fd()).unwrap();
        let (page, ring) = (map(), map());
        (Self { page, _file: file }, ring)
    }

    /// Logs a write; false: the ring is full (KVM keeps one entry free), and the write exits.
    pub(crate) fn log(&self, address: u64, data: &[u8]) -> bool {
        let page = &self.page.page;
        let last = page.last().load(Ordering::Relaxed);
        let next = (last + 1) % ENTRIES;
        if next == page.first().load(Ordering::Acquire) % ENTRIES {
            return false;
        }
        let mut entry = kvm_coalesced_mmio {
            phys_addr: address,
            len: data.len() as u32,
            ..Default::default()
        };
        entry.data[..data.len()].copy_from_slice(data);
        // SAFETY: inside the page; the consumer does not read the entry before `last` has passed
        // it.
        unsafe {
            let entries = (&raw mut (*page.0.as_ptr()).coalesced_mmio).cast::<kvm_coalesced_mmio>();
            ptr::write_volatile(entries.add(last as usize), entry);
        }
        page.last().store(next, Ordering::Release);
        true
    }
}

#[test]
fn entries_come_out_in_order_across_the_end_and_bounded() {
    let (kvm, mut ring) = FakeKvm::new();
    assert!(ring.is_empty());
    let mut seen = Vec::new();
    let mut next = 0;
    for _ in 0..5 {
        for _ in 0..100 {
            assert!(kvm.log(next, &[1, 2, 3, 4]));
            next += 1;
        }
        assert!(!ring.is_empty());
        assert_eq!(ring.drain(60, |address, _| seen.push(address)), 60);
        assert_eq!(ring.drain(60, |address, _| seen.push(address)), 40);
    }
    assert_eq!(seen, (0..500).collect::<Vec<_>>());
    assert!(kvm.log(7, &[1, 2, 3, 4]));
    ring.drain(1, |_, data| assert_eq!(data, [1, 2, 3, 4]));
    assert!(ring.is_empty() && ring.probe().is_empty());
}

#[test]
fn nonsense_in_the_page_stays_inside_it() {
    let (_kvm, mut ring) = FakeKvm::new();
    ring.page.last().store(u32::MAX, Ordering::Relaxed);
    ring.page.first().store(u32::MAX - 1, Ordering::Relaxed);
    assert_eq!(ring.drain(1000, |_, _| {}), 1000);
}
