//! Host memory that is available to this machine: the pager's limit if there is a pager, else the
//! limit of the process's cgroups, else all of the host's memory.

use std::fs;
use std::path::Path;

use super::super::memory::AskPager;
use super::auto::HostMemory;
use crate::resident::cgroups;

/// Reads the present figures. Returns `None` if the pager or the host gives none.
pub fn look(pager: Option<&AskPager>) -> Option<HostMemory> {
    if let Some(pager) = pager {
        return pager().map(|status| HostMemory {
            used: status.report.present as u64,
            limit: status.report.limit as u64,
            stalled: 0.0,
        });
    }
    let limited = cgroups().into_iter().filter_map(|dir| {
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
        of_cgroup(
            &read("memory.current"),
            &[read("memory.high"), read("memory.max")],
            &read("memory.stat"),
            &read("memory.pressure"),
        )
    });
    // The cgroup whose memory is used most, in proportion to its limit.
    let share = |memory: &HostMemory| memory.used as f64 / memory.limit.max(1) as f64;
    let tightest = limited.max_by(|a, b| share(a).total_cmp(&share(b)));
    tightest.or_else(|| {
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        let meminfo = read(Path::new("/proc/meminfo"));
        of_host(&meminfo, &read(Path::new("/proc/pressure/memory")))
    })
}

/// Returns the figures of a cgroup by the text of its files; `None` if it has no limit. Inactive
/// page cache counts as free, since the kernel can reclaim it at once.
fn of_cgroup(current: &str, limits: &[String], stat: &str, pressure: &str) -> Option<HostMemory> {
    let limits = limits.iter().filter_map(|text| text.trim().parse().ok());
    let cache = number_of(stat, "inactive_file ").unwrap_or(0);
    Some(HostMemory {
        limit: limits.min()?,
        used: current.trim().parse::<u64>().ok()?.saturating_sub(cache),
        stalled: stalled(pressure),
    })
}

fn of_host(meminfo: &str, pressure: &str) -> Option<HostMemory> {
    let limit = number_of(meminfo, "MemTotal:")?;
    Some(HostMemory {
        limit,
        used: limit.saturating_sub(number_of(meminfo, "MemAvailable:")?),
        stalled: stalled(pressure),
    })
}

/// Returns the number that follows `key` at the beginning of a line.
fn number_of(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Returns the share of time, in percent, that some task waited for memory: `some avg10=1.25
/// avg60=…`. 0 if the kernel does not report it.
fn stalled(pressure: &str) -> f64 {
    let some = pressure
        .lines()
        .find_map(|line| line.strip_prefix("some avg10="));
    let number = some.and_then(|rest| rest.split(' ').next()?.parse().ok());
    number.unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::memory::PagerStatus;
    use swap::report::Report;

    const PRESSURE: &str = "some avg10=12.50 avg60=3.00 avg300=0.51 total=9\n\
         full avg10=1.00 avg60=0.00 avg300=0.00 total=1\n";

    #[test]
    fn a_cgroup_says_its_limit_or_is_none() {
        let of = |current, high: &str, max: &str| {
            let stat = "anon 5\ninactive_file 300\nactive_file 7\n";
            of_cgroup(current, &[high.into(), max.into()], stat, PRESSURE)
        };
        let want = |used, limit| {
            Some(HostMemory {
                used,
                limit,
                stalled: 12.5,
            })
        };
        assert_eq!(of("1000\n", "max\n", "4000\n"), want(700, 4000));
        assert_eq!(of("1000\n", "3000\n", "4000\n"), want(700, 3000));
        assert_eq!(of("100\n", "3000\n", "max\n"), want(0, 3000));
        assert_eq!(of("1000\n", "max\n", "max\n"), None);
        assert_eq!(of("", "3000\n", ""), None);
    }

    #[test]
    fn a_host_says_what_is_available() {
        let meminfo = "MemTotal:        1000 kB\nMemFree:  1 kB\nMemAvailable:     400 kB\n";
        let want = HostMemory {
            used: 600,
            limit: 1000,
            stalled: 0.0,
        };
        assert_eq!(of_host(meminfo, ""), Some(want));
        assert_eq!(of_host("MemTotal: 5 kB\n", ""), None);
    }

    #[test]
    fn a_pager_says_its_own() {
        let report = Report {
            limit: 100,
            present: 95,
            ..Report::default()
        };
        let status = move || PagerStatus {
            report,
            pause_reason: None,
        };
        let pager: AskPager = Box::new(move || Some(status()));
        let found = look(Some(&pager)).expect("it answers");
        assert_eq!((found.used, found.limit), (95, 100));
        let ended: AskPager = Box::new(|| None);
        assert_eq!(look(Some(&ended)), None);
        // The figures are those of the test's host.
        let found = look(None).expect("Linux");
        assert!(found.limit > 0);
    }
}
