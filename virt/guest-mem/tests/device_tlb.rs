//! The device TLB against the simplest correct version of it: a table with a row for each kibibyte.
//!
//! The space that is tested is 32 KiB at its beginning and 32 KiB at its end, so that ranges end
//! at exactly 2^64, and may be all of it.

use std::collections::BTreeSet;

use guest_mem::{
    Access, DeviceTlb, DmaFault, Gpa, GuestRam, Iommu, Iova, IovaRange, LeaseId, Leases,
    MAX_MISSES, PAGE_SIZE, Perm, Rights, SourceId, Stop, Ticket,
};
use proptest::prelude::*;

const ROW: u64 = 1024;
const ROWS: usize = 64;
const DISK: SourceId = SourceId(7);

fn iova(row: usize) -> Iova {
    Iova::new(match row < ROWS / 2 {
        true => row as u64 * ROW,
        false => ((ROWS - row) as u64 * ROW).wrapping_neg(),
    })
}

fn range(first: usize, last: usize) -> IovaRange {
    let last = iova(last).raw() + (ROW - 1);
    IovaRange::new(iova(first), Iova::new(last)).expect("in order")
}

fn overlaps(range: IovaRange, row: usize) -> bool {
    let last = Iova::new(iova(row).raw() + (ROW - 1));
    range.first() <= last && iova(row) <= range.last()
}

struct PageRequest {
    page: u64,
    at: Iova,
    perm: Perm,
    ticket: Ticket,
    is_sent: bool,
    is_answered: bool,
    is_ended: bool,
}

/// Reference model of a device TLB, as plain as possible. Nothing is merged, remembered or evicted.
#[derive(Default)]
struct Naive {
    rows: Vec<Option<(u64, Rights)>>,
    asked: Vec<PageRequest>,
    refused: BTreeSet<(u64, bool)>,
    ended: Vec<Ticket>,
    tickets: u64,
    /// First and last row, and whether it was revoked, of those in flight.
    leases: Vec<(LeaseId, usize, usize, bool)>,
}

fn refusal(page: u64, perm: Perm) -> (u64, bool) {
    (page, perm == Perm::Write)
}

impl Naive {
    fn new() -> Self {
        Self {
            rows: vec![None; ROWS],
            ..Self::default()
        }
    }

    fn translate(&mut self, row: usize, perm: Perm) -> Access<u64> {
        if let Some((gpa, rights)) = self.rows[row]
            && rights.allows(perm)
        {
            return Ok(gpa);
        }
        let at = iova(row);
        let page = at.raw() / PAGE_SIZE;
        let blocked = Err(Stop::Fault(DmaFault::Blocked { iova: at }));
        if self.refused.contains(&refusal(page, perm)) {
            return blocked;
        }
        let mut open = self.asked.iter().filter(|asked| !asked.is_ended);
        if let Some(asked) = open.find(|asked| asked.page == page && asked.perm == perm) {
            return Err(Stop::Pending(asked.ticket));
        }
        self.tickets += 1;
        let ticket = Ticket(1 << 63 | self.tickets);
        self.asked.push(PageRequest {
            page,
            at,
            perm,
            ticket,
            is_sent: false,
            is_answered: false,
            is_ended: false,
        });
        Err(Stop::Pending(ticket))
    }

    fn end(&mut self, at: usize, is_refused: bool) {
        let asked = &mut self.asked[at];
        asked.is_ended = true;
        self.ended.push(asked.ticket);
        if is_refused {
            self.refused.insert(refusal(asked.page, asked.perm));
        }
    }

    fn update(&mut self, range: IovaRange, gpa: u64, rights: Rights) -> bool {
        let covered: Vec<usize> = (0..self.asked.len())
            .filter(|&at| !self.asked[at].is_ended && range.contains(self.asked[at].at))
            .collect();
        let oldest = covered.iter().find(|&&at| self.asked[at].is_sent);
        let granted =
            |perm| rights.allows(perm) && oldest.is_none_or(|&at| self.asked[at].perm == perm);
        let granted = [granted(Perm::Read), granted(Perm::Write)];
        let first_page = range.first().raw() / PAGE_SIZE;
        let last_page = range.last().raw() / PAGE_SIZE;
        self.refused.retain(|&(page, is_write)| {
            let perm = if is_write { Perm::Write } else { Perm::Read };
            !((first_page..=last_page).contains(&page) && rights.allows(perm))
        });
        for at in covered {
            let is_refused = !rights.allows(self.asked[at].perm);
            self.end(at, is_refused);
        }
        let mut is_changed = false;
        for row in (0..ROWS).filter(|&row| overlaps(range, row)) {
            let there = gpa + (iova(row).raw() - range.first().raw());
            let old = self.rows[row];
            let keeps = |perm| {
                old.is_some_and(|(gpa, old)| gpa == there && old.allows(perm))
                    && rights.allows(perm)
            };
            let kept = [keeps(Perm::Read), keeps(Perm::Write)];
            is_changed |= old
                .is_some_and(|(_, old)| kept != [old.allows(Perm::Read), old.allows(Perm::Write)]);
            let new = match [kept[0] || granted[0], kept[1] || granted[1]] {
                [false, false] => Rights::NONE,
                [true, false] => Rights::READ,
                [false, true] => Rights::WRITE,
                [true, true] => Rights::ALL,
            };
            self.rows[row] = (new != Rights::NONE).then_some((there, new));
        }
        is_changed
    }

    fn invalidate(&mut self, range: IovaRange) {
        for row in (0..ROWS).filter(|&row| overlaps(range, row)) {
            self.rows[row] = None;
        }
        let first_page = range.first().raw() / PAGE_SIZE;
        let last_page = range.last().raw() / PAGE_SIZE;
        self.refused
            .retain(|(page, _)| !(first_page..=last_page).contains(page));
        for (_, first, last, is_stale) in &mut self.leases {
            *is_stale |= (*first..=*last).any(|row| overlaps(range, row));
        }
    }

    fn answered(&mut self, is_granted: bool) -> bool {
        let mut waiting = self.asked.iter();
        let Some(at) = waiting.position(|asked| asked.is_sent && !asked.is_answered) else {
            return false;
        };
        self.asked[at].is_answered = true;
        if !self.asked[at].is_ended && !is_granted {
            self.end(at, true);
        }
        true
    }

    fn settle(&mut self) {
        for at in 0..self.asked.len() {
            if self.asked[at].is_answered && !self.asked[at].is_ended {
                self.end(at, true);
            }
        }
    }

    fn unanswered(&self) -> usize {
        let is_over = |asked: &&PageRequest| match asked.is_sent {
            true => !asked.is_answered || !asked.is_ended,
            false => !asked.is_ended,
        };
        self.asked.iter().filter(is_over).count()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Translate(usize, Perm),
    Send,
    Update(usize, usize, u64, Rights),
    Invalidate(usize, usize),
    Answer(bool),
    Settle,
    Forget,
    Lease(usize, Perm),
    End(usize),
    ForgetMemory(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let row = || 0..ROWS;
    let perm = || prop_oneof![Just(Perm::Read), Just(Perm::Write)];
    let rights = prop_oneof![
        1 => Just(Rights::NONE),
        1 => Just(Rights::READ),
        1 => Just(Rights::WRITE),
        4 => Just(Rights::ALL),
    ];
    let span =
        || (row(), 0_usize..8).prop_map(|(first, more)| (first, (first + more).min(ROWS - 1)));
    let any_span = prop_oneof![
        8 => span(),
        1 => (0..ROWS / 2).prop_map(|first| (first, ROWS - 1)),
        1 => Just((0, ROWS - 1)),
    ];
    // Few places, so that updates continue each other, or repeat a known translation.
    let update = (span(), 0_u64..3, rights).prop_map(|((first, last), shift, rights)| {
        // No update of ours spans the hole between the two ends: guest memory is smaller.
        let last = if first < ROWS / 2 {
            last.min(ROWS / 2 - 1)
        } else {
            last
        };
        Step::Update(first, last, (first as u64 + 8 * shift) * ROW, rights)
    });
    let step = prop_oneof![
        6 => (row(), perm()).prop_map(|(row, perm)| Step::Translate(row, perm)),
        3 => Just(Step::Send),
        6 => update,
        2 => any_span.prop_map(|(first, last)| Step::Invalidate(first, last)),
        2 => any::<bool>().prop_map(Step::Answer),
        1 => Just(Step::Settle),
        1 => Just(Step::Forget),
        2 => (row(), perm()).prop_map(|(row, perm)| Step::Lease(row, perm)),
        2 => (0_usize..8).prop_map(Step::End),
        1 => (0_u64..20).prop_map(Step::ForgetMemory),
    ];
    proptest::collection::vec(step, 1..160)
}

/// Plays `steps` on both; `is_exact`: nothing is evicted.
fn play(steps: &[Step], entries: usize, is_exact: bool) {
    let ram = GuestRam::new(&[(Gpa::new(0), 1 << 20)]).expect("memory");
    let mut tlb = DeviceTlb::with_entries(entries, 256);
    let mut naive = Naive::new();
    for step in steps {
        let generation = tlb.generation(DISK);
        match *step {
            Step::Translate(row, perm) => {
                translate(&mut tlb, &mut naive, &ram, row, perm, is_exact);
            }
            Step::Send => {
                let sent = tlb.next_miss(0);
                if is_exact {
                    let next = naive
                        .asked
                        .iter_mut()
                        .find(|asked| !asked.is_sent && !asked.is_ended);
                    let wanted = next.map(|asked| {
                        asked.is_sent = true;
                        (asked.at, asked.perm)
                    });
                    assert_eq!(sent.map(|miss| (miss.iova, miss.perm)), wanted);
                }
            }
            Step::Update(first, last, gpa, rights) => {
                let range = range(first, last);
                tlb.update(range, Gpa::new(gpa), rights);
                let is_changed = naive.update(range, gpa, rights);
                // An update that only adds leaves windows as they are; the entry that it replaces
                // may have been evicted.
                if is_exact {
                    assert_eq!(
                        tlb.generation(DISK) != generation,
                        is_changed,
                        "windows hold on to what was replaced, or are made anew for nothing"
                    );
                }
            }
            Step::Invalidate(first, last) => {
                let range = range(first, last);
                tlb.invalidate(range);
                naive.invalidate(range);
                assert_ne!(
                    tlb.generation(DISK),
                    generation,
                    "windows hold on to the old pages"
                );
            }
            Step::Answer(is_granted) => {
                let had = tlb.answered(is_granted);
                assert!(!is_exact || had == naive.answered(is_granted));
            }
            Step::Settle => {
                tlb.settle();
                naive.settle();
            }
            Step::Forget => {
                tlb.forget_refusals();
                naive.refused.clear();
            }
            Step::Lease(row, perm) => {
                if let Ok(run) = tlb.translate_run(&ram, DISK, iova(row), 3 * ROW, perm) {
                    let len = run.len as u32;
                    let leases = tlb.leases_mut();
                    let id = leases
                        .begin(DISK, iova(row), run.gpa, len, perm)
                        .expect("room");
                    let last = row + (len as u64).div_ceil(ROW) as usize - 1;
                    naive.leases.push((id, row, last, false));
                } else {
                    let _ = naive.translate(row, perm);
                }
            }
            Step::End(at) => {
                if at < naive.leases.len() {
                    let (id, ..) = naive.leases.remove(at);
                    tlb.leases_mut().end(id);
                }
            }
            Step::ForgetMemory(row) => {
                let (first, last) = (row * ROW, (row + 3) * ROW);
                tlb.forget_memory(Gpa::new(first), Gpa::new(last - 1));
                assert_ne!(
                    tlb.generation(DISK),
                    generation,
                    "windows hold on to the old pages"
                );
                let goes = |row: &Option<(u64, _)>| {
                    row.is_some_and(|(gpa, _)| (first..last).contains(&gpa))
                };
                naive
                    .rows
                    .iter_mut()
                    .filter(|row| goes(row))
                    .for_each(|row| *row = None);
            }
        }
        let stale = naive
            .leases
            .iter()
            .filter(|(.., is_stale)| *is_stale)
            .count();
        assert_eq!(tlb.leases().stale(), stale);
        for &(id, .., is_stale) in &naive.leases {
            assert_eq!(tlb.leases().is_stale(id), is_stale);
        }
        assert!(tlb.entries() <= entries.max(2));
        if is_exact {
            let sorted = |mut tickets: Vec<Ticket>| {
                tickets.sort_unstable();
                tickets
            };
            let ended = std::mem::take(&mut naive.ended);
            assert_eq!(sorted(tlb.take_ended()), sorted(ended));
            assert!(
                naive.unanswered() < MAX_MISSES,
                "the bound is another test's"
            );
        }
    }
}

fn translate(
    tlb: &mut DeviceTlb,
    naive: &mut Naive,
    ram: &GuestRam,
    row: usize,
    perm: Perm,
    is_exact: bool,
) {
    let got = tlb.translate(ram, DISK, iova(row), perm);
    if !is_exact && got.is_err() {
        return;
    }
    let wanted = naive.translate(row, perm);
    assert_eq!(
        got.map(|run| run.gpa.raw()),
        wanted,
        "not what the naive one answers: {:?} {perm:?}",
        iova(row)
    );
    let Ok(run) = got else { return };
    // All of the run translates as it states.
    for at in row..ROWS {
        let inside = iova(at).raw() - iova(row).raw();
        if inside >= run.len {
            break;
        }
        let (gpa, rights) = naive.rows[at].expect("a run over what is not mapped");
        assert!(rights.allows(perm) && gpa == run.gpa.raw() + inside);
    }
}

#[test]
fn misses_are_bounded_and_those_beyond_wait_for_the_newest() {
    let ram = GuestRam::new(&[(Gpa::new(0), 1 << 20)]).expect("memory");
    let mut tlb = DeviceTlb::new(16);
    let ask = |tlb: &mut DeviceTlb, page: u64| {
        let asked = tlb.translate(&ram, DISK, Iova::new(page * PAGE_SIZE), Perm::Write);
        match asked {
            Err(Stop::Pending(ticket)) => ticket,
            other => panic!("{other:?}"),
        }
    };
    let tickets: BTreeSet<Ticket> = (0..1_000_000).map(|page| ask(&mut tlb, page)).collect();
    assert_eq!(tickets.len(), MAX_MISSES);
    let mut sent = 0;
    while tlb.next_miss(5).is_some() {
        sent += 1;
    }
    assert_eq!(sent, MAX_MISSES);
    assert_eq!(tlb.oldest_miss_ns(), Some(5));
    // All are refused: each waiter is woken, gets the fault, and sends no miss.
    for _ in 0..sent {
        assert!(tlb.answered(false));
    }
    assert!(!tlb.answered(false), "an answer to nothing");
    assert_eq!(BTreeSet::from_iter(tlb.take_ended()), tickets);
    for page in 0..MAX_MISSES as u64 {
        let again = tlb.translate(&ram, DISK, Iova::new(page * PAGE_SIZE + 8), Perm::Write);
        assert!(matches!(again, Err(Stop::Fault(DmaFault::Blocked { .. }))));
    }
    assert!(!tlb.has_unsent_miss());
    // Once they have, a page that the guest has mapped since is asked for again.
    tlb.forget_refusals();
    ask(&mut tlb, 3);
    assert!(tlb.has_unsent_miss());
}

/// Answers and updates come by two sockets, so an answer may be read first.
#[test]
fn an_answer_that_overtakes_its_update_is_no_refusal() {
    let ram = GuestRam::new(&[(Gpa::new(0), 1 << 20)]).expect("memory");
    let mut tlb = DeviceTlb::new(16);
    let page = IovaRange::new(Iova::new(0), Iova::new(PAGE_SIZE - 1)).expect("in order");
    let asks = |tlb: &mut DeviceTlb| tlb.translate(&ram, DISK, Iova::new(0), Perm::Read);
    assert!(matches!(asks(&mut tlb), Err(Stop::Pending(_))));
    assert!(tlb.next_miss(1).is_some());
    assert!(tlb.answered(true));
    assert!(
        matches!(asks(&mut tlb), Err(Stop::Pending(_))),
        "taken for refused"
    );
    tlb.update(page, Gpa::new(0x1000), Rights::ALL);
    assert_eq!(tlb.take_ended().len(), 1);
    assert_eq!(asks(&mut tlb).map(|run| run.gpa.raw()), Ok(0x1000));
}

#[test]
fn a_closed_one_wakes_all_and_refuses_until_it_is_opened() {
    let ram = GuestRam::new(&[(Gpa::new(0), 1 << 20)]).expect("memory");
    let mut tlb = DeviceTlb::new(16);
    let at = |page: u64| Iova::new(page * PAGE_SIZE);
    for page in 0..3 {
        assert!(tlb.translate(&ram, DISK, at(page), Perm::Read).is_err());
    }
    // One is sent, two are not.
    assert!(tlb.next_miss(1).is_some());
    tlb.close();
    assert_eq!(tlb.take_ended().len(), 3);
    let left = (tlb.oldest_miss_ns(), tlb.has_unsent_miss());
    assert_eq!(left, (None, false), "the limit of what was given up");
    let refused = |tlb: &mut DeviceTlb, page| {
        let stop = tlb.translate(&ram, DISK, at(page), Perm::Read);
        matches!(stop, Err(Stop::Fault(_)))
    };
    assert!(refused(&mut tlb, 0) && refused(&mut tlb, 9));
    // A late answer belongs to the old miss.
    tlb.open();
    assert_eq!(tlb.oldest_miss_ns(), None, "the limit of what was given up");
    assert!(tlb.translate(&ram, DISK, at(0), Perm::Read).is_err());
    assert!(tlb.next_miss(2).is_some());
    assert_eq!(tlb.oldest_miss_ns(), Some(2));
    assert!(tlb.answered(false));
    assert!(tlb.take_ended().is_empty());
    assert!(tlb.answered(false));
    assert_eq!(tlb.take_ended().len(), 1);
}

#[test]
fn the_last_address_of_the_space_is_one_as_any_other() {
    let ram = GuestRam::new(&[(Gpa::new(0), 1 << 20)]).expect("memory");
    let mut tlb = DeviceTlb::new(16);
    let top = IovaRange::new(Iova::new(!0 - 0xfff), Iova::new(!0)).expect("in order");
    tlb.update(top, Gpa::new(0x1000), Rights::ALL);
    let run = tlb.translate(&ram, DISK, Iova::new(!0), Perm::Read);
    assert_eq!(run.map(|run| (run.gpa.raw(), run.len)), Ok((0x1fff, 1)));
    // As QEMU sends a flush: everything, in two messages around the interrupt window.
    let low = IovaRange::new(Iova::new(0), Iova::new(0xfedf_ffff)).expect("in order");
    let high = IovaRange::new(Iova::new(0xfef0_0000), Iova::new(!0)).expect("in order");
    tlb.invalidate(low);
    assert!(tlb.translate(&ram, DISK, Iova::new(!0), Perm::Read).is_ok());
    tlb.invalidate(high);
    assert!(
        tlb.translate(&ram, DISK, Iova::new(!0), Perm::Read)
            .is_err()
    );
    assert_eq!(tlb.entries(), 0);
}

#[test]
fn updates_by_the_million_are_evicted_and_pages_that_follow_are_one_entry() {
    let mut tlb = DeviceTlb::with_entries(512, 16);
    let page = |number: u64| {
        let first = number * PAGE_SIZE;
        IovaRange::new(Iova::new(first), Iova::new(first + PAGE_SIZE - 1)).expect("in order")
    };
    for number in 0..1_000_000 {
        // Every other page: nothing to unite.
        tlb.update(page(2 * number), Gpa::new(0x1000), Rights::ALL);
    }
    assert_eq!(tlb.entries(), 512);
    tlb.invalidate(IovaRange::new(Iova::new(0), Iova::new(!0)).expect("in order"));
    assert_eq!(tlb.entries(), 0);
    for number in (0..10_000).rev() {
        tlb.update(page(number), Gpa::new(number * PAGE_SIZE), Rights::ALL);
    }
    assert_eq!(tlb.entries(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn behaves_as_the_naive_model(steps in steps()) {
        play(&steps, 4 * ROWS, true);
    }

    #[test]
    fn small_tlb_holds_only_valid_translations(steps in steps()) {
        play(&steps, 3, false);
    }
}
