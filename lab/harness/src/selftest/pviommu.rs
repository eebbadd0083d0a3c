//! Guests behind the paravirtual IOMMU, with Linux's own driver (kernels from 6.12 on) or this
//! workspace's module.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::packages::Version;

use super::case::Case;
use super::machine::{SEED, mixed_summary, with_disk};
use crate::pviommu_lab::spec;
use crate::system::guest::{Driver, Guest, Mode, Outcome};
use crate::system::late::{Attack, Counts, Policy};
use crate::system::workloads::{self, Rogue};

/// First of Debian's kernels with a virtio-iommu driver of its own.
const KERNEL: Version = Version::new(6, 12);

/// Last line of a guest's description of its machine.
const SEEN: &str = "machine seen";

/// The module, caching mappings.
const OPTIMISTIC: Driver = Driver::Module(&["reuse=optimistic"]);
/// The module, caching nothing.
const STRICT: Driver = Driver::Module(&[]);

/// Returns the cases of `make test`.
pub(super) fn quick() -> Vec<Case> {
    vec![
        io(Driver::Stock, Some(KERNEL), 2, true, 3),
        io(OPTIMISTIC, Some(KERNEL), 1, true, 3),
        io(STRICT, None, 2, true, 3),
        loads(Some(KERNEL), 10),
    ]
}

/// Returns the additional cases of the soak.
pub(super) fn soak() -> Vec<Case> {
    let mut cases = Vec::new();
    for cpus in [1, 2] {
        for is_strict in [true, false] {
            cases.push(io(Driver::Stock, Some(KERNEL), cpus, is_strict, 60));
        }
        for kernel in [None, Some(KERNEL)] {
            for driver in [STRICT, OPTIMISTIC] {
                cases.push(io(driver, kernel, cpus, true, 60));
            }
        }
    }
    cases.extend([loads(None, 100), loads(Some(KERNEL), 100), spec_cases()]);
    for kernel in [None, Some(KERNEL)] {
        cases.extend([late(Policy::OPTIMISTIC, kernel), late(Policy::RTC, kernel)]);
    }
    cases.extend([muted(STRICT, Some(KERNEL)), muted(OPTIMISTIC, None)]);
    cases
}

/// Case of the list that `exitless-lab pviommu-lab --only spec` runs against QEMU's device too.
fn spec_cases() -> Case {
    let name = format!(
        "{} cases of requests and accesses come out as the specification has it: virtio",
        spec::cases()
    );
    Case::new(name, |host| {
        let verdicts = spec::ours(host)?;
        let failures = verdicts.failures();
        ensure!(failures.is_empty(), "they did something else:\n{failures}");
        Ok(format!("{} passed", verdicts.passed()))
    })
    .with_spec_cases()
}

/// Describes a case's guests in its name.
fn described(driver: Driver, kernel: Option<Version>) -> String {
    let driver = match driver {
        Driver::Stock => "Linux's driver".into(),
        Driver::Module(parameters) => format!("our driver {}", parameters.join(" ")),
    };
    let kernel = kernel.map_or_else(String::new, |kernel| format!(" on {kernel}"));
    format!("{}{kernel}", driver.trim_end())
}

/// Returns a guest that first prints the state of its IOMMU, then runs `script`.
fn guest(driver: Driver, cpus: u32, is_strict: bool, script: &str) -> Guest {
    // The log has the command line; the pattern must not match itself.
    let script = format!(
        "dmesg | grep -E 'iommu virti[o]|iomm[u]:|iommu grou[p]'; \
         cat /sys/bus/virtio/drivers/exitless-iommu/endpoints 2>/dev/null; echo {SEEN}; {script}"
    );
    let mut guest = Guest::new(Mode::Virtio, script);
    (guest.driver, guest.cpus, guest.is_strict) = (driver, cpus, is_strict);
    guest.idle = "adaptive";
    guest
}

/// Checks that the driver has the IOMMU, that `endpoints` devices are behind it, and that there was
/// no fault while it booted.
fn check(outcome: &Outcome, driver: Driver, endpoints: usize) -> Result<()> {
    let (seen, _) = outcome
        .console
        .split_once(SEEN)
        .with_context(|| format!("it did not boot\n{}", outcome.tail()))?;
    let behind = match driver {
        Driver::Stock => {
            ensure!(
                seen.contains("virtio_iommu virtio0: input address: 48 bits"),
                "Linux's driver did not take the IOMMU\n{seen}"
            );
            seen.matches("Adding to iommu group").count()
        }
        Driver::Module(_) => seen.matches(" attached bound").count(),
    };
    ensure!(
        behind == endpoints,
        "{behind} devices behind it, not {endpoints}\n{seen}"
    );
    let has_faults = [" fault from EP", "fault: endpoint"].map(|words| seen.contains(words));
    ensure!(has_faults == [false; 2], "faults\n{seen}");
    let maps = outcome.ledger["whole"]["paravirtual"]["maps"].as_u64();
    ensure!(maps > Some(0), "nothing was mapped: {maps:?}");
    Ok(())
}

/// Case with disk and network behind it; then two disks attack.
fn io(driver: Driver, kernel: Option<Version>, cpus: u32, is_strict: bool, seconds: u32) -> Case {
    let policy = match (driver, is_strict) {
        (Driver::Stock, true) => ", strict",
        (Driver::Stock, false) => ", lazy",
        _ => "",
    };
    let name = format!(
        "verified I/O for {seconds} s, ping and UDP echo; then rogue DMA, unmapped and read-only, \
         is \
         blocked and the event queue says so: virtio, {}, {cpus} vCPU{policy}",
        described(driver, kernel)
    );
    Case::new(name, move |host| {
        let script = format!(
            "workload mixed {} --seconds {seconds} --seed 5 --depth 8 && {} && dmesg -n 1",
            workloads::disk_node(Mode::Virtio, 0),
            workloads::network_script(3, 50)
        );
        let guest = guest(driver, cpus, is_strict, &script);
        let mut guest = with_disk(guest, host, ",queues=2")?;
        workloads::add_network(&mut guest);
        for rogue in Rogue::ALL {
            rogue.add(&mut guest, host)?;
        }
        guest.limit += Duration::from_secs(u64::from(seconds) * 2);
        let outcome = guest.run(host)?;
        // The disks and the card.
        check(&outcome, driver, 2 + Rogue::ALL.len())?;
        workloads::check_network(&outcome)?;
        for disk in 0..Rogue::ALL.len() {
            workloads::check_told(&outcome, driver, 1 + disk)?;
        }
        mixed_summary(&outcome)
    })
    .with_guests(kernel)
}

/// Case in which a disk accesses buffers again that the guest has released: it is blocked once they
/// are older than the driver's policy allows, plus a period of its worker.
fn late(policy: Policy, kernel: Option<Version>) -> Case {
    const ATTACK: Attack = Attack {
        buffers: 10,
        rounds: 10,
        late: 50,
    };
    let name = format!(
        "late accesses to released buffers, at {} ms or later, are blocked, by the host's count: \
         virtio, {}",
        policy.late_ms(),
        described(policy.driver, kernel)
    );
    Case::new(name, move |host| {
        let mut guest = guest(policy.driver, 1, true, "dmesg -n 1");
        let disk = ATTACK.add(&mut guest, host, &policy)?;
        let outcome = guest.run(host)?;
        check(&outcome, policy.driver, 1)?;
        let counts = Counts::of(&outcome, disk)?;
        counts.check(ATTACK)?;
        Ok(format!(
            "{} blocked; before, {} of {} went through, the oldest after {} ms",
            counts.late_blocked,
            counts.early_allowed,
            counts.early_allowed + counts.early_blocked,
            counts.stale_ms_max
        ))
    })
    .with_guests(kernel)
}

/// Case in which the IOMMU answers nothing for 10 s under I/O of the disk: the guest's processor
/// goes on, and so does the I/O afterwards.
fn muted(driver: Driver, kernel: Option<Version>) -> Case {
    /// Requests before the silence: more than a guest makes while it boots, and less than its I/O
    /// makes.
    const REQUESTS: u64 = 2_000;
    let name = format!(
        "an IOMMU that is silent for 10 s under I/O leaves the processor usable, and I/O resumes: \
         virtio, {}",
        described(driver, kernel)
    );
    Case::new(name, move |host| {
        let disk = workloads::disk_node(Mode::Virtio, 0);
        // With a quota of zero every mapping is made anew. A loop without system calls competes for
        // the processor; its share of the ticks that the guest counts is measured while the driver
        // considers its device silent. Ticks, because a guest in the lab gets only part of the
        // time. Samples are rare: each starts programs.
        let script = format!(
            "mount -t debugfs d /sys/kernel/debug; \
             of() {{ grep \"^$1 \" /sys/kernel/debug/exitless-iommu/stats | cut -d' ' -f2; }}; \
             as() {{ n=0; while [ $(of $1) $2 0 ] && [ $n -lt 300 ]; do usleep 100000; n=$((n+1)); \
             done; }}; \
             ticks() {{ set -- $(head -n 1 /proc/stat); echo $(($2+$3+$4+$5+$6+$7+$8)); }}; \
             user() {{ cut -d' ' -f14 /proc/$spin/stat; }}; \
             echo 0 > /sys/module/exitless_iommu/parameters/quota; \
             sh -c 'while :; do :; done' & spin=$!; \
             workload mixed {disk} --seconds 25 --seed 5 --depth 4 > /tmp/io & io=$!; \
             as suspect -eq; u=$(user); t=$(ticks); \
             while [ $(of suspect) = 1 ]; do sleep 2; done; u=$(($(user)-u)); t=$(($(ticks)-t)); \
             wait $io; r=$?; kill $spin; cat /tmp/io; as quarantined -ne; echo muted user=$u; echo \
             muted ticks=$t; \
             for i in timeouts resumed quarantined suspect; do echo muted $i=$(of $i); done; [ $r \
             = 0 ]"
        );
        let mut guest = with_disk(guest(driver, 1, true, &script), host, "")?;
        guest.faults.push(format!("iommu:mute=10000@{REQUESTS}"));
        guest.limit += Duration::from_secs(200);
        let outcome = guest.run(host)?;
        check(&outcome, driver, 1)?;
        let polls = outcome.ledger["findings"]["iommu"]["muted_polls"].as_u64();
        ensure!(polls > Some(0), "it was never silent: {polls:?}");
        let of = |key: &str| -> Result<u64> {
            let head = format!("muted {key}=");
            let line = outcome.line(&head).with_context(|| format!("no {head}"))?;
            let (_, value) = line.split_once(&head).context("the line's head")?;
            value.trim().parse().with_context(|| line.to_owned())
        };
        let (user, ticks) = (of("user")?, of("ticks")?);
        let (timeouts, resumed) = (of("timeouts")?, of("resumed")?);
        let (quarantined, suspect) = (of("quarantined")?, of("suspect")?);
        ensure!(
            timeouts > 0 && resumed > 0 && quarantined == 0 && suspect == 0,
            "the driver has not found its device silent, or not well again\n{}",
            outcome.tail()
        );
        ensure!(
            ticks > 0 && user * 2 >= ticks,
            "the processor was not usable meanwhile: {user} of {ticks} ticks"
        );
        let io = mixed_summary(&outcome)?;
        let percent = 100 * user / ticks;
        Ok(format!(
            "{percent} % of the processor for a loop while silent, of {ticks} ticks, \
             {timeouts} timeouts, {resumed} resumed; {io}"
        ))
    })
    .with_guests(kernel)
}

/// Case in which the module is loaded and removed, with I/O of a disk each time; in the end the
/// host has removed every mapping, and detached every endpoint.
fn loads(kernel: Option<Version>, times: u32) -> Case {
    let name = format!(
        "{times} loads and unloads with verified I/O leave nothing mapped or attached: virtio, {}",
        described(OPTIMISTIC, kernel)
    );
    Case::new(name, move |host| {
        let script = format!(
            "i=0; while [ $i -lt {times} ]; do \
             workload check-pattern {} --bytes 262144 --seed {SEED} || exit 1; \
             echo all > /sys/bus/virtio/drivers/exitless-iommu/release || exit 1; \
             rmmod exitless_iommu || exit 1; i=$((i+1)); \
             lab-load iommu-module reuse=optimistic && lab-bind || exit 1; \
             done; echo all > /sys/bus/virtio/drivers/exitless-iommu/release && \
             rmmod exitless_iommu && echo loads ok",
            workloads::disk_node(Mode::Virtio, 0),
        );
        let guest = guest(OPTIMISTIC, 1, true, &script);
        let mut guest = with_disk(guest, host, "")?;
        guest.limit += Duration::from_secs(u64::from(times) * 10);
        let outcome = guest.run(host)?;
        check(&outcome, OPTIMISTIC, 1)?;
        outcome.line("loads ok").context("no closing line")?;
        let counts = &outcome.ledger["whole"]["paravirtual"];
        let of = |key: &str| {
            let count = counts[key].as_u64();
            count.with_context(|| format!("the ledger has no {key}: {counts}"))
        };
        ensure!(
            of("maps")? == of("removed")? && of("mappings")? == 0,
            "mapped and not removed: {counts}"
        );
        ensure!(
            of("attaches")? == of("detaches")? && of("domains")? == 0,
            "attached and not detached: {counts}"
        );
        // The first load, and each in the loop.
        ensure!(
            of("attaches")? > u64::from(times),
            "not loaded {times} times: {counts}"
        );
        Ok(format!(
            "{} mapped, {} attached",
            of("maps")?,
            of("attaches")?
        ))
    })
    .with_guests(kernel)
}
