//! The probe through the crate's own types, as allocators use them.

use std::ops::Deref;
use std::sync::atomic::Ordering;

use line_probe as probe;
use probe::{AtomicBool, AtomicPtr, AtomicU64, Lock};

/// Alone on its lines.
#[derive(Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

impl<T> CachePadded<T> {
    fn new(value: T) -> Self {
        Self(value)
    }
}

impl<T> Deref for CachePadded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// Transfers per round of two cores that take turns, without the first round.
fn per_round(mut turn: impl FnMut(usize)) -> (u64, u64) {
    const ROUNDS: u64 = 100;
    probe::start();
    for round in 0..=ROUNDS {
        if round == 1 {
            probe::clear();
        }
        for core in 0..2 {
            probe::set_core(core);
            turn(core);
        }
    }
    let counts = probe::stop().expect("it was started");
    assert_eq!(counts.cold, 0, "all lines are warm after the first round");
    assert_eq!(counts.transfers() % ROUNDS, 0);
    assert_eq!(counts.locks % ROUNDS, 0);
    (counts.transfers() / ROUNDS, counts.locks / ROUNDS)
}

#[test]
fn two_cores_that_write_one_line_move_it_twice_a_round() {
    let line = CachePadded::new(AtomicU64::new(0));
    let write = |_| {
        line.fetch_add(1, Ordering::Relaxed);
    };
    assert_eq!(per_round(write), (2, 0));
    assert_eq!(line.load(Ordering::Relaxed), 202);
}

#[test]
fn private_lines_and_read_only_ones_do_not_move() {
    let private = [(); 2].map(|()| CachePadded::new(AtomicU64::new(0)));
    let shared = CachePadded::new(AtomicBool::new(true));
    let turn = |core: usize| {
        assert!(shared.load(Ordering::Acquire));
        private[core].store(1, Ordering::Release);
        assert_eq!(private[core].swap(2, Ordering::AcqRel), 1);
    };
    assert_eq!(per_round(turn), (0, 0));
}

#[test]
fn false_sharing_counts_like_sharing() {
    #[repr(align(64))]
    struct Both([AtomicU64; 2]);
    let both = Both([AtomicU64::new(0), AtomicU64::new(0)]);
    assert_eq!(
        per_round(|core| both.0[core].store(1, Ordering::Relaxed)),
        (2, 0)
    );
}

#[test]
fn a_look_before_a_swap_costs_a_transfer_of_its_own() {
    let line = CachePadded::new(AtomicU64::new(0));
    let turn = |_| {
        let seen = line.load(Ordering::Acquire);
        let swapped =
            line.compare_exchange_weak(seen, seen + 1, Ordering::AcqRel, Ordering::Relaxed);
        assert_eq!(swapped, Ok(seen));
    };
    // Each core reads the other's line, then ends the other's copy.
    assert_eq!(per_round(turn), (4, 0));
}

#[test]
fn a_lock_moves_its_line_and_its_value() {
    let small = CachePadded::new(Lock::new(0_u64));
    assert_eq!(per_round(|_| *small.lock() += 1), (2, 2));

    let own = [(); 2].map(|()| CachePadded::new(Lock::new(0_u64)));
    assert_eq!(per_round(|core| *own[core].lock() += 1), (0, 2));

    let far = CachePadded::new(Lock::new(CachePadded::new(AtomicU64::new(0))));
    let turn = |_| {
        far.try_lock()
            .expect("nobody holds it")
            .fetch_add(1, Ordering::Relaxed);
    };
    // Flag and value lie on two lines; the value is looked at through the guard first, then
    // changed.
    assert_eq!(per_round(turn), (6, 2));

    probe::start();
    let held = small.lock();
    assert!(small.try_lock().is_none());
    drop(held);
    let counts = probe::stop().expect("it was started");
    assert_eq!((counts.locks, counts.transfers()), (1, 0));
}

#[test]
fn memory_of_other_origin_can_be_counted() {
    let bytes = [0_u8; 256];
    probe::start();
    probe::touch_write(&bytes);
    probe::set_core(1);
    probe::touch_read(&bytes);
    let counts = probe::stop().expect("it was started");
    assert!((4..=5).contains(&counts.transfers()));
    assert_eq!(counts.cold, counts.transfers());
}

#[test]
fn nothing_counts_before_the_start_nor_on_other_threads() {
    let word = AtomicPtr::<u8>::default();
    assert!(word.load(Ordering::Relaxed).is_null());
    assert_eq!(probe::counts(), probe::Counts::default());
    assert_eq!(probe::stop(), None);
    probe::start();
    std::thread::scope(|scope| {
        scope.spawn(|| word.store(std::ptr::null_mut(), Ordering::Relaxed));
    });
    assert_eq!(probe::counts().accesses, 0);
    assert!(word.load(Ordering::Relaxed).is_null());
    assert_eq!(probe::stop().map(|counts| counts.accesses), Some(1));
}

#[test]
fn a_core_that_finds_a_lock_held_looks_while_another_runs() {
    use std::cell::RefCell;
    use std::rc::Rc;

    let lock: &'static CachePadded<Lock<u64>> = Box::leak(Box::default());
    probe::start();
    // Core 0 holds the lock; core 1 finds it so, and polls three times until it is released.
    let held = Rc::new(RefCell::new((0, Some(lock.lock()))));
    let state = Rc::clone(&held);
    probe::on_spin(Some(Rc::new(move || {
        let mut state = state.borrow_mut();
        state.0 += 1;
        if state.0 == 3 {
            probe::set_core(0);
            state.1 = None;
            probe::set_core(1);
        }
    })));
    probe::set_core(1);
    drop(lock.lock());
    probe::on_spin(None);
    assert_eq!(held.borrow().0, 3);
    let machine = probe::take().expect("it was started");
    // The failed attempt fetches the line; the looks find it; the release fetches it back; the next
    // look and attempt.
    let counts = machine.counts();
    assert_eq!((counts.locks, counts.transfers()), (2, 4));
    probe::resume(machine);
    assert_eq!(probe::stop(), Some(counts));
}
