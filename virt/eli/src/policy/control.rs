//! Registers that control the guest's own processor, as far as their values are not the guest's alone to choose.

/// DR7 for a processor that must not meet data breakpoints: the guest's, with those that are not at instructions switched off.
///
/// On hardware such a breakpoint that is met by its own exception's delivery recurs without an end, and #DB exits for that. QEMU's
/// emulation (10.0.2) ends itself when a data breakpoint is met by a delivery: there the guest reads back what it wrote, and gets none.
#[must_use]
pub const fn without_data_breakpoints(control: u64) -> u64 {
    let mut real = control;
    let mut number = 0;
    while number < 4 {
        let condition = control >> (16 + 4 * number) & 3;
        if condition != 0 {
            real &= !(3 << (2 * number));
        }
        number += 1;
    }
    real
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn breakpoints_at_instructions_alone_stay_enabled() {
        for number in 0..4 {
            for (condition, stays) in [(0, true), (1, false), (2, false), (3, false)] {
                let control = 0x400 | 3 << (2 * number) | condition << (16 + 4 * number);
                let enabled = without_data_breakpoints(control) >> (2 * number) & 3 == 3;
                assert_eq!(enabled, stays, "breakpoint {number}, condition {condition}");
                // The others, and the conditions, are as they were.
                let rest = !(3 << (2 * number));
                assert_eq!(without_data_breakpoints(control) & rest, control & rest);
            }
        }
        assert_eq!(without_data_breakpoints(0x400), 0x400);
    }
}
