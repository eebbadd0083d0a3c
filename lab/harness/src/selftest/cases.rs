//! Cases of the self-test: each boots a stock guest and checks the outcome.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::case::Case;
use super::machine::{MIB, Machine, SEED, check_pattern, mixed_summary, with_disk};
use super::{ballooned, caged, elf, held, net, power, punched, pviommu, swapped, vhost};
use crate::system::daemon::DaemonPlan;
use crate::system::guest::{Guest, Mode, Outcome};
use crate::system::host::Host;
use crate::system::programs::Exitless;
use crate::system::workloads::{self, Rogue};

/// Returns the cases of `make test`: each kind of case once, the longest first.
pub fn quick() -> Vec<Case> {
    // A machine has three parameters (register mode, vCPUs, strict or lazy). Every pair of values
    // occurs in some guest that does more than boot. In trap mode a sidecore is woken in both ways:
    // by a doorbell, and by a vCPU that waits for the answer to a register access.
    let mut cases = every(&[Mode::Trap]);
    cases.extend(swapped::quick());
    cases
}

/// Returns all cases except those that only boot, with forced sleeps in the modes `sleeps_under`.
fn every(sleeps_under: &[Mode]) -> Vec<Case> {
    let mut cases = held::quick();
    cases.extend([
        remote_disk(1),
        remote_disk_behind(Machine::new(Mode::Logged, 1, true), 1),
        mixed(Machine::new(Mode::Shared, 4, true), 8, "poll"),
        network(Machine::new(Mode::Trap, 4, true)),
        entropy(Machine::new(Mode::Shared, 1, true)),
        rogue(Machine::new(Mode::Logged, 4, false)),
        bounce(Machine::new(Mode::Shared, 1, false)),
        reset(Machine::new(Mode::Trap, 1, false)),
    ]);
    cases.extend(vhost::quick());
    cases.extend(power::quick());
    cases.extend(net::quick());
    cases.extend(pviommu::quick());
    cases.extend(caged::quick());
    cases.extend(sleeps_under.iter().map(|mode| forced_sleeps(*mode, 200)));
    cases.push(both_programs(Mode::Trap));
    cases.push(idle());
    cases
}

/// Returns the cases of `make soak`: each case twenty times, the boot of each machine included, and
/// long runs of I/O.
pub fn soak() -> Vec<Case> {
    let named = |round: u32| {
        let boots = Machine::all().map(boot);
        boots.chain(every(&Mode::VTD)).map(move |mut case| {
            case.name.push_str(&format!(", round {round} of 20"));
            case
        })
    };
    let mut cases: Vec<Case> = (1..=20).flat_map(named).collect();
    cases.extend(
        ["poll", "adaptive"].map(|idle| mixed(Machine::new(Mode::Shared, 4, true), 300, idle)),
    );
    // As many vCPUs as `run` permits. Each is a thread, and the lab's host has two processors for
    // all of them.
    cases.push(mixed(Machine::new(Mode::Shared, 16, true), 60, "adaptive"));
    cases.extend(elf::soak());
    cases.push(remote_disk(20));
    // Each register mode, strict and lazy.
    for mode in Mode::VTD {
        cases.extend([true, false].map(|is_strict| {
            let machine = Machine::new(mode, 2, is_strict);
            remote_disk_behind(machine, 5)
        }));
    }
    cases.extend(Mode::VTD.map(|mode| forced_sleeps(mode, 2000)));
    cases.extend(held::soak());
    cases.extend(power::soak());
    cases.extend(net::soak());
    cases.extend(vhost::soak());
    cases.extend(pviommu::soak());
    cases.extend(swapped::soak());
    cases.extend(ballooned::soak());
    cases.extend(punched::soak());
    cases
}

fn boot(machine: Machine) -> Case {
    Case::new(format!("boot: {}", machine.name()), move |host| {
        let mut guest = with_disk(machine.guest(&check_pattern("/dev/vda")), host, ",queues=2")?;
        guest.idle = "adaptive";
        let outcome = guest.run(host)?;
        machine.check(&outcome)?;
        let waits = &outcome.ledger["whole"]["owner"]["waits"];
        Ok(format!("{waits} invalidation waits"))
    })
}

fn mixed(machine: Machine, seconds: u32, idle: &'static str) -> Case {
    let name = format!(
        "mixed, verified I/O for {seconds} s, the disk refused to a second run: {}, --idle {idle}",
        machine.name()
    );
    Case::new(name, move |host| {
        // The first run keeps the disk until the second has ended, however late that started.
        let script = format!(
            "echo now mixed && workload mixed /dev/vda --seconds {seconds} --seed 5 --depth 8 && \
             workload button"
        );
        let mut guest = with_disk(machine.guest(&script), host, ",queues=4")?;
        guest.idle = idle;
        guest.limit =
            Duration::from_secs(u64::from(seconds) * 2 + 180 + 20 * u64::from(machine.cpus));
        let mut first = guest.spawn(host)?;
        let second = match first.wait_for("now mixed") {
            Ok(()) => Some(guest.try_run(host)?),
            // The first run has ended; `check` below returns the reason.
            Err(_) => None,
        };
        if first.wait_for("button ready").is_ok() {
            first.terminate()?;
        }
        let outcome = first.wait()?;
        outcome.check()?;
        machine.check(&outcome)?;
        let second = second.context("it did not say that it begins")?;
        ensure!(
            second.exit == 2 && second.log.contains("disk0.img: in use: exitless (process"),
            "the second run ended with {}\n{}",
            second.exit,
            second.tail()
        );
        mixed_summary(&outcome)
    })
}

fn bounce(machine: Machine) -> Case {
    let name = format!(
        "mixed, verified I/O for 4 s, bounce buffers: {}",
        machine.name()
    );
    Case::new(name, move |host| {
        let script = "workload mixed /dev/vda --seconds 4 --seed 6 --depth 4";
        let mut guest = with_disk(machine.guest(script), host, "")?;
        guest.flags.extend(["--dma".into(), "bounce".into()]);
        let outcome = guest.run(host)?;
        machine.check(&outcome)?;
        mixed_summary(&outcome)
    })
}

fn network(machine: Machine) -> Case {
    let name = format!(
        "ping and UDP echo, built in and over TAP: {}",
        machine.name()
    );
    Case::new(name, move |host| {
        let mut guest = machine.guest(&workloads::network_script(3, 50));
        guest.idle = "adaptive";
        workloads::add_network(&mut guest);
        let has_tap = workloads::add_tap(&mut guest, host)?;
        let outcome = guest.run(host)?;
        machine.check(&outcome)?;
        workloads::check_network(&outcome)?;
        if !has_tap {
            return Ok("skipped TAP: making one takes privileges on this host".into());
        }
        outcome
            .line("tap ok")
            .with_context(|| format!("no answer over TAP\n{}", outcome.tail()))?;
        Ok(String::new())
    })
}

/// Case in which Linux's own driver draws 192 KiB, three times the device's burst, in two
/// activations of the device.
fn entropy(machine: Machine) -> Case {
    let name = format!(
        "random bytes of the host, drawn by Linux's driver: {}",
        machine.name()
    );
    Case::new(name, move |host| {
        let draw =
            "dd if=/dev/hwrng bs=64 count=1536 2>&1 >/drawn | grep -F 1536+0 && md5sum /drawn";
        let script = format!(
            "cd /sys/bus/virtio/drivers/virtio_rng && cat /sys/class/misc/hw_random/rng_current && \
             {draw} && \
             device=$(ls -d virtio*) && echo $device >unbind && echo $device >bind && {draw} && \
             gzip -c /drawn | wc -c"
        );
        let mut guest = machine.guest(&script);
        guest.idle = "adaptive";
        guest.flags.push("--rng".into());
        let outcome = guest.run(host)?;
        machine.check(&outcome)?;
        outcome
            .line("virtio_rng.0")
            .with_context(|| format!("another source was drawn from\n{}", outcome.tail()))?;
        let lines = || outcome.console.lines();
        let sums: Vec<_> = lines().filter(|line| line.ends_with("  /drawn")).collect();
        ensure!(sums.len() == 2 && sums[0] != sums[1], "{sums:?}");
        let mut sizes = lines().filter_map(|line| line.trim().parse().ok());
        let packed: Option<usize> = sizes.next_back();
        ensure!(
            packed >= Some(96 << 10),
            "random bytes do not shrink: {packed:?}"
        );
        Ok(String::new())
    })
}

fn reset(machine: Machine) -> Case {
    let name = format!(
        "a guest that asks for a reset, with --on-reboot exit, ends the run with status 3: {}",
        machine.name()
    );
    Case::new(name, move |host| {
        let script = format!("{} && reboot -f", check_pattern("/dev/vda"));
        let mut guest = with_disk(machine.guest(&script), host, ",queues=2")?;
        guest.idle = "adaptive";
        let outcome = guest.try_run(host)?;
        ensure!(
            outcome.exit == 3,
            "status {}\n{}",
            outcome.exit,
            outcome.tail()
        );
        machine.check(&outcome)?;
        Ok(String::new())
    })
}

fn rogue(machine: Machine) -> Case {
    let name = format!(
        "rogue DMA, unmapped and read-only, is blocked and Linux sees the faults: {}",
        machine.name()
    );
    Case::new(name, move |host| {
        // The script reads the kernel's reports of the faults from its log. On the console they
        // would be mixed with the guest's own output, which is still being sent.
        let mut guest = machine.guest("dmesg -n 1");
        for rogue in Rogue::ALL {
            rogue.add(&mut guest, host)?;
        }
        let outcome = guest.run(host)?;
        machine.check(&outcome)?;
        for disk in 0..Rogue::ALL.len() {
            workloads::check_blocked(&outcome, disk)?;
        }
        Ok(String::new())
    })
}

/// Case of reads under strict invalidation, in the product and in the lab's program without faults.
/// Counts that do not depend on time must be equal, so that counts measured in one program hold for
/// the other.
fn both_programs(mode: Mode) -> Case {
    /// Reads in the measured window, one at a time.
    const READS: u64 = 200;
    Case::new(
        format!(
            "{READS} reads take the same exits in exitless and exitless-lab: {}, 1 vCPU, strict",
            mode.name()
        ),
        move |host| {
            let count = |program: Exitless| {
                let script = format!("workload reads /dev/vda --count {READS} --warmup 20");
                let mut guest = with_disk(Guest::new(mode, script), host, "")?;
                guest.program = program;
                let outcome = guest.run(host)?;
                let window = outcome.windows().first().context("no window")?;
                let counts = [
                    ("exits", "iommu"),
                    ("exits", "pci_config"),
                    ("owner", "requests"),
                    ("owner", "invalidations"),
                    ("owner", "waits"),
                    ("owner", "faults"),
                ];
                let count = |(of, name): (&str, &str)| {
                    let count = window[of][name].as_u64();
                    let count = count.with_context(|| format!("no {of} {name}: {window}"))?;
                    Ok((format!("{of} {name}"), count))
                };
                counts.map(count).into_iter().collect::<Result<Vec<_>>>()
            };
            let (product, lab) = (count(Exitless::Product)?, count(Exitless::Lab)?);
            ensure!(
                product == lab,
                "exitless: {product:?}; exitless-lab: {lab:?}"
            );
            let requests = &product[2];
            ensure!(requests.1 >= READS, "only {requests:?}");
            Ok(format!("{product:?}"))
        },
    )
}

fn forced_sleeps(mode: Mode, sleeps: u64) -> Case {
    Case::new(
        format!("{sleeps} forced sleeps lose no wake-up: {}", mode.name()),
        move |host| {
            // A read takes a few submissions and a doorbell. With a sleep at every idle sweep, this
            // many reads cause at least as many sleeps.
            let script = format!("workload reads /dev/vda --count {sleeps} --no-markers");
            let mut guest = with_disk(Guest::new(mode, script), host, "")?;
            guest.faults.push("sidecores:sleep=1".into());
            guest.limit = Duration::from_secs(120 + sleeps);
            let outcome = guest.run(host)?;
            let slept = outcome.ledger["whole"]["sidecore"]["sleeps"]
                .as_u64()
                .unwrap_or(0);
            ensure!(slept >= sleeps, "only {slept} sleeps");
            Ok(format!("{slept} sleeps"))
        },
    )
}

/// Runs `guest` with the first disk of a vhost-user daemon. Once the guest has printed `now mixed`,
/// the daemon is killed and restarted `kills` times. Returns the guest's outcome, and the number of
/// requests that the last daemon has served.
fn serve_and_kill(
    host: &Host,
    plan: &DaemonPlan,
    mut guest: Guest,
    kills: u32,
) -> Result<(Outcome, u64)> {
    let mut daemon = plan.start(host)?;
    let socket = host.path(&DaemonPlan::socket(0));
    guest.disks.push(format!("socket={socket},queues=2"));
    let mut guest = guest.spawn(host)?;
    if guest.wait_for("now mixed").is_ok() {
        for _ in 0..kills {
            std::thread::sleep(Duration::from_secs(1));
            daemon.kill()?;
            daemon = plan.start_again(host)?;
        }
    }
    let outcome = guest.wait();
    let (stats, said) = daemon.end()?;
    // If the guest hangs, its outcome does not show the daemon's state.
    let outcome = outcome.with_context(|| format!("the daemon said: {said}; counted: {stats}"))?;
    outcome
        .check()
        .with_context(|| format!("the daemon said: {said}"))?;
    let requests = stats["devices"]["disk0"]["requests"].as_u64().unwrap_or(0);
    ensure!(requests > 0, "the last daemon served nothing: {said}");
    Ok((outcome, requests))
}

/// Case without IOMMU: a disk of a daemon that is killed and restarted while the guest writes and
/// verifies; beside it a read-only disk of the machine itself, with blocks of 4 KiB.
fn remote_disk(kills: u32) -> Case {
    Case::new(
        format!(
            "a disk served by another process, killed {kills} times under verified I/O, beside a \
             read-only one of 4 KiB \
             blocks: none, 2 vCPU"
        ),
        move |host| {
            let seconds = 2 + kills;
            let script = format!(
                "test $(cat /sys/block/vda/queue/logical_block_size) = 4096 && \
                 test $(cat /sys/block/vda/ro) = 1 && {} && {} && echo now mixed && \
                 workload mixed /dev/vdb --seconds {seconds} --seed 7 --depth 4",
                check_pattern("/dev/vda"),
                check_pattern("/dev/vdb"),
            );
            // Small: every byte goes to the host through an emulated port.
            host.put("remote.img", &workloads::pattern(SEED)[..2 * MIB])?;
            let plan = DaemonPlan {
                disks: vec![format!("path={},queues=2", host.path("remote.img"))],
                nets: Vec::new(),
                idle: "adaptive",
                limit: Duration::from_secs(180 + u64::from(seconds)),
            };
            let mut guest = with_disk(
                Guest::new(Mode::None, script),
                host,
                ",block=4096,readonly=on",
            )?;
            guest.cpus = 2;
            guest.idle = "adaptive";
            guest.limit = plan.limit;
            let (outcome, requests) = serve_and_kill(host, &plan, guest, kills)?;
            Ok(format!(
                "{}; {requests} requests by the last daemon",
                mixed_summary(&outcome)?
            ))
        },
    )
}

/// Case behind the emulated IOMMU: a disk of a daemon, which translates by the mappings that it
/// receives and drops those that the guest unmaps. The daemon is killed and restarted while the
/// guest writes and verifies.
fn remote_disk_behind(machine: Machine, kills: u32) -> Case {
    Case::new(
        format!(
            "a disk served by another process, killed {kills} times under verified I/O: {}",
            machine.name()
        ),
        move |host| {
            let seconds = 2 + kills;
            let script = format!(
                "{} && echo now mixed && workload mixed /dev/vda --seconds {seconds} --seed 9 \
                 --depth 4",
                check_pattern("/dev/vda"),
            );
            host.put("behind.img", &workloads::pattern(SEED)[..2 * MIB])?;
            let plan = DaemonPlan {
                disks: vec![format!("path={},queues=2", host.path("behind.img"))],
                // If all threads polled, they would delay each other: the lab's host has two
                // processors, and a guest with strict invalidation spins too.
                nets: Vec::new(),
                idle: "sleep",
                limit: Duration::from_secs(180 + u64::from(seconds)),
            };
            let mut guest = machine.guest(&script);
            guest.idle = "sleep";
            guest.limit = plan.limit;
            let (outcome, requests) = serve_and_kill(host, &plan, guest, kills)?;
            machine.check(&outcome)?;
            let owner = &outcome.ledger["whole"]["owner"];
            let invalidations = owner["invalidations"].as_u64().unwrap_or(0);
            ensure!(invalidations > 0, "nothing was invalidated: {owner}");
            Ok(format!(
                "{}; {requests} requests by the last daemon, {invalidations} invalidations",
                mixed_summary(&outcome)?
            ))
        },
    )
}

fn idle() -> Case {
    Case::new(
        "the sidecore of an idle guest uses less than 1 % of a CPU: shared",
        |host| {
            // Long, compared with the polling after the last request: the policy polls for ten
            // times the cost of arming before it sleeps. That is 0.1 s on an emulated processor
            // (and less once the policy has learnt that idle periods are long).
            let script = "workload reads /dev/vda --count 50 --no-markers && sleep 1 && workload \
                 idle --seconds 30";
            let mut guest = with_disk(Guest::new(Mode::Shared, script), host, "")?;
            guest.idle = "adaptive";
            let outcome = guest.run(host)?;
            let [window] = outcome.windows() else {
                bail!("{} windows of 1", outcome.windows().len());
            };
            let used = window["sidecore"]["cpu_ns"].as_f64();
            let used = used.context("a window without the sidecore's time")?;
            let duration = window["duration_ns"].as_f64();
            let share = used / duration.context("a window without its length")?;
            // If an emulated CPU is preempted on its host, it counts that time as used.
            let limit = match host {
                Host::Lab(_) => 0.01 * lab::patience::stretch(),
                Host::Native(_) => 0.01,
            };
            let seen = format!("{:.2} % of {:.2} %", share * 100.0, limit * 100.0);
            ensure!(share < limit, "{seen}");
            Ok(seen)
        },
    )
    .alone()
}
