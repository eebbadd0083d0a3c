//! A worker that writes anything anywhere, against a naive model of what the owner may believe.

use std::collections::BTreeMap;
use std::sync::Arc;

use guest_mem::SharedFile;
use proptest::prelude::*;

use crate::layout::{ANSWER, AT_ANSWERED, AT_RINGS, SUBMISSION, word};
use crate::{Misbehaviour, Owner, Shape, Totals, Verdict};

const SLOTS: u32 = 4;

/// Next step of a random history.
#[derive(Clone, Debug)]
enum Event {
    /// The owner submits a request to slot, if that is not out.
    Submit(u32, Totals),
    /// The worker puts an answer at the next place of its ring, and says how many there are.
    Answer {
        slot: u32,
        verdict: u32,
        written: u32,
        ahead: u32,
    },
    /// The worker stores a word somewhere in the area.
    Scribble(usize, u64),
}

fn event() -> impl Strategy<Value = Event> {
    let number = || prop_oneof![4 => 0u32..6000, 1 => any::<u32>()];
    let totals = (0u32..9000, 0u32..9000);
    let totals = totals.prop_map(|(readable, writable)| Totals { readable, writable });
    let area = shape().area_len() as usize / 8;
    prop_oneof![
        4 => (0..SLOTS, totals).prop_map(|(slot, totals)| Event::Submit(slot, totals)),
        6 => (
            prop_oneof![8 => 0..SLOTS, 1 => any::<u32>()],
            prop_oneof![8 => 1u32..3, 1 => any::<u32>()],
            number(),
            prop_oneof![8 => Just(1u32), 1 => 0u32..3, 1 => any::<u32>()],
        ).prop_map(|(slot, verdict, written, ahead)| Event::Answer { slot, verdict, written, ahead }),
        1 => (0..area, any::<u64>()).prop_map(|(at, value)| Event::Scribble(at * 8, value)),
    ]
}

fn shape() -> Shape {
    Shape::new(SLOTS, 4096, 16, 1).expect("a small area")
}

/// Returns what the owner may believe of the answer at `taken`, by what lies in the area and what
/// is out.
fn believed(
    words: &SharedFile,
    taken: u32,
    out: &BTreeMap<u32, (u32, bool)>,
) -> Result<Option<(u32, Verdict, u32)>, ()> {
    let answers = words.load_u32(AT_ANSWERED).wrapping_sub(taken);
    if answers == 0 {
        return Ok(None);
    }
    if answers as usize > out.len() {
        return Err(());
    }
    let ring = AT_RINGS + SLOTS as usize * SUBMISSION;
    let at = ring + (taken % SLOTS) as usize * ANSWER;
    let (slot, verdict) = (words.load_u32(at), words.load_u32(at + 4));
    let written = words.load_u32(at + 8);
    let &(room, is_last) = out.get(&slot).ok_or(())?;
    let verdict = match verdict {
        1 if !is_last => Verdict::GoesOn,
        2 => Verdict::Over,
        _ => return Err(()),
    };
    (written <= room)
        .then_some(Some((slot, verdict, written)))
        .ok_or(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn the_owner_believes_what_the_model_does(events in prop::collection::vec(event(), 1..60)) {
        let words = Arc::new(SharedFile::create(shape().area_len()).expect("a memory file"));
        let mut owner = Owner::new(words.clone(), shape());
        let mut out = BTreeMap::new();
        let mut taken = 0u32;
        for event in events {
            match event {
                Event::Submit(slot, totals) => {
                    if let std::collections::btree_map::Entry::Vacant(own) = out.entry(slot) {
                        let window = shape().window(totals, 0);
                        own.insert((window.writable, window.is_last));
                        owner.submit(slot, totals, window);
                        owner.publish();
                    }
                }
                Event::Answer { slot, verdict, written, ahead } => {
                    let ring = AT_RINGS + SLOTS as usize * SUBMISSION;
                    let at = ring + (taken % SLOTS) as usize * ANSWER;
                    words.store_u64(at, word(slot, verdict));
                    words.store_u64(at + 8, word(written, 7));
                    words.store_u32(AT_ANSWERED, taken.wrapping_add(ahead));
                }
                Event::Scribble(at, value) => words.store_u64(at, value),
            }
            // Whatever it says of its start is text.
            let _ = owner.start();
            let wanted = believed(&words, taken, &out);
            let answer = owner.next_answer();
            prop_assert_eq!(owner.has_answers() , match &answer {
                Ok(Some(_)) => words.load_u32(AT_ANSWERED) != taken.wrapping_add(1),
                Ok(None) => false,
                Err(_) => true,
            });
            match (answer, wanted) {
                (Ok(None), Ok(None)) => {}
                (Ok(Some(answer)), Ok(Some(wanted))) => {
                    prop_assert_eq!((answer.slot, answer.verdict, answer.written), wanted);
                    out.remove(&answer.slot);
                    taken = taken.wrapping_add(1);
                }
                // Nothing is taken from it any more.
                (Err(_), Err(())) => break,
                (answer, wanted) => prop_assert!(false, "{answer:?} beside {wanted:?}"),
            }
            prop_assert_eq!(owner.out() as usize, out.len());
        }
    }
}

/// Has the worker answer this; what the owner says of it.
fn answered(slot: u32, verdict: u32, written: u32, answers: u32) -> Misbehaviour {
    let words = Arc::new(SharedFile::create(shape().area_len()).expect("a memory file"));
    let mut owner = Owner::new(words.clone(), shape());
    let totals = Totals {
        readable: 0,
        writable: 512,
    };
    owner.submit(1, totals, shape().window(totals, 0));
    owner.publish();
    let at = AT_RINGS + SLOTS as usize * SUBMISSION;
    words.store_u64(at, word(slot, verdict));
    words.store_u64(at + 8, word(written, 0));
    words.store_u32(AT_ANSWERED, answers);
    owner.next_answer().expect_err("a breach")
}

#[test]
fn each_breach_is_named() {
    assert_eq!(
        answered(1, 2, 0, 2),
        Misbehaviour::TooMany { answers: 2, out: 1 }
    );
    assert_eq!(answered(4, 2, 0, 1), Misbehaviour::NoSlot(4));
    assert_eq!(answered(0, 2, 0, 1), Misbehaviour::NotOut(0));
    assert_eq!(
        answered(1, 3, 0, 1),
        Misbehaviour::Verdict {
            slot: 1,
            verdict: 3
        }
    );
    assert_eq!(
        answered(1, 2, 513, 1),
        Misbehaviour::TooLong {
            slot: 1,
            written: 513,
            room: 512
        }
    );
    assert_eq!(answered(1, 1, 0, 1), Misbehaviour::BehindEnd(1));
}

/// A faulty owner names a position in a request without bytes.
#[test]
fn position_beyond_an_empty_request_has_an_empty_last_window() {
    for at in [1, 4096, u64::MAX] {
        let window = shape().window(Totals::default(), at);
        let parts = (window.readable, window.writable, window.is_last);
        assert_eq!(parts, (0, 0, true), "{at}");
    }
}
