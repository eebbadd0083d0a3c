//! Locked memory of a program in the emulated host, sampled by a shell beside it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::Lab;

/// Script that samples `VmLck` of the program whose name is `$0`, ten times a second, from its
/// start to its end. A program that has ended, and is not yet waited for, has no such line.
const SCRIPT: &str = r#"
until pid=$(pidof "$0"); do sleep 0.1; done
while :; do
    now=
    while read -r key value unit; do
        if [ "$key" = VmLck: ]; then now=$value; break; fi
    done 2>/dev/null <"/proc/${pid%% *}/status"
    [ -n "$now" ] || exit 0
    echo "$now"
    sleep 0.1
done
"#;

/// Time limit for the shell to end when it is asked to.
const LIMIT: Duration = Duration::from_secs(30);

/// Locked memory of a program over time. It includes the pages that VFIO's type 1 pins for a
/// device, by mapping: a page that is mapped twice counts twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockedMemory {
    samples: Vec<u64>,
}

impl LockedMemory {
    /// Parses the lines of the script.
    fn parse(text: &str) -> Result<Self> {
        let samples = text.lines().map(|line| {
            let number = line.trim().parse();
            number.with_context(|| format!("{line:?} is no number of KiB"))
        });
        let samples = samples.collect::<Result<Vec<u64>>>()?;
        Ok(Self { samples })
    }

    /// Returns the samples, KiB, a tenth of a second apart at least. There are none if the program
    /// had ended before it was found.
    pub fn samples(&self) -> &[u64] {
        &self.samples
    }

    /// Returns the largest sample, KiB.
    pub fn max(&self) -> u64 {
        self.samples.iter().copied().max().unwrap_or(0)
    }

    /// Returns the smallest sample from the first one on that is not 0, KiB: the memory that a
    /// running device holds at all times. 0 if there was none.
    pub fn min(&self) -> u64 {
        let held = self.samples.iter().copied().skip_while(|kib| *kib == 0);
        held.min().unwrap_or(0)
    }

    /// Returns the last sample, KiB.
    pub fn last(&self) -> u64 {
        self.samples.last().copied().unwrap_or(0)
    }
}

/// A shell that samples.
pub struct LockedWatch<'a> {
    shell: lab::Running<'a>,
}

impl<'a> LockedWatch<'a> {
    pub(super) fn start(lab: &'a Lab, program: &str) -> Result<Self> {
        let shell = lab.command("/bin/sh").args(["-c", SCRIPT, program]);
        Ok(Self {
            shell: shell.spawn()?,
        })
    }

    /// Ends the sampling. The program has ended by then.
    ///
    /// # Errors
    /// The lab has died.
    pub fn finish(self) -> Result<LockedMemory> {
        // The shell searches for a program that was never found for as long as it runs.
        self.shell.signal(libc::SIGTERM)?;
        let out = self.shell.wait(LIMIT, |_, _| {})?;
        let is_asked = out.status == 128 + libc::SIGTERM as u8;
        ensure!(out.success() || is_asked, "{}", out.stderr_text().trim());
        LockedMemory::parse(&out.stdout_text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_a_most_a_least_once_held_and_a_last() {
        let locked = LockedMemory::parse("0\n0\n100\n612\n88\n100\n").expect("numbers");
        assert_eq!((locked.max(), locked.min(), locked.last()), (612, 88, 100));
        let freed = LockedMemory::parse("0\n4\n0\n").expect("numbers");
        assert_eq!((freed.max(), freed.min(), freed.last()), (4, 0, 0));
        let none = LockedMemory::parse("0\n0\n").expect("numbers");
        assert_eq!((none.max(), none.min(), none.last()), (0, 0, 0));
        assert_eq!(LockedMemory::parse("").expect("none").max(), 0);
        assert!(LockedMemory::parse("4\nkB\n").is_err());
    }
}
