//! Events at the boundary of a guest: EXITINTINFO, the event that the exit interrupted, and
//! EVENTINJ, the event that the entry injects (APM 2, §15.7.2 and §15.20: the same layout).

use crate::Vector;
use crate::gate::FIRST_INTERRUPT;

const VALID: u64 = 1 << 31;
const HAS_CODE: u64 = 1 << 11;

/// #DB.
pub const DEBUG: Vector = 1;
/// A non-maskable interrupt's.
pub const NMI: Vector = 2;
/// #DF.
pub const DOUBLE_FAULT: Vector = 8;
/// #NP, which a gate that is not present raises.
pub const NOT_PRESENT: Vector = 11;
/// #GP, which a vector behind the table's limit raises.
pub const PROTECTION: Vector = 13;
/// #PF.
const PAGE_FAULT: Vector = 14;
/// #AC.
pub const ALIGNMENT: Vector = 17;

/// In the error code of #NP and #GP: met while an external event was delivered.
pub const CODE_EXTERNAL: u32 = 1;
/// There: the code names a gate of the interrupt descriptor table.
pub const CODE_IDT: u32 = 2;

/// Kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An interrupt from outside, 0.
    External,
    /// A non-maskable one, 2.
    Nmi,
    /// An exception, 3.
    Exception,
    /// An INT instruction's, 4.
    Software,
}

/// An event: which, and of which kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its vector.
    pub vector: Vector,
    /// Its kind.
    pub kind: Kind,
    /// An exception's error code.
    pub code: Option<u32>,
}

impl Event {
    /// An exception.
    #[must_use]
    pub const fn exception(vector: Vector, code: Option<u32>) -> Self {
        Self {
            vector,
            kind: Kind::Exception,
            code,
        }
    }

    /// A non-maskable interrupt.
    #[must_use]
    pub const fn nmi() -> Self {
        Self {
            vector: NMI,
            kind: Kind::Nmi,
            code: None,
        }
    }

    /// An interrupt from outside.
    #[must_use]
    pub const fn external(vector: Vector) -> Self {
        Self {
            vector,
            kind: Kind::External,
            code: None,
        }
    }

    /// Decodes the field; `None` if it is not valid, or of an unknown kind.
    ///
    /// QEMU's processor reports an external interrupt as an exception (kind 3) if its delivery
    /// faults. No exception has a vector of 32 or more, so an exception of such a vector is an
    /// external interrupt; one of vector 2 is a non-maskable interrupt.
    #[must_use]
    pub const fn from_field(field: u64) -> Option<Self> {
        if field & VALID == 0 {
            return None;
        }
        let vector = field as u8;
        let kind = match field >> 8 & 7 {
            0 => Kind::External,
            2 => Kind::Nmi,
            3 if vector >= FIRST_INTERRUPT => Kind::External,
            3 if vector == NMI => Kind::Nmi,
            3 => Kind::Exception,
            4 => Kind::Software,
            _ => return None,
        };
        let code = if field & HAS_CODE != 0 {
            Some((field >> 32) as u32)
        } else {
            None
        };
        Some(Self { vector, kind, code })
    }

    /// The field that injects it.
    #[must_use]
    pub const fn field(self) -> u64 {
        let kind = match self.kind {
            Kind::External => 0,
            Kind::Nmi => 2,
            Kind::Exception => 3,
            Kind::Software => 4,
        };
        let code = match self.code {
            Some(code) => HAS_CODE | (code as u64) << 32,
            None => 0,
        };
        VALID | kind << 8 | self.vector as u64 | code
    }

    /// Returns the event that the guest receives when `second` happens during the delivery of
    /// `self`: `second`, or a double fault, or `None` for a shutdown (APM 2, §8.2.9).
    #[must_use]
    pub const fn then(self, second: Self) -> Option<Self> {
        if !matches!(self.kind, Kind::Exception) {
            return Some(second);
        }
        let second_counts = is_contributory(second.vector);
        let doubles = match self.vector {
            DOUBLE_FAULT if second_counts || second.vector == PAGE_FAULT => return None,
            PAGE_FAULT => second_counts || second.vector == PAGE_FAULT,
            first => is_contributory(first) && second_counts,
        };
        Some(if doubles {
            Self::exception(DOUBLE_FAULT, Some(0))
        } else {
            second
        })
    }
}

impl Event {
    /// Combines this fault with the event that was being delivered, if any: the guest's event, or
    /// `None` for a shutdown.
    ///
    /// Every fault of a sequence is combined this way, also those that the hypervisor raises for
    /// causes unknown to the guest's tables (a nested page fault, a refusal). So a delivery that
    /// faults at every event terminates: the second fault becomes #DF, and the third ends the
    /// guest.
    #[must_use]
    pub const fn met_during(self, first: Option<Self>) -> Option<Self> {
        match first {
            Some(first) => first.then(self),
            None => Some(self),
        }
    }

    /// An exception's error code, of those that have one (APM 2, table 8-1).
    #[must_use]
    pub const fn has_code(vector: Vector) -> bool {
        matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30)
    }
}

/// #DE, #TS, #NP, #SS, #GP.
const fn is_contributory(vector: Vector) -> bool {
    matches!(vector, 0 | 10..=13)
}

/// The length, bytes, of an INT instruction with an immediate vector that begins `code`, prefixes
/// included; `None` if it is another one. Instructions have 15 bytes at most.
#[must_use]
pub fn software_len(code: &[u8]) -> Option<u8> {
    const INT: u8 = 0xcd;
    for (index, byte) in (0..14).zip(code) {
        match byte {
            0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf2 | 0xf3 => {}
            &INT => return Some(index + 2),
            _ => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_the_layout_of_the_manual() {
        let np = Event::exception(NOT_PRESENT, Some(0x78a));
        assert_eq!(np.field(), 0x0000_078a_8000_0b0b);
        assert_eq!(Event::from_field(np.field()), Some(np));
        assert_eq!(Event::external(0xec).field(), 0x8000_00ec);
        assert_eq!(Event::from_field(0x0000_00ec), None);
        assert_eq!(Event::from_field(0x8000_01ec), None);
        let nmi = Event {
            vector: 2,
            kind: Kind::Nmi,
            code: None,
        };
        assert_eq!(
            (nmi.field(), Event::from_field(nmi.field())),
            (0x8000_0202, Some(nmi))
        );
    }

    #[test]
    fn bug_6_an_interrupt_that_qemu_calls_an_exception_is_injected_as_an_interrupt() {
        // Seen: 0x800003ec. Injected so, it is an exception that there is not, and the entry fails
        // (VMEXIT_INVALID).
        let event = Event::from_field(0x8000_03ec).unwrap();
        assert_eq!(event, Event::external(0xec));
        assert_eq!(event.field(), 0x8000_00ec);
        // The value that hardware reports.
        assert_eq!(Event::from_field(0x8000_00ec), Some(event));
    }

    #[test]
    fn two_faults_make_a_double_one_as_in_the_manual() {
        let fault = |vector| Event::exception(vector, Some(0));
        for (first, second, expected) in [
            (fault(14), fault(11), Some(fault(8))),
            (fault(13), fault(11), Some(fault(8))),
            (fault(13), fault(14), Some(fault(14))),
            (fault(14), fault(14), Some(fault(8))),
            (fault(1), fault(11), Some(fault(11))),
            (fault(8), fault(11), None),
            (Event::external(0x41), fault(11), Some(fault(11))),
        ] {
            assert_eq!(first.then(second), expected, "{first:?} {second:?}");
        }
    }

    #[test]
    fn a_delivery_that_always_faults_ends_at_the_third_fault() {
        // For any event of the hypervisor, and any event that was delivered first.
        let kinds = [Kind::External, Kind::Nmi, Kind::Exception, Kind::Software];
        for fault in [0, 10, 11, 12, 13, 14].map(|vector| Event::exception(vector, Some(0))) {
            for kind in kinds {
                for vector in 0..=255 {
                    let mut during = Event {
                        vector,
                        kind,
                        code: None,
                    };
                    let mut faults = 0;
                    while let Some(next) = fault.met_during(Some(during)) {
                        during = next;
                        faults += 1;
                        assert!(faults < 3, "{fault:?} within {kind:?} {vector}");
                    }
                }
            }
        }
        let fault = Event::exception(PROTECTION, Some(0));
        assert_eq!(fault.met_during(None), Some(fault));
    }

    #[test]
    fn int_instructions_are_measured_with_their_prefixes() {
        assert_eq!(software_len(&[0xcd, 0xf1, 0x90]), Some(2));
        assert_eq!(software_len(&[0x66, 0x48, 0xcd, 0x80]), Some(4));
        assert_eq!(software_len(&[0x90, 0xcd]), None);
        assert_eq!(software_len(&[0x66; 20]), None);
        assert_eq!(software_len(&[]), None);
    }
}
