//! Sizes and lists as people write them.

use std::fmt;
use std::ops::RangeInclusive;

use anyhow::{Context, Result, bail};
use serde::Deserializer;
use serde::de::{Error, Visitor};

/// Units that a number may have, in words.
pub const UNITS: &str = "K, M, G or T (powers of 1024)";

/// Parses a number, of bytes or of anything else: digits, or digits with K, M, G or T (powers of
/// 1024), in either case, which may be written as KB or KiB, too.
///
/// # Errors
/// Says what it is not.
pub fn number(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        bail!("{text:?} is no number (digits, perhaps with {UNITS})");
    }
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        unit => bail!("{text:?}: {unit:?} is no unit (use {UNITS})"),
    };
    let number: Option<u64> = digits.parse().ok();
    number
        .and_then(|number| number.checked_mul(1 << shift))
        .with_context(|| format!("{text:?} is more than 64 bits count"))
}

/// Parses a number of bytes.
///
/// # Errors
/// See [`number`].
pub fn bytes(text: &str) -> Result<u64> {
    number(text)
}

/// Reads a number in a file: as one, or as a text with a unit.
///
/// # Errors
/// It is neither, or below zero.
pub fn in_file<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<u64>, D::Error> {
    struct Number;
    impl Visitor<'_> for Number {
        type Value = u64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a number, or a text such as \"2G\" (with {UNITS})")
        }

        fn visit_u64<E: Error>(self, number: u64) -> std::result::Result<u64, E> {
            Ok(number)
        }

        fn visit_i64<E: Error>(self, number: i64) -> std::result::Result<u64, E> {
            let unsigned = u64::try_from(number);
            unsigned.map_err(|_| E::custom(format_args!("{number} is below zero")))
        }

        fn visit_str<E: Error>(self, text: &str) -> std::result::Result<u64, E> {
            number(text).map_err(E::custom)
        }
    }
    from.deserialize_any(Number).map(Some)
}

/// Parses a list of host CPUs: numbers and ranges, `2,0-1`; at most 1024 of them.
pub fn cpu_list(text: &str) -> Result<Vec<usize>> {
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

/// Returns a number that may be absent, in a range.
pub fn in_range(
    key: &str,
    value: Option<u64>,
    default: u64,
    range: RangeInclusive<u64>,
) -> Result<u64> {
    let value = value.unwrap_or(default);
    if !range.contains(&value) {
        bail!("{key} is {} to {}, not {value}", range.start(), range.end());
    }
    Ok(value)
}

/// Returns the number of entries of a queue.
///
/// # Errors
/// No power of two from 2 to 1024.
pub fn queue_size(value: Option<u64>, default: u16) -> Result<u16> {
    let size = in_range("queue-size", value, default.into(), 2..=1024)? as u16;
    if !size.is_power_of_two() {
        bail!("queue-size is a power of two, not {size}");
    }
    Ok(size)
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
            ("2tb", 2 << 40),
            ("7B", 7),
        ] {
            assert_eq!(number(text).unwrap(), value, "{text}");
        }
        for text in [
            "",
            "M",
            "-1",
            "+1",
            "1.5G",
            "12X",
            "99999999999T",
            "0x10",
            "1 G",
            "99999999999999999999",
        ] {
            assert!(number(text).is_err(), "{text}");
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
