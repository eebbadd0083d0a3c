//! No wake-up is lost between a core and a guest that always sleep. Nothing runs beside: on a
//! machine of few processors other tests would take the time that the sleeps need.
//! `EXPORT_FORCED_SLEEPS` is how many there are to be (20,000).

use std::time::Duration;

use crate::common::{Disk, Server, feature, options, reads};
use sidecore::IdlePolicy;
use vhost_blk::Options;
use vhost_blk::drive::drive;
use vhost_blk::load::Pacing;

/// Sleeps of the core in the test below, in all.
fn forced_sleeps() -> u64 {
    let wanted = std::env::var("EXPORT_FORCED_SLEEPS").ok();
    wanted.map_or(20_000, |count| count.parse().expect("a number"))
}

/// The guest sleeps for each request, the core after each: nearly every kick has to wake the core,
/// and nearly every call the guest.
#[test]
fn no_wake_up_is_lost_by_a_core_and_a_guest_that_always_sleep() {
    let _turn = crate::alone();
    let styles = [
        0,
        feature::EVENT_IDX,
        feature::PACKED,
        feature::PACKED | feature::EVENT_IDX,
    ];
    for features in styles {
        let mut server = Server::start(IdlePolicy::Sleep, vec![Disk::null("null")]);
        let options = Options {
            block: 512,
            ..options(features, 1, 1)
        };
        let mut run = reads(server.path(0), options, Duration::from_millis(500));
        while server.core().stats().core.sleeps < forced_sleeps() / 4 {
            let report = drive(&run).expect("the run works");
            // A guest that asks again as soon as it is answered often finds the core still on its
            // way into sleep, which is the harder case; one that asks a while later always finds it
            // asleep.
            run.vms[0].pacing = match run.vms[0].pacing {
                Pacing::Closed => Pacing::Poisson(10_000.0),
                _ => Pacing::Closed,
            };
            assert_eq!(report.lost_wakeups, 0, "{features:#x}");
            assert_eq!(report.unanswered, 0, "{features:#x}");
            assert_eq!(report.errors.total(), 0, "{features:#x}");
        }
        server.stop();
    }
}
