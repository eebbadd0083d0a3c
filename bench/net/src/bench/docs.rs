//! The page that is made from the figures.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use report::{Object, short};

use super::record::{KEYS, judged};

const HEAD: &str = "# Network served to other VMMs: results

Made by `make bench-serve-net` (or `make bench-serve-net-docs`, from the figures of the last run); do not edit. What is measured and how: `bench/net/src/bench/mod.rs`.
Our server and DPDK's vhost, driven by its testpmd, on one CPU; the client, `tests/vhost-net`, on another. Servers take turns in
windows; a ratio is of two windows of one round. Medians of rounds, extremes beside them; losses beside gains.

";

/// Rows by server: name in the report, and in the table.
const ROWS: [(&str, &str); 18] = [
    ("net_g2h_split", "guest to host, split"),
    ("net_h2g_split", "host to guest, split"),
    ("net_loop_split", "loop, split"),
    ("net_g2h_packed", "guest to host, packed"),
    ("net_h2g_packed", "host to guest, packed"),
    ("net_loop_packed", "loop, packed"),
    ("net_g2h_split_1518", "guest to host, split, 1,518 bytes"),
    ("net_h2g_split_1518", "host to guest, split, 1,518 bytes"),
    ("net_loop_split_1518", "loop, split, 1,518 bytes"),
    ("net_g2h_packed_1518", "guest to host, packed, 1,518 bytes"),
    ("net_h2g_packed_1518", "host to guest, packed, 1,518 bytes"),
    ("net_loop_packed_1518", "loop, packed, 1,518 bytes"),
    ("net_loop_split_in_order", "loop, split, in order"),
    (
        "net_loop_split_in_order_single",
        "loop, split, in order, not mergeable",
    ),
    ("net_loop_packed_in_order", "loop, packed, in order"),
    (
        "net_loop_packed_in_order_single",
        "loop, packed, in order, not mergeable",
    ),
    ("switch", "from port to port: our switch, testpmd's io"),
    ("ports_7", "seven looped ports in all"),
];

/// Writes the page.
///
/// # Errors
/// The figures cannot be read, or the page not written.
pub fn write(report: &Path, docs: &Path) -> Result<()> {
    let keys = Object::read(report).with_context(|| report.display().to_string())?;
    fs::write(docs, page(&keys)).with_context(|| docs.display().to_string())?;
    println!("written: {}", docs.display());
    Ok(())
}

fn page(keys: &Object) -> String {
    let mut page = HEAD.to_owned();
    let mut line = |text: String| {
        page.push_str(&text);
        page.push('\n');
    };
    for key in ["machine", "kernel", "mode", "commit"] {
        line(format!("- {key}: {}", keys.text(key)));
    }
    for key in ["rounds", "window_ms", "rtt_ns", "load_average"] {
        let value = keys
            .get(key)
            .map_or("not measured".to_owned(), |value| value.to_string());
        line(format!("- {key}: {value}"));
    }
    let away = |whose: &str| {
        let of = |part: &str| number(keys, &format!("interruptions_{whose}_{part}"), 1);
        format!("{} times a second ({} %)", of("per_s"), of("percent"))
    };
    let rate = |whose: &str| keys.get(&format!("interruptions_{whose}_per_s"));
    let both = rate("server").zip(rate("client"));
    // One round trip in a hundred has one of them where it takes a hundredth of the time between
    // two.
    let from = both.map_or("-".to_owned(), |(server, client)| {
        format!("{:.1}", 1e6 / 100.0 / (server + client).max(1.0))
    });
    line(format!(
        "- the server's CPU is taken away from a thread that spins, for more than 5 µs, {}, the \
         client's {}: \
         so the p99 of round trips of {from} µs and more shows these",
        away("server"),
        away("client")
    ));
    line("\n## What is judged\n".to_owned());
    for goal in KEYS {
        line(format!("- {}: {}", goal.key, judged(&goal, keys)));
    }
    line("\n## Frames per second at the receiver, 64 bytes unless said\n".to_owned());
    line(
        "| | ours (min to max) | DPDK (min to max) | ours ÷ DPDK | lost, of sent, ours | DPDK | \
         client's ceiling |"
            .to_owned(),
    );
    line("|---|--:|--:|--:|--:|--:|--:|".to_owned());
    for (key, name) in ROWS {
        line(row(keys, key, name));
    }
    for (title, suffix) in [("ours", ""), ("DPDK", "_dpdk")] {
        line(format!("\n## Ports on one core, {title}\n"));
        line(
            "| ports | frames per second in all | Jain's index | served of a rate each |"
                .to_owned(),
        );
        line("|--:|--:|--:|--:|".to_owned());
        let peer = if suffix.is_empty() { "ours" } else { "dpdk" };
        for count in 1..=7 {
            let served = match suffix {
                "" => number(keys, &format!("ports_{count}_served_of_offered"), 3),
                _ => "-".to_owned(),
            };
            let rate = keys
                .get(&format!("ports_{count}_{peer}"))
                .map_or("-".to_owned(), short);
            let jain = number(keys, &format!("jain_{count}{suffix}"), 4);
            line(format!("| {count} | {rate} | {jain} | {served} |"));
        }
    }
    line("\n## Latencies\n".to_owned());
    line(
        "| | alone | beside a flooding port | p50 alone | p50 beside | frames per second of the \
         flood | µs between the client's looks |"
            .to_owned(),
    );
    line("|---|--:|--:|--:|--:|--:|--:|".to_owned());
    for (key, name) in [
        ("quiet_port_p99_vs_alone", "quiet port, ours, p99 µs"),
        ("quiet_port_p99_vs_alone_dpdk", "quiet port, DPDK, p99 µs"),
        ("disk_p99_vs_alone", "quiet disk, ours, p99 µs"),
    ] {
        let micros = |part: &str| {
            let value = keys.get(&format!("{key}_{part}_ns"));
            value.map_or("-".to_owned(), |ns| format!("{:.1}", ns / 1e3))
        };
        let flood = keys.get(&format!("{key}_flood_mpps"));
        let flood = flood.map_or("-".to_owned(), |rate| format!("{rate:.2} M"));
        line(format!(
            "| {name} | {} | {} | {} | {} | {flood} | {} |",
            micros("alone"),
            micros("beside"),
            micros("alone_p50"),
            micros("beside_p50"),
            micros("client_look")
        ));
    }
    line("\n| one frame there and back | ours | DPDK |\n|---|--:|--:|".to_owned());
    for (part, name) in [("p50", "p50, ns"), ("p99", "p99, ns")] {
        let of = |peer: &str| match part {
            "p50" => number(keys, &format!("rr_p50_{peer}"), 0),
            _ => number(keys, &format!("rr_p99_{peer}_ns"), 0),
        };
        line(format!("| {name} | {} | {} |", of("ours"), of("dpdk")));
    }
    page
}

fn number(keys: &Object, key: &str, digits: usize) -> String {
    let value = keys.get(key);
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

fn row(keys: &Object, key: &str, name: &str) -> String {
    let rate = |peer: &str| {
        let of = |part: &str| keys.get(&format!("{key}_{peer}{part}"));
        match (of(""), of("_min"), of("_max")) {
            (Some(median), Some(min), Some(max)) => {
                format!("{} ({} to {})", short(median), short(min), short(max))
            }
            _ => "-".to_owned(),
        }
    };
    let lost = |peer: &str| {
        let of = |part: &str| keys.get(&format!("{key}_{peer}_{part}"));
        match (of("lost"), of("sent")) {
            (Some(lost), Some(sent)) if sent > 0.0 => format!("{lost} of {}", short(sent)),
            _ => "-".to_owned(),
        }
    };
    let ratio = match key {
        "switch" => "switch_vs_testpmd_io".to_owned(),
        _ => format!("{key}_vs_dpdk"),
    };
    let ceiling = key
        .strip_prefix("net_")
        .and_then(|cell| keys.get(&format!("ceiling_{cell}_mpps")));
    let mut line = String::new();
    // Writing to a string does not fail.
    let _ = write!(
        line,
        "| {name} | {} | {} | {} | {} | {} | {} |",
        rate("ours"),
        rate("dpdk"),
        number(keys, &ratio, 2),
        lost("ours"),
        lost("dpdk"),
        ceiling.map_or("-".to_owned(), |mpps| short(mpps * 1e6)),
    );
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_without_figures_says_so_and_one_with_them_has_them() {
        let mut keys = Object::default();
        let empty = page(&keys);
        assert!(empty.contains("- rr_p50_vs_dpdk: not measured"));
        assert!(empty.contains("| loop, split | - | - | - | - | - | - |"));
        for (key, value) in [
            ("", 5e6),
            ("_min", 4e6),
            ("_max", 6e6),
            ("_lost", 0.0),
            ("_sent", 2e6),
        ] {
            keys.number(&format!("net_loop_split_ours{key}"), value);
        }
        keys.number("net_loop_split_vs_dpdk", 0.876);
        let full = page(&keys);
        let row = "| loop, split | 5.00 M (4.00 M to 6.00 M) | - | 0.88 | 0 of 2.00 M | - | - |";
        assert!(full.contains(row), "{full}");
    }
}
