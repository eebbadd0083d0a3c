//! Least period of the local APIC's timer in periodic mode.
//!
//! A very short period would keep a processor busy with delivery, and delay the other timers of a
//! hypervisor that emulates this one. The limit is KVM's default. One-shot mode is not limited:
//! there each interrupt takes an instruction of the guest.

/// The least period, µs.
pub const LEAST_PERIOD_US: u64 = 200;

/// Returns the divisor of the divide configuration register (bits 0, 1 and 3; APM 2, §16.4.1).
#[must_use]
pub const fn divisor(register: u32) -> u32 {
    match register & 3 | register >> 1 & 4 {
        7 => 1,
        shift => 2 << shift,
    }
}

/// Returns the initial count for the real timer if the guest wrote `initial`. `least`: counts of
/// the undivided clock in the least period.
#[must_use]
pub fn initial_count(initial: u32, divide: u32, is_periodic: bool, least: u64) -> u32 {
    if !is_periodic || initial == 0 {
        return initial;
    }
    let counts = least.div_ceil(divisor(divide).into());
    initial.max(u32::try_from(counts).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_those_of_the_manual() {
        let registers = [0, 1, 2, 3, 8, 9, 10, 11];
        let divisors = [2, 4, 8, 16, 32, 64, 128, 1];
        assert_eq!(registers.map(divisor), divisors);
    }

    #[test]
    fn a_periodic_timer_has_the_least_period_whatever_is_written() {
        // A clock of 1 GHz.
        let least = LEAST_PERIOD_US * 1000;
        for divide in [0, 1, 2, 3, 8, 9, 10, 11] {
            for initial in [1, 2, 199, 1_562, 1_563, 99_999, 200_000, 200_001, u32::MAX] {
                let real = initial_count(initial, divide, true, least);
                let period = u64::from(real) * u64::from(divisor(divide));
                assert!(period >= least, "{initial} by {divide}: {period}");
                // Nothing is longer than it has to be.
                let own = u64::from(initial) * u64::from(divisor(divide));
                assert!(
                    real == initial || own < least,
                    "{initial} by {divide}: {real}"
                );
                assert_eq!(initial_count(initial, divide, false, least), initial);
            }
            // Zero stops it.
            assert_eq!(initial_count(0, divide, true, least), 0);
        }
        assert_eq!(initial_count(1, 11, true, u64::MAX), u32::MAX);
    }
}
