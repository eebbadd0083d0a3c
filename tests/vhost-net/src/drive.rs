//! Loads on ports, from one thread, and their reports.
//!
//! ```text
//! Driver::connect ─▶ measure ─▶ measure … (windows)      a window: warm-up │ measured │ drained
//! ```
//! A window begins and ends with no frame under way: at its end the ports stop sending, and wait
//! for what is under way, as long as [`Patience`] says. So a server may stand still between
//! windows, and servers may take turns. Rates are of the measured time; lost, late, duplicate and
//! forged frames of the whole window.

use std::io;
use std::time::Duration;

use report::clock::Clock;

use crate::account::{Account, Counts};
use crate::client::{Client, ClientError};
use crate::frame::{self, MIN_FRAME};
use crate::hist::Histogram;
use crate::process;
use crate::queue::BURST;
use crate::ring::RingError;
use crate::tally::{Sender, Sums};

pub use crate::load::{Content, Expected, Load, PortSpec};
pub use crate::outcome::{PortReport, Report, Wrong};

/// Visits of all ports between two looks for that, and for servers that are gone.
const ROUNDS_PER_CHECK: u32 = 1 << 12;
/// Windows of at most so many frames have their latencies taken.
const LATENCY_WINDOW: u64 = 8;

/// Time to wait for frames that may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// A queue of whose frames none arrives for so long gives those under way up.
    pub silence: Duration,
    /// At a window's end, for all that is under way.
    pub drain: Duration,
}

impl Default for Patience {
    /// For a server that has a CPU of its own.
    fn default() -> Self {
        Self {
            silence: Duration::from_millis(5),
            drain: Duration::from_millis(50),
        }
    }
}

/// Reason why nothing is measured.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DriveError {
    #[error("{socket}")]
    Client {
        socket: String,
        #[source]
        source: ClientError,
    },
    #[error("{socket}: pair {pair}")]
    Ring {
        socket: String,
        pair: usize,
        #[source]
        source: RingError,
    },
    #[error("{socket}: the server closed the connection")]
    HungUp { socket: String },
    #[error(transparent)]
    Host(#[from] io::Error),
}

#[derive(Debug)]
struct Port {
    client: Client,
    load: Load,
    arrives: bool,
    expected: Expected,
    is_stamped: bool,
    /// Account of its first pair.
    first_account: usize,
    sums: Sums,
    latency: Histogram,
    /// Frame that the server makes.
    made: Vec<u8>,
    /// Time at which the next frame is due, of a load with a rate.
    due: u64,
    /// Time of its last visit, and the times between visits, of a port whose latencies are taken.
    looked_at: u64,
    looks: Histogram,
}

impl Port {
    /// Whether the time of each frame under way is taken.
    fn takes_latency(&self) -> bool {
        match self.load {
            Load::Window(window) => window <= LATENCY_WINDOW,
            Load::Rate(_) => true,
            Load::Silent | Load::Flood => false,
        }
    }
}

/// Ports under load.
#[derive(Debug)]
pub struct Driver {
    ports: Vec<Port>,
    senders: Vec<Sender>,
    clock: Clock,
    scratch: Vec<u8>,
    patience: Patience,
    burst: usize,
}

impl Driver {
    /// Connects all ports.
    ///
    /// # Errors
    /// A server is not there, or refuses.
    pub fn connect(specs: &[PortSpec]) -> Result<Self, DriveError> {
        let mut driver = Self {
            ports: Vec::new(),
            senders: Vec::new(),
            clock: Clock::new(),
            scratch: Vec::new(),
            patience: Patience::default(),
            burst: BURST,
        };
        for spec in specs {
            driver.add(spec)?;
        }
        Ok(driver)
    }

    fn add(&mut self, spec: &PortSpec) -> Result<(), DriveError> {
        let mut options = spec.options.clone();
        let frame_len = match &spec.content {
            Content::Stamped(len) => *len,
            Content::Fixed { frame, .. } => frame.len() as u32,
        };
        options.max_frame = options.max_frame.max(frame_len);
        let client = Client::connect(&spec.socket, &options);
        let mut client = client.map_err(|source| DriveError::Client {
            socket: spec.socket.display().to_string(),
            source,
        })?;
        let first_account = self.senders.len();
        let (memory, layout) = (&client.memory, &client.layout);
        for (number, pair) in (first_account as u16..).zip(&mut client.pairs) {
            match &spec.content {
                Content::Stamped(_) => {
                    assert!(frame_len >= MIN_FRAME, "a stamp has its room");
                    let addresses = spec.addresses;
                    pair.transmit
                        .prepare(memory, layout, frame_len, addresses, number);
                }
                Content::Fixed { header, frame } => {
                    pair.transmit.prepare_fixed(memory, layout, header, frame);
                }
            }
            self.senders.push(Sender {
                account: Account::default(),
                frame_len,
                progress: (0, 0),
            });
        }
        self.ports.push(Port {
            client,
            load: spec.load,
            arrives: spec.arrives,
            expected: spec.expected,
            is_stamped: matches!(spec.content, Content::Stamped(_)),
            first_account,
            sums: Sums::default(),
            latency: Histogram::default(),
            made: Vec::new(),
            due: 0,
            looked_at: 0,
            looks: Histogram::default(),
        });
        Ok(())
    }

    /// Gives a port another load, from the next window on.
    pub fn set_load(&mut self, port: usize, load: Load) {
        self.ports[port].load = load;
    }

    /// Waits so long for frames that may be lost.
    pub const fn set_patience(&mut self, patience: Patience) {
        self.patience = patience;
    }

    /// Takes and sends at most so many frames of a port before it looks at the others again, 1 to
    /// [`BURST`]. A frame that has come waits for that look: where its latency is taken beside a
    /// loaded port, a short burst keeps the time of this thread out of it
    /// ([`PortReport::looks`] says how far).
    pub fn set_burst(&mut self, frames: usize) {
        self.burst = frames.clamp(1, BURST);
    }

    /// A port's client.
    pub fn client(&self, port: usize) -> &Client {
        &self.ports[port].client
    }

    /// One window.
    ///
    /// # Errors
    /// A server broke the protocol, or is gone.
    pub fn measure(
        &mut self,
        warm_up: Duration,
        time: Duration,
        server: Option<u32>,
    ) -> Result<Report, DriveError> {
        self.measure_beside(warm_up, time, server, |_, _| Ok(()))
    }

    /// The same; `beside` is called between two visits of all ports, with the time, and whether it
    /// is measured.
    ///
    /// # Errors
    /// As for `measure`, and what `beside` reports.
    pub fn measure_beside(
        &mut self,
        warm_up: Duration,
        time: Duration,
        server: Option<u32>,
        mut beside: impl FnMut(u64, bool) -> Result<(), DriveError>,
    ) -> Result<Report, DriveError> {
        let start = self.clock.now();
        for port in &mut self.ports {
            // The first frame of a rate is due at once: a switch then learns where the port is
            // before it has flooded more frames for it than it may.
            port.due = match port.load {
                Load::Rate(rate) => start.saturating_sub((1e9 / rate) as u64),
                Load::Silent | Load::Flood | Load::Window(_) => start,
            };
        }
        for sender in &mut self.senders {
            sender.progress.1 = start;
        }
        let begin = start + warm_up.as_nanos() as u64;
        self.go(begin, |now| beside(now, false))?;
        let before: Vec<_> = self.ports.iter().map(|port| port.sums).collect();
        for port in &mut self.ports {
            port.latency.clear();
            port.looks.clear();
        }
        let cpu = server.and_then(process::cpu_time);
        let begin = self.clock.now();
        self.go(begin + time.as_nanos() as u64, |now| beside(now, true))?;
        let elapsed = self.clock.now() - begin;
        let cpu = server.and_then(process::cpu_time).zip(cpu);
        let measured: Vec<_> = self.ports.iter().map(|port| port.sums).collect();
        let latencies: Vec<_> = self
            .ports
            .iter()
            .map(|port| (port.latency.clone(), port.looks.clone()))
            .collect();
        self.drain(&mut beside)?;
        let seconds = elapsed as f64 / 1e9;
        let mut report = Report {
            seconds,
            ports: Vec::new(),
            server_cpu: cpu
                .map(|(after, before)| after.saturating_sub(before).as_secs_f64() / seconds),
        };
        for (at, (latency, looks)) in latencies.into_iter().enumerate() {
            let rate =
                |of: fn(&Sums) -> u64| (of(&measured[at]) - of(&before[at])) as f64 / seconds;
            let rates = [
                rate(|sums| sums.received),
                rate(|sums| sums.bytes),
                rate(|sums| sums.taken),
            ];
            report
                .ports
                .push(self.port_report(at, rates, latency, looks));
        }
        Ok(report)
    }

    fn port_report(
        &mut self,
        at: usize,
        rates: [f64; 3],
        latency: Histogram,
        looks: Histogram,
    ) -> PortReport {
        let port = &mut self.ports[at];
        let pairs = port.client.pairs.len();
        let mut counts = Counts::default();
        for sender in &mut self.senders[port.first_account..][..pairs] {
            let of_pair = sender.account.take_counts();
            counts.sent += of_pair.sent;
            counts.arrived += of_pair.arrived;
            counts.late += of_pair.late;
            counts.duplicate += of_pair.duplicate;
            counts.forged += of_pair.forged;
        }
        if !port.arrives {
            counts = Counts::default();
        }
        let (mut kicks, mut calls) = (0, 0);
        for pair in &mut port.client.pairs {
            let events = pair.take_events();
            kicks += events.0;
            calls += events.1;
        }
        let sums = std::mem::take(&mut port.sums);
        PortReport {
            received_per_s: rates[0],
            bytes_per_s: rates[1],
            taken_per_s: rates[2],
            latency,
            looks,
            wrong: sums.wrong,
            checked: sums.checked,
            foreign: sums.foreign,
            taken: sums.taken,
            counts,
            kicks,
            calls,
        }
    }

    /// Visits all ports until `end`.
    fn go(
        &mut self,
        end: u64,
        mut beside: impl FnMut(u64) -> Result<(), DriveError>,
    ) -> Result<(), DriveError> {
        let mut rounds = 0;
        loop {
            let now = self.clock.now();
            if now >= end {
                return Ok(());
            }
            for port in 0..self.ports.len() {
                self.visit(port, true)?;
            }
            beside(now)?;
            rounds += 1;
            if rounds % ROUNDS_PER_CHECK == 0 {
                self.check(now)?;
            }
        }
    }

    /// Receives what came, and sends what is to be sent.
    #[inline]
    fn visit(&mut self, index: usize, sends: bool) -> Result<(), DriveError> {
        let port = &mut self.ports[index];
        let takes_latency = port.takes_latency();
        let mut now = self.clock.now();
        if takes_latency {
            let since = now.saturating_sub(std::mem::replace(&mut port.looked_at, now));
            port.looks.record(since);
        }
        let burst = self.burst;
        let Client {
            memory,
            layout,
            pairs,
            path,
            ..
        } = &mut port.client;
        for (at, pair) in pairs.iter_mut().enumerate() {
            let failed = |source| DriveError::Ring {
                socket: path.display().to_string(),
                pair: at,
                source,
            };
            let senders = &mut self.senders;
            let (sums, latency) = (&mut port.sums, &mut port.latency);
            let (made, scratch) = (&mut port.made, &mut self.scratch);
            let expected = port.expected;
            let clock = &self.clock;
            pair.receive
                .receive(memory, layout, burst, |arrived, pieces| {
                    let time = match expected {
                        Expected::Stamped => {
                            sums.take_stamped(arrived, pieces, memory, senders, scratch)
                        }
                        Expected::Made(len) => {
                            sums.take_made(arrived, pieces, len, made, scratch);
                            None
                        }
                    };
                    if let Some(time) = time
                        && takes_latency
                    {
                        latency.record(clock.now().saturating_sub(time));
                    }
                })
                .map_err(failed)?;
            if pair.transmit.free() < BURST || !sends {
                // All of them, or twice as many as a burst takes.
                let most = if burst == BURST {
                    usize::MAX
                } else {
                    2 * burst
                };
                port.sums.taken += pair.transmit.reclaim(memory, most).map_err(failed)? as u64;
            }
            if !sends {
                continue;
            }
            let sender = &mut self.senders[port.first_account + at];
            let count = match port.load {
                Load::Silent => 0,
                Load::Flood => burst,
                Load::Window(window) => window
                    .saturating_sub(sender.account.in_flight())
                    .min(burst as u64) as usize,
                Load::Rate(rate) => {
                    let period = (1e9 / rate) as u64;
                    let due = (now.saturating_sub(port.due) / period.max(1)).min(burst as u64);
                    // Those that find no room are not made up for: the ring was full.
                    port.due = (port.due + due * period).max(now.saturating_sub(64 * period));
                    due as usize
                }
            };
            if count == 0 {
                continue;
            }
            if takes_latency {
                now = self.clock.now();
            }
            let (account, len) = (&mut sender.account, sender.frame_len);
            if port.is_stamped {
                pair.transmit.send(memory, layout, count, |at| {
                    frame::stamp(memory, at, len, account.send(), now);
                });
            } else {
                pair.transmit.send(memory, layout, count, |_| {});
            }
        }
        Ok(())
    }

    /// Looks for windows that stand still, and for servers that went away.
    #[cold]
    fn check(&mut self, now: u64) -> Result<(), DriveError> {
        for port in &mut self.ports {
            if port.client.is_hung_up() {
                let socket = port.client.path().display().to_string();
                return Err(DriveError::HungUp { socket });
            }
        }
        for sender in &mut self.senders {
            let arrived = sender.account.counts().arrived;
            if sender.account.in_flight() == 0 || arrived != sender.progress.0 {
                sender.progress = (arrived, now);
            } else if now.saturating_sub(sender.progress.1)
                > self.patience.silence.as_nanos() as u64
            {
                sender.account.give_up();
            }
        }
        Ok(())
    }

    /// Receives until nothing is under way, then gives up what did not come.
    fn drain(
        &mut self,
        beside: &mut impl FnMut(u64, bool) -> Result<(), DriveError>,
    ) -> Result<(), DriveError> {
        let end = self.clock.now() + self.patience.drain.as_nanos() as u64;
        loop {
            for port in 0..self.ports.len() {
                self.visit(port, false)?;
            }
            let senders = &self.senders;
            let is_done = |port: &Port| {
                let pairs = &port.client.pairs;
                let accounts = &senders[port.first_account..][..pairs.len()];
                pairs.iter().all(|pair| pair.transmit.outstanding() == 0)
                    && (!port.arrives
                        || accounts
                            .iter()
                            .all(|sender| sender.account.in_flight() == 0))
            };
            let now = self.clock.now();
            if self.ports.iter().all(is_done) || now > end {
                break;
            }
            beside(now, false)?;
        }
        for sender in &mut self.senders {
            sender.account.give_up();
        }
        Ok(())
    }
}
