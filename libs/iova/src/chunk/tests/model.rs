//! Loom model of an owner and remote cores on one chunk, through the real allocator: in every order
//! in which they can meet (at most three preemptions, two in the larger models), no range is
//! allocated twice, none is lost, and no chunk is retired while a core has a range of it pinned.
//! Run with
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p iova --lib --release model
//! ```
//!
//! Under loom a chunk has two words of 64 pages and a block two chunks. A model that cannot fail
//! proves nothing: `tests/mutants/iova` has the mistakes that these must find.

use std::vec::Vec;

use loom::model::Builder;
use loom::sync::mpsc;
use loom::thread;

use super::*;
use crate::{CoreAllocator, Request};

/// Explores the orders with at most three preemptions.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    explore_to(3, model);
}

fn explore_to(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// Two chunks of two words for three cores: four ranges of 64 pages.
fn space(retires: bool) -> ChunkAllocator {
    let aperture = Aperture::new(IovaPfn::new(0), IovaPfn::new(1023), &[]).expect("pages");
    let config = ChunkConfig {
        zone_chunks: 2,
        retires,
        ..ChunkConfig::default()
    };
    ChunkAllocator::with_config(aperture, 3, config).expect("three cores")
}

/// On the heap: loom's stacks are small.
#[inline(never)]
fn claim(space: &ChunkAllocator, core: usize) -> Box<ChunkCore> {
    Box::new(space.claim(CoreId(core)).expect("free"))
}

/// The owner collects everything that remote cores have freed.
fn collect_all(owner: &ChunkCore) {
    let mut zones = owner.shared.zones_of(owner.local.cache().id()).lock();
    zones.collect_now(&owner.shared, 0, remote_free::Collect::All);
}

const WORD: Request = Request::pages(64);
const HALF: Request = Request::pages(32);

/// Returns whether the owner has collected every mark, in every chunk.
fn nothing_is_marked(shared: &Shared) -> bool {
    let marks = |chunk: &Chunk, word| {
        let given = get(chunk.exclusive_freed(word)) ^ get(chunk.taken(word));
        given | get(chunk.shared_freed(word))
    };
    let mut chunks = shared.zones[0].known_chunks();
    chunks.all(|(_, chunk)| (0..WORDS).all(|word| marks(chunk, word) == 0))
}

/// The designated remote freer of the chunk in which the remote core frees a second range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RemoteFreer {
    RemoteCore,
    /// It parks afterwards.
    RemoteCoreThenParked,
    AnotherCore,
}

/// The owner allocates and frees while a remote core frees two ranges one after the other; then all
/// are free again.
fn gives_back(freer: RemoteFreer) {
    let space = space(false);
    // Two of a word: what is marked in another word is not this word's.
    let (size, all) = match freer {
        RemoteFreer::AnotherCore => (HALF, 8),
        RemoteFreer::RemoteCore | RemoteFreer::RemoteCoreThenParked => (WORD, 4),
    };
    let mut owner = claim(&space, 0);
    let given: Vec<_> = (0..2).map(|_| owner.alloc(size).expect("free")).collect();
    if freer == RemoteFreer::AnotherCore {
        for (_, chunk) in owner.shared.zones[0].known_chunks() {
            assert!(chunk.become_giver(&owner.shared));
        }
    }
    let mut remote = claim(&space, 1);
    let other = thread::spawn(move || {
        for range in given {
            remote.free(range).expect("it is ours to free");
        }
        if freer == RemoteFreer::RemoteCoreThenParked {
            remote.park();
        }
        // Kept: a dropped handle would drain by parking.
        remote
    });
    // The ranges that remote cores freed are collected here.
    let mut own = Vec::new();
    own.extend(owner.alloc(size));
    collect_all(&owner);
    let remote = other.join().expect("loom ends the model at a panic");
    collect_all(&owner);
    let live = space.stats().live_ranges;
    assert_eq!(live, own.len() as u64, "what was given back is free");
    assert!(nothing_is_marked(&owner.shared));
    while let Ok(range) = owner.alloc(size) {
        assert!(
            own.iter().all(|taken: &IovaRange| !taken.overlaps(range)),
            "{range} is out already"
        );
        own.push(range);
    }
    assert_eq!(own.len(), all);
    own.into_iter()
        .for_each(|range| owner.free(range).expect("allocated"));
    drop(remote);
}

#[test]
fn remote_frees_are_never_lost() {
    explore(|| gives_back(RemoteFreer::RemoteCore));
    explore_to(2, || gives_back(RemoteFreer::AnotherCore));
}

#[test]
fn frees_of_designated_freer_that_parks_are_never_lost() {
    explore(|| gives_back(RemoteFreer::RemoteCoreThenParked));
}

/// Two remote cores that have freed in a chunk before free one range each, of the same word.
fn two_give() {
    let space = space(false);
    let mut owner = claim(&space, 0);
    let all: Vec<_> = (0..4).map(|_| owner.alloc(HALF).expect("free")).collect();
    let mut remotes = Vec::new();
    for (core, range) in all[..2].iter().enumerate() {
        let mut remote = claim(&space, 1 + core);
        remote.free(*range).expect("it is ours to free");
        remotes.push(remote);
    }
    let (one, another) = (all[2], all[3]);
    let mut first = remotes.remove(0);
    let other = thread::spawn(move || {
        first.free(one).expect("it is ours to free");
        first
    });
    remotes[0].free(another).expect("it is ours to free");
    assert!(remotes[0].free(another).is_err(), "it is freed");
    remotes.push(other.join().expect("loom ends the model at a panic"));
    assert_eq!(space.stats().live_ranges, 0, "both are free");
    collect_all(&owner);
    assert!(nothing_is_marked(&owner.shared));
    let again: Vec<_> = (0..4).map(|_| owner.alloc(HALF).expect("free")).collect();
    assert!(
        again.iter().all(|range| all.contains(range)),
        "all are there again"
    );
    again
        .into_iter()
        .for_each(|range| owner.free(range).expect("allocated"));
    drop(remotes);
}

#[test]
fn chunk_has_one_designated_freer() {
    explore_to(2, two_give);
}

/// A remote core pins a range that its owner frees and whose chunk it retires: one of them comes
/// too late.
fn pins_and_retires() {
    let space = space(true);
    let mut owner = claim(&space, 0);
    let mut all: Vec<_> = (0..3).map(|_| owner.alloc(WORD).expect("free")).collect();
    let contested = all.pop().expect("three");
    let mut remote = claim(&space, 1);
    let (tell, told) = mpsc::channel();
    let other = thread::spawn(move || {
        let pinned = remote.pin(contested);
        let is_retired: bool = told.recv().unwrap_or(false);
        if let Ok(pinned) = pinned {
            assert!(
                !is_retired,
                "the leaf table under a pinned range was retired"
            );
            remote.unpin(pinned);
        }
        remote
    });
    // The mistake of a driver: it unmaps what another core is unmapping.
    let _ = owner.free(contested);
    {
        let ChunkCore { shared, local, .. } = &mut *owner;
        let zones = &mut *shared.zones_of(CoreId(0)).lock();
        local.cache_mut().unready_all(shared, zones, 0);
        zones.sweep(shared, 0, trim::RetainEmpty::One);
    }
    let retired: Vec<_> = core::iter::from_fn(|| owner.retire()).collect();
    let is_retired = retired
        .iter()
        .any(|chunk| chunk.range().contains(contested));
    let _ = tell.send(is_retired);
    let remote = other.join().expect("loom ends the model at a panic");
    retired.into_iter().for_each(|chunk| owner.recycle(chunk));
    drop(remote);
}

#[test]
fn no_chunk_is_retired_under_a_pin() {
    explore(pins_and_retires);
}

/// A designated remote freer pins a range while the owner collects: the range is not freed by
/// mistake.
fn pins_and_frees() {
    let space = space(false);
    let mut owner = claim(&space, 0);
    let mut all: Vec<_> = (0..3).map(|_| owner.alloc(HALF).expect("free")).collect();
    let mut remote = claim(&space, 1);
    let contested = all.pop().expect("three");
    for range in all {
        remote.free(range).expect("it is ours to free");
    }
    let other = thread::spawn(move || {
        let pinned = remote.pin(contested).expect("it is ours to pin");
        assert!(remote.free(contested).is_err(), "it is pinned");
        remote.free_pinned(pinned);
        remote
    });
    collect_all(&owner);
    let remote = other.join().expect("loom ends the model at a panic");
    assert_eq!(space.stats().live_ranges, 0);
    drop(remote);
}

#[test]
fn range_pinned_by_designated_freer_is_not_freed() {
    explore_to(2, pins_and_frees);
}

/// An owner parks while a remote core frees in its chunk, as its designated freer if it has freed
/// there before: one of them collects the range.
fn parks(is_remote_freer: bool) {
    let space = space(false);
    let mut owner = claim(&space, 0);
    let range = owner.alloc(HALF).expect("free");
    let mut remote = claim(&space, 1);
    if is_remote_freer {
        let first = owner.alloc(HALF).expect("free");
        remote.free(first).expect("it is ours to free");
    }
    let other = thread::spawn(move || {
        remote.free(range).expect("it is ours to free");
        remote
    });
    owner.park();
    let mut remote = other.join().expect("loom ends the model at a panic");
    assert_eq!(space.stats().live_ranges, 0);
    remote.park();
    let all = owner
        .alloc(Request::pages(1024))
        .expect("everything is free");
    owner.free(all).expect("allocated");
    drop(remote);
}

#[test]
fn a_free_in_a_parked_chunk_is_not_lost() {
    explore(|| parks(false));
    explore(|| parks(true));
}

/// A remote core pins a range while its owner collects: afterwards the owner does not free it.
fn pins_while_drained() {
    let space = space(false);
    let mut owner = claim(&space, 0);
    let all: Vec<_> = (0..2).map(|_| owner.alloc(HALF).expect("free")).collect();
    let mut remote = claim(&space, 1);
    remote.free(all[1]).expect("it is ours to free");
    let contested = all[0];
    let other = thread::spawn(move || {
        let pinned = remote.pin(contested).expect("it is ours to pin");
        (remote, pinned)
    });
    collect_all(&owner);
    let (mut remote, pinned) = other.join().expect("loom ends the model at a panic");
    assert!(owner.free(contested).is_err(), "it is pinned");
    remote.free_pinned(pinned);
    drop(remote);
}

#[test]
fn an_owner_that_drains_does_not_miss_a_pin() {
    explore(pins_while_drained);
}

/// An owner that has collected everything looks only for new marks, which remote cores announce.
fn catches_up() {
    let space = space(false);
    let mut owner = claim(&space, 0);
    let given: Vec<_> = (0..2).map(|_| owner.alloc(WORD).expect("free")).collect();
    collect_all(&owner);
    let mut remote = claim(&space, 1);
    let other = thread::spawn(move || {
        for range in given {
            remote.free(range).expect("it is ours to free");
        }
        remote
    });
    let catch_up = |owner: &mut ChunkCore| {
        let zones = &mut *owner.shared.zones_of(CoreId(0)).lock();
        zones.zones[0].earn(8);
        assert!(
            zones.collect(&owner.shared, 0, remote_free::Collect::All),
            "it is paid for"
        );
    };
    catch_up(&mut owner);
    let remote = other.join().expect("loom ends the model at a panic");
    catch_up(&mut owner);
    assert!(nothing_is_marked(&owner.shared), "what came back is found");
    drop(remote);
}

#[test]
fn owner_collects_announced_remote_frees() {
    explore_to(2, catches_up);
}

/// The owner takes what it keeps ready, and gives it back, while another core finds no room and
/// takes what is not used.
fn relieves() {
    let space = space(false);
    let mut owner = claim(&space, 0);
    let mut all: Vec<_> = (0..8).map(|_| owner.alloc(HALF).expect("free")).collect();
    owner.free(all.pop().expect("eight")).expect("allocated");
    let mut other = claim(&space, 1);
    for range in all {
        other.free(range).expect("it is ours to free");
    }
    let thread = thread::spawn(move || {
        let request = HALF.without_drain();
        let got = [(); 2].map(|()| other.alloc(request).expect("a chunk is unused"));
        (other, got)
    });
    let kept = owner.alloc(HALF.without_drain()).expect("it is kept ready");
    owner.free(kept).expect("allocated");
    let (mut other, got) = thread.join().expect("loom ends the model at a panic");
    assert!(got.iter().all(|range| !range.overlaps(kept)));
    assert!(got[0] != got[1], "given out twice");
    for range in got {
        other.free(range).expect("allocated");
    }
    owner.park();
    other.park();
    assert_all_came_back(&space, &mut other);
}

#[test]
fn a_core_without_room_takes_what_another_does_not_use() {
    explore_to(1, relieves);
}

/// An owner that has allocated all of a space, another core that has freed all but one range of it,
/// and that range.
fn all_but_one_freed(space: &ChunkAllocator) -> (Box<ChunkCore>, Box<ChunkCore>, IovaRange) {
    let mut owner = claim(space, 0);
    let all: Vec<_> = (0..8).map(|_| owner.alloc(HALF).expect("free")).collect();
    let mut other = claim(space, 1);
    for range in &all[1..] {
        other.free(*range).expect("it is ours to free");
    }
    (owner, other, all[0])
}

/// Checks that nothing is allocated, and that one core can have all.
fn assert_all_came_back(space: &ChunkAllocator, core: &mut ChunkCore) {
    assert_eq!(space.stats().live_ranges, 0);
    let whole = core.alloc(Request::pages(1024));
    core.free(whole.expect("everything came back"))
        .expect("allocated");
}

/// The owner pins what another core pins and frees, which then finds no room: it does not get what
/// the owner has pinned.
fn pins_what_another_takes() {
    let space = space(false);
    let (mut owner, mut other, contested) = all_but_one_freed(&space);
    let thread = thread::spawn(move || {
        let Ok(pinned) = other.pin(contested) else {
            return (other, None);
        };
        other.free_pinned(pinned);
        // All of it, so that it lies in one chunk or the other.
        let got = other.alloc(Request::pages(1024).without_drain()).ok();
        (other, got)
    });
    let pinned = owner.pin(contested);
    let (mut other, got) = thread.join().expect("loom ends the model at a panic");
    if let Ok(pinned) = pinned {
        assert_eq!(got, None, "the owner has {contested} pinned");
        owner.unpin(pinned);
    }
    owner.park();
    other.park();
    if let Some(range) = got {
        other.free(range).expect("allocated");
    }
    let _ = owner.free(contested);
    owner.park();
    assert_eq!(space.stats().live_ranges, 0);
}

#[test]
fn range_pinned_by_owner_is_not_collected() {
    explore_to(2, pins_what_another_takes);
}

/// The owner frees what another core frees, which then finds no room: it does not get what the
/// owner keeps ready.
fn frees_what_another_takes() {
    let space = space(false);
    let (mut owner, mut other, contested) = all_but_one_freed(&space);
    let thread = thread::spawn(move || {
        let _ = other.free(contested);
        let got = other.alloc(Request::pages(1024).without_drain()).ok();
        (other, got)
    });
    let _ = owner.free(contested);
    let (mut other, got) = thread.join().expect("loom ends the model at a panic");
    if got.is_some() && !owner.local.cache().is_clear() {
        // Not dropped: a handle that parks would panic a second time.
        core::mem::forget((owner, other));
        panic!("{contested} is kept ready, and another core has it");
    }
    if let Some(range) = got {
        other.free(range).expect("allocated");
    }
    other.park();
    owner.park();
    assert_all_came_back(&space, &mut owner);
}

#[test]
fn range_freed_by_owner_and_remote_core_is_in_one_place() {
    explore_to(2, frees_what_another_takes);
}

/// A number that is in a set is found, whatever other cores take meanwhile.
fn takes() {
    let set = Arc::new(bitmap::Bitmap::new(64));
    set.put(0);
    assert!(set.take(0));
    let others = Arc::clone(&set);
    // It finds nothing that low, and must not hide what is higher meanwhile.
    let other = thread::spawn(move || others.take_highest(3));
    set.put(5);
    assert_eq!(set.take_highest(63), Some(5));
    assert_eq!(other.join().expect("loom ends the model at a panic"), None);
}

#[test]
fn a_set_that_is_not_empty_does_not_seem_so() {
    explore(takes);
}
