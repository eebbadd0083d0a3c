//! Any messages, with waits anywhere, against a naive model of the pages in the balloon.

use fake_mem::PendingDma;
use proptest::prelude::*;

use super::*;

/// Some page numbers.
fn number() -> impl Strategy<Value = u32> {
    // Anywhere in both regions, around their ends, anywhere.
    prop_oneof![
        4 => prop_oneof![0_u32..0x200, 0x400_u32..0x600],
        1 => prop_oneof![0x1fe_u32..0x202, 0x3fe_u32..0x402, 0x5fe_u32..0x602],
        1 => any::<u32>(),
    ]
}

/// Runs of numbers, up and down.
fn array() -> impl Strategy<Value = Vec<u32>> {
    let run = (number(), 1_u32..60, any::<bool>()).prop_map(|(first, count, is_down)| {
        let step = |n: u32| match is_down {
            true => first.saturating_sub(n),
            false => first.saturating_add(n),
        };
        (0..count).map(step).collect::<Vec<_>>()
    });
    prop::collection::vec(run, 1..12).prop_map(|runs| runs.concat())
}

/// A buffer: address and length in bytes.
fn buffer() -> impl Strategy<Value = (u64, u32)> {
    let pages = (0_u64..0x800).prop_map(|page| page * PAGE_SIZE);
    let at = prop_oneof![pages, 0_u64..8 << 20];
    let few = (1_u32..0x20).prop_map(|pages| pages * 4096);
    (at, prop_oneof![few, 1_u32..0x3000, Just(3 << 20)])
}

/// Buffers that the guest sends at a time: arrays to one of the two queues, each cut into up to
/// three buffers, and reports.
#[derive(Clone, Debug)]
struct Round {
    queue: usize,
    arrays: Vec<(Vec<u32>, u32)>,
    reports: Vec<Vec<(u64, u32)>>,
}

fn round() -> impl Strategy<Value = Round> {
    let arrays = prop::collection::vec((array(), 1_u32..4), 0..4);
    let reports = prop::collection::vec(prop::collection::vec(buffer(), 1..6), 0..3);
    let all = (prop_oneof![Just(INFLATE), Just(DEFLATE)], arrays, reports);
    all.prop_map(|(queue, arrays, reports)| Round {
        queue,
        arrays,
        reports,
    })
}

fn is_ram(page: &u64) -> bool {
    let inside =
        |&(gpa, len): &(Gpa, u64)| (gpa.raw()..gpa.raw() + len).contains(&(page * PAGE_SIZE));
    page.checked_mul(PAGE_SIZE).is_some() && RAM.iter().any(inside)
}

/// The set after these pages were put in, or taken out.
fn after(set: &BTreeSet<u64>, queue: usize, arrays: &[Vec<u64>]) -> BTreeSet<u64> {
    let pages = arrays.iter().flatten().copied().filter(is_ram).collect();
    match queue {
        INFLATE => set | &pages,
        _ => set - &pages,
    }
}

impl Guest {
    /// All that is waited for ends.
    fn end_waits(&mut self, dma: &PendingDma<FlatDma>) {
        let dropped = std::mem::take(&mut self.recorder.record().tickets);
        for ticket in dma.take_tickets().into_iter().chain(dropped) {
            self.balloon.ticket_done(ticket);
        }
    }
}

proptest! {
    #[test]
    fn pages_in_the_balloon_are_those_that_the_guest_has_put_there(
        packed: bool,
        every: bool,
        rounds in prop::collection::vec(round(), 1..8),
        waits in prop::collection::vec(0_u32..3, 1..20),
    ) {
        let mut guest = Guest::new(if packed { !0 } else { !feature::RING_PACKED });
        let mut dma = match every {
            true => PendingDma::every(guest.dma()),
            false => PendingDma::never(guest.dma()),
        };
        let mut waits = waits.into_iter().cycle();
        let mut model = BTreeSet::new();
        let mut outside = 0;
        for Round { queue, arrays, reports } in rounds {
            let mut sent = Vec::new();
            // At most 11 runs of 59 numbers: less than a page.
            for (at, (numbers, cuts)) in (DATA..).step_by(0x1000).zip(&arrays) {
                let len = guest.put_numbers(at, numbers);
                let each = (len / cuts).max(1);
                let cut = |nth| {
                    let from = nth * each;
                    let len = if nth + 1 == *cuts { len - from } else { each };
                    (at + u64::from(from), len)
                };
                let buffers: Vec<_> = (0..*cuts).map(cut).collect();
                guest.queues[queue].add(&buffers, &[]);
                sent.push(numbers.iter().map(|number| u64::from(*number)).collect::<Vec<_>>());
            }
            let mut free = Vec::new();
            for report in &reports {
                guest.queues[REPORT].add(&[], report);
                let whole = |&(at, len): &(u64, u32)| {
                    at.div_ceil(PAGE_SIZE)..(at + u64::from(len)) / PAGE_SIZE
                };
                free.push(report.iter().flat_map(whole).collect::<Vec<_>>());
            }
            let named = sent.iter().chain(&free).flatten();
            outside += named.filter(|page| !is_ram(page)).count() as u64;
            let end = after(&model, queue, &sent);
            let (mut used, mut reported, mut told) = (0, 0, BTreeSet::new());
            dma.forget();
            for turn in 0.. {
                if used == sent.len() && reported == free.len() {
                    break;
                }
                prop_assert!(turn < 10_000, "it gets no further");
                // Not so often that nothing ever gets through.
                guest.recorder.record().waits = if turn % 4 == 0 { waits.next().unwrap() } else { 0 };
                let _ = guest.balloon.poll(&mut dma, &mut guest.irq, 0);
                used += guest.used(queue);
                reported += guest.used(REPORT);
                // What was used has happened, and nothing that was not sent.
                let now = guest.recorder.record().in_balloon.clone();
                let begun = after(&model, queue, &sent[..used]);
                let (least, most) = match queue {
                    INFLATE => (&begun, &end),
                    _ => (&end, &begun),
                };
                prop_assert!(least.is_subset(&now) && now.is_subset(most));
                for call in guest.recorder.told() {
                    if let BackEndCall::Reported(pages) = call {
                        told.extend(pages);
                    }
                }
                let seen: BTreeSet<u64> = free[..reported].iter().flatten().copied().filter(is_ram).collect();
                prop_assert!(seen.is_subset(&told));
                if turn % 3 == 2 {
                    guest.end_waits(&dma);
                }
            }
            guest.end_waits(&dma);
            model = end;
            prop_assert_eq!(&guest.recorder.record().in_balloon, &model);
            let all: BTreeSet<u64> = free.iter().flatten().copied().filter(is_ram).collect();
            prop_assert_eq!(told, all);
        }
        prop_assert_eq!(guest.balloon.counts().outside, outside);
        prop_assert_eq!(guest.balloon.in_flight(), 0);
        prop_assert!(!guest.balloon.needs_reset());
    }

    /// The recorder checks that all pages of its calls are RAM.
    #[test]
    fn any_buffers_in_any_queue_come_back(
        packed: bool,
        every: bool,
        chains in prop::collection::vec(
            (0_usize..4, prop::collection::vec((buffer(), any::<bool>()), 1..6)),
            1..12,
        ),
        bytes in prop::collection::vec(any::<u8>(), 0x100),
    ) {
        let mut guest = Guest::new(if packed { !0 } else { !feature::RING_PACKED });
        let mut dma = match every {
            true => PendingDma::every(guest.dma()),
            false => PendingDma::never(guest.dma()),
        };
        // Numbers where the first buffers lie, beside the rings.
        for at in (0x2_0000..0x20_0000).step_by(0x1000) {
            guest.mem.put(Gpa::new(at), &bytes);
        }
        for (queue, buffers) in chains {
            let part = |is_writable| {
                let own = buffers.iter().filter(move |(_, own)| *own == is_writable);
                own.map(|(buffer, _)| *buffer).collect::<Vec<_>>()
            };
            guest.queues[queue].add(&part(false), &part(true));
            let mut turns = 0;
            while guest.used(queue) == 0 {
                prop_assert!(turns < 20_000, "it gets no further");
                turns += 1;
                guest.balloon.request_statistics();
                let _ = guest.balloon.poll(&mut dma, &mut guest.irq, 0);
                guest.end_waits(&dma);
            }
        }
        prop_assert!(!guest.balloon.needs_reset());
    }
}
