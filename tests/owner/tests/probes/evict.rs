//! The owner is asked before pages are evicted: it refuses those that leases and windows reach, and
//! all where a function does not report which pages it uses.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use fake_mem::{ArrayMem, PagedMem};
use guest_mem::{
    Dma, Gpa, Iommu, Iova, Leases, NoIommu, Pages, Perm, PhysMem, SourceId, Stop, View, Window,
};
use machine::{
    DataPath, FunctionContext, FunctionLines, Progress, Request, Target, functions, units,
};
use sidecore::{IdlePolicy, Reply, SidecoreBuilder};

use crate::{ByHand, Plain, plain};

units! {
    enum Units: Infallible {
        None(NoIommu),
    }
}
functions! {
    enum Functions: Infallible {
        Reader(Reader),
        Silent(Silent),
    }
}

/// A function that looks at a word at every poll, through a window that it keeps, or waits for it.
#[derive(Default)]
struct Reader {
    at: Iova,
    window: Option<Window>,
    is_stopped: bool,
    /// Number of times that it has met absent memory.
    pends: u32,
}

plain!(Reader, Infallible, 1);
impl Plain for Reader {
    fn write(&mut self, value: u64) {
        self.window = None;
        self.is_stopped = value == 0;
        self.at = Iova::new(value);
    }
}

impl DataPath<Infallible> for Reader {
    fn poll<I: Iommu, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, Infallible>,
    ) -> Progress {
        if !self.is_stopped && self.window.is_none() {
            match cx.view().window(self.at, 8, Perm::Read) {
                Ok(window) => self.window = Some(window),
                Err(Stop::Pending(_)) => self.pends += 1,
                Err(Stop::Fault(_)) => {}
            }
        }
        Progress::Idle
    }

    fn has_work<I: Iommu, M: PhysMem>(
        &mut self,
        _: &mut FunctionContext<'_, I, M, Infallible>,
    ) -> bool {
        false
    }

    fn in_use<I: Iommu, M: PhysMem>(
        &mut self,
        _: &mut FunctionContext<'_, I, M, Infallible>,
        pages: &Pages,
    ) -> u32 {
        let window = self.window.as_ref();
        window.map_or(0, |window| window.in_use(pages))
    }
}

/// A function that does not say what it uses.
struct Silent;

plain!(Silent, Infallible, 2);
impl Plain for Silent {
    fn write(&mut self, _: u64) {}
}

impl DataPath<Infallible> for Silent {
    fn poll<I: Iommu, M: PhysMem>(
        &mut self,
        _: &mut FunctionContext<'_, I, M, Infallible>,
    ) -> Progress {
        Progress::Idle
    }

    fn has_work<I: Iommu, M: PhysMem>(
        &mut self,
        _: &mut FunctionContext<'_, I, M, Infallible>,
    ) -> bool {
        false
    }
}

/// Asks for the eviction of the pages 0x0, 0x1000, … 0x7000: a bit for each that is gone.
fn evict(machine: &mut ByHand<Units, Functions, PagedMem>) -> u32 {
    let pages: Vec<_> = (0..8).map(|page| Gpa::new(page * 0x1000)).collect();
    let (reply, answer) = Reply::pair();
    let pages = Box::new(Pages::new(&pages).unwrap());
    machine.message(Request::Evict { pages, reply });
    answer.try_take().expect("an answer at once")
}

#[test]
fn pages_under_leases_and_in_windows_stay_and_the_rest_is_absent_at_once() {
    let mem = PagedMem::new(ArrayMem::new(0x8000));
    let mut machine = ByHand::<Units, Functions, _>::over(mem.clone());
    let unit = machine.owner.add_unit(Units::None(NoIommu::new(8)));
    let reader = Functions::Reader(Reader::default());
    let reader = machine.owner.add(unit, reader, FunctionLines::default());
    let target = Target::Function(reader);
    machine.write(target, 0, 0, 0x2008);
    machine.poll();
    let device = SourceId::new(0, 3, 0);
    let Units::None(none) = machine.owner.unit(unit).unwrap();
    let lease = View::new(none, &mem, device).lease(Iova::new(0x4800), 0x1000, Perm::Write);
    let lease = lease.unwrap();

    assert_eq!(evict(&mut machine), 0b1100_1011);
    let Units::None(none) = machine.owner.unit(unit).unwrap();
    none.leases_mut().end(lease.id);
    // Pages that are gone may be named again.
    assert_eq!(evict(&mut machine), 0b1111_1011);

    // The function moves its window to a page that is gone, and waits for it.
    machine.write(target, 0, 0, 0x6000);
    machine.poll();
    assert_eq!(evict(&mut machine), u32::from(u8::MAX));
    let Some(Functions::Reader(reader)) = machine.owner.function(reader) else {
        panic!("it was added");
    };
    assert_eq!((reader.pends, reader.window.is_some()), (1, false));
    let ticket = mem.tickets()[0];
    mem.deliver(ticket);
    machine.message(Request::TicketDone(ticket, Ok(())));
    assert_eq!(
        evict(&mut machine),
        0b1011_1111,
        "what came in stays until it is asked for again"
    );
    machine.poll();
    assert_eq!(
        evict(&mut machine),
        0b1011_1111,
        "and then it is in a window"
    );
    machine.write(target, 0, 0, 0);
    assert_eq!(evict(&mut machine), u32::from(u8::MAX));
}

/// The evicting thread is another one than the owner's, and mostly meets an owner that sleeps.
/// (This test once counted sleeps without waiting for them: with two quick processors a question
/// came before the owner had fallen asleep, and 16 of 1,000 met it there.)
#[test]
fn an_owner_that_sleeps_is_woken_and_keeps_its_windows() {
    const QUESTIONS: u64 = 1000;
    const PATIENCE: Duration = Duration::from_secs(10);
    let mut machine = ByHand::<Units, Functions, _>::over(PagedMem::new(ArrayMem::new(0x8000)));
    let unit = machine.owner.add_unit(Units::None(NoIommu::new(8)));
    let reader = Functions::Reader(Reader::default());
    let reader = machine.owner.add(unit, reader, FunctionLines::default());
    machine.write(Target::Function(reader), 0, 0, 0x2008);
    machine.poll();
    let core = SidecoreBuilder::new("sleeper")
        .idle(IdlePolicy::Sleep)
        .spawn(vec![machine.owner])
        .expect("a thread");
    let pages = [Gpa::new(0x1000), Gpa::new(0x2000), Gpa::new(0x3000)];
    for question in 0..QUESTIONS {
        let slept = core.stats().core.sleeps;
        let (reply, answer) = Reply::pair();
        let pages = Box::new(Pages::new(&pages).expect("three pages"));
        let sent = core.handle(0).send(Request::Evict { pages, reply });
        assert!(sent.is_ok(), "question {question}");
        assert_eq!(answer.wait(), Some(0b101), "question {question}");
        // The next one meets it asleep.
        let since = Instant::now();
        while core.stats().core.sleeps == slept {
            assert!(since.elapsed() < PATIENCE, "question {question}");
            std::thread::yield_now();
        }
    }
    core.stop();
}

#[test]
fn a_function_that_does_not_say_what_it_uses_keeps_everything() {
    let mut machine = ByHand::<Units, Functions, _>::over(PagedMem::new(ArrayMem::new(0x8000)));
    let unit = machine.owner.add_unit(Units::None(NoIommu::new(8)));
    assert_eq!(evict(&mut machine), u32::from(u8::MAX));
    machine
        .owner
        .add(unit, Functions::Silent(Silent), FunctionLines::default());
    assert_eq!(evict(&mut machine), 0);
}

#[test]
fn memory_that_is_always_there_lets_nothing_go() {
    let mut machine = ByHand::<Units, Functions>::new();
    let pages = Pages::new(&[Gpa::new(0x1000)]).unwrap();
    assert_eq!(machine.owner.evict(&pages), 0);
}
