//! Requests that pass through windows, whole.

use guest_mem::SharedFile;
use proptest::prelude::*;

use crate::{Misbehaviour, OpenError, Owner, Shape, ShapeError, Start, Totals, Verdict, Worker};

/// An area, and the worker's side of it.
fn area(shape: Shape) -> (Owner<SharedFile>, Worker<SharedFile>) {
    let owner = Owner::create(shape).expect("a memory file");
    let file = owner.file().try_clone_to_owned().expect("a descriptor");
    let worker = Worker::open(file, shape.area_len()).expect("the same area");
    (owner, worker)
}

fn small() -> Shape {
    Shape::new(4, 4096, 16, 1).expect("a small area")
}

#[test]
fn sizes_outside_their_ranges_are_refused() {
    assert_eq!(Shape::new(3, 4096, 16, 1), Err(ShapeError::Slots(3)));
    assert_eq!(Shape::new(0, 4096, 16, 1), Err(ShapeError::Slots(0)));
    assert_eq!(Shape::new(2048, 4096, 16, 1), Err(ShapeError::Slots(2048)));
    assert_eq!(Shape::new(4, 5000, 16, 1), Err(ShapeError::Data(5000)));
    assert_eq!(
        Shape::new(4, 8 << 20, 16, 1),
        Err(ShapeError::Data(8 << 20))
    );
    assert_eq!(Shape::new(4, 4096, 0, 1), Err(ShapeError::Ends(0)));
    assert_eq!(Shape::new(4, 4096, 16, 4096), Err(ShapeError::Ends(4096)));
}

#[test]
fn a_file_that_is_no_area_is_refused() {
    let file = SharedFile::create(8192).expect("a memory file");
    let open = || {
        let file = file.file().try_clone_to_owned().expect("a descriptor");
        Worker::open(file, 8192).map(drop)
    };
    assert!(matches!(open(), Err(OpenError::Kind { magic: 0, .. })));
    file.store_u32(0, crate::layout::MAGIC);
    file.store_u32(4, crate::layout::VERSION);
    assert!(matches!(
        open(),
        Err(OpenError::Shape(ShapeError::Slots(0)))
    ));
    for (at, value) in [(8, 4), (12, 4096), (16, 16), (20, 1)] {
        file.store_u32(at, value);
    }
    assert!(matches!(open(), Err(OpenError::Short { len: 8192, .. })));
}

#[test]
fn a_start_is_told_with_its_facts_or_its_reason() {
    let (owner, worker) = area(small());
    assert_eq!(owner.start(), Start::Waiting);
    worker.ready([1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(owner.start(), Start::Ready([1, 2, 3, 4, 5, 6, 7]));
    worker.failed("no seccomp\x1b[2J");
    assert_eq!(owner.start(), Start::Failed("no seccomp?[2J".into()));
    worker.failed(&"x".repeat(5000));
    assert!(matches!(owner.start(), Start::Failed(text) if text.len() == crate::TEXT_LEN));
}

#[test]
fn an_answer_comes_once() {
    let (mut owner, mut worker) = area(small());
    let totals = Totals {
        readable: 0,
        writable: 512,
    };
    owner.submit(2, totals, owner.shape().window(totals, 0));
    assert!(!worker.has_submissions());
    assert!(!owner.publish());
    let submission = worker.next_submission().expect("a good one").expect("one");
    assert_eq!((submission.slot, submission.window.writable), (2, 512));
    assert_eq!(worker.next_submission(), Ok(None));
    worker.answer(2, Verdict::Over, 512);
    owner.arm();
    assert!(worker.publish());
    owner.disarm();
    let answer = owner.next_answer().expect("a good one").expect("one");
    assert_eq!((answer.slot, answer.written), (2, 512));
    assert_eq!(owner.next_answer(), Ok(None));
    worker.answer(2, Verdict::Over, 512);
    assert!(!worker.publish());
    assert_eq!(
        owner.next_answer(),
        Err(Misbehaviour::TooMany { answers: 1, out: 0 })
    );
}

#[test]
fn windows_of_blocks_are_whole_blocks() {
    let shape = small();
    // A write of 10,000 bytes and a read of as many; a read behind bytes that no operation takes.
    for (readable, writable) in [(10_240, 0), (0, 10_240), (7, 10_240), (4096, 0), (0, 4096)] {
        let totals = Totals { readable, writable };
        let mut at = 0;
        loop {
            let window = shape.window(totals, at);
            assert!(window.writable.is_multiple_of(512), "{window:?}");
            assert!(readable == 7 || window.readable.is_multiple_of(512));
            assert!(window.end() > at);
            at = window.end();
            if window.is_last {
                break;
            }
        }
        assert_eq!(at, u64::from(readable) + u64::from(writable));
    }
}

proptest! {
    #[test]
    fn windows_cover_a_request_once(
        readable in 0u32..40_000,
        writable in 0u32..40_000,
        pages in 1u32..4,
    ) {
        let shape = Shape::new(1, pages * 4096, 16, 1).expect("a shape");
        let totals = Totals { readable, writable };
        let (mut at, mut read, mut written) = (0, 0, 0);
        loop {
            let window = shape.window(totals, at);
            prop_assert!(window.readable <= shape.data());
            prop_assert!(
                window.writable == 0
                    || window.writable_at() + window.writable <= shape.data()
            );
            prop_assert!(window.readable == 0 || u64::from(read) == at);
            read += window.readable;
            written += window.writable;
            at = window.end();
            if window.is_last {
                break;
            }
            prop_assert!(window.readable + window.writable > 0);
        }
        prop_assert_eq!((read, written), (readable, writable));
    }

    /// The device reverses what it reads into what it writes.
    #[test]
    fn bytes_of_many_requests_pass_unchanged(
        requests in prop::collection::vec((0u32..9000, 0u32..9000, any::<u8>()), 1..20),
    ) {
        let (mut owner, mut worker) = area(small());
        let mut left: Vec<_> = requests.into_iter().rev().collect();
        // Of each slot: the request, its position, and what was seen of it on each side.
        let mut slots: [Option<(Totals, u64, u8, u64)>; 4] = [None; 4];
        let mut seen = [0u64; 4];
        loop {
            for slot in 0..4u32 {
                let own = &mut slots[slot as usize];
                if own.is_none() && let Some((readable, writable, tag)) = left.pop() {
                    let totals = Totals { readable, writable };
                    *own = Some((totals, 0, tag, 0));
                    owner.head(slot).write(0, &[tag; 16]);
                    let window = owner.shape().window(totals, 0);
                    owner.data(slot).write(0, &vec![tag; window.readable as usize]);
                    owner.submit(slot, totals, window);
                }
            }
            if slots.iter().all(Option::is_none) {
                break;
            }
            owner.publish();
            while let Some(submission) = worker.next_submission().expect("a good one") {
                let (slot, window) = (submission.slot, submission.window);
                let mut head = [0; 16];
                worker.head(slot).read(0, &mut head);
                let mut bytes = vec![0; window.readable as usize];
                worker.data(slot).read(0, &mut bytes);
                prop_assert!(bytes.iter().all(|byte| *byte == head[0]));
                let sum = &mut seen[slot as usize];
                *sum = if window.is_first() { 0 } else { *sum } + bytes.len() as u64;
                let written = vec![!head[0]; window.writable as usize];
                worker.data(slot).write(window.writable_at(), &written);
                worker.foot(slot).write(0, &[*sum as u8]);
                let verdict = if window.is_last { Verdict::Over } else { Verdict::GoesOn };
                worker.answer(slot, verdict, window.writable);
            }
            worker.publish();
            while let Some(answer) = owner.next_answer().expect("a good one") {
                let slot = answer.slot;
                let (totals, at, tag, written) = slots[slot as usize].expect("it was out");
                let window = owner.shape().window(totals, at);
                prop_assert_eq!(answer.written, window.writable);
                let mut bytes = vec![0; answer.written as usize];
                owner.data(slot).read(window.writable_at(), &mut bytes);
                prop_assert!(bytes.iter().all(|byte| *byte == !tag));
                let written = written + u64::from(answer.written);
                if answer.verdict == Verdict::Over {
                    let mut foot = [0];
                    owner.foot(slot).read(0, &mut foot);
                    prop_assert_eq!(foot[0], totals.readable as u8);
                    prop_assert_eq!(written, u64::from(totals.writable));
                    slots[slot as usize] = None;
                    continue;
                }
                let at = window.end();
                slots[slot as usize] = Some((totals, at, tag, written));
                let window = owner.shape().window(totals, at);
                owner.data(slot).write(0, &vec![tag; window.readable as usize]);
                owner.submit(slot, totals, window);
            }
        }
        prop_assert_eq!(owner.out(), 0);
    }
}
