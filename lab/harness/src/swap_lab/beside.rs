//! What is measured beside the experiment: exits, and that no byte is wrong.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::demo::PerRead;
use crate::system::guest::Mode;
use crate::system::host::Host;
use crate::system::squeezed::{self, Verify};

/// Reads of 4 KiB in a window.
const READS: u32 = 400;

/// Exits per page that is read, in the states of a pager.
pub struct Exits {
    /// Without a pager.
    pub plain: PerRead,
    /// With one, and plenty of memory.
    pub disarmed: PerRead,
    /// With memory short, so that disks report.
    pub armed: PerRead,
}

impl Exits {
    /// Three guests.
    pub fn count(host: &Host) -> Result<Self> {
        let reads = |limit| reads(host, limit);
        Ok(Self {
            plain: reads(None)?,
            // Less than all, or nobody looks how much there is.
            disarmed: reads(Some(250))?,
            armed: reads(Some(55))?,
        })
    }
}

fn reads(host: &Host, limit: Option<u64>) -> Result<PerRead> {
    let script = format!("workload reads /dev/vda --count {READS} --warmup 100");
    let mut guest = squeezed::guest(host, Mode::None, &script, "path=/dev/vda,size=256M");
    if limit.is_none() {
        guest.flags.clear();
    }
    guest.disks.push("path=/dev/vdb,direct=on".into());
    guest.limit = Duration::from_secs(300);
    let outcome = match limit {
        Some(limit) => squeezed::squeezed(host, &guest, limit)?.wait()?,
        None => {
            let mut running = squeezed::start(host, &guest)?;
            squeezed::go_on(&mut running)?;
            running.wait()?
        }
    };
    outcome.check()?;
    let window = outcome.windows().first().context("no window")?;
    Ok(PerRead::of(window, READS))
}

/// A minute of verified pages: how many operations.
pub fn verify(host: &Host) -> Result<u64> {
    Ok(Verify::new(Mode::None, 2, 60).run(host)?.operations)
}
