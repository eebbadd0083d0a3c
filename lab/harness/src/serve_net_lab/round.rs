//! One round: a number of guests on one daemon, whose idle policy changes while they run, and then
//! on the kernel's vhost-net.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::network::{self, Link};
use super::plan::{Amount, Mover, Work};
use crate::system::daemon::{Daemon, DaemonPlan, Totals};
use crate::system::guest::{Guest, Mode};
use crate::system::host::Host;
use crate::system::steps::{SCRIPT, Steps};

/// A window of one guest.
#[derive(Clone, Debug)]
pub struct Window {
    /// Mover of its frames.
    pub mover: Mover,
    /// Its work.
    pub work: Work,
    /// Counts of its kernel for its interface, by name.
    pub nic: BTreeMap<String, u64>,
    /// The ledger's window.
    pub ledger: Value,
}

impl Window {
    /// Returns the frames in both directions, as the guest's driver hands them over.
    pub fn frames(&self) -> f64 {
        self.nic("frames_out") + self.nic("frames_in")
    }

    /// Returns a count of the interface.
    pub fn nic(&self, key: &str) -> f64 {
        self.nic.get(key).map_or(f64::NAN, |count| *count as f64)
    }

    /// Returns the exits of a cause, or `total`.
    pub fn exits(&self, cause: &str) -> f64 {
        self.ledger["exits"][cause].as_f64().unwrap_or(f64::NAN)
    }
}

/// Frames for each MiB of a bulk transfer, counted at the TAP interface.
#[derive(Clone, Copy, Debug)]
pub struct Bulk {
    /// From the guest.
    pub from_guest: f64,
    /// To the guest.
    pub to_guest: f64,
}

/// Result of a round.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// Number of guests.
    pub guests: u32,
    /// Their windows.
    pub windows: Vec<Window>,
    /// The daemon's counts, by policy.
    pub served: Vec<(Mover, Totals)>,
    /// Frames of a bulk transfer of one guest alone.
    pub bulk: Option<Bulk>,
}

/// Plan of a round.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of guests.
    pub guests: u32,
    /// Amounts of each guest's work.
    pub amount: Amount,
    /// Movers of their frames, one after the other; the first is a daemon.
    pub movers: Vec<Mover>,
    /// Their works.
    pub works: Vec<Work>,
    /// Whether a bulk transfer's frames are counted, while the daemon polls.
    pub has_bulk: bool,
}

impl Plan {
    fn daemon(&self, mover: Mover) -> Result<DaemonPlan> {
        let net = |guest| format!("tap={}", Link { guest, card: 0 }.tap());
        Ok(DaemonPlan {
            disks: Vec::new(),
            nets: (0..self.guests).map(net).collect(),
            idle: mover.idle().context("vhost-net has no daemon")?,
            limit: self.limit(),
        })
    }

    fn limit(&self) -> Duration {
        Duration::from_secs(900 + 300 * u64::from(self.guests))
    }

    fn guest(&self, host: &Host, number: u32) -> Guest {
        let mut guest = Guest::new(Mode::None, SCRIPT);
        guest.name = format!("-{number}");
        // Its own sidecore has nothing to poll.
        guest.idle = "sleep";
        guest.limit = self.limit();
        if matches!(host, Host::Lab(_)) {
            guest.pin = Some("0,1".into());
        }
        let socket = host.path(&DaemonPlan::net_socket(number as usize));
        let mac = |card: u32| format!("52:54:00:65:{card:02x}:{number:02x}");
        guest.nets.push(format!("socket={socket},mac={}", mac(0)));
        if self.movers.contains(&Mover::Vhost) {
            let link = Link {
                guest: number,
                card: Mover::Vhost.card(),
            };
            let tap = link.tap();
            guest
                .nets
                .push(format!("tap={tap},vhost=on,mac={}", mac(1)));
        }
        guest
    }

    fn links(&self, card: u32) -> impl Iterator<Item = Link> + use<> {
        (0..self.guests).map(move |guest| Link { guest, card })
    }
}

/// Runs the round; `say` receives messages on its progress.
///
/// # Errors
/// A guest or the daemon failed; data came back wrong, or were lost; windows or their counts
/// are missing.
pub fn run(host: &Host, plan: &Plan, say: &dyn Fn(&str)) -> Result<Round> {
    let mut cards: Vec<u32> = plan.movers.iter().map(|mover| mover.card()).collect();
    cards.sort_unstable();
    cards.dedup();
    for link in cards.iter().flat_map(|card| plan.links(*card)) {
        link.make(host)?;
    }
    network::start_peer(host)?;
    let first = *plan.movers.first().context("nobody moves frames")?;
    let mut server = Some((first, plan.daemon(first)?.start(host)?));
    let mut guests = Vec::new();
    let result = with_guests(host, plan, &cards, &mut guests, &mut server, say);
    // Guests that are still running would connect to the next daemon.
    for mut guest in guests {
        guest.guest().signal(libc::SIGKILL)?;
        guest.wait()?;
    }
    let mut left = String::new();
    if let Some((mover, daemon)) = server {
        let (stats, said) = daemon.end()?;
        left = format!("{}: {said}counted: {stats}", mover.name());
    }
    let complaints = network::complaints(host)?;
    let round = result.with_context(|| format!("the daemon, {left}; the peer: {complaints}"))?;
    ensure!(complaints.is_empty(), "the peer: {complaints}");
    Ok(round)
}

type Server<'a> = Option<(Mover, Daemon<'a>)>;

/// Counts of an interface in one window.
type Counted = (Mover, Work, BTreeMap<String, u64>);

fn with_guests<'a>(
    host: &'a Host,
    plan: &Plan,
    cards: &[u32],
    guests: &mut Vec<Steps<'a>>,
    server: &mut Server<'a>,
    say: &dyn Fn(&str),
) -> Result<Round> {
    let mut round = Round {
        guests: plan.guests,
        ..Round::default()
    };
    for number in 0..plan.guests {
        let began = Instant::now();
        let mut guest = Steps::begin(host, &plan.guest(host, number))?;
        for card in cards {
            let link = Link {
                guest: number,
                card: *card,
            };
            guest.run(&link.up())?;
        }
        let seconds = began.elapsed().as_secs();
        say(&format!(
            "guest {} of {}: {seconds} s",
            number + 1,
            plan.guests
        ));
        guests.push(guest);
    }
    // Counts of each guest's steps, in their order, which is that of its ledger's windows.
    let mut counted: Vec<Vec<Counted>> = vec![Vec::new(); guests.len()];
    for mover in &plan.movers {
        let served = change(host, plan, server, *mover)?;
        round.served.extend(served);
        let links: Vec<Link> = plan.links(mover.card()).collect();
        side_by_side(guests, &links, |link| link.settle())
            .with_context(|| format!("{}: waiting for an answer", mover.name()))?;
        for work in &plan.works {
            let began = Instant::now();
            let said = side_by_side(guests, &links, |link| {
                work.step(&plan.amount, &link.peer(), link.card)
            });
            let said = match said {
                Ok(said) => said,
                Err(error) => {
                    let seen = look(&mut guests[0], links[0]);
                    let what = format!("{}, {}; then {seen}", mover.name(), work.name());
                    return Err(error.context(what));
                }
            };
            for (counted, said) in counted.iter_mut().zip(&said) {
                let windows = nic_windows(said)?;
                ensure!(
                    windows.len() == plan.amount.windows as usize,
                    "{} windows of {}: {said}",
                    windows.len(),
                    plan.amount.windows
                );
                counted.extend(windows.into_iter().map(|nic| (*mover, *work, nic)));
            }
            let seconds = began.elapsed().as_secs();
            say(&format!("{}, {}: {seconds} s", mover.name(), work.name()));
        }
        if plan.has_bulk && *mover == Mover::Poll {
            round.bulk = Some(bulk(host, &mut guests[0], links[0])?);
        }
    }
    for (guest, counted) in std::mem::take(guests).into_iter().zip(counted) {
        let outcome = guest.end()?;
        outcome.check()?;
        let windows = outcome.windows();
        ensure!(
            windows.len() == counted.len(),
            "{} windows of {} in the ledger",
            windows.len(),
            counted.len()
        );
        for ((mover, work, nic), ledger) in counted.into_iter().zip(windows) {
            ensure!(
                ledger["histograms"].as_bool() == Some(true),
                "no exit histograms: tracefs is not available to `exitless run` on this host"
            );
            let ledger = ledger.clone();
            round.windows.push(Window {
                mover,
                work,
                nic,
                ledger,
            });
        }
    }
    // The caller ends the last daemon if a guest failed; here its counts are needed.
    if let Some((mover, daemon)) = server.take() {
        let (stats, _) = daemon.end()?;
        round.served.push((mover, Totals::of(&stats)));
    }
    Ok(round)
}

/// Makes `mover` move frames from now on. Returns the counts of the daemon that it replaces. While
/// vhost-net moves frames, the daemon stays, idle.
fn change<'a>(
    host: &'a Host,
    plan: &Plan,
    server: &mut Server<'a>,
    mover: Mover,
) -> Result<Option<(Mover, Totals)>> {
    let is_there = server.as_ref().is_some_and(|(is, _)| *is == mover);
    if is_there || mover == Mover::Vhost {
        return Ok(None);
    }
    let before = match server.take() {
        Some((before, daemon)) => {
            let (stats, _) = daemon.end()?;
            Some((before, Totals::of(&stats)))
        }
        None => None,
    };
    *server = Some((mover, plan.daemon(mover)?.start(host)?));
    Ok(before)
}

/// Executes a step of every guest at once. Returns the output of each.
fn side_by_side(
    guests: &mut [Steps<'_>],
    links: &[Link],
    step: impl Fn(Link) -> String,
) -> Result<Vec<String>> {
    for (guest, link) in guests.iter_mut().zip(links) {
        guest.start(&step(*link))?;
    }
    let finished = guests.iter_mut().enumerate();
    finished
        .map(|(number, guest)| guest.finish().with_context(|| format!("guest {number}")))
        .collect()
}

/// Returns the state of a guest's network after a step that failed, while others may still be in
/// theirs: it often shows the reason.
fn look(guest: &mut Steps<'_>, link: Link) -> String {
    let (card, ip) = (link.card, link.host_ip());
    let script = format!(
        "grep virtio /proc/interrupts; grep . /sys/class/net/eth{card}/statistics/*_packets; grep \
         Udp: /proc/net/snmp; \
         ping -c 3 -W 5 {ip}; grep virtio /proc/interrupts; true"
    );
    match guest.run(&script) {
        Ok(seen) => seen,
        Err(error) => format!("it took no further step: {error:#}"),
    }
}

/// Parses the counts of each window that a step has printed.
fn nic_windows(said: &str) -> Result<Vec<BTreeMap<String, u64>>> {
    let lines = said
        .lines()
        .filter_map(|line| line.trim().strip_prefix("nic window="));
    let window = |line: &str| {
        let words = line.split_whitespace().skip(1);
        let pair = |word: &str| {
            let (key, value) = word.split_once('=')?;
            Some((key.to_owned(), value.parse().ok()?))
        };
        let window = words.map(pair).collect::<Option<BTreeMap<_, _>>>();
        match window {
            Some(window) if !window.is_empty() => Ok(window),
            _ => bail!("{line:?} has no counts"),
        }
    };
    lines.map(window).collect()
}

/// Pieces of a bulk transfer, 64 KiB each.
const BULK_PIECES: u32 = 128;

/// Moves [`BULK_PIECES`] in each direction, as large writes, and counts frames at the TAP
/// interface.
fn bulk(host: &Host, guest: &mut Steps<'_>, link: Link) -> Result<Bulk> {
    let mut per_mib = |direction: &str| -> Result<[f64; 2]> {
        let before = link.frames(host)?;
        let (warmup, count) = (1, BULK_PIECES - 1);
        guest.run(&format!(
            "workload tcp-stream {} --bytes 65536 --count {count} --warmup {warmup} --wait-ms \
             60000 --no-markers {direction}",
            link.peer()
        ))?;
        let after = link.frames(host)?;
        let mib = f64::from(BULK_PIECES) / 16.0;
        let of = |after: u64, before: u64| (after - before) as f64 / mib;
        Ok([
            of(after.from_guest, before.from_guest),
            of(after.to_guest, before.to_guest),
        ])
    };
    let [from_guest, _] = per_mib("").context("a bulk transfer to the host")?;
    let [_, to_guest] = per_mib("--receive").context("a bulk transfer to the guest")?;
    Ok(Bulk {
        from_guest,
        to_guest,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counts_of_windows_are_read_from_what_a_guest_says() {
        let said = "x\nnic window=1 frames_out=3 frames_in=4 interrupts=2\n\
                    nic window=2 frames_out=5 frames_in=6 interrupts=1\ntcp-stream ok bytes=9\n";
        let windows = nic_windows(said).unwrap();
        assert_eq!(windows.len(), 2);
        assert_eq!((windows[0]["frames_out"], windows[1]["interrupts"]), (3, 1));
        for broken in ["nic window=1\n", "nic window=1 frames_out=x\n"] {
            assert!(nic_windows(broken).is_err(), "{broken}");
        }
        let window = Window {
            mover: Mover::Poll,
            work: Work::Rr,
            nic: windows[0].clone(),
            ledger: json!({ "exits": { "doorbell": 5 } }),
        };
        assert_eq!((window.frames(), window.exits("doorbell")), (7.0, 5.0));
        assert!(window.exits("total").is_nan() && window.nic("bytes").is_nan());
    }
}
