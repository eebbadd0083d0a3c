//! Cases in which a thread removes pages of a guest's memory and brings them back
//! (`--fault memory:punch`) while the guest writes and verifies.

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::machine::mixed_summary;
use crate::system::guest::{Guest, Mode, Outcome};
use crate::system::host::Host;
use crate::system::workloads::{self, DISK_BYTES};

const SEED: u64 = 41;
/// Subject of these cases.
pub const WHAT: &str = "pages of the guest's memory taken away and brought back under verified I/O";

/// Returns the cases of `make soak`: ten thousand pages and more in each mode.
pub fn soak() -> Vec<Case> {
    Mode::VTD.map(|mode| case(mode, 60, 10_000)).into()
}

fn case(mode: Mode, seconds: u32, pages: u64) -> Case {
    let name = format!("{pages} {WHAT}: {}", mode.name());
    Case::new(name, move |host| run(host, mode, seconds, pages))
}

fn run(host: &Host, mode: Mode, seconds: u32, pages: u64) -> Result<String> {
    let network = workloads::network_script(3, 50);
    let script = format!(
        "workload check-pattern /dev/vda --bytes {DISK_BYTES} --seed {SEED} && \
         workload mixed /dev/vda --seconds {seconds} --seed 9 --depth 8 && {network}"
    );
    let mut guest = Guest::new(mode, script);
    workloads::add_disk(&mut guest, host, SEED, ",queues=2")?;
    workloads::add_network(&mut guest);
    guest.cpus = 2;
    guest.idle = "adaptive";
    // Otherwise, while the host brings in a page, the guest would schedule another task, and KVM
    // would have another thread fetch the page.
    guest.kernel_options = "no-kvmapf".into();
    guest.faults.push("memory:punch".into());
    guest.limit = std::time::Duration::from_secs(180 + 4 * u64::from(seconds));
    let outcome = guest.run(host)?;
    workloads::check_network(&outcome)?;
    let mixed = mixed_summary(&outcome)?;
    Ok(format!("{}; {mixed}", counts(&outcome, pages)?))
}

/// Returns the run's counts of its pages, if they are as expected.
fn counts(outcome: &Outcome, pages: u64) -> Result<String> {
    let mut lines = outcome.log.lines();
    let line = lines.find_map(|line| line.split_once("punched: "));
    let (_, line) = line.with_context(|| format!("no count of pages\n{}", outcome.tail()))?;
    let number = |text: &str| text.split([' ', ';']).next()?.parse::<u64>().ok();
    let punched = number(line).unwrap_or(0);
    ensure!(punched >= pages, "only {punched} pages: {line}");
    let of_kind = |kind: &str| number(line.split_once(&format!(" {kind}="))?.1);
    for kind in ["others", "buffers", "rings", "tables", "queue"] {
        let count = of_kind(kind).unwrap_or(0);
        ensure!(count > 0, "no page of the {kind} was taken away: {line}");
    }
    ensure!(
        line.ends_with("trespasses 0"),
        "pages were reached that were not there: {line}"
    );
    Ok(line.to_owned())
}
