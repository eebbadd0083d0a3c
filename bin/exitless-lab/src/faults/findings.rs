//! Counters of the parts that fail on purpose, for the ledger.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};
use vio_faults::{Attempts, LateStats, RogueRecord, RogueStats};

/// Counts of all parts of a machine that have some. Clones share them.
#[derive(Clone, Default)]
pub struct Findings(Arc<Mutex<Parts>>);

#[derive(Default)]
struct Parts {
    disks: BTreeMap<usize, RogueRecord>,
    /// Polls of the paravirtual IOMMU that were left out.
    iommu: Option<Arc<AtomicU64>>,
}

impl Findings {
    /// Adds the counts of a rogue disk, by its number.
    pub fn add_disk(&self, number: usize, record: RogueRecord) {
        self.parts(|parts| parts.disks.insert(number, record));
    }

    /// Adds a paravirtual IOMMU, whose polls that are left out are to be counted there.
    pub fn add_iommu(&self) -> Arc<AtomicU64> {
        self.parts(|parts| parts.iommu.get_or_insert_default().clone())
    }

    /// Reads all counts, by part.
    pub fn read(&self) -> BTreeMap<String, Value> {
        self.parts(|parts| {
            let disks = parts.disks.iter();
            let disks =
                disks.map(|(number, record)| (format!("disk{number}"), rogue(&record.stats())));
            let iommu = parts.iommu.iter().map(|polls| {
                let polls = polls.load(Ordering::Relaxed);
                ("iommu".to_owned(), json!({ "muted_polls": polls }))
            });
            disks.chain(iommu).collect()
        })
    }

    fn parts<T>(&self, change: impl FnOnce(&mut Parts) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Counts of a rogue disk.
fn rogue(stats: &RogueStats) -> Value {
    let RogueStats {
        blocked,
        allowed,
        late,
    } = stats;
    let LateStats {
        early,
        late,
        unjudged,
        allowed_max_ms,
        blocked_min_ms,
        ages,
    } = late;
    // A few rows for a run: `[age in ms, blocked, allowed]`.
    let ages = ages.iter();
    let ages = ages.map(|(ms, of_age)| [*ms, of_age.blocked, of_age.allowed]);
    let Attempts {
        blocked: early_blocked,
        allowed: early_allowed,
    } = early;
    json!({
        "blocked": blocked,
        "allowed": allowed,
        "early_blocked": early_blocked,
        "early_allowed": early_allowed,
        "late_blocked": late.blocked,
        "late_allowed": late.allowed,
        "unjudged_blocked": unjudged.blocked,
        "unjudged_allowed": unjudged.allowed,
        "allowed_max_ms": allowed_max_ms,
        "blocked_min_ms": blocked_min_ms,
        "ages": ages.collect::<Vec<_>>(),
    })
}
