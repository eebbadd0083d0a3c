//! `Pending` injected at every access: the outcome is that of a run without.

use fake_mem::{FlatDma, PagedMem, PendingDma};
use guest_mem::{Gpa, Iommu, NoIommu, PhysMem, SourceId, View};

use super::support::*;
use crate::QueueDevice;
use crate::blk::request::{STATUS_IOERR, STATUS_OK, kind};
use crate::blk::{BlkConfig, BlockIo, Transfer};

/// Everything a guest can see of three requests, and what the disk holds after them.
#[derive(Debug, PartialEq)]
struct GuestView {
    used: Vec<(u16, u32)>,
    statuses: Vec<u8>,
    data: Vec<u8>,
    disk: Vec<u8>,
    requests: u64,
}

fn run(
    disk: &dyn Fn() -> (Box<dyn BlockIo>, Option<std::fs::File>),
    wait: &dyn Fn(FlatDma) -> PendingDma<FlatDma>,
) -> (GuestView, u64) {
    let (io, file) = disk();
    let config = BlkConfig {
        queue_size: 64,
        ..Default::default()
    };
    let mut guest = Guest::with(io, config, !0);
    let mut dma = wait(guest.dma());
    dma.inner_mut()
        .iommu
        .deny(guest_mem::Iova::new(DATA), 0x2000, guest_mem::Perm::Write);
    guest.driver.put(DATA, &[0x77; 0x2000]);
    let mut zeroes = [0; 16];
    zeroes[0] = 100;
    zeroes[8] = 2;
    guest.driver.put(DATA + 0x2_0000, &zeroes);
    guest.request(
        0,
        kind::OUT,
        40,
        &[(DATA + 0xf00, 0x200), (DATA + 0x1100, 0x200)],
        &[],
    );
    let parts = [(DATA + 0x1_0f00, 0x300), (DATA + 0x1_3000, 0x500)];
    guest.request(1, kind::IN, 2, &[], &parts);
    guest.request(2, kind::GET_ID, 0, &[], &[(DATA + 0x1_8000, 20)]);
    guest.request(3, kind::WRITE_ZEROES, 0, &[(DATA + 0x2_0000, 16)], &[]);
    let mut used = Vec::new();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while used.len() < 4 {
        let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
        let tickets = dma.take_tickets();
        if !tickets.is_empty() {
            // Parked: nothing is touched until a ticket completes.
            let before = dma.accesses();
            let _ = guest.blk.poll(&mut dma, &mut guest.irq, 0);
            assert_eq!(dma.accesses(), before, "a parked queue touched memory");
        }
        for ticket in tickets {
            guest.blk.ticket_done(ticket);
        }
        used.extend(std::iter::from_fn(|| guest.driver.used()));
        assert!(
            std::time::Instant::now() < deadline,
            "{used:?} {:?}",
            guest.blk.stats()
        );
    }
    // Completions may come in any order.
    used.sort_unstable();
    assert_eq!(dma.inner().iommu.leases().len(), 0);
    let mut data = guest.driver.get(DATA + 0x1_0f00, 0x300);
    data.extend(guest.driver.get(DATA + 0x1_3000, 0x500));
    data.extend(guest.driver.get(DATA + 0x1_8000, 20));
    let stats = guest.blk.stats();
    let seen = GuestView {
        used,
        statuses: (0..4).map(|slot| guest.status(slot)).collect(),
        data,
        disk: file.map_or_else(Vec::new, |mut file| contents(&mut file)),
        requests: stats.requests,
    };
    (seen, dma.accesses())
}

fn survives(disk: &dyn Fn() -> (Box<dyn BlockIo>, Option<std::fs::File>)) {
    let (want, accesses) = run(disk, &PendingDma::never);
    assert_eq!(want.statuses, [STATUS_OK; 4]);
    assert_eq!(want.requests, 4);
    assert_eq!(want.data[..0x300], image()[1024..][..0x300]);
    // Three ring pages' worth of windows, four headers, a range, data, status bytes.
    assert!(accesses >= 14, "{accesses}");
    for k in 0..accesses {
        assert_eq!(
            run(disk, &|dma| PendingDma::kth(dma, k)).0,
            want,
            "access {k}"
        );
    }
    assert_eq!(run(disk, &PendingDma::every).0, want);
}

#[test]
fn a_wait_at_any_access_changes_nothing_with_a_ram_disk() {
    survives(&|| (mem_disk(), None));
}

#[test]
fn a_wait_at_any_access_changes_nothing_with_direct_transfers() {
    survives(&|| {
        let (disk, file) = raw_disk(Transfer::Direct);
        (disk, Some(file))
    });
}

#[test]
fn a_wait_at_any_access_changes_nothing_with_bounced_transfers() {
    survives(&|| {
        let (disk, file) = raw_disk(Transfer::Bounce);
        (disk, Some(file))
    });
}

#[test]
fn a_read_that_fails_leaves_zeroes_in_whole_pages_that_were_absent_and_the_rest_as_it_was() {
    let (disk, file) = raw_disk(Transfer::Direct);
    let mut guest = Guest::new(disk);
    let mem = PagedMem::new(guest.mem.clone());
    let mut iommu = NoIommu::new(guest_mem::MAX_LEASES);
    guest.mem.put(Gpa::new(DATA), &[0xaa; 0x3000]);
    // Half a page, a whole one, half a page.
    guest.request(0, kind::IN, 0, &[], &[(DATA + 0x800, 0x2000)]);
    mem.evict(Gpa::new(DATA), 0x3000);
    file.set_len(0).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while guest.driver.used().is_none() {
        let mut view = View::new(&mut iommu, &mem, SourceId::new(0, 1, 0));
        let _ = guest.blk.poll(&mut view, &mut guest.irq, 0);
        for ticket in mem.tickets() {
            mem.deliver(ticket);
            guest.blk.ticket_done(ticket);
        }
        assert!(std::time::Instant::now() < deadline, "never answered");
    }
    assert_eq!(guest.status(0), STATUS_IOERR);
    let mut seen = [0; 0x3000];
    guest.mem.read(Gpa::new(DATA), &mut seen).unwrap();
    let whole = 0x1000..0x2000;
    for (at, byte) in seen.into_iter().enumerate() {
        let wanted = if whole.contains(&at) { 0 } else { 0xaa };
        assert_eq!(byte, wanted, "{at:#x}");
    }
}

/// A guest whose memory pages come and go, and what it waits with.
fn paged(disk: Box<dyn BlockIo>) -> (Guest, PagedMem, NoIommu) {
    let guest = Guest::new(disk);
    let mem = PagedMem::new(guest.mem.clone());
    (guest, mem, NoIommu::new(guest_mem::MAX_LEASES))
}

fn visit(guest: &mut Guest, mem: &PagedMem, iommu: &mut NoIommu) {
    let mut view = View::new(iommu, mem, SourceId::new(0, 1, 0));
    let _ = guest.blk.poll(&mut view, &mut guest.irq, 0);
}

#[test]
fn memory_that_cannot_be_brought_in_fails_its_request_alone() {
    let (mut guest, mem, mut iommu) = paged(mem_disk());
    guest.request(0, kind::OUT, 0, &[(DATA, 512)], &[]);
    mem.evict(Gpa::new(DATA), 0x1000);
    visit(&mut guest, &mem, &mut iommu);
    let tickets = mem.tickets();
    assert!(!tickets.is_empty(), "a page is waited for");
    for ticket in tickets {
        mem.fail(ticket);
        guest.blk.ticket_done(ticket);
    }
    visit(&mut guest, &mem, &mut iommu);
    assert!(guest.driver.used().is_some());
    assert_eq!(guest.status(0), STATUS_IOERR);
    guest.request(1, kind::IN, 0, &[], &[(DATA + 0x1000, 512)]);
    visit(&mut guest, &mem, &mut iommu);
    assert!(guest.driver.used().is_some());
    assert_eq!(guest.status(1), STATUS_OK);
}

#[test]
fn a_ticket_from_before_a_reset_is_forgotten() {
    let (mut guest, mem, mut iommu) = paged(mem_disk());
    guest.request(0, kind::OUT, 0, &[(DATA, 512)], &[]);
    mem.evict(Gpa::new(DATA), 0x1000);
    visit(&mut guest, &mem, &mut iommu);
    let old = mem.tickets();
    let mut view = View::new(&mut iommu, &mem, SourceId::new(0, 1, 0));
    guest.stop(&mut view);
    guest.reactivate();
    guest.request(1, kind::OUT, 1, &[(DATA, 512)], &[]);
    visit(&mut guest, &mem, &mut iommu);
    let new = mem.tickets().split_off(old.len());
    for ticket in old {
        guest.blk.ticket_done(ticket);
    }
    visit(&mut guest, &mem, &mut iommu);
    assert!(guest.driver.used().is_none(), "its own page is not there");
    for ticket in new {
        mem.deliver(ticket);
        guest.blk.ticket_done(ticket);
    }
    visit(&mut guest, &mem, &mut iommu);
    assert!(guest.driver.used().is_some());
    assert_eq!(guest.status(1), STATUS_OK);
}
