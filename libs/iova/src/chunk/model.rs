//! A loom model of what an owner and strangers do to one chunk, through the real allocator: in every order in which
//! they can meet (at most three preemptions), no range is given out twice, none is lost, and no chunk is retired while somebody
//! has a range of it pinned. Run with
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p iova --lib --release model
//! ```
//!
//! Under loom a chunk has two words of 64 pages and a block two chunks. A model that cannot fail proves nothing: the two
//! mistakes of [`Mutant`] are planted, and must be found.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::vec::Vec;

use loom::model::Builder;
use loom::sync::mpsc;
use loom::thread;

use super::*;
use crate::{CoreAllocator, Request};

/// What is planted now. Of `std`: it orders nothing and is not part of what is explored.
static PLANTED: Mutex<Option<Mutant>> = Mutex::new(None);
/// One model at a time: what is planted is meant for it alone.
static ALONE: Mutex<()> = Mutex::new(());

pub(super) fn plants(mutant: Mutant) -> bool {
    *PLANTED.lock().expect("nobody panics with it") == Some(mutant)
}

/// Whether anything goes wrong with this planted.
fn explore(planted: Option<Mutant>, model: impl Fn() + Send + Sync + 'static) -> bool {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    *PLANTED.lock().expect("nobody panics with it") = planted;
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 10_000;
    let found = catch_unwind(AssertUnwindSafe(|| builder.check(model))).is_err();
    *PLANTED.lock().expect("nobody panics with it") = None;
    found
}

/// Two chunks of two words: four ranges of 64 pages.
fn space(retires: bool) -> ChunkAllocator {
    let aperture = Aperture::new(IovaPfn::new(0), IovaPfn::new(1023), &[]).expect("pages");
    let config = ChunkConfig {
        zone_chunks: 2,
        retires,
        ..ChunkConfig::default()
    };
    ChunkAllocator::with_config(aperture, 2, config).expect("two cores")
}

const WORD: Request = Request::pages(64);

/// The owner allocates and frees while a stranger gives two ranges back one after the other; then all are there again.
fn gives_back() {
    let space = space(false);
    let mut owner = space.claim(CoreId(0)).expect("free");
    let given: Vec<_> = (0..2).map(|_| owner.alloc(WORD).expect("free")).collect();
    let mut stranger = space.claim(CoreId(1)).expect("free");
    let other = thread::spawn(move || {
        for range in given {
            stranger.free(range).expect("it is ours to free");
        }
        // Kept: a dropped handle would drain by parking.
        stranger
    });
    // What strangers gave back is looked for here.
    let mut own = Vec::new();
    own.extend(owner.alloc(WORD));
    owner
        .local
        .collect_now(&owner.shared, 0, strangers::Look::All);
    let stranger = other.join().expect("loom ends the model at a panic");
    owner
        .local
        .collect_now(&owner.shared, 0, strangers::Look::All);
    let live = space.stats().live_ranges;
    assert_eq!(live, own.len() as u64, "what was given back is free");
    let marks = owner.shared.zones[0]
        .known_chunks()
        .map(|(_, chunk)| get(chunk.freed(0)) | get(chunk.freed(1)));
    assert_eq!(
        marks.fold(0, |all, marks| all | marks),
        0,
        "the owner has taken notice of everything"
    );
    while let Ok(range) = owner.alloc(WORD) {
        assert!(
            own.iter().all(|taken: &IovaRange| !taken.overlaps(range)),
            "{range} is out already"
        );
        own.push(range);
    }
    assert_eq!(own.len(), 4);
    own.into_iter()
        .for_each(|range| owner.free(range).expect("allocated"));
    drop(stranger);
}

#[test]
fn what_strangers_give_back_is_never_lost() {
    assert!(!explore(None, gives_back));
    assert!(
        explore(Some(Mutant::ForgetsMarks), gives_back),
        "the planted mistake goes unnoticed"
    );
}

/// A stranger pins a range that its owner frees and whose chunk it retires: one of them comes too late.
fn pins_and_retires() {
    let space = space(true);
    let mut owner = space.claim(CoreId(0)).expect("free");
    let mut all: Vec<_> = (0..3).map(|_| owner.alloc(WORD).expect("free")).collect();
    let contested = all.pop().expect("three");
    let mut stranger = space.claim(CoreId(1)).expect("free");
    let (tell, told) = mpsc::channel();
    let other = thread::spawn(move || {
        let pinned = stranger.pin(contested);
        let is_retired: bool = told.recv().unwrap_or(false);
        if let Ok(pinned) = pinned {
            assert!(
                !is_retired,
                "the leaf table under a pinned range was retired"
            );
            stranger.unpin(pinned);
        }
        stranger
    });
    // The mistake of a driver: it unmaps what another core is unmapping.
    let _ = owner.free(contested);
    owner.local.sweep(&owner.shared, 0, true);
    let retired: Vec<_> = core::iter::from_fn(|| owner.retire()).collect();
    let is_retired = retired
        .iter()
        .any(|chunk| chunk.range().contains(contested));
    let _ = tell.send(is_retired);
    let stranger = other.join().expect("loom ends the model at a panic");
    retired.into_iter().for_each(|chunk| owner.recycle(chunk));
    drop(stranger);
}

#[test]
fn no_chunk_is_retired_under_a_pin() {
    assert!(!explore(None, pins_and_retires));
    assert!(
        explore(Some(Mutant::TrustsItsClaim), pins_and_retires),
        "the planted mistake goes unnoticed"
    );
}

/// An owner parks while a stranger frees in its chunk: somebody takes notice.
fn parks() {
    let space = space(false);
    let mut owner = space.claim(CoreId(0)).expect("free");
    let range = owner.alloc(WORD).expect("free");
    let mut stranger = space.claim(CoreId(1)).expect("free");
    let other = thread::spawn(move || {
        stranger.free(range).expect("it is ours to free");
        stranger
    });
    owner.park();
    let mut stranger = other.join().expect("loom ends the model at a panic");
    assert_eq!(space.stats().live_ranges, 0);
    stranger.park();
    let all = owner
        .alloc(Request::pages(1024))
        .expect("everything is free");
    owner.free(all).expect("allocated");
    drop(stranger);
}

#[test]
fn a_free_in_a_parked_chunk_is_not_lost() {
    assert!(!explore(None, parks));
}
