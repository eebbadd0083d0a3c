//! Ledger of a machine: the source of its counts, its marker port, and the report at the end.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use guest_mem::{PhysMem, Region};
use machine::Request;
use pv_iommu::PvIommu;
use sidecore::{Nanos, Watch};
use swap::report::Report;
use vio::balloon::Balloon;
use vtd_port::VtdPort;

use super::args::{DmaArg, IdleArg};
use super::attach::Parts;
use super::balloon::{BalloonStatus, BalloonWatch};
use super::composed::{AssignedDevice, Functions, Owner, Units};
use super::config::Config;
use super::host_faults::HostFaults;
use super::memory::{AskPager, OwnerHandle, PagerStatus};
use crate::composition::Findings;
use crate::messages;
use exit_ledger::account::{
    BalloonCounts, BalloonFigures, DeviceCounts, DeviceFigures, KVM_COUNTERS, OwnerCounts,
    ParavirtualCounts, ParavirtualFigures, SidecoreCounts, Snapshot, Swap, SwapCounts, UserExits,
};
use exit_ledger::kvm_stats::VcpuStats;
use exit_ledger::report::{self, Conditions};
use exit_ledger::trace::ExitHistogram;
use exit_ledger::{Ledger, Source, conditions};
use kvm::doorbells::Places;
use kvm::exits::{ExitCause, ExitLedger};
use platform::layout;
use platform::power::MarkerSink;

/// `KVM_GET_STATS_FD`: `_IO(0xAE, 0xce)`.
const KVM_GET_STATS_FD: u64 = 0xaece;

/// Source of the parts of a snapshot.
pub struct LedgerSource<F, M> {
    stats: Vec<VcpuStats>,
    exits: ExitLedger,
    owner: OwnerHandle<F, M>,
    sidecore: Watch,
    /// Set up at the first mark, when the vCPUs' threads exist; `None` where tracefs is not to be
    /// had.
    histogram: OnceLock<Option<ExitHistogram>>,
    /// Doorbells that other processes read.
    forwarded: Vec<Arc<Places>>,
    /// Guest memory.
    ram: Vec<Range<u64>>,
    /// State of the pager, where there is one.
    pager: Option<AskPager>,
    /// The balloon, where there is one.
    balloon: Option<BalloonWatch>,
    /// Register pages of all remapping units.
    register_pages: Range<u64>,
    /// Assigned devices: numbers of their functions, and addresses on the host.
    devices: Vec<(usize, String)>,
    host_faults: Option<HostFaults>,
}

impl<F, M> LedgerSource<F, M> {
    /// Creates a source over the machine's vCPUs and the owner behind `owner`. The doorbells at
    /// `forwarded` are read by others, and counted by the kernel from the first mark on.
    pub fn new(
        parts: &Parts<'_>,
        owner: OwnerHandle<F, M>,
        sidecore: Watch,
        forwarded: Vec<Arc<Places>>,
        pager: Option<AskPager>,
    ) -> Result<Self> {
        let stats = parts.vcpus.iter().map(statistics_of);
        let stats = stats.collect::<io::Result<_>>().unwrap_or_else(|error| {
            messages::say!(
                "no statistics of KVM ({error}): the exit ledger has no counts of the kernel's; \
                 Linux 5.14 or newer has them"
            );
            Vec::new()
        });
        Ok(Self {
            stats,
            exits: parts.exits.clone(),
            owner,
            sidecore,
            histogram: OnceLock::new(),
            forwarded,
            ram: ram_of(parts),
            pager,
            balloon: None,
            register_pages: layout::VTD..layout::VTD + layout::VTD_SIZE,
            devices: Vec::new(),
            host_faults: None,
        })
    }

    /// Returns the same, of a machine whose units' register pages are these.
    pub fn with_register_pages(mut self, pages: Range<u64>) -> Self {
        self.register_pages = pages;
        self
    }

    /// Returns the same, of a machine with these assigned devices: numbers of their functions, and
    /// addresses on the host.
    pub fn with_devices(mut self, devices: Vec<(usize, String)>) -> Self {
        if !devices.is_empty() {
            self.host_faults = HostFaults::open();
        }
        self.devices = devices;
        self
    }

    /// Returns the same, of a machine with this balloon, if it has one.
    pub fn with_balloon(mut self, balloon: Option<BalloonWatch>) -> Self {
        self.balloon = balloon;
        self
    }

    fn user_exits(&self) -> UserExits {
        let exits = self.exits.snapshot();
        UserExits {
            iommu: exits.get(ExitCause::IommuRegister),
            doorbell: exits.get(ExitCause::Doorbell),
            iommu_doorbell: exits.get(ExitCause::IommuDoorbell),
            pci_config_mmio: exits.get(ExitCause::PciConfig),
            pci_config_pio: exits.get(ExitCause::PciConfigPort),
            device_mmio: exits.get(ExitCause::OtherDevice) + exits.get(ExitCause::Unclaimed),
            device_pio: exits.get(ExitCause::OtherPort) + exits.get(ExitCause::Marker),
        }
    }

    fn forwarded_doorbells(&self, histogram: &ExitHistogram) -> u64 {
        let is_doorbell = |gpa: u64| self.forwarded.iter().any(|places| places.contain(gpa));
        let writes = histogram.writes().unwrap_or_default();
        let doorbells = writes.iter().filter(|(gpa, _)| is_doorbell(*gpa));
        doorbells.map(|(_, count)| count).sum()
    }

    fn sidecore(&self, (minor_faults, major_faults): (u64, u64)) -> SidecoreCounts {
        let stats = self.sidecore.stats();
        SidecoreCounts {
            busy_ns: stats.core.busy_ns,
            idle_ns: stats.core.idle_ns,
            asleep_ns: stats.core.asleep_ns,
            sleeps: stats.core.sleeps,
            cpu_ns: u64::try_from(stats.cpu_time.as_nanos()).unwrap_or(u64::MAX),
            minor_faults,
            major_faults,
        }
    }
}

impl<F: Functions, M: PhysMem + Send + 'static> Source for LedgerSource<F, M> {
    fn prepare(&self) {
        self.histogram.get_or_init(|| {
            let threads = vcpu_threads();
            let mut histogram = ExitHistogram::new(&threads)
                .inspect_err(|error| {
                    messages::say!(
                        "no histograms of exits, which are counted and not told apart by their \
                         reasons: {error}"
                    );
                })
                .ok()?;
            let register_pages = self.register_pages.clone();
            if let Err(error) = histogram.locate_page_faults(register_pages, &self.ram) {
                tracing::warn!(%error, "page faults are not told apart by address: those in memory \
                     are unattributed");
            }
            if !self.forwarded.is_empty()
                && let Err(error) =
                    histogram.count_writes(layout::PCI_WINDOW, layout::PCI_WINDOW_END)
            {
                tracing::warn!(%error, "doorbells of disks behind sockets are not counted");
            }
            Some(histogram)
        });
    }

    fn snapshot(&self) -> Snapshot {
        let mut kvm = [0; KVM_COUNTERS.len()];
        for stats in &self.stats {
            if let Err(error) = stats.add_to(&mut kvm) {
                tracing::warn!(%error, "KVM's statistics cannot be read");
            }
        }
        let histogram = self.histogram.get().and_then(Option::as_ref);
        let watched = self.balloon.clone();
        let devices = self.devices.clone();
        let figures = move |owner: &mut Owner<F, M>| {
            let watched = watched.as_ref();
            let balloon = watched.and_then(|watched| {
                let balloon = watched.balloon(owner)?;
                Some(balloon_figures(balloon, watched.said(balloon)))
            });
            let devices: Vec<_> = devices
                .into_iter()
                .filter_map(|(number, address)| {
                    let device = owner.function(number)?.assigned()?;
                    Some(device_figures(device, address))
                })
                .collect();
            let paravirtual = paravirtual_figures(owner);
            // On the sidecore's thread, whose they are.
            let faults = faults_of_this_thread();
            (balloon, paravirtual, owner_counts(owner), devices, faults)
        };
        let figures = self.owner.call(|reply| Request::ask(reply, figures));
        let (balloon, paravirtual, mut owner, mut devices, faults) = figures.unwrap_or_default();
        for device in &mut devices {
            let faults = self.host_faults.as_ref();
            device.counts.host_faults = faults.map_or(0, |faults| faults.of(&device.address));
        }
        owner.doorbells += histogram.map_or(0, |histogram| self.forwarded_doorbells(histogram));
        Snapshot {
            now_ns: Nanos::now().0,
            kvm,
            traced: histogram.and_then(|histogram| histogram.read().ok()),
            page_faults: histogram.and_then(|histogram| histogram.page_faults().ok()?),
            user: self.user_exits(),
            owner,
            sidecore: self.sidecore(faults),
            swap: self.pager.as_ref().and_then(|ask| ask()).map(swap),
            paravirtual,
            balloon,
            devices,
        }
    }
}

/// Opens the counters that KVM has of a vCPU.
fn statistics_of(vcpu: &BorrowedFd<'_>) -> io::Result<VcpuStats> {
    // SAFETY: the request takes no argument and answers a descriptor or -1.
    let fd = unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_GET_STATS_FD as _, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor the kernel has just given to us alone.
    VcpuStats::new(unsafe { File::from_raw_fd(fd) }, &KVM_COUNTERS)
}

fn swap(status: PagerStatus) -> Swap {
    Swap {
        resident: status.report.present as u64,
        stored: (status.report.slots - status.report.free_slots) as u64,
        tracked: status.report.tracked as u64,
        counts: swap_counts(status.report),
        pause_reason: status.pause_reason,
    }
}

fn device_figures(device: &AssignedDevice, address: String) -> DeviceFigures {
    let shadow = device.shadow();
    let assign::shadow::Counts {
        pages_told,
        domains_told,
        others_told,
        maps,
        mapped_pages,
        unmaps,
        unmapped,
        hits,
        misses,
        cut,
        not_ram,
        not_allowed,
        refused,
        pass_through,
        attached,
        longest_call_ns,
    } = shadow.counts();
    let (pinned, pinned_peak) = shadow.book().pages();
    let (guest_pages, guest_pages_peak) = shadow.book().live_pages();
    let risk = shadow.risk();
    DeviceFigures {
        address,
        policy: shadow.policy().name().into(),
        pinned,
        pinned_peak,
        guest_pages,
        guest_pages_peak,
        stale: risk.stale_now,
        stale_max: risk.stale_max,
        stale_ns_max: risk.stale_times.max_ns,
        stale_allowed: risk.contract.max_stale,
        stale_ns_allowed: risk.contract.max_age_ns,
        longest_call_ns,
        counts: DeviceCounts {
            pages_told,
            domains_told,
            others_told,
            maps,
            mapped_pages,
            unmaps,
            unmapped,
            hits,
            misses,
            cut,
            refused: not_ram + not_allowed + refused,
            attached,
            pass_through,
            host_faults: 0,
        },
    }
}

fn balloon_figures(balloon: &Balloon, said: BalloonStatus) -> BalloonFigures {
    let vio::balloon::BalloonCounts {
        inflated,
        deflated,
        reported,
        outside,
        statistics: _,
    } = balloon.counts();
    let BalloonStatus { actual, statistics } = said;
    BalloonFigures {
        target: balloon.target().into(),
        actual: actual.into(),
        free: statistics.free,
        available: statistics.available,
        major_faults: statistics.major_faults,
        counts: BalloonCounts {
            inflated,
            deflated,
            reported,
            outside,
        },
    }
}

fn swap_counts(report: Report) -> SwapCounts {
    let Report {
        limit: _,
        present: _,
        slots: _,
        tracked: _,
        free_slots: _,
        counts,
        traffic,
        faults,
        prevented,
        undecided,
        false_reads,
        tickets,
        pauses,
        last_pause: _,
        is_paused: _,
    } = report;
    SwapCounts {
        faults,
        prevented,
        undecided,
        device_waits: tickets,
        dropped_to_disk: counts.dropped_to_disk,
        dropped_as_zeroes: counts.dropped_as_zeroes,
        swapped_out: traffic.store_writes.pages,
        swapped_in: traffic.store_reads.pages,
        swap_write_requests: traffic.store_writes.requests,
        swap_read_requests: traffic.store_reads.requests,
        trimmed: traffic.store_trims.pages,
        image_pages: traffic.image_reads.pages,
        image_requests: traffic.image_reads.requests,
        rescued: counts.rescued,
        zeroed: counts.zeroed,
        not_read: counts.not_fetched,
        read_before_a_write: counts.fetched_before_a_write,
        stale_reads: counts.stale,
        silent_swap_writes: counts.silent_writes,
        false_reads,
        decayed_sequentiality: counts.order_breaks,
        false_anonymity: major_faults(),
        discarded: counts.discarded,
        refused: counts.refused,
        pauses,
    }
}

/// Returns the page faults of the calling thread since it began: without I/O, and with.
fn faults_of_this_thread() -> (u64, u64) {
    // SAFETY: all zeroes are a value of this plain structure.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one structure, to the address given.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    assert_eq!(result, 0, "getrusage(2) fails for wrong arguments only");
    let count = |of| u64::try_from(of).unwrap_or(0);
    (count(usage.ru_minflt), count(usage.ru_majflt))
}

/// Returns the major faults of this process's threads so far, but those of vCPUs: of what is not
/// guest memory, since only vCPUs wait for that. Of threads that have ended none.
fn major_faults() -> u64 {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return 0;
    };
    let stats = tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    stats.filter_map(|stat| major_faults_of(&stat)).sum()
}

/// Returns those of the thread whose `/proc/…/stat` this is: `None` of a vCPU's.
fn major_faults_of(stat: &str) -> Option<u64> {
    /// Field 12, `majflt`; the name, which may hold anything, is field 2.
    const BEHIND_THE_NAME: usize = 12 - 3;
    let (name, fields) = stat.rsplit_once(')')?;
    let is_vcpu = name.split_once('(')?.1.starts_with("vcpu");
    let field = fields.split_ascii_whitespace().nth(BEHIND_THE_NAME)?;
    if is_vcpu { None } else { field.parse().ok() }
}

/// Returns the counters of the owner, its units and its functions.
pub(super) fn owner_counts<F: Functions, M: PhysMem>(owner: &mut Owner<F, M>) -> OwnerCounts {
    let totals = owner.totals();
    let mut counts = OwnerCounts::default();
    for at in 0.. {
        match owner.unit(at) {
            Some(Units::Vtd(port)) => counts = counts.plus(&vtd_counts(port)),
            Some(Units::Paravirtual(unit)) => counts = counts.plus(&paravirtual_counts(unit)),
            Some(Units::None(_)) => {}
            None => break,
        }
    }
    counts.doorbells = totals.doorbells - totals.iommu_doorbells;
    counts.iommu_doorbells = totals.iommu_doorbells;
    counts.requests = totals.requests;
    counts.interrupts = totals.interrupts;
    counts.pends = totals.pends;
    counts
}

/// Returns the counts of a paravirtual unit: an UNMAP counts as an invalidation.
fn paravirtual_counts(unit: &PvIommu) -> OwnerCounts {
    let stats = unit.stats();
    OwnerCounts {
        invalidations: stats.unmaps,
        waits: stats.unmaps + stats.attaches + stats.detaches,
        leases_drained: stats.waits,
        faults: stats.faults,
        ..OwnerCounts::default()
    }
}

/// Returns the figures of the paravirtual unit of `owner`, if it has one.
fn paravirtual_figures<F: Functions, M: PhysMem>(
    owner: &mut Owner<F, M>,
) -> Option<ParavirtualFigures> {
    let requests = owner.totals().iommu_requests;
    let mut units = 0..;
    let unit = loop {
        if let Units::Paravirtual(unit) = owner.unit(units.next()?)? {
            break unit;
        }
    };
    let stats = unit.stats();
    let hints = unit.hint_counts();
    Some(ParavirtualFigures {
        domains: stats.domains,
        mappings: stats.mappings,
        counts: ParavirtualCounts {
            requests,
            attaches: stats.attaches,
            detaches: stats.detaches,
            maps: stats.maps,
            unmaps: stats.unmaps,
            removed: stats.removed,
            refused: stats.refused,
            waits: stats.waits,
            gathered: hints.gathered,
            unasked: hints.unasked,
            populated: hints.populated,
            kept: hints.kept,
        },
    })
}

fn vtd_counts(port: &VtdPort) -> OwnerCounts {
    let stats = port.stats();
    OwnerCounts {
        logged_writes: port.logged_writes(),
        gate_faults: port.gate_faults(),
        iotlb_hits: stats.iotlb_hits,
        iotlb_misses: stats.iotlb_misses,
        walks: stats.iotlb_misses + stats.context_walks + stats.leases_rechecked,
        invalidations: stats.context_invalidations
            + stats.global_invalidations
            + stats.domain_invalidations
            + stats.page_invalidations,
        waits: stats.waits,
        leases_drained: stats.waits_parked,
        faults: stats.faults_recorded + stats.faults_collapsed + stats.faults_dropped,
        ..OwnerCounts::default()
    }
}

/// Returns the ranges of guest memory.
fn ram_of(parts: &Parts<'_>) -> Vec<Range<u64>> {
    let start_and_end = |region: &Region| {
        let start = region.gpa.raw();
        start..start + region.len
    };
    parts.ram.regions().iter().map(start_and_end).collect()
}

/// Returns the threads of this process that run vCPUs, by their names.
fn vcpu_threads() -> Vec<i32> {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    tasks
        .flatten()
        .filter(|task| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("vcpu"))
        })
        .filter_map(|task| task.file_name().to_str()?.parse().ok())
        .collect()
}

/// The marker port writes the ledger.
pub struct MarkerLedger(Ledger);

impl MarkerLedger {
    /// Opens the account.
    pub fn new<F: Functions, M: PhysMem + Send + 'static>(source: LedgerSource<F, M>) -> Self {
        Self(Ledger::new(Box::new(source)))
    }
}

impl MarkerSink for MarkerLedger {
    fn marker(&self, value: u8) {
        self.0.mark(value);
    }
}

/// Closes the account and says what is in it.
pub struct Reporter {
    ledger: Arc<MarkerLedger>,
    conditions: Conditions,
    path: Option<PathBuf>,
    is_quiet: bool,
    findings: Option<Findings>,
}

impl Reporter {
    /// Reports under the conditions of `config`.
    pub fn new(ledger: Arc<MarkerLedger>, config: &Config) -> Self {
        let conditions = Conditions {
            mode: config.iommu.name().into(),
            idle: match config.idle {
                IdleArg::Poll => "poll",
                IdleArg::Adaptive => "adaptive",
                IdleArg::Sleep => "sleep",
            }
            .into(),
            dma: match config.dma {
                DmaArg::Direct => "direct",
                DmaArg::Bounce => "bounce",
            }
            .into(),
            cpus: config.cpus.into(),
            host_kernel: conditions::kernel_release(),
            host_cpu: conditions::cpu_model(),
        };
        Self {
            ledger,
            conditions,
            path: config.ledger.clone(),
            is_quiet: config.is_quiet,
            findings: None,
        }
    }

    /// Returns the same, with the findings of the program's own parts.
    pub fn with_findings(mut self, findings: Option<Findings>) -> Self {
        self.findings = findings;
        self
    }

    /// Prints the table, unless it is not wanted, and writes the file. Guest code has stopped; the
    /// sidecore has not.
    pub fn report(&self) -> Result<()> {
        let account = self.ledger.0.close();
        let findings = self
            .findings
            .as_ref()
            .map_or_else(Default::default, |of| of());
        if !self.is_quiet {
            messages::own(&report::table(&self.conditions, &account, &findings));
        }
        if let Some(path) = &self.path {
            crate::output::write(path, &report::json(&self.conditions, &account, &findings))
                .with_context(|| format!("writing the ledger {}", path.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_says_its_major_faults_unless_it_is_a_vcpus() {
        let stat =
            |name: &str| format!("7 ({name}) S 1 7 7 0 -1 4194560 1201 0 33 0 5 6 0 0 20 0 9 0");
        assert_eq!(major_faults_of(&stat("pager")), Some(33));
        assert_eq!(major_faults_of(&stat("a) b (c)")), Some(33));
        assert_eq!(major_faults_of(&stat("vcpu0")), None);
        for broken in ["", "7 (pager", "7 (pager) S 1"] {
            assert_eq!(major_faults_of(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn a_thread_s_first_touches_are_its_own_faults() {
        const PAGES: u64 = 100;
        let ram = guest_mem::GuestRam::with_pages(
            &[(guest_mem::Gpa::new(0), PAGES * 4096)],
            guest_mem::HugePages::Never,
        );
        let ram = ram.expect("memory");
        let touch = || {
            let before = faults_of_this_thread().0;
            for page in 0..PAGES {
                let at = guest_mem::Gpa::new(page * 4096);
                ram.write(at, &[1]).expect("memory");
            }
            faults_of_this_thread().0 - before
        };
        let first = touch();
        assert!((PAGES..PAGES + 20).contains(&first), "{first}");
        assert!(touch() < 20);
    }

    /// Code and data of a program are pages of a file, which the kernel may take from memory.
    #[test]
    fn a_page_of_a_file_that_was_taken_from_memory_counts_once_it_is_wanted() {
        use rustix::fs::{Advice, fadvise};
        use std::io::Write;
        const LEN: usize = 1 << 20;
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&[7; LEN]).expect("its content");
        file.sync_all().expect("on its disk");
        let fd = file.as_raw_fd();
        // SAFETY: a new mapping, of a file that no other process knows.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                LEN,
                libc::PROT_READ,
                libc::MAP_PRIVATE,
                fd,
                0,
            )
        };
        assert_ne!(mapped, libc::MAP_FAILED);
        let mapped: *const u8 = mapped.cast();
        // SAFETY: inside the mapping, which stays.
        let touch = || unsafe { mapped.read_volatile() };
        assert_eq!(touch(), 7);
        let before = major_faults();
        // SAFETY: the mapping above; it is read again from the file.
        let advised = unsafe { libc::madvise(mapped.cast_mut().cast(), LEN, libc::MADV_DONTNEED) };
        assert_eq!(advised, 0);
        fadvise(&file, 0, None, Advice::DontNeed).expect("advice");
        assert_eq!(touch(), 7);
        match major_faults() - before {
            0 => println!("skipped: the file system keeps the file in memory"),
            many => assert!(many < 100, "{many}"),
        }
    }
}
