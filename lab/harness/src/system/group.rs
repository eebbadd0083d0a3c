//! A control group of the lab's: what a run may have, what it had, and a process that looks on.

use anyhow::{Context, Result};

use super::host::Host;

/// Where groups are.
const ROOT: &str = "/sys/fs/cgroup";

/// Looks at a group five times a second: bytes of shared memory (a guest's RAM is a memory file),
/// of all memory, a line each time. Built-in commands only, but for the sleep.
const LOOK: &str = "while [ -e GROUP.looks ]; do
    while read -r key value; do [ $key = shmem ] && break; done < ROOT/GROUP/memory.stat
    read -r all < ROOT/GROUP/memory.current && echo $value $all >> GROUP.looks
    sleep 0.2
done";

/// A group of its own.
pub struct Group<'a> {
    host: &'a Host,
    name: String,
}

/// The most that was seen of a group's memory, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Most {
    /// Shared memory.
    pub shared: u64,
    /// All that is counted.
    pub all: u64,
    /// How often it was looked at.
    pub looks: usize,
}

impl<'a> Group<'a> {
    /// A group without limits. It stays: what it was charged for may outlive its processes.
    ///
    /// # Errors
    /// Not the lab.
    pub fn new(host: &'a Host) -> Result<Self> {
        let path = host.script(&format!("mktemp -d {ROOT}/run.XXXXXX"));
        let path = path.context("a control group")?;
        let name = path.trim().rsplit('/').next().unwrap_or_default();
        Ok(Self {
            host,
            name: name.to_owned(),
        })
    }

    /// Its directory.
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

    /// One line of `memory.stat`, in bytes or events.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn stat(&self, key: &str) -> Result<u64> {
        let script = format!("sed -n 's/^{key} //p' {}/memory.stat", self.path());
        let text = self.host.script(&script)?;
        let value = text.trim().parse();
        value.with_context(|| format!("memory.stat has no number {key}: {text:?}"))
    }

    /// Forgets what was seen; from now on a process looks.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn look(&self) -> Result<()> {
        let Self { name, .. } = self;
        let look = LOOK.replace("ROOT", ROOT).replace("GROUP", name);
        // One that looks already goes on, with an empty file.
        let script = format!(
            "cd /root && if [ -e {name}.looks ]; then : > {name}.looks; \
             else : > {name}.looks; ({look}) </dev/null >/dev/null 2>&1 & fi"
        );
        self.host.script(&script).map(drop)
    }

    /// Nobody looks any more: what was seen.
    ///
    /// # Errors
    /// Nobody looked.
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
