//! The results of a run, for people and for programs.

use std::fmt;

use report::short;
use serde::Serialize;

use crate::hist::Histogram;

/// Latency of an idle server, in nanoseconds, above which the machine is the cause: server or
/// client was not running. (A wake takes up to 70 µs.)
pub const STALL_NS: u64 = 200_000;

/// Nanoseconds of latency.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Latency {
    /// Mean.
    pub mean_ns: f64,
    /// Mean of those up to [`STALL_NS`].
    pub prompt_mean_ns: f64,
    /// The part of all that took longer.
    pub stalled: f64,
    /// Median.
    pub p50_ns: u64,
    /// 9 of 10 were faster.
    pub p90_ns: u64,
    /// 99 of 100 were faster.
    pub p99_ns: u64,
    /// 999 of 1,000 were faster.
    pub p999_ns: u64,
    /// The slowest.
    pub max_ns: u64,
}

impl From<&Histogram> for Latency {
    fn from(histogram: &Histogram) -> Self {
        let (prompt_mean_ns, stalled) = histogram.mean_up_to(STALL_NS);
        Self {
            mean_ns: histogram.mean(),
            prompt_mean_ns,
            stalled,
            p50_ns: histogram.quantile(0.5),
            p90_ns: histogram.quantile(0.9),
            p99_ns: histogram.quantile(0.99),
            p999_ns: histogram.quantile(0.999),
            max_ns: histogram.max(),
        }
    }
}

/// Requests that did not end well, by their status byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Errors {
    /// VIRTIO_BLK_S_IOERR.
    pub io: u64,
    /// VIRTIO_BLK_S_UNSUPP.
    pub unsupported: u64,
    /// Another value, or none was written.
    pub other: u64,
}

impl Errors {
    /// All of them.
    pub const fn total(&self) -> u64 {
        self.io + self.unsupported + self.other
    }
}

/// One disk's part.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VmReport {
    /// Socket of its server.
    pub socket: String,
    /// Requests outstanding per queue.
    pub depth: u16,
    /// Bytes per request.
    pub block: u32,
    /// Its share.
    pub weight: f64,
    /// Requests per second.
    pub iops: f64,
    /// Nanoseconds of service per second, as Jain's index counts them.
    pub cost_per_s: f64,
    /// Latency.
    pub latency: Latency,
    /// Failed requests.
    pub errors: Errors,
    /// Wake-ups lost.
    pub lost_wakeups: u64,
}

/// All that a run measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Seconds measured.
    pub seconds: f64,
    /// Requests.
    pub requests: u64,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Latency of all requests; in an open loop from the intended time.
    pub latency: Latency,
    /// Latency of those whose intended time lay behind the step, where there was one.
    pub after_step: Option<Latency>,
    /// Latency of flushes alone, where there were some.
    pub flushes: Option<Latency>,
    /// Kicks written (guest exits).
    pub kicks: u64,
    /// Calls read (guest interrupts).
    pub calls: u64,
    /// Times this client slept.
    pub sleeps: u64,
    /// Processor time of this client, seconds per second.
    pub client_cpu: f64,
    /// Processor time of the server's process, seconds per second, where it was asked for.
    pub server_cpu: Option<f64>,
    /// Latency of each group of disks.
    pub groups: Vec<Latency>,
    /// The slowest disk, requests per second.
    pub vm_min_iops: f64,
    /// The fastest disk, requests per second.
    pub vm_max_iops: f64,
    /// Disks of which at least one request was answered.
    pub served: usize,
    /// Jain's index over served cost / weight: 1 is fair, 1/n is one disk for all.
    pub jain: f64,
    /// Failed requests, those of the warm-up among them.
    pub errors: Errors,
    /// Requests without an answer for 500 ms, in the warm-up too, with or without a call missing;
    /// the ring was then kicked. Also rings of which something never came back at the end.
    pub lost_wakeups: u64,
    /// Of those, the number whose answer was in the ring while the call did not come.
    pub lost_calls: u64,
    /// Requests that never came back, not even at the end.
    pub unanswered: u64,
    /// Rings of which the server says at the end that it stands elsewhere than it should.
    pub wrong_bases: u64,
    /// Each disk.
    pub vms: Vec<VmReport>,
}

/// Jain's index of some shares.
pub fn jain(shares: impl IntoIterator<Item = f64>) -> f64 {
    let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for share in shares {
        count += 1.0;
        sum += share;
        squares += share * share;
    }
    if squares == 0.0 {
        0.0
    } else {
        sum * sum / (count * squares)
    }
}

impl Report {
    /// Kicks per 1,000 requests.
    pub fn kicks_per_1000(&self) -> f64 {
        per_1000(self.kicks, self.requests)
    }

    /// Calls per 1,000 requests.
    pub fn calls_per_1000(&self) -> f64 {
        per_1000(self.calls, self.requests)
    }
}

fn per_1000(events: u64, requests: u64) -> f64 {
    events as f64 * 1000.0 / requests.max(1) as f64
}

/// Microseconds: `1.02`, `23.0`, `145`.
pub fn micros(ns: u64) -> String {
    match ns as f64 / 1e3 {
        us if us < 10.0 => format!("{us:.2}"),
        us if us < 100.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |l: &Latency| {
            format!(
                "p50 {} µs, p99 {}, p99.9 {}, max {}, mean {}",
                micros(l.p50_ns),
                micros(l.p99_ns),
                micros(l.p999_ns),
                micros(l.max_ns),
                micros(l.mean_ns as u64)
            )
        };
        writeln!(
            f,
            "requests   {} IOPS, {}B/s, {} in {:.2} s",
            short(self.iops),
            short(self.bytes_per_s),
            self.requests,
            self.seconds
        )?;
        writeln!(f, "latency    {}", line(&self.latency))?;
        if let Some(after) = &self.after_step {
            writeln!(f, "after step {}", line(after))?;
        }
        writeln!(
            f,
            "events     {:.3} kicks and {:.3} calls per 1,000 requests ({} and {}), {} sleeps, \
             client CPU {:.0} %",
            self.kicks_per_1000(),
            self.calls_per_1000(),
            self.kicks,
            self.calls,
            self.sleeps,
            self.client_cpu * 100.0
        )?;
        if let Some(cpu) = self.server_cpu {
            writeln!(f, "server     CPU {:.1} %", cpu * 100.0)?;
        }
        if self.vms.len() > 1 {
            writeln!(
                f,
                "disks      {} of {} served, {} to {} IOPS each, Jain {:.4}",
                self.served,
                self.vms.len(),
                short(self.vm_min_iops),
                short(self.vm_max_iops),
                self.jain
            )?;
        }
        let bad = [
            ("lost wake-ups", self.lost_wakeups),
            ("of them lost calls", self.lost_calls),
            ("I/O errors", self.errors.io),
            ("unsupported", self.errors.unsupported),
            ("no status", self.errors.other),
            ("never answered", self.unanswered),
            ("rings elsewhere at the end", self.wrong_bases),
        ];
        let bad: Vec<_> = bad
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{count} {name}"))
            .collect();
        match bad.is_empty() {
            true => write!(f, "errors     none"),
            false => write!(f, "ERRORS     {}", bad.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jain_of_equal_one_and_half() {
        assert!((jain([3.0; 16]) - 1.0).abs() < 1e-12);
        assert!((jain([1.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-12);
        assert_eq!(jain([0.0; 3]), 0.0);
    }
}
