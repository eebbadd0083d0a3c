//! The pager over real memory: threads load and store through a mapping whose pages come and go.
//! Faults and uffd-wp bits are the kernel's; an owner serves a disk; a store and an image are
//! files. The expected content of a page is protected by its lock.
//!
//! `SWAP_SECONDS` is the duration in seconds (4).

mod support;

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use guest_mem::GuestRam;
use rustix::fs::{MemfdFlags, SeekFrom, ftruncate, memfd_create, seek};
use seeded::Random;
use support::{Files, Machine, Shape};
use swap::frames::PAGE;
use swap::pager::Message;
use swap::residency::{Page, PauseReason};
use swap::store::Growth;
use vio::blk::Op;

const PAGES: u32 = 512;
const LIMIT: usize = 160;
const BLOCKS: u32 = 512;
const WORDS: usize = PAGE / 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns a word of a page that was filled with `seed`.
fn word(seed: u64, at: usize) -> u64 {
    match seed {
        0 => 0,
        _ => Random::new(seed ^ (at as u64) << 48).bits(),
    }
}

/// Expected content of a page or block: the seed that it was filled with, and the words stored
/// since.
#[derive(Clone, Default)]
struct Model {
    seed: u64,
    stored: Vec<(usize, u64)>,
}

impl Model {
    fn word(&self, at: usize) -> u64 {
        let stored = self.stored.iter().rev().find(|(index, _)| *index == at);
        stored.map_or_else(|| word(self.seed, at), |(_, value)| *value)
    }
}

struct Guest {
    machine: Machine,
    pages: Vec<Mutex<Model>>,
    blocks: Vec<Mutex<Model>>,
}

impl Guest {
    fn transfer(&self, is_write: bool, block: usize, page: usize) {
        let (offset, len) = ((block * PAGE) as u64, PAGE as u32);
        let op = match is_write {
            true => Op::Write {
                offset,
                len,
                durable: false,
            },
            false => Op::Read { offset, len },
        };
        assert!(self.machine.request(op, page), "the disk is good");
    }

    fn give_up(&self, page: usize) {
        let (done, wait) = channel();
        self.machine.give_up(Page(page as u32), done);
        wait.recv_timeout(PATIENCE).expect("it is answered");
    }

    /// Runs loads, stores, reads and writes until `is_over`; returns the number of operations.
    fn work(&self, seed: u64, is_over: &AtomicBool) -> u64 {
        let mut random = Random::new(seed);
        let mut steps = 0;
        while !is_over.load(Ordering::Relaxed) {
            steps += 1;
            self.step(&mut random);
        }
        steps
    }

    fn step(&self, random: &mut Random) {
        let number = random.below(u64::from(PAGES)) as usize;
        let mut page = self.pages[number].lock().expect("no thread has failed");
        let index = random.below(WORDS as u64) as usize;
        let at = random.below(u64::from(BLOCKS)) as usize;
        match random.below(100) {
            0..40 => self.check(number, index, &page),
            40..60 => {
                let value = random.bits();
                self.machine.store(number, index, value);
                page.stored.push((index, value));
            }
            60..62 => {
                self.give_up(number);
                // It has either of two contents until the guest reads it.
                let is_zero = (0..WORDS).all(|at| self.machine.load(number, at) == 0);
                if is_zero {
                    *page = Model::default();
                } else {
                    (0..WORDS).for_each(|at| self.check(number, at, &page));
                }
            }
            62..65 => {
                page.seed = random.below(2) * random.bits();
                page.stored.clear();
                for index in 0..WORDS {
                    let value = word(page.seed, index);
                    self.machine.store(number, index, value);
                }
            }
            65..90 => {
                let block = self.blocks[at].lock().expect("no thread has failed");
                self.transfer(false, at, number);
                page.clone_from(&block);
            }
            _ => {
                let mut block = self.blocks[at].lock().expect("no thread has failed");
                self.transfer(true, at, number);
                block.clone_from(&page);
            }
        }
    }

    fn check(&self, number: usize, index: usize, page: &Model) {
        let found = self.machine.load(number, index);
        assert_eq!(found, page.word(index), "page {number}, word {index}");
    }
}

/// Blocks that differ.
fn image() -> (File, Vec<Mutex<Model>>) {
    let image: File = memfd_create("image", MemfdFlags::CLOEXEC)
        .expect("a file")
        .into();
    ftruncate(&image, u64::from(BLOCKS) * PAGE as u64).expect("its blocks");
    let blocks = (0..BLOCKS as usize).map(|block| {
        let seed = 1 + block as u64;
        let words = (0..WORDS).flat_map(|at| word(seed, at).to_ne_bytes());
        let bytes: Vec<u8> = words.collect();
        image
            .write_all_at(&bytes, (block * PAGE) as u64)
            .expect("a block");
        Mutex::new(Model {
            seed,
            stored: Vec::new(),
        })
    });
    let blocks = blocks.collect();
    (image, blocks)
}

/// Creates a machine with this image, and so many pages and slots, and a handle that enlarges the
/// store; `None`, with a message, where the test cannot run. If `look` is given, it receives the
/// store's file, and free slots are trimmed.
fn machine(
    image: &File,
    pages: u32,
    slots: u32,
    look: Option<&mut Option<File>>,
) -> Option<(Machine, Growth)> {
    let shape = Shape {
        pages,
        limit: LIMIT,
    };
    let mut grows = None;
    let trims = look.is_some();
    let files = |_: &GuestRam| {
        let (store, growth, file) = support::store_that_grows(slots)?;
        grows = Some(growth);
        if let Some(look) = look {
            *look = Some(file);
        }
        Ok(Files {
            store,
            slots: slots as usize,
            trims,
            disks: vec![support::disk(image)?],
        })
    };
    match Machine::over(&shape, files) {
        Ok(machine) => Some((machine, grows.expect("its store was made"))),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

#[test]
fn threads_find_what_they_stored_while_their_pages_come_and_go() {
    let (image, blocks) = image();
    let Some((machine, _)) = machine(&image, PAGES, PAGES, None) else {
        return;
    };
    let guest = Guest {
        machine,
        pages: (0..PAGES).map(|_| Mutex::default()).collect(),
        blocks,
    };
    let seconds = std::env::var("SWAP_SECONDS").map_or(4, |n| n.parse().expect("a number"));
    let is_over = AtomicBool::new(false);
    let steps: u64 = thread::scope(|scope| {
        let workers: Vec<_> = (1..=3)
            .map(|seed| {
                scope.spawn({
                    let (guest, is_over) = (&guest, &is_over);
                    move || guest.work(seed, is_over)
                })
            })
            .collect();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(seconds)
            && !workers.iter().any(|worker| worker.is_finished())
        {
            thread::sleep(Duration::from_millis(10));
        }
        is_over.store(true, Ordering::Relaxed);
        let steps = workers
            .into_iter()
            .map(|worker| worker.join().expect("what it stored"));
        steps.sum()
    });
    // Check all of it once more.
    for (number, page) in guest.pages.iter().enumerate() {
        let page = page.lock().expect("no thread has failed");
        for index in 0..WORDS {
            guest.check(number, index, &page);
        }
    }
    let report = guest.machine.stop();
    let counts = report.counts;
    println!("{steps} steps: {report:?}");
    assert_eq!(report.pauses, 0);
    for (what, count) in [
        ("dropped to the disk", counts.dropped_to_disk),
        ("dropped as zeroes", counts.dropped_as_zeroes),
        ("saved", counts.saved),
        ("fetched from the disk", counts.fetched_from_disk),
        ("fetched from the store", counts.fetched_from_store),
        ("rescued", counts.rescued),
        ("not fetched", counts.not_fetched),
        ("discarded", counts.discarded),
    ] {
        assert!(count > 20, "{what}: {count}");
    }
}

/// A guest that stores to all its pages, whose store has too few slots at first.
#[test]
fn a_full_store_pauses_the_guest_until_it_has_grown() {
    let (image, blocks) = image();
    const FEW: u32 = 16;
    let Some((machine, mut growth)) = machine(&image, PAGES, FEW, None) else {
        return;
    };
    let guest = Guest {
        machine,
        pages: (0..PAGES).map(|_| Mutex::default()).collect(),
        blocks,
    };
    thread::scope(|scope| {
        let filler = scope.spawn(|| {
            for (number, page) in guest.pages.iter().enumerate() {
                let mut page = page.lock().expect("no thread has failed");
                page.stored.push((0, 1 + number as u64));
                guest.machine.store(number, 0, 1 + number as u64);
            }
        });
        assert_eq!(guest.machine.wait_for_pause(), Some(PauseReason::StoreFull));
        assert!(!filler.is_finished());
        let added = growth.grow(u64::from(PAGES) * PAGE as u64);
        let added = added.expect("the file system has room");
        guest.machine.tell(Message::AddSlots(added as usize));
        assert_eq!(guest.machine.wait_for_pause(), None);
        filler.join().expect("it stored");
        for (number, page) in guest.pages.iter().enumerate() {
            let page = page.lock().expect("no thread has failed");
            (0..WORDS).for_each(|index| guest.check(number, index, &page));
        }
    });
    let report = guest.machine.stop();
    assert_eq!(report.pauses, 1);
    assert_eq!(report.slots, PAGES as usize);
    assert!(
        report.slots - report.free_slots > FEW as usize,
        "{report:?}"
    );
}

/// A guest whose pages are in the store, until a disk reads over all but some of them.
#[test]
fn slots_that_are_free_again_are_given_back_and_can_be_used_again() {
    const MANY: usize = 2048;
    /// Number of the slots that are kept, and half of the others.
    const KEPT: usize = 512;
    const MOST: u64 = (MANY - KEPT) as u64 / 2;
    let (image, blocks) = image();
    let mut file = None;
    let Some((machine, _)) = machine(&image, MANY as u32, MANY as u32, Some(&mut file)) else {
        return;
    };
    let file = file.expect("its store was made");
    let allocated = || file.metadata().expect("it is open").blocks() * 512;
    let guest = Guest {
        machine,
        pages: Vec::new(),
        blocks,
    };
    let store_to_all = |base: u64| {
        for page in 0..MANY {
            guest.machine.store(page, 7, base + page as u64);
        }
    };
    let look_at = |base: u64, pages: Range<usize>| {
        for page in pages {
            let found = guest.machine.load(page, 7);
            assert_eq!(found, base + page as u64, "page {page}");
        }
    };
    store_to_all(1);
    look_at(1, 0..MANY);
    let before = allocated();
    for page in KEPT..MANY {
        // No more pages share a block than it may back.
        guest.transfer(false, page % BLOCKS as usize, page);
    }
    let deadline = Instant::now() + PATIENCE;
    while allocated() > before - MOST * PAGE as u64 {
        assert!(Instant::now() < deadline, "{:?}", guest.machine.report());
        thread::sleep(Duration::from_millis(1));
    }
    // Chunks begin at whole MiB; all slots have been written.
    let mut at = 0;
    while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
        let hole = seek(&file, SeekFrom::Hole(data)).expect("at the end at least");
        assert_eq!(hole % (1 << 20), 0, "{hole:#x}");
        at = hole;
    }
    for page in 0..MANY {
        if page < KEPT {
            look_at(1, page..page + 1);
            continue;
        }
        let block = guest.blocks[page % BLOCKS as usize].lock();
        guest.check(page, 9, &block.expect("no thread has failed"));
    }
    store_to_all(100_000);
    look_at(100_000, 0..MANY);
    let report = guest.machine.stop();
    assert_eq!(report.pauses, 0, "{report:?}");
}

/// A guest whose limit is raised above all of its pages, and lowered again.
#[test]
fn disks_report_while_memory_is_short_and_blocks_back_no_page_after_that() {
    /// Read from the disk one by one: some of them are in memory.
    const READ: usize = 2 * LIMIT;
    let (image, blocks) = image();
    let Some((machine, _)) = machine(&image, PAGES, PAGES, None) else {
        return;
    };
    let guest = Guest {
        machine,
        pages: Vec::new(),
        blocks,
    };
    let machine = &guest.machine;
    let check_all = || {
        for page in 0..READ {
            let block = guest.blocks[page].lock();
            let block = block.expect("no thread has failed");
            (0..WORDS).for_each(|index| guest.check(page, index, &block));
        }
    };
    let eventually = |what: &str, holds: &dyn Fn() -> bool| {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < deadline, "{what}: {:?}", machine.report());
            thread::sleep(Duration::from_millis(1));
        }
    };
    let all_are_read_and_tracked = || {
        (0..READ).for_each(|page| guest.transfer(false, page, page));
        machine.report().tracked == READ
    };
    // So many that disks are asked to report.
    (0..PAGES as usize).for_each(|page| machine.store(page, 0, 1));
    eventually("disks report", &all_are_read_and_tracked);
    machine.tell(Message::SetLimit(4 * PAGES as usize));
    // A disk sees the new mode when it has a request. Pages that have left come back when they are
    // accessed.
    eventually("disks drain", &|| {
        guest.transfer(false, 0, READ);
        check_all();
        machine.report().tracked == 0
    });
    check_all();
    guest.transfer(false, 7, 7);
    assert_eq!(machine.report().tracked, 0);
    machine.tell(Message::SetLimit(LIMIT));
    eventually("disks report again", &all_are_read_and_tracked);
    check_all();
    let report = guest.machine.stop();
    assert_eq!(report.pauses, 0, "{report:?}");
}

/// A guest that has moved pages in all ways, and is then idle.
#[test]
fn a_pager_without_work_sleeps() {
    const STEPS: usize = 2_000;
    const QUIET: Duration = Duration::from_millis(50);
    const IDLE: Duration = Duration::from_secs(1);
    /// Number of wakes: one checks the disks' mode; others release pages that were held for a
    /// device, up to two seconds after the work.
    const TIMES: u64 = 8;
    /// CPU time for each: about the time to fall asleep, a millisecond at most.
    const CPU: Duration = Duration::from_millis(TIMES);
    let (image, blocks) = image();
    let Some((machine, _)) = machine(&image, PAGES, PAGES, Some(&mut None)) else {
        return;
    };
    let guest = Guest {
        machine,
        pages: (0..PAGES).map(|_| Mutex::default()).collect(),
        blocks,
    };
    let mut random = Random::new(1);
    (0..STEPS).for_each(|_| guest.step(&mut random));
    let core = guest.machine.pager();
    // Returns how often it falls asleep in this time, and its CPU time.
    let during = |time| {
        let cpu = || core.thread_cpu_time().expect("a clock");
        let before = (core.stats().core.sleeps, cpu());
        thread::sleep(time);
        (core.stats().core.sleeps - before.0, cpu() - before.1)
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        while during(QUIET).0 > 0 || !core.watch().is_asleep() {
            assert!(Instant::now() < deadline, "{:?}", core.stats());
        }
        let (times, cpu) = during(IDLE);
        println!("awake {times} times, for {cpu:?}");
        if times <= TIMES && cpu <= CPU {
            break;
        }
        assert!(Instant::now() < deadline, "{:?}", core.stats());
    }
    let report = guest.machine.stop();
    let is_at_it = report.tracked > 0 && report.present > LIMIT / 2;
    assert!(is_at_it, "{report:?}");
}
