//! What the demo runs, one function for each thing it shows.

use anyhow::{Context, Result, ensure};

use super::figures::{Figures, PerRead, round};
use super::{DemoArgs, say};
use crate::run::ROGUE_SECTOR;
use crate::system::guest::{Guest, Mode};
use crate::system::host::Host;

const MIB: usize = 1 << 20;
/// Size of the demo's disk.
const DISK: usize = 8 * MIB;
/// The measured disk answers no sooner than a disk: so each answer finds the guest halted, in every mode. A file
/// in memory answers while the guest is on its way there, and then a race decides what an interrupt costs.
const LATENCY_US: u32 = 2000;
const SEED_HOST: u64 = 11;
const SEED_GUEST: u64 = 12;
const GUEST_IP: &str = "192.168.7.2";
const RESPONDER_IP: &str = "192.168.7.1";

fn pattern(seed: u64) -> Vec<u8> {
    let mut data = vec![0; DISK];
    workload::pattern::fill(seed, 0, &mut data);
    data
}

fn disk(host: &Host, options: &str) -> String {
    format!("path={}{options}", host.path("disk.img"))
}

/// The measured reads: in every round the four modes take turns.
pub fn windows(host: &Host, args: &DemoArgs, figures: &mut Figures) -> Result<()> {
    let DemoArgs {
        rounds,
        windows,
        reads,
        ..
    } = *args;
    host.put("disk.img", &pattern(SEED_HOST))?;
    for round in 1..=rounds {
        for mode in Mode::ALL {
            let name = mode.name();
            say(&format!(
                "round {round} of {rounds}: {windows} x {reads} direct reads, {name}"
            ));
            let mut guest = Guest::new(
                mode,
                format!("workload reads /dev/vda --count {reads} --warmup 120 --windows {windows}"),
            );
            guest
                .disks
                .push(disk(host, &format!(",latency={LATENCY_US}")));
            let outcome = guest.run(host)?;
            ensure!(
                outcome.windows().len() == windows as usize,
                "the guest marked {} windows, not {windows}",
                outcome.windows().len()
            );
            for window in outcome.windows() {
                ensure!(
                    window["histograms"].as_bool() == Some(true),
                    "no exit histograms: tracefs is not available to `exitless run` on this host"
                );
                figures.add_window(mode, PerRead::of(window, reads));
            }
        }
    }
    figures.summarize();
    Ok(())
}

/// What the host wrote the guest reads, and what the guest writes the host finds.
pub fn data(host: &Host, figures: &mut Figures) -> Result<()> {
    say("data: host to guest and back, shared, 4 vCPU");
    host.put("disk.img", &pattern(SEED_HOST))?;
    let script = format!(
        "workload check-pattern /dev/vda --bytes {DISK} --seed {SEED_HOST} && \
         workload write-pattern /dev/vda --bytes {DISK} --seed {SEED_GUEST}"
    );
    let mut guest = Guest::new(Mode::Shared, script);
    guest.cpus = 4;
    guest.disks.push(disk(host, ""));
    let outcome = guest.try_run(host)?;
    let read_ok = outcome.script == Some(0);
    let found = workload::pattern::first_difference(SEED_GUEST, 0, &host.get("disk.img")?);
    figures.claim("data_verified", read_ok && found.is_none(), || {
        format!(
            "guest's script {:?}, first wrong byte on the host {found:?}\n{}",
            outcome.script,
            outcome.tail()
        )
    });
    Ok(())
}

/// A ping and UDP echoes through virtio-net, answered by the built-in responder.
pub fn network(host: &Host, figures: &mut Figures) -> Result<()> {
    say("network: ping and UDP echo through virtio-net, shared");
    let script = format!(
        "ip link set eth0 up && ip addr add {GUEST_IP}/24 dev eth0 && \
         ping -c 5 -W 5 {RESPONDER_IP} && workload udp-echo {RESPONDER_IP}:7 --count 50"
    );
    let mut guest = Guest::new(Mode::Shared, script);
    guest.net = Some(format!("responder,ip={RESPONDER_IP}"));
    let outcome = guest.try_run(host)?;
    let ok = outcome.script == Some(0)
        && outcome.line(" 0% packet loss").is_some()
        && outcome.line("udp-echo ok").is_some();
    figures.claim("ping_ok", ok, || outcome.tail());
    Ok(())
}

/// A disk that attacks: DMA to an address nobody gave it, and a write into memory it may only read.
pub fn rogue(host: &Host, figures: &mut Figures) -> Result<()> {
    let mut blocked = true;
    for (what, command) in [
        (
            "unmapped",
            "dd if=/dev/vda of=/dev/null bs=512 count=1 iflag=direct skip",
        ),
        (
            "readonly",
            "dd if=/dev/zero of=/dev/vda bs=512 count=1 oflag=direct seek",
        ),
    ] {
        say(&format!("rogue DMA: {what}, shared"));
        host.put("disk.img", &pattern(SEED_HOST))?;
        // The fault interrupt comes while dd runs; the kernel's log is read afterwards.
        let script = format!("{command}={ROGUE_SECTOR} && dmesg | grep DMAR | tail -5");
        let mut guest = Guest::new(Mode::Shared, script);
        guest.disks.push(disk(host, &format!(",misbehave={what}")));
        let outcome = guest.try_run(host)?;
        let seen = outcome.script == Some(0)
            && outcome.line("DMA Write").is_some()
            && outcome.line("PTE Write access is not set").is_some();
        if !seen {
            blocked = false;
            figures.set("rogue_dma_seen", outcome.tail());
        }
    }
    figures.claim("rogue_dma_blocked", blocked, || {
        "no DMAR fault in the guest's log".into()
    });
    Ok(())
}

/// A guest that does nothing: what it costs.
pub fn idle(host: &Host, figures: &mut Figures) -> Result<()> {
    const SECONDS: u32 = 10;
    say(&format!(
        "idle: {SECONDS} s of nothing, shared, --idle adaptive"
    ));
    let mut guest = Guest::new(
        Mode::Shared,
        format!(
            "workload reads /dev/vda --count 50 --warmup 10 --no-markers && workload idle --seconds {SECONDS}"
        ),
    );
    guest.idle = "adaptive";
    guest.disks.push(disk(host, ""));
    let outcome = guest.run(host)?;
    let window = outcome
        .windows()
        .last()
        .context("the guest marked no window")?;
    let seconds = window["duration_ns"].as_f64().unwrap_or(f64::NAN) / 1e9;
    let exits = window["exits"]["total"].as_f64().unwrap_or(f64::NAN);
    let cpu = window["sidecore"]["cpu_ns"].as_f64().unwrap_or(f64::NAN) / 1e9;
    figures.set("idle_exits_per_s", round(exits / seconds));
    figures.set("idle_sidecore_cpu_percent", round(100.0 * cpu / seconds));
    Ok(())
}
