//! Faults, hostile requests and the misbehaving mode.

use std::time::{Duration, Instant};

use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Iommu, Iova, NoIommu, Perm, SourceId, View};
use proptest::prelude::*;

use super::support::*;
use crate::blk::request::{STATUS_IOERR, STATUS_OK, kind};
use crate::blk::{BlkConfig, BlockIo, MAX_TRANSFER, Transfer};
use crate::ring::{FullJournal, Parked, RETRY_NS};
use crate::{Activity, QueueDevice, Service};

#[test]
fn data_that_fault_fail_the_request_and_no_other() {
    for transfer in [Transfer::Direct, Transfer::Bounce] {
        let mut guest = Guest::new(raw_disk(transfer).0);
        let mut dma = guest.dma();
        dma.iommu
            .deny(Iova::new(DATA + 0x1000), 0x1000, Perm::Write);
        dma.iommu.deny(Iova::new(DATA + 0x1000), 0x1000, Perm::Read);
        guest.request(0, kind::IN, 0, &[], &[(DATA, 0x2000)]);
        guest.request(1, kind::OUT, 0, &[(DATA, 0x2000)], &[]);
        guest.request(2, kind::IN, 0, &[], &[(DATA, 0x1000)]);
        for _ in 0..3 {
            guest.wait_used(&mut dma);
        }
        let statuses = [guest.status(0), guest.status(1), guest.status(2)];
        assert_eq!(
            statuses,
            [STATUS_IOERR, STATUS_IOERR, STATUS_OK],
            "{transfer:?}"
        );
        assert_eq!(
            dma.iommu.faults().len(),
            2,
            "one record for each refused access"
        );
        assert_eq!(dma.iommu.leases().len(), 0);
        assert!(!guest.blk.needs_reset());
    }
}

#[test]
fn a_header_that_faults_fails_the_request() {
    let mut guest = Guest::new(mem_disk());
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    dma.iommu.deny(Iova::new(HEADERS), 4096, Perm::Read);
    guest.wait_used(&mut dma);
    assert_eq!(guest.status(0), STATUS_IOERR);
}

#[test]
fn a_status_byte_that_faults_is_never_a_completion() {
    let mut guest = Guest::new(mem_disk());
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    dma.iommu.deny(Iova::new(HEADERS), 4096, Perm::Write);
    guest.settle(&mut dma);
    assert_eq!(guest.driver.used(), None);
    assert!(guest.blk.needs_reset());
    assert_eq!(guest.irq.config, 1, "announced once");
    guest.settle(&mut dma);
    assert_eq!((guest.irq.config, dma.iommu.faults().len()), (1, 1));
}

#[test]
fn chains_without_header_or_status_need_a_reset() {
    for (readable, writable) in [
        (vec![(HEADERS, 16)], vec![]),
        (vec![(HEADERS, 15)], vec![(DATA, 513)]),
        (vec![], vec![(DATA, 600)]),
    ] {
        let mut guest = Guest::new(mem_disk());
        let mut dma = guest.dma();
        guest.driver.add(&readable, &writable);
        guest.settle(&mut dma);
        assert!(guest.blk.needs_reset());
        assert_eq!((guest.irq.config, guest.blk.stats().violations), (1, 1));
        // After a reset it works again.
        guest.reactivate();
        assert_eq!(guest.run(kind::IN, 0, &[], &[(DATA, 512)]).0, STATUS_OK);
    }
}

#[test]
fn header_and_status_may_be_cut_anywhere() {
    let mut guest = Guest::new(mem_disk());
    let mut dma = guest.dma();
    let header = guest.header(0, kind::OUT, 9);
    let bytes: Vec<u8> = (0..1024u32).map(|at| (at * 3) as u8).collect();
    // The header's last byte shares a buffer with the data; its first ones come one by one.
    guest.driver.put(DATA, &guest.driver.get(header + 15, 1));
    guest.driver.put(DATA + 1, &bytes);
    guest.driver.add(
        &[
            (header, 1),
            (header + 1, 2),
            (header + 3, 12),
            (DATA, 1000),
            (DATA + 1000, 25),
        ],
        // All writable bytes but the last have no meaning.
        &[(DATA + 0x4000, 30), (header + 40, 9)],
    );
    assert_eq!(guest.wait_used(&mut dma).1, 1);
    assert_eq!(guest.status(0), STATUS_OK);
    // Data and status in one buffer.
    let header = guest.header(1, kind::IN, 9);
    guest.driver.add(&[(header, 16)], &[(DATA + 0x8000, 1025)]);
    assert_eq!(guest.wait_used(&mut dma).1, 1025);
    assert_eq!(guest.driver.get(DATA + 0x8000, 1024), bytes);
    assert_eq!(guest.driver.get(DATA + 0x8400, 1), [STATUS_OK]);
}

#[test]
fn a_full_table_of_leases_delays_requests_and_fails_none() {
    // A disk that does nothing at once, so that leases pile up.
    let (disk, control, _file) = slow(Transfer::Direct);
    control.set_open(true);
    let mut guest = Guest::new(disk);
    // Four pieces in flight at most: the last request is done in parts.
    let mut dma = FlatDma::with_max_leases(guest.mem.clone(), 4);
    let pieces = |from: u64, count| -> Vec<(u64, u32)> {
        (0..count).map(|at| (from + 0x2000 * at, 0x1000)).collect()
    };
    for slot in 0..6 {
        let data = pieces(DATA + 0x1_0000 * slot, 3);
        guest.request(slot, kind::IN, 8 * slot, &[], &data);
    }
    guest.request(6, kind::IN, 0, &[], &pieces(DATA, 5));
    for _ in 0..7 {
        guest.wait_used(&mut dma);
    }
    assert!((0..7).all(|slot| guest.status(slot) == STATUS_OK));
    assert!(guest.blk.stats().backpressure > 0);
}

#[test]
fn a_block_in_more_pieces_than_a_device_may_lease_is_refused() {
    let (disk, control, _file) = slow(Transfer::Direct);
    control.set_open(true);
    let mut guest = Guest::new(disk);
    let mut dma = FlatDma::with_max_leases(guest.mem.clone(), 4);
    // Five pieces of 128 bytes that do not touch: a block in four, and in five.
    let pieces =
        |count| -> Vec<(u64, u32)> { (0..count).map(|at| (DATA + 512 * at, 128)).collect() };
    let mut five = pieces(5);
    five[3].1 = 64;
    five[4].1 = 64;
    guest.request(0, kind::IN, 0, &[], &pieces(4));
    guest.request(1, kind::IN, 0, &[], &five);
    for _ in 0..2 {
        guest.wait_used(&mut dma);
    }
    assert_eq!(
        [guest.status(0), guest.status(1)],
        [STATUS_OK, STATUS_IOERR]
    );
    assert_eq!(dma.iommu.leases().len(), 0);
}

#[test]
fn a_disk_waits_while_another_holds_all_leases_and_then_goes_on() {
    let mut iommu = NoIommu::new(4);
    let mem = ArrayMem::new(MEMORY);
    let (disk, control, _file) = slow(Transfer::Direct);
    let mut greedy = Guest::on(mem.clone(), RINGS, disk);
    let mut modest = Guest::on(mem.clone(), RINGS + 0x8000, raw_disk(Transfer::Direct).0);
    let sources = [SourceId::new(0, 1, 0), SourceId::new(0, 2, 0)];
    // Pages that do not touch: a lease each.
    for slot in 0..4 {
        let data = (DATA + 0x2000 * slot, 0x1000);
        greedy.request(slot, kind::IN, 0, &[], &[data]);
    }
    greedy.settle(&mut View::new(&mut iommu, &mem, sources[0]));
    assert_eq!(iommu.leases().len(), 4);
    modest.request(8, kind::IN, 0, &[], &[(DATA + 0x2_0000, 0x1000)]);
    let mut dma = View::new(&mut iommu, &mem, sources[1]);
    modest.settle(&mut dma);
    assert_eq!(modest.driver.used(), None, "neither done nor failed");
    assert!(!modest.blk.has_work(&mut dma), "it can do nothing but wait");
    // One of the other's ends: that is what wakes this one.
    control.release(1);
    greedy.wait_used(&mut View::new(&mut iommu, &mem, sources[0]));
    let mut dma = View::new(&mut iommu, &mem, sources[1]);
    assert!(modest.blk.has_work(&mut dma));
    modest.wait_used(&mut dma);
    assert_eq!(modest.status(8), STATUS_OK);
}

#[test]
fn buffers_of_requests_that_only_wait_to_be_shown_delay_others_and_fail_none() {
    let (disk, control, _file) = slow(Transfer::Bounce);
    let mut guest = Guest::new(disk);
    let mut dma = guest.dma();
    // Two that take up the whole pool have ended, and the ring is out of reach.
    for slot in 0..2 {
        let data = (DATA + u64::from(MAX_TRANSFER) * slot, MAX_TRANSFER);
        guest.request(slot, kind::IN, 0, &[], &[data]);
    }
    guest.settle(&mut dma);
    let used = guest.driver.config().used.align_down(4096);
    dma.iommu.deny(used, 4096, Perm::Write);
    control.set_open(true);
    let deadline = Instant::now() + Duration::from_secs(2);
    while guest.blk.in_flight() != 0 {
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
        assert!(Instant::now() < deadline, "no completion");
    }
    let parked = guest.blk.ring(0).and_then(|ring| ring.parked());
    assert_eq!(parked, Some(Parked::Fault));
    // Another comes, and the ring goes on.
    guest.request(2, kind::IN, 0, &[], &[(DATA + 0xa0_0000, 512)]);
    assert!(!guest.blk.has_work(&mut dma), "nothing to do but wait");
    dma.iommu.allow_all();
    guest.blk.kick(0);
    for _ in 0..3 {
        guest.wait_used(&mut dma);
    }
    assert_eq!((0..3).map(|slot| guest.status(slot)).max(), Some(STATUS_OK));
}

#[test]
fn a_ring_whose_fault_was_repaired_goes_on_without_a_doorbell() {
    let mut guest = Guest::new(mem_disk());
    let mut dma = guest.dma();
    guest.request(0, kind::IN, 0, &[], &[(DATA, 512)]);
    guest.wait_used(&mut dma);
    guest.blk.arm(&mut dma);
    assert!(!guest.blk.has_work(&mut dma));
    assert_eq!(guest.blk.opens_at_ns(), None, "nothing is due");
    let avail = guest.driver.config().avail.align_down(4096);
    dma.iommu.deny(avail, 4096, Perm::Read);
    guest.request(1, kind::IN, 1, &[], &[(DATA, 512)]);
    guest.blk.kick(0);
    let _ = guest.blk.poll(&mut dma, &mut guest.irq, 7);
    assert_eq!(
        guest.blk.opens_at_ns(),
        Some(0),
        "it is looked after at once"
    );
    let _ = guest.blk.poll(&mut dma, &mut guest.irq, 7);
    guest.blk.arm(&mut dma);
    assert!(!guest.blk.has_work(&mut dma), "it sleeps");
    let at = guest.blk.opens_at_ns().expect("a sleeper that wakes");
    assert_eq!(at, 7 + RETRY_NS);
    // Still out of reach: one more record, and the next time is as far off.
    let _ = guest.blk.poll(&mut dma, &mut guest.irq, at);
    let _ = guest.blk.poll(&mut dma, &mut guest.irq, at);
    let stats = guest.blk.stats();
    assert_eq!((stats.ring_faults, dma.iommu.faults().len()), (2, 2));
    assert_eq!(guest.blk.opens_at_ns(), Some(at + RETRY_NS));
    dma.iommu.allow_all();
    guest.request(2, kind::IN, 2, &[], &[(DATA + 512, 512)]);
    assert_eq!(guest.driver.avail_event(), 1, "the driver does not ring");
    let _ = guest.blk.poll(&mut dma, &mut guest.irq, at + RETRY_NS - 1);
    assert_eq!(guest.driver.used(), None, "too early");
    let _ = guest.blk.poll(&mut dma, &mut guest.irq, at + RETRY_NS);
    assert!(guest.driver.used().is_some() && guest.driver.used().is_some());
    assert_eq!([1, 2].map(|slot| guest.status(slot)), [STATUS_OK; 2]);
    assert_eq!(guest.blk.opens_at_ns(), None);
}

#[test]
fn a_ring_that_faults_when_it_is_armed_or_looked_at_is_tried_again_too() {
    for in_look in [false, true] {
        let mut guest = Guest::new(mem_disk());
        let mut dma = guest.dma();
        guest.settle(&mut dma);
        if in_look {
            guest.blk.arm(&mut dma);
        }
        let ring = guest.driver.config().desc.align_down(4096);
        dma.iommu.unmap(ring, 4096);
        if !in_look {
            guest.blk.arm(&mut dma);
        }
        let has_work = guest.blk.has_work(&mut dma);
        assert!(has_work || guest.blk.opens_at_ns() == Some(0), "{in_look}");
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, 3);
        assert_eq!(guest.blk.opens_at_ns(), Some(3 + RETRY_NS), "{in_look}");
        // Nothing may touch the ring: neither is it tried.
        guest.blk.set_service(Service::Stopped);
        assert_eq!(guest.blk.opens_at_ns(), None, "{in_look}");
    }
}

#[test]
fn a_request_that_cannot_be_recorded_is_the_last_one() {
    let disks: [Box<dyn BlockIo>; 2] = [mem_disk(), raw_disk(Transfer::Direct).0];
    for disk in disks {
        let mut guest = Guest::new(disk);
        let mut dma = guest.dma();
        let ring = guest.blk.ring(0).expect("it was activated");
        ring.set_journal(Box::new(FullJournal));
        for slot in 0..2 {
            guest.request(slot, kind::IN, 0, &[], &[(DATA, 512)]);
        }
        guest.settle(&mut dma);
        assert!(guest.blk.needs_reset());
        assert_eq!((guest.irq.config, guest.blk.stats().violations), (1, 1));
        assert_eq!(guest.driver.used(), None);
        assert_eq!(dma.iommu.leases().len(), 0);
        guest.reactivate();
        assert_eq!(guest.run(kind::IN, 0, &[], &[(DATA, 512)]).0, STATUS_OK);
    }
}

#[test]
fn more_requests_than_slots_all_complete() {
    let mut guest = Guest::with(
        raw_disk(Transfer::Bounce).0,
        BlkConfig {
            queue_size: 256,
            ..Default::default()
        },
        !0,
    );
    let mut dma = guest.dma();
    // 80 requests of three descriptors on 32 slots.
    for slot in 0..80 {
        guest.request(slot, kind::IN, slot, &[], &[(DATA + 512 * slot, 512)]);
    }
    for _ in 0..80 {
        guest.wait_used(&mut dma);
    }
    assert!((0..80).all(|slot| guest.status(slot) == STATUS_OK));
    assert_eq!(guest.driver.get(DATA, 80 * 512), image()[..80 * 512]);
}

fn header_bytes() -> impl Strategy<Value = (u32, u64)> {
    let kind = prop_oneof![4 => 0u32..16, 1 => any::<u32>()];
    let sector = prop_oneof![
        4 => 0..SECTORS + 8,
        1 => any::<u64>(),
        1 => (0u64..16).prop_map(|below| u64::MAX - below),
    ];
    (kind, sector)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn hostile_requests_get_an_answer_or_a_reset(
        requests in prop::collection::vec(
            (header_bytes(),
             prop::collection::vec(1u32..3000, 0..4),
             prop::collection::vec(1u32..3000, 0..4)),
            1..8),
    ) {
        let mut guest = Guest::new(mem_disk());
        let mut dma = guest.dma();
        let mut added = 0;
        for (slot, ((kind, sector), read, write)) in (0..).zip(&requests) {
            let header = guest.header(slot, *kind, *sector);
            let mut readable = vec![(header, 16)];
            readable.extend((0..).zip(read).map(|(at, &len)| (DATA + 0x1000 * at, len)));
            let mut writable: Vec<_> =
                (0..).zip(write).map(|(at, &len)| (DATA + 0x10_0000 + 0x1000 * at, len)).collect();
            writable.push((header + 48, 1));
            guest.driver.add(&readable, &writable);
            added += 1;
        }
        guest.settle(&mut dma);
        let answered = std::iter::from_fn(|| guest.driver.used()).count();
        prop_assert_eq!(answered, added);
        prop_assert!((0..added as u64).all(|slot| guest.status(slot) <= 2));
        prop_assert!(!guest.blk.needs_reset());
    }

    #[test]
    fn a_ring_of_noise_ends_quietly(
        noise in prop::collection::vec(any::<u8>(), 64 * 16),
        rings in prop::collection::vec(any::<u8>(), 6 + 2 * 64),
        idx in 0u16..65,
    ) {
        let mut guest = Guest::new(mem_disk());
        let mut dma = guest.dma();
        guest.driver.put(RINGS, &noise);
        guest.driver.put(RINGS + 64 * 16, &rings);
        guest.driver.put_avail_idx(idx);
        for _ in 0..50 {
            let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
        }
        prop_assert_eq!(guest.blk.poll(&mut dma, &mut guest.irq, 0), Activity::Idle);
        prop_assert!(idx == 0 || guest.blk.needs_reset());
        prop_assert_eq!(dma.iommu.leases().len(), 0);
    }
}
