//! Reads `--fault WHERE:WHAT`.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use anyhow::{Result, bail};
use vio_faults::StoreFault;

/// Longest latency of a disk, in microseconds.
const MAX_LATENCY_US: u64 = 10_000_000;
/// Longest limit of late accesses, and longest time that an IOMMU does not answer, in ms.
const MAX_MS: u64 = 3_600_000;

/// Help of `run --fault`.
pub const FAULTS_OF_MACHINES: &str = "\
A part that fails, or is slow, on purpose; repeat for more. WHERE is the part, WHAT it does:

    diskN:latency=US        answers US microseconds late, or up to two thirds more
    diskN:unmapped          a read of sector 64 writes to an address that is not mapped
    diskN:readonly          a write of sector 64 writes into its own data, mapped read-only
    diskN:late=MS           a read of sector 64 or 72 touches the buffers of completed requests that nothing used since, and the
                            ledger counts by age what goes through: of sector 72, which is for guests that have waited MS
                            milliseconds by their own clock, all to buffers of that age are late, and to be blocked; at most 1,000
    diskN:panic             the sidecore panics at its first request
    iommu:mute=MS@N         the paravirtual IOMMU answers nothing for MS milliseconds from the Nth request on
    swap:eio@N              the Nth request of the store fails with EIO
    swap:enospc@N           its Nth write fails with ENOSPC
    swap:corrupt@N          its Nth read has one bit that was not written
    mapper:stale            pages that a disk holds are written to the store all the same, and counted
    memory:punch            a thread takes pages away and brings them back all the time
    memory:as-resident      offers the guest no more paravirtual features than one under --resident
    sidecores:sleep=N       sleep after every N idle sweeps, whatever --idle says

disk0 is the first --disk. A failure of the store pauses the guest, with the reason on standard error and in the ledger; it goes on when \
trying again has succeeded.";

/// Help of `serve --fault`.
pub const FAULTS_OF_DAEMONS: &str = "\
A part that fails, or is slow, on purpose; repeat for more. WHERE is the part, WHAT it does:

    diskN:latency=US        answers US microseconds late, or up to two thirds more
    diskN:panic             the core panics at its first request
    sidecores:sleep=N       sleep after every N idle sweeps, whatever --idle says

disk0 is the first device: those of --config come before those of --block.";

/// The command that has the option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `run`.
    Machine,
    /// `serve`.
    Daemon,
}

impl Program {
    /// Lists the parts that may stand before the colon.
    fn places(self) -> &'static str {
        match self {
            Self::Machine => "disk0 (disk1, …), iommu, swap, mapper, memory, sidecores",
            Self::Daemon => "disk0 (disk1, …), sidecores",
        }
    }

    /// Lists the faults of a disk.
    fn of_disks(self) -> &'static str {
        match self {
            Self::Machine => "latency=US, unmapped, readonly, late=MS, panic",
            Self::Daemon => "latency=US, panic",
        }
    }
}

/// An access that the guest did not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// DMA to an address that is not mapped.
    Unmapped,
    /// A write into the buffer of a write request, which is mapped read-only.
    ReadOnly,
    /// Accesses to buffers of completed requests: late from this age on.
    Late(Duration),
}

/// Silence of the paravirtual IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mute {
    /// It lasts so long.
    pub time: Duration,
    /// It begins when so many requests have come.
    pub requests: NonZeroU64,
}

/// Faults of one disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskFaults {
    /// It answers no sooner than this.
    pub latency: Option<Duration>,
    /// It attacks its guest.
    pub attack: Option<Attack>,
    /// The core that polls it panics at its first request.
    pub panics: bool,
}

/// All faults of a machine or a daemon, by part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Of disks, by number.
    pub disks: BTreeMap<usize, DiskFaults>,
    /// Of the paravirtual IOMMU.
    pub mute: Option<Mute>,
    /// Of the swap store.
    pub store: Option<StoreFault>,
    /// The mapper's pages are written all the same.
    pub is_mapper_stale: bool,
    /// Pages of memory are taken away and brought back.
    pub is_punched: bool,
    /// The guest's features are those of one whose memory moves.
    pub is_as_resident: bool,
    /// Sidecores sleep after so many idle sweeps.
    pub sleeps: Option<NonZeroU32>,
}

impl Faults {
    /// Reads all options of a command.
    ///
    /// # Errors
    /// Names the option, and what may stand in the place of what is wrong.
    pub fn parse(program: Program, options: &[String]) -> Result<Self> {
        let mut faults = Self::default();
        for option in options {
            faults.add(program, option)?;
        }
        Ok(faults)
    }

    fn add(&mut self, program: Program, option: &str) -> Result<()> {
        let Some((place, what)) = option.split_once(':') else {
            bail!(
                "--fault {option:?} is not WHERE:WHAT; WHERE is one of {}",
                program.places()
            );
        };
        let unknown = |known: &str| -> Result<()> {
            bail!("--fault {option:?}: {place} takes one of {known}, not {what:?}")
        };
        let is_new = match (place, program) {
            ("sidecores", _) => match sweeps(what) {
                Some(sweeps) => set(&mut self.sleeps, sweeps),
                None => return unknown("sleep=N (N at least 1)"),
            },
            ("iommu", Program::Machine) => match mute(what) {
                Some(mute) => set(&mut self.mute, mute),
                None => return unknown("mute=MS@N (both at least 1)"),
            },
            ("swap", Program::Machine) => match store_fault(what) {
                Some(fault) => set(&mut self.store, fault),
                None => return unknown("eio@N, enospc@N, corrupt@N (N at least 1)"),
            },
            ("mapper", Program::Machine) => match what {
                "stale" => !std::mem::replace(&mut self.is_mapper_stale, true),
                _ => return unknown("stale"),
            },
            ("memory", Program::Machine) => match what {
                "punch" => !std::mem::replace(&mut self.is_punched, true),
                "as-resident" => !std::mem::replace(&mut self.is_as_resident, true),
                _ => return unknown("punch, as-resident"),
            },
            _ => {
                let Some(number) = disk_number(place) else {
                    bail!(
                        "--fault {option:?}: there is no {place:?}; WHERE is one of {}",
                        program.places()
                    );
                };
                let disk = self.disks.entry(number).or_default();
                match add_to_disk(disk, program, what) {
                    Some(is_new) => is_new,
                    None => return unknown(program.of_disks()),
                }
            }
        };
        if !is_new {
            bail!("--fault {option:?}: {place} has a fault of that kind already");
        }
        Ok(())
    }
}

/// Sets what was not set; whether it was not.
fn set<T>(field: &mut Option<T>, value: T) -> bool {
    field.replace(value).is_none()
}

/// Returns the number of idle sweeps after which a sidecore is to sleep.
fn sweeps(what: &str) -> Option<NonZeroU32> {
    let sweeps = number(what, "sleep=", u32::MAX.into())?;
    NonZeroU32::new(u32::try_from(sweeps).ok()?)
}

/// Returns the number behind `key`, 1 to `most`.
fn number(text: &str, key: &str, most: u64) -> Option<u64> {
    let digits = text.strip_prefix(key)?;
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse().ok().filter(|_| is_number)?;
    (1..=most).contains(&number).then_some(number)
}

/// Returns the number of a disk, as it is written.
fn disk_number(place: &str) -> Option<usize> {
    let digits = place.strip_prefix("disk")?;
    let number: usize = digits.parse().ok()?;
    (number.to_string() == digits).then_some(number)
}

/// Returns whether that is a fault that the disk did not have; `None`: it is none.
fn add_to_disk(disk: &mut DiskFaults, program: Program, what: &str) -> Option<bool> {
    let attack = match (what, program) {
        ("panic", _) => return Some(!std::mem::replace(&mut disk.panics, true)),
        ("unmapped", Program::Machine) => Attack::Unmapped,
        ("readonly", Program::Machine) => Attack::ReadOnly,
        (late, Program::Machine) if late.starts_with("late=") => {
            Attack::Late(Duration::from_millis(number(late, "late=", MAX_MS)?))
        }
        _ => {
            let latency = number(what, "latency=", MAX_LATENCY_US)?;
            let latency = Duration::from_micros(latency);
            return Some(set(&mut disk.latency, latency));
        }
    };
    Some(set(&mut disk.attack, attack))
}

fn mute(what: &str) -> Option<Mute> {
    let (time, _) = what.split_once('@')?;
    let requests = number(what, &format!("{time}@"), u64::MAX)?;
    Some(Mute {
        time: Duration::from_millis(number(time, "mute=", MAX_MS)?),
        requests: NonZeroU64::new(requests)?,
    })
}

fn store_fault(what: &str) -> Option<StoreFault> {
    let (kind, _) = what.split_once('@')?;
    let nth = number(what, &format!("{kind}@"), u64::MAX)?;
    let nth = NonZeroU64::new(nth)?;
    match kind {
        "eio" => Some(StoreFault::Eio(nth)),
        "enospc" => Some(StoreFault::Enospc(nth)),
        "corrupt" => Some(StoreFault::Corrupt(nth)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(program: Program, options: &[&str]) -> Result<Faults> {
        let options: Vec<_> = options.iter().map(|it| (*it).to_owned()).collect();
        Faults::parse(program, &options)
    }

    #[test]
    fn every_fault_that_the_help_lists_is_read() {
        for (program, help) in [
            (Program::Machine, FAULTS_OF_MACHINES),
            (Program::Daemon, FAULTS_OF_DAEMONS),
        ] {
            let lines = help.lines().filter_map(|line| line.strip_prefix("    "));
            let lines = lines.filter(|line| !line.starts_with(' '));
            let mut seen = 0;
            for line in lines {
                let option = line.split_once("  ").expect("two columns").0;
                let option = option.replace("diskN", "disk3").replace("US", "20");
                let option = option.replace("MS", "30");
                let option = match option.strip_suffix('N') {
                    Some(option) => format!("{option}7"),
                    None => option,
                };
                let faults = parse(program, &[&option]).expect(&option);
                assert_ne!(faults, Faults::default(), "{option}");
                let twice = parse(program, &[&option, &option]).expect_err(&option);
                assert!(twice.to_string().contains("already"), "{twice}");
                seen += 1;
            }
            assert!(seen >= 3, "{seen}");
        }
    }

    #[test]
    fn faults_of_several_kinds_add_up() {
        let options = ["disk0:latency=200", "disk0:unmapped", "disk12:panic"];
        let faults = parse(Program::Machine, &options).expect("three faults");
        let first = DiskFaults {
            latency: Some(Duration::from_micros(200)),
            attack: Some(Attack::Unmapped),
            panics: false,
        };
        assert_eq!(faults.disks[&0], first);
        assert!(faults.disks[&12].panics);
        let late = parse(Program::Machine, &["disk1:late=450"]).expect("late accesses");
        let limit = Duration::from_millis(450);
        assert_eq!(late.disks[&1].attack, Some(Attack::Late(limit)));
        let nth = |n| NonZeroU64::new(n).expect("counted from 1");
        let faults = parse(Program::Machine, &["iommu:mute=10000@200"]).expect("a silence");
        let mute = Mute {
            time: Duration::from_secs(10),
            requests: nth(200),
        };
        assert_eq!(faults.mute, Some(mute));
        for (option, wanted) in [
            ("swap:eio@1", StoreFault::Eio(nth(1))),
            ("swap:enospc@20", StoreFault::Enospc(nth(20))),
            ("swap:corrupt@300", StoreFault::Corrupt(nth(300))),
        ] {
            let faults = parse(Program::Machine, &[option]).expect(option);
            assert_eq!(faults.store, Some(wanted));
        }
    }

    #[test]
    fn a_slip_names_what_may_stand_there() {
        use Program::{Daemon, Machine};
        for (program, option, words) in [
            (Machine, "", "is not WHERE:WHAT; WHERE is one of disk0"),
            (Machine, "disk0", "is not WHERE:WHAT"),
            (Machine, "dsk0:panic", "there is no \"dsk0\"; WHERE is"),
            (Machine, "disk:panic", "there is no \"disk\""),
            (Machine, "disk00:panic", "there is no \"disk00\""),
            (Machine, "disk+1:panic", "there is no \"disk+1\""),
            (Machine, ":panic", "there is no \"\""),
            (Machine, "disk0:", "disk0 takes one of latency=US, unmapped"),
            (Machine, "disk0:often", "latency=US, unmapped, readonly"),
            (Machine, "disk0:latency=0", "disk0 takes one of latency=US"),
            (Machine, "disk0:latency=10000001", "latency=US"),
            (Machine, "disk0:latency=-1", "latency=US"),
            (Machine, "disk0:latency=2K", "latency=US"),
            (Machine, "disk0:late=0", "late=MS"),
            (Machine, "disk0:late=", "late=MS"),
            (Machine, "disk0:late=3600001", "late=MS"),
            (Daemon, "disk0:late=1", "latency=US, panic"),
            (Machine, "iommu:mute", "iommu takes one of mute=MS@N"),
            (Machine, "iommu:mute=10", "mute=MS@N"),
            (Machine, "iommu:mute=0@1", "mute=MS@N"),
            (Machine, "iommu:mute=10@0", "mute=MS@N"),
            (Machine, "iommu:mute=3600001@1", "mute=MS@N"),
            (Daemon, "iommu:mute=10@1", "there is no \"iommu\""),
            (Machine, "swap:eio", "swap takes one of eio@N"),
            (Machine, "swap:eio@", "eio@N"),
            (Machine, "swap:eio@0", "eio@N"),
            (Machine, "swap:eio@-1", "eio@N"),
            (Machine, "swap:eio@99999999999999999999", "eio@N"),
            (Machine, "swap:often@1", "eio@N"),
            (Machine, "memory:", "memory takes one of punch"),
            (Machine, "mapper:off", "mapper takes one of stale"),
            (Machine, "sidecores:sleep=0", "sidecores takes one of sleep"),
            (Machine, "sidecores:sleep=4294967296", "sleep=N"),
            (
                Daemon,
                "swap:eio@1",
                "there is no \"swap\"; WHERE is one of",
            ),
            (
                Daemon,
                "disk0:unmapped",
                "disk0 takes one of latency=US, panic",
            ),
            (Daemon, "memory:punch", "there is no \"memory\""),
        ] {
            let error = parse(program, &[option]).expect_err(option).to_string();
            assert!(error.starts_with("--fault "), "{error}");
            assert!(error.contains(words), "{option}: {error}");
        }
        let error = parse(Machine, &["disk0:unmapped", "disk0:readonly"]).expect_err("two");
        assert!(error.to_string().contains("of that kind"), "{error}");
    }
}
