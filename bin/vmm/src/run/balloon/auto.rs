//! `target=auto`: the size of a balloon, decided each second from the host's shortage of memory
//! and the memory that the guest can spare.
//!
//! Slowly, since either side's figures lag: by no more than 5 % of the guest's memory a step, as
//! MOM's rules do for QEMU (the manager that the VSwapper paper compares with). [`decide`] is pure:
//! it reads no clock and no file. Thresholds, of the guest's memory or of the limit that the host
//! has:
//!
//! | | |
//! |---|---|
//! | the host is short | 90 % of its limit used, or a task waits for memory 10 % of the time |
//! | the host has plenty | below 75 %, and no task waits for 1 % of the time |
//! | the guest gives | while more than 20 % of its memory is available to it, and as far as that remains |
//! | the guest gets back | below 10 % available, whatever the host lacks; or while the host has plenty |

/// Memory that the host has for the machine, in any unit, and the part of it that is used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostMemory {
    /// Used, but for what is given back at once.
    pub used: u64,
    /// The limit.
    pub limit: u64,
    /// Share of the last ten seconds in which a task waited for memory, in percent, where the
    /// kernel gives it (PSI, `some`).
    pub stalled: f64,
}

/// Shortage of memory on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pressure {
    Plenty,
    Some,
    Short,
}

impl HostMemory {
    fn pressure(&self) -> Pressure {
        let share = |percent: u64| u128::from(self.limit) * u128::from(percent) / 100;
        let used = u128::from(self.used);
        if used >= share(90) || self.stalled >= 10.0 {
            Pressure::Short
        } else if used < share(75) && self.stalled < 1.0 {
            Pressure::Plenty
        } else {
            Pressure::Some
        }
    }
}

/// The guest, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestMemory {
    /// All of its memory.
    pub memory: u32,
    /// The most that it is asked for.
    pub most: u32,
    /// Pages that it is asked for.
    pub target: u32,
    /// Pages that it has given.
    pub actual: u32,
    /// Pages that it could give to new programs, if it has reported them since it was asked last.
    pub available: Option<u64>,
}

/// Decides the target, in pages.
pub fn decide(host: &HostMemory, guest: &GuestMemory) -> u32 {
    let GuestMemory {
        memory,
        most,
        target,
        actual,
        available,
    } = *guest;
    let step = (memory / 20).max(1);
    let (low, reserve) = (u64::from(memory / 10), u64::from(memory / 5));
    // From what it has: what it was asked for and did not give it is not asked for any longer.
    let smaller = target.min(actual).saturating_sub(step);
    match (host.pressure(), available) {
        (_, Some(available)) if available < low => smaller,
        (Pressure::Plenty, _) => target.saturating_sub(step),
        // Not before it has given what it was asked for.
        (Pressure::Short, Some(available)) if available > reserve && actual >= target => {
            let spare = u32::try_from(available - reserve).unwrap_or(u32::MAX);
            target.saturating_add(step.min(spare)).min(most)
        }
        _ => target,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: HostMemory = host(95, 0.0);
    const SOME: HostMemory = host(80, 0.0);
    const PLENTY: HostMemory = host(50, 0.0);

    const fn host(used: u64, stalled: f64) -> HostMemory {
        HostMemory {
            used,
            limit: 100,
            stalled,
        }
    }

    /// Returns a guest that has given all that it was asked for.
    fn guest(target: u32, available: u64) -> GuestMemory {
        GuestMemory {
            memory: 1000,
            most: 750,
            target,
            actual: target,
            available: Some(available),
        }
    }

    #[test]
    fn a_host_is_short_by_use_or_by_waiting() {
        for (memory, pressure) in [
            (host(74, 0.9), Pressure::Plenty),
            (host(75, 0.0), Pressure::Some),
            (host(10, 1.0), Pressure::Some),
            (host(89, 9.9), Pressure::Some),
            (host(90, 0.0), Pressure::Short),
            (host(10, 10.0), Pressure::Short),
            // None at all.
            (HostMemory::default(), Pressure::Short),
        ] {
            assert_eq!(memory.pressure(), pressure, "{memory:?}");
        }
    }

    #[test]
    fn target_grows_by_a_step_while_the_host_is_short_and_the_guest_has_to_spare() {
        assert_eq!(decide(&SHORT, &guest(100, 900)), 150);
        // No further than what the guest has to spare, or than it may.
        assert_eq!(decide(&SHORT, &guest(100, 230)), 130);
        assert_eq!(decide(&SHORT, &guest(100, 200)), 100);
        assert_eq!(decide(&SHORT, &guest(740, 900)), 750);
        assert_eq!(decide(&SOME, &guest(100, 900)), 100);
        // It has not given what it was asked for, or says nothing.
        let behind = GuestMemory {
            actual: 60,
            ..guest(100, 900)
        };
        assert_eq!(decide(&SHORT, &behind), 100);
        let silent = GuestMemory {
            available: None,
            ..guest(100, 0)
        };
        assert_eq!(decide(&SHORT, &silent), 100);
        assert_eq!(decide(&PLENTY, &silent), 50);
    }

    #[test]
    fn target_shrinks_when_the_guest_is_short_or_the_host_is_not() {
        for host in [SHORT, SOME, PLENTY] {
            assert_eq!(decide(&host, &guest(100, 99)), 50);
        }
        assert_eq!(decide(&PLENTY, &guest(100, 500)), 50);
        assert_eq!(decide(&PLENTY, &guest(30, 500)), 0);
        let behind = GuestMemory {
            actual: 60,
            ..guest(100, 99)
        };
        assert_eq!(decide(&SHORT, &behind), 10);
    }

    #[test]
    fn a_host_that_stays_short_leaves_the_guest_its_reserve() {
        let mut now = guest(0, 900);
        for _ in 0..100 {
            let target = decide(&SHORT, &now);
            now = guest(target, 900 - u64::from(target));
        }
        assert_eq!(now, guest(700, 200));
    }
}
