//! Plots, drawn by hand from the report: bars for disks, lines for disks per core and for offered rates.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Result;
use serde_json::{Map, Value};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
/// Left, top, right, bottom of the field.
const FIELD: (f64, f64, f64, f64) = (80.0, 50.0, 700.0, 340.0);
const COLOURS: [&str; 4] = ["#1b6ca8", "#d1495b", "#66a182", "#8d6a9f"];

/// A series: its name and its points; a missing one is left out.
struct Series {
    name: &'static str,
    points: Vec<Option<f64>>,
}

/// Draws what was measured, beside the report.
pub fn draw(keys: &Map<String, Value>, report: &Path) -> Result<()> {
    let get = |key: String| keys.get(&key).and_then(Value::as_f64);
    let plot = |file: &str,
                title: &str,
                unit: &str,
                labels: &[&str],
                key: &dyn Fn(&str, &str) -> String| {
        let series =
            [("exitless", "ours"), ("qemu-storage-daemon", "qsd")].map(|(name, peer)| Series {
                name,
                points: labels.iter().map(|label| get(key(label, peer))).collect(),
            });
        if series
            .iter()
            .all(|series| series.points.iter().all(Option::is_none))
        {
            return Ok(());
        }
        let stem = report.file_stem().unwrap_or_default().to_string_lossy();
        let path = report.with_file_name(format!("{stem}-{file}.svg"));
        fs::write(path, chart(title, unit, labels, &series))
    };
    let disks = [
        "null_d1_poll",
        "null_d32_poll",
        "ram_d1_poll",
        "ram_d32_poll",
        "tmpfs_d1_poll",
        "tmpfs_d32_poll",
    ];
    plot(
        "iops",
        "4 KiB random reads, one core, one disk",
        "IOPS",
        &disks,
        &|row, peer| format!("{row}_{peer}_iops"),
    )?;
    let events = [
        "null_d1_event",
        "null_d32_event",
        "ram_d1_event",
        "tmpfs_d1_event",
    ];
    plot(
        "event",
        "Guests that sleep: median latency",
        "ns",
        &events,
        &|row, peer| format!("{row}_{peer}_p50_ns"),
    )?;
    let counts = ["1", "4", "16", "64", "256"];
    plot(
        "vms",
        "Null disks on one core, depth 4 each: all together",
        "IOPS",
        &counts,
        &|count, peer| format!("vms_{count}_{peer}_iops"),
    )?;
    plot(
        "vms-least",
        "Null disks on one core, depth 4 each: the slowest",
        "IOPS",
        &counts,
        &|count, peer| format!("vms_{count}_{peer}_vm_min_iops"),
    )?;
    let loads = ["10", "1000", "20000", "100000", "burst", "step"];
    plot(
        "open-p50",
        "Median latency by offered rate",
        "ns",
        &loads,
        &|load, peer| format!("open_{load}_{peer}_p50_ns"),
    )?;
    plot(
        "open-cpu",
        "The server's CPU by offered rate",
        "%",
        &loads,
        &|load, peer| format!("open_{load}_{peer}_server_cpu_percent"),
    )?;
    Ok(())
}

/// Bars on a logarithmic scale: ratios are what is compared.
fn chart(title: &str, unit: &str, labels: &[&str], series: &[Series]) -> String {
    let (left, top, right, bottom) = FIELD;
    let values = || {
        series
            .iter()
            .flat_map(|series| series.points.iter().flatten().copied())
    };
    let floor = values()
        .filter(|value| *value > 0.0)
        .fold(f64::INFINITY, f64::min)
        .log10()
        .floor();
    let ceiling = values()
        .fold(f64::MIN_POSITIVE, f64::max)
        .log10()
        .ceil()
        .max(floor + 1.0);
    let y = |value: f64| {
        let part = (value.max(10_f64.powf(floor)).log10() - floor) / (ceiling - floor);
        bottom - part * (bottom - top)
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{left}\" y=\"24\" font-size=\"16\">{title}</text>\n"
    );
    let mut line = |text: String| {
        svg.push_str(&text);
        svg.push('\n');
    };
    let mut power = floor;
    while power <= ceiling {
        let (at, value) = (y(10_f64.powf(power)), short_power(power));
        line(format!(
            "<line x1=\"{left}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>"
        ));
        line(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value} {unit}</text>",
            left - 6.0,
            at + 4.0
        ));
        power += 1.0;
    }
    let group = (right - left) / labels.len() as f64;
    let bar = group * 0.8 / series.len() as f64;
    for (index, label) in labels.iter().enumerate() {
        let start = left + group * index as f64;
        for (which, series) in series.iter().enumerate() {
            let x = start + group * 0.1 + bar * which as f64;
            match series.points.get(index).copied().flatten() {
                Some(value) => {
                    let (at, colour) = (y(value), COLOURS[which % COLOURS.len()]);
                    line(format!(
                        "<rect x=\"{x:.1}\" y=\"{at:.1}\" width=\"{bar:.1}\" height=\"{:.1}\" fill=\"{colour}\"/>",
                        (bottom - at).max(1.0)
                    ));
                    line(format!(
                        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"9\">{}</text>",
                        x + bar / 2.0,
                        at - 3.0,
                        crate::stats::short(value)
                    ));
                }
                None => line(format!(
                    "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"9\">none</text>",
                    x + bar / 2.0,
                    bottom - 3.0
                )),
            }
        }
        line(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            start + group / 2.0,
            bottom + 18.0
        ));
    }
    for (which, series) in series.iter().enumerate() {
        let x = left + 180.0 * which as f64;
        let colour = COLOURS[which % COLOURS.len()];
        line(format!(
            "<rect x=\"{x:.1}\" y=\"372\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
        ));
        line(format!(
            "<text x=\"{:.1}\" y=\"382\">{}</text>",
            x + 18.0,
            series.name
        ));
    }
    let _ = writeln!(svg, "</svg>");
    svg
}

/// A power of ten with a unit prefix.
fn short_power(power: f64) -> String {
    match power as i32 {
        power @ ..0 => format!("{}", 10_f64.powi(power)),
        power @ 0..3 => format!("{}", 10_u32.pow(power as u32)),
        power @ 3..6 => format!("{} k", 10_u32.pow(power as u32 - 3)),
        power => format!("{} M", 10_u64.pow(power as u32 - 6)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_a_bar_per_value_and_says_where_there_is_none() {
        let series = [
            Series {
                name: "a",
                points: vec![Some(10.0), Some(1e6)],
            },
            Series {
                name: "b",
                points: vec![None, Some(0.0)],
            },
        ];
        let svg = chart("title", "IOPS", &["x", "y"], &series);
        assert_eq!(svg.matches("<rect x=").count(), 3 + 2, "bars and legend");
        assert_eq!(svg.matches(">none<").count(), 1);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
