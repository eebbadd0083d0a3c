//! The load of a server: which requests, where, and when.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::queue::{Extent, Op, SECTOR};
use seeded::Random;

/// Way in which a driver notices completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Calls are off, the rings are looked at all the time (DPDK, or a guest in a busy phase).
    Poll,
    /// Calls are off for so long after the last completion, then asked for, and the driver sleeps.
    Spin(Duration),
    /// The driver sleeps whenever its ring is empty (an ordinary Linux guest).
    Event,
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let spin = text.strip_prefix("spin:");
        match (text, spin.map(str::parse)) {
            ("poll", _) => Ok(Self::Poll),
            ("event", _) => Ok(Self::Event),
            (_, Some(Ok(us))) => Ok(Self::Spin(Duration::from_micros(us))),
            _ => Err(format!(
                "`{text}` is not `poll`, `event` or `spin:MICROSECONDS`"
            )),
        }
    }
}

/// Times at which requests are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pacing {
    /// As soon as another has ended: the depth is fixed.
    Closed,
    /// At random times, so many per second on average; latency counts from those times.
    Poisson(f64),
    /// At equal distances, so many per second.
    Uniform(f64),
    /// Poisson while on, nothing while off.
    Burst {
        /// Nanoseconds on.
        on_ns: u64,
        /// Nanoseconds off.
        off_ns: u64,
        /// Requests per second while on.
        rate: f64,
    },
    /// Poisson at one rate until the middle of the measured time, then at another.
    Step {
        /// Requests per second at first.
        from: f64,
        /// Requests per second then.
        to: f64,
    },
}

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    /// Reads, in percent; the rest are writes.
    pub read: u8,
    /// Flushes, in percent, before the rest is divided.
    pub flush: u8,
    /// Whether each request follows the one before it on the disk.
    pub is_sequential: bool,
}

impl Mix {
    /// Random reads.
    pub const READS: Self = Self {
        read: 100,
        flush: 0,
        is_sequential: false,
    };
}

/// One disk and its load.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// Socket of its server.
    pub socket: PathBuf,
    /// Requests outstanding per queue.
    pub depth: u16,
    /// Bytes per request.
    pub block: u32,
    /// The share it is said to have, for Jain's index.
    pub weight: f64,
    /// Times at which requests are made.
    pub pacing: Pacing,
    /// Disks of one group have their latencies merged in the report.
    pub group: u8,
}

impl VmSpec {
    /// One disk in a closed loop.
    pub fn closed(socket: PathBuf, depth: u16, block: u32) -> Self {
        Self {
            socket,
            depth,
            block,
            weight: 1.0,
            pacing: Pacing::Closed,
            group: 0,
        }
    }

    /// Reads `SOCK[,qd=N][,bs=N][,weight=W][,rate=R]` over defaults.
    ///
    /// # Errors
    /// An unknown key, or a value that is no number or makes no sense.
    pub fn parse(text: &str, default: &Self) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut spec = Self {
            socket: parts.next().unwrap_or_default().into(),
            ..default.clone()
        };
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let bad = |_| format!("`{part}` in `{text}` has no proper value");
            match key {
                "qd" => spec.depth = value.parse().map_err(|_| bad(()))?,
                "bs" => spec.block = value.parse().map_err(|_| bad(()))?,
                "weight" => spec.weight = value.parse().map_err(|_| bad(()))?,
                "rate" => spec.pacing = Pacing::Poisson(value.parse().map_err(|_| bad(()))?),
                _ => {
                    return Err(format!(
                        "`{key}` in `{text}` is none of qd, bs, weight, rate"
                    ));
                }
            }
        }
        let is_positive = |value: f64| value > 0.0 && value.is_finite();
        let is_block = spec.block > 0 && spec.block.is_multiple_of(SECTOR);
        let has_rate = match spec.pacing {
            Pacing::Poisson(rate) => is_positive(rate),
            _ => true,
        };
        match spec {
            spec if spec.depth > 0 && is_block && has_rate && is_positive(spec.weight) => Ok(spec),
            _ => Err(format!(
                "`{text}`: depth, block (in sectors), weight and rate are positive"
            )),
        }
    }
}

/// Three years: no request has to wait longer, however low its rate, so that times do not overflow.
const NEVER_NS: f64 = 1e17;

/// The times requests are to be made at.
#[derive(Clone, Debug)]
pub struct Arrivals {
    pacing: Pacing,
    next: u64,
    start: u64,
    step_at: u64,
}

impl Arrivals {
    /// From `start` on; a step comes at `step_at`. All in nanoseconds.
    pub fn new(pacing: Pacing, start: u64, step_at: u64, random: &mut Random) -> Self {
        let mut arrivals = Self {
            pacing,
            next: start,
            start,
            step_at,
        };
        if pacing != Pacing::Closed {
            arrivals.advance(random);
        }
        arrivals
    }

    /// The next time; meaningless in a closed loop.
    #[inline]
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Goes on to the time after that.
    pub fn advance(&mut self, random: &mut Random) {
        let mut gap = |rate: f64| (random.exponential() * 1e9 / rate).min(NEVER_NS) as u64;
        self.next = match self.pacing {
            Pacing::Closed => self.next,
            Pacing::Poisson(rate) => self.next + gap(rate),
            Pacing::Uniform(rate) => self.next + (1e9 / rate).min(NEVER_NS) as u64,
            Pacing::Burst {
                on_ns,
                off_ns,
                rate,
            } => {
                // The clock of the bursts stands still while they are off.
                let next = self.next + gap(rate);
                let period = on_ns + off_ns;
                match (next - self.start) % period {
                    at if at < on_ns => next,
                    at => next - at + period,
                }
            }
            Pacing::Step { from, to } => {
                let next = self.next + gap(if self.next < self.step_at { from } else { to });
                // A long gap of the slow rate does not reach over the step.
                if self.next < self.step_at && next > self.step_at {
                    self.step_at + gap(to)
                } else {
                    next
                }
            }
        };
    }
}

/// The requests of one ring, one after the other.
#[derive(Clone, Debug)]
pub struct Requests {
    mix: Mix,
    bytes: u32,
    /// Blocks on the disk (or the part of it that is used).
    blocks: u64,
    at: u64,
}

impl Requests {
    /// Requests of `bytes` on the first `sectors` of a disk.
    pub fn new(mix: Mix, bytes: u32, sectors: u64, start: u64) -> Self {
        let blocks = (sectors / u64::from(bytes / SECTOR)).max(1);
        Self {
            mix,
            bytes,
            blocks,
            at: start % blocks,
        }
    }

    /// The next one.
    #[inline]
    pub fn next(&mut self, random: &mut Random) -> (Op, Extent) {
        let Mix {
            read,
            flush,
            is_sequential,
        } = self.mix;
        let op = match (read, flush) {
            (100, 0) => Op::Read,
            (0, 0) => Op::Write,
            _ if random.percent() < flush => Op::Flush,
            _ if random.percent() < read => Op::Read,
            _ => Op::Write,
        };
        let block = if is_sequential {
            self.at = if self.at + 1 < self.blocks {
                self.at + 1
            } else {
                0
            };
            self.at
        } else {
            random.below(self.blocks)
        };
        let sector = block * u64::from(self.bytes / SECTOR);
        let bytes = if op == Op::Flush { 0 } else { self.bytes };
        (op, Extent { sector, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(pacing: Pacing, until: u64) -> Vec<u64> {
        let mut random = Random::new(7);
        let mut arrivals = Arrivals::new(pacing, 0, until / 2, &mut random);
        let mut times = Vec::new();
        while arrivals.next() < until {
            times.push(arrivals.next());
            arrivals.advance(&mut random);
        }
        times
    }

    #[test]
    fn rates_are_kept_on_average() {
        const SECOND: u64 = 1_000_000_000;
        for (pacing, expected) in [
            (Pacing::Poisson(50_000.0), 50_000.0),
            (Pacing::Uniform(20_000.0), 20_000.0),
            (
                Pacing::Step {
                    from: 10.0,
                    to: 100_000.0,
                },
                50_005.0,
            ),
            (
                Pacing::Burst {
                    on_ns: 10_000_000,
                    off_ns: 90_000_000,
                    rate: 200_000.0,
                },
                20_000.0,
            ),
        ] {
            let got = count(pacing, SECOND).len() as f64;
            assert!((got / expected - 1.0).abs() < 0.03, "{pacing:?}: {got}");
        }
    }

    #[test]
    fn the_lowest_rates_do_not_overflow() {
        let mut random = Random::new(7);
        for pacing in [Pacing::Poisson(1e-300), Pacing::Uniform(1e-300)] {
            let arrivals = Arrivals::new(pacing, 5, u64::MAX, &mut random);
            assert_eq!(arrivals.next(), 5 + NEVER_NS as u64, "{pacing:?}");
        }
    }

    #[test]
    fn bursts_are_silent_in_between_and_a_step_is_sharp() {
        let burst = Pacing::Burst {
            on_ns: 1_000,
            off_ns: 9_000,
            rate: 1e9,
        };
        assert!(count(burst, 1_000_000).iter().all(|at| at % 10_000 < 1_000));
        let times = count(
            Pacing::Step {
                from: 10.0,
                to: 1e6,
            },
            1_000_000_000,
        );
        let first = times.partition_point(|&at| at < 500_000_000);
        assert!(first < 20);
        assert!(times[first] < 500_050_000);
    }

    #[test]
    fn socket_options_override_the_defaults() {
        let default = VmSpec::closed(PathBuf::new(), 1, 4096);
        let spec = VmSpec::parse("a.sock,qd=8,bs=65536,weight=2.5,rate=10", &default).unwrap();
        assert_eq!((spec.depth, spec.block, spec.weight), (8, 65536, 2.5));
        assert_eq!(spec.pacing, Pacing::Poisson(10.0));
        for bad in [
            "a,qd=0",
            "a,bs=100",
            "a,qd",
            "a,colour=3",
            "a,weight=-1",
            "a,rate=0",
            "a,rate=-5",
            "a,rate=nan",
        ] {
            assert!(VmSpec::parse(bad, &default).is_err(), "{bad}");
        }
    }
}
