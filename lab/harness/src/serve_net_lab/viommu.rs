//! A network device of `exitless serve` behind a guest's own IOMMU, strict: every buffer is a new
//! translation, and no frame may be lost because of that.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::network::Link;
use crate::system::daemon::DaemonPlan;
use crate::system::guest::{Guest, Mode};
use crate::system::host::Host;

/// Result of the pings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pinged {
    /// Echo requests without an answer.
    pub lost: u32,
    /// Misses of the daemon's device TLB for each frame.
    pub misses_per_frame: f64,
    /// Invalidations that it received, for each frame.
    pub invalidations_per_frame: f64,
}

/// Pings the host `pings` times from a guest whose registers are of this mode. Its TAP interface is
/// that of guest 0's first card.
///
/// # Errors
/// The guest or the daemon failed.
pub fn ping(host: &Host, mode: Mode, pings: u32) -> Result<Pinged> {
    let link = Link { guest: 0, card: 0 };
    link.make(host)?;
    let limit = Duration::from_secs(300 + u64::from(pings));
    let plan = DaemonPlan {
        disks: Vec::new(),
        nets: vec![format!("tap={}", link.tap())],
        // If all cores polled, they would keep each other waiting: the lab has two processors, and
        // a strict guest spins too.
        idle: "sleep",
        limit,
    };
    let daemon = plan.start(host)?;
    let ip = link.host_ip();
    // It sends the next request as soon as it has an answer.
    let script = format!("{} && ping -q -A -W 20 -c {pings} {ip}", link.up());
    let mut guest = Guest::new(mode, script);
    guest.idle = "sleep";
    guest.limit = limit;
    guest.name = "-net".into();
    let socket = host.path(&DaemonPlan::net_socket(0));
    guest.nets.push(format!("socket={socket}"));
    let outcome = guest.try_run(host);
    let (stats, said) = daemon.end()?;
    let outcome = outcome.with_context(|| format!("the daemon said: {said}"))?;
    let lost = lost(&outcome.console, pings);
    let lost = lost.with_context(|| format!("the daemon said: {said}\n{}", outcome.tail()))?;
    let device = &stats["devices"]["net0"];
    let number = |key: &str| device[key].as_f64().unwrap_or(f64::NAN);
    let frames = number("requests");
    ensure!(frames >= f64::from(pings), "{frames} frames: {device}");
    Ok(Pinged {
        lost,
        misses_per_frame: number("misses") / frames,
        invalidations_per_frame: number("iotlb_invalidations") / frames,
    })
}

/// Returns the echo requests without an answer, by busybox's summary.
fn lost(console: &str, pings: u32) -> Result<u32> {
    let line = console
        .lines()
        .find(|line| line.contains("packets transmitted"));
    let line = line.context("no summary of pings")?;
    let numbers: Vec<u32> = line
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    match *numbers {
        [sent, received] if sent == pings && received <= sent => Ok(sent - received),
        _ => anyhow::bail!("{line:?} is no summary of {pings} pings"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_pings_are_read_from_their_summary() {
        let said = |line: &str| lost(&format!("x\n{line}\r\n"), 1000);
        let all = "1000 packets transmitted, 1000 packets received, 0% packet loss";
        assert_eq!(said(all).unwrap(), 0);
        let some = "1000 packets transmitted, 993 packets received, 0% packet loss";
        assert_eq!(said(some).unwrap(), 7);
        for broken in [
            "10 packets transmitted, 10 packets received, 0% packet loss",
            "1000 packets transmitted, 5 duplicates, 995 packets received",
            "ping: bad address",
        ] {
            assert!(said(broken).is_err(), "{broken}");
        }
    }
}
