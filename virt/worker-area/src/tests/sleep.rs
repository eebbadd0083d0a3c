//! Loom's model of both sides going to sleep: one request and its answer, in every interleaving and
//! with every value that the C11 memory model lets a load return.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p worker-area --lib --release model
//! ```
//! An eventfd is a flag under a lock. A wake-up that is lost leaves a side waiting for ever, which
//! loom reports as a deadlock. A model that cannot fail proves nothing: without any one of the four
//! fences, or of the two looks between arming and sleeping, it does.

use std::collections::BTreeMap;

use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::layout::{AT_ANSWERED, AT_OWNER_ASLEEP, AT_SUBMITTED, AT_WORKER_ASLEEP};
use crate::words::Words;
use crate::{Owner, Shape, Totals, Verdict, Worker};

/// The words of the sleeping protocol as loom's atomics, and all others as such that order nothing:
/// they are written before an index, and read behind it.
struct Model {
    indices: BTreeMap<usize, AtomicU64>,
    others: std::sync::Mutex<BTreeMap<usize, u64>>,
}

impl Model {
    fn new() -> Self {
        let indices = [AT_SUBMITTED, AT_OWNER_ASLEEP, AT_ANSWERED, AT_WORKER_ASLEEP];
        Self {
            indices: indices.map(|at| (at, AtomicU64::new(0))).into(),
            others: std::sync::Mutex::default(),
        }
    }
}

impl Words for Model {
    fn byte_len(&self) -> u64 {
        u64::MAX
    }

    fn load_u32(&self, at: usize) -> u32 {
        self.load_u64(at) as u32
    }

    fn store_u32(&self, at: usize, value: u32) {
        self.store_u64(at, value.into());
    }

    fn load_u64(&self, at: usize) -> u64 {
        match self.indices.get(&at) {
            Some(word) => word.load(Ordering::Acquire),
            None => *self.others.lock().unwrap().entry(at).or_default(),
        }
    }

    fn store_u64(&self, at: usize, value: u64) {
        match self.indices.get(&at) {
            Some(word) => word.store(value, Ordering::Release),
            None => {
                self.others.lock().unwrap().insert(at, value);
            }
        }
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

#[derive(Default)]
struct Eventfd {
    is_rung: Mutex<bool>,
    changed: Condvar,
}

impl Eventfd {
    fn ring(&self) {
        *self.is_rung.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut is_rung = self.is_rung.lock().unwrap();
        while !*is_rung {
            is_rung = self.changed.wait(is_rung).unwrap();
        }
        *is_rung = false;
    }
}

#[test]
fn model_of_a_request_and_its_answer_loses_no_wake_up() {
    loom::model(|| {
        let words = std::sync::Arc::new(Model::new());
        let (kick, call) = (Arc::new(Eventfd::default()), Arc::new(Eventfd::default()));
        let shape = Shape::new(1, 4096, 1, 1).unwrap();
        let mut owner = Owner::new(words.clone(), shape);
        let worker = {
            let (kick, call) = (kick.clone(), call.clone());
            let mut worker = Worker::new(words).unwrap();
            thread::spawn(move || {
                loop {
                    if let Some(submission) = worker.next_submission().unwrap() {
                        worker.answer(submission.slot, Verdict::Over, 0);
                        if worker.publish() {
                            call.ring();
                        }
                        return;
                    }
                    worker.arm();
                    if !worker.has_submissions() {
                        kick.wait();
                    }
                    worker.disarm();
                }
            })
        };
        let totals = Totals::default();
        owner.submit(0, totals, shape.window(totals, 0));
        if owner.publish() {
            kick.ring();
        }
        while owner.next_answer().unwrap().is_none() {
            owner.arm();
            if !owner.has_answers() {
                call.wait();
            }
            owner.disarm();
        }
        worker.join().unwrap();
    });
}
