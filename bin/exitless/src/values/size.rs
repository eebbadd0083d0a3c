//! Sizes and lists as people write them.

use anyhow::{Context, bail};

/// Units that a number of bytes may have, in words.
pub const UNITS: &str = "K, M, G or T";

/// Bytes: a number, or a number with K, M, G or T (powers of 1024), in either case.
pub fn bytes(text: &str) -> anyhow::Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        unit => bail!("{text:?}: {unit:?} is no unit of size (use {UNITS})"),
    };
    let number: u64 = digits
        .parse()
        .with_context(|| format!("{text:?} is no size (a number, perhaps with {UNITS})"))?;
    number
        .checked_mul(1 << shift)
        .with_context(|| format!("{text:?} is more bytes than 64 bits count"))
}

/// Host CPUs: numbers and ranges, `2,0-1`; at most 1024 of them.
pub fn cpu_list(text: &str) -> anyhow::Result<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| {
            let number: usize = text
                .trim()
                .parse()
                .with_context(|| format!("{part:?} is no CPU number or range"))?;
            if number >= 1024 {
                bail!("CPU {number} is beyond the last possible one, 1023");
            }
            Ok(number)
        };
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            bail!("the CPU range {part:?} runs backwards");
        }
        cpus.extend(first..=last);
    }
    if cpus.len() > 1024 {
        bail!("more CPUs listed than a host can have");
    }
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_and_without_units() {
        for (text, value) in [
            ("4096", 4096),
            ("512M", 512 << 20),
            ("2g", 2 << 30),
            ("1KiB", 1024),
        ] {
            assert_eq!(bytes(text).unwrap(), value, "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "12X", "99999999999T", "0x10"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cpu_lists() {
        assert_eq!(cpu_list("2,0-1").unwrap(), [2, 0, 1]);
        for text in ["", "a", "1-", "3-1", "1024", "0,,1"] {
            assert!(cpu_list(text).is_err(), "{text}");
        }
    }
}
