//! Golden bytes; any contents; and a device that is killed at each of its stores, to the region and
//! to the ring, beside a driver that accounts for every request.

mod hostile;
mod layout;
mod packed_device;
mod split_device;

use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::rc::Rc;

use proptest::prelude::*;

use super::*;

/// Number of stores that are left before a simulated crash. The code of a dead process runs on
/// here, but its stores have no effect, and the test discards its state.
#[derive(Debug, Default)]
struct KillCountdown {
    left: Cell<Option<u32>>,
    stored: Cell<u32>,
}

impl KillCountdown {
    fn ends_after(&self, left: Option<u32>) {
        self.left.set(left);
    }

    fn is_over(&self) -> bool {
        self.left.get() == Some(0)
    }

    /// Whether the next store takes place.
    fn store(&self) -> bool {
        if self.is_over() {
            return false;
        }
        self.left.set(self.left.get().map(|left| left - 1));
        self.stored.set(self.stored.get() + 1);
        true
    }
}

/// A region that outlives its users, and ignores stores of one that has crashed.
#[derive(Clone, Debug)]
struct SurvivingRegion {
    countdown: Rc<KillCountdown>,
    memory: Rc<RefCell<MemRegion>>,
}

impl SurvivingRegion {
    fn new(len: usize) -> Self {
        Self {
            countdown: Rc::default(),
            memory: Rc::new(RefCell::new(MemRegion::new(len))),
        }
    }
}

impl Region for SurvivingRegion {
    fn size(&self) -> usize {
        self.memory.borrow().size()
    }

    fn load_u8(&self, at: usize) -> u8 {
        self.memory.borrow().load_u8(at)
    }

    fn load_u16(&self, at: usize) -> u16 {
        self.memory.borrow().load_u16(at)
    }

    fn load_u64(&self, at: usize) -> u64 {
        self.memory.borrow().load_u64(at)
    }

    fn store_u8(&mut self, at: usize, value: u8) {
        if self.countdown.store() {
            self.memory.borrow_mut().store_u8(at, value);
        }
    }

    fn store_u16(&mut self, at: usize, value: u16) {
        if self.countdown.store() {
            self.memory.borrow_mut().store_u16(at, value);
        }
    }

    fn store_u64(&mut self, at: usize, value: u64) {
        if self.countdown.store() {
            self.memory.borrow_mut().store_u64(at, value);
        }
    }
}

/// Decisions of a test: given bytes, again and again.
#[derive(Debug)]
struct Choices {
    bytes: Vec<u8>,
    at: usize,
}

impl Choices {
    fn new(bytes: &[u8]) -> Self {
        Self {
            bytes: bytes.to_vec(),
            at: 0,
        }
    }

    fn seeded(seed: u32) -> Self {
        let mut state = u64::from(seed) * 2 + 1;
        let bytes = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005) ^ 0x5bd1;
            (state >> 40) as u8
        });
        Self {
            bytes: bytes.take(509).collect(),
            at: 0,
        }
    }

    /// Below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        let byte = self.bytes.get(self.at % self.bytes.len().max(1));
        self.at += 1;
        usize::from(byte.copied().unwrap_or(0)) % bound.max(1)
    }
}

/// Verdict of one side of the test: the fault found, if any.
type Verdict = Result<(), String>;

fn check(is_right: bool, what: impl FnOnce() -> String) -> Verdict {
    if is_right { Ok(()) } else { Err(what()) }
}

/// The driver's account: each request is executed, then returned, once.
#[derive(Debug, Default)]
struct Account {
    executed: Vec<bool>,
    returned: Vec<bool>,
}

impl Account {
    fn submit(&mut self) -> usize {
        self.executed.push(false);
        self.returned.push(false);
        self.executed.len() - 1
    }

    /// Records an execution, unless the process has crashed.
    fn execute(&mut self, countdown: &KillCountdown, request: usize) {
        if !countdown.is_over() {
            self.executed[request] = true;
        }
    }

    fn take_back(&mut self, request: usize) -> Verdict {
        check(self.executed[request], || {
            format!("request {request} was returned before it was executed")
        })?;
        check(!self.returned[request], || {
            format!("request {request} was returned twice")
        })?;
        self.returned[request] = true;
        Ok(())
    }

    fn close(&self) -> Verdict {
        match self.returned.iter().position(|is| !is) {
            Some(lost) => Err(format!("request {lost} was lost")),
            None => Ok(()),
        }
    }
}

/// A machine: guest memory with a ring, a driver, and the process that serves it, which may be
/// dead.
trait Machine {
    fn countdown(&self) -> &KillCountdown;
    fn account(&self) -> &Account;
    fn submit(&mut self, choices: &mut Choices);
    fn take_back(&mut self) -> Verdict;
    /// A new process: recovery. What it concludes without its stores, dying in it, does not count.
    fn start(&mut self) -> Verdict;
    fn fetch(&mut self, count: usize) -> Verdict;
    /// Returns some requests in some order.
    fn complete(&mut self, count: usize, choices: &mut Choices) -> Verdict;
}

const STEPS: usize = 60;

/// Runs a machine whose first process dies after `deaths[0]` stores, the second after `deaths[1]`
/// of its own (recovery's included), and so on; the last one lives. Gives the stores that took
/// place.
fn run(machine: &mut impl Machine, choices: &mut Choices, deaths: &[u32]) -> Result<u32, String> {
    let mut deaths = deaths.iter().copied();
    machine.countdown().ends_after(deaths.next());
    machine.start()?;
    for _ in 0..STEPS {
        while machine.countdown().is_over() {
            // The guest runs on.
            for _ in 0..choices.below(3) {
                machine.take_back()?;
                machine.submit(choices);
            }
            machine.countdown().ends_after(deaths.next());
            machine.start()?;
        }
        match choices.below(8) {
            0..3 => machine.submit(choices),
            3 | 4 => {
                let count = 1 + choices.below(3);
                machine.fetch(count)?;
            }
            5 | 6 => {
                let count = 1 + choices.below(4);
                machine.complete(count, choices)?;
            }
            _ => machine.take_back()?,
        }
    }
    while machine.countdown().is_over() {
        machine.countdown().ends_after(deaths.next());
        machine.start()?;
    }
    machine.countdown().ends_after(None);
    machine.fetch(usize::MAX)?;
    machine.complete(usize::MAX, choices)?;
    machine.take_back()?;
    machine.account().close()?;
    // And in the end nothing is left for a successor.
    machine.start()?;
    machine.complete(usize::MAX, choices)?;
    machine.take_back()?;
    Ok(machine.countdown().stored.get())
}

/// Kills at each store of a run, then the successor at each of its first stores. The first failure.
fn kill_at_each_store<M: Machine>(machine: impl Fn() -> M, seed: u32) -> Result<u32, String> {
    let stores = run(&mut machine(), &mut Choices::seeded(seed), &[])?;
    for first in 1..=stores {
        for second in [None, Some(1), Some(2), Some(1 + (first * 7 + seed) % 23)] {
            let deaths: Vec<u32> = std::iter::once(first).chain(second).collect();
            run(&mut machine(), &mut Choices::seeded(seed), &deaths)
                .map_err(|error| format!("seed {seed}, killed after {deaths:?}: {error}"))?;
        }
    }
    Ok(stores)
}

/// Asserts that the checker detects a device that stores in a wrong order.
fn assert_caught<M: Machine + Debug>(machine: impl Fn() -> M) {
    let caught = (0..40).find_map(|seed| kill_at_each_store(&machine, seed).err());
    let wrong = machine();
    assert!(caught.is_some(), "{wrong:?} was not caught");
}

fn deaths() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(1..60_u32, 0..6)
}
