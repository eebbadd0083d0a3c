//! Guests whose memory is reclaimed while a controller reads and writes it: by the host's kernel,
//! and by the pager.

use std::time::{Duration, Instant};

use harness::assign::runs::reclaim_under_load;
use harness::assign::{AssignLab, AssignedRun, Guest, Mode, Session};
use lab::LabConfig;
use lab::assigned::Device;
use lab::packages::{Needs, Version};

use super::common::{
    DISK, UNBIND, bound, check_disk, check_pins, devices, disk_script, field, guest, line,
};

/// The guest's memory, MiB.
const MEMORY: u64 = 256;
/// MiB of it that its user fills once.
const FILLED: u64 = 170;
/// Seconds for which no more than half of it is resident.
const SECONDS: u64 = 60;
/// Requests that are verified meanwhile, at least.
const REQUESTS: u64 = 10_000;
/// Turns of twenty seconds at most.
const TURNS: u64 = 15;

#[test]
#[ignore = "three minutes of the lab: make soak"]
fn the_host_reclaims_what_no_device_uses() {
    let lab = bound(LabConfig::default());
    let of = reclaim_under_load(&lab, SECONDS, REQUESTS).unwrap();
    eprintln!(
        "{} MiB before, {} MiB at most in {} looks of {} s",
        of.full >> 20,
        of.most >> 20,
        of.looks,
        of.seconds
    );
    assert!(of.resident_percent() <= 50.0, "{} bytes", of.most);
    assert!(
        of.full.saturating_sub(of.most) * 4 >= of.memory,
        "{} bytes, then {}",
        of.full,
        of.most
    );
    assert_eq!(of.locked_after_detach_kib, 0);
    check(&of.run, of.requests);
}

/// Makes verified requests until both the time and the number are reached. Returns seconds and
/// requests.
fn io(session: &mut Session<'_>) -> (u64, u64) {
    let (began, mut requests) = (Instant::now(), 0);
    for seed in 0..TURNS {
        let said = session.run(&format!(
            "workload mixed {DISK} --seconds 20 --depth 8 --seed {seed}"
        ));
        let said = said.unwrap();
        let line = line(&said, "mixed ok");
        let number = |key| field(line, key).parse::<u64>().unwrap();
        requests += number("reads") + number("writes");
        let seconds = began.elapsed().as_secs();
        eprintln!("{seconds} s: {requests} requests, verified");
        if seconds >= SECONDS && requests >= REQUESTS {
            return (seconds, requests);
        }
    }
    panic!("{requests} requests in {TURNS} turns");
}

fn check(run: &AssignedRun, requests: u64) {
    run.outcome.check().unwrap();
    assert!(requests >= REQUESTS, "{requests}");
    assert!(run.faults.is_empty(), "{}", run.faults);
    assert_eq!(devices(&run.outcome.ledger)[0]["refused"], 0);
    check_pins(run);
}

/// The pager evicts unused pages; it needs a newer kernel.
#[test]
#[ignore = "four minutes of the lab: make soak"]
fn the_pager_takes_what_no_device_uses() {
    let lab = bound(LabConfig {
        needs: Needs {
            host_kernel: Some(Version::new(6, 12)),
            ..Needs::default()
        },
        // With several threads, QEMU is not correct for a guest whose pages are taken away.
        one_thread: true,
        ..LabConfig::default()
    });
    paged(&lab);
}

fn paged(lab: &AssignLab) {
    let host = lab.host();
    let limit = host.path("limit");
    let store = format!("path={},size=256M,discard=on", host.path("swap.img"));
    let mut guest: Guest = guest(Mode::Shared);
    // The processors of this lab take turns, and one that polls takes the time of the others.
    guest.idle = "sleep";
    guest.limit = Duration::from_secs(900);
    let flags = [
        "--resident",
        "256M",
        "--resident-file",
        &limit,
        "--swap",
        &store,
        "--preventer-limit",
        "100000",
    ];
    guest.flags.extend(flags.map(str::to_owned));
    host.put("limit", b"").unwrap();
    let mut session = lab.begin(&guest, &[(Device::Nvme, "")]).unwrap();
    check_disk(&session.run(&disk_script(1)).unwrap());
    session
        .run(&format!("workload age --mib {FILLED}"))
        .unwrap();
    host.put("limit", b"100M\n").unwrap();
    let (seconds, requests) = io(&mut session);
    // A window, for the resident memory at its end.
    session.run("workload marker 1; workload marker 2").unwrap();
    session.run(UNBIND).unwrap();
    assert_eq!(session.locked().unwrap(), 0);
    let run = session.end().unwrap();
    let swap = &run.outcome.windows().last().unwrap()["swap"];
    let resident = swap["resident"].as_u64().unwrap() * 4096;
    eprintln!("{seconds} s, {} MiB in memory: {swap}", resident >> 20);
    assert!(resident * 2 <= MEMORY << 20, "{swap:#}");
    check(&run, requests);
}
