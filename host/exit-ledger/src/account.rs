//! The account of exits: the cause to which each is charged, and what is left over.
//!
//! KVM counts exits but does not say whose they were: an in-kernel doorbell or a logged register
//! write shows up in the total and nowhere else. So each cause is counted where it is consumed:
//! doorbells as the sum of the values read from the eventfds, logged writes as entries drained from
//! the coalesced ring, traps in our own vCPU loop, page faults by address and processor causes by
//! the kernel's histograms ([`super::trace`]) or statistics. No cause is what is left of another.
//! Exits without a cause are *unattributed*, exits that two causes claim are the *overlap*, and
//! both are printed. They are computed for each kind of exit by itself, so that one does not offset
//! the other.

use serde::Serialize;

use super::counts::counts;
use super::reasons::{Reason, Split, Traced, combine, settle};

/// KVM counters a snapshot takes, in this order.
pub const KVM_COUNTERS: [&str; 4] = ["exits", "halt_exits", "irq_exits", "irq_window_exits"];

counts! {
    /// Exits that reached our vCPU loops, by what the guest had touched.
    UserExits {
        /// Accesses to the IOMMU's register pages (trap mode, or a logged page that is armed or
        /// whose ring is full).
        iommu,
        /// Doorbell writes no eventfd caught.
        doorbell,
        /// Those of a paravirtual IOMMU.
        iommu_doorbell,
        /// Configuration space: ECAM by memory, CF8/CFC by port.
        pci_config_mmio,
        /// Configuration space by port.
        pci_config_pio,
        /// Other devices by memory: BARs other than doorbells, IOAPIC.
        device_mmio,
        /// Other devices by port: console, marker, power.
        device_pio,
    }
}

counts! {
    /// Second-level page faults by address, as the kernel's tracepoint counts them: an exit each.
    PageFaults {
        /// On the IOMMU's register pages: trapped, logged, or stopped since it is armed, each
        /// attempt.
        register_page,
        /// In RAM: touched first, or protected.
        memory,
    }
}

counts! {
    /// Counters of the thread that owns the IOMMU and the devices.
    OwnerCounts {
        /// Register writes taken from the coalesced ring: an exit into the kernel each.
        logged_writes,
        /// Stores that met an armed (write-protected) register page: an exit each.
        gate_faults,
        /// Sum of the values read from the doorbell eventfds; of doorbells that another process
        /// reads, what the kernel counted since the first mark.
        doorbells,
        /// The same of a paravirtual IOMMU, whose are not among those.
        iommu_doorbells,
        /// Requests and frames served here.
        requests,
        /// Messages delivered to the local APICs from here.
        interrupts,
        /// IOTLB look-ups that hit.
        iotlb_hits,
        /// IOTLB look-ups that missed.
        iotlb_misses,
        /// Page walks.
        walks,
        /// Invalidation descriptors and register-based invalidations carried out.
        invalidations,
        /// WAIT descriptors completed.
        waits,
        /// Leases that delayed a WAIT until they ended.
        leases_drained,
        /// Fault records written, and requests refused without one (collapsed, overflow).
        faults,
        /// Times that a device's queue waited for guest memory that was absent.
        pends,
    }
}

counts! {
    /// Counters of the sidecore.
    SidecoreCounts {
        /// Nanoseconds in sweeps that found work.
        busy_ns,
        /// Nanoseconds in sweeps and waits that found none.
        idle_ns,
        /// Nanoseconds asleep in the kernel.
        asleep_ns,
        /// Sleeps.
        sleeps,
        /// CPU time of the thread, as the kernel accounts it.
        cpu_ns,
        /// Page faults of the thread that needed no I/O: mostly pages of guest memory that it
        /// reached for the first time, itself or by a system call.
        minor_faults,
        /// Those that waited for I/O.
        major_faults,
    }
}

counts! {
    /// Counters of the pager, of a machine whose memory is partly in a swap store or on disks.
    /// Pages of 4 KiB unless another unit is named.
    SwapCounts {
        /// Faults of vCPUs.
        faults,
        /// Absent pages that were not read since a vCPU was about to overwrite them.
        prevented,
        /// Times that vCPUs were stopped to find out whether a page is about to be overwritten,
        /// without an answer.
        undecided,
        /// Waits of devices and remapping units for absent pages, however many each.
        device_waits,
        /// Left memory unwritten: a disk holds the same.
        dropped_to_disk,
        /// Left memory unwritten: zeroes.
        dropped_as_zeroes,
        /// Written to the swap store.
        swapped_out,
        /// Read from it, ahead or not.
        swapped_in,
        /// Requests to write it.
        swap_write_requests,
        /// Requests to read it.
        swap_read_requests,
        /// Pages of it that were given back to what is below it (`--swap …,discard=on`).
        trimmed,
        /// Read from the images of disks to bring pages back, ahead or not.
        image_pages,
        /// Requests for those.
        image_requests,
        /// Came back from a second chance.
        rescued,
        /// Came as zeroes.
        zeroed,
        /// About to be overwritten as a whole, and not read although they held something.
        not_read,
        /// Read since the block that held the same was about to change.
        read_before_a_write,
        /// Read although a device was about to overwrite them: 0, but where a control asks for it.
        stale_reads,
        /// Written to the swap store although a disk held the same, as far as is known: of a block
        /// that stands for many pages, or where a control asks for it. Where disks do not report
        /// (`--mapper off`) it is unknown.
        silent_swap_writes,
        /// Read although a vCPU was seen to be about to overwrite them as a whole: there was no
        /// room, or a control asks for it. Those for which no vCPU was stopped are not among them.
        false_reads,
        /// Runs of consecutive blocks into which the swap store breaks a disk's order, of what a
        /// control writes silently: 0 else.
        decayed_sequentiality,
        /// Times that a thread of the process other than a vCPU's waited for its own code or data
        /// to be read: major faults. (The kernel takes each wait of a vCPU for the pager for one as
        /// well.)
        false_anonymity,
        /// Given up by the guest through its balloon, and gone unwritten.
        discarded,
        /// Not released, since a device used them.
        refused,
        /// Times the machine was paused.
        pauses,
    }
}

/// Counters and state of the pager, and the reason of the last pause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Swap {
    /// Its counters.
    #[serde(flatten)]
    pub counts: SwapCounts,
    /// Pages in memory; of a window, at its end, as all that is no count.
    pub resident: u64,
    /// Pages of the swap store that hold something.
    pub stored: u64,
    /// Pages that are backed by blocks of disks, in memory or not.
    pub tracked: u64,
    /// Reason of the last pause of the machine; of a window, of the last pause in it.
    pub pause_reason: Option<String>,
}

impl Swap {
    /// Returns the counters since `earlier`, with the present state.
    fn since(&self, earlier: &SwapCounts) -> Self {
        let counts = self.counts.since(earlier);
        let was_paused = counts.pauses > 0;
        Self {
            counts,
            resident: self.resident,
            stored: self.stored,
            tracked: self.tracked,
            pause_reason: self.pause_reason.clone().filter(|_| was_paused),
        }
    }
}

counts! {
    /// Requests of the guest to a paravirtual IOMMU.
    ParavirtualCounts {
        /// Requests taken from its ring, with any outcome.
        requests,
        /// ATTACH requests carried out.
        attaches,
        /// DETACH requests carried out.
        detaches,
        /// MAP requests carried out: a mapping each.
        maps,
        /// UNMAP requests carried out.
        unmaps,
        /// Mappings that UNMAP requests have removed, or that went with their domain.
        removed,
        /// Requests refused.
        refused,
        /// Requests that had to wait for accesses under way.
        waits,
        /// Times that absent pages were asked for at a MAP.
        gathered,
        /// MAPs of which not all pages were asked for, since too many were.
        unasked,
        /// Windows of 1 MiB that were populated ahead of devices.
        populated,
        /// Pages that the guest has given back and that stay in memory, since their window was
        /// being populated.
        kept,
    }
}

/// State of a paravirtual IOMMU at the end of a window, and the requests to it in the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ParavirtualFigures {
    /// Domains.
    pub domains: u64,
    /// Mappings in all of them.
    pub mappings: u64,
    /// Its requests.
    #[serde(flatten)]
    pub counts: ParavirtualCounts,
}

impl ParavirtualFigures {
    /// Returns the present state, with the requests since `earlier`.
    fn since(&self, earlier: &Self) -> Self {
        Self {
            counts: self.counts.since(&earlier.counts),
            ..*self
        }
    }
}

counts! {
    /// Pages that the guest named to a balloon. Pages of 4 KiB; one that was named twice counts
    /// twice.
    BalloonCounts {
        /// Put into it.
        inflated,
        /// Taken back.
        deflated,
        /// Reported as free.
        reported,
        /// Named, and no memory of the guest's.
        outside,
    }
}

/// State of a balloon at the end of a window, and the pages named to it in the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BalloonFigures {
    /// Pages of 4 KiB that it is to have.
    pub target: u64,
    /// Pages that it has, as the guest says.
    pub actual: u64,
    /// Bytes that the guest uses for nothing, by its last report; none if it reports none.
    pub free: Option<u64>,
    /// Bytes that new programs of the guest could have, as it estimates.
    pub available: Option<u64>,
    /// Faults of the guest's own that waited for a disk, since it booted.
    pub major_faults: Option<u64>,
    /// Pages that the guest named.
    #[serde(flatten)]
    pub counts: BalloonCounts,
}

impl BalloonFigures {
    /// Returns the present state, with the pages named since `earlier`.
    fn since(&self, earlier: &Self) -> Self {
        Self {
            counts: self.counts.since(&earlier.counts),
            ..*self
        }
    }
}

counts! {
    /// Counters of an assigned device: the guest's invalidations of its mappings, and the calls
    /// that follow from them.
    DeviceCounts {
        /// Invalidations of pages.
        pages_told,
        /// Of its domain.
        domains_told,
        /// Of contexts, and of everything.
        others_told,
        /// Calls of VFIO that map.
        maps,
        /// Pages mapped by them.
        mapped_pages,
        /// Calls that unmap.
        unmaps,
        /// Mappings ended by them.
        unmapped,
        /// Stale mappings that the guest mapped again: no call.
        hits,
        /// Mappings that had to be made.
        misses,
        /// Mappings of which the guest unmapped a part.
        cut,
        /// Runs of pages that are no memory, that the host's IOMMU does not allow, or that the host
        /// refused.
        refused,
        /// Times that it was attached to something else.
        attached,
        /// Pass-through contexts.
        pass_through,
        /// DMA that the host's IOMMU refused, as far as its kernel's log has it.
        host_faults,
    }
}

/// An assigned device as it stands at the end of a window, and what was done for it in the window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceFigures {
    /// Its address on the host.
    pub address: String,
    /// When what the guest unmaps is unmapped.
    pub policy: String,
    /// Pages pinned, each mapping counted.
    pub pinned: u64,
    /// Most since the machine started.
    pub pinned_peak: u64,
    /// Pages that the guest maps, each mapping counted.
    pub guest_pages: u64,
    /// Most since the machine started.
    pub guest_pages_peak: u64,
    /// Mappings that the guest has unmapped and the device reaches: now, and most since the policy
    /// was set.
    pub stale: u64,
    /// See `stale`.
    pub stale_max: u64,
    /// Longest time that one was, ns.
    pub stale_ns_max: u64,
    /// Most that the policy allows.
    pub stale_allowed: Option<u64>,
    /// Longest time that it allows, ns, but for the time that an unmap takes.
    pub stale_ns_allowed: Option<u64>,
    /// Longest call of VFIO, ns.
    pub longest_call_ns: u64,
    /// Its counters.
    #[serde(flatten)]
    pub counts: DeviceCounts,
}

impl DeviceFigures {
    /// Returns the present state, with the counts since `earlier`.
    fn since(&self, earlier: &[Self]) -> Self {
        let same = earlier.iter().find(|other| other.address == self.address);
        let before = same.map(|other| other.counts).unwrap_or_default();
        Self {
            counts: self.counts.since(&before),
            ..self.clone()
        }
    }
}

/// Everything at one moment; two of them make a window.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Monotonic time, for idle shares only.
    pub now_ns: u64,
    /// [`KVM_COUNTERS`], summed over the vCPUs.
    pub kvm: [u64; KVM_COUNTERS.len()],
    /// Histograms, where the host gives them.
    pub traced: Option<Traced>,
    /// Page faults by address, where it gives those.
    pub page_faults: Option<PageFaults>,
    /// Our vCPU loops.
    pub user: UserExits,
    /// The owner.
    pub owner: OwnerCounts,
    /// The sidecore.
    pub sidecore: SidecoreCounts,
    /// The pager, where there is one.
    pub swap: Option<Swap>,
    /// The paravirtual IOMMU, where there is one.
    pub paravirtual: Option<ParavirtualFigures>,
    /// The balloon, where there is one.
    pub balloon: Option<BalloonFigures>,
    /// Assigned devices.
    pub devices: Vec<DeviceFigures>,
}

/// Exits by cause. All are counts: `total` is the causes and `unattributed`, less the `overlap`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Exits {
    /// All exits, as KVM counts them.
    pub total: u64,
    /// IOMMU registers: trapped, logged, or tried while the page is armed.
    pub iommu: u64,
    /// Doorbells.
    pub doorbell: u64,
    /// Those of a paravirtual IOMMU.
    pub iommu_doorbell: u64,
    /// PCI configuration.
    pub pci_config: u64,
    /// Other devices: console, power, marker, BAR registers, IOAPIC.
    pub other_device: u64,
    /// Host interrupts and interrupt windows: delivery of the guest's interrupts.
    pub interrupt: u64,
    /// Local APIC registers: end of interrupt, inter-processor interrupts.
    pub apic: u64,
    /// `hlt`.
    pub hlt: u64,
    /// The guest's timer being programmed, host timers firing while it ran.
    pub timer: u64,
    /// `pause` loops.
    pub pause: u64,
    /// Page faults in RAM: first touches, and pages that are protected.
    pub memory: u64,
    /// CPUID, other MSRs, control registers, hypercalls.
    pub processor: u64,
    /// Exits without a cause.
    pub unattributed: u64,
    /// Exits that two causes claim.
    pub overlap: u64,
}

/// The difference of two snapshots.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Window {
    /// Its duration, in nanoseconds. Meaningless in the lab but for idle shares.
    pub duration_ns: u64,
    /// Exits by cause.
    pub exits: Exits,
    /// The owner's work.
    pub owner: OwnerCounts,
    /// The sidecore's time.
    pub sidecore: SidecoreCounts,
    /// The pager's work, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap: Option<Swap>,
    /// The paravirtual IOMMU, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paravirtual: Option<ParavirtualFigures>,
    /// The balloon, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonFigures>,
    /// Assigned devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceFigures>,
    /// Whether the kernel's histograms distinguished processor causes.
    pub histograms: bool,
}

impl Window {
    /// Returns the difference from `begin` to `end`.
    pub fn between(begin: &Snapshot, end: &Snapshot) -> Self {
        let user = end.user.since(&begin.user);
        let owner = end.owner.since(&begin.owner);
        let kvm: Vec<u64> = end
            .kvm
            .iter()
            .zip(&begin.kvm)
            .map(|(e, b)| e.saturating_sub(*b))
            .collect();
        let traced = end.traced.zip(begin.traced).map(|(e, b)| e.since(&b));
        let faults = end.page_faults.zip(begin.page_faults);
        let faults = faults.map(|(e, b)| e.since(&b));
        Self {
            duration_ns: end.now_ns.saturating_sub(begin.now_ns),
            exits: charge(&kvm, traced.as_ref(), faults.as_ref(), &user, &owner),
            owner,
            sidecore: end.sidecore.since(&begin.sidecore),
            // It begins behind the first snapshot.
            swap: end.swap.as_ref().map(|swap| {
                let earlier = begin.swap.as_ref().map(|swap| swap.counts);
                swap.since(&earlier.unwrap_or_default())
            }),
            paravirtual: end
                .paravirtual
                .map(|unit| unit.since(&begin.paravirtual.unwrap_or_default())),
            balloon: end
                .balloon
                .map(|balloon| balloon.since(&begin.balloon.unwrap_or_default())),
            devices: end
                .devices
                .iter()
                .map(|device| device.since(&begin.devices))
                .collect(),
            histograms: traced.is_some(),
        }
    }
}

fn charge(
    kvm: &[u64],
    traced: Option<&Traced>,
    faults: Option<&PageFaults>,
    user: &UserExits,
    owner: &OwnerCounts,
) -> Exits {
    let mut exits = Exits {
        total: kvm[0],
        iommu: user.iommu + owner.logged_writes + owner.gate_faults,
        doorbell: user.doorbell + owner.doorbells,
        iommu_doorbell: user.iommu_doorbell + owner.iommu_doorbells,
        pci_config: user.pci_config_mmio + user.pci_config_pio,
        other_device: user.device_mmio + user.device_pio,
        ..Exits::default()
    };
    match traced {
        Some(traced) => {
            let split = combine(traced);
            exits.settle(exits.total, traced.exits());
            exits.by_reason(&split, user);
            exits.by_address(&split, faults, user);
        }
        None => {
            exits.hlt = kvm[1];
            exits.interrupt = kvm[2] + kvm[3];
            exits.settle(exits.total, exits.claimed());
        }
    }
    exits
}

impl Exits {
    /// Adds what `claimed` leaves of `exits` to the unattributed exits, and what it has beyond them
    /// to the overlap.
    fn settle(&mut self, exits: u64, claimed: u64) {
        let (rest, beyond) = settle(exits, claimed);
        self.unattributed += rest;
        self.overlap += beyond;
    }

    /// Charges all exits but those that addresses distinguish.
    fn by_reason(&mut self, split: &Split, user: &UserExits) {
        let of = |reason| split.of(reason);
        self.interrupt = of(Reason::Interrupt);
        self.apic = of(Reason::Apic);
        self.hlt = of(Reason::Hlt);
        self.timer = of(Reason::Timer);
        self.pause = of(Reason::Pause);
        self.processor = of(Reason::Other);
        self.unattributed += of(Reason::Unnamed);
        self.overlap += split.overlap;
        self.settle(of(Reason::Io), user.pci_config_pio + user.device_pio);
    }

    /// Charges memory and devices. An access to the register page that the owner counts is one of
    /// the page faults there, or a misconfiguration; the other faults there are the IOMMU's too:
    /// attempts at an armed page, first touches of it.
    fn by_address(&mut self, split: &Split, faults: Option<&PageFaults>, user: &UserExits) {
        let misconfigurations = split.of(Reason::Misconfiguration);
        let heard_of = self.iommu;
        let mut unseen = 0;
        if let Some(faults) = faults {
            self.memory = faults.memory;
            self.iommu = heard_of.max(faults.register_page);
            (_, unseen) = settle(faults.register_page + misconfigurations, heard_of);
            self.overlap += unseen;
        }
        let doorbells = self.doorbell + self.iommu_doorbell;
        let devices = doorbells + user.pci_config_mmio + user.device_mmio;
        let claimed = self.iommu - unseen + devices + self.memory;
        self.settle(split.of(Reason::PageFault) + misconfigurations, claimed);
    }

    /// Returns the exits that have a cause.
    fn claimed(&self) -> u64 {
        self.iommu
            + self.doorbell
            + self.iommu_doorbell
            + self.pci_config
            + self.other_device
            + self.interrupt
            + self.apic
            + self.hlt
            + self.timer
            + self.pause
            + self.memory
            + self.processor
    }
}

#[cfg(test)]
mod tests;
