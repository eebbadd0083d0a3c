//! Measurement with two cores: the reaction to a guest's store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use guest_mem::{Gpa, PhysMem, RegPage, RegisterPage};
use report::Measured;
use vtd::front::Shared;
use vtd::spec::registers::IQT;

use crate::guest::{Guest, Quiet, STATUS};
use crate::measure;

/// Round trips of one run.
const TRIPS: u32 = 20_000;
const RUNS: usize = 15;

/// Measures the round trip between a sidecore thread, which sweeps the page, and this thread, which
/// acts as the vCPU: it queues a wait, stores IQT, and spins on the status word.
pub fn reaction() -> Result<Measured> {
    let mut guest = Guest::new()?;
    let mut unit = guest.unit();
    let page = RegisterPage::new().context("register page")?;
    let (ram, sweeping, stop) = (guest.ram.clone(), page.clone(), AtomicBool::new(false));
    let mut runs = Vec::new();
    thread::scope(|scope| {
        let stop = &stop;
        let mut shared = Shared::enter(&mut unit, &page);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                shared.sweep(&mut unit, &sweeping, &ram, 0, &mut Quiet);
            }
        });
        let mut value = 0;
        for run in 0..=RUNS {
            let start = Instant::now();
            for _ in 0..TRIPS {
                value += 1;
                let tail = guest.wait(value);
                page.store32(IQT, tail as u32);
                while guest.ram.read_u64(Gpa::new(STATUS)) != Ok(u64::from(value)) {
                    std::hint::spin_loop();
                }
            }
            // The first run warms up.
            if run > 0 {
                runs.push(start.elapsed().as_nanos() as f64 / f64::from(TRIPS));
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    Ok(measure::of(runs))
}
