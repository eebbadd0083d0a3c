//! Runs of the small world ([`world`](super::world)), and tests of single steps of the book.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use seeded::Random;

use super::world::{LIMIT, PAGES, SLOTS, World};
use super::*;

#[test]
fn a_million_events_lose_no_byte() {
    let number = |name, default| {
        std::env::var(name).map_or(default, |n| n.parse::<u64>().expect("a number"))
    };
    let (events, seed) = (number("SWAP_EVENTS", 1_000_000), number("SWAP_SEED", 1));
    let mut world = World::new(seed);
    if let Err(wrong) = world.run(events) {
        panic!("SWAP_SEED={seed}, after {} events: {wrong}", world.events);
    }
    let counts = world.residency.counts();
    println!("{counts:?}");
    for (what, count) in [
        ("dropped to the disk", counts.dropped_to_disk),
        ("dropped as zeroes", counts.dropped_as_zeroes),
        ("saved", counts.saved),
        ("fetched from the disk", counts.fetched_from_disk),
        ("fetched from the store", counts.fetched_from_store),
        ("rescued", counts.rescued),
        ("not fetched", counts.not_fetched),
        ("fetched before a write", counts.fetched_before_a_write),
        ("refused", counts.refused),
        ("discarded", counts.discarded),
        ("trimmed", world.trims),
        ("cancelled", world.cancels),
    ] {
        assert!(count > 100, "{what}: {count}");
    }
}

#[test]
fn failed_trim_is_not_retried_and_its_slots_are_free() {
    let mut residency = Residency::new(PAGES, LIMIT, SLOTS);
    residency.pages.slots_mut().set_chunk(4);
    residency.trims_slots();
    let leave_and_come_overwritten = |residency: &mut Residency| {
        all_leave(residency, |_| false);
        residency.set_limit(LIMIT);
        for page in 0..8 {
            residency.fault_overwriting(Page(page));
        }
        residency.take_commands();
    };
    for page in 0..8 {
        residency.fault(Page(page), ReadAhead::InOrder);
    }
    leave_and_come_overwritten(&mut residency);
    let free = residency.free_slots();
    residency.trim();
    assert_eq!(residency.take_commands(), [Command::Trim(Slot(0), 8)]);
    assert_eq!(residency.free_slots(), free - 8);
    assert!(!residency.wants_to_trim());
    residency.ended(CommandOutcome::Trimmed(Slot(0), 8, Err(Errno(95))));
    assert_eq!(residency.free_slots(), free);
    leave_and_come_overwritten(&mut residency);
    assert!(!residency.wants_to_trim());
}

/// Policy that answers at random, and changes its answers soon.
#[derive(Debug, Default)]
struct Fickle(AtomicU64);

impl Fickle {
    fn answer(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(3)
    }
}

impl IoPolicy for Fickle {
    fn reads_overwritten(&self, _origin: FaultOrigin) -> bool {
        self.answer()
    }

    fn saves_block_backed(&self) -> bool {
        self.answer()
    }
}

#[test]
fn a_policy_that_answers_anything_loses_no_byte() {
    for seed in 0..10 {
        let mut world = World::new(seed);
        world.residency.set_policy(Box::new(Fickle::default()));
        if let Err(wrong) = world.run(50_000) {
            panic!("seed {seed}, after {} events: {wrong}", world.events);
        }
        let counts = world.residency.counts();
        assert!(counts.stale > 0 && counts.not_fetched > 0, "{counts:?}");
        let saved_and_dropped = counts.silent_writes > 0 && counts.dropped_to_disk > 0;
        assert!(saved_and_dropped, "{counts:?}");
    }
}

/// Policy of a control of measurements.
#[derive(Debug)]
struct Control {
    reads: bool,
    saves: bool,
}

impl Control {
    const READS: Self = Self {
        reads: true,
        saves: false,
    };
    const SAVES: Self = Self {
        reads: false,
        saves: true,
    };
    const READS_AND_SAVES: Self = Self {
        reads: true,
        saves: true,
    };
}

impl IoPolicy for Control {
    fn reads_overwritten(&self, origin: FaultOrigin) -> bool {
        self.reads && origin == FaultOrigin::Device
    }

    fn saves_block_backed(&self) -> bool {
        self.saves
    }
}

#[test]
fn a_control_that_reads_what_is_overwritten_counts_it_and_loses_nothing() {
    let mut world = World::new(1);
    world.residency.set_policy(Box::new(Control::READS));
    if let Err(wrong) = world.run(200_000) {
        panic!("after {} events: {wrong}", world.events);
    }
    assert!(
        world.residency.counts().stale > 10,
        "{:?}",
        world.residency.counts()
    );
}

#[test]
fn a_control_that_saves_what_blocks_hold_counts_it_and_loses_nothing() {
    let mut world = World::new(1);
    // The same policy as `exitless-lab run --fault mapper:stale`.
    world
        .residency
        .set_policy(Box::new(Control::READS_AND_SAVES));
    if let Err(wrong) = world.run(100_000) {
        panic!("after {} events: {wrong}", world.events);
    }
    let counts = world.residency.counts();
    assert_eq!(counts.dropped_to_disk, 0);
    assert!(counts.silent_writes > 100, "{counts:?}");
    let breaks = 1..counts.silent_writes;
    assert!(breaks.contains(&counts.order_breaks), "{counts:?}");
}

/// Evicts all pages. A page for which `is_clean` is false counts as stored to by a processor since
/// it was write-protected.
fn all_leave(residency: &mut Residency, is_clean: impl Fn(Page) -> bool) {
    residency.set_limit(0);
    loop {
        residency.ask();
        let commands = residency.take_commands();
        if commands.is_empty() {
            return assert_eq!(residency.present(), 0);
        }
        for command in commands {
            match command {
                Command::Ask(_) => residency.answered(u32::MAX, 0),
                Command::Examine(page) => {
                    let seen = PageExamination {
                        is_clean: is_clean(page),
                        is_zero: false,
                        crc: 1,
                    };
                    residency.examined(page, seen);
                }
                Command::Save(page, slot) => {
                    residency.ended(CommandOutcome::Saved(page, slot, Ok(())))
                }
                _ => {}
            }
        }
        residency.balance();
    }
}

/// Creates a book in which a disk has read these blocks, into pages from 0 on.
fn with_blocks(numbers: &[u32]) -> Residency {
    let mut residency = Residency::new(PAGES, LIMIT, SLOTS);
    for (page, number) in (0..).zip(numbers) {
        let op = Op(page.into());
        residency.begin_read(op, &one(*number, page));
        residency.end_read(op, true);
    }
    residency
}

#[test]
fn only_the_control_writes_block_backed_pages_and_breaks_their_order() {
    let all_are_clean = |_| true;
    for (numbers, breaks) in [([5, 6, 7, 8], 1), ([5, 7, 6, 8], 4), ([5, 6, 105, 106], 2)] {
        let mut residency = with_blocks(&numbers);
        all_leave(&mut residency, all_are_clean);
        let counts = residency.counts();
        assert_eq!(counts.dropped_to_disk, 4);
        assert_eq!((counts.silent_writes, counts.order_breaks), (0, 0));

        let mut control = with_blocks(&numbers);
        control.set_policy(Box::new(Control::SAVES));
        all_leave(&mut control, all_are_clean);
        let counts = control.counts();
        assert_eq!((counts.dropped_to_disk, counts.saved), (0, 4));
        assert_eq!((counts.silent_writes, counts.order_breaks), (4, breaks));
    }
    // Pages that were stored to had to be written.
    let mut control = with_blocks(&[5, 6, 7, 8]);
    control.set_policy(Box::new(Control::SAVES));
    all_leave(&mut control, |page| page.0 < 2);
    assert_eq!(
        (control.counts().saved, control.counts().silent_writes),
        (4, 2)
    );
    // So have pages from the store, as far as is known.
    control.set_limit(LIMIT);
    control.fault(Page(0), ReadAhead::InOrder);
    control.take_commands();
    control.ended(CommandOutcome::Fetched(Page(0), Ok(1)));
    all_leave(&mut control, all_are_clean);
    assert_eq!(
        (control.counts().saved, control.counts().silent_writes),
        (5, 2)
    );
}

#[test]
fn beyond_the_sharers_of_a_block_writes_are_silent_unless_something_was_stored() {
    const MORE: u32 = 4;
    let numbers = [9; SHARERS + MORE as usize];
    let mut residency = with_blocks(&numbers);
    let last = SHARERS as u32 + MORE - 1;
    // A disk reads parts of blocks into one page, and a processor stores to another.
    let parts = Span {
        is_whole: false,
        ..one(3, last)
    };
    residency.begin_read(Op(100), &parts);
    residency.end_read(Op(100), true);
    all_leave(&mut residency, |page| page.0 + 1 != last);
    let counts = residency.counts();
    assert_eq!(counts.dropped_to_disk, SHARERS as u64);
    assert_eq!(counts.saved, u64::from(MORE));
    assert_eq!(counts.silent_writes, u64::from(MORE) - 2);
    assert_eq!(counts.order_breaks, 0, "whose block is not known");
}

#[test]
fn errors_of_the_store_and_the_image_stop_the_guest_and_lose_nothing() {
    for seed in 0..10 {
        let mut world = World::new(seed);
        world.failing = 100;
        if let Err(wrong) = world.run(50_000) {
            panic!("seed {seed}, after {} events: {wrong}", world.events);
        }
    }
}

/// Returns the first of 20 runs that fails, and its error.
fn first_wrong(change: impl Fn(&mut World)) -> Option<(u64, u64, String)> {
    (0..20).find_map(|seed| {
        let mut world = World::new(seed);
        change(&mut world);
        let wrong = world.run(100_000).err()?;
        Some((seed, world.events, wrong))
    })
}

/// Otherwise it would leave memory twice: while the store is full nothing removes it from the queue
/// of the first time.
#[test]
fn a_page_unmapped_for_the_second_time_is_examined_once() {
    let mut residency = Residency::new(64, 32, 0);
    let ask = |residency: &mut Residency| {
        residency.ask();
        let commands = residency.take_commands();
        let [Command::Ask(asked)] = &commands[..] else {
            panic!("{commands:?}");
        };
        asked.clone()
    };
    let examines = |residency: &mut Residency| -> Vec<Page> {
        let commands = residency.take_commands().into_iter();
        let examined = commands.filter_map(|command| match command {
            Command::Examine(page) => Some(page),
            _ => None,
        });
        examined.collect()
    };
    for page in 0..34 {
        residency.fault(Page(page), ReadAhead::InOrder);
    }
    residency.take_commands();
    let first = ask(&mut residency);
    residency.answered(u32::MAX, 0);
    for page in examines(&mut residency) {
        let seen = PageExamination {
            is_clean: false,
            is_zero: false,
            crc: 1,
        };
        residency.examined(page, seen);
    }
    assert!(
        residency
            .take_commands()
            .contains(&Command::Stop(PauseReason::StoreFull))
    );
    // They come back, and are released again.
    for page in &first {
        residency.fault(*page, ReadAhead::InOrder);
    }
    residency.take_commands();
    while ask(&mut residency) != first {
        residency.answered(0, 0);
    }
    residency.answered(u32::MAX, 0);
    // And all of them have to leave.
    residency.set_limit(8);
    residency.add_slots(64);
    residency.retry();
    let mut examined = examines(&mut residency);
    assert!(examined.contains(&first[0]), "{examined:?}");
    examined.sort();
    assert!(examined.is_sorted_by(|a, b| a < b), "{examined:?}");
}

#[test]
fn twenty_small_worlds_lose_no_byte() {
    assert_eq!(first_wrong(|_| ()), None);
}

#[test]
fn to_scan_and_then_punch_loses_stores() {
    let wrong = first_wrong(|world| world.is_naive = true);
    // Some are noticed when the page comes back: the content read is not the content examined.
    let (seed, events, wrong) = wrong.expect("a lost store");
    println!("seed {seed}, after {events} events: {wrong}");
}

#[test]
fn an_address_that_is_taken_for_one_store_loses_stores() {
    let wrong = first_wrong(|world| world.forgets_lent = true);
    let (seed, events, wrong) = wrong.expect("a lost store");
    println!("seed {seed}, after {events} events: {wrong}");
}

#[test]
fn processors_get_in_where_devices_wait_for_room() {
    let mut residency = Residency::new(PAGES, LIMIT, SLOTS);
    let all: Vec<_> = (0..PAGES).map(|page| (Page(page), false)).collect();
    residency.wanted(Ticket(1), &all);
    let for_devices = residency.present();
    assert!(for_devices < LIMIT + BATCH, "{for_devices}");
    residency.take_commands();
    for page in (0..PAGES).rev() {
        residency.fault(Page(page), ReadAhead::InOrder);
    }
    assert_eq!(residency.present(), LIMIT + BATCH);
    // The last page was the first that a processor asked for.
    assert_eq!(residency.look(Page(PAGES - 1)).0, State::Resident);
}

/// Changes all blocks that back pages, `sharers` pages for each, while none of the pages is in
/// memory; a fault at one of them comes meanwhile.
fn change_all_blocks_at_once(sharers: u32) {
    let pages = PAGES as usize;
    let mut residency = Residency::new(PAGES, pages, SLOTS);
    for page in 0..PAGES {
        let op = Op(page.into());
        residency.begin_read(op, &one(page / sharers, page));
        residency.end_read(op, true);
    }
    assert_eq!(residency.tracked(), pages);
    all_leave(&mut residency, |_| true);
    residency.set_limit(LIMIT);

    let all = Span {
        count: PAGES / sharers,
        pages: Vec::new(),
        ..one(0, 0)
    };
    let op = Op(1_000);
    residency.begin_write(op, &all);
    let mut commands = VecDeque::from(residency.take_commands());
    // One of the last that would be fetched for the change.
    let wanted = Page(PAGES - 1);
    let is_its_fetch =
        |command: &Command| matches!(command, Command::Fetch(page, _) if *page == wanted);
    assert!(!commands.iter().any(is_its_fetch));
    residency.fault(wanted, ReadAhead::InOrder);
    commands.extend(residency.take_commands());
    assert!(commands.iter().any(is_its_fetch), "it waits for devices");

    let mut random = Random::new(sharers.into());
    let mut under_way = Vec::new();
    let mut fetches = 0;
    let mut has_gone = false;
    while !commands.is_empty() || !under_way.is_empty() {
        for command in std::mem::take(&mut commands) {
            match command {
                Command::Ask(_) => residency.answered(u32::MAX, 0),
                Command::Examine(page) => {
                    let seen = PageExamination {
                        is_clean: false,
                        is_zero: false,
                        crc: 2,
                    };
                    residency.examined(page, seen);
                }
                Command::Fetch(page, backing) => {
                    assert!(matches!(backing, Backing::Block(_)), "{page:?} comes once");
                    fetches += 1;
                    under_way.push(CommandOutcome::Fetched(page, Ok(1)));
                }
                Command::Save(page, slot) => {
                    under_way.push(CommandOutcome::Saved(page, slot, Ok(())))
                }
                Command::Go(gone) => {
                    assert_eq!((gone, has_gone), (op, false));
                    assert_eq!(
                        residency.tracked(),
                        0,
                        "what depends on the blocks is not safe"
                    );
                    has_gone = true;
                }
                Command::Stop(reason) => panic!("{reason:?}"),
                _ => {}
            }
            assert!(
                residency.present() <= LIMIT + BATCH,
                "{}",
                residency.summary()
            );
        }
        // Few enough that the owner is asked for others meanwhile.
        for _ in 0..under_way.len().min(4) {
            let at = random.below(under_way.len() as u64) as usize;
            residency.ended(under_way.swap_remove(at));
        }
        residency.balance();
        residency.ask();
        commands.extend(residency.take_commands());
        assert!(
            residency.present() <= LIMIT + BATCH,
            "{}",
            residency.summary()
        );
    }
    assert!(has_gone, "{}", residency.summary());
    assert_eq!(fetches, PAGES);
    assert!(residency.present() <= LIMIT, "{}", residency.summary());
}

#[test]
fn a_change_of_all_blocks_brings_each_page_once_and_no_more_at_a_time_than_others_do() {
    change_all_blocks_at_once(1);
    // The same number of fetches for each block.
    change_all_blocks_at_once(SHARERS as u32);
}

#[test]
fn a_change_of_more_blocks_than_there_are_pages_takes_as_long_as_there_are_pages() {
    for count in [PAGES, PAGES + 1, u32::MAX] {
        let mut residency = Residency::new(PAGES, LIMIT, SLOTS);
        let last = 100 + (count - 1).min(1 << 30);
        for (op, first, page) in [(1, 100, 1), (2, 99, 2), (3, last, 3)] {
            residency.begin_read(Op(op), &one(first, page));
            residency.end_read(Op(op), true);
        }
        assert!(!residency.knows_no_disk());
        let discard = Span {
            count,
            pages: Vec::new(),
            ..one(100, 0)
        };
        residency.begin_write(Op(4), &discard);
        let backing = |page| residency.look(Page(page)).1;
        assert_eq!(backing(1), Backing::Nowhere);
        assert_eq!(backing(2), Backing::Block(one(99, 2).first));
        assert_eq!(backing(3), Backing::Nowhere);
    }
}

/// Returns one block of a disk, and its memory.
fn one(number: u32, page: u32) -> Span {
    Span {
        first: Block { disk: 0, number },
        count: 1,
        pages: vec![Page(page)],
        is_whole: true,
    }
}

#[test]
fn parts_of_blocks_stand_for_nothing() {
    let mut residency = Residency::new(PAGES, LIMIT, SLOTS);
    let parts = Span {
        pages: vec![Page(1), Page(2)],
        is_whole: false,
        ..one(5, 0)
    };
    residency.begin_read(Op(1), &parts);
    residency.end_read(Op(1), true);
    assert!(residency.knows_no_disk());
    assert_eq!(residency.look(Page(1)), (State::Resident, Backing::Nowhere));
}

/// History of a page that equals block 7, before a request overlaps it.
#[derive(Clone, Copy, Debug)]
enum Met {
    Resident,
    AskedFor,
    Discarded,
    DiscardedAndAskedFor,
    Unmapped,
    BeingExamined,
}

/// Creates a book in which page 0 equals block 7, and a request is about to overlap it.
fn met(how: Met) -> Residency {
    let mut residency = Residency::new(PAGES, LIMIT, SLOTS);
    residency.begin_read(Op(1), &one(7, 0));
    residency.end_read(Op(1), true);
    assert!(matches!(residency.look(Page(0)).1, Backing::Block(_)));
    match how {
        Met::Resident => {}
        Met::AskedFor => {
            residency.set_limit(0);
            residency.ask();
        }
        Met::Discarded => {
            // The owner is asked for another page first.
            residency.fault(Page(100), ReadAhead::Never);
            residency.discard(Ticket(1), &[Page(100)]);
            residency.discard(Ticket(2), &[Page(0)]);
        }
        Met::DiscardedAndAskedFor => residency.discard(Ticket(1), &[Page(0)]),
        Met::Unmapped | Met::BeingExamined => {
            residency.set_limit(0);
            residency.ask();
            if matches!(how, Met::Unmapped) {
                residency.set_limit(LIMIT);
            }
            residency.answered(1, 0);
            assert_eq!(residency.look(Page(0)).0, State::Unmapped);
        }
    }
    residency.take_commands();
    residency
}

/// By then the owner has cleared its record of the device's store to the page.
#[test]
fn a_known_block_is_forgotten_once_a_request_began_also_if_it_never_goes_down() {
    let every = [
        Met::Resident,
        Met::AskedFor,
        Met::Discarded,
        Met::DiscardedAndAskedFor,
        Met::Unmapped,
        Met::BeingExamined,
    ];
    let mut kept = Vec::new();
    for how in every {
        for is_read in [true, false] {
            for is_whole in [true, false] {
                // Block 7 itself too: a request that was cancelled has not written it.
                for number in [7, 8] {
                    let mut residency = met(how);
                    let span = Span {
                        is_whole,
                        ..one(number, 0)
                    };
                    match is_read {
                        true => residency.begin_read(Op(2), &span),
                        false => residency.begin_write(Op(2), &span),
                    }
                    match is_read {
                        true => residency.end_read(Op(2), false),
                        false => residency.end_write(Op(2), false),
                    }
                    if let Backing::Block(block) = residency.look(Page(0)).1 {
                        kept.push((how, is_read, is_whole, number, block));
                    }
                }
            }
        }
    }
    assert!(kept.is_empty(), "{kept:#?}");
}

/// No device has stored to it since it left, and no other copy of its content exists.
#[test]
fn a_page_that_has_left_for_a_block_is_still_there_after_a_write_of_it_was_cancelled() {
    let mut residency = met(Met::BeingExamined);
    let seen = PageExamination {
        is_clean: true,
        is_zero: false,
        crc: 1,
    };
    residency.examined(Page(0), seen);
    let backing = residency.look(Page(0)).1;
    assert_eq!(backing, Backing::Block(one(7, 0).first));
    residency.set_limit(LIMIT);
    residency.begin_write(Op(2), &one(8, 0));
    residency.end_write(Op(2), false);
    assert_eq!(residency.look(Page(0)), (State::Fetching, backing));
    residency.ended(CommandOutcome::Fetched(Page(0), Ok(1)));
    assert_eq!(residency.look(Page(0)), (State::Resident, backing));
}

#[test]
fn blocks_are_forgotten_once_nothing_is_there_alone() {
    let mut residency = Residency::new(PAGES, LIMIT, SLOTS);
    let span = one(5, 7);
    residency.begin_read(Op(1), &span);
    assert!(!residency.knows_no_disk());
    residency.end_read(Op(1), true);
    assert_eq!(residency.look(Page(7)).1, Backing::Block(span.first));
    assert!(!residency.knows_no_disk());
    assert!(residency.forget_blocks());
    assert_eq!(residency.look(Page(7)).1, Backing::Nowhere);
    assert!(residency.knows_no_disk());
    // A page that has left memory has its content there alone.
    residency.begin_read(Op(2), &span);
    residency.end_read(Op(2), true);
    residency.set_limit(0);
    residency.ask();
    residency.answered(1, 0);
    let seen = PageExamination {
        is_clean: true,
        is_zero: false,
        crc: 1,
    };
    residency.examined(Page(7), seen);
    let there_alone = (State::Absent, Backing::Block(span.first));
    assert_eq!(residency.look(Page(7)), there_alone);
    assert!(!residency.forget_blocks());
    assert_eq!(residency.look(Page(7)), there_alone);
}

/// Creates a book in which pages 0 to 39 are in memory, and which asks for none.
fn with_forty_pages() -> Residency {
    let mut residency = Residency::new(64, 48, 64);
    for page in 0..40 {
        residency.fault(Page(page), ReadAhead::InOrder);
    }
    residency.take_commands();
    residency
}

#[test]
fn discarded_pages_leave_unwritten_and_the_ticket_is_done_after_the_last() {
    let mut residency = with_forty_pages();
    let offered: Vec<Page> = (0..36).map(Page).collect();
    residency.discard(Ticket(1), &offered);
    // An absent page is processed at once, but not before the first discard.
    residency.discard(Ticket(2), &[Page(50), Page(3)]);
    assert_eq!(
        residency.take_commands(),
        [Command::Ask(offered[..BATCH].to_vec())]
    );
    // A device uses page 2.
    residency.answered(!(1 << 2), 0);
    let commands = residency.take_commands();
    let gone = |page: u32| page != 2;
    let (first, second) = (0..32).filter(|page| gone(*page)).fold(
        (Vec::new(), Vec::new()),
        |(mut unmaps, mut punches), page| {
            unmaps.push(Command::Unmap(Page(page)));
            punches.push(Command::Punch(Page(page)));
            (unmaps, punches)
        },
    );
    let rest = Command::Ask(offered[BATCH..].to_vec());
    assert_eq!(commands, [first, second, vec![rest]].concat());
    residency.answered(u32::MAX, 0);
    let commands = residency.take_commands();
    let ends = [Command::Done(Ticket(1)), Command::Done(Ticket(2))];
    assert!(commands.ends_with(&ends), "{commands:?}");
    assert_eq!(residency.look(Page(2)), (State::Resident, Backing::Nowhere));
    assert_eq!(residency.look(Page(35)), (State::Absent, Backing::Nowhere));
    assert_eq!((residency.present(), residency.counts().discarded), (5, 35));
    // A page that stayed can be discarded again, or leave as others do.
    residency.discard(Ticket(3), &[Page(2)]);
    assert_eq!(residency.take_commands(), [Command::Ask(vec![Page(2)])]);
}

#[test]
fn a_slot_is_free_as_soon_as_the_guest_discards_its_page() {
    let mut residency = with_forty_pages();
    residency.set_limit(32);
    residency.ask();
    let commands = residency.take_commands();
    let [Command::Ask(asked)] = &commands[..] else {
        panic!("{commands:?}");
    };
    // A page that is already asked for keeps its content.
    residency.discard(Ticket(1), &asked[..1]);
    assert_eq!(residency.take_commands(), [Command::Done(Ticket(1))]);
    residency.answered(u32::MAX, 0);
    let mut saves = Vec::new();
    for command in residency.take_commands() {
        if let Command::Examine(page) = command {
            let seen = PageExamination {
                is_clean: false,
                is_zero: false,
                crc: 1,
            };
            residency.examined(page, seen);
        }
    }
    for command in residency.take_commands() {
        if let Command::Save(page, slot) = command {
            saves.push((page, slot));
        }
    }
    let [(saved, first), (saving, second), ..] = saves[..] else {
        panic!("{saves:?}");
    };
    residency.ended(CommandOutcome::Saved(saved, first, Ok(())));
    residency.take_commands();
    let free = residency.free_slots();
    let unmapped = (0..40)
        .map(Page)
        .find(|page| residency.look(*page).0 == State::Unmapped);
    let unmapped = unmapped.expect("more than have to leave are let go");
    residency.discard(Ticket(2), &[saved, saving, unmapped]);
    let commands = residency.take_commands();
    let told = [Command::Punch(unmapped), Command::Done(Ticket(2))];
    assert_eq!(commands, told);
    assert_eq!(residency.free_slots(), free + 1);
    residency.ended(CommandOutcome::Saved(saving, second, Ok(())));
    assert_eq!(residency.take_commands(), [Command::Punch(saving)]);
    assert_eq!(residency.free_slots(), free + 2);
    for page in [saved, saving, unmapped] {
        assert_eq!(residency.look(page), (State::Absent, Backing::Nowhere));
    }
    assert_eq!(residency.counts().discarded, 3);
}

#[test]
fn pending_discards_are_answered_when_commands_are_no_longer_carried_out() {
    let mut residency = with_forty_pages();
    residency.discard(Ticket(1), &[Page(1)]);
    residency.discard(Ticket(2), &[Page(2)]);
    assert_eq!(residency.give_up_discards(), [Ticket(1), Ticket(2)]);
}

/// Returns the pages that are fetched at the fault of the second of pages that lie in the store in
/// order, after the first has come.
#[test]
fn the_store_is_read_ahead_when_it_is_gone_through_in_order_and_nothing_is_overwritten() {
    let fetched = |ahead| {
        let mut residency = Residency::new(PAGES, LIMIT, SLOTS);
        for page in 0..16 {
            residency.fault(Page(page), ReadAhead::InOrder);
        }
        all_leave(&mut residency, |_| false);
        residency.set_limit(LIMIT);
        [Page(0), Page(1)].map(|page| {
            residency.fault(page, ahead);
            let commands = residency.take_commands();
            let fetches = commands
                .iter()
                .filter(|command| matches!(command, Command::Fetch(..)));
            fetches.count()
        })
    };
    let all = CLUSTER as usize;
    assert_eq!(fetched(ReadAhead::Always), [all, 0]);
    assert_eq!(fetched(ReadAhead::InOrder), [1, all - 1]);
    assert_eq!(fetched(ReadAhead::Never), [1, 1]);
}
