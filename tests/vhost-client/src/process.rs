//! Costs of a server's process: processor time, and memory from /proc.

use std::fs;
use std::time::Duration;

/// The processor time of a process so far, of all its threads, those that ended too; `None` where
/// it is gone.
///
/// The kernel's clock of the process: /proc counts in ticks, and by thread forgets those that end.
pub fn cpu_time(pid: u32) -> Option<Duration> {
    crate::memory::process_clock(pid)
}

/// Memory of a process in KiB: resident, and its proportional share.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryUse {
    /// Resident set.
    pub rss_kib: u64,
    /// Proportional set: shared pages divided by the number of processes that share them.
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

/// Nanoseconds of processor time of this thread.
pub fn thread_cpu() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_processor_time_and_memory() {
        let pid = std::process::id();
        let before = cpu_time(pid).unwrap();
        // A thread whose own time goes with it.
        let busy = || {
            let start = thread_cpu();
            while thread_cpu() - start < 5_000_000 {
                std::hint::spin_loop();
            }
        };
        std::thread::spawn(busy).join().unwrap();
        let used = cpu_time(pid).unwrap() - before;
        assert!(used >= Duration::from_millis(5), "{used:?}");
        let memory = memory_use(pid).unwrap();
        assert!(memory.rss_kib >= memory.pss_kib && memory.pss_kib > 100);
        assert!(cpu_time(u32::MAX).is_none() && memory_use(u32::MAX).is_none());
    }
}
