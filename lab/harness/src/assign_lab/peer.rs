//! QEMU in the same lab, for comparison: its own `intel-iommu` in caching mode and `vfio-pci`, the
//! same drive, kernel and initramfs.
//!
//! KVM's counts for all virtual machines of the host are read before and after a program of the
//! guest that makes some hundred requests, and one that makes more: the difference is due to the
//! additional requests, and does not include the start of a program. QEMU has no ledger, so causes
//! are KVM's: an access to a register is one of `mmio_exits`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::assigned::Device;
use lab::packages::{Needs, Packages};
use lab::{Lab, Running};

use super::case::SEED;
use crate::assign::{AssignLab, Host};

/// Directory of the emulated host with QEMU.
const DIR: &str = "/root/peer";
/// Path of its loader there.
const LOADER: &str = "lib/ld-linux-x86-64.so.2";
/// Firmware that it reads.
const FIRMWARE: [&str; 3] = ["bios-256k.bin", "linuxboot_dma.bin", "kvmvapic.bin"];
/// KVM's counts that are reported.
pub const COUNTS: [&str; 5] = ["exits", "mmio_exits", "io_exits", "irq_exits", "halt_exits"];
/// Requests of the shorter program.
const FEW: u32 = 100;
/// Time limit of a step of the guest.
const LIMIT: Duration = Duration::from_secs(300);

/// Result of one guest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Peer {
    /// Exits of a 4 KiB read, by KVM's names.
    pub read: BTreeMap<&'static str, f64>,
    /// Exits of a 4 KiB write.
    pub write: BTreeMap<&'static str, f64>,
    /// KiB that QEMU had locked at rest.
    pub locked_kib: u64,
}

/// Returns the files of QEMU, its libraries and its loader included: their paths, and their names
/// in the lab.
fn files() -> Result<Vec<(PathBuf, String)>> {
    let packages = Packages::get(&Needs::default(), &|line| eprintln!("{line}"))?;
    let (program, args, environment) = packages.qemu();
    let is_qemu = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with("qemu-system")
    };
    let words = args.iter().map(PathBuf::from);
    let qemu = [program.clone()].into_iter().chain(words).find(is_qemu);
    let qemu = qemu.context("no program of QEMU's")?;
    // If it has a loader of its own, that lists the libraries that it would use.
    let listed = match qemu == program {
        true => Command::new("ldd").arg(&qemu).envs(environment).output(),
        false => Command::new(&program)
            .args(&args[..2])
            .arg("--list")
            .arg(&qemu)
            .output(),
    };
    let listed = listed.context("asking for QEMU's libraries")?;
    ensure!(
        listed.status.success(),
        "no libraries of {}",
        qemu.display()
    );
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let mut files = vec![(qemu.clone(), "qemu".to_owned())];
    if qemu != program {
        files.push((program, LOADER.to_owned()));
    }
    // Formats: NAME => PATH (ADDRESS), or PATH (ADDRESS) for the loader.
    let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
    for path in paths.map(PathBuf::from) {
        let name = path.file_name().context("a library")?;
        let name = format!("lib/{}", name.to_string_lossy());
        if files.iter().all(|(_, other)| *other != name) {
            files.push((path, name));
        }
    }
    let installed = ["/usr/share/seabios", "/usr/share/qemu"].map(PathBuf::from);
    let shares = args.iter().map(PathBuf::from).chain(installed);
    let shares: Vec<PathBuf> = shares.filter(|path| path.is_dir()).collect();
    for name in FIRMWARE {
        let all = shares.iter().map(|share| share.join(name));
        let file = all.into_iter().find(|file| file.is_file());
        let file = file.with_context(|| format!("no {name} in {shares:?}"))?;
        files.push((file, format!("share/{name}")));
    }
    Ok(files)
}

/// Copies QEMU into the emulated host.
fn install(lab: &Lab) -> Result<()> {
    for (file, name) in files()? {
        lab.push(&file, &format!("{DIR}/{name}"))?;
    }
    Ok(())
}

struct Guest<'a> {
    host: &'a Host,
    running: Running<'a>,
    /// Bytes of its console that have been read.
    seen: usize,
}

impl Guest<'_> {
    fn wait_for(&mut self, text: &str) -> Result<()> {
        let seen = self.seen;
        let has = |console: &str| console.get(seen..).is_some_and(|new| new.contains(text));
        self.running
            .wait_until(LIMIT, |so_far| has(&so_far.stdout_text()))
            .with_context(|| format!("waiting for {text:?}"))?;
        self.seen = self.running.so_far().stdout_text().len();
        Ok(())
    }

    /// Makes the guest start a program of so many requests. Returns KVM's counts for that.
    fn count(&mut self, requests: u32, write: &str) -> Result<Vec<f64>> {
        let before = counts(self.host)?;
        let command = format!(
            "workload deep /dev/nvme0n1 --depth 1 --count {requests} --warmup 1 --seed {SEED} \
             --no-markers {write}\n"
        );
        self.running.write_stdin(command.as_bytes())?;
        self.wait_for("step ended with 0")?;
        let after = counts(self.host)?;
        Ok(after
            .iter()
            .zip(before)
            .map(|(after, before)| after - before)
            .collect())
    }

    /// Returns the counts of one request of `requests`.
    fn per_request(&mut self, requests: u32, write: &str) -> Result<BTreeMap<&'static str, f64>> {
        let few = self.count(FEW, write)?;
        let many = self.count(FEW + requests, write)?;
        let each = many
            .iter()
            .zip(few)
            .map(|(many, few)| (many - few) / f64::from(requests));
        Ok(COUNTS.into_iter().zip(each).collect())
    }
}

fn counts(host: &Host) -> Result<Vec<f64>> {
    let files = COUNTS
        .map(|name| format!("/sys/kernel/debug/kvm/{name}"))
        .join(" ");
    let text = host.script(&format!("cat {files}"))?;
    let numbers = text.split_whitespace().map(str::parse);
    numbers.collect::<Result<_, _>>().context("KVM's counts")
}

/// Runs the guest under QEMU, with its IOMMU and without, which pins all memory; `requests` each.
/// The drive is [bound](AssignLab::bind).
///
/// # Errors
/// QEMU does not run in the lab, or its guest does not execute a step.
pub fn run(lab: &AssignLab, requests: u32) -> Result<[Peer; 2]> {
    let host = lab.host();
    let Host::Lab(emulated) = host else {
        anyhow::bail!("QEMU is run in the lab alone");
    };
    host.script(&format!(
        "mkdir -p {DIR}/lib {DIR}/share; grep -q debugfs /proc/mounts || mount -t debugfs debugfs \
         /sys/kernel/debug"
    ))?;
    install(emulated)?;
    Ok([
        one(lab, emulated, requests, true)?,
        one(lab, emulated, requests, false)?,
    ])
}

fn one(lab: &AssignLab, emulated: &Lab, requests: u32, has_iommu: bool) -> Result<Peer> {
    const SCRIPT: &str = "stty -echo; echo ready for steps; while read -r line && [ \"$line\" != \
         end ]; do $line; \
                          echo step ended with $?; done";
    let options = match has_iommu {
        true => "intel_iommu=on iommu.strict=1",
        false => "intel_iommu=off",
    };
    let run = lab::guest_image::run_option(SCRIPT)?;
    let append =
        format!("console=ttyS0 quiet panic=-1 cryptomgr.notests mitigations=off {options} {run}");
    let device = format!("vfio-pci,host={}", lab.address(Device::Nvme));
    let mut args: Vec<String> = [
        "--library-path",
        "/root/peer/lib",
        "/root/peer/qemu",
        "-L",
        "/root/peer/share",
    ]
    .map(str::to_owned)
    .to_vec();
    args.extend(
        [
            "-accel",
            "kvm",
            "-cpu",
            "host",
            "-M",
            "q35,kernel-irqchip=split",
            "-m",
            "256",
            "-smp",
            "1",
        ]
        .map(str::to_owned),
    );
    args.extend(
        [
            "-nodefaults",
            "-nographic",
            "-no-reboot",
            "-serial",
            "stdio",
        ]
        .map(str::to_owned),
    );
    if has_iommu {
        args.extend(["-device", "intel-iommu,intremap=on,caching-mode=on"].map(str::to_owned));
    }
    args.extend(["-device".to_owned(), device]);
    args.extend(
        [
            "-kernel",
            "/boot/vmlinuz",
            "-initrd",
            "/boot/guest.img",
            "-append",
        ]
        .map(str::to_owned),
    );
    args.push(append);
    let running = emulated
        .command(&format!("{DIR}/{LOADER}"))
        .args(args)
        .spawn()?;
    let mut guest = Guest {
        host: lab.host(),
        running,
        seen: 0,
    };
    guest.wait_for("ready for steps")?;
    let read = guest.per_request(requests, "")?;
    let write = guest.per_request(requests, "--write")?;
    let locked = lab.host().script(
        "for p in /proc/[0-9]*; do if grep -q /root/peer/qemu $p/cmdline 2>/dev/null; then \
         while read -r k v u; do [ $k != VmLck: ] || echo $v; done <$p/status; fi; done",
    )?;
    let locked = locked
        .split_whitespace()
        .next()
        .and_then(|number| number.parse().ok());
    guest.running.write_stdin(b"end\n")?;
    let out = guest.running.wait(LIMIT, |_, _| {})?;
    ensure!(
        out.success(),
        "QEMU: {}{}",
        out.stdout_text(),
        out.stderr_text()
    );
    Ok(Peer {
        read,
        write,
        locked_kib: locked.context("QEMU was not found")?,
    })
}
