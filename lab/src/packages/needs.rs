//! Requirements of a lab: versions of QEMU and the kernels.

use std::fmt;
use std::str::FromStr;

/// A version of two numbers, as in "QEMU 10.0" or "Linux 6.12".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
}

impl Version {
    /// Creates the version `MAJOR.MINOR`.
    #[must_use]
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// Parses the output of `qemu --version`: `QEMU emulator version 7.2.22 (Debian …)` gives 7.2.
    pub(super) fn of_qemu(text: &str) -> Option<Self> {
        Self::of_package(text.split("version ").nth(1)?)
    }

    /// Parses the version of a package: `1:10.0.2+ds-2` gives 10.0. The number before the colon is
    /// Debian's epoch.
    pub(super) fn of_package(text: &str) -> Option<Self> {
        let text = text.split_once(':').map_or(text, |(_, version)| version);
        let mut parts = text.split(|c: char| !c.is_ascii_digit());
        let (major, minor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(Self { major, minor })
    }

    /// Returns whether a kernel's `release` (`6.12.95+deb12-cloud-amd64`) belongs to this series.
    pub(super) fn is_series_of(self, release: &str) -> bool {
        Self::of_package(release) == Some(self)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for Version {
    type Err = String;

    /// Parses `10` or `10.0`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (major, minor) = text.split_once('.').unwrap_or((text, "0"));
        let number = |text: &str| {
            text.parse()
                .map_err(|_| "not of the form MAJOR.MINOR".to_owned())
        };
        Ok(Self::new(number(major)?, number(minor)?))
    }
}

/// Requirements of a lab. By default a QEMU whose emulated SVM loses no interrupts, and the
/// distribution's kernel for host and guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Oldest acceptable version of QEMU.
    pub qemu: Version,
    /// Series of the host's kernel; the distribution's own if absent.
    pub host_kernel: Option<Version>,
    /// Series of the guest's kernel; the distribution's own if absent.
    pub guest_kernel: Option<Version>,
}

impl Needs {
    /// Oldest QEMU whose emulated SVM is known to lose no interrupts. Under 7.2 an interrupt that
    /// arrives while a guest is entered or left can be lost: guests with several vCPUs then stall
    /// for seconds or end in a triple fault.
    pub const QEMU_SOUND: Version = Version::new(10, 0);
}

impl Default for Needs {
    fn default() -> Self {
        Self {
            qemu: Self::QEMU_SOUND,
            host_kernel: None,
            guest_kernel: None,
        }
    }
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let series = |series: Option<Version>| {
            series.map_or("the distribution's Linux".to_owned(), |series| {
                format!("Linux {series}")
            })
        };
        write!(
            f,
            "QEMU {} or newer, {} for the host, {} for guests",
            self.qemu,
            series(self.host_kernel),
            series(self.guest_kernel)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_programs_and_packages_say() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright";
        assert_eq!(Version::of_qemu(debian), Some(Version::new(7, 2)));
        assert_eq!(
            Version::of_qemu("QEMU emulator version 10.0.2"),
            Some(Version::new(10, 0))
        );
        assert_eq!(Version::of_qemu("something else"), None);
        let package = "1:10.0.2+ds-2+deb13u1~bpo12+1";
        assert_eq!(Version::of_package(package), Some(Version::new(10, 0)));
        assert_eq!(
            Version::of_package("6.12.95-1~bpo12+1"),
            Some(Version::new(6, 12))
        );
        assert!(Version::new(9, 2) < Version::new(10, 0));
    }

    #[test]
    fn people_write_one_number_or_two() {
        assert_eq!("10".parse(), Ok(Version::new(10, 0)));
        assert_eq!("6.12".parse(), Ok(Version::new(6, 12)));
        assert!("6.12.1".parse::<Version>().is_err() && "new".parse::<Version>().is_err());
    }
}
