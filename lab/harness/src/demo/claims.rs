//! Claims of a demo about the measured reads.

use super::column::Column;
use super::figures::Figures;
use super::per_io::{PerIo, round};
use super::windows::ColumnWindows;

/// Sets the figures of the measured reads, and their claims.
pub fn summarize(figures: &mut Figures, windows: &ColumnWindows) {
    windows.set(figures, |column| column.name().into(), "io");
    let median = |column, of: fn(&PerIo) -> f64| windows.median(column, of);
    let shared = |of: fn(&PerIo) -> f64| median(Column::Shared, of);
    let unattributed = shared(|w| w.cause("unattributed"));
    figures.set("unattributed_exits_per_io", round(unattributed));
    let overlap = shared(|w| w.cause("overlap"));
    figures.set("overlap_exits_per_io", round(overlap));
    let above = shared(PerIo::compared) - median(Column::None, PerIo::compared);
    figures.set("shared_above_none_exits_per_io", round(above));
    for column in [Column::Shared, Column::LazyShared] {
        let iommu = median(column, |w| w.cause("iommu"));
        let key = format!("{}_has_no_iommu_exits", column.name());
        figures.claim(&key, iommu == 0.0, || format!("{iommu} per read"));
    }
    let doorbell = shared(|w| w.cause("doorbell"));
    figures.claim("shared_has_no_doorbells", doorbell <= 0.01, || {
        format!("{doorbell} per read")
    });
    let sent: fn(&PerIo) -> f64 = |w| w.interrupts;
    let more = shared(sent) - median(Column::None, sent);
    figures.claim("shared_sends_no_more_interrupts", more <= 0.01, || {
        format!("{more:+.3} per read above no IOMMU")
    });
    figures.claim("shared_total_is_that_of_none", above <= 0.05, || {
        format!("{above:+.3} per read above no IOMMU")
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns figures of which every window has one interrupt a read, and those of `shared` so
    /// many.
    fn with_interrupts(shared: f64) -> Figures {
        let mut figures = Figures::default();
        summarize(
            &mut figures,
            &windows(|column| PerIo {
                interrupts: if column == Column::Shared {
                    shared
                } else {
                    1.0
                },
                ..PerIo::default()
            }),
        );
        figures
    }

    /// Returns one window of each column.
    fn windows(of: impl Fn(Column) -> PerIo) -> ColumnWindows {
        let mut windows = ColumnWindows::new(&Column::ALL);
        for column in Column::ALL {
            windows.add(column, of(column));
        }
        windows
    }

    #[test]
    fn an_interrupt_more_is_no_success() {
        assert!(with_interrupts(1.0).holds());
        let failed = with_interrupts(1.02).failed().to_vec();
        assert_eq!(failed.len(), 1);
        assert!(failed[0].starts_with("shared_sends_no_more_interrupts: +0.020"));
    }

    #[test]
    fn an_exit_at_a_shared_register_is_no_success_lazy_or_not() {
        for (at, key) in [
            (Column::Shared, "shared_has_no_iommu_exits"),
            (Column::LazyShared, "lazy_shared_has_no_iommu_exits"),
        ] {
            let mut figures = Figures::default();
            summarize(
                &mut figures,
                &windows(|column| {
                    let mut window = PerIo::default();
                    window.causes[0] = if column == at { 0.01 } else { 0.0 };
                    window
                }),
            );
            let [failed] = figures.failed() else {
                panic!("{:?}", figures.failed());
            };
            assert!(failed.starts_with(key), "{failed}");
        }
    }

    #[test]
    fn each_column_has_its_total_in_the_report() {
        let mut figures = Figures::default();
        let totals = [6.0, 11.0, 10.0, 6.25, 7.5, 6.5, 8.125];
        summarize(
            &mut figures,
            &windows(|column| PerIo {
                total: totals[column as usize],
                ..PerIo::default()
            }),
        );
        for (key, total) in [
            ("none_total_exits_per_io", 6.0),
            ("trap_total_exits_per_io", 11.0),
            ("shared_total_exits_per_io", 6.25),
            ("lazy_trap_total_exits_per_io", 7.5),
            ("lazy_shared_total_exits_per_io", 6.5),
            ("default_total_exits_per_io", 8.125),
        ] {
            assert_eq!(figures.number(key), total, "{key}");
        }
        let spread = figures.get("default_total_exits_per_io_spread");
        assert!(spread.is_null(), "one window has no spread: {spread}");
    }
}
