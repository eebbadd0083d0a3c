//! A control group of the lab: limits of a run, its memory use, and a process that samples it.

use anyhow::{Context, Result};

use super::host::Host;

/// Directory of the groups.
const ROOT: &str = "/sys/fs/cgroup";

/// Script that samples a group five times a second: bytes of shared memory (a guest's RAM is a
/// memory file), and of all memory, a line each time. Built-in commands only, but for the sleep.
const LOOK: &str = "while [ -e GROUP.looks ]; do
    while read -r key value; do [ $key = shmem ] && break; done < ROOT/GROUP/memory.stat
    read -r all < ROOT/GROUP/memory.current && echo $value $all >> GROUP.looks
    sleep 0.2
done";

/// A control group of its own.
pub struct Group<'a> {
    host: &'a Host,
    name: String,
}

/// Largest memory use that was sampled of a group, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Most {
    /// Shared memory.
    pub shared: u64,
    /// All memory that is charged to it.
    pub all: u64,
    /// Number of samples.
    pub looks: usize,
}

impl<'a> Group<'a> {
    /// Creates a group without limits. It is not removed: memory that it is charged for may outlive
    /// its processes.
    ///
    /// # Errors
    /// The host is not the lab.
    pub fn new(host: &'a Host) -> Result<Self> {
        let path = host.script(&format!("mktemp -d {ROOT}/run.XXXXXX"));
        let path = path.context("a control group")?;
        let name = path.trim().rsplit('/').next().unwrap_or_default();
        Ok(Self {
            host,
            name: name.to_owned(),
        })
    }

    /// Returns its directory.
    pub fn path(&self) -> String {
        format!("{ROOT}/{}", self.name)
    }

    /// Writes one of its files.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set(&self, file: &str, value: &str) -> Result<()> {
        let script = format!("echo {value} > {}/{file}", self.path());
        self.host.script(&script).map(drop)
    }

    /// Reads one line of `memory.stat`, in bytes or events.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn stat(&self, key: &str) -> Result<u64> {
        let script = format!("sed -n 's/^{key} //p' {}/memory.stat", self.path());
        let text = self.host.script(&script)?;
        let value = text.trim().parse();
        value.with_context(|| format!("memory.stat has no number {key}: {text:?}"))
    }

    /// Discards the samples; from now on a process samples it.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn look(&self) -> Result<()> {
        let Self { name, .. } = self;
        let look = LOOK.replace("ROOT", ROOT).replace("GROUP", name);
        // If a process samples it already, that goes on, with an empty file.
        let script = format!(
            "cd /root && if [ -e {name}.looks ]; then : > {name}.looks; \
             else : > {name}.looks; ({look}) </dev/null >/dev/null 2>&1 & fi"
        );
        self.host.script(&script).map(drop)
    }

    /// Ends the sampling. Returns the largest values.
    ///
    /// # Errors
    /// There are no samples.
    pub fn most(&self) -> Result<Most> {
        let Self { name, .. } = self;
        let script = format!("cd /root && cat {name}.looks && rm {name}.looks");
        let mut most = Most::default();
        for line in self.host.script(&script)?.lines() {
            let Some((shared, all)) = line.split_once(' ') else {
                continue;
            };
            most.shared = most.shared.max(shared.parse().unwrap_or(0));
            most.all = most.all.max(all.trim().parse().unwrap_or(0));
            most.looks += 1;
        }
        anyhow::ensure!(most.looks > 0, "nobody looked at the group {name}");
        Ok(most)
    }
}
