//! The workers of this process, as /proc shows them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::{Mutex, MutexGuard};

/// Workers are found as children of this process, so one test at a time has some.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// A worker's process.
#[derive(Debug, PartialEq, Eq)]
pub struct Worker(u32);

impl Worker {
    pub fn signal(&self, signal: i32) {
        // SAFETY: a plain system call. The process is a child of this one, whose supervisor may
        // have waited for it: then the number names nothing, for tests run one at a time.
        unsafe { libc::kill(self.0 as i32, signal) };
    }

    /// Values that its threads have in a line of their status.
    pub fn status(&self, key: &str) -> BTreeSet<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0)).unwrap();
        let of_task = |task: std::io::Result<fs::DirEntry>| {
            let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let value = line.and_then(|line| line.strip_prefix(':'));
            value.unwrap().trim().to_owned()
        };
        tasks.map(of_task).collect()
    }

    /// Its descriptors by kind; `None`: this user may not see them.
    pub fn kinds(&self) -> Option<BTreeMap<&'static str, usize>> {
        let mut kinds = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", self.0)).ok()? {
            let target = fs::read_link(entry.unwrap().path()).unwrap();
            let target = target.to_string_lossy();
            let kind = match &*target {
                target if target.contains("memfd:") => "memfd",
                target if target.contains("eventfd") => "eventfd",
                target if target.starts_with('/') => "file",
                _ => "other",
            };
            *kinds.entry(kind).or_default() += 1;
        }
        Some(kinds)
    }

    pub fn maps(&self) -> Vec<String> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.0)).unwrap();
        maps.lines().map(str::to_owned).collect()
    }
}

/// All of them.
pub fn workers() -> Vec<Worker> {
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        let is_ours = parent.is_some_and(|parent| parent.trim() == own);
        if is_ours
            && command
                .split(|byte| *byte == 0)
                .any(|word| word == b"device-worker")
        {
            found.push(Worker(pid));
        }
    }
    found
}

/// Sends all of them a signal.
pub fn signal_all(signal: i32) {
    for worker in workers() {
        worker.signal(signal);
    }
}

/// Number of descriptors of this process.
pub fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}
