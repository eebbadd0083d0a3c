//! The thread's work, one step at a time.

use std::convert::Infallible;

use guest_mem::{GuestRam, HugePages, Intent, NoIommu, PhysMem, SourceId, Stop};
use machine::units;
use platform::interrupt::{InterruptSink, Message};
use sidecore::{IdlePolicy, SidecoreBuilder};

use super::*;

units! {
    enum Units: Infallible {
        None(NoIommu),
    }
}

type Owner = machine::Owner<Units, machine::NoFunction, PunchedRam>;

struct Nowhere;

impl InterruptSink for Nowhere {
    fn send(&self, _: SourceId, _: Message) {}
}

const NUMBER: u64 = 3;
const AT: Gpa = Gpa::new(NUMBER * PAGE_SIZE);

/// The owner lets the page go, and the thread takes it away.
fn take_away(thread: &mut Thread<Owner>) {
    let gone = thread.ram.let_go(&Pages::new(&[AT]).unwrap(), 1);
    assert_eq!(gone, 1);
    let (_, answer) = Reply::pair();
    thread.question = Some(Question {
        pages: vec![NUMBER],
        answer,
    });
    thread.punch(gone).unwrap();
}

#[test]
fn a_page_asked_for_twice_keeps_what_it_was_filled_with_in_between() {
    let ram = GuestRam::with_pages(&[(Gpa::new(0), 1 << 20)], HugePages::Never).unwrap();
    let slots = ram.regions().iter();
    let slots = slots.map(|region| Arc::new(ram.slot_mapping(region).unwrap()));
    let slots = slots.collect();
    let mem = PunchedRam::new(ram.clone()).unwrap();
    let mut owner = Owner::new("punched", mem.clone(), Arc::new(Nowhere));
    owner.add_unit(Units::None(NoIommu::new(1)));
    let core = SidecoreBuilder::new("owner").idle(IdlePolicy::adaptive());
    let core = core.spawn(vec![owner]).unwrap();
    let thread = Thread::new(mem.clone(), slots, core.handle(0), Default::default());
    let mut thread = match thread {
        Ok(thread) => thread,
        Err(error) => return eprintln!("skipped: {error}"),
    };

    take_away(&mut thread);
    for _ in 0..2 {
        let asked = mem.host(AT, PAGE_SIZE, Intent::Overwrite);
        assert!(matches!(asked, Err(Stop::Pending(_))));
    }
    let asked = mem.take_asked();
    let [first, second] = &asked[..] else {
        panic!("asked for twice");
    };
    assert!(thread.bring_back(NUMBER, Some(first.batches)).unwrap());
    mem.write(AT, &[7; PAGE]).unwrap();
    take_away(&mut thread);
    assert!(thread.bring_back(NUMBER, Some(second.batches)).unwrap());

    let mut bytes = [0; PAGE];
    mem.read(AT, &mut bytes).unwrap();
    assert_eq!(bytes, [7; PAGE]);
    assert_eq!(
        (thread.counts.not_fetched, thread.counts.trespasses),
        (1, 0)
    );
    core.stop();
}
