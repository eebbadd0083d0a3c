//! The ledger as a table for people, and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;
use serde_json::Value;

use super::Account;
use super::account::{BalloonFigures, DeviceFigures, ParavirtualFigures, Swap, SwapCounts, Window};

/// Conditions under which the figures were measured.
#[derive(Clone, Debug, Serialize)]
pub struct Conditions {
    /// `none`; `trap`, `logged` or `shared` (VT-d); `virtio`.
    pub mode: String,
    /// Idle policy of the sidecore.
    pub idle: String,
    /// `direct` or `bounce`.
    pub dma: String,
    /// vCPUs.
    pub cpus: u32,
    /// Host kernel release.
    pub host_kernel: String,
    /// Host processor model.
    pub host_cpu: String,
}

#[derive(Serialize)]
struct TaggedWindow<'a> {
    tag: u8,
    #[serde(flatten)]
    window: &'a Window,
}

/// Entries that parts of a machine add to the ledger, by their names. Only some programs have such
/// parts: empty for most.
pub type Findings = BTreeMap<String, Value>;

#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    conditions: &'a Conditions,
    whole: &'a Window,
    windows: Vec<TaggedWindow<'a>>,
    windows_dropped: u64,
    #[serde(skip_serializing_if = "Findings::is_empty")]
    findings: &'a Findings,
}

/// Returns the account, and what other parts have found, as one JSON object.
pub fn json(conditions: &Conditions, account: &Account, findings: &Findings) -> String {
    let document = Document {
        conditions,
        whole: &account.whole,
        windows: account
            .windows
            .iter()
            .map(|(tag, window)| TaggedWindow { tag: *tag, window })
            .collect(),
        windows_dropped: account.dropped,
        findings,
    };
    serde_json::to_string_pretty(&document).expect("plain numbers and strings")
}

/// Windows shown beside the whole run; all of them are in the JSON.
const SHOWN: usize = 5;

/// Name of a row, and its figure.
type Row<T, Value> = (&'static str, fn(&T) -> Value);

/// Exits by cause, the owner's work, and the sidecore.
const ROWS: [Row<Window, i64>; 30] = [
    ("exits, total", |w| w.exits.total as i64),
    ("  iommu registers", |w| w.exits.iommu as i64),
    ("  iommu doorbells", |w| w.exits.iommu_doorbell as i64),
    ("  doorbells", |w| w.exits.doorbell as i64),
    ("  pci configuration", |w| w.exits.pci_config as i64),
    ("  other devices", |w| w.exits.other_device as i64),
    ("  interrupt delivery", |w| w.exits.interrupt as i64),
    ("  local apic", |w| w.exits.apic as i64),
    ("  hlt", |w| w.exits.hlt as i64),
    ("  timer", |w| w.exits.timer as i64),
    ("  pause", |w| w.exits.pause as i64),
    ("  memory", |w| w.exits.memory as i64),
    ("  processor", |w| w.exits.processor as i64),
    ("  unattributed", |w| w.exits.unattributed as i64),
    ("  overlap", |w| w.exits.overlap as i64),
    ("requests served", |w| w.owner.requests as i64),
    ("interrupts sent", |w| w.owner.interrupts as i64),
    ("iotlb hits", |w| w.owner.iotlb_hits as i64),
    ("iotlb misses", |w| w.owner.iotlb_misses as i64),
    ("page walks", |w| w.owner.walks as i64),
    ("invalidations", |w| w.owner.invalidations as i64),
    ("waits completed", |w| w.owner.waits as i64),
    ("leases drained", |w| w.owner.leases_drained as i64),
    ("faults", |w| w.owner.faults as i64),
    ("waits for memory", |w| w.owner.pends as i64),
    ("sidecore page faults", |w| w.sidecore.minor_faults as i64),
    ("  with I/O", |w| w.sidecore.major_faults as i64),
    ("sidecore sleeps", |w| w.sidecore.sleeps as i64),
    ("sidecore busy, ms", |w| {
        (w.sidecore.busy_ns / 1_000_000) as i64
    }),
    ("sidecore cpu, ms", |w| {
        (w.sidecore.cpu_ns / 1_000_000) as i64
    }),
];

/// Places of a swapped guest's pages.
const PAGE_ROWS: [Row<Swap, u64>; 3] = [
    ("pages in memory", |swap| swap.resident),
    ("  in the store", |swap| swap.stored),
    ("  stand for blocks", |swap| swap.tracked),
];

/// Work of the pager.
const SWAP_ROWS: [Row<SwapCounts, u64>; 25] = [
    ("page faults served", |s| s.faults),
    ("  reads prevented", |s| s.prevented),
    ("  looked in vain", |s| s.undecided),
    ("device waits", |s| s.device_waits),
    ("dropped, on a disk", |s| s.dropped_to_disk),
    ("dropped, zeroes", |s| s.dropped_as_zeroes),
    ("swapped out", |s| s.swapped_out),
    ("  requests", |s| s.swap_write_requests),
    ("swapped in", |s| s.swapped_in),
    ("  requests", |s| s.swap_read_requests),
    ("store given back", |s| s.trimmed),
    ("read from images", |s| s.image_pages),
    ("  requests", |s| s.image_requests),
    ("rescued", |s| s.rescued),
    ("zeroed", |s| s.zeroed),
    ("not read, overwritten", |s| s.not_read),
    ("read before a write", |s| s.read_before_a_write),
    ("stale reads", |s| s.stale_reads),
    ("silent swap writes", |s| s.silent_swap_writes),
    ("false reads", |s| s.false_reads),
    ("decayed sequentiality", |s| s.decayed_sequentiality),
    ("false anonymity", |s| s.false_anonymity),
    ("given up by the guest", |s| s.discarded),
    ("in use by devices", |s| s.refused),
    ("pauses", |s| s.pauses),
];

/// The paravirtual IOMMU.
const PARAVIRTUAL_ROWS: [Row<ParavirtualFigures, u64>; 14] = [
    ("iommu requests", |p| p.counts.requests),
    ("  map", |p| p.counts.maps),
    ("  unmap", |p| p.counts.unmaps),
    ("  attach", |p| p.counts.attaches),
    ("  detach", |p| p.counts.detaches),
    ("  refused", |p| p.counts.refused),
    ("  had to wait", |p| p.counts.waits),
    ("mappings removed", |p| p.counts.removed),
    ("  there now", |p| p.mappings),
    ("domains", |p| p.domains),
    ("asked for at a map", |p| p.counts.gathered),
    ("  not all of it", |p| p.counts.unasked),
    ("MiB populated ahead", |p| p.counts.populated),
    ("  given back, kept", |p| p.counts.kept),
];

/// The balloon, and the guest's own figures.
const BALLOON_ROWS: [Row<BalloonFigures, Option<u64>>; 9] = [
    ("balloon's target, pages", |b| Some(b.target)),
    ("  in it", |b| Some(b.actual)),
    ("  put in", |b| Some(b.counts.inflated)),
    ("  taken back", |b| Some(b.counts.deflated)),
    ("  reported free", |b| Some(b.counts.reported)),
    ("  no memory", |b| Some(b.counts.outside)),
    ("guest's free, MiB", |b| b.free.map(|bytes| bytes >> 20)),
    ("guest's available, MiB", |b| {
        b.available.map(|bytes| bytes >> 20)
    }),
    ("guest's major faults", |b| b.major_faults),
];

/// Assigned devices, all together; each by itself is in the JSON.
const DEVICE_ROWS: [Row<DeviceFigures, u64>; 16] = [
    ("pages pinned by devices", |d| d.pinned),
    ("  at most", |d| d.pinned_peak),
    ("  mapped by the guest", |d| d.guest_pages),
    ("    at most", |d| d.guest_pages_peak),
    ("mappings made", |d| d.counts.maps),
    ("  pages", |d| d.counts.mapped_pages),
    ("  found again", |d| d.counts.hits),
    ("  refused", |d| d.counts.refused),
    ("calls to unmap", |d| d.counts.unmaps),
    ("  mappings ended", |d| d.counts.unmapped),
    ("  cut by the guest", |d| d.counts.cut),
    ("mappings stale", |d| d.stale),
    ("  at most", |d| d.stale_max),
    ("pass-through contexts", |d| d.counts.pass_through),
    ("attached elsewhere", |d| d.counts.attached),
    ("DMA refused by the host", |d| d.counts.host_faults),
];

/// The rows of a table, with a column for the whole run and one for each window shown.
struct Rows<'a> {
    columns: Vec<(String, &'a Window)>,
    text: String,
}

impl<'a> Rows<'a> {
    fn new(account: &'a Account) -> Self {
        let first = account.windows.len().saturating_sub(SHOWN);
        let windows = account.windows.iter().enumerate().skip(first);
        let windows = windows.map(|(i, (_, window))| (format!("window {}", i + 1), window));
        let whole = ("whole run".to_owned(), &account.whole);
        let mut rows = Self {
            columns: std::iter::once(whole).chain(windows).collect(),
            text: String::new(),
        };
        let heads = rows.columns.iter().map(|(head, _)| head.clone()).collect();
        rows.push("", heads);
        rows
    }

    /// Appends the row of a figure, unless it is zero or unknown everywhere.
    fn add(&mut self, name: &str, cell: impl Fn(&Window) -> String) {
        let cells: Vec<String> = self.columns.iter().map(|(_, w)| cell(w)).collect();
        if cells.iter().any(|cell| cell != "0" && cell != "-") {
            self.push(name, cells);
        }
    }

    fn push(&mut self, name: &str, cells: Vec<String>) {
        let _ = write!(self.text, "  {name:<22}");
        for cell in cells {
            let _ = write!(self.text, " {cell:>12}");
        }
        self.text.push('\n');
    }
}

/// Returns the account as a table: one column for the whole run and one for each of the last few
/// windows. Rows without anything but zeroes are left out; all of them are in the JSON. Of findings
/// it has the plain numbers.
pub fn table(conditions: &Conditions, account: &Account, findings: &Findings) -> String {
    let mut rows = Rows::new(account);
    for (name, value) in ROWS {
        rows.add(name, |window| value(window).to_string());
    }
    if account.whole.swap.is_some() {
        for (name, value) in PAGE_ROWS {
            let of = |window: &Window| window.swap.as_ref().map_or(0, value);
            rows.add(name, |window| of(window).to_string());
        }
        for (name, value) in SWAP_ROWS {
            let of = |window: &Window| window.swap.as_ref().map_or(0, |swap| value(&swap.counts));
            rows.add(name, |window| of(window).to_string());
        }
    }
    if account.whole.paravirtual.is_some() {
        for (name, value) in PARAVIRTUAL_ROWS {
            let of = |window: &Window| window.paravirtual.as_ref().map_or(0, value);
            rows.add(name, |window| of(window).to_string());
        }
    }
    if account.whole.balloon.is_some() {
        for (name, value) in BALLOON_ROWS {
            rows.add(name, |window| {
                let value = window.balloon.as_ref().and_then(value);
                value.map_or_else(|| "-".into(), |value| value.to_string())
            });
        }
    }
    if !account.whole.devices.is_empty() {
        for (name, value) in DEVICE_ROWS {
            rows.add(name, |window| {
                let sum: u64 = window.devices.iter().map(value).sum();
                sum.to_string()
            });
        }
    }
    title(conditions, account) + &rows.text + &notes(account) + &found(findings)
}

/// Returns a line for each part that has found something: its plain numbers.
fn found(findings: &Findings) -> String {
    let mut text = String::new();
    for (part, values) in findings {
        let values = values.as_object().into_iter().flatten();
        let numbers = values.filter(|(_, value)| value.is_number());
        let numbers: Vec<_> = numbers
            .map(|(key, value)| format!("{key} {value}"))
            .collect();
        let _ = writeln!(text, "  {part}: {}", numbers.join(", "));
    }
    text
}

/// Returns the line above the table.
fn title(conditions: &Conditions, account: &Account) -> String {
    format!(
        "exit ledger: {} exits, {} requests; iommu mode {}, idle {}, dma {}, {} vCPU, host {} \
         ({})\n",
        account.whole.exits.total,
        account.whole.owner.requests,
        conditions.mode,
        conditions.idle,
        conditions.dma,
        conditions.cpus,
        conditions.host_kernel,
        conditions.host_cpu,
    )
}

/// Returns the lines below the table.
fn notes(account: &Account) -> String {
    let whole = &account.whole;
    let mut text = String::new();
    let swap = whole.swap.as_ref();
    if let Some(reason) = swap.and_then(|swap| swap.pause_reason.as_ref()) {
        let _ = writeln!(text, "  last pause: {reason}");
    }
    if !whole.histograms && whole.exits.unattributed != 0 {
        text.push_str(
            "  (unattributed: exits for timers, the local APIC, memory and the processor itself, \
             which the kernel does not tell\n  \
             apart without tracepoints; with --ledger they are, from the first marker that the \
             guest writes)\n",
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions() -> Conditions {
        Conditions {
            mode: "logged".into(),
            idle: "poll".into(),
            dma: "direct".into(),
            cpus: 1,
            host_kernel: "6.12".into(),
            host_cpu: "a processor".into(),
        }
    }

    #[test]
    fn a_table_has_no_row_of_zeroes_and_the_json_has_all() {
        let mut account = Account::default();
        let empty = table(&conditions(), &account, &Findings::new());
        assert_eq!(empty.lines().count(), 2, "{empty}");
        account.whole.exits.total = 7;
        account.whole.exits.hlt = 7;
        account.windows.push((1, Window::default()));
        account.windows[0].1.owner.faults = 3;
        let text = table(&conditions(), &account, &Findings::new());
        assert!(
            text.starts_with("exit ledger: 7 exits, 0 requests; iommu mode logged, "),
            "{text}"
        );
        let rows: Vec<Vec<&str>> = text
            .lines()
            .skip(2)
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            rows,
            [
                vec!["exits,", "total", "7", "0"],
                vec!["hlt", "7", "0"],
                vec!["faults", "0", "3"],
            ]
        );
        let plain = json(&conditions(), &account, &Findings::new());
        assert!(plain.contains("\"doorbell\": 0") && !plain.contains("findings"));
    }

    #[test]
    fn findings_stand_in_the_json_by_the_names_of_their_parts() {
        let findings = Findings::from([("disk1".into(), serde_json::json!({ "blocked": 3 }))]);
        let text = json(&conditions(), &Account::default(), &findings);
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["findings"]["disk1"]["blocked"], 3);
        let text = table(&conditions(), &Account::default(), &findings);
        assert!(text.ends_with("  disk1: blocked 3\n"), "{text}");
    }

    #[test]
    fn unattributed_exits_are_explained_where_there_are_some() {
        let mut account = Account::default();
        assert!(!table(&conditions(), &account, &Findings::new()).contains("(unattributed"));
        account.whole.exits.unattributed = 5;
        assert!(table(&conditions(), &account, &Findings::new()).contains("(unattributed"));
    }
}
