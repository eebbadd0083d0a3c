//! Plan of a guest's run, phase by phase, and its memory limit.

use workload::marker;

/// Work of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Command of `workload`, with which the lines of its steps begin.
    pub command: &'static str,
    /// Its arguments, without those for steps and markers.
    pub arguments: String,
    /// The marker of each phase, and that behind the last.
    pub marks: Vec<u8>,
    /// Prefix of the line that reports success.
    pub done: String,
    /// Line that reports that memory was too short for a process of the guest, which is no failure.
    pub killed: &'static str,
    /// MiB of guest memory that may be resident on the host.
    pub limit: u64,
}

impl Plan {
    /// Returns a plan of one of the workloads with this number of phases, which report their end
    /// only.
    pub fn in_phases(
        command: &'static str,
        arguments: String,
        phases: u8,
        killed: &'static str,
        limit: u64,
    ) -> Self {
        let first = marker::ITERATION;
        Self {
            command,
            arguments,
            marks: (first..first + phases).chain([marker::OVER]).collect(),
            done: format!("{command} ok fnv="),
            killed,
            limit,
        }
    }

    /// Returns the command that the guest runs.
    pub fn script(&self) -> String {
        let Self {
            command, arguments, ..
        } = self;
        format!("workload {command} {arguments} --marker --step")
    }

    /// Returns the prefix of the line that a guest prints before the phase of `mark`, or behind the
    /// last.
    pub fn step(&self, mark: u8) -> String {
        format!("{} step={mark} ", self.command)
    }

    /// Returns the number of phases.
    pub fn phases(&self) -> usize {
        self.marks.len() - 1
    }

    /// Returns the MiB that a balloon leaves the guest: a stock kernel cannot give up so much that
    /// only the limit would be left.
    pub fn left(&self) -> u64 {
        (self.limit + 25).max(80)
    }
}

/// The guest's page cache before a phase, or behind the last, in pages of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// All pages.
    pub pages: u64,
    /// Pages not yet written to its disk.
    pub unwritten: u64,
}

impl Cache {
    /// Parses the line of a step; `None` if it has no counts.
    pub fn parse(line: &str) -> Option<Self> {
        let number = |key: &str| {
            let word = line.split_whitespace().find_map(|it| it.strip_prefix(key));
            word?.parse().ok()
        };
        Some(Self {
            pages: number("cached=")?,
            unwritten: number("unwritten=")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workload_in_phases_has_a_mark_more_than_phases() {
        let plan = Plan::in_phases("collect", "--mib 2".into(), 3, "collect killed", 55);
        assert_eq!(plan.marks, [16, 17, 18, 35]);
        assert_eq!(plan.phases(), 3);
        assert_eq!(plan.script(), "workload collect --mib 2 --marker --step");
        assert_eq!(plan.left(), 80);
    }

    #[test]
    fn a_step_says_what_the_page_cache_has() {
        let line = "collect step=16 cached=7000 unwritten=3";
        let want = Cache {
            pages: 7000,
            unwritten: 3,
        };
        assert_eq!(Cache::parse(line), Some(want));
        assert_eq!(Cache::parse("collect step=16"), None);
    }
}
