//! Several threads store to one absent page at the same time, over real memory: the first fault has
//! the page brought in, and others come while it is on its way. Whatever the page was, it holds all
//! that they stored, and beside that what it held.

mod support;

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use guest_mem::GuestRam;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use seeded::Random;
use support::{Files, IN_KERNEL, Machine, Shape, Stops, Vcpu, Whereabouts};
use swap::book::Counts;
use swap::frames::PAGE;
use swap::overwrite::Registers;
use swap::pager::Message;
use swap::stopped::{Answer, Stopped};
use vio::blk::Op;
use vio_faults::LatencyDisk;

const PROCESSORS: usize = 3;
const ALL: Range<usize> = 0..PROCESSORS;
/// At so many pages, for each way in which they are absent.
const ROUNDS: usize = 256;
const WORDS: usize = PAGE / 8;
const PATIENCE: Duration = Duration::from_secs(60);
/// What a page takes at least to be read.
const LATENCY: Duration = Duration::from_micros(200);

/// What a page holds.
type Content = Vec<u64>;

/// What a page or block holds that was filled with `seed`.
fn filled(seed: usize) -> Content {
    let mut random = Random::new(1 + seed as u64);
    (0..WORDS).map(|_| random.bits() | 1).collect()
}

/// Lets so many through, together if they run at the same time.
struct Gate {
    all: Barrier,
    missing: AtomicUsize,
}

impl Gate {
    /// What one that sleeps takes to run.
    const WAKING: Duration = Duration::from_micros(50);

    fn new(count: usize) -> Arc<Self> {
        Arc::new(Self {
            all: Barrier::new(count),
            missing: AtomicUsize::new(count),
        })
    }

    fn pass(&self) {
        self.all.wait();
        // The last one is awake, the others have to be woken, one after the other.
        self.missing.fetch_sub(1, Ordering::Relaxed);
        let start = Instant::now();
        while self.missing.load(Ordering::Relaxed) > 0 && start.elapsed() < Self::WAKING {
            std::hint::spin_loop();
        }
    }
}

/// What a page holds.
fn load(machine: &Machine, page: usize) -> Content {
    let words = (0..WORDS).map(|index| machine.load(page, index));
    words.collect()
}

/// Words are stored to a page.
fn put(words: &[(usize, u64)], content: &mut Content) {
    for (index, value) in words {
        content[*index] = *value;
    }
}

/// What a processor does.
type Job = Box<dyn FnOnce(&Processor) + Send>;

/// A thread that loads and stores. Not scoped, and not the test's own: one that waits for a page
/// for ever must not hold up who says so.
struct Processor {
    machine: Arc<Machine>,
    stat: File,
}

impl Processor {
    /// Where its jobs go.
    fn start(machine: &Arc<Machine>) -> Sender<Job> {
        let (jobs, asked) = channel::<Job>();
        let machine = machine.clone();
        thread::spawn(move || {
            let stat = File::open("/proc/thread-self/stat").expect("each thread has one");
            let own = Self { machine, stat };
            for job in asked {
                job(&own);
            }
        });
        jobs
    }

    /// Faults of the thread so far.
    fn faults(&self) -> u64 {
        let mut bytes = [0; 1024];
        let len = self.stat.read_at(&mut bytes, 0).expect("it lives");
        let text = std::str::from_utf8(&bytes[..len]).expect("numbers");
        // Behind the name, which ends with the last bracket: minor faults are the 8th field, major
        // ones the 10th.
        let (_, fields) = text.rsplit_once(')').expect("a name");
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        let number = |at: usize| fields[at].parse::<u64>().expect("a number");
        number(7) + number(9)
    }
}

struct Guest {
    machine: Arc<Machine>,
    pages: usize,
    processors: Vec<Sender<Job>>,
    /// Of each store that has ended, whether it found its page absent.
    ended: (Sender<bool>, Receiver<bool>),
    /// Before the first round.
    before: Counts,
    stores: u64,
    /// Stores that found their page absent.
    waited: u64,
}

impl Guest {
    /// Of so many pages, all of which may be in memory; its disk has so many blocks. `None`, said,
    /// where that cannot be.
    fn new(pages: usize, blocks: usize, stops: Option<Stops>) -> Option<Self> {
        let image = memfd_create("image", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&image, (blocks.max(1) * PAGE) as u64).expect("its blocks");
        let image = File::from(image);
        for block in 0..blocks {
            let words = filled(block).into_iter();
            let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
            let offset = (block * PAGE) as u64;
            image.write_all_at(&bytes, offset).expect("a block");
        }
        let shape = Shape {
            pages: pages as u32,
            limit: 2 * pages,
        };
        let files = |_: &GuestRam| {
            // Others find a page on its way.
            let late = |io| LatencyDisk::new(io, LATENCY);
            let mut disk = support::disk(&image)?;
            disk.image = Box::new(late(disk.image)?);
            Ok(Files {
                store: Box::new(late(support::store(pages as u32)?)?),
                slots: pages,
                trims: false,
                disks: vec![disk],
            })
        };
        let vcpu = stops.map(|stops| Vcpu {
            is_only_counted: false,
            stops,
        });
        let machine = match Machine::with_vcpu(&shape, files, vcpu) {
            Ok(machine) => Arc::new(machine),
            Err(error) => {
                eprintln!("skipped: {error}");
                return None;
            }
        };
        Some(Self {
            pages,
            processors: ALL.map(|_| Processor::start(&machine)).collect(),
            machine,
            ended: channel(),
            before: Counts::default(),
            stores: 0,
            waited: 0,
        })
    }

    /// Has a processor do this.
    fn run<T: Send + 'static>(&self, job: impl FnOnce(&Machine) -> T + Send + 'static) -> T {
        let (tell, told) = channel();
        // A test that has failed listens no more.
        let job: Job = Box::new(move |own| drop(tell.send(job(&own.machine))));
        assert!(self.processors[0].send(job).is_ok(), "it lives");
        match told.recv_timeout(PATIENCE) {
            Ok(result) => result,
            Err(_) => panic!("it waits for ever: {:?}", self.machine.report()),
        }
    }

    /// Fills a page with what no block holds; what it holds then.
    fn fill(&self, page: usize) -> Content {
        self.run(move |machine| {
            let content = filled(1_000_000 + page);
            for (index, word) in content.iter().enumerate() {
                machine.store(page, index, *word);
            }
            content
        })
    }

    /// Has the disk read blocks into the pages with these numbers, which then stand for them.
    fn read(&self, pages: impl Iterator<Item = usize> + Clone, all: usize) {
        // Pages are short, and disks are asked to report.
        self.machine.tell(Message::SetLimit(all / 2));
        self.run(move |machine| (0..all).for_each(|page| machine.store(page, 0, 1)));
        self.machine.report();
        for page in pages.clone() {
            let (offset, len) = ((page * PAGE) as u64, PAGE as u32);
            let is_done = self.machine.request(Op::Read { offset, len }, page);
            assert!(is_done, "the disk is good");
        }
        assert_eq!(self.machine.report().tracked, pages.count());
        self.machine.tell(Message::SetLimit(2 * all));
        // All in memory.
        self.run(move |machine| (0..all).for_each(|page| drop(load(machine, page))));
    }

    /// The same with every other of so many pages. The others are filled; what each holds then.
    fn fill_and_read(&self, all: usize) -> Vec<(usize, Content)> {
        self.read((0..all).step_by(2), all);
        let content = |page: usize| match page.is_multiple_of(2) {
            true => filled(page),
            false => self.fill(page),
        };
        (0..all).map(|page| (page, content(page))).collect()
    }

    /// The rounds begin: what has been counted counts no more.
    fn begin(&mut self) {
        self.before = self.machine.report().counts;
    }

    /// How often this was counted since.
    fn counted(&self, which: impl Fn(&Counts) -> u64) -> u64 {
        which(&self.machine.report().counts) - which(&self.before)
    }

    /// Has some processors store to a page, each a word of its own, once all whom the gate waits
    /// for are there; which words.
    fn store(
        &mut self,
        processors: Range<usize>,
        page: usize,
        gate: &Arc<Gate>,
    ) -> Vec<(usize, u64)> {
        let mut words = Vec::new();
        for number in processors {
            self.stores += 1;
            let index = (page * 7 + number * 171) % WORDS;
            let value = (number as u64 + 1) << 56 | self.stores;
            words.push((index, value));
            let (gate, ended) = (gate.clone(), self.ended.0.clone());
            let job: Job = Box::new(move |own| {
                let before = own.faults();
                gate.pass();
                own.machine.store(page, index, value);
                let _ = ended.send(own.faults() > before);
            });
            assert!(self.processors[number].send(job).is_ok(), "it lives");
        }
        words
    }

    /// Waits until all have stored.
    fn wait(&mut self) {
        for _ in ALL {
            match self.ended.1.recv_timeout(PATIENCE) {
                Ok(has_waited) => self.waited += u64::from(has_waited),
                Err(_) => panic!("one waits for ever: {:?}", self.machine.report()),
            }
        }
    }

    /// A round: all store to the page at once.
    fn round(&mut self, page: usize, content: &mut Content) {
        let words = self.store(ALL, page, &Gate::new(PROCESSORS));
        self.wait();
        put(&words, content);
        self.check(page, content);
    }

    fn check(&self, page: usize, content: &Content) {
        let found = self.run(move |machine| load(machine, page));
        for (index, (found, wanted)) in found.iter().zip(content).enumerate() {
            assert_eq!(found, wanted, "page {page}, word {index}");
        }
    }

    /// Whether in some of so many rounds more than one has found the page absent.
    fn assert_some_waited_together(&self, rounds: usize) {
        let waited = self.waited;
        assert!(
            waited > (rounds + rounds / 16) as u64,
            "{waited} in {rounds} rounds"
        );
    }

    /// Rounds at absent pages, from the last to the first: nothing is read ahead.
    fn rounds(&mut self, pages: &mut [(usize, Content)]) {
        self.begin();
        for (page, content) in pages.iter_mut().rev() {
            assert_eq!(self.machine.whereabouts(*page), Whereabouts::Absent);
            self.round(*page, content);
        }
        self.assert_some_waited_together(pages.len());
    }

    /// All pages leave and come back.
    fn look_again(&self, pages: &[(usize, Content)]) {
        self.machine.empty(2 * self.pages);
        for (page, content) in pages {
            self.check(*page, content);
        }
    }

    fn stop(self) {
        let Self {
            mut machine,
            processors,
            stores,
            waited,
            ..
        } = self;
        drop(processors);
        // Each lets go when it is told that there is nothing more.
        let deadline = Instant::now() + PATIENCE;
        let report = loop {
            match Arc::try_unwrap(machine) {
                Ok(machine) => break machine.stop(),
                Err(shared) => machine = shared,
            }
            assert!(Instant::now() < deadline, "one has not ended");
            thread::yield_now();
        };
        println!("{waited} of {stores} stores waited: {report:?}");
        assert_eq!(report.pauses, 0, "{report:?}");
    }
}

#[test]
fn a_page_in_the_store_comes_once_for_all_who_store_to_it() {
    let Some(mut guest) = Guest::new(ROUNDS, 0, None) else {
        return;
    };
    let mut pages: Vec<_> = (0..ROUNDS).map(|page| (page, guest.fill(page))).collect();
    guest.machine.empty(2 * ROUNDS);
    guest.rounds(&mut pages);
    assert_eq!(
        guest.counted(|counts| counts.fetched_from_store),
        ROUNDS as u64
    );
    guest.look_again(&pages);
    guest.stop();
}

#[test]
fn a_page_that_stands_for_a_block_comes_once_and_leaves_by_way_of_the_store() {
    let Some(mut guest) = Guest::new(ROUNDS, ROUNDS, None) else {
        return;
    };
    guest.read(0..ROUNDS, ROUNDS);
    let mut pages: Vec<_> = (0..ROUNDS).map(|page| (page, filled(page))).collect();
    guest.machine.empty(2 * ROUNDS);
    guest.rounds(&mut pages);
    assert_eq!(
        guest.counted(|counts| counts.fetched_from_disk),
        ROUNDS as u64
    );
    guest.look_again(&pages);
    assert_eq!(guest.counted(|counts| counts.dropped_to_disk), 0);
    guest.stop();
}

#[test]
fn a_page_of_zeroes_comes_once() {
    /// Those beside one come with it.
    const APART: usize = 16;
    const PAGES: usize = ROUNDS * APART;
    let Some(mut guest) = Guest::new(PAGES, 0, None) else {
        return;
    };
    // Half of them have been in memory, and left.
    guest.run(|machine| (PAGES / 2..PAGES).for_each(|page| drop(load(machine, page))));
    guest.machine.empty(2 * PAGES);
    assert_eq!(
        guest.machine.report().counts.dropped_as_zeroes,
        PAGES as u64 / 2
    );
    let mut pages: Vec<_> = (0..ROUNDS)
        .map(|nth| (nth * APART + nth % APART, vec![0; WORDS]))
        .collect();
    guest.rounds(&mut pages);
    assert_eq!(guest.counted(|counts| counts.zeroed), PAGES as u64);
    guest.look_again(&pages);
    guest.stop();
}

#[test]
fn a_soft_page_comes_back_once() {
    const PAGES: usize = 2 * ROUNDS;
    let Some(mut guest) = Guest::new(PAGES, PAGES, None) else {
        return;
    };
    let mut pages = guest.fill_and_read(PAGES);
    (0..PAGES).for_each(|page| guest.check(page, &pages[page].1));
    guest.begin();
    let mut rounds = 0;
    // A tenth of the limit is soft at a time.
    for limit in (PAGES / 3..PAGES).rev().step_by(PAGES / 24) {
        guest.machine.tell(Message::SetLimit(limit));
        let deadline = Instant::now() + PATIENCE;
        while guest.machine.report().present > limit - limit / 16 {
            assert!(Instant::now() < deadline, "{:?}", guest.machine.report());
            thread::sleep(Duration::from_millis(1));
        }
        for (page, content) in &mut pages {
            if guest.machine.whereabouts(*page) == Whereabouts::Unmapped {
                guest.round(*page, content);
                rounds += 1;
            }
        }
    }
    let rescued = guest.counted(|counts| counts.rescued);
    assert!(rescued > ROUNDS as u64 / 2, "{rescued} of {rounds} rounds");
    guest.assert_some_waited_together(rounds);
    guest.look_again(&pages);
    guest.stop();
}

// With the Preventer: a vCPU that is told of, not run, overwrites pages with `REP STOSQ`.

/// Its linear addresses from here on, the first of the upper half, are all of memory.
const BASE: u64 = 0xffff_8000_0000_0000;
/// What it stores.
const FILL: u64 = 0x1122_3344_5566_7788;
/// Present, writable, accessed, dirty.
const KERNEL: u64 = 0x063;
/// Code, behind the pages that are overwritten, and four levels of tables from the highest on.
const CODE: usize = ROUNDS;
const TABLES: [usize; 4] = [ROUNDS + 1, ROUNDS + 2, ROUNDS + 3, ROUNDS + 4];

/// Where it is when it is about to overwrite this page.
fn registers(page: usize) -> Registers {
    Registers {
        rip: BASE + (CODE * PAGE) as u64,
        rax: FILL,
        rcx: WORDS as u64,
        rdi: BASE + (page * PAGE) as u64,
        cr3: (TABLES[0] * PAGE) as u64,
        ..IN_KERNEL
    }
}

/// Whether the vCPU was told that the page has been overwritten; else it does that itself.
fn is_overwritten(answer: Answer, page: usize) -> bool {
    let after = answer.wait(PATIENCE);
    let wanted = (0, BASE + ((page + 1) * PAGE) as u64);
    after
        .inspect(|after| assert_eq!((after.rcx, after.rdi), wanted))
        .is_some()
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

#[test]
fn a_page_that_is_about_to_be_overwritten_is_either_that_or_read_whoever_else_stores_to_it() {
    const PAGES: usize = ROUNDS + 5;
    let (tell, asked) = channel();
    let Some(mut guest) = Guest::new(PAGES, ROUNDS, Some(Stops::ByTest(tell))) else {
        return;
    };
    let mut pages = guest.fill_and_read(ROUNDS);
    guest.machine.empty(2 * PAGES);
    guest.run(|machine| {
        let entry = |page: usize| (page * PAGE) as u64 | KERNEL;
        for (level, tables) in TABLES.windows(2).enumerate() {
            let index = if level == 0 { 256 } else { 0 };
            machine.store(tables[0], index, entry(tables[1]));
        }
        (0..PAGES).for_each(|page| machine.store(TABLES[3], page, entry(page)));
        // REP STOSQ.
        machine.store(CODE, 0, 0xab48f3);
    });

    guest.begin();
    let machine = guest.machine.clone();
    let say_where = |page| {
        let (stopped, answer) = Stopped::new(registers(page));
        machine.tell(Message::Stopped(stopped));
        answer
    };
    let (mut overwritten, mut raced) = (0, 0);
    for (nth, (page, content)) in pages.iter_mut().rev().enumerate() {
        let page = *page;
        assert_eq!(machine.whereabouts(page), Whereabouts::Absent);
        let faults = machine.report().faults;
        let (first, others) = (0..1, 1..PROCESSORS);
        let mut words = guest.store(first, page, &Gate::new(1));
        let outcome = asked.recv_timeout(PATIENCE);
        outcome.expect("the vCPU is to stop: a page beside this one was overwritten");
        let gate = Gate::new(others.len());
        // In turns, so that no two looks in a row are in vain: there is one at each page then.
        let is_given = match nth % 4 {
            // Others store behind it, and then the vCPU says again where it was.
            0 | 2 => {
                assert!(is_overwritten(say_where(page), page), "page {page}");
                words.extend(guest.store(others, page, &gate));
                guest.wait();
                assert!(!is_overwritten(say_where(page), page), "page {page}");
                true
            }
            // At about the same time, a little later or earlier.
            1 => {
                let gate = Gate::new(PROCESSORS);
                words.extend(guest.store(others, page, &gate));
                let apart = Duration::from_micros(20) * (nth as u32 / 8 % 8);
                let answer = match nth / 4 % 2 {
                    0 => {
                        let answer = say_where(page);
                        spin(apart);
                        gate.pass();
                        answer
                    }
                    _ => {
                        gate.pass();
                        spin(apart);
                        say_where(page)
                    }
                };
                guest.wait();
                let is_given = is_overwritten(answer, page);
                raced += u64::from(is_given);
                is_given
            }
            // Before: the look has not ended when the next fault at the page comes, which has it
            // read.
            _ => {
                words.extend(guest.store(others, page, &gate));
                let deadline = Instant::now() + PATIENCE;
                while machine.report().faults < faults + 2 {
                    assert!(Instant::now() < deadline, "{:?}", machine.report());
                    thread::yield_now();
                }
                // Nor when it has come and all have stored.
                let is_late = nth / 4 % 2 == 0;
                if is_late {
                    guest.wait();
                }
                assert!(!is_overwritten(say_where(page), page), "page {page}");
                if !is_late {
                    guest.wait();
                }
                false
            }
        };
        if is_given {
            content.fill(FILL);
        }
        overwritten += u64::from(is_given);
        put(&words, content);
        guest.check(page, content);
    }
    let report = machine.report();
    println!("{raced} of {} were overwritten in time", ROUNDS / 4);
    assert_eq!(report.prevented, overwritten);
    assert_eq!(report.undecided, ROUNDS as u64 - overwritten);
    guest.look_again(&pages);
    assert_eq!(guest.counted(|counts| counts.dropped_to_disk), 0);
    drop(machine);
    guest.stop();
}
