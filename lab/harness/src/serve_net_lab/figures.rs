//! The figures of all rounds, and their bars.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use report::Object;
use report::object::round as rounded;
use serde_json::{Value, json};

use super::plan::{Amount, Mover, Work};
use super::round::{Round, Window};
use super::viommu::Pinged;
use crate::demo::{CAUSES, median};
use crate::judged::{Bar, judge};
use crate::system::host::Host;

/// Numbers of guests, as in the paper.
pub const GUESTS: [u32; 4] = [1, 2, 4, 7];

/// Largest number of doorbell exits of a frame when the core polls.
const DOORBELLS: f64 = 0.01;
/// Largest number of frames for a MiB that a guest sends with segmentation offload.
const FRAMES_PER_MIB: f64 = 40.0;

/// Returns the prefix of the keys of one cell of the tables.
pub fn cell(work: Work, guests: u32, mover: Mover) -> String {
    format!("elvis_{}_{guests}_{}", work.name(), mover.name())
}

/// Returns the bars of all figures that are judged.
fn bars() -> impl Iterator<Item = (String, Bar)> {
    // The work that mostly receives is not one of the paper's two.
    let polling = [Work::Stream, Work::Rr].into_iter().flat_map(|work| {
        GUESTS.map(|guests| {
            let cell = cell(work, guests, Mover::Poll);
            (
                format!("{cell}_doorbell_per_packet"),
                Bar::AtMost(DOORBELLS),
            )
        })
    });
    let others = [
        ("tap_frames_per_mib", Bar::AtMost(FRAMES_PER_MIB)),
        ("ping_lost_lab_strict", Bar::AtMost(0.0)),
        ("failed_rounds", Bar::AtMost(0.0)),
    ];
    polling.chain(others.map(|(key, bar)| (key.to_owned(), bar)))
}

/// Figures measured so far.
pub struct Figures {
    object: Object,
    rounds: Vec<u32>,
    failed: Vec<String>,
    /// Seconds of the earlier runs whose figures were taken over.
    before_s: f64,
}

impl Figures {
    /// Creates a set without figures but for the conditions.
    pub fn new(host: &Host, amount: &Amount) -> Result<Self> {
        let mut object = Object::new(&report::Host::read(), host.label());
        object.value("host_kernel", host.kernel_release()?);
        let Amount {
            writes,
            datagrams,
            windows,
        } = *amount;
        object.value("writes_per_window", writes);
        object.value("datagrams_per_window", datagrams);
        object.value("windows_per_guest", windows);
        Ok(Self {
            object,
            rounds: Vec::new(),
            failed: Vec::new(),
            before_s: 0.0,
        })
    }

    /// Takes over the rounds of an earlier run of this commit and these amounts. Rounds that failed
    /// there are not taken over, and run again.
    pub fn resume(mut self, earlier: &Object) -> Self {
        const SAME: [&str; 6] = [
            "commit",
            "mode",
            "host_kernel",
            "writes_per_window",
            "datagrams_per_window",
            "windows_per_guest",
        ];
        let of = |object: &Object| SAME.map(|key| object.keys().get(key).cloned());
        if of(earlier) != of(&self.object) {
            return self;
        }
        let rounds = earlier.keys().get("rounds").and_then(Value::as_array);
        let rounds = rounds.into_iter().flatten().filter_map(Value::as_u64);
        self.rounds = rounds.filter_map(|guests| guests.try_into().ok()).collect();
        self.before_s = earlier.get("wall_s").unwrap_or(0.0);
        self.object = earlier.clone();
        self
    }

    /// Returns whether the round of this number of guests is there.
    pub fn has_round(&self, guests: u32) -> bool {
        self.rounds.contains(&guests)
    }

    /// Returns whether pings behind an IOMMU are there.
    pub fn has_pings(&self) -> bool {
        self.object.get("ping_lost_lab_strict").is_some()
    }

    /// Sets the reason why vhost-net was not measured; the empty text if it was.
    pub fn without_vhost(&mut self, reason: &str) {
        self.object.value("vhost_reason", reason);
    }

    /// Adds a round.
    pub fn add(&mut self, round: &Round) {
        let guests = round.guests;
        for work in Work::ALL {
            for mover in Mover::ALL {
                let is_of_it = |window: &&Window| (window.work, window.mover) == (work, mover);
                let windows: Vec<&Window> = round.windows.iter().filter(is_of_it).collect();
                if !windows.is_empty() {
                    self.add_cell(&cell(work, guests, mover), &windows);
                }
            }
        }
        for (mover, served) in &round.served {
            let prefix = format!("elvis_{guests}_{}_daemon", mover.name());
            for (key, count) in [
                ("kicks_per_1000", served.kicks),
                ("calls_per_1000", served.calls),
            ] {
                let per = rounded(1000.0 * count / served.requests, 1);
                self.object.number(&format!("{prefix}_{key}"), per);
            }
            let key = format!("{prefix}_requests");
            self.object.number(&key, served.requests);
        }
        if let Some(bulk) = round.bulk {
            let mut set = |key: &str, value: f64| self.object.number(key, rounded(value, 1));
            set("tap_frames_per_mib", bulk.from_guest);
            set("tap_frames_per_mib_to_guest", bulk.to_guest);
        }
        self.rounds.push(guests);
    }

    /// Adds medians over guests and their windows.
    fn add_cell(&mut self, prefix: &str, windows: &[&Window]) {
        let per = |of: &dyn Fn(&Window) -> f64| -> Vec<f64> {
            let value = |window: &&Window| of(window) / window.frames();
            windows.iter().map(value).collect()
        };
        let mut set = |key: &str, values: Vec<f64>| {
            let value = rounded(median(values), 4);
            self.object
                .number(&format!("{prefix}_{key}_per_packet"), value);
        };
        for cause in CAUSES {
            set(cause, per(&|window| window.exits(cause)));
        }
        let other = |window: &Window| {
            window.exits("total") - window.exits("doorbell") - window.exits("interrupt")
        };
        set("other", per(&other));
        // Interrupts that the guest's processors have taken: one call of a server is one of these.
        set("calls", per(&|window| window.nic("interrupts")));
        set("bytes", per(&|w| w.nic("bytes_out") + w.nic("bytes_in")));
        let totals = per(&|window| window.exits("total"));
        set("total", totals.clone());
        let most = totals.iter().copied().fold(f64::MIN, f64::max);
        let least = totals.iter().copied().fold(f64::MAX, f64::min);
        let spread = rounded(most - least, 4);
        self.object
            .number(&format!("{prefix}_total_per_packet_spread"), spread);
        let frames: f64 = windows.iter().map(|window| window.frames()).sum();
        self.object.number(&format!("{prefix}_packets"), frames);
    }

    /// Adds the result of pings behind an IOMMU.
    pub fn pinged(&mut self, pinged: Result<Pinged>) {
        match pinged {
            Ok(pinged) => {
                let mut set = |key: &str, value: f64| self.object.number(key, rounded(value, 4));
                set("ping_lost_lab_strict", pinged.lost.into());
                set("misses_per_packet", pinged.misses_per_frame);
                set("invalidations_per_packet", pinged.invalidations_per_frame);
            }
            Err(error) => self.failed("pings behind an IOMMU", &error),
        }
    }

    /// Notes that a round failed.
    pub fn failed(&mut self, what: &str, error: &anyhow::Error) {
        eprintln!("serve-net-lab: {what}: {error:#}");
        self.failed.push(format!("{what}: {error:#}"));
    }

    /// Writes all figures.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, path: &Path, wall: Duration) -> Result<Object> {
        // A figure that was not measured is null, and never zero.
        for guests in GUESTS {
            for (work, mover) in cells() {
                for part in ["doorbell", "interrupt", "other"] {
                    let key = format!("{}_{part}_per_packet", cell(work, guests, mover));
                    self.object.missing(&key);
                }
            }
        }
        for key in [
            "tap_frames_per_mib",
            "ping_lost_lab_strict",
            "misses_per_packet",
        ] {
            self.object.missing(key);
        }
        self.object.value("rounds", json!(self.rounds));
        self.object.value("failed_rounds", self.failed.len());
        self.object.value("failed", json!(self.failed));
        let wall = self.before_s + wall.as_secs_f64();
        self.object.number("wall_s", wall.round());
        let (missed, judged) = judge(&self.object, bars());
        self.object.value("judged", json!(judged));
        self.object.value("missed", json!(missed));
        self.object
            .write(path)
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(self.object.clone())
    }

    /// Returns whether all figures that were measured meet their bars.
    pub fn holds(&self) -> bool {
        judge(&self.object, bars()).0.is_empty()
    }
}

/// Returns the paper's two works with each mover.
fn cells() -> impl Iterator<Item = (Work, Mover)> {
    let works = [Work::Stream, Work::Rr].into_iter();
    works.flat_map(|work| Mover::ALL.map(|mover| (work, mover)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(mover: Mover, doorbells: u64, total: u64) -> Window {
        let nic = [
            ("frames_out", 60),
            ("frames_in", 40),
            ("interrupts", 25),
            ("bytes_out", 6000),
            ("bytes_in", 4000),
        ];
        Window {
            mover,
            work: Work::Rr,
            nic: nic.map(|(key, count)| (key.to_owned(), count)).into(),
            ledger: json!({ "exits": { "total": total, "doorbell": doorbells, "interrupt": 10, "hlt": 20 } }),
        }
    }

    fn none() -> Figures {
        Figures {
            object: Object::default(),
            rounds: Vec::new(),
            failed: Vec::new(),
            before_s: 0.0,
        }
    }

    fn written(figures: &mut Figures) -> Object {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.json");
        figures.write(&path, Duration::ZERO).unwrap();
        Object::read(&path).unwrap()
    }

    #[test]
    fn exits_are_divided_by_frames_and_what_is_no_doorbell_or_interrupt_is_other() {
        let mut figures = none();
        figures.add(&Round {
            guests: 2,
            windows: vec![
                window(Mover::Poll, 0, 100),
                window(Mover::Poll, 2, 200),
                window(Mover::Poll, 4, 110),
                window(Mover::Notify, 50, 90),
            ],
            ..Round::default()
        });
        let object = written(&mut figures);
        for (key, value) in [
            ("rr_2_poll_doorbell_per_packet", 0.02),
            ("rr_2_poll_interrupt_per_packet", 0.1),
            ("rr_2_poll_other_per_packet", 0.96),
            ("rr_2_poll_total_per_packet", 1.1),
            ("rr_2_poll_total_per_packet_spread", 1.0),
            ("rr_2_poll_calls_per_packet", 0.25),
            ("rr_2_poll_bytes_per_packet", 100.0),
            ("rr_2_poll_packets", 300.0),
            ("rr_2_notify_doorbell_per_packet", 0.5),
        ] {
            assert_eq!(object.get(&format!("elvis_{key}")), Some(value), "{key}");
        }
        // Two doorbells of 100 frames are too many, and vhost-net was not measured.
        assert_eq!(
            object.keys()["missed"],
            json!(["elvis_rr_2_poll_doorbell_per_packet"])
        );
        let absent = &object.keys()["elvis_rr_2_vhost_doorbell_per_packet"];
        assert_eq!(*absent, Value::Null);
        assert!(!figures.holds());
    }

    #[test]
    fn a_run_goes_on_with_the_rounds_of_one_like_it_and_no_other() {
        let mut earlier = none();
        earlier.object.value("commit", "abc");
        earlier.object.value("writes_per_window", 10);
        earlier.add(&Round {
            guests: 4,
            windows: vec![window(Mover::Vhost, 9, 50)],
            ..Round::default()
        });
        earlier.failed("round of 7", &anyhow::Error::msg("no"));
        let earlier = written(&mut earlier);
        let like = |commit: &str| {
            let mut figures = none();
            figures.object.value("commit", commit);
            figures.object.value("writes_per_window", 10);
            figures
        };
        let mut resumed = like("abc").resume(&earlier);
        assert!(resumed.has_round(4) && !resumed.has_round(7));
        let object = written(&mut resumed);
        let key = "elvis_rr_4_vhost_doorbell_per_packet";
        assert_eq!(object.get(key), Some(0.09));
        assert_eq!(object.get("failed_rounds"), Some(0.0));
        assert!(!like("def").resume(&earlier).has_round(4));
    }

    #[test]
    fn a_failure_a_lost_ping_or_many_frames_are_no_success() {
        let mut figures = none();
        written(&mut figures);
        assert!(figures.holds());
        figures.pinged(Ok(Pinged {
            lost: 1,
            misses_per_frame: 0.5,
            invalidations_per_frame: 1.0,
        }));
        assert!(!figures.holds() && figures.has_pings());
        let mut figures = none();
        figures.pinged(Err(anyhow::Error::msg("no guest")));
        written(&mut figures);
        assert!(!figures.holds() && !figures.has_pings());
        let mut figures = none();
        figures.object.number("tap_frames_per_mib", 40.1);
        assert!(!figures.holds());
    }
}
