//! `--device`, checked: physical devices of the host that the guest is given.
//!
//! Nothing here opens a device: the machine does when it is built. The address is completed and
//! written as sysfs writes it, the policy is bounded, and combinations with other options that
//! cannot work are refused.
//!
//! Behind the emulated IOMMU a policy says when the guest's unmap completes ([`HostPolicy`]). Its
//! bounds are fixed at the start; the policy itself may be read from a file while the guest runs.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use assign::policy::HostPolicy;
use dma_map::mapper::{Optimistic, Window};

use super::args::{IommuArg, RunArgs};
use super::file_watch::follow;
use super::ram::RamConfig;
use crate::locked_memory::LockedMemory;
use crate::values::counted;
use crate::values::keys::Keys;
use crate::values::nearest::hint;

/// Most mappings that a policy leaves stale.
const MAX_ENTRIES: u64 = 65_536;
/// Longest time for which a policy leaves a mapping stale, ms.
const MAX_AGE_MS: u64 = 10_000;

/// Name of the file that a policy is read from, in messages.
const FILE: &str = "--device: policy-file";
/// Names of the policies.
const POLICIES: [&str; 4] = ["strict", "async", "deferred", "optimistic"];

/// Returns the text of a policy with its bounds, for people.
fn policy_text(policy: HostPolicy) -> String {
    let bounded = |entries: usize, time: &str| {
        let entries = counted(entries, "mapping");
        format!("{} (at most {entries} stale, {time})", policy.name())
    };
    let ms = |age: Duration| format!("for {} ms", age.as_millis());
    match policy {
        HostPolicy::Strict => policy.name().into(),
        // No age bounds it.
        HostPolicy::Async(window) => bounded(window.entries, "until the host has unmapped them"),
        HostPolicy::Deferred(window) => bounded(window.entries, &ms(window.age)),
        HostPolicy::Optimistic(bound) => bounded(bound.quota, &ms(bound.residency)),
    }
}

/// Bounds of a device's policies, as far as they are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyBounds {
    /// Entries of an async or deferred window.
    pub window: Option<u32>,
    /// Age of every policy that has one.
    pub age: Option<Duration>,
}

impl PolicyBounds {
    /// Reads `strict`, `async`, `deferred` or `optimistic=N`, within these bounds.
    ///
    /// # Errors
    /// It is none of them.
    pub fn policy(self, text: &str) -> Result<HostPolicy> {
        let age = self.age.unwrap_or(Window::DEFAULT.age);
        let entries = self.window.map(|entries| entries as usize);
        let entries = entries.unwrap_or(Window::DEFAULT.entries);
        let window = Window { entries, age };
        let (name, number) = match text.split_once('=') {
            Some((name, number)) => (name, Some(number)),
            None => (text, None),
        };
        let policy = match (name, number) {
            ("strict", None) => HostPolicy::Strict,
            ("async", None) => HostPolicy::Async(window),
            ("deferred", None) => HostPolicy::Deferred(window),
            ("optimistic", Some(number)) => {
                let number = crate::values::size::number(number).context("optimistic")?;
                let quota = within("optimistic", number, MAX_ENTRIES, "")? as usize;
                let residency = age;
                HostPolicy::Optimistic(Optimistic { quota, residency })
            }
            ("optimistic", None) => {
                bail!("optimistic needs the number of mappings that may be idle: optimistic=256")
            }
            ("strict" | "async" | "deferred", Some(_)) => {
                bail!("{name} takes no number ({text:?}): window=N bounds async and deferred")
            }
            _ => bail!(
                "{name:?} is no policy{} (strict, async, deferred, optimistic=N)",
                hint(name, &POLICIES)
            ),
        };
        Ok(policy)
    }

    /// Refuses a bound that `policy` does not have.
    fn check_used_by(self, policy: HostPolicy) -> Result<()> {
        let (has_window, has_age) = match policy {
            HostPolicy::Strict => (false, false),
            HostPolicy::Async(_) | HostPolicy::Deferred(_) => (true, true),
            HostPolicy::Optimistic(_) => (false, true),
        };
        if self.window.is_some() && !has_window {
            bail!("--device: window is for policy=async and policy=deferred");
        }
        if self.age.is_some() && !has_age {
            bail!("--device: age is for a policy that leaves mappings stale, not for strict");
        }
        Ok(())
    }
}

/// One physical device.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Address as sysfs writes it: `0000:00:04.0`.
    pub address: String,
    /// Policy at the start.
    pub policy: HostPolicy,
    /// Bounds of the policies that are read from a file.
    pub bounds: PolicyBounds,
    /// A guest that gives the device all of its memory (`iommu=pt`) is refused: the device reaches
    /// nothing.
    pub requires_dma_domains: bool,
    /// The device reaches all guest memory for as long as the guest has not turned translation on.
    pub dma_before_te: bool,
    /// File that a new policy is read from.
    pub policy_file: Option<PathBuf>,
}

impl DeviceConfig {
    /// Checks one `--device`, of a machine with this IOMMU.
    ///
    /// # Errors
    /// It is not understood, or asks for what needs an IOMMU where there is none.
    pub fn check(text: &str, iommu: IommuArg) -> Result<Self> {
        if !text.contains('=') {
            let example = if text.is_empty() {
                "0000:00:04.0"
            } else {
                text
            };
            bail!("--device {text:?} names no device: write vfio={example}");
        }
        let mut keys = Keys::parse("--device", text)?;
        let address = keys.take("vfio");
        let policy = keys.take("policy");
        let window = number(&mut keys, "window", MAX_ENTRIES, "")?;
        let age = number(&mut keys, "age", MAX_AGE_MS, " ms")?;
        let requires_dma_domains = keys.take_optional_switch("require-dma-domains")?;
        let dma_before_te = keys.take_optional_switch("dma-before-te")?;
        let policy_file = keys.take("policy-file");
        keys.finish()?;
        let Some(address) = address else {
            bail!(
                "--device {text:?} names no device: write vfio=0000:00:04.0 (`exitless doctor` \
                 lists \
                 what this host has)"
            );
        };
        let address = self::address(address)?;
        let of_iommu = [
            ("policy", policy.is_some()),
            ("window", window.is_some()),
            ("age", age.is_some()),
            ("require-dma-domains", requires_dma_domains.is_some()),
            ("dma-before-te", dma_before_te.is_some()),
            ("policy-file", policy_file.is_some()),
        ];
        let given = of_iommu.iter().find(|(_, is_given)| *is_given);
        if let (IommuArg::None, Some((key, _))) = (iommu, given) {
            bail!(
                "--device vfio={address}: {key} is about what the guest maps by its IOMMU, and \
                 --iommu none \
                 has none: the device reaches all memory from the start"
            );
        }
        if policy_file == Some("") {
            bail!("{FILE} is empty: name the file that a new policy is read from");
        }
        let bounds = PolicyBounds {
            window: window.map(|entries| entries as u32),
            age: age.map(Duration::from_millis),
        };
        let policy = bounds.policy(policy.unwrap_or("strict"));
        let policy = policy.context("--device: policy")?;
        // The file may ask for any of them.
        if policy_file.is_none() {
            bounds.check_used_by(policy)?;
        }
        Ok(Self {
            address,
            policy,
            bounds,
            requires_dma_domains: requires_dma_domains.unwrap_or(false),
            dma_before_te: dma_before_te.unwrap_or(false),
            policy_file: policy_file.map(PathBuf::from),
        })
    }

    /// Returns a line on the device, for `run --check`.
    pub fn summary(&self, has_iommu: bool) -> String {
        let address = &self.address;
        if !has_iommu {
            return format!("device {address}: all memory pinned (--iommu none)");
        }
        let mut line = format!("device {address}: policy {}", policy_text(self.policy));
        if let Some(file) = &self.policy_file {
            line += &format!(", followed in {}", file.display());
        }
        if self.requires_dma_domains {
            line += ", only in DMA domains";
        }
        if self.dma_before_te {
            line += ", all memory pinned until translation is on";
        }
        line
    }

    /// Gives `set` the policy in the device's file, now and whenever it has been written. A text
    /// that is no policy is reported, and changes nothing.
    ///
    /// # Errors
    /// The file cannot be watched.
    pub fn follow_policy(&self, set: Box<dyn Fn(HostPolicy) + Send>) -> Result<()> {
        let Some(file) = &self.policy_file else {
            return Ok(());
        };
        let bounds = self.bounds;
        follow(FILE, file.clone(), move |text| {
            set(bounds.policy(text)?);
            Ok(())
        })
    }
}

/// Checks all `--device` of a machine with this memory.
///
/// # Errors
/// One is wrong, two are the same, or an option does not go with them.
pub fn check(args: &RunArgs, ram: RamConfig, locked: &LockedMemory) -> Result<Vec<DeviceConfig>> {
    let mut devices: Vec<DeviceConfig> = Vec::new();
    for text in &args.device {
        let device = DeviceConfig::check(text, args.iommu)?;
        if devices.iter().any(|other| other.address == device.address) {
            bail!("--device vfio={} is given twice", device.address);
        }
        devices.push(device);
    }
    if devices.is_empty() {
        return Ok(devices);
    }
    let is_confined = args.iommu != IommuArg::None;
    for (is_given, option, why) in [
        (args.resident.is_some(), "--resident", "can leave it"),
        (args.balloon.is_some(), "--balloon", "can be given back"),
    ] {
        if is_given && !is_confined {
            bail!(
                "{option} does not go with --device and --iommu none: the device reaches all of \
                 guest memory, so none of it {why}"
            );
        }
    }
    if args.resident.is_some() {
        for device in &mut devices {
            if device.dma_before_te {
                bail!(
                    "--device vfio={}: dma-before-te does not go with --resident: all of guest \
                     memory would be in memory until \
                     the guest has turned translation on",
                    device.address
                );
            }
            // A guest that passes its IOMMU by would pin more than the limit.
            device.requires_dma_domains = true;
        }
    }
    let whole = |device: &&DeviceConfig| !is_confined || device.dma_before_te;
    let count = devices.iter().filter(whole).count() as u64;
    // Each container accounts for what it pins.
    if let Some(shortage) = locked.shortage(ram.bytes.saturating_mul(count)) {
        let device = devices.iter().find(whole).map_or("", |it| &it.address);
        let option = match is_confined {
            true => "dma-before-te=on",
            false => "--iommu none",
        };
        bail!("--device vfio={device} with {option} pins all of guest memory: {shortage}");
    }
    Ok(devices)
}

fn number(keys: &mut Keys<'_>, key: &str, most: u64, unit: &str) -> Result<Option<u64>> {
    let number = keys.take_optional_number(key)?;
    let within = |number| within(key, number, most, unit).context("--device");
    number.map(within).transpose()
}

fn within(key: &str, number: u64, most: u64, unit: &str) -> Result<u64> {
    if !(1..=most).contains(&number) {
        bail!("{key} is 1 to {most}{unit}, not {number}");
    }
    Ok(number)
}

/// Parses a PCI address as sysfs writes it; domain 0 where none is given.
fn address(text: &str) -> Result<String> {
    let parsed = (|| {
        let (front, function) = text.rsplit_once('.')?;
        let (front, device) = front.rsplit_once(':')?;
        let (domain, bus) = front.rsplit_once(':').unwrap_or(("0000", front));
        let hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
            let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let is_whole = is_hex && digits.contains(&text.len());
            is_whole.then(|| u32::from_str_radix(text, 16).ok())?
        };
        // Domains of more than four digits are those behind an Intel VMD.
        let domain = hex(domain, 4..=8)?;
        let bus = hex(bus, 2..=2)?;
        let device = hex(device, 2..=2).filter(|device| *device < 32)?;
        let function = hex(function, 1..=1).filter(|function| *function < 8)?;
        Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
    })();
    parsed.with_context(|| {
        format!(
            "--device: {text:?} is no PCI address: domain:bus:device.function, as 0000:00:04.0 \
             (`exitless doctor` lists what \
             this host has)"
        )
    })
}

#[cfg(test)]
mod tests;
