//! Requests that are longer, or in more pieces, than one transfer may be.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fake_mem::{ArrayMem, FlatDma, PendingDma};
use guest_mem::{Iommu, Iova, Perm};

use super::support::*;
use crate::blk::request::{STATUS_IOERR, STATUS_OK, kind};
use crate::blk::{BlkConfig, BlockIo, MAX_PIECES, MAX_TRANSFER, MemDisk, Transfer};
use crate::fake_driver::ToBytes;
use crate::ring::RawDescriptor;
use crate::{CancelReason, PollBudget, QueueDevice, Service};

/// Four transfers.
const LONG: u32 = 4 * MAX_TRANSFER;
/// A sector of no particular alignment, and a disk that ends some way behind such a request.
const AT: u64 = 3;
const BYTES: usize = LONG as usize + (64 << 10);
const MEMORY: u64 = 80 << 20;

fn long_image() -> &'static [u8] {
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    let byte = |at| (at / 512 * 7 + at % 509) as u8;
    IMAGE.get_or_init(|| (0..BYTES).map(byte).collect())
}

fn expected(len: u32) -> &'static [u8] {
    &long_image()[AT as usize * 512..][..len as usize]
}

/// A disk with these contents, and how its data move.
fn disk(transfer: Transfer) -> Box<dyn BlockIo> {
    match transfer {
        Transfer::Memory => Box::new(MemDisk::new(long_image().to_vec(), 64, false)),
        transfer => raw_disk_with(transfer, long_image()).0,
    }
}

fn each_disk(mut test: impl FnMut(&str, Guest)) {
    for transfer in [Transfer::Memory, Transfer::Direct, Transfer::Bounce] {
        let name = format!("{transfer:?}");
        test(&name, guest(disk(transfer)));
        let (held, control) = SlowDisk::new(disk(transfer)).expect("a socket pair");
        control.set_open(true);
        test(&format!("{name}, not at once"), guest(Box::new(held)));
    }
}

fn guest(disk: Box<dyn BlockIo>) -> Guest {
    Guest::on(ArrayMem::new(MEMORY), RINGS, disk)
}

/// Returns a guest whose disk completes a part when the control releases it.
fn slow_guest(transfer: Transfer) -> (Guest, SlowControl) {
    let (disk, control) = SlowDisk::new(disk(transfer)).expect("a socket pair");
    (guest(Box::new(disk)), control)
}

/// Visits until so many operations are held, or for ever.
fn visit_until(guest: &mut Guest, dma: &mut FlatDma, what: &str, done: impl Fn(&Guest) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done(guest) {
        let _ = guest.blk.poll(dma, &mut guest.irq, 0);
        assert!(Instant::now() < deadline, "{what}: {:?}", guest.blk.stats());
    }
}

#[test]
fn a_request_longer_than_one_transfer_is_done_in_parts() {
    each_disk(|name, mut guest| {
        // The last part is one block.
        let len = LONG + 512;
        let read = guest.run(kind::IN, AT, &[], &[(DATA + 5, len)]);
        assert_eq!(read, (STATUS_OK, len + 1), "{name}");
        let expected = expected(len);
        assert!(
            guest.driver.get(DATA + 5, len as usize) == expected,
            "{name}"
        );
        // Written one sector on, from buffers cut at odd places, and read again.
        let cuts = [(DATA + 5, 5_000_001), (DATA + 5_000_006, len - 5_000_001)];
        let written = guest.run(kind::OUT, AT + 1, &cuts, &[]);
        assert_eq!(written, (STATUS_OK, 1), "{name}");
        let to = DATA + 0x200_0000;
        let all = len + 1024;
        assert_eq!(guest.run(kind::IN, AT, &[], &[(to, all)]).0, STATUS_OK);
        let mut want = self::expected(all).to_vec();
        want[512..][..len as usize].copy_from_slice(expected);
        assert!(guest.driver.get(to, all as usize) == want, "{name}");
        let stats = guest.blk.stats();
        assert_eq!((stats.requests, stats.errors), (3, 0), "{name}");
        assert_eq!(stats.read_bytes, u64::from(len + all), "{name}");
        assert_eq!(stats.written_bytes, u64::from(len), "{name}");
    });
}

#[test]
fn a_long_request_that_ends_behind_the_disk_is_refused_as_a_whole() {
    each_disk(|name, mut guest| {
        let sector = AT + (BYTES as u64 - u64::from(LONG)) / 512;
        let read = guest.run(kind::IN, sector, &[], &[(DATA, LONG)]);
        assert_eq!(read, (STATUS_IOERR, 1), "{name}");
        assert_eq!(guest.driver.get(DATA, 4096), [0; 4096], "{name}");
    });
}

#[test]
fn the_first_part_that_fails_ends_the_request() {
    each_disk(|name, mut guest| {
        let mut dma = guest.dma();
        guest.driver.put(DATA, &vec![0x77; LONG as usize]);
        // A page of the third part.
        let page = Iova::new(DATA + 2 * u64::from(MAX_TRANSFER) + 0x4000);
        for (round, kind, perm) in [(0, kind::OUT, Perm::Read), (1, kind::IN, Perm::Write)] {
            dma.iommu.deny(page, 4096, perm);
            let data = [(DATA, LONG)];
            match kind {
                kind::OUT => guest.request(round, kind, AT, &data, &[]),
                _ => guest.request(round, kind, AT, &[], &data),
            };
            assert_eq!(guest.wait_used(&mut dma).1, 1, "{name}");
            assert_eq!(guest.status(round), STATUS_IOERR, "{name}");
            assert_eq!(dma.iommu.leases().len(), 0, "{name}");
        }
        assert_eq!(guest.blk.stats().errors, 2);
        dma.iommu.allow_all();
        // Two parts were written, and the fourth, which could have been, was not.
        let sector = AT + 3 * u64::from(MAX_TRANSFER) / 512;
        let to = (DATA, MAX_TRANSFER);
        assert_eq!(guest.run(kind::IN, sector, &[], &[to]).0, STATUS_OK);
        let last = &expected(LONG)[3 * MAX_TRANSFER as usize..];
        assert!(
            guest.driver.get(DATA, MAX_TRANSFER as usize) == last,
            "{name}"
        );
        let first = (DATA, 2 * MAX_TRANSFER);
        assert_eq!(guest.run(kind::IN, AT, &[], &[first]).0, STATUS_OK);
        let first = guest.driver.get(DATA, 2 * MAX_TRANSFER as usize);
        assert!(first.iter().all(|&byte| byte == 0x77), "{name}");
    });
}

#[test]
fn storage_that_fails_in_the_third_part_fails_the_request() {
    for transfer in [Transfer::Direct, Transfer::Bounce] {
        let (disk, file) = raw_disk_with(transfer, long_image());
        let mut guest = guest(disk);
        file.set_len(10 << 20).unwrap();
        let read = guest.run(kind::IN, 0, &[], &[(DATA, LONG)]);
        assert_eq!(read, (STATUS_IOERR, 1), "{transfer:?}");
        assert_eq!(guest.run(kind::IN, 0, &[], &[(DATA, 512)]).0, STATUS_OK);
    }
}

#[test]
fn a_request_in_more_pieces_than_a_transfer_has_is_done_in_parts() {
    // A ring's worth of descriptors, the last of which is a table: each block in a page of its own.
    const PIECES: u64 = 1500;
    const { assert!(PIECES as usize > MAX_PIECES) };
    let config = BlkConfig {
        queue_size: 1024,
        ..Default::default()
    };
    for transfer in [Transfer::Memory, Transfer::Direct, Transfer::Bounce] {
        let mut guest = Guest::with(disk(transfer), config, !0);
        let mut dma = FlatDma::with_max_leases(guest.mem.clone(), 4096);
        let header = guest.header(0, kind::IN, AT);
        let data = |nth: u64| RawDescriptor {
            addr: DATA + 4096 * nth,
            len: 512,
            flags: 1 | 2,
            next: nth as u16 + 2,
        };
        let table = DATA + 4096 * PIECES;
        let describe = |addr, len, flags| RawDescriptor {
            addr,
            len,
            flags,
            next: 1,
        };
        guest.driver.put_descriptor(0, describe(header, 16, 1));
        for nth in 0..1022 {
            guest.driver.put_descriptor(nth as u16 + 1, data(nth));
        }
        let entries = PIECES - 1022 + 1;
        let indirect = describe(table, entries as u32 * 16, 4);
        guest.driver.put_descriptor(1023, indirect);
        for nth in 1022..PIECES {
            let entry = RawDescriptor {
                next: (nth - 1022) as u16 + 1,
                ..data(nth)
            };
            guest
                .driver
                .put(table + 16 * (nth - 1022), &entry.to_bytes());
        }
        let status = describe(header + 48, 1, 2);
        guest
            .driver
            .put(table + 16 * (entries - 1), &status.to_bytes());
        guest.driver.put_avail(0, 0);
        guest.driver.put_avail_idx(1);
        let deadline = Instant::now() + Duration::from_secs(30);
        while guest.driver.used_idx() == 0 {
            let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
            assert!(Instant::now() < deadline, "{transfer:?}");
        }
        assert_eq!(guest.status(0), STATUS_OK, "{transfer:?}");
        assert_eq!(dma.iommu.leases().len(), 0);
        let want = expected(PIECES as u32 * 512);
        for (nth, block) in (0..).zip(want.chunks(512)) {
            assert!(
                guest.driver.get(DATA + 4096 * nth, 512) == block,
                "{transfer:?} {nth}"
            );
        }
    }
}

#[test]
fn a_long_request_of_a_ram_disk_takes_several_visits() {
    let mut guest = guest(disk(Transfer::Memory));
    let mut dma = guest.dma();
    guest.request(0, kind::IN, AT, &[], &[(DATA, LONG)]);
    guest.request(1, kind::IN, 0, &[], &[(DATA + 0x200_0000, 512)]);
    for part in 0..4 {
        assert!(guest.blk.has_work(&mut dma), "part {part}");
        assert_eq!(guest.driver.used_idx(), 0, "part {part}");
        let _ = guest
            .blk
            .visit(&mut dma, &mut guest.irq, &mut PollBudget::new(0, 1));
    }
    // What stands behind it in its queue waits for it.
    assert_eq!(guest.wait_used(&mut dma).1, LONG + 1);
    assert_eq!(guest.wait_used(&mut dma).1, 513);
}

/// The pool has room for two transfers.
#[test]
fn long_requests_that_share_too_small_a_pool_all_end() {
    let (mut guest, control) = slow_guest(Transfer::Bounce);
    let mut dma = guest.dma();
    let len = 3 * MAX_TRANSFER;
    for slot in 0..4 {
        let to = DATA + slot * u64::from(len);
        guest.request(slot, kind::IN, AT, &[], &[(to, len)]);
    }
    guest.settle(&mut dma);
    assert_eq!(control.held(), 2);
    control.set_open(true);
    for _ in 0..4 {
        guest.wait_used(&mut dma);
    }
    let want = expected(len);
    for slot in 0..4 {
        assert_eq!(guest.status(slot), STATUS_OK);
        let got = guest.driver.get(DATA + slot * u64::from(len), len as usize);
        assert!(got == want, "{slot}");
    }
}

#[test]
fn a_reset_between_two_parts_forgets_the_request_and_all_it_had() {
    for transfer in [Transfer::Direct, Transfer::Bounce] {
        let (mut guest, control) = slow_guest(transfer);
        let mut dma = guest.dma();
        guest.request(0, kind::IN, AT, &[], &[(DATA, LONG)]);
        guest.settle(&mut dma);
        assert_eq!(guest.stop(&mut dma), 1);
        control.release(1);
        visit_until(&mut guest, &mut dma, "the first part ends", |guest| {
            guest.blk.in_flight() == 0
        });
        guest.settle(&mut dma);
        // Stopped, it touches nothing and begins nothing.
        assert_eq!((control.held(), dma.iommu.leases().len()), (0, 0));
        assert_eq!(guest.blk.save(), None, "{transfer:?}: a request has begun");
        guest.reactivate();
        control.set_open(true);
        for slot in 0..2 {
            let to = (DATA + slot * u64::from(MAX_TRANSFER), MAX_TRANSFER);
            guest.request(slot, kind::IN, AT, &[], &[to]);
        }
        for _ in 0..2 {
            assert_eq!(guest.wait_used(&mut dma).1, MAX_TRANSFER + 1);
        }
        guest.settle(&mut dma);
        assert_eq!(guest.driver.used_idx(), 2, "{transfer:?}");
    }
}

#[test]
fn a_pause_between_two_parts_is_nothing_but_a_pause() {
    for transfer in [Transfer::Direct, Transfer::Bounce] {
        let (mut guest, control) = slow_guest(transfer);
        let mut dma = guest.dma();
        guest.request(0, kind::IN, AT, &[], &[(DATA, LONG)]);
        guest.settle(&mut dma);
        assert_eq!(guest.stop(&mut dma), 1);
        control.set_open(true);
        visit_until(&mut guest, &mut dma, "the first part ends", |guest| {
            guest.blk.in_flight() == 0
        });
        assert!(!guest.blk.has_work(&mut dma), "it is stopped");
        // As a ring is stopped: what was taken ends, and no more is taken.
        guest.blk.set_service(Service::Finishing);
        guest.request(1, kind::IN, AT, &[], &[(DATA, 512)]);
        assert!(guest.blk.has_work(&mut dma), "it goes on");
        assert_eq!(guest.wait_used(&mut dma).1, LONG + 1, "{transfer:?}");
        assert!(guest.driver.get(DATA, LONG as usize) == expected(LONG));
        guest.settle(&mut dma);
        assert_eq!(guest.driver.used_idx(), 1);
    }
}

#[test]
fn a_part_whose_pages_are_unmapped_is_cancelled_and_is_the_last() {
    let (mut guest, control) = slow_guest(Transfer::Direct);
    let mut dma = guest.dma();
    guest.request(0, kind::IN, AT, &[], &[(DATA, LONG)]);
    guest.settle(&mut dma);
    // The pages of the first part may be unmapped as soon as it is done.
    control.release(1);
    visit_until(&mut guest, &mut dma, "the second part begins", |_| {
        control.held() == 0
    });
    visit_until(&mut guest, &mut dma, "the second part is held", |_| {
        control.held() == 1
    });
    let second = DATA + u64::from(MAX_TRANSFER);
    dma.iommu.unmap(Iova::new(DATA), MAX_TRANSFER.into());
    assert_eq!(dma.iommu.leases().stale(), 0);
    dma.iommu.unmap(Iova::new(second), 4096);
    assert_eq!(dma.iommu.leases().stale(), 1);
    guest.blk.cancel(CancelReason::Unmap);
    assert_eq!(guest.wait_used(&mut dma).1, 1);
    guest.settle(&mut dma);
    assert_eq!(guest.status(0), STATUS_IOERR);
    assert_eq!((control.held(), dma.iommu.leases().len()), (0, 0));
    assert!(!guest.blk.needs_reset());
}

/// Returns the results that a driver sees of a long read and a long write, with a wait at some
/// access; and the number of accesses.
fn with_waits(
    transfer: Transfer,
    wait: &dyn Fn(FlatDma) -> PendingDma<FlatDma>,
) -> (Vec<u8>, Vec<u8>, u64) {
    let mut guest = guest(disk(transfer));
    let mut dma = wait(guest.dma());
    let len = 2 * MAX_TRANSFER + 512;
    let (to, from) = (DATA, DATA + 0x200_0000);
    let bytes: Vec<u8> = (0..len).map(|at| (at >> 7) as u8 ^ at as u8).collect();
    guest.driver.put(from, &bytes);
    guest.request(0, kind::IN, AT, &[], &[(to, len)]);
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut ends = 0;
    while ends < 2 {
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
        for ticket in dma.take_tickets() {
            guest.blk.ticket_done(ticket);
        }
        if guest.driver.used().is_some() {
            ends += 1;
            assert_eq!(guest.status(ends - 1), STATUS_OK);
            if ends == 1 {
                guest.request(1, kind::OUT, AT + 1, &[(from, len)], &[]);
            }
        }
        assert!(Instant::now() < deadline, "{:?}", guest.blk.stats());
    }
    let read = guest.driver.get(to, len as usize);
    let accesses = dma.accesses();
    assert_eq!(dma.inner().iommu.leases().len(), 0);
    assert_eq!(guest.run(kind::IN, AT, &[], &[(to, len)]).0, STATUS_OK);
    (read, guest.driver.get(to, len as usize), accesses)
}

#[test]
fn a_wait_in_any_part_changes_nothing() {
    for transfer in [Transfer::Memory, Transfer::Direct, Transfer::Bounce] {
        let (read, written, accesses) = with_waits(transfer, &PendingDma::never);
        assert!(read == expected(read.len() as u32), "{transfer:?}");
        // A lease or a copy for each part, and the rings.
        assert!(accesses > 12, "{transfer:?}: {accesses}");
        // A bounced part is copied by 256 accesses, which are alike.
        let step = accesses.div_ceil(32) as usize;
        for k in (0..accesses).step_by(step).map(Some).chain([None]) {
            let waited = with_waits(transfer, &|dma| match k {
                Some(k) => PendingDma::kth(dma, k),
                None => PendingDma::every(dma),
            });
            assert!(
                waited.0 == read && waited.1 == written,
                "{transfer:?} {k:?}"
            );
        }
    }
}
