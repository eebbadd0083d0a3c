//! Plots: bar charts by kind of disk, by number of disks per core and by offered rate.

use std::path::Path;
use std::{fs, io};

use report::Object;
use report::svg::{Series, bars};

use super::prices::{PRICED, price_row};

/// Draws the measured figures into SVG files beside the report.
pub fn draw(figures: &Object, report: &Path) -> io::Result<()> {
    let get = |key: String| figures.get(&key);
    let plot = |file: &str,
                title: &str,
                unit: &str,
                labels: &[&str],
                key: &dyn Fn(&str, &str) -> String| {
        let series = [("exitless", "ours"), ("qemu-storage-daemon", "qsd")].map(|(name, peer)| {
            let point = |label: &&str| get(key(label, peer));
            Series::new(name, labels.iter().map(point).collect())
        });
        if series
            .iter()
            .all(|series| series.points.iter().all(Option::is_none))
        {
            return Ok(());
        }
        let stem = report.file_stem().unwrap_or_default().to_string_lossy();
        let path = report.with_file_name(format!("{stem}-{file}.svg"));
        fs::write(path, bars(title, unit, labels, &series))
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
    prices(figures, report)
}

/// Plots the latency and processor time of each idle policy, with 1,000 requests a second.
fn prices(figures: &Object, report: &Path) -> io::Result<()> {
    let of = |key: &str| {
        let point = |idle: &&str| figures.get(&format!("{}_ours_{key}", price_row(idle)));
        PRICED.iter().map(point).collect::<Vec<_>>()
    };
    let p50_us = of("p50_ns").into_iter().map(|ns| ns.map(|ns| ns / 1e3));
    let series = [
        Series::new("median latency, µs", p50_us.collect()),
        Series::new("the server's CPU, %", of("server_cpu_percent")),
    ];
    if series
        .iter()
        .any(|series| series.points.iter().all(Option::is_none))
    {
        return Ok(());
    }
    let stem = report.file_stem().unwrap_or_default().to_string_lossy();
    fs::write(
        report.with_file_name(format!("{stem}-prices.svg")),
        bars(
            "1,000 requests a second at random times, by idle policy",
            "",
            &PRICED,
            &series,
        ),
    )
}
