//! The demo's table, and its JSON file.

use std::fmt::Write;

use super::figures::Figures;
use super::windows::ColumnWindows;

/// Returns a table's first cell. It says whether the host is emulated, so that this stands beside
/// the figures.
pub fn title(figures: &Figures, what: &str) -> String {
    match figures.get("host_is_emulated").as_bool() {
        Some(true) => format!("{what}, emulated host"),
        _ => what.to_owned(),
    }
}

/// Describes the machine and the conditions of the measurement.
pub fn conditions(figures: &Figures) -> String {
    format!(
        "{}; host kernel {}\n{}\n",
        figures.text("host"),
        figures.text("kernel"),
        figures.text("mode"),
    )
}

/// Describes the program's choices for a guest with default options.
pub fn defaults(figures: &Figures) -> String {
    format!(
        "no flags: --iommu-mode {} --idle {}, and the stock kernel's own unmapping, which is lazy",
        figures.text("default_iommu_mode"),
        figures.text("default_idle"),
    )
}

/// Returns "yes", or "NO".
pub fn yes(figures: &Figures, key: &str) -> &'static str {
    match figures.get(key).as_bool() {
        Some(true) => "yes",
        _ => "NO",
    }
}

/// Appends the claims that do not hold, a paragraph each.
pub fn failures(figures: &Figures, text: &mut String) {
    for claim in figures.failed() {
        let _ = writeln!(text, "\n  DOES NOT HOLD: {claim}");
    }
}

/// Renders the table for a reader.
pub fn table(figures: &Figures, windows: &ColumnWindows, adaptive: &ColumnWindows) -> String {
    let number = |key: &str| figures.number(key);
    let mut text = format!(
        "\nExits per 4 KiB read: {} reads a window, medians of {} windows, in which guests take \
         turns\n{}",
        number("reads_per_window"),
        number("windows"),
        conditions(figures),
    );
    windows.table(&mut text, &title(figures, "exits a read"), &[]);
    let _ = writeln!(
        text,
        "\n  {}\n  shared takes {:+.3} exits per read more than no IOMMU (* excluded)",
        defaults(figures),
        number("shared_above_none_exits_per_io"),
    );
    let shown = ["iommu", "doorbell", "memory", "unattributed", "overlap"];
    adaptive.table(&mut text, &title(figures, "one window"), &shown);
    let _ = write!(
        text,
        "\n  data verified in both directions   {}\n  ping through virtio-net            {}\n  \
         rogue DMA blocked, seen by Linux   {}\n  idle guest, shared, adaptive       \
         {:.1} exits/s, sidecore {:.2} % of a CPU\n  wall clock                         {} s\n",
        yes(figures, "data_verified"),
        yes(figures, "ping_ok"),
        yes(figures, "rogue_dma_blocked"),
        number("idle_exits_per_s"),
        number("idle_sidecore_cpu_percent"),
        number("wall_s"),
    );
    failures(figures, &mut text);
    text
}

#[cfg(test)]
mod tests {
    use super::super::column::Column;
    use super::super::per_io::PerIo;
    use super::*;

    fn windows(columns: &'static [Column], idle: &'static str) -> ColumnWindows {
        let mut windows = ColumnWindows::with_idle(columns, idle);
        for (at, column) in columns.iter().enumerate() {
            windows.add(
                *column,
                PerIo {
                    total: at as f64,
                    sidecore_percent: 100.0 - at as f64,
                    ..PerIo::default()
                },
            );
        }
        windows
    }

    fn tables(figures: &Figures) -> String {
        let adaptive = windows(&Column::STRICT, "adaptive");
        table(figures, &windows(&Column::ALL, "poll"), &adaptive)
    }

    #[test]
    fn a_table_of_the_lab_says_inside_that_its_host_is_emulated() {
        let mut figures = Figures::default();
        let said = |figures: &Figures| {
            let all = tables(figures);
            let (_, rows) = all.split_once("take turns").expect("a heading");
            rows.contains("emulated host")
        };
        assert!(!said(&figures), "nobody said so");
        figures.set("host_is_emulated", true);
        assert!(said(&figures));
    }

    #[test]
    fn strict_lazy_and_defaults_stand_side_by_side_with_their_sidecores() {
        let mut figures = Figures::default();
        figures.set("default_idle", "adaptive");
        let text = tables(&figures);
        let line = |begin: &str| {
            let mut lines = text.lines();
            let found = lines.find(|line| line.trim_start().starts_with(begin));
            found.unwrap_or_else(|| panic!("no {begin:?} in\n{text}"))
        };
        let words = |begin: &str| -> Vec<String> {
            let words = line(begin).split_whitespace();
            words.map(str::to_owned).collect()
        };
        assert_eq!(
            words("no IOMMU"),
            [
                "no", "IOMMU", "trap", "logged", "shared", "trap", "shared", "no", "flags"
            ]
        );
        assert_eq!(
            words("total ")[1..],
            [
                "0.000", "1.000", "2.000", "3.000", "4.000", "5.000", "6.000"
            ]
        );
        assert_eq!(
            words("sidecore, %").last().map(String::as_str),
            Some("94.0")
        );
        assert!(text.contains("--idle adaptive, and the stock kernel's own unmapping"));
        assert_eq!(text.matches("strict unmapping, --idle poll").count(), 1);
        assert_eq!(text.matches("strict unmapping, --idle adaptive").count(), 1);
        // A head of several columns begins at the first of them.
        let above = line("exits a read");
        assert_eq!(above.find("lazy, --idle poll"), Some(2 + 30 + 4 * 10 + 2));
    }
}
