//! What a server's process costs: processor time and memory, from /proc.

use std::fs;

/// Processor time so far, by two counts of the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuTime {
    /// User and system time of all threads, dead ones too; in steps of a tick.
    ticks_ns: u64,
    /// Time on a processor of the threads there are; exact, but forgets threads that end.
    exact_ns: u64,
}

impl CpuTime {
    /// Seconds since an earlier time: the greater count, as each can only fall short.
    pub fn since(self, before: Self) -> f64 {
        let ticks = self.ticks_ns.saturating_sub(before.ticks_ns);
        let exact = self.exact_ns.saturating_sub(before.exact_ns);
        // A tick more or less is chance, and would be the greater count of an idle server.
        let ticks = if ticks <= 2 * TICK_NS {
            0
        } else {
            ticks - TICK_NS
        };
        exact.max(ticks) as f64 / 1e9
    }
}

/// USER_HZ is 100 on every architecture in question.
const TICK_NS: u64 = 10_000_000;

/// The processor time of a process; `None` where it is gone.
pub fn cpu_time(pid: u32) -> Option<CpuTime> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; utime and stime are the 12th and 13th behind it.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut words = rest.split_whitespace().skip(11);
    let ticks: u64 = words.next()?.parse::<u64>().ok()? + words.next()?.parse::<u64>().ok()?;
    let exact = fs::read_dir(format!("/proc/{pid}/task"))
        .ok()?
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok())
        .filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok())
        .sum();
    Some(CpuTime {
        ticks_ns: ticks * TICK_NS,
        exact_ns: exact,
    })
}

/// Memory of a process in KiB: resident, and its proportional share.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryUse {
    /// Resident set.
    pub rss_kib: u64,
    /// Proportional set: shared pages divided by those who share them.
    pub pss_kib: u64,
    /// Its own: neither files nor what others share with it.
    pub anonymous_kib: u64,
}

/// The memory of a process; `None` where it is gone.
pub fn memory_use(pid: u32) -> Option<MemoryUse> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    Some(MemoryUse {
        rss_kib: field("Rss:")?,
        pss_kib: field("Pss:")?,
        anonymous_kib: field("Anonymous:")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_processor_time_and_memory() {
        let pid = std::process::id();
        let before = cpu_time(pid).unwrap();
        let start = std::time::Instant::now();
        let mut sum = 0_u64;
        while start.elapsed().as_millis() < 60 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(cpu_time(pid).unwrap().since(before) > 0.001);
        let memory = memory_use(pid).unwrap();
        assert!(memory.rss_kib >= memory.pss_kib && memory.pss_kib > 100);
        assert!(cpu_time(u32::MAX).is_none() && memory_use(u32::MAX).is_none());
    }
}
