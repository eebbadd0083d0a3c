//! Tables of the figures, and the page of results.

use std::fmt::Write;

use report::Object;
use serde_json::Value;

use super::figures::{GUESTS, cell};
use super::plan::{Mover, Work};

/// Columns: a heading, the suffix of the key, and decimals.
const COLUMNS: [(&str, &str, usize); 11] = [
    ("packets", "packets", 0),
    ("doorbell", "doorbell_per_packet", 3),
    ("interrupt*", "interrupt_per_packet", 3),
    ("other*", "other_per_packet", 3),
    ("hlt*", "hlt_per_packet", 3),
    ("timer*", "timer_per_packet", 3),
    ("APIC", "apic_per_packet", 3),
    ("memory", "memory_per_packet", 3),
    ("total*", "total_per_packet", 3),
    ("spread", "total_per_packet_spread", 3),
    ("calls*", "calls_per_packet", 3),
];

const HEAD: &str = "# Network of guests on one core: exits counted

Made by `make bench-serve-net-lab` (or `make bench-serve-net-lab-docs`, from the figures of the last run); do not edit. What is done:
`lab/harness/src/serve_net_lab`. The figures of ELVIS (SYSTOR 2012, ATC 2013) as counts: 1, 2, 4 and 7 stock Debian guests, their
network served by one core of `exitless serve`, which sleeps whenever it is idle (`notify`), polls (`poll`) or does either by load
(`adaptive`), or by the kernel's vhost-net (`vhost`). Behind each guest is a TAP interface, and behind that the kernel of the host.
Counts come from the exit ledger and from the guest's kernel; in the lab (an emulated host) time means nothing.

";

const STREAM: &str = "A TCP connection that the guest writes to in pieces of 64 bytes, a system call each, with Nagle's algorithm (netperf's
and iperf3's default), to the host's kernel.";
const RR: &str = "A datagram of 8 bytes and its answer, one at a time (netperf's UDP_RR): two \
     packets a transaction.";
const RECEIVE: &str = "A TCP connection that the guest reads from, 4 KiB at a time: nearly all \
     packets come from the host.";

/// Renders the table of one work.
fn table(text: &mut String, object: &Object, work: Work) {
    let heads = COLUMNS.map(|(head, ..)| head).join(" | ");
    let _ = writeln!(text, "| guests | moved by | {heads} |");
    let _ = writeln!(text, "|--:|---{}|", "|--:".repeat(COLUMNS.len()));
    for guests in GUESTS {
        for mover in Mover::ALL {
            let prefix = cell(work, guests, mover);
            let number = |key: &str, digits: usize| {
                let value = object.get(&format!("{prefix}_{key}"));
                value.map(|value| format!("{:.digits$}", value + 0.0))
            };
            let cells = COLUMNS.map(|(_, key, digits)| number(key, digits));
            let is_measured = cells.iter().any(Option::is_some);
            let cells = match is_measured {
                true => cells.map(|cell| cell.unwrap_or("-".into())).join(" | "),
                // In the first column, so that the others are empty.
                false => format!("not measured{}", " | -".repeat(COLUMNS.len() - 1)),
            };
            let _ = writeln!(text, "| {guests} | {} | {cells} |", mover.name());
        }
    }
}

fn daemon(text: &mut String, object: &Object) {
    let _ = writeln!(
        text,
        "| guests | idle policy | chains | kicks of 1,000 | calls of 1,000 |\n|--:|---|--:|--:|--:|"
    );
    for guests in GUESTS {
        for mover in Mover::SERVE {
            let number = |key: &str, digits: usize| {
                let key = format!("elvis_{guests}_{}_daemon_{key}", mover.name());
                let value = object.get(&key);
                value.map_or("-".into(), |value| format!("{value:.digits$}"))
            };
            let _ = writeln!(
                text,
                "| {guests} | {} | {} | {} | {} |",
                mover.name(),
                number("requests", 0),
                number("kicks_per_1000", 1),
                number("calls_per_1000", 1)
            );
        }
    }
}

fn texts<'a>(object: &'a Object, key: &str) -> impl Iterator<Item = &'a str> {
    let list = object.keys().get(key).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(Value::as_str)
}

fn judged(text: &mut String, object: &Object) {
    for line in texts(object, "judged") {
        let _ = writeln!(text, "- {line}");
    }
    for line in texts(object, "failed") {
        let _ = writeln!(text, "- failed: {}", line.lines().next().unwrap_or(""));
    }
    let reason = object.text("vhost_reason");
    if !reason.is_empty() {
        let reason = reason.lines().next().unwrap_or("");
        let _ = writeln!(text, "- vhost-net was not measured: {reason}");
    }
}

/// Renders a figure, or that it was not measured.
fn said(object: &Object, key: &str, digits: usize) -> String {
    let value = object.get(key);
    value.map_or("not measured".into(), |value| format!("{value:.digits$}"))
}

/// Renders interrupts sent to a guest: the counts, and the part that hardware and `virt/eli` would
/// save.
fn to_guest(text: &mut String, object: &Object) {
    let of = |work: Work, guests: u32, mover: Mover, key: &str| {
        said(
            object,
            &format!("{}_{key}_per_packet", cell(work, guests, mover)),
            2,
        )
    };
    let poll = |work: Work, guests: u32| of(work, guests, Mover::Poll, "calls");
    let rr = |key: &str| of(Work::Rr, 1, Mover::Poll, key);
    let _ = writeln!(
        text,
        "Polling takes the doorbells away, and no interrupt. A server that has put frames into a \
         ring calls the guest, unless the guest's driver \
         has said that it looks by itself (Linux's NAPI does while it is busy): so calls are \
         coalesced by load and not by a timer. Polled, a \
         packet of the transactions takes {} calls with one guest and {} with seven, one of the \
         stream {} and {}, one of what is received {} \
         and {}.\n",
        poll(Work::Rr, 1),
        poll(Work::Rr, 7),
        poll(Work::Stream, 1),
        poll(Work::Stream, 7),
        poll(Work::Receive, 1),
        poll(Work::Receive, 7),
    );
    let _ = writeln!(
        text,
        "On this host, which delivers interrupts in software, a call to a guest that runs makes it \
         leave (`interrupt`: {} of a packet of the \
         transactions, one guest, polled), and its end of interrupt does too where it is no \
         paravirtual one (`APIC`: {}). With AVIC or \
         APICv and posted interrupts both stay inside: the device's MSI is routed to the \
         processor's posted-interrupt descriptor, and the end \
         of an edge-triggered interrupt is virtual. What they leave is `hlt` ({} of a packet): a \
         processor that has nothing else to do until \
         the answer comes leaves to sleep, and whoever calls it wakes its thread; a guest that \
         polls while idle \
         (`idle=poll`, `cpuidle_haltpoll`) has none. Without either of them, `virt/eli` delivers \
         interrupts of an I/O core to a guest by the guest's \
         own vector, and lets it end them by the real local APIC: no exit for either, on \
         processors that are the guest's alone \
         (`docs/eli.md`); it does so under `exitless-hv`, not for guests of `exitless run`.\n",
        rr("interrupt"),
        rr("apic"),
        rr("hlt"),
    );
}

/// Renders the tables that are printed at the end.
pub fn tables(object: &Object) -> String {
    let mut text = String::new();
    for work in Work::ALL {
        let _ = writeln!(text, "\nexits of a packet, {}\n", work.name());
        table(&mut text, object, work);
    }
    text.push('\n');
    judged(&mut text, object);
    text
}

/// Renders `docs/serve-net-lab-results.md`.
pub fn page(object: &Object) -> String {
    let mut text = HEAD.to_owned();
    for (label, key) in [
        ("machine", "machine"),
        ("kernel", "kernel"),
        ("mode", "mode"),
        ("kernel of the emulated host and of guests", "host_kernel"),
        ("commit", "commit"),
    ] {
        let _ = writeln!(text, "- {label}: {}", object.text(key));
    }
    let _ = writeln!(
        text,
        "- windows: {} of each guest, of {} writes or {} transactions; medians over guests and \
         windows",
        said(object, "windows_per_guest", 0),
        said(object, "writes_per_window", 0),
        said(object, "datagrams_per_window", 0)
    );
    let _ = writeln!(text, "\n## What is judged\n");
    judged(&mut text, object);
    let _ = writeln!(
        text,
        "\n## Exits of a packet\n\n\
         A packet is what guest and server hand over by one chain of descriptors, in either \
         direction: with segmentation \
         offload up to 64 KiB.\n\
         `other` is all that is neither a doorbell nor an interrupt; `hlt`, `timer`, `APIC` and \
         `memory` are parts of it. `calls` are interrupts that the \
         guest's\n\
         processor took from its network device, and no exits. A cause with * depends on time. \
         `spread` is that of the totals.\n"
    );
    for (work, says) in [
        (Work::Stream, STREAM),
        (Work::Rr, RR),
        (Work::Receive, RECEIVE),
    ] {
        let _ = writeln!(text, "### {}\n\n{says}\n", work.name());
        table(&mut text, object, work);
        text.push('\n');
    }
    let _ = writeln!(
        text,
        "## What the server counted\n\n\
         Of each daemon's whole life: pings that waited for it among the chains, and the bulk \
         transfer of one guest.\n"
    );
    daemon(&mut text, object);
    let _ = writeln!(text, "\n## From the host to the guest\n");
    to_guest(&mut text, object);
    let _ = writeln!(
        text,
        "## Segmentation, and a guest's own IOMMU\n\n\
         8 MiB over one TCP connection in writes of 64 KiB, one guest, polled; frames counted at \
         the TAP interface: {} for each MiB from the \
         guest,\n{} to it.\n\n\
         1,000 echo requests from a guest whose IOMMU is before the device (registers logged, \
         strict unmapping: every buffer is a new \
         translation),\n\
         one at a time: {} without an answer; {} misses and {} invalidations for each packet at \
         the server's device TLB.",
        said(object, "tap_frames_per_mib", 1),
        said(object, "tap_frames_per_mib_to_guest", 1),
        said(object, "ping_lost_lab_strict", 0),
        said(object, "misses_per_packet", 3),
        said(object, "invalidations_per_packet", 3),
    );
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_cell_that_was_not_measured_says_so_and_is_no_zero() {
        let mut object = Object::default();
        for (key, value) in [
            ("packets", 800.0),
            ("doorbell_per_packet", 0.0),
            ("interrupt_per_packet", 0.4567),
            ("calls_per_packet", 0.5),
        ] {
            object.number(&format!("elvis_rr_2_poll_{key}"), value);
        }
        object.value("elvis_rr_2_vhost_doorbell_per_packet", Value::Null);
        object.value("vhost_reason", "no module\nand more");
        object.value("failed", json!(["round of 7: no guest\nits console"]));
        object.value("judged", json!(["a: 1 (at most 2): met"]));
        let page = page(&object);
        for line in [
            "| 2 | poll | 800 | 0.000 | 0.457 | - | - | - | - | - | - | - | 0.500 |",
            "| 2 | vhost | not measured | - | - | - | - | - | - | - | - | - | - |",
            "- a: 1 (at most 2): met",
            "- failed: round of 7: no guest",
            "- vhost-net was not measured: no module",
        ] {
            assert!(page.lines().any(|it| it == line), "{line:?}:\n{page}");
        }
        assert!(page.contains("takes not measured calls with one guest"));
        assert!(!page.contains("its console") && !page.contains("and more"));
    }
}
