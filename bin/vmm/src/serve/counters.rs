//! Counters of cores and devices: asked for, and written.

use std::path::Path;
use std::time::{Duration, Instant};

use sidecore::{Answer, Stats};
use vhost_export::ExportStats;

use super::switch::SwitchStats;
use crate::output;

/// Period of the check for answers that are not there yet.
const LOOK: Duration = Duration::from_millis(1);

/// Returns the answers that came within `limit`, or until `give_up` says that no caller waits any
/// more. All have been asked before, so that devices are waited for together, and not one after the
/// other.
pub fn gather<R>(
    asked: Vec<(String, Answer<R>)>,
    limit: Duration,
    give_up: impl Fn() -> bool,
) -> Vec<(String, Option<R>)> {
    let deadline = Instant::now() + limit;
    let take = |(id, answer): (String, Answer<R>)| {
        let taken = loop {
            let taken = answer.try_take();
            if taken.is_some() || Instant::now() >= deadline || give_up() {
                break taken;
            }
            std::thread::sleep(LOOK);
        };
        (id, taken)
    };
    asked.into_iter().map(take).collect()
}

/// All counters, by name. One of which none are known did not answer.
#[derive(Default)]
pub struct Counted {
    /// Of cores, by number.
    pub cores: Vec<(usize, Stats)>,
    /// Of devices.
    pub devices: Vec<(String, Option<ExportStats>)>,
    /// Of switches.
    pub switches: Vec<(String, Option<SwitchStats>)>,
}

/// Writes all counters. A device of which none are known is there all the same, as one that did not
/// answer.
pub fn report(path: Option<&Path>, counted: Counted) {
    let Some(path) = path else { return };
    let Counted {
        cores,
        devices: stats,
        switches,
    } = counted;
    let cores: Vec<serde_json::Value> = cores
        .iter()
        .map(|(number, stats)| {
            let core = &stats.core;
            serde_json::json!({
                "core": number,
                "busy_ns": core.busy_ns,
                "idle_ns": core.idle_ns,
                "asleep_ns": core.asleep_ns,
                "arming_ns": core.arming_ns,
                "cost": core.cost,
                "sweeps_busy": core.sweeps_busy,
                "sweeps_idle": core.sweeps_idle,
                "sleeps": core.sleeps,
                "sleeps_forced": core.sleeps_forced,
                "sleeps_refused": core.sleeps_refused,
                "wakes_spurious": core.wakes_spurious,
                "mutes": core.mutes,
            })
        })
        .collect();
    let devices: serde_json::Map<String, serde_json::Value> = stats
        .into_iter()
        .map(|(id, stats)| {
            let Some(stats) = stats else {
                return (id, serde_json::json!({ "no_answer": true }));
            };
            let device = stats.device;
            let value = serde_json::json!({
                "connections": stats.connections,
                "turned_away": stats.turned_away,
                "kicks": stats.kicks,
                "calls": stats.calls,
                "requests": device.requests,
                "errors": device.errors,
                "read_bytes": device.read_bytes,
                "written_bytes": device.written_bytes,
                "backpressure": device.backpressure,
                "throttled": device.throttled,
                "violations": stats.violations + device.violations,
                "ring_faults": device.ring_faults,
                "cancelled": stats.cancelled + device.cancelled,
                "misses": stats.misses,
                "iotlb_updates": stats.iotlb_updates,
                "iotlb_invalidations": stats.iotlb_invalidations,
            });
            (id, value)
        })
        .collect();
    let mut all = serde_json::json!({ "cores": cores, "devices": devices });
    if !switches.is_empty() {
        let no_answer = || serde_json::json!({ "no_answer": true });
        let switches = switches.into_iter();
        let switches: serde_json::Map<String, serde_json::Value> = switches
            .map(|(id, stats)| (id, stats.map_or_else(no_answer, |stats| stats.to_json())))
            .collect();
        all["switches"] = switches.into();
    }
    let text = all.to_string();
    if let Err(error) = output::write(path, &text) {
        tracing::warn!(path = %path.display(), %error, "the counters cannot be written");
    }
}

#[cfg(test)]
mod tests {
    use sidecore::Reply;

    use super::*;

    #[test]
    fn devices_that_do_not_answer_cost_one_limit_together() {
        let (replies, asked): (Vec<_>, Vec<_>) = (0..50)
            .map(|number| {
                let (reply, answer) = Reply::pair();
                (reply, (number.to_string(), answer))
            })
            .unzip();
        let mut silent = Vec::new();
        for (number, reply) in replies.into_iter().enumerate() {
            match number {
                49 => reply.send(number),
                _ => silent.push(reply),
            }
        }
        let limit = Duration::from_millis(200);
        let since = Instant::now();
        let gathered = gather(asked, limit, || false);
        assert!(since.elapsed() < 10 * limit, "{:?}", since.elapsed());
        // The last one too, though those before it have used up the time.
        assert_eq!(
            gathered
                .iter()
                .filter_map(|(_, stats)| *stats)
                .collect::<Vec<_>>(),
            [49]
        );
        assert_eq!(gathered.len(), 50);
    }

    #[test]
    fn an_end_that_is_asked_for_ends_the_wait() {
        let (_reply, answer) = Reply::<u32>::pair();
        let since = Instant::now();
        let gathered = gather(vec![("a".into(), answer)], Duration::from_secs(60), || true);
        assert_eq!(gathered, [("a".to_owned(), None)]);
        assert!(since.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_device_that_did_not_answer_is_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stats");
        let stats = vec![
            ("a".to_owned(), Some(ExportStats::default())),
            ("b".to_owned(), None),
        ];
        let switches = vec![
            ("s".to_owned(), Some(SwitchStats::default())),
            ("t".to_owned(), None),
        ];
        let counted = Counted {
            devices: stats,
            switches,
            ..Counted::default()
        };
        report(Some(&path), counted);
        let text = std::fs::read(&path).unwrap();
        let written: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(written["devices"]["a"]["requests"], 0);
        assert_eq!(written["devices"]["b"]["no_answer"], true);
        assert!(written["switches"]["s"]["ports"].is_object());
        assert_eq!(written["switches"]["t"]["no_answer"], true);
    }
}
