//! An owner that sleeps: a call that is over wakes it, and so does the age of what is stale.

use std::time::{Duration, Instant};

use guest_mem::GuestRam;
use machine::{Op, Request, Target};
use sidecore::{IdlePolicy, SidecoreBuilder};

use crate::memory::Memory;
use crate::policies::optimistic_for;
use crate::world::{DATA, Options, RW, STATUS, World, tell};
use assign::policy::HostPolicy;

const PATIENCE: Duration = Duration::from_secs(30);

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < PATIENCE, "it does not come: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn an_owner_that_sleeps_is_woken_by_a_call_that_is_over_and_by_the_age_of_what_is_stale() {
    // Its age is the machine's time, which passes by itself here.
    let soon = optimistic_for(8, Duration::from_millis(10));
    for policy in [HostPolicy::Strict, soon] {
        let mut world = World::<GuestRam>::with(Options {
            policy,
            ..Options::default()
        });
        let table = world.boot()[0];
        let (mem, reach) = (world.mem.clone(), world.reach.clone());
        let kernel = world.seats[0].kernel.clone();
        // The guest's stores and descriptors, as far as they can be written before.
        world.set(table, 16, DATA, 1, RW);
        let (wait, tail) = world.prepare(&[tell(1, 16, 1)]);
        let entry = world.entry(table, 16, 1);
        let (wait_gone, tail_gone) = world.prepare(&[tell(1, 16, 1)]);
        let core = SidecoreBuilder::new("sleeper")
            .idle(IdlePolicy::Sleep)
            .spawn(vec![world.owner])
            .expect("a thread");
        let bell = |tail: u64| {
            let op = Op::Write {
                bar: 0,
                offset: vtd::spec::registers::IQT.into(),
                len: 8,
                value: tail,
            };
            let target = Target::Unit(0);
            let access = |reply| Request::Access { target, op, reply };
            assert!(core.handle(0).call(access).is_ok());
        };
        let sleeps = |more: u64| {
            let slept = core.stats().core.sleeps;
            wait_for("it sleeps", || core.stats().core.sleeps >= slept + more);
        };
        kernel.hold();
        bell(tail);
        wait_for("the call", || kernel.held() == 1);
        sleeps(0);
        assert!((mem.get_u64(STATUS) as u32) < wait);
        kernel.release();
        wait_for("the WAIT of the map", || mem.get_u64(STATUS) as u32 >= wait);
        mem.put_u64(entry, 0);
        bell(tail_gone);
        wait_for("the WAIT of the unmap", || {
            mem.get_u64(STATUS) as u32 >= wait_gone
        });
        wait_for("it goes", || kernel.mappings() == 0);
        wait_for("it is in use no more", || reach.pages() == 0);
        core.stop();
    }
}
