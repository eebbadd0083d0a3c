//! A vCPU and a device count in all pages of a memory while they are taken away: no count is lost.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use guest_mem::{Access, Gpa, GuestRam, HugePages, NoIommu, PAGE_SIZE, PhysMem, SourceId};
use machine::{Request, units};
use platform::interrupt::{InterruptSink, Message};
use punch::{PunchedRam, Puncher};
use seeded::Random;
use sidecore::{Handle, IdlePolicy, SidecoreBuilder};

units! {
    enum Units: Infallible {
        None(NoIommu),
    }
}

type Owner = machine::Owner<Units, machine::NoFunction, PunchedRam>;

const REGIONS: [(Gpa, u64); 2] = [(Gpa::new(0), 8 << 20), (Gpa::new(1 << 30), 4 << 20)];
const PAGES: u64 = (12 << 20) / PAGE_SIZE;
const WANTED: u64 = 3_000;
/// Offsets in a page of the counters.
const BY_VCPU: u64 = 0;
const BY_DEVICE: u64 = 8;

struct Nowhere;

impl InterruptSink for Nowhere {
    fn send(&self, _: SourceId, _: Message) {}
}

fn gpa(page: u64, word: u64) -> Gpa {
    let at = page * PAGE_SIZE + word;
    let (first, len) = REGIONS[0];
    let (second, _) = REGIONS[1];
    Gpa::new(if at < len {
        first.raw() + at
    } else {
        second.raw() + at - len
    })
}

/// Adds one, as a device does: it asks again for what it has to wait for.
fn count(owner: &Handle<Request<Owner>>, page: u64) {
    let add = move |owner: &mut Owner| -> Access<()> {
        let (mem, at) = (owner.memory(), gpa(page, BY_DEVICE));
        let mut bytes = [0; 8];
        mem.read(at, &mut bytes)?;
        mem.write(at, &(u64::from_le_bytes(bytes) + 1).to_le_bytes())
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while owner
        .call(|reply| Request::ask(reply, add))
        .unwrap()
        .is_err()
    {
        assert!(Instant::now() < deadline, "page {page} never comes");
        std::thread::yield_now();
    }
}

#[test]
fn no_count_is_lost_while_pages_come_and_go() {
    let ram = GuestRam::with_pages(&REGIONS, HugePages::Never).unwrap();
    let slots = ram
        .regions()
        .iter()
        .map(|region| ram.slot_mapping(region).unwrap());
    let slots: Vec<_> = slots.map(Arc::new).collect();
    let memory = PunchedRam::new(ram.clone()).unwrap();
    let mut owner = Owner::new("punched", memory.clone(), Arc::new(Nowhere));
    owner.add_unit(Units::None(NoIommu::new(1)));
    let core = SidecoreBuilder::new("owner").idle(IdlePolicy::adaptive());
    let core = core.spawn(vec![owner]).unwrap();
    let puncher = match Puncher::start(memory, slots.clone(), core.handle(0)) {
        Ok(puncher) => puncher,
        Err(error) => {
            eprintln!("skipped: {error}");
            core.stop();
            return;
        }
    };
    let word = |page: u64, word: u64| {
        let at = page * PAGE_SIZE;
        let (slot, at) = match at.checked_sub(slots[0].len()) {
            None => (&slots[0], at),
            Some(at) => (&slots[1], at),
        };
        let at = std::ptr::with_exposed_provenance_mut((slot.hva().raw() + at + word) as usize);
        // SAFETY: aligned and inside the mapping, which outlives the threads; only used atomically.
        unsafe { AtomicU64::from_ptr(at) }
    };
    let is_over = AtomicBool::new(false);
    let mut by_device = vec![0; PAGES as usize];
    let by_vcpu = std::thread::scope(|scope| {
        let vcpu = scope.spawn(|| {
            let (mut random, mut counted) = (Random::new(5), vec![0; PAGES as usize]);
            while !is_over.load(Ordering::Relaxed) {
                let page = random.below(PAGES);
                word(page, BY_VCPU).fetch_add(1, Ordering::Relaxed);
                counted[page as usize] += 1;
            }
            counted
        });
        let mut random = Random::new(6);
        let deadline = Instant::now() + Duration::from_secs(60);
        while puncher.punched() < WANTED {
            assert!(
                Instant::now() < deadline,
                "only {} pages",
                puncher.punched()
            );
            let page = random.below(PAGES);
            count(&core.handle(0), page);
            by_device[page as usize] += 1;
        }
        is_over.store(true, Ordering::Relaxed);
        vcpu.join().unwrap()
    });
    puncher.rest();
    for page in 0..PAGES {
        // Everything is back once the vCPU has looked at it.
        assert_eq!(
            word(page, BY_VCPU).load(Ordering::Relaxed),
            by_vcpu[page as usize],
            "page {page}"
        );
        let seen = word(page, BY_DEVICE).load(Ordering::Relaxed);
        assert_eq!(seen, by_device[page as usize], "page {page}");
    }
    core.stop();
    let counts = puncher.stop();
    println!("{counts}");
    assert_eq!(counts.trespasses, 0);
    assert!(counts.punched.total() >= WANTED);
    assert!(counts.for_devices.total() > 0 && counts.for_vcpus.total() > 0);
}
