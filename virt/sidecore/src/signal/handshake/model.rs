//! Loom's model of the handshake: two threads that write, and the watchdog, which tries to sleep.

use loom::{
    sync::{
        Arc,
        atomic::{AtomicBool, fence},
    },
    thread,
};

use super::*;

/// Explores a write of each of two threads, while the watchdog goes to sleep once and nothing wakes
/// it. A write that is under way then would not be watched.
fn explore(fence_all: fn() -> bool) {
    loom::model(move || {
        let state = Arc::new(State::asleep(Fences::FULL));
        state.wake();
        let is_asleep = Arc::new(AtomicBool::new(false));
        let records = [(); 2].map(|()| Arc::new(Record::new()));
        let threads = records.clone().map(|record| {
            let (state, is_asleep) = (Arc::clone(&state), Arc::clone(&is_asleep));
            thread::spawn(move || {
                if record.begin(&state) {
                    // The system call would be here.
                    assert!(!is_asleep.load(SeqCst), "unwatched write");
                }
                record.end();
            })
        });
        if state.sleep(records.iter().map(|record| &**record), fence_all) {
            is_asleep.store(true, SeqCst);
        }
        for thread in threads {
            thread.join().expect("a failed assertion ends the model");
        }
    });
}

fn full_fence() -> bool {
    fence(SeqCst);
    true
}

#[test]
fn model_watches_every_write() {
    explore(full_fence);
}

#[test]
fn model_keeps_a_watchdog_awake_that_has_no_fence() {
    explore(|| false);
}

#[test]
#[should_panic(expected = "unwatched write")]
fn model_notices_a_missing_membarrier() {
    explore(|| true);
}
