//! The book over real memory: threads load and store through a mapping whose pages come and go, real faults and real markers,
//! a store and an image in files. What a page has to hold is known to whoever has its lock.
//!
//! `SWAP_SECONDS` is how long (4).

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use guest_mem::{HugePages, SlotMapping};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use seeded::Random;
use swap::book::{Block, Book, Command, Counts, Op, Page, Place, Span};
use swap::frames::{Content, Frames, PAGE, crc};
use swap::store::Store;
use uffd::{GuestMapping, Source, Stores};

const PAGES: u32 = 512;
const LIMIT: usize = 160;
const BLOCKS: u32 = 512;
const WORDS: usize = PAGE / 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// What a guest wants of its disk.
struct Request {
    is_write: bool,
    block: u32,
    page: Page,
    done: Sender<()>,
}

/// The pager, the owner and the disk, in one thread.
struct Pager {
    book: Book,
    frames: Frames,
    store: Store,
    image: File,
    requests: Receiver<Request>,
    /// Those that have begun, by their number.
    begun: Vec<Request>,
    is_over: Arc<AtomicBool>,
}

impl Pager {
    fn run(mut self) -> Counts {
        while !self.is_over.load(Ordering::Relaxed) {
            let fds = &mut [PollFd::new(self.frames.guest(), PollFlags::IN)];
            let limit = Timespec {
                tv_sec: 0,
                tv_nsec: 200_000,
            };
            // Interrupted is a turn for nothing.
            let _ = poll(fds, Some(&limit));
            while let Some(fault) = self.frames.guest().next_fault().expect("a message") {
                self.book.fault(Page(fault.page as u32), fault.is_write);
                self.carry_out();
            }
            while let Ok(request) = self.requests.try_recv() {
                let op = Op(self.begun.len() as u64);
                let first = Block {
                    disk: 0,
                    number: request.block,
                };
                let span = Span {
                    first,
                    count: 1,
                    pages: vec![request.page],
                    is_whole: true,
                };
                match request.is_write {
                    true => self.book.begin_write(op, &span),
                    false => self.book.begin_read(op, &span),
                }
                self.begun.push(request);
                self.carry_out();
            }
            self.book.ask();
            self.carry_out();
        }
        self.book.counts()
    }

    fn carry_out(&mut self) {
        loop {
            let commands = self.book.take_commands();
            if commands.is_empty() {
                return;
            }
            for command in commands {
                self.command(command);
            }
        }
    }

    fn command(&mut self, command: Command) {
        let frames = &self.frames;
        let mut content = Content::default();
        match command {
            // No device but the disk, whose requests are over by now.
            Command::Ask(_) => self.book.answered(u32::MAX, 0),
            Command::Unmap(page) => frames.guest().unmap(page.0.into()).expect("unmapped"),
            Command::Examine(page) => {
                let seen = frames.examine(page).expect("examined");
                self.book.examined(page, seen);
            }
            Command::Punch(page) => frames.punch(page).expect("punched"),
            Command::Zero(page) => frames.zero(page).expect("zeroed"),
            Command::Fetch(page, place) => {
                let read = match place {
                    Place::Slot(slot) => self.store.read(slot, &mut content),
                    Place::Block(block) => {
                        let at = u64::from(block.number) * PAGE as u64;
                        self.image.read_exact_at(&mut content[..], at)
                    }
                    Place::Nowhere => panic!("it is nowhere"),
                };
                read.expect("read");
                frames.write(page, &content).expect("filled");
                self.book.fetched(page, Ok(crc(&content)));
            }
            Command::Save(page, slot) => {
                frames.read(page, &mut content).expect("read");
                self.store.write(slot, &content).expect("written");
                self.book.saved(page, slot, true);
            }
            Command::Map(page, protection) => frames.map(page, protection).expect("mapped"),
            Command::Protect(page) => frames.guest().protect(page.0.into()).expect("protected"),
            Command::Wake(page) => frames.guest().wake(page.0.into()).expect("woken"),
            Command::Show(_) | Command::Done(_) => {}
            Command::Go(op) => {
                let request = &self.begun[op.0 as usize];
                let at = u64::from(request.block) * PAGE as u64;
                match request.is_write {
                    true => {
                        frames.read(request.page, &mut content).expect("read");
                        self.image.write_all_at(&content[..], at).expect("written");
                        self.book.end_write(op, true);
                    }
                    false => {
                        self.image
                            .read_exact_at(&mut content[..], at)
                            .expect("read");
                        frames.write(request.page, &content).expect("filled");
                        self.book.end_read(op, true);
                    }
                }
                // Of a guest that has failed meanwhile nobody listens.
                let _ = self.begun[op.0 as usize].done.send(());
            }
            Command::Stop(trouble) => panic!("{trouble:?}"),
        }
    }
}

/// A word of what a page holds that was filled with `seed`.
fn word(seed: u64, at: usize) -> u64 {
    match seed {
        0 => 0,
        _ => Random::new(seed ^ (at as u64) << 48).bits(),
    }
}

/// What a page or block has to hold: what it was filled with, and the words stored since.
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
    mapping: Arc<SlotMapping>,
    pages: Vec<Mutex<Model>>,
    blocks: Vec<Mutex<Model>>,
    disk: Mutex<Sender<Request>>,
}

impl Guest {
    fn at(&self, page: usize, index: usize) -> &AtomicU64 {
        let at = self.mapping.hva().raw() as usize + page * PAGE + index * 8;
        // SAFETY: aligned, inside the mapping, which lives as long as the guest, and only used atomically.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(at)) }
    }

    fn transfer(&self, is_write: bool, block: usize, page: usize) {
        let (done, wait) = channel();
        let request = Request {
            is_write,
            block: block as u32,
            page: Page(page as u32),
            done,
        };
        let disk = self.disk.lock().expect("no thread has failed");
        disk.send(request).expect("the pager lives");
        drop(disk);
        wait.recv_timeout(PATIENCE).expect("the request ends");
    }

    /// Loads, stores, reads and writes, until it is over; how many.
    fn work(&self, seed: u64, is_over: &AtomicBool) -> u64 {
        let mut random = Random::new(seed);
        let mut steps = 0;
        while !is_over.load(Ordering::Relaxed) {
            steps += 1;
            let number = random.below(u64::from(PAGES)) as usize;
            let mut page = self.pages[number].lock().expect("no thread has failed");
            let index = random.below(WORDS as u64) as usize;
            let at = random.below(u64::from(BLOCKS)) as usize;
            match random.below(100) {
                0..40 => self.check(number, index, &page),
                40..60 => {
                    let value = random.bits();
                    self.at(number, index).store(value, Ordering::Relaxed);
                    page.stored.push((index, value));
                }
                60..65 => {
                    page.seed = random.below(2) * random.bits();
                    page.stored.clear();
                    for index in 0..WORDS {
                        let value = word(page.seed, index);
                        self.at(number, index).store(value, Ordering::Relaxed);
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
        steps
    }

    fn check(&self, number: usize, index: usize, page: &Model) {
        let found = self.at(number, index).load(Ordering::Relaxed);
        assert_eq!(found, page.word(index), "page {number}, word {index}");
    }
}

fn file(pages: u32) -> OwnedFd {
    let file = memfd_create("pages", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&file, u64::from(pages) * PAGE as u64).expect("its pages");
    file
}

/// Blocks that differ.
fn image() -> (File, Vec<Mutex<Model>>) {
    let image: File = file(BLOCKS).into();
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

#[test]
fn threads_find_what_they_stored_while_their_pages_come_and_go() {
    let memory = file(PAGES);
    let len = u64::from(PAGES) * PAGE as u64;
    let mapping = SlotMapping::new(memory.as_fd(), 0, len, HugePages::Never);
    let mapping = Arc::new(mapping.expect("a mapping"));
    let mapped = match GuestMapping::new([(0, mapping.clone())], Source::User, Stores::Traced) {
        Ok(mapped) => mapped,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let dir = tempfile::tempdir().expect("a directory");
    let store = match Store::open(&dir.path().join("swap"), len) {
        Ok(store) => store,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let (image, blocks) = image();
    let (disk, requests) = channel();
    let pager_is_over = Arc::new(AtomicBool::new(false));
    let pager = Pager {
        book: Book::new(PAGES, LIMIT, PAGES as usize),
        frames: Frames::new(memory, mapped),
        store,
        image,
        requests,
        begun: Vec::new(),
        is_over: pager_is_over.clone(),
    };
    let pager = thread::spawn(|| pager.run());
    let guest = Guest {
        mapping,
        pages: (0..PAGES).map(|_| Mutex::default()).collect(),
        blocks,
        disk: Mutex::new(disk),
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
    // All of it, once more.
    for (number, page) in guest.pages.iter().enumerate() {
        let page = page.lock().expect("no thread has failed");
        for index in 0..WORDS {
            guest.check(number, index, &page);
        }
    }
    pager_is_over.store(true, Ordering::Relaxed);
    let counts = pager.join().expect("the pager");
    println!("{steps} steps: {counts:?}");
    for (what, count) in [
        ("dropped to the disk", counts.dropped_to_disk),
        ("dropped as zeroes", counts.dropped_as_zeroes),
        ("saved", counts.saved),
        ("fetched from the disk", counts.fetched_from_disk),
        ("fetched from the store", counts.fetched_from_store),
        ("rescued", counts.rescued),
        ("not fetched", counts.not_fetched),
    ] {
        assert!(count > 20, "{what}: {count}");
    }
}
