//! First touches and waits: page faults that the sidecore takes as devices reach guest memory, and
//! waits of devices for memory that is absent, with and without each hint that the guest's MAP
//! requests give (`run --iommu-hints`). The paper's host page-table optimization (HOPT), as counts
//! of the faults and waits that it saves.
//!
//! One boot each, of Debian's 6.12 with our module, which caches no mapping.
//!
//! * *First touches*: direct 4 KiB reads one at a time, each into another page that no device has
//!   reached before; the sidecore polls.
//! * *Waits*: a guest whose memory is limited (`--resident`) writes 4 MiB to its disk's page cache,
//!   then touches other memory, so that those pages are evicted; then it syncs. Each page is a
//!   request of its own, and the disk waits for its data.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::KERNEL;
use super::figures::Figures;
use crate::system::guest::{Driver, Guest, Mode};
use crate::system::host::{GuestModule, Host, Kernels};
use crate::system::{squeezed, workloads};

/// A guest that is measured.
struct Row {
    /// Name in keys and in the table.
    name: &'static str,
    /// Value of `--iommu-hints`.
    hints: &'static str,
}

impl Row {
    const fn new(name: &'static str, hints: &'static str) -> Self {
        Self { name, hints }
    }
}

/// Guests whose first touches are measured, in this order.
const TOUCHES: [Row; 4] = [
    Row::new(NONE, "gather=off,populate=off,cache=off"),
    Row::new("hopt_populate", "gather=off,populate=on,cache=off"),
    Row::new("hopt_cache", "gather=off,populate=off,cache=on"),
    Row::new("hopt_all", "gather=on,populate=on,cache=on"),
];

/// Guests whose waits are measured.
const WAITS: [Row; 2] = [
    Row::new(SQUEEZED_NONE, "gather=off"),
    Row::new("hopt_gather", "gather=on"),
];

const NONE: &str = "hopt_none";
const SQUEEZED_NONE: &str = "hopt_gather_off";

/// Reads of a window: each into a page that no device has reached before.
const READS: u32 = 1000;
/// Reads before the window, into pages of their own.
const WARMUP: u32 = 100;

/// Pages that a limited guest writes.
const PAGES: u32 = 1024;
/// MiB that it may have resident.
const RESIDENT: u64 = 64;
/// MiB of zeroes that it fills besides.
const OTHERS: u32 = 72;

/// Returns the names of the rows of first touches.
pub fn names() -> impl Iterator<Item = &'static str> {
    TOUCHES.iter().map(|row| row.name)
}

/// Returns the names of the rows of waits.
pub fn names_of_waits() -> impl Iterator<Item = &'static str> {
    WAITS.iter().map(|row| row.name)
}

/// Counts of a window for 1,000 operations: reads, or pages written.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Counts {
    /// Page faults of the sidecore, with and without I/O.
    faults: f64,
    /// Waits of devices' queues.
    pends: f64,
    /// MAP requests.
    maps: f64,
    /// Requests at a MAP for pages of which some were absent.
    gathered: f64,
    /// Windows populated since the machine started.
    populated: f64,
}

impl Counts {
    /// Computes the counts from the ledger's window, and its total.
    fn of(window: &Value, whole: &Value, operations: u32) -> Result<Self> {
        let of = |window: &Value, part: &str, key: &str| {
            let count = window[part][key].as_f64();
            count.with_context(|| format!("the ledger has no {part}.{key}"))
        };
        let per_1000 = |part, key| -> Result<f64> {
            Ok(1000.0 * of(window, part, key)? / f64::from(operations))
        };
        Ok(Self {
            faults: per_1000("sidecore", "minor_faults")? + per_1000("sidecore", "major_faults")?,
            pends: per_1000("owner", "pends")?,
            maps: per_1000("paravirtual", "maps")?,
            gathered: per_1000("paravirtual", "gathered")?,
            populated: of(whole, "paravirtual", "populated")?,
        })
    }

    fn values(&self) -> [(&'static str, f64); 5] {
        [
            ("sidecore_faults_per_1000", self.faults),
            ("pends_per_1000", self.pends),
            ("maps_per_1000", self.maps),
            ("gathered_per_1000", self.gathered),
            ("populated_mib", self.populated),
        ]
    }
}

/// A row that was measured.
type Measured = (&'static str, Counts);

/// Measures the first touches of the rows whose names are wanted, writes the report after each of
/// them, and returns their table.
///
/// # Errors
/// A guest failed; the report cannot be written.
pub fn measure(
    host: &Host,
    report: &Path,
    figures: &mut Figures,
    wants: &dyn Fn(&str) -> bool,
) -> Result<String> {
    rows(&TOUCHES, wants, report, figures, |row| {
        first_touches(host, row)
    })
}

/// Measures the waits likewise, on a host of their own: a pager needs a kernel as new as the
/// guest's.
///
/// # Errors
/// As [`measure`], or there is no such host.
pub fn measure_waits(
    report: &Path,
    reads: u32,
    figures: &mut Option<Figures>,
    wants: &dyn Fn(&str) -> bool,
) -> Result<String> {
    let host = Host::start_with_kernels(Kernels {
        both: Some(KERNEL),
        module: Some(GuestModule::Driver),
        ..Kernels::default()
    })?;
    let figures = match figures {
        Some(figures) => figures,
        None => figures.insert(Figures::new(&host, reads)?),
    };
    let told = rows(&WAITS, wants, report, figures, |row| waits(&host, row))?;
    host.shutdown()?;
    Ok(told)
}

fn rows(
    all: &[Row],
    wants: &dyn Fn(&str) -> bool,
    report: &Path,
    figures: &mut Figures,
    measure: impl Fn(&Row) -> Result<Counts>,
) -> Result<String> {
    let mut rows: Vec<Measured> = Vec::new();
    for row in all.iter().filter(|row| wants(row.name)) {
        eprintln!("pviommu-lab: {}", row.name);
        let counts = measure(row).with_context(|| row.name)?;
        for (key, value) in counts.values() {
            figures.insert(format!("{}_{key}", row.name), value);
        }
        rows.push((row.name, counts));
        for (key, value) in removed(&rows) {
            figures.insert(key, value);
        }
        figures.write(report)?;
    }
    Ok(match rows.is_empty() {
        true => String::new(),
        false => table(&rows),
    })
}

/// Adds the parts that both kinds of guests have: our module, hints, time, a disk.
fn prepare(guest: &mut Guest, host: &Host, row: &Row) -> Result<()> {
    guest.driver = Driver::Module(&[]);
    guest.limit = Duration::from_secs(1200);
    guest.name = format!("-{}", row.name);
    guest
        .flags
        .extend(["--iommu-hints".into(), row.hints.into()]);
    workloads::add_disk(guest, host, 1, "")
}

fn first_touches(host: &Host, row: &Row) -> Result<Counts> {
    let disk = workloads::disk_node(Mode::Virtio, 0);
    let script = format!(
        "workload reads {disk} --in-place --count {READS} --warmup {WARMUP} --buffers {}",
        READS + WARMUP
    );
    let mut guest = Guest::new(Mode::Virtio, script);
    prepare(&mut guest, host, row)?;
    super::pin(&mut guest, host);
    counts(guest.run(host)?, READS)
}

fn waits(host: &Host, row: &Row) -> Result<Counts> {
    // The node is held open: closing it for the last time would write its pages at once.
    let disk = workloads::disk_node(Mode::Virtio, 0);
    let queue = disk.replace("/dev/", "/sys/block/") + "/queue";
    let vm = "/proc/sys/vm";
    let script = format!(
        "echo 0 > {vm}/dirty_writeback_centisecs; echo 90 > {vm}/dirty_ratio; echo 80 > \
         {vm}/dirty_background_ratio; \
         echo 4 > {queue}/max_sectors_kb; exec 9<>{disk} && dd if=/dev/urandom of={disk} bs=64k \
         count={} 2>/dev/null && \
         dd if=/dev/zero of=/tmp/others bs=1M count={OTHERS} 2>/dev/null && \
         workload marker 1 && sync && workload marker 2",
        PAGES / 16
    );
    let store = format!("path={},size=128M", host.path("hopt-swap.img"));
    host.script(&format!("rm -f {}", host.path("hopt-swap.img")))?;
    let mut guest = Guest::new(Mode::Virtio, squeezed::begun(&script));
    prepare(&mut guest, host, row)?;
    guest
        .flags
        .extend(squeezed::flags(host, &guest.name, &store));
    let outcome = squeezed::squeezed(host, &guest, RESIDENT)?.wait()?;
    outcome.check()?;
    counts(outcome, PAGES)
}

fn counts(outcome: crate::system::guest::Outcome, operations: u32) -> Result<Counts> {
    let [window]: &[Value; 1] = outcome
        .windows()
        .try_into()
        .context("one window in the ledger")?;
    let counts = Counts::of(window, &outcome.ledger["whole"], operations)?;
    ensure!(counts.maps > 0.0, "no page was mapped in the window");
    Ok(counts)
}

/// Returns what the hints save: faults of the sidecore, and waits of devices, in percent of those
/// without any hint.
fn removed(rows: &[Measured]) -> Vec<(String, f64)> {
    let counts = |name: &str| {
        let found = rows.iter().find(|(own, _)| *own == name);
        found.map(|(_, counts)| counts)
    };
    let percent = |of: f64, base: f64| 100.0 * (1.0 - of / base);
    let mut removed = Vec::new();
    for (key, row) in [
        ("hopt_faults_removed_percent", "hopt_all"),
        ("hopt_faults_removed_percent_populate", "hopt_populate"),
        ("hopt_faults_removed_percent_cache", "hopt_cache"),
    ] {
        if let Some((none, own)) = counts(NONE).zip(counts(row)) {
            removed.push((key.to_owned(), percent(own.faults, none.faults)));
        }
    }
    if let Some((none, own)) = counts(SQUEEZED_NONE).zip(counts("hopt_gather")) {
        let percent = percent(own.pends, none.pends);
        removed.push(("hopt_pends_removed_percent".to_owned(), percent));
    }
    removed
}

fn table(rows: &[Measured]) -> String {
    let mut text = format!(
        "\nfor 1,000 reads into new pages (hopt_gather…: pages written that were absent)\n  \
         {:<18}{:>10}{:>10}{:>10}{:>10}{:>12}\n",
        "", "faults", "waits", "maps", "asked for", "MiB ahead"
    );
    for (name, counts) in rows {
        let Counts {
            faults,
            pends,
            maps,
            gathered,
            populated,
        } = counts;
        let _ = writeln!(
            text,
            "  {name:<18}{faults:>10.1}{pends:>10.1}{maps:>10.0}{gathered:>10.1}{populated:>12.0}"
        );
    }
    for (key, value) in removed(rows) {
        let _ = writeln!(text, "  {key:<38}{value:>9.1}");
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(name: &'static str, faults: u32, pends: u32) -> Measured {
        let window = json!({
            "sidecore": { "minor_faults": faults, "major_faults": 1 },
            "owner": { "pends": pends },
            "paravirtual": { "maps": 8, "gathered": 2, "populated": 0 }
        });
        let whole = json!({ "paravirtual": { "populated": 31 } });
        let counts = Counts::of(&window, &whole, 2).expect("all are there");
        (name, counts)
    }

    #[test]
    fn counts_are_for_1000_operations_and_windows_of_the_whole_run() {
        let (_, counts) = row(NONE, 9, 4);
        let expected = Counts {
            faults: 5000.0,
            pends: 2000.0,
            maps: 4000.0,
            gathered: 1000.0,
            populated: 31.0,
        };
        assert_eq!(counts, expected);
        let error = Counts::of(&json!({}), &json!({}), 2).expect_err("nothing is there");
        assert!(error.to_string().contains("minor_faults"), "{error}");
    }

    #[test]
    fn each_kind_is_compared_with_its_own_row_without_hints() {
        let rows = [
            row(NONE, 99, 0),
            row("hopt_populate", 9, 0),
            row("hopt_all", 4, 0),
            row(SQUEEZED_NONE, 50, 40),
            row("hopt_gather", 40, 10),
        ];
        let expected = [
            ("hopt_faults_removed_percent", 95.0),
            ("hopt_faults_removed_percent_populate", 90.0),
            ("hopt_pends_removed_percent", 75.0),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value));
        assert_eq!(removed(&rows), expected);
        assert!(table(&rows).contains("95.0"));
        assert!(removed(&rows[1..3]).is_empty());
    }
}
