use iova::{
    Aperture, CoreAllocator, CoreId, IovaAllocator, IovaPfn, Request, TreeAllocator, TreeCore,
};

use super::*;

/// The only core of 64 pages, and a queue for five.
fn core_and_queue() -> (TreeCore, Queue) {
    let pages = Aperture::new(IovaPfn::new(1), IovaPfn::new(64), &[]).unwrap();
    let space = TreeAllocator::new(pages, 1).unwrap();
    (space.claim(CoreId(0)).unwrap(), Queue::new(5, 1000, true))
}

/// Every entry comes out once, in order, with the time it went in at, as far as it is covered.
#[test]
fn entries_keep_their_order_their_times_and_their_tickets() {
    let (mut core, mut queue) = core_and_queue();
    let mut model: VecDeque<(IovaPfn, u64, Option<Ticket>)> = VecDeque::new();
    let (mut random, mut now) = (7_u64, u64::MAX - 40);
    for step in 0..4000 {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let chance = random >> 33;
        now += u64::from(chance % 100 == 0 && now < u64::MAX);
        if chance % 2 == 0 && !queue.is_full() {
            let range = core.alloc(Request::pages(1)).unwrap();
            let ticket = (step > 2000 && chance % 3 == 0).then_some(Ticket(chance));
            queue.push(core.pin(range).unwrap(), now);
            queue.cover(ticket);
            model.push_back((range.first(), now, ticket));
        } else {
            let covered = queue.first() + chance % 7;
            let expected = model.len().min((chance % 7) as usize);
            let mut freed = 0;
            queue.take(covered, (), |(), pinned, since| {
                let (first, then, _) = model.pop_front().unwrap();
                assert_eq!((pinned.range().first(), since), (first, then));
                core.free_pinned(pinned);
                freed += 1;
            });
            assert_eq!(freed, expected);
        }
        assert_eq!(
            (queue.len(), queue.is_empty()),
            (model.len(), model.is_empty())
        );
        assert_eq!(
            queue.ticket(),
            model.front().and_then(|&(_, _, ticket)| ticket)
        );
        assert_eq!(queue.oldest_ns(), model.front().map(|&(_, since, _)| since));
    }
    queue.take(u64::MAX, (), |(), pinned, since| {
        let (first, then, _) = model.pop_front().unwrap();
        assert_eq!((pinned.range().first(), since), (first, then));
        core.free_pinned(pinned);
    });
    assert!(model.is_empty() && queue.is_empty());
}

/// The number of unmapped and uncovered mappings is that in the queue, even after a panic of the
/// closure that takes some out.
#[test]
fn panic_in_take_leaves_the_numbers_right() {
    let (mut core, mut queue) = core_and_queue();
    for number in 0..3 {
        let range = core.alloc(Request::pages(1)).unwrap();
        queue.push(core.pin(range).unwrap(), number);
        queue.cover(Some(Ticket(number)));
    }
    let panics = std::panic::AssertUnwindSafe(|| {
        queue.take(u64::MAX, (), |(), pinned, since_ns| {
            core.free_pinned(pinned);
            assert_eq!(since_ns, 0, "the second panics");
        });
    });
    assert!(std::panic::catch_unwind(panics).is_err());
    assert_eq!((queue.first(), queue.next(), queue.len()), (1000, 1003, 3));
    assert_eq!(queue.ticket(), Some(Ticket(0)));
    queue.take(u64::MAX, (), |(), pinned, since_ns| {
        assert_eq!(since_ns, 2, "the first two are gone");
        core.free_pinned(pinned);
    });
    assert_eq!((queue.first(), queue.next()), (1003, 1003));
    assert_eq!(queue.ticket(), None);
}
