//! Several threads store to one absent page at the same time, over real memory: the first fault
//! brings the page in, and others come while it is on its way. Whatever state the page was in, it
//! then has all of their stores, and its former content otherwise.

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
use swap::frames::PAGE;
use swap::overwrite::Registers;
use swap::pager::Message;
use swap::residency::Counts;
use swap::stopped::{Answer, Stopped};
use vio::blk::Op;
use vio_faults::LatencyDisk;

const PROCESSORS: usize = 3;
const ALL: Range<usize> = 0..PROCESSORS;
/// Number of pages, for each way in which they are absent.
const ROUNDS: usize = 256;
const WORDS: usize = PAGE / 8;
const PATIENCE: Duration = Duration::from_secs(60);
/// Least time of a page's read.
const LATENCY: Duration = Duration::from_micros(200);

/// Content of a page.
type Content = Vec<u64>;

/// Returns the content of a page or block that was filled with `seed`.
fn filled(seed: usize) -> Content {
    let mut random = Random::new(1 + seed as u64);
    (0..WORDS).map(|_| random.bits() | 1).collect()
}

/// Barrier that releases its threads together if they run at the same time.
struct Gate {
    all: Barrier,
    missing: AtomicUsize,
}

impl Gate {
    /// Time that a sleeping thread takes to run.
    const WAKING: Duration = Duration::from_micros(50);

    fn new(count: usize) -> Arc<Self> {
        Arc::new(Self {
            all: Barrier::new(count),
            missing: AtomicUsize::new(count),
        })
    }

    fn pass(&self) {
        self.all.wait();
        // The last thread is awake; the others have to be woken, one after the other.
        self.missing.fetch_sub(1, Ordering::Relaxed);
        let start = Instant::now();
        while self.missing.load(Ordering::Relaxed) > 0 && start.elapsed() < Self::WAKING {
            std::hint::spin_loop();
        }
    }
}

/// Returns the content of a page.
fn load(machine: &Machine, page: usize) -> Content {
    let words = (0..WORDS).map(|index| machine.load(page, index));
    words.collect()
}

/// Applies stores to the expected content of a page.
fn put(words: &[(usize, u64)], content: &mut Content) {
    for (index, value) in words {
        content[*index] = *value;
    }
}

/// Work for a processor.
type Job = Box<dyn FnOnce(&Processor) + Send>;

/// A thread that loads and stores. Not scoped, and not the test's own: if it waits for a page for
/// ever, the test must be able to report that.
struct Processor {
    machine: Arc<Machine>,
    stat: File,
}

impl Processor {
    /// Starts a processor; returns the sender of its jobs.
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

    /// Returns the faults of the thread so far.
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
    /// Receives, for each store that has ended, whether it found its page absent.
    ended: (Sender<bool>, Receiver<bool>),
    /// Counters before the first round.
    before: Counts,
    stores: u64,
    /// Stores that found their page absent.
    waited: u64,
}

impl Guest {
    /// Creates a guest of `pages` pages, all of which may be in memory, and a disk of `blocks`
    /// blocks. `None`, with a message, where the test cannot run.
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
            // Late, so that others find a page on its way.
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

    /// Runs a job on a processor.
    fn run<T: Send + 'static>(&self, job: impl FnOnce(&Machine) -> T + Send + 'static) -> T {
        let (tell, told) = channel();
        // In a test that has failed the receiver is gone.
        let job: Job = Box::new(move |own| drop(tell.send(job(&own.machine))));
        assert!(self.processors[0].send(job).is_ok(), "it lives");
        match told.recv_timeout(PATIENCE) {
            Ok(result) => result,
            Err(_) => panic!("it waits for ever: {:?}", self.machine.report()),
        }
    }

    /// Fills a page with content that no block has, and returns the content.
    fn fill(&self, page: usize) -> Content {
        self.run(move |machine| {
            let content = filled(1_000_000 + page);
            for (index, word) in content.iter().enumerate() {
                machine.store(page, index, *word);
            }
            content
        })
    }

    /// Makes the disk read blocks into the pages with these numbers, which the blocks then back.
    fn read(&self, pages: impl Iterator<Item = usize> + Clone, all: usize) {
        // Memory is short, so disks are asked to report.
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
        // Makes all pages resident.
        self.run(move |machine| (0..all).for_each(|page| drop(load(machine, page))));
    }

    /// Makes blocks back every other of `all` pages, and fills the others; returns the content of
    /// each.
    fn fill_and_read(&self, all: usize) -> Vec<(usize, Content)> {
        self.read((0..all).step_by(2), all);
        let content = |page: usize| match page.is_multiple_of(2) {
            true => filled(page),
            false => self.fill(page),
        };
        (0..all).map(|page| (page, content(page))).collect()
    }

    /// Begins the rounds: earlier counts are subtracted from then on.
    fn begin(&mut self) {
        self.before = self.machine.report().counts;
    }

    /// Returns the increase of a counter since the first round.
    fn counted(&self, which: impl Fn(&Counts) -> u64) -> u64 {
        which(&self.machine.report().counts) - which(&self.before)
    }

    /// Makes some processors store to a page, each a word of its own, once all threads of the gate
    /// are there; returns the words.
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

    /// Runs a round: all processors store to the page at once.
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

    /// Asserts that in some of `rounds` rounds more than one processor has found the page absent.
    fn assert_some_waited_together(&self, rounds: usize) {
        let waited = self.waited;
        assert!(
            waited > (rounds + rounds / 16) as u64,
            "{waited} in {rounds} rounds"
        );
    }

    /// Runs rounds at absent pages, from the last to the first, so that nothing is read ahead.
    fn rounds(&mut self, pages: &mut [(usize, Content)]) {
        self.begin();
        for (page, content) in pages.iter_mut().rev() {
            assert_eq!(self.machine.whereabouts(*page), Whereabouts::Absent);
            self.round(*page, content);
        }
        self.assert_some_waited_together(pages.len());
    }

    /// Makes all pages leave and come back.
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
        // Each processor drops its reference when its channel has ended.
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
fn a_page_in_the_store_comes_once_for_all_stores_to_it() {
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
fn a_block_backed_page_comes_once_and_leaves_by_way_of_the_store() {
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
    /// Neighbours of a page of zeroes come with it.
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
fn an_unmapped_page_comes_back_once() {
    const PAGES: usize = 2 * ROUNDS;
    let Some(mut guest) = Guest::new(PAGES, PAGES, None) else {
        return;
    };
    let mut pages = guest.fill_and_read(PAGES);
    (0..PAGES).for_each(|page| guest.check(page, &pages[page].1));
    guest.begin();
    let mut rounds = 0;
    // A tenth of the limit is unmapped at a time.
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

// With the Preventer: a simulated vCPU overwrites pages with `REP STOSQ`.

/// Linear address, the first of the upper half, from which on all of memory is mapped.
const BASE: u64 = 0xffff_8000_0000_0000;
/// Value that it stores.
const FILL: u64 = 0x1122_3344_5566_7788;
/// Present, writable, accessed, dirty.
const KERNEL: u64 = 0x063;
/// Code, behind the pages that are overwritten, and four levels of tables from the highest on.
const CODE: usize = ROUNDS;
const TABLES: [usize; 4] = [ROUNDS + 1, ROUNDS + 2, ROUNDS + 3, ROUNDS + 4];

/// Returns the registers when it is about to overwrite this page.
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

/// Returns whether the answer continues the vCPU behind the overwritten page; otherwise it executes
/// the instruction itself.
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
fn a_page_about_to_be_overwritten_is_overwritten_or_read_despite_other_stores() {
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
        // Varied, so that no two attempts in a row fail: then there is one at each page.
        let is_given = match nth % 4 {
            // The others store after it, and then the vCPU reports its old registers again.
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
            // Before it: the attempt has not ended when the next fault at the page comes, which
            // makes the page be read.
            _ => {
                words.extend(guest.store(others, page, &gate));
                let deadline = Instant::now() + PATIENCE;
                while machine.report().faults < faults + 2 {
                    assert!(Instant::now() < deadline, "{:?}", machine.report());
                    thread::yield_now();
                }
                // And also not when the page has come and all have stored.
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
