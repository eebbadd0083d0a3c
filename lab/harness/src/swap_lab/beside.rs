//! What is measured beside the experiment: exits, and that no byte is wrong.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::demo::PerRead;
use crate::system::guest::Mode;
use crate::system::host::Host;
use crate::system::squeezed::{self, Verify};

/// Reads of 4 KiB in a window.
const READS: u32 = 400;

/// Exits per page that is read to the same place, looked at there and changed, in the states of a pager.
pub struct Exits {
    /// Without a pager, as such a guest has it: KVM's own ways to save exits among them that store to guest memory.
    pub free: PerRead,
    /// Without a pager, and without those.
    pub plain: PerRead,
    /// With one, and plenty of memory.
    pub disarmed: PerRead,
    /// With memory short, so that disks report.
    pub armed: PerRead,
}

impl Exits {
    /// Four guests.
    pub fn count(host: &Host) -> Result<Self> {
        let limited = |mib| reads(host, Pager::Limited(mib));
        Ok(Self {
            free: reads(host, Pager::None)?,
            plain: reads(host, Pager::Pretended)?,
            // Less than all, or nobody looks how much there is.
            disarmed: limited(250)?,
            armed: limited(55)?,
        })
    }
}

/// Whether a guest has a pager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pager {
    None,
    /// It has none, and is offered what one that has is.
    Pretended,
    /// With so many MiB in memory.
    Limited(u64),
}

fn reads(host: &Host, pager: Pager) -> Result<PerRead> {
    let script = format!("workload reads /dev/vda --count {READS} --warmup 100 --in-place");
    let mut guest = squeezed::guest(host, Mode::None, &script, "path=/dev/vda,size=256M");
    match pager {
        Pager::None => guest.flags.clear(),
        Pager::Pretended => guest.flags = vec!["--as-resident".into()],
        Pager::Limited(_) => {}
    }
    guest.disks.push("path=/dev/vdb,direct=on".into());
    guest.limit = Duration::from_secs(300);
    let outcome = match pager {
        Pager::Limited(limit) => squeezed::squeezed(host, &guest, limit)?.wait()?,
        Pager::None | Pager::Pretended => {
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
