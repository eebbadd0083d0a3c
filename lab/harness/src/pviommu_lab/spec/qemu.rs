//! A guest of plain QEMU, behind its virtio-iommu, that runs the list.
//!
//! QEMU may hang in a case. Then it is killed, and booted again for the cases after that one.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lab::packages::{Needs, Packages, Version};
use lab::{LabError, guest_image, guest_module, patience};

use super::case_log::{CaseLog, HANGS};
use super::rules::RULES;
use super::{KERNEL_OPTIONS, LIMIT};
use crate::system::native::NativeProgram;

/// Time limit until the module prints its first line.
const BOOT: Duration = Duration::from_secs(120);
/// Time limit between two lines of the module: a case waits seconds for an event that does not
/// come, several times.
const CASE: Duration = Duration::from_secs(60);
/// Largest number of boots.
const BOOTS: usize = 8;

/// Runs the list. Returns the output, with a case in which QEMU hung, and QEMU's version.
///
/// # Errors
/// QEMU is not available, or its guest does not boot or ends early, with the end of its console.
pub fn run() -> Result<(CaseLog, Version)> {
    let notice = |line: &str| eprintln!("{line}");
    let packages = Packages::get(&Needs::default(), &notice)?;
    let sources = guest_module::iommu_cases().into();
    let module = guest_module::build(&sources, packages.guest(), &notice)?;
    let image = guest_image::build_with_module(&packages, &module)?;
    let scratch = tempfile::tempdir().context("making a directory for the guest's image")?;
    let initrd = scratch.path().join("guest.img");
    fs::write(&initrd, image.to_bytes()).context("writing the guest's image")?;

    let mut seen = CaseLog::default();
    let mut from = 0;
    for _ in 0..BOOTS {
        seen.add(boot(&packages, &initrd, from)?);
        let Some((number, name)) = seen.unfinished.take() else {
            ensure!(seen.is_done, "its guest has ended before the list");
            return Ok((seen, packages.qemu_version()));
        };
        eprintln!("pviommu-lab: spec, QEMU does not come back from {name}");
        seen.steps.insert(name, HANGS.into());
        from = number + 1;
        if from == RULES.len() {
            return Ok((seen, packages.qemu_version()));
        }
    }
    bail!("it does not come back from {BOOTS} cases")
}

/// Boots it for the cases from this number on, to its end or until a case hangs.
fn boot(packages: &Packages, initrd: &Path, from: usize) -> Result<CaseLog> {
    let (program, args, environment) = packages.qemu();
    let mut words: Vec<OsString> = environment
        .into_iter()
        .map(|(name, value)| {
            let mut word = OsString::from(name);
            word.push("=");
            word.push(value);
            word
        })
        .collect();
    words.push(program.into());
    words.extend(args);
    words.extend(machine(packages, initrd, from)?);
    let words = words.into_iter().map(|word| {
        let word = word.into_string();
        word.map_err(|word| anyhow::anyhow!("a path of QEMU's is no text: {}", word.display()))
    });
    let words: Vec<String> = words.collect::<Result<_>>()?;
    let last = LIMIT.mul_f64(patience::stretch()) * 2;
    let guard = ["-s", "KILL", &last.as_secs().to_string()].map(str::to_owned);
    let mut guest = NativeProgram::start(&guard, Path::new("env"), &words)?;
    let is_alive = follow(&mut guest)?;
    if is_alive {
        guest.signal(libc::SIGKILL)?;
    }
    let output = guest.wait()?;
    let console = output.stdout_text();
    let seen = CaseLog::of(&console);
    ensure!(
        seen.lines > 0 && (is_alive || seen.is_done),
        "the guest has ended with {}\n{}\n{}",
        output.status,
        last_lines(&console),
        output.stderr_text()
    );
    Ok(seen)
}

/// Waits for its lines. Returns whether it still ran when there were no further ones.
///
/// # Errors
/// It has not booted.
fn follow(guest: &mut NativeProgram) -> Result<bool> {
    loop {
        let seen = CaseLog::of(&guest.so_far());
        let limit = if seen.lines == 0 { BOOT } else { CASE };
        let has_more = |text: &str| CaseLog::of(text).lines > seen.lines;
        // After the end of the list, the guest ends.
        let Err(error) = guest.wait_until(limit.mul_f64(patience::stretch()), has_more) else {
            continue;
        };
        match error.downcast_ref() {
            Some(LabError::Timeout { .. }) if seen.lines > 0 => return Ok(true),
            Some(LabError::Timeout { .. }) => {
                guest.signal(libc::SIGKILL)?;
                return Err(error.context("it has not booted"));
            }
            _ => return Ok(false),
        }
    }
}

/// Returns the machine: the IOMMU, and behind it the devices that the module needs.
fn machine(packages: &Packages, initrd: &Path, from: usize) -> Result<Vec<OsString>> {
    let run = guest_image::run_option("true")?;
    // An emulated clock, as for the lab's host: it is compared with nothing.
    let command_line = format!(
        "console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable cryptomgr.notests \
         mitigations=off {KERNEL_OPTIONS} \
         exitless.iommu=module iommu_cases.from={from} {run}"
    );
    let fixed = "-machine q35 -accel tcg -cpu max -smp 1,maxcpus=2 -m 256 -nodefaults \
         -no-user-config \
        -display none -no-reboot -serial stdio -device virtio-iommu-pci \
        -netdev user,id=net,restrict=on -device \
        virtio-net-pci,netdev=net,iommu_platform=on,disable-legacy=on,romfile= \
        -device virtio-rng-pci,iommu_platform=on,disable-legacy=on";
    let mut words: Vec<OsString> = fixed.split_whitespace().map(OsString::from).collect();
    words.extend([
        "-kernel".into(),
        packages.guest().vmlinuz().into(),
        "-initrd".into(),
        initrd.into(),
        "-append".into(),
        command_line.into(),
    ]);
    Ok(words)
}

fn last_lines(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}
