//! Tables of the figures, and the page of results.

use std::fmt::Write;

use report::Object;
use serde_json::Value;

use super::matrix::{Boot, round};
use super::peer::COUNTS;

/// Columns of the tables: a heading, and the key of a window.
const EXITS: [(&str, &str); 10] = [
    ("total", "total_exits_per_1000"),
    ("without *", "compared_exits_per_1000"),
    ("registers", "iommu_exits_per_1000"),
    ("doorbells", "doorbell_exits_per_1000"),
    ("devices", "other_device_exits_per_1000"),
    ("interrupt*", "interrupt_exits_per_1000"),
    ("APIC", "apic_exits_per_1000"),
    ("hlt*", "hlt_exits_per_1000"),
    ("timer*", "timer_exits_per_1000"),
    ("memory", "memory_exits_per_1000"),
];
const CALLS: [(&str, &str); 12] = [
    ("maps", "maps_per_1000"),
    ("unmaps", "unmaps_per_1000"),
    ("ended", "mappings_unmapped_per_1000"),
    ("page inv.", "page_invalidations_per_1000"),
    ("domain inv.", "domain_invalidations_per_1000"),
    ("hits", "hits_per_1000"),
    ("pinned", "pinned"),
    ("peak", "pinned_peak"),
    ("guest's", "guest_pages"),
    ("stale most", "stale_max"),
    ("allowed", "stale_allowed"),
    ("oldest ns", "stale_ns_max"),
];

/// Renders a line for each window of a boot, as it ends.
pub fn lines(boot: &Boot) -> String {
    let mut text = String::new();
    for row in &boot.rows {
        let (per_io, sums) = (row.per_io(), row.sums());
        let per = |value: f64| round(value / f64::from(row.requests));
        let _ = writeln!(
            text,
            "  {:<16} {:<11} exits {:>6} compared {:>6} registers {:>5} maps {:>5} unmaps {:>5} \
             hits {:>5} of a request",
            row.policy.name(),
            row.work.name(),
            round(per_io.total),
            round(per_io.compared()),
            per(row.register_exits()),
            per(sums.maps),
            per(sums.unmaps),
            per(sums.hits),
        );
    }
    let _ = writeln!(
        text,
        "  locked: {} KiB at most, {} KiB without drivers; refused DMA: {}",
        boot.locked_max_kib,
        boot.locked_after_detach_kib,
        boot.faults.faults.len()
    );
    text
}

fn rows(object: &Object) -> &[Value] {
    let rows = object.keys().get("windows").and_then(Value::as_array);
    rows.map_or(&[], Vec::as_slice)
}

fn texts<'a>(object: &'a Object, key: &str) -> Vec<&'a str> {
    let list = object.keys().get(key).and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// Renders a number of a table.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::Number(number) => match number.as_f64() {
            Some(float) if float.fract() != 0.0 => format!("{float:.1}"),
            Some(float) => format!("{float:.0}"),
            None => number.to_string(),
        },
        other => other.to_string(),
    }
}

fn table(text: &mut String, object: &Object, columns: &[(&str, &str)]) {
    let heads: Vec<&str> = columns.iter().map(|(head, _)| *head).collect();
    let _ = writeln!(text, "| guest | host | work | {} |", heads.join(" | "));
    let _ = writeln!(text, "|---|---|---{}|", "|--:".repeat(columns.len()));
    for row in rows(object) {
        let name = |key: &str| row[key].as_str().unwrap_or("");
        let cells: Vec<String> = columns.iter().map(|(_, key)| cell(&row[*key])).collect();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            name("guest"),
            name("policy"),
            name("work"),
            cells.join(" | ")
        );
    }
}

/// Renders the tables that are printed at the end.
pub fn tables(object: &Object) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "\nexits of 1,000 requests (*: depends on time, not compared)\n"
    );
    table(&mut text, object, &EXITS);
    let _ = writeln!(
        text,
        "\ncalls of VFIO for 1,000 requests; pages, and stale mappings of the device that works\n"
    );
    table(&mut text, object, &CALLS);
    text.push('\n');
    for line in texts(object, "judged") {
        let _ = writeln!(text, "{line}");
    }
    for line in texts(object, "failed") {
        let _ = writeln!(text, "failed: {line}");
    }
    text
}

/// Parts of the native keys, with their descriptions.
const NATIVE: [(&str, &str); 7] = [
    ("poll", "the sidecore polls"),
    (
        "invalidation",
        "— of that the unit's part: an emulated device, not told",
    ),
    ("shadow", "— the shadow's, with calls made in place"),
    (
        "hand_over",
        "— the hand-over to the thread that makes the call",
    ),
    ("logic", "— shadow and hand-over"),
    ("sleep", "the sidecore sleeps, and is woken"),
    ("package", "the sidecore polls on another package"),
];

fn native(text: &mut String, object: &Object) {
    let _ = writeln!(
        text,
        "| TSC cycles, median (min to max of runs) | map, 1 page | unmap, 1 page | map, 32 pages | \
         unmap, 32 pages |"
    );
    let _ = writeln!(text, "|---|--:|--:|--:|--:|");
    for (part, says) in NATIVE {
        let cell = |call: &str, pages: u32| {
            let key = format!("{call}_cycles_{pages}_{part}");
            let of = |suffix: &str| object.get(&format!("{key}{suffix}"));
            match (of(""), of("_min"), of("_max")) {
                (Some(median), Some(min), Some(max)) => {
                    format!("{median:.0} ({min:.0} to {max:.0})")
                }
                (Some(median), ..) => format!("{median:.0}"),
                _ => "-".into(),
            }
        };
        let cells = [("map", 1), ("unmap", 1), ("map", 32), ("unmap", 32)];
        let cells = cells.map(|(call, pages)| cell(call, pages)).join(" | ");
        let _ = writeln!(text, "| {says} | {cells} |");
    }
    let ratio = |call: &str, pages: u32| match object.get(&format!("{call}_ratio_{pages}")) {
        Some(ratio) => format!("{ratio:.1}"),
        None => "-".into(),
    };
    let _ = writeln!(
        text,
        "| polling, ÷ an emulated device | {} | {} | {} | {} |",
        ratio("map", 1),
        ratio("unmap", 1),
        ratio("map", 32),
        ratio("unmap", 32)
    );
    let reason = object.text("package_reason");
    if !reason.is_empty() {
        let _ = writeln!(text, "\nNot measured on another package: {reason}.");
    }
}

/// Renders `docs/assign-results.md`.
pub fn page(object: &Object) -> String {
    let mut text = String::from(
        "# Device assignment: results\n\n\
         Made by `make bench-assign` from the figures of one run; do not edit. What is done: \
         `lab/harness/src/assign_lab`, `bench/assign`.\n\
         A stock Debian guest has an NVMe drive and a virtio network card of the lab's host, both \
         behind our emulated VT-d unit. Counts\n\
         come from the exit ledger; in the lab (an emulated host) time means nothing. Cycles are \
         native, over a kernel that does nothing.\n\n",
    );
    for (label, key) in [
        ("machine", "machine"),
        ("kernel", "kernel"),
        ("mode", "mode"),
        ("kernel of the emulated host and of guests", "host_kernel"),
        ("commit", "commit"),
        ("native figures", "native_mode"),
    ] {
        let _ = writeln!(text, "- {label}: {}", object.text(key));
    }
    let _ = writeln!(text, "\n## What is judged\n");
    for line in texts(object, "judged") {
        let _ = writeln!(text, "- {line}");
    }
    for line in texts(object, "failed") {
        let _ = writeln!(text, "- failed: {}", line.lines().next().unwrap_or(""));
    }
    let _ = writeln!(
        text,
        "\n## Cycles of a map and of an unmap, as the guest sees them\n"
    );
    native(&mut text, object);
    let _ = writeln!(
        text,
        "\n## Exits of 1,000 requests\n\n\
         A request is 4 KiB of the drive (`sequential`: through the guest's page cache), or a \
         datagram and its\n\
         answer. The guest's name says its registers, and how its kernel unmaps (`lazy`: DMA-FQ). \
         A cause with * depends on time.\n\n\
         A submission is one store, one exit where registers trap. There Linux also reads the \
         fault status while it waits, an exit each,\n\
         so that it takes the more of them the longer the host's call takes: `trap` has more than \
         one exit for a map or an unmap.\n"
    );
    table(&mut text, object, &EXITS);
    let _ = writeln!(
        text,
        "\n## Calls, pages and stale mappings\n\n\
         Calls and invalidations of 1,000 requests, of both devices; pages of 4 KiB and stale \
         mappings of the device that\n\
         works: *ended* are mappings that the unmap calls ended, *stale most* and *oldest* since \
         the policy was set, beside what it\n\
         allows. Where there is no IOMMU all memory is pinned. Stale mappings may be 10 s old \
         here, since the lab is slow: numbers bound them.\n\
         A read returns to the same buffer, so an optimistic host finds it again; each write is \
         from another page, at the same IOVA.\n"
    );
    table(&mut text, object, &CALLS);
    peer(&mut text, object);
    text
}

/// Renders the comparison with QEMU.
fn peer(text: &mut String, object: &Object) {
    let reason = object.text("qemu_reason");
    if reason.is_empty() && object.get("qemu_locked_kib").is_none() {
        return;
    }
    let _ = writeln!(
        text,
        "\n## QEMU beside\n\n\
         Its `intel-iommu` in caching mode (registers trap) and `vfio-pci`, the same drive, kernel \
         and initramfs, in the same lab: exits\n\
         of one request as KVM counts them for the whole guest; an access to a register is one of \
         `mmio_exits`.\n"
    );
    if !reason.is_empty() {
        let _ = writeln!(
            text,
            "Not measured: {}.",
            reason.lines().next().unwrap_or("")
        );
        return;
    }
    let _ = writeln!(text, "| QEMU | {} | locked, KiB |", COUNTS.join(" | "));
    let _ = writeln!(text, "|---{}|--:|", "|--:".repeat(COUNTS.len()));
    for (name, says) in [("qemu", "strict"), ("qemu_none", "no IOMMU")] {
        let number = |key: String| match object.get(&key) {
            Some(number) => format!("{number:.2}"),
            None => "-".into(),
        };
        for work in ["read", "write"] {
            let cells = COUNTS.map(|count| number(format!("{name}_{work}_{count}_per_io")));
            let locked = object.get(&format!("{name}_locked_kib"));
            let locked = locked.map_or("-".into(), |kib| format!("{kib:.0}"));
            let _ = writeln!(
                text,
                "| {says}, {work} | {} | {locked} |",
                cells.join(" | ")
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_page_names_what_was_missed_failed_or_not_measured() {
        let mut object = Object::default();
        object.value("judged", json!(["a_figure: 3 (at most 2): missed"]));
        object.value(
            "failed",
            json!(["kills: no second guest\nwith its console"]),
        );
        object.value("package_reason", "all CPUs are of one package");
        object.number("map_cycles_1_poll", 25_000.4);
        object.value(
            "windows",
            json!([{ "guest": "shared_strict", "policy": "strict", "work": "read", "total_exits_per_1000": 4100.5,
                     "maps_per_1000": 1000.0, "stale_allowed": null }]),
        );
        let page = page(&object);
        for line in [
            "- a_figure: 3 (at most 2): missed",
            "- failed: kills: no second guest",
            "Not measured on another package: all CPUs are of one package.",
        ] {
            assert!(page.lines().any(|it| it == line), "{line:?}:\n{page}");
        }
        assert!(page.contains("| the sidecore polls | 25000 | - | - | - |"));
        assert!(page.contains("| shared_strict | strict | read | 4100.5 | - |"));
        assert!(page.contains("| shared_strict | strict | read | 1000 | - |"));
    }
}
