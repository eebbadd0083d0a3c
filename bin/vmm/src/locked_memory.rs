//! Memory that this process may lock (RLIMIT_MEMLOCK): what devices can have pinned.

use vfio::HostLimits;

/// Remedy where the limit is too low.
pub const MEMLOCK_REMEDY: &str = "raise it: `ulimit -l unlimited` as root before the program \
     starts, `memlock` in /etc/security/limits.conf, \
                                  LimitMEMLOCK=infinity of systemd; or give it CAP_IPC_LOCK";

/// Limit of locked memory, and what is used of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockedMemory {
    /// Bytes at most; nothing: as much as there is.
    pub limit: Option<u64>,
    /// Bytes that are locked now (`VmLck`).
    pub used: u64,
}

impl LockedMemory {
    /// No limit.
    #[cfg(test)]
    pub const UNLIMITED: Self = Self {
        limit: None,
        used: 0,
    };

    /// Creates this limit, and so much of it used, in bytes.
    #[cfg(test)]
    pub const fn limited(limit: u64, used: u64) -> Self {
        Self {
            limit: Some(limit),
            used,
        }
    }

    /// Reads that of this process.
    pub fn probe() -> Self {
        Self::of(&HostLimits::read())
    }

    /// Creates it from the host's limits. The limit does not count for a process with CAP_IPC_LOCK.
    fn of(limits: &HostLimits) -> Self {
        Self {
            limit: limits.lockable.filter(|_| !limits.is_exempt),
            used: limits.locked,
        }
    }

    /// Says why so many bytes more cannot be locked, and what to do; nothing if they can.
    pub fn shortage(&self, bytes: u64) -> Option<String> {
        let limit = self.limit.filter(|_| bytes > 0)?;
        (self.used.saturating_add(bytes) > limit).then(|| {
            format!(
                "{} MiB more would be locked, {} KiB are, and RLIMIT_MEMLOCK allows {} \
                 ({MEMLOCK_REMEDY})",
                bytes.div_ceil(1 << 20),
                self.used >> 10,
                amount(limit)
            )
        })
    }
}

/// Returns a number of bytes as people read it: whole MiB, or KiB where there are few.
pub fn amount(bytes: u64) -> String {
    match bytes >> 20 {
        0..10 => format!("{} KiB", bytes >> 10),
        mib => format!("{mib} MiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_counts_what_is_locked_already_and_not_for_the_privileged() {
        let used = 100 << 10;
        let of = |lockable, is_exempt| {
            LockedMemory::of(&HostLimits {
                lockable,
                locked: used,
                is_exempt,
                entries: 65_535,
            })
        };
        let mib = Some(1 << 20);
        assert_eq!(of(mib, false), LockedMemory::limited(1 << 20, used));
        assert_eq!(of(mib, true).limit, None);
        assert_eq!(of(None, false).limit, None);
        let limited = of(mib, false);
        assert_eq!(limited.shortage((1 << 20) - used), None);
        let said = limited
            .shortage((1 << 20) - used + 1)
            .expect("a page too many");
        for words in ["1 MiB more", "100 KiB are", "1024 KiB", "LimitMEMLOCK"] {
            assert!(said.contains(words), "{said}");
        }
        assert!(limited.shortage(u64::MAX).is_some());
        assert_eq!(of(Some(0), true).shortage(u64::MAX), None);
    }
}
