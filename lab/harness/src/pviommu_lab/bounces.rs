//! Bounce buffers: copies that a stock guest under `swiotlb=force` makes for its disk's reads,
//! without our module (no IOMMU) and with it. The paper's comparison with bounce buffers, as
//! counts: events `swiotlb:swiotlb_bounced` of the guest's own kernel, between the marks of a
//! window of direct 4 KiB reads.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::KERNEL;
use super::figures::Figures;
use crate::system::guest::{Driver, Guest, Mode, Outcome};
use crate::system::host::Host;
use crate::system::workloads;

/// Names of the rows: without our module, and with it.
pub const NAMES: [&str; 2] = [WITHOUT, WITH];

const WITHOUT: &str = "bounces_without";
const WITH: &str = "bounces_with";

/// Reads of a window.
const READS: u32 = 1000;
/// Reads before it.
const WARMUP: u32 = 200;

/// Measures the wanted rows: sets figures with their names, for each read, writes the report after
/// each row, and returns the rows' lines.
///
/// # Errors
/// A guest failed, or has no bounce buffers despite `swiotlb=force`; the report cannot be written.
pub fn measure(
    host: &Host,
    report: &Path,
    figures: &mut Figures,
    wants: &dyn Fn(&str) -> bool,
) -> Result<String> {
    let mut told = String::new();
    for name in NAMES.into_iter().filter(|name| wants(name)) {
        eprintln!("pviommu-lab: {name}");
        let bounced = run(host, name).with_context(|| name)?;
        let each = bounced as f64 / f64::from(READS);
        figures.put(name, json!(each));
        figures.write(report)?;
        told += &format!(
            "  {name}: {bounced} copies to and from bounce buffers in {READS} reads (Linux \
             {KERNEL}, swiotlb=force)\n"
        );
    }
    Ok(told)
}

/// Boots the guest of a row. Returns its number of copies.
fn run(host: &Host, name: &str) -> Result<u64> {
    let (mode, driver) = match name {
        WITH => (Mode::Virtio, Driver::Module(&[])),
        _ => (Mode::None, Driver::Stock),
    };
    let disk = workloads::disk_node(mode, 0);
    // The kernel's log shows that it has the buffers; the counted events lie between the lines that
    // `workload` has written.
    let script = format!(
        "dmesg | grep 'Using software bounce buffering' && mount -t tracefs t /sys/kernel/tracing \
         && cd /sys/kernel/tracing && \
         echo 1 > events/swiotlb/swiotlb_bounced/enable && \
         workload reads {disk} --in-place --count {READS} --warmup {WARMUP} --trace && echo 0 > \
         tracing_on && \
         sed -n '/workload marker 1/,/workload marker 2/p' trace > /tmp/window && \
         echo marks $(grep -c 'workload marker' /tmp/window) && echo bounced $(grep -c \
         swiotlb_bounced: /tmp/window)"
    );
    let mut guest = Guest::new(mode, script);
    guest.driver = driver;
    guest.kernel_options = "swiotlb=force trace_buf_size=4M".into();
    guest.limit = Duration::from_secs(900);
    guest.name = format!("-{name}");
    super::pin(&mut guest, host);
    workloads::add_disk(&mut guest, host, 1, "")?;
    bounced(&guest.run(host)?)
}

/// Returns the count that a guest has printed, of a window with both its marks.
fn bounced(outcome: &Outcome) -> Result<u64> {
    let number = |word: &str| {
        let line = outcome.console.lines().find_map(|line| {
            let number = line.trim().strip_prefix(word)?.trim();
            number.parse::<u64>().ok()
        });
        line.with_context(|| format!("no line {word:?} on the console\n{}", outcome.tail()))
    };
    let marks = number("marks ")?;
    anyhow::ensure!(marks == 2, "the trace has {marks} marks of a window, not 2");
    number("bounced ")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn outcome(console: &str) -> Outcome {
        Outcome {
            exit: 0,
            script: Some(0),
            console: console.into(),
            log: String::new(),
            ledger: Value::Null,
        }
    }

    #[test]
    fn a_count_is_taken_of_a_whole_window_alone() {
        let count = |console: &str| bounced(&outcome(console)).ok();
        assert_eq!(count("marks 2\r\nbounced 4000\r\n"), Some(4000));
        assert_eq!(count("marks 2\nbounced 0\n"), Some(0));
        for console in ["", "marks 1\nbounced 7\n", "marks 2\nbounced $(grep"] {
            assert_eq!(count(console), None, "{console:?}");
        }
    }
}
