//! Swap space of the host, and whether it may be used for this process's memory: /proc/swaps and
//! `memory.swap.max` of cgroup 2.
//!
//! A memory file is swapped as anonymous memory is. That costs time, not data: a page that the host
//! has put away counts as present, and its owner waits for the host's disk.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// The host's swap space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapSpace {
    /// It has none.
    None,
    /// It has this much, but not for this process.
    Forbidden {
        /// MiB.
        mib: u64,
    },
    /// It has this much.
    Used {
        /// MiB.
        mib: u64,
    },
}

impl SwapSpace {
    /// Reads this host's. A file that cannot be read forbids nothing.
    pub fn probe() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let read = |cgroup: &PathBuf| fs::read_to_string(cgroup.join("memory.swap.max")).ok();
        let is_forbidden = cgroups().iter().filter_map(read).any(|it| it.trim() == "0");
        Self::new(swap_mib(&text("/proc/swaps")), is_forbidden)
    }

    fn new(mib: u64, is_forbidden: bool) -> Self {
        match (mib, is_forbidden) {
            (0, _) => Self::None,
            (_, true) => Self::Forbidden { mib },
            (_, false) => Self::Used { mib },
        }
    }
}

/// Returns the MiB of all areas of /proc/swaps, rounded up.
fn swap_mib(swaps: &str) -> u64 {
    // Filename, type, size in KiB, ...; the first line says so.
    let sizes = swaps.lines().skip(1).filter_map(|line| {
        let size = line.split_whitespace().nth(2)?;
        size.parse::<u64>().ok()
    });
    sizes.fold(0, u64::saturating_add).div_ceil(1024)
}

/// Returns the directories of this process's cgroup 2 and of those above it, as far as they can be
/// seen.
pub fn cgroups() -> Vec<PathBuf> {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    cgroups_of(&text("/proc/self/cgroup"), &text("/proc/self/mountinfo"))
}

fn cgroups_of(cgroup: &str, mountinfo: &str) -> Vec<PathBuf> {
    let own = cgroup.lines().find_map(|line| line.strip_prefix("0::"));
    let mount = mountinfo.lines().find_map(cgroup2);
    let (Some(own), Some((root, point))) = (own, mount) else {
        return Vec::new();
    };
    // Outside of what is mounted nothing can be seen.
    let inside = match Path::new(own).strip_prefix(root) {
        Ok(inside) if !inside.components().any(|it| it == Component::ParentDir) => inside,
        _ => return Vec::new(),
    };
    let above = inside.ancestors();
    above.map(|cgroup| Path::new(point).join(cgroup)).collect()
}

/// Parses a line of mountinfo that mounts cgroup 2: which of its directories, and where.
fn cgroup2(line: &str) -> Option<(&str, &str)> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut fields = mount.split(' ');
    let places = (fields.nth(3)?, fields.next()?);
    (file_system.split(' ').next() == Some("cgroup2")).then_some(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWAPS: &str = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";

    #[test]
    fn areas_are_added_up() {
        assert_eq!(swap_mib(""), 0);
        assert_eq!(swap_mib(SWAPS), 0);
        let two = "/dev/dm-1 partition\t2097148\t\t0\t\t-2\n/swap file\t1025\t0\t-3\n";
        assert_eq!(swap_mib(&format!("{SWAPS}{two}")), 2049);
    }

    const MOUNTS: &str = "\
        24 30 0:22 / /proc rw,nosuid - proc proc rw\n\
        35 30 0:30 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    fn of(cgroup: &str, mounts: &str) -> Vec<String> {
        let paths = cgroups_of(cgroup, mounts);
        let files = paths.iter().map(|p| p.join("memory.swap.max"));
        files.map(|p| p.display().to_string()).collect()
    }

    #[test]
    fn limits_are_those_of_the_cgroup_and_all_above_it() {
        assert_eq!(
            of("0::/user.slice/vm.scope\n", MOUNTS),
            [
                "/sys/fs/cgroup/user.slice/vm.scope/memory.swap.max",
                "/sys/fs/cgroup/user.slice/memory.swap.max",
                "/sys/fs/cgroup/memory.swap.max",
            ]
        );
    }

    #[test]
    fn a_part_of_the_tree_is_mounted_as_its_root() {
        let mounts = MOUNTS.replace(" / /sys/fs/cgroup ", " /vms /sys/fs/cgroup ");
        assert_eq!(
            of("0::/vms/one", &mounts),
            [
                "/sys/fs/cgroup/one/memory.swap.max",
                "/sys/fs/cgroup/memory.swap.max"
            ]
        );
        assert!(of("0::/elsewhere", &mounts).is_empty());
        // Outside of this process's namespace of cgroups.
        assert!(of("0::/../elsewhere", MOUNTS).is_empty());
    }

    #[test]
    fn version_1_beside_it_is_passed_over() {
        let old = "34 30 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let cgroup = "4:memory:/vms\n0::/\n";
        assert_eq!(
            of(cgroup, &format!("{old}{MOUNTS}")),
            ["/sys/fs/cgroup/memory.swap.max"]
        );
        assert!(of(cgroup, old).is_empty());
        assert!(of("4:memory:/vms\n", MOUNTS).is_empty());
    }

    #[test]
    fn only_swap_space_that_may_be_used_counts() {
        assert_eq!(SwapSpace::new(0, false), SwapSpace::None);
        assert_eq!(SwapSpace::new(0, true), SwapSpace::None);
        assert_eq!(SwapSpace::new(7, true), SwapSpace::Forbidden { mib: 7 });
        assert_eq!(SwapSpace::new(7, false), SwapSpace::Used { mib: 7 });
    }
}
