//! The demo's table, and its JSON file.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::figures::{CAUSES, Figures, PerRead};
use crate::system::guest::Mode;

/// Writes the figures; the directory is made if it is not there.
pub fn write(path: &Path, figures: &Figures) -> Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    }
    let text = serde_json::to_string_pretty(&figures.json()).expect("plain numbers and strings");
    fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
}

fn heading(cause: &str) -> &str {
    match cause {
        "iommu" => "IOMMU registers",
        "doorbell" => "doorbells",
        "pci_config" => "PCI configuration",
        "other_device" => "other devices",
        "interrupt" => "interrupt delivery *",
        "apic" => "local APIC",
        "hlt" => "hlt *",
        "timer" => "timer *",
        "pause" => "pause",
        "processor" => "processor",
        other => other,
    }
}

/// The modes as heads of columns.
fn heads(text: &mut String, title: &str) {
    let _ = write!(text, "\n  {title:<28}");
    for mode in Mode::ALL {
        let name = if mode == Mode::None {
            "no IOMMU"
        } else {
            mode.name()
        };
        let _ = write!(text, "{name:>10}");
    }
    text.push('\n');
}

fn row(text: &mut String, name: &str, of: impl Fn(Mode) -> f64) {
    let _ = write!(text, "  {name:<28}");
    for mode in Mode::ALL {
        // Adding zero turns a negative one into a plain one.
        let _ = write!(text, "{:>10.3}", of(mode) + 0.0);
    }
    text.push('\n');
}

/// The table a person reads.
pub fn table(figures: &Figures) -> String {
    let text_of = |key: &str| figures.get(key).as_str().unwrap_or("?").to_owned();
    let number = |key: &str| figures.get(key).as_f64().unwrap_or(f64::NAN);
    let mut text = format!(
        "\nExits per 4 KiB read: {} reads a window, medians of {} interleaved windows, --idle poll\n\
         {}; host kernel {}\n{}\n",
        number("reads_per_window"),
        number("windows"),
        text_of("host"),
        text_of("kernel"),
        text_of("mode"),
    );
    heads(&mut text, "");
    for (i, cause) in CAUSES.iter().enumerate() {
        let of = |mode| figures.median(mode, |w: &PerRead| w.causes[i]);
        row(&mut text, heading(cause), of);
    }
    row(&mut text, "total", |mode| figures.median(mode, |w| w.total));
    row(&mut text, "total without *", |mode| {
        figures.median(mode, PerRead::compared)
    });
    row(&mut text, "unmaps waited for", |mode| {
        figures.median(mode, |w| w.waits)
    });
    row(&mut text, "interrupts sent", |mode| {
        figures.median(mode, |w| w.interrupts)
    });
    let _ = writeln!(
        text,
        "\n  shared takes {:+.3} exits per read more than no IOMMU (* excluded)",
        number("shared_above_none_exits_per_io"),
    );
    heads(&mut text, "one window, --idle adaptive");
    for cause in ["iommu", "doorbell", "memory", "unattributed", "overlap"] {
        let of = |mode| figures.adaptive(mode).cause(cause);
        row(&mut text, heading(cause), of);
    }
    row(&mut text, "total without *", |mode| {
        figures.adaptive(mode).compared()
    });
    let yes = |key: &str| {
        if figures.get(key).as_bool() == Some(true) {
            "yes"
        } else {
            "NO"
        }
    };
    let _ = write!(
        text,
        "\n  data verified in both directions   {}\n  ping through virtio-net            {}\n  \
         rogue DMA blocked, seen by Linux   {}\n  idle guest, shared, adaptive       \
         {:.1} exits/s, sidecore {:.2} % of a CPU\n  wall clock                         {} s\n",
        yes("data_verified"),
        yes("ping_ok"),
        yes("rogue_dma_blocked"),
        number("idle_exits_per_s"),
        number("idle_sidecore_cpu_percent"),
        number("wall_s"),
    );
    for claim in figures.failed() {
        let _ = writeln!(text, "\n  DOES NOT HOLD: {claim}");
    }
    text
}
