//! Cases of network devices that another process serves.

use anyhow::{Result, ensure};

use super::case::Case;
use crate::serve_net_lab::{self, Amount, Mover, Plan, Round, Work};
use crate::system::guest::Mode;
use crate::system::host::Host;

/// Returns the cases of `make test`.
pub fn quick() -> Vec<Case> {
    vec![doorbells()]
}

/// Returns the additional cases of `make soak`.
pub fn soak() -> Vec<Case> {
    Mode::VTD.map(|mode| pings(mode, 1000)).into()
}

/// Largest number of doorbell exits of a frame when the daemon polls.
const POLLED: f64 = 0.01;
/// Smallest number of doorbell exits of a frame when the daemon sleeps: with fewer they were not
/// counted.
const NOTIFIED: f64 = 0.1;

/// Case in which the guest rings for a daemon that sleeps, and not for one that polls.
fn doorbells() -> Case {
    Case::new(
        "TCP and UDP of a network device served by another process over TAP: no doorbell exits \
         when it polls: none, 1 vCPU",
        |host| {
            if matches!(host, Host::Native(_)) {
                return Ok("skipped: making a TAP interface takes privileges on this host".into());
            }
            let plan = Plan {
                guests: 1,
                amount: Amount {
                    writes: 2048,
                    datagrams: 60,
                    windows: 1,
                },
                movers: vec![Mover::Notify, Mover::Poll],
                works: vec![Work::Stream, Work::Rr],
                has_bulk: false,
            };
            let round = serve_net_lab::run(host, &plan, &|_| {})?;
            let mut seen = Vec::new();
            for (mover, work) in [
                (Mover::Notify, Work::Rr),
                (Mover::Poll, Work::Stream),
                (Mover::Poll, Work::Rr),
            ] {
                let found = doorbells_of(&round, mover, work)?;
                let is_right = match mover {
                    Mover::Notify => found >= NOTIFIED,
                    _ => found <= POLLED,
                };
                let (mover, work) = (mover.name(), work.name());
                ensure!(is_right, "{mover}, {work}: {found} doorbells of a frame");
                seen.push(format!("{mover}, {work}: {found:.3}"));
            }
            Ok(format!("doorbells of a frame: {}", seen.join("; ")))
        },
    )
}

fn doorbells_of(round: &Round, mover: Mover, work: Work) -> Result<f64> {
    let windows = round.windows.iter();
    let windows = windows.filter(|window| (window.mover, window.work) == (mover, work));
    let (doorbells, frames) = windows.fold((0.0, 0.0), |(doorbells, frames), window| {
        (
            doorbells + window.exits("doorbell"),
            frames + window.frames(),
        )
    });
    // A datagram and its answer are two frames.
    ensure!(frames >= 2.0, "no frames in the window");
    ensure!(doorbells.is_finite(), "no count of doorbells in the ledger");
    Ok(doorbells / frames)
}

/// Case behind the guest's own IOMMU, strict: every buffer is a new translation, and no frame may
/// be lost because of that.
fn pings(mode: Mode, pings: u32) -> Case {
    Case::new(
        format!(
            "{pings} pings over a network device served by another process, none lost: {}, 1 vCPU, \
             strict",
            mode.name()
        ),
        move |host| {
            if matches!(host, Host::Native(_)) {
                return Ok("skipped: making a TAP interface takes privileges on this host".into());
            }
            let pinged = serve_net_lab::ping(host, mode, pings)?;
            ensure!(pinged.lost == 0, "{pinged:?}");
            ensure!(
                pinged.misses_per_frame > 0.0,
                "nothing was translated: {pinged:?}"
            );
            Ok(format!(
                "{:.2} misses and {:.2} invalidations of a frame",
                pinged.misses_per_frame, pinged.invalidations_per_frame
            ))
        },
    )
}
