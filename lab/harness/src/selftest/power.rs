//! Cases in which the machine is asked to end, or its guest restarts it or reports a crash.

use anyhow::{Result, ensure};

use super::case::Case;
use super::machine::Machine;
use crate::system::guest::Mode;
use crate::system::host::Host;
use crate::system::workloads;

/// Bytes written: a MiB.
const BYTES: usize = 1 << 20;
/// Seed of a disk's initial content.
const SEED: u64 = 50;

/// Returns the cases of `make test`.
pub fn quick() -> Vec<Case> {
    vec![
        button(Machine::new(Mode::Logged, 2, true)),
        reboots(Machine::new(Mode::Shared, 1, false), 1),
        panic(Machine::new(Mode::Trap, 1, false)),
    ]
}

/// Returns the additional cases of `make soak`.
pub fn soak() -> Vec<Case> {
    // A second restart begins with the state that the first has left.
    vec![reboots(Machine::new(Mode::Shared, 1, false), 2)]
}

/// Checks that the disk has its initial content, but for this change.
fn check_disk(host: &Host, change: impl FnOnce(&mut [u8])) -> Result<()> {
    let mut expected = workloads::pattern(SEED);
    change(&mut expected);
    let is_so = workloads::disk_content(host, 0)? == expected;
    ensure!(is_so, "the disk does not hold what the guest wrote");
    Ok(())
}

/// Case in which the guest, at the button's event, writes through its page cache and powers off as
/// usual: all must be on the disk.
fn button(machine: Machine) -> Case {
    let name = format!(
        "SIGTERM presses the power button, the guest writes and powers off, status 0: {}",
        machine.name()
    );
    Case::new(name, move |host| {
        // Copies the first MiB to the second.
        let script = "dd if=/dev/vda of=/tmp/new bs=1M count=1 && workload button && \
                      dd if=/tmp/new of=/dev/vda bs=1M seek=1 conv=notrunc";
        let mut guest = machine.guest(script);
        workloads::add_disk(&mut guest, host, SEED, "")?;
        let mut guest = guest.spawn(host)?;
        guest.wait_for("button ready")?;
        guest.terminate()?;
        let outcome = guest.wait()?;
        outcome.check()?;
        machine.check(&outcome)?;
        ensure!(
            outcome.log.contains("pressed the guest's power button;"),
            "{}",
            outcome.tail()
        );
        check_disk(host, |disk| disk.copy_within(..BYTES, BYTES))?;
        Ok(String::new())
    })
}

/// Case in which each boot checks the data of the last one, and writes other data. A second disk
/// counts the boots.
fn reboots(machine: Machine, restarts: u32) -> Case {
    let name = format!(
        "a guest that starts again {restarts} times finds its disk as it left it: {}",
        machine.name()
    );
    let boots = restarts + 1;
    Case::new(name, move |host| {
        let script = format!(
            "n=$(head -c 1 /dev/vdb | tr '\\000' 0); \
             workload check-pattern /dev/vda --bytes {BYTES} --seed 5$n || exit 1; n=$((n+1)); \
             workload write-pattern /dev/vda --bytes {BYTES} --seed 5$n || exit 1; [ $n = {boots} \
             ] && exit 0; \
             printf $n | dd of=/dev/vdb conv=notrunc,fsync && reboot -f"
        );
        let mut guest = machine.guest(&script);
        guest.restarts = true;
        guest.limit *= boots;
        workloads::add_disk(&mut guest, host, SEED, "")?;
        host.put("boots.img", &[0; 4096])?;
        guest.disks.push(format!("path={}", host.path("boots.img")));
        let outcome = guest.run(host)?;
        machine.check(&outcome)?;
        let has_restarted = |times| outcome.log.contains(&format!("(restart {times})"));
        ensure!(
            has_restarted(restarts) && !has_restarted(boots),
            "it was not started again {restarts} times\n{}",
            outcome.tail()
        );
        let last = [host.get("boots.img")?[0]];
        ensure!(
            last == *restarts.to_string().as_bytes(),
            "the last count is lost: {last:?}"
        );
        check_disk(host, |disk| {
            let last = workloads::pattern(SEED + u64::from(boots));
            disk[..BYTES].copy_from_slice(&last[..BYTES]);
        })?;
        Ok(String::new())
    })
}

fn panic(machine: Machine) -> Case {
    let name = format!(
        "a guest whose kernel panics, and would hang, ends the run with status 6: {}",
        machine.name()
    );
    Case::new(name, move |host| {
        let mut guest = machine.guest("echo c >/proc/sysrq-trigger");
        guest.kernel_options = "panic=0".into();
        let outcome = guest.try_run(host)?;
        ensure!(
            outcome.exit == 6,
            "status {}\n{}",
            outcome.exit,
            outcome.tail()
        );
        machine.check(&outcome)?;
        Ok(String::new())
    })
}
