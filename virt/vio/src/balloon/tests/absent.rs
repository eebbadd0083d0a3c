//! Waits: for memory that is absent, and for pages that are being dropped.

use fake_mem::{PagedMem, PendingDma};
use guest_mem::{NoIommu, SourceId, View};

use super::*;
use crate::Service;
use crate::ring::Parked;

#[test]
fn a_wait_at_any_access_changes_nothing_of_the_outcome() {
    both(|mask| {
        let run = |wait: &dyn Fn(FlatDma) -> PendingDma<FlatDma>, waits: u32| {
            let mut guest = Guest::new(mask);
            let mut dma = wait(guest.dma());
            let numbers: Vec<u32> = (0..300).map(|at| at % 200 * 2).collect();
            guest.send(INFLATE, &numbers);
            let len = guest.put_numbers(DATA + 0x8000, &[0, 2, 0x600]);
            guest.queues[DEFLATE].add(&[(DATA + 0x8000, 4), (DATA + 0x8004, len - 4)], &[]);
            let row = [(0x40_0000, 0x3000), (0x50_0000, 0x1000)];
            guest.queues[REPORT].add(&[], &row);
            let entry = [&6_u16.to_le_bytes()[..], &77_u64.to_le_bytes()].concat();
            guest.mem.put(Gpa::new(DATA + 0x9000), &entry);
            guest.queues[STATISTICS].add(&[(DATA + 0x9000, 10)], &[]);
            guest.balloon.request_statistics();
            guest.recorder.record().waits = waits;
            let mut used = [0; 4];
            for _ in 0..600 {
                let _ = guest.balloon.poll(&mut dma, &mut guest.irq, 0);
                for (queue, used) in used.iter_mut().enumerate() {
                    *used += guest.used(queue);
                }
                let dropped = std::mem::take(&mut guest.recorder.record().tickets);
                for ticket in dma.take_tickets().into_iter().chain(dropped) {
                    guest.balloon.ticket_done(ticket);
                }
            }
            let statistics = guest.balloon.statistics().unwrap().available;
            let stats = guest.balloon.stats();
            // The division into calls is not specified.
            let mut told = [const { BTreeSet::new() }; 3];
            for call in guest.recorder.told() {
                match call {
                    BackEndCall::Inflated(pages) => told[0].extend(pages),
                    BackEndCall::Deflated(pages) => told[1].extend(pages),
                    BackEndCall::Reported(pages) => told[2].extend(pages),
                    BackEndCall::Reset => panic!("no reset"),
                }
            }
            let seen = (
                used,
                told,
                statistics,
                guest.balloon.counts(),
                (stats.requests, stats.errors),
            );
            (seen, dma.accesses())
        };
        let (want, accesses) = run(&PendingDma::never, 0);
        assert_eq!((want.0, want.2), ([1, 1, 1, 1], Some(77)));
        assert_eq!(want.3.inflated, 300);
        for k in 0..accesses {
            assert_eq!(run(&|dma| PendingDma::kth(dma, k), 0).0, want, "access {k}");
        }
        for waits in [0, 1, 5] {
            assert_eq!(run(&PendingDma::every, waits).0, want, "{waits} waits");
        }
    });
}

#[test]
fn a_parked_queue_touches_no_memory_and_a_stopped_one_neither() {
    both(|mask| {
        for queue in [INFLATE, REPORT, STATISTICS] {
            for k in 0..100 {
                let mut guest = Guest::new(mask);
                let mut dma = PendingDma::kth(guest.dma(), k);
                if queue == REPORT {
                    guest.queues[REPORT].add(&[], &[(0x40_0000, 0x3000)]);
                } else {
                    guest.queues[queue].add(&[(DATA, 20)], &[]);
                }
                guest.balloon.request_statistics();
                // The others have nothing to do, and do not wait.
                for other in [INFLATE, DEFLATE, STATISTICS, REPORT] {
                    guest.balloon.pause_queue(other as u16, other != queue);
                }
                let _ = guest.balloon.poll(&mut dma, &mut guest.irq, 0);
                let tickets = dma.take_tickets();
                let before = dma.accesses();
                for _ in 0..3 {
                    let _ = guest.balloon.poll(&mut dma, &mut guest.irq, 0);
                }
                if tickets.is_empty() {
                    assert_eq!(guest.used(queue), 1);
                    continue;
                }
                // The wait may be for the next chain, or it was for the driver's event field,
                // without which it goes on.
                let used = guest.used(queue);
                let ring = guest.balloon.ring(queue as u16).unwrap();
                let is_parked = ring.parked() == Some(Parked::Ticket(tickets[0]));
                assert!(is_parked || used == 1, "queue {queue}, access {k}");
                guest.balloon.set_service(Service::Stopped);
                guest.balloon.ticket_done(tickets[0]);
                let _ = guest.balloon.poll(&mut dma, &mut guest.irq, 0);
                assert!(!guest.balloon.has_work(&mut dma));
                assert_eq!(dma.accesses(), before, "queue {queue}, access {k}");
                assert_eq!(guest.used(queue), 0);
                guest.balloon.set_service(Service::Full);
                guest.poll_through(&mut dma);
                assert_eq!(used + guest.used(queue), 1);
            }
        }
    });
}

#[test]
fn an_array_in_absent_memory_is_waited_for_once() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mem = PagedMem::new(guest.mem.clone());
        // Over the end of a page, in two buffers.
        let at = DATA + 0xf80;
        let numbers: Vec<u32> = (0x400..0x4a0).collect();
        guest.put_numbers(at, &numbers);
        guest.queues[INFLATE].add(&[(at, 0x100), (at + 0x100, 0x180)], &[]);
        mem.evict(Gpa::new(DATA), 0x2000);
        let mut iommu = NoIommu::new(1);
        let mut rounds = 0;
        while guest.used(INFLATE) == 0 {
            for _ in 0..8 {
                let mut view = View::new(&mut iommu, &mem, SourceId::new(0, 1, 0));
                let _ = guest.balloon.poll(&mut view, &mut guest.irq, 0);
            }
            let tickets = mem.tickets();
            rounds += u32::from(!tickets.is_empty());
            assert!(rounds < 10, "it asks for ever");
            for ticket in tickets {
                mem.deliver(ticket);
                guest.balloon.ticket_done(ticket);
            }
        }
        assert_eq!(rounds, 1);
        assert_eq!(guest.balloon.counts().inflated, 0xa0);
    });
}

#[test]
fn an_array_that_cannot_be_brought_in_is_given_up() {
    let mut guest = Guest::new(!0);
    let mem = PagedMem::new(guest.mem.clone());
    guest.send(INFLATE, &[1, 2]);
    mem.evict(Gpa::new(DATA), 0x1000);
    let mut iommu = NoIommu::new(1);
    for _ in 0..8 {
        let mut view = View::new(&mut iommu, &mem, SourceId::new(0, 1, 0));
        let _ = guest.balloon.poll(&mut view, &mut guest.irq, 0);
        for ticket in mem.tickets() {
            mem.fail(ticket);
            guest.balloon.ticket_done(ticket);
        }
    }
    assert_eq!((guest.used(INFLATE), guest.recorder.told()), (1, vec![]));
    assert_eq!(guest.balloon.stats().errors, 1);
}

#[test]
fn a_buffer_is_used_only_once_its_pages_are_dropped() {
    both(|mask| {
        for queue in [INFLATE, REPORT] {
            let mut guest = Guest::new(mask);
            guest.recorder.record().waits = 1;
            if queue == INFLATE {
                guest.send(INFLATE, &[0x400]);
            } else {
                guest.queues[REPORT].add(&[], &[(0x40_0000, 0x1000)]);
            }
            guest.poll();
            let mut dma = guest.dma();
            assert_eq!(guest.used(queue), 0);
            assert_eq!(guest.balloon.in_flight(), 1);
            assert!(!guest.balloon.has_work(&mut dma), "nothing can be done");
            // Nothing that others wait for ends it.
            guest.balloon.ticket_done(Ticket(1));
            guest.balloon.kick(queue as u16);
            guest.poll();
            assert_eq!((guest.used(queue), guest.recorder.told()), (0, vec![]));
            let ticket = guest.recorder.record().tickets.pop().unwrap();
            guest.balloon.ticket_done(ticket);
            assert_eq!(guest.balloon.in_flight(), 0);
            assert!(guest.balloon.has_work(&mut dma));
            guest.poll();
            assert_eq!((guest.used(queue), guest.recorder.told().len()), (1, 1));
        }
    });
}

#[test]
fn no_stop_is_over_while_pages_are_being_dropped() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mut dma = guest.dma();
        guest.recorder.record().waits = 1;
        guest.send(INFLATE, &[0x400]);
        guest.poll();
        let stopped = guest
            .balloon
            .stop_queue(INFLATE as u16, &mut dma, &mut guest.irq);
        assert_eq!(stopped, None);
        guest.balloon.set_service(Service::Stopped);
        guest.poll();
        assert!(guest.balloon.touches_memory());
        assert_eq!(guest.balloon.save(), None);
        let features = guest.balloon.features() & mask;
        let begun = guest.balloon.begin(features, guest.mem.keep_alive());
        assert_eq!(
            begun,
            Err(crate::ActivateError::NotQuiesced { in_flight: 1 })
        );
        let ticket = guest.recorder.record().tickets.pop().unwrap();
        guest.balloon.ticket_done(ticket);
        guest.poll();
        assert!(!guest.balloon.touches_memory());
        let saved = guest.balloon.save().expect("quiet");
        assert_eq!(saved.queues.len(), 4);
        assert_eq!(guest.used(INFLATE), 0, "it was not told of any end");
        let stopped = guest
            .balloon
            .stop_queue(INFLATE as u16, &mut dma, &mut guest.irq);
        assert_eq!(stopped.unwrap().unpublished, 0);
        guest.balloon.reset();
        assert_eq!(guest.recorder.told(), [BackEndCall::Reset]);
    });
}

/// The ring's own wait takes the place of the other one, and is over first.
#[test]
fn pages_being_dropped_are_not_asked_for_again_before_that_is_over() {
    let mut guest = Guest::new(!feature::RING_PACKED);
    let mut dma = guest.dma();
    guest.recorder.record().waits = 1;
    guest.send(INFLATE, &[0x400]);
    guest.poll();
    let ring = guest.balloon.ring(INFLATE as u16).unwrap();
    ring.park(Stop::Pending(Ticket(5)).into());
    guest.balloon.ticket_done(Ticket(5));
    assert!(!guest.balloon.has_work(&mut dma));
    assert!(!guest.balloon.has_more(INFLATE as u16, &mut dma));
    guest.poll();
    assert_eq!(guest.balloon.in_flight(), 1);
    assert_eq!(guest.recorder.told(), []);
    let ticket = guest.recorder.record().tickets.pop().unwrap();
    guest.balloon.ticket_done(ticket);
    guest.poll();
    assert_eq!(guest.used(INFLATE), 1);
}
