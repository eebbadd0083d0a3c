//! Frames over memory that is absent: they do not wait in turn.

use fake_mem::PagedMem;
use guest_mem::{NoIommu, SourceId, View};

use super::*;

/// Lets the device run until nothing is asked for any more; how often all that was asked for had to
/// be brought in.
fn rounds(guest: &mut Guest, mem: &PagedMem) -> u32 {
    let mut iommu = NoIommu::new(1);
    for rounds in 0..100 {
        for _ in 0..16 {
            let mut view = View::new(&mut iommu, mem, SourceId::new(0, 1, 0));
            let _ = guest.net.poll(&mut view, &mut guest.irq, 0);
        }
        let tickets = mem.tickets();
        if tickets.is_empty() {
            return rounds;
        }
        for ticket in tickets {
            mem.deliver(ticket);
            guest.net.ticket_done(ticket);
        }
    }
    panic!("it asks for ever");
}

#[test]
fn frames_behind_one_that_waits_do_not_wait_in_turn() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        let mem = PagedMem::new(guest.mem.clone());
        // Headers and frames apart, and each frame over the end of a page.
        for at in 0..8 {
            let frame = BUFFERS + 0x3000 * at + 0x1f00;
            guest.mem.put(Gpa::new(frame), &[at as u8; 0x200]);
            let header = (BUFFERS + 0x3000 * at, HEADER_LEN as u32);
            guest.tx.stage(&[header, (frame, 0x200)], &[]);
        }
        guest.tx.publish();
        mem.evict(Gpa::new(BUFFERS), 8 * 0x3000);
        assert_eq!(rounds(&mut guest, &mem), 1);
        let sent = std::mem::take(&mut wire.ends().from_guest);
        let wanted: Vec<_> = (0..8).map(|at| vec![at as u8; 0x200]).collect();
        assert_eq!(sent, wanted);

        guest.give(8, 1600);
        mem.evict(Gpa::new(BUFFERS), 8 * 0x1000);
        wire.ends().to_guest.extend((0..8).map(|at| vec![at; 600]));
        assert_eq!(rounds(&mut guest, &mem), 1);
        assert_eq!(guest.received(), [600 + HEADER_LEN as u32; 8]);
    });
}
