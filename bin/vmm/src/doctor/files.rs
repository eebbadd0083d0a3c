//! Parsers of the files that facts come from.

use std::collections::BTreeSet;

/// A kernel's release, as far as it decides features.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release(pub u32, pub u32);

impl Release {
    /// Parses a release: `6.1.0-56-cloud-amd64` → 6.1.
    pub fn parse(text: &str) -> Self {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Self(major, minor),
            _ => Self::default(),
        }
    }
}

/// Returns the flags of the first processor in /proc/cpuinfo.
pub fn cpu_flags(cpuinfo: &str) -> BTreeSet<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("flags"));
    let flags = line
        .and_then(|line| line.split_once(':'))
        .map_or("", |(_, flags)| flags);
    flags.split_whitespace().map(str::to_owned).collect()
}

/// Processors in /proc/cpuinfo.
pub fn cpu_count(cpuinfo: &str) -> usize {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count()
}

/// Returns the number of a key in /proc/meminfo (kB for most).
pub fn meminfo(text: &str, key: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// Returns a module's boolean parameter: `Y`, `N`, `1`, `0`; -1 (automatic) counts as off.
pub fn switch(text: &str) -> bool {
    matches!(text.trim(), "Y" | "y" | "1")
}

/// Returns whether /proc/self/status says that this capability is effective.
pub fn has_capability(status: &str, number: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = line
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .unwrap_or(0);
    bits >> number & 1 == 1
}

#[cfg(test)]
mod tests;
