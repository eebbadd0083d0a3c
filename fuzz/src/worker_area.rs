//! The area between a device's owner and its worker (`worker-area`): a worker that stores any word
//! anywhere, at any time between the owner's steps.
//!
//! Of what the owner believes: an answer names a slot that is out, and it goes on only if more
//! comes; it wrote no more than its window has room for; no more is answered than was submitted. An
//! answer that it refuses was not in the words. The worker's side is given the same words, as of an
//! owner that stores anything: it takes nothing that does not fit the area.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use worker_area::{Misbehaviour, Owner, Shape, Start, TEXT_LEN, Totals, Verdict, Words, Worker};

use crate::{Input, Script};

const SLOTS: u32 = 4;

/// Words in this process.
#[derive(Clone)]
struct Plain(Rc<RefCell<Vec<u8>>>);

impl Words for Plain {
    fn byte_len(&self) -> u64 {
        self.0.borrow().len() as u64
    }

    fn load_u32(&self, at: usize) -> u32 {
        let bytes = self.0.borrow();
        u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
    }

    fn store_u32(&self, at: usize, value: u32) {
        self.0.borrow_mut()[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn load_u64(&self, at: usize) -> u64 {
        let bytes = self.0.borrow();
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
    }

    fn store_u64(&self, at: usize, value: u64) {
        self.0.borrow_mut()[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

fn shape() -> Shape {
    Shape::new(SLOTS, 4096, 16, 1).expect("a small area")
}

/// Runs one input: steps of both sides.
///
/// # Panics
/// The owner believed what cannot be, or the worker what does not fit.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let bytes = vec![0; shape().area_len() as usize];
    let words = Plain(Rc::new(RefCell::new(bytes)));
    let mut owner = Owner::new(words.clone(), shape());
    // Slots that are out: room, and whether the window is the last.
    let mut out = BTreeMap::new();
    while let [step] = input.bytes(1) {
        match step % 6 {
            0 | 1 => {
                let slot = u32::from(input.u8()) % SLOTS;
                let totals = Totals {
                    readable: input.u16().into(),
                    writable: input.u16().into(),
                };
                if out.contains_key(&slot) {
                    continue;
                }
                let window = shape().window(totals, 0);
                out.insert(slot, (window.writable, window.is_last));
                owner.submit(slot, totals, window);
                owner.publish();
            }
            2 => {
                // In the first page and the rings: elsewhere there are only bytes.
                let at = usize::from(input.u16()) * 4 % (4096 + 4 * 48);
                words.store_u32(at, input.u32());
            }
            3 => {
                // The answers so far, near to what they are.
                let answered = words.load_u32(128);
                words.store_u32(128, answered.wrapping_add(input.u8() as i8 as u32));
            }
            4 => believes(&mut owner, &mut out),
            _ => worker_takes(&words),
        }
        if let Start::Failed(why) = owner.start() {
            assert!(why.len() <= TEXT_LEN && why.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
        }
    }
}

/// Has the owner take an answer, and checks it.
fn believes(owner: &mut Owner<Plain>, out: &mut BTreeMap<u32, (u32, bool)>) {
    assert_eq!(owner.out() as usize, out.len());
    match owner.next_answer() {
        Ok(None) => {}
        Ok(Some(answer)) => {
            let (room, is_last) = out.remove(&answer.slot).expect("a slot that is out");
            assert!(answer.written <= room);
            assert!(answer.verdict == Verdict::Over || !is_last);
        }
        Err(Misbehaviour::TooMany { answers, out: has }) => assert!(answers > has),
        Err(Misbehaviour::NoSlot(slot)) => assert!(slot >= SLOTS),
        Err(Misbehaviour::NotOut(slot)) => assert!(!out.contains_key(&slot)),
        Err(Misbehaviour::Verdict { verdict, .. }) => assert!(![1, 2].contains(&verdict)),
        Err(Misbehaviour::BehindEnd(slot)) => assert!(out[&slot].1),
        Err(Misbehaviour::TooLong { written, room, .. }) => assert!(written > room),
    }
}

/// Has a worker begin with the words as they are.
fn worker_takes(words: &Plain) {
    let Ok(mut worker) = Worker::new(words.clone()) else {
        return;
    };
    let shape = *worker.shape();
    for _ in 0..2 * SLOTS {
        let Ok(Some(taken)) = worker.next_submission() else {
            return;
        };
        assert!(taken.slot < shape.slots());
        let window = taken.window;
        assert!(window.readable <= shape.data());
        assert!(window.writable == 0 || window.writable_at() + window.writable <= shape.data());
        worker.answer(taken.slot, Verdict::Over, window.writable);
    }
}

/// Valid traffic: requests of one window and of several, each answered.
pub fn seeds() -> Vec<Vec<u8>> {
    let lengths = [(0u16, 512u16), (512, 0), (16, 0), (9000, 0), (0, 9000)];
    let seed = |(readable, writable): (u16, u16)| {
        let mut script = Script::new();
        for slot in 0..4u8 {
            script.u8(0).u8(slot).u16(readable).u16(writable);
        }
        script.bytes(&[5, 4, 4, 4, 4, 4]).end()
    };
    lengths.into_iter().map(seed).collect()
}
