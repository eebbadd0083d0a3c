//! Random episodes of faulty storage: whole guests, or daemons with a guest, on device-mapper
//! devices that hold, delay or fail requests, or on a file system that is full, while the guest
//! clears Bus Master, resets its disk or powers off, and the process is stopped, terminated once or
//! twice, or killed.
//!
//! * `plan`: a boot and its episodes, drawn from a seed.
//! * `disk`: the storage and the image on it.
//! * `boot`: executes the episodes, and judges the result.
//!
//! A boot passes if the disk has every acknowledged write afterwards, once and in order, and for
//! each write that was under way the old or the new content ([`workload::acked`]); if no request
//! failed that the storage did not fail; and if every requested end came within [`boot::BOUND`] of
//! the moment at which the storage permitted it. Where the kernel holds the I/O there is no other
//! bound.
//!
//! Left out: power cuts of the host, after which only flushed data must be there; a guest with a
//! driver for the power button (`power`); a guest paused since its swap store failed (`exitless`'s
//! own tests); FUSE (likewise).

mod boot;
mod disk;
mod plan;

pub use plan::{Plan, plans, tally};

use super::case::Case;

/// A case for each boot.
pub fn cases(plans: &[Plan]) -> Vec<Case> {
    let case = |plan: &Plan| {
        let (name, plan) = (format!("episodes of {plan}"), plan.clone());
        Case::new(name, move |host| boot::run(&plan, host))
    };
    plans.iter().map(case).collect()
}
