//! Measurements beside the experiment: exits, and verified content.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::demo::PerIo;
use crate::system::guest::Mode;
use crate::system::host::Host;
use crate::system::squeezed::{self, Verify};

/// Reads of 4 KiB in a window.
const READS: u32 = 400;

/// Exits per page that is read to the same place, checked there and changed, in the states of a
/// pager.
pub struct Exits {
    /// Without a pager, as such a guest is by default: with KVM's own features that save exits by
    /// stores to guest memory.
    pub free: PerIo,
    /// Without a pager, and without those features.
    pub plain: PerIo,
    /// With a pager, and plenty of memory.
    pub disarmed: PerIo,
    /// With most of its memory used, so that disks report, and no page evicted yet: the cost of
    /// page-outs and page-ins is not included.
    pub armed: PerIo,
}

impl Exits {
    /// Runs four guests, one for each state.
    pub fn count(host: &Host) -> Result<Self> {
        Ok(Self {
            free: reads(host, Pager::None)?,
            plain: reads(host, Pager::Pretended)?,
            disarmed: reads(host, Pager::Disarmed)?,
            armed: reads(host, Pager::Armed)?,
        })
    }
}

/// State of a guest's pager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pager {
    None,
    /// No pager, but only the features that a guest with a pager is offered.
    Pretended,
    /// A pager that has seen little memory used.
    Disarmed,
    /// A pager that has seen most of it used.
    Armed,
}

/// MiB that may be resident: less than the whole memory, or the pager would ignore its watermark.
const MOST: u64 = 250;
/// MiB that a guest uses so that more than three quarters of those are resident, and not all.
const USED: u64 = 150;

fn reads(host: &Host, pager: Pager) -> Result<PerIo> {
    let script = format!("workload reads /dev/vda --count {READS} --warmup 100 --in-place");
    let script = match pager {
        Pager::Armed => format!("workload age --mib {USED} && {script}"),
        Pager::None | Pager::Pretended | Pager::Disarmed => script,
    };
    let mut guest = squeezed::guest(host, Mode::None, &script, "path=/dev/vda,size=256M");
    match pager {
        Pager::None => guest.flags.clear(),
        Pager::Pretended => {
            guest.flags.clear();
            guest.faults = vec!["memory:as-resident".into()];
        }
        Pager::Disarmed | Pager::Armed => {}
    }
    guest.disks.push("path=/dev/vdb,direct=on".into());
    guest.limit = Duration::from_secs(300);
    let outcome = match pager {
        Pager::Disarmed | Pager::Armed => squeezed::squeezed(host, &guest, MOST)?.wait()?,
        Pager::None | Pager::Pretended => {
            let mut running = squeezed::start(host, &guest)?;
            squeezed::go_on(&mut running)?;
            running.wait()?
        }
    };
    outcome.check()?;
    let window = outcome.windows().first().context("no window")?;
    Ok(PerIo::of(window, READS))
}

/// Runs a minute of verified pages. Returns the number of operations.
pub fn verify(host: &Host) -> Result<u64> {
    Ok(Verify::new(Mode::None, 2, 60).run(host)?.operations)
}
