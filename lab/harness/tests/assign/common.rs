//! Setup that the tests share, and the checks of a run.

use harness::assign::{AssignLab, AssignedRun, Guest, Mode, SCRIPT, Session, rogue_script};
use lab::LabConfig;
use lab::assigned::{Device, DmaAccess, FaultLog};
use serde_json::Value;

/// All of the lab's devices.
pub const DEVICES: [Device; 3] = [Device::Nvme, Device::Net, Device::Edu];
/// Namespace of the drive, in a guest or the emulated host.
pub const DISK: &str = "/dev/nvme0n1";
/// Bytes of the namespace that hold the pattern.
pub const PATTERN: usize = 4 << 20;
/// First block behind them.
pub const BEHIND: usize = PATTERN >> 12;
/// Seed of the pattern.
pub const SEED: u64 = 7;

/// Starts a lab with its devices given to VFIO.
pub fn bound(config: LabConfig) -> AssignLab {
    let lab = AssignLab::start(config).expect("the lab starts");
    for device in DEVICES {
        lab.bind(device).unwrap();
    }
    lab
}

/// Returns each device, with the same text behind its address.
pub fn all_with(options: &str) -> [(Device, &str); 3] {
    DEVICES.map(|device| (device, options))
}

/// Returns a guest that executes steps, with a sidecore that polls: each of its sleeps would be one
/// more switch of threads, and the lab has few processors.
pub fn guest(mode: Mode) -> Guest {
    let mut guest = Guest::new(mode, SCRIPT);
    guest.limit = std::time::Duration::from_secs(600);
    guest
}

/// Returns the value of `key` in a line of `key=value`.
pub fn field<'a>(line: &'a str, key: &str) -> &'a str {
    let fields = line
        .split_whitespace()
        .filter_map(|word| word.split_once('='));
    let found = fields.into_iter().find(|(name, _)| *name == key);
    found.unwrap_or_else(|| panic!("no {key} in {line:?}")).1
}

/// Returns the line of a text that begins with `start`.
pub fn line<'a>(said: &'a str, start: &str) -> &'a str {
    let found = said.lines().find(|line| line.starts_with(start));
    found.unwrap_or_else(|| panic!("no line {start:?}:\n{said}"))
}

/// Returns a script that writes the pattern and checks it, and reads, writes, flushes and discards
/// behind it for `seconds`: 4 KiB to 256 KiB each, direct, one at a time and many in flight.
pub fn disk_script(seconds: u32) -> String {
    format!(
        "workload write-pattern {DISK} --bytes {PATTERN} --seed {SEED} && \
         workload check-pattern {DISK} --bytes {PATTERN} --seed {SEED} && \
         workload reads {DISK} --count 100 --random 1 --no-markers && \
         workload mixed {DISK} --seconds {seconds} --depth 8 --trim --skip {BEHIND} && \
         workload check-pattern {DISK} --bytes {PATTERN} --seed {SEED}"
    )
}

/// Asserts that all of [`disk_script`] was done.
pub fn check_disk(said: &str) {
    for done in [
        "write-pattern ok",
        "check-pattern ok",
        "reads ok count=100",
        "mixed ok",
    ] {
        assert!(said.contains(done), "no {done:?}: {said}");
    }
}

/// States of the accesses that `workload dma-rogue` tries, in its order.
const ROGUES: [&str; 5] = ["unmapped", "read-only", "revoked", "unmapped", "revoked"];
/// Pause between them: the kernel's log takes ten lines in five seconds, three for each.
pub const PAUSE: &str = "--pause-ms 2000";

/// Asserts that `edu` was refused each access that `workload dma-rogue` tried, by the program's
/// output and by the log of the host's IOMMU, by address. Returns the number of these accesses.
pub fn check_rogues(lab: &AssignLab, said: &str, log: &FaultLog) -> usize {
    let attempts: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with("rogue "))
        .collect();
    let states: Vec<&str> = attempts
        .iter()
        .map(|line| line.split(' ').nth(1).unwrap())
        .collect();
    assert_eq!(states, ROGUES);
    for line in &attempts {
        assert_eq!(field(line, "blocked"), "yes", "{line}");
        let iova = field(line, "iova").trim_start_matches("0x");
        let iova = u64::from_str_radix(iova, 16).unwrap();
        let access = match field(line, "access") {
            "write" => DmaAccess::Write,
            _ => DmaAccess::Read,
        };
        let is_logged = log.has(lab.address(Device::Edu), access, iova);
        assert!(is_logged, "{line} is not in the log:\n{log}");
    }
    attempts.len()
}

/// Makes a guest's own VFIO drive `edu` where no mapping allows it, and asserts that the host
/// refused all accesses. Returns the output.
pub fn rogue(lab: &AssignLab, session: &mut Session<'_>, options: &str) -> String {
    // Faults before this belong to others.
    let before = lab.take_faults().unwrap();
    assert!(before.is_empty(), "{before}");
    let said = session
        .run(&rogue_script(options))
        .expect("nothing arrived");
    let log = lab.take_faults().unwrap();
    eprintln!("{said}{log}");
    check_rogues(lab, &said, &log);
    let (edu, all) = (log.of(lab.address(Device::Edu)).count(), log.faults.len());
    assert_eq!(edu, all, "faults of other devices: {log}");
    said
}

/// Script by which a guest unbinds all PCI drivers.
pub const UNBIND: &str =
    "for f in /sys/bus/pci/drivers/*/0000:*; do echo ${f##*/} >$f/driver/unbind; done";

/// Figures of the assigned devices, over the whole run.
pub fn devices(ledger: &Value) -> &[Value] {
    ledger["whole"]["devices"]
        .as_array()
        .map_or(&[], Vec::as_slice)
}

/// Returns a figure, summed over the devices; a figure that is null counts as 0.
pub fn sum(devices: &[Value], key: &str) -> u64 {
    devices
        .iter()
        .map(|device| device[key].as_u64().unwrap_or(0))
        .sum()
}

/// Returns the bound of the KiB pinned for devices: the most pages in the guest's mappings, each
/// mapping counted, and those that the policies may leave stale.
pub fn bound_kib(run: &AssignedRun) -> u64 {
    let devices = devices(&run.outcome.ledger);
    4 * (sum(devices, "guest_pages_peak") + sum(devices, "stale_allowed"))
}

/// Asserts that pins stayed within their bound, and rose and fell. The program locks no other
/// memory.
pub fn check_pins(run: &AssignedRun) {
    check_pins_beside(run, 0);
}

/// Asserts the same, with so many pages that earlier policies may have left stale.
pub fn check_pins_beside(run: &AssignedRun, stale: u64) {
    let locked = &run.locked;
    let (first, most) = (locked.samples()[0], locked.max());
    let bound = bound_kib(run) + 4 * stale;
    let highest = locked.samples().iter().position(|kib| *kib == most);
    let behind = &locked.samples()[highest.unwrap()..];
    let least = behind.iter().min().unwrap();
    eprintln!(
        "VmLck: {} samples, first {first}, most {most}, bound {bound}, least behind it {least}, \
         last {} KiB",
        locked.samples().len(),
        locked.last()
    );
    assert_eq!(first, 0, "before any device: {locked:?}");
    assert!(most > 0, "{locked:?}");
    assert!(
        most <= bound,
        "{most} KiB are more than {bound}: {locked:?}"
    );
    assert!(*least < most, "it never fell: {locked:?}");
}
