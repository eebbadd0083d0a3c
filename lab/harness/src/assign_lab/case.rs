//! The guests of the matrix, and the work of each under each policy of the host.

use std::time::Duration;

use lab::assigned::Device;

use crate::assign::{Guest, Mode, SCRIPT};

/// Unmap policy of a guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unmapping {
    /// Each unmap waits for its invalidation: stock Linux's own choice under a unit with caching
    /// mode.
    Strict,
    /// Invalidations of its whole domain, for many unmaps: `DMA-FQ`, written to each device's
    /// group.
    Lazy,
}

impl Unmapping {
    /// Returns its name in tables and keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Lazy => "lazy",
        }
    }
}

/// One boot of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Register mode, or no IOMMU: all memory pinned.
    pub mode: Mode,
    /// The guest's policy.
    pub unmapping: Unmapping,
    /// Number of vCPUs.
    pub cpus: u32,
    /// `--idle`.
    pub idle: &'static str,
    /// Policies of the host, used one after the other.
    pub policies: &'static [HostPolicy],
}

/// Time at which the host unmaps a guest's unmapped pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostPolicy {
    /// Nothing is unmapped: no IOMMU.
    Off,
    /// Before the guest's WAIT.
    Strict,
    /// Begun before the guest's WAIT.
    Async,
    /// Later.
    Deferred,
    /// This number of mappings is kept for reuse.
    Optimistic(u32),
}

impl HostPolicy {
    /// All but [`Off`](Self::Off).
    pub const ALL: [Self; 5] = [
        Self::Strict,
        Self::Async,
        Self::Deferred,
        Self::Optimistic(256),
        Self::Optimistic(4096),
    ];

    /// Returns the text of the policy's file; empty if there is none.
    pub fn text(self) -> String {
        match self {
            Self::Off => String::new(),
            Self::Strict => "strict".into(),
            Self::Async => "async".into(),
            Self::Deferred => "deferred".into(),
            Self::Optimistic(most) => format!("optimistic={most}"),
        }
    }

    /// Returns its name in tables and keys.
    pub fn name(self) -> String {
        match self {
            Self::Off => "off".into(),
            _ => self.text().replace('=', "_"),
        }
    }

    /// Returns its name in the ledger.
    pub fn ledger_name(self) -> &'static str {
        match self {
            // The device has a policy, which is never used.
            Self::Off | Self::Strict => "strict",
            Self::Async => "async",
            Self::Deferred => "deferred",
            Self::Optimistic(_) => "optimistic",
        }
    }

    /// Returns the largest number of stale mappings, if the policy has one.
    pub fn most(self) -> Option<u64> {
        match self {
            Self::Optimistic(most) => Some(most.into()),
            _ => None,
        }
    }
}

const OFF: &[HostPolicy] = &[HostPolicy::Off];
const STRICT: &[HostPolicy] = &[HostPolicy::Strict];

impl Case {
    const fn new(mode: Mode, unmapping: Unmapping) -> Self {
        Self {
            mode,
            unmapping,
            cpus: 1,
            idle: "poll",
            policies: match mode {
                Mode::None => OFF,
                _ => &HostPolicy::ALL,
            },
        }
    }

    const fn adaptive(mode: Mode) -> Self {
        Self {
            idle: "adaptive",
            policies: match mode {
                Mode::None => OFF,
                _ => STRICT,
            },
            ..Self::new(mode, Unmapping::Strict)
        }
    }

    const fn smp(mode: Mode, unmapping: Unmapping) -> Self {
        Self {
            cpus: 2,
            ..Self::new(mode, unmapping)
        }
    }

    /// All cases, those that are judged first.
    pub const ALL: [Self; 14] = [
        Self::new(Mode::None, Unmapping::Strict),
        Self::new(Mode::Trap, Unmapping::Strict),
        Self::new(Mode::Shared, Unmapping::Strict),
        Self::new(Mode::Trap, Unmapping::Lazy),
        Self::new(Mode::Logged, Unmapping::Strict),
        Self::new(Mode::Shared, Unmapping::Lazy),
        Self::new(Mode::Logged, Unmapping::Lazy),
        Self::adaptive(Mode::None),
        Self::adaptive(Mode::Trap),
        Self::adaptive(Mode::Shared),
        Self::smp(Mode::None, Unmapping::Strict),
        Self::smp(Mode::Shared, Unmapping::Strict),
        Self::smp(Mode::Trap, Unmapping::Strict),
        Self::smp(Mode::Shared, Unmapping::Lazy),
    ];

    /// Returns the works that are counted in it: all, for one vCPU, polling and strict, without an
    /// IOMMU or with shared registers; else the main ones.
    pub fn works(&self) -> &'static [Work] {
        let is_plain = self.cpus == 1 && self.idle == "poll" && self.unmapping == Unmapping::Strict;
        match self.mode {
            Mode::None | Mode::Shared if is_plain => &Work::ALL,
            _ => &[Work::Write, Work::Read, Work::Echo],
        }
    }

    /// Returns the requests of its windows, of about `count`. An access to a register that traps
    /// takes an emulated machine milliseconds.
    pub fn count(&self, count: u32) -> u32 {
        match self.mode {
            Mode::Trap => (count / 2).max(16),
            Mode::None | Mode::Logged | Mode::Shared | Mode::Virtio => count,
        }
    }

    /// Returns its name in keys and progress.
    pub fn name(&self) -> String {
        let mut name = self.mode.name().to_owned();
        if self.mode != Mode::None {
            name = format!("{name}_{}", self.unmapping.name());
        }
        if self.idle != "poll" {
            name = format!("{name}_{}", self.idle);
        }
        if self.cpus > 1 {
            name = format!("{name}_{}cpus", self.cpus);
        }
        name
    }

    /// Returns the guest, which executes steps.
    pub fn guest(&self) -> Guest {
        let mut guest = Guest::new(self.mode, SCRIPT);
        guest.is_strict = self.unmapping == Unmapping::Strict;
        guest.cpus = self.cpus;
        guest.idle = self.idle;
        guest.limit = Duration::from_secs(900);
        guest.name = format!("-{}", self.name());
        guest
    }

    /// Returns the step that sets the unmap policy of the guest's kernel, and prints the type of
    /// the devices' groups.
    pub fn prepare(&self) -> Option<String> {
        if self.mode == Mode::None {
            return None;
        }
        let devices = [Device::Nvme, Device::Net].map(Device::search).join("; ");
        let set = match self.unmapping {
            Unmapping::Strict => "",
            Unmapping::Lazy => "echo DMA-FQ >$t && ",
        };
        Some(format!(
            "for a in $({devices}); do t=/sys/bus/pci/devices/$a/iommu_group/type; {set}echo group \
             of $a is $(cat $t) || exit 1; done"
        ))
    }

    /// Returns the text that [`prepare`](Self::prepare) prints for each device.
    pub fn says(&self) -> &'static str {
        match self.unmapping {
            Unmapping::Strict => "is DMA\n",
            Unmapping::Lazy => "is DMA-FQ\n",
        }
    }
}

/// Requests of one kind, counted in a window of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// 4 KiB written, one at a time.
    Write,
    /// 4 KiB that were written, read and compared, one at a time.
    Read,
    /// 4 KiB read at random places, one at a time.
    Random,
    /// The same, 32 at a time.
    Deep,
    /// Read in order through the page cache, which chooses the size of requests; counted for each
    /// page of 4 KiB.
    Sequential,
    /// A datagram and its answer, one at a time.
    Echo,
    /// 32 datagrams in flight.
    Stream,
}

/// Requests before each window.
const WARM_UP: u32 = 64;
/// Seed of the pattern.
pub const SEED: u32 = 7;

impl Work {
    /// All.
    pub const ALL: [Self; 7] = [
        Self::Write,
        Self::Read,
        Self::Random,
        Self::Deep,
        Self::Sequential,
        Self::Echo,
        Self::Stream,
    ];

    /// Returns its name in tables and keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Random => "random",
            Self::Deep => "read_32",
            Self::Sequential => "sequential",
            Self::Echo => "echo",
            Self::Stream => "echo_32",
        }
    }

    /// Returns the device that works: the drive or the card.
    pub fn device(self) -> Device {
        match self {
            Self::Echo | Self::Stream => Device::Net,
            _ => Device::Nvme,
        }
    }

    /// Returns the requests of a window of about `count`.
    pub fn requests(self, count: u32) -> u32 {
        match self {
            Self::Sequential => mib(count) * 256,
            _ => count,
        }
    }

    /// Returns the step, with the peer's address.
    pub fn step(self, count: u32, peer: &str) -> String {
        let disk = "/dev/nvme0n1";
        let deep = |depth: u32, write: &str| {
            format!(
                "workload deep {disk} --depth {depth} --count {count} --warmup {WARM_UP} --seed \
                 {SEED} {write}"
            )
        };
        let echo = |depth: u32| {
            format!(
                "workload udp-echo {peer} --depth {depth} --count {count} --warmup {WARM_UP} \
                 --wait-ms 20000"
            )
        };
        match self {
            Self::Write => deep(1, "--write"),
            Self::Read => deep(1, ""),
            Self::Random => format!(
                "workload reads {disk} --count {count} --warmup {WARM_UP} --random {SEED} \
                 --in-place"
            ),
            Self::Deep => deep(32, ""),
            Self::Sequential => format!(
                "echo 3 >/proc/sys/vm/drop_caches; workload sequential {disk} --mib {} \
                 --iterations 1 --alloc-mib 0 \
                 --seed {SEED} --marker",
                mib(count)
            ),
            Self::Echo => echo(1),
            Self::Stream => echo(32),
        }
    }

    /// Returns whether each of its requests is compared with the expected content.
    pub fn is_verified(self) -> bool {
        self != Self::Random && self != Self::Write
    }
}

/// Returns the MiB that hold so many pages, 1 at least.
fn mib(pages: u32) -> u32 {
    (pages / 256).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn cases_and_works_differ_in_name() {
        let names: BTreeSet<_> = Case::ALL.iter().map(Case::name).collect();
        assert_eq!(names.len(), Case::ALL.len());
        let works: BTreeSet<_> = Work::ALL.map(Work::name).into();
        assert_eq!(works.len(), Work::ALL.len());
        let policies: BTreeSet<_> = HostPolicy::ALL.map(HostPolicy::name).into();
        assert_eq!(policies.len(), HostPolicy::ALL.len());
    }

    #[test]
    fn a_guest_without_an_iommu_has_no_policy() {
        for case in Case::ALL {
            let is_off = case.policies == OFF;
            assert_eq!(is_off, case.mode == Mode::None, "{}", case.name());
            assert_eq!(case.prepare().is_none(), is_off);
        }
    }
}
