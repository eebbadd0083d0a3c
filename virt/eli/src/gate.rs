//! Gates of an interrupt descriptor table in long mode (APM 2, §8.8.2; 16 bytes each), and shadows
//! of them.

use crate::{Vector, VectorSet};

/// Bytes of a gate.
pub const GATE_LEN: u16 = 16;
/// Bytes of a table with all gates: one page.
pub const TABLE_LEN: u64 = 4096;
/// The limit of a full table.
pub const FULL_LIMIT: u32 = 0xfff;
/// The first vector that is no exception of the processor's.
pub const FIRST_INTERRUPT: Vector = 32;

const PRESENT: u64 = 1 << 47;
const TYPE: u64 = 0xf << 40;
const SYSTEM: u64 = 1 << 44;
const INTERRUPT_GATE: u64 = 0xe << 40;

/// A gate, as two little-endian words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gate(pub [u64; 2]);

impl Gate {
    /// An interrupt gate.
    #[must_use]
    pub const fn interrupt(handler: u64, selector: u16, privilege: u8) -> Self {
        let low = handler & 0xffff
            | (selector as u64) << 16
            | INTERRUPT_GATE
            | (privilege as u64 & 3) << 45
            | PRESENT
            | (handler >> 16 & 0xffff) << 48;
        Self([low, handler >> 32])
    }

    /// Whether it is marked present.
    #[must_use]
    pub const fn is_present(self) -> bool {
        self.0[0] & PRESENT != 0
    }

    /// The least privileged level from which an INT instruction may use it, 0 to 3.
    #[must_use]
    pub const fn privilege(self) -> u8 {
        (self.0[0] >> 45 & 3) as u8
    }

    /// Whether its type is one that the processor takes in long mode, an interrupt or a trap gate.
    #[must_use]
    pub const fn is_gate(self) -> bool {
        self.0[0] & SYSTEM == 0 && self.0[0] >> 41 & 7 == 7
    }

    /// Returns the shadow's gate for a vector that is not delivered directly to the guest: this
    /// gate, marked not present.
    ///
    /// Its type stays a gate's, or becomes one: the processor checks the type first, and would
    /// raise #GP for type 0 where the host expects #NP.
    #[must_use]
    pub const fn hidden(self) -> Self {
        let mut low = self.0[0] & !PRESENT;
        if !self.is_gate() {
            low = low & !(TYPE | SYSTEM) | INTERRUPT_GATE;
        }
        Self([low, self.0[1]])
    }
}

/// Whether a table of this limit, bytes - 1, has the gate of `vector`.
#[must_use]
pub fn is_within(limit: u32, vector: Vector) -> bool {
    u32::from(vector) * u32::from(GATE_LEN) + u32::from(GATE_LEN) - 1 <= limit
}

/// Reason why a guest's table has no shadow, and its interrupts are therefore injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// The guest is not in long mode, or its table is a short one of an early boot stage.
    Early,
    /// The table does not begin at a page: others' data would be shadowed with it.
    Unaligned,
    /// The guest's page tables do not map it.
    Unmapped,
    /// No interrupt of a device is assigned.
    NothingAssigned,
}

impl core::fmt::Display for Unfit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Early => "the guest has no table of one page in long mode yet",
            Self::Unaligned => "the guest's table does not begin at a page",
            Self::Unmapped => "the guest's page tables do not map its table",
            Self::NothingAssigned => "no vector is assigned",
        })
    }
}

/// Whether a table can be shadowed in place: it must be one whole page, of which the guest's
/// physical address is known.
///
/// # Errors
/// The reason why it cannot.
pub fn placement(
    long_mode: bool,
    limit: u32,
    physical: Option<u64>,
    assigned: VectorSet,
) -> Result<u64, Unfit> {
    if !long_mode || limit != FULL_LIMIT {
        return Err(Unfit::Early);
    }
    if assigned.is_empty() {
        return Err(Unfit::NothingAssigned);
    }
    match physical {
        None => Err(Unfit::Unmapped),
        Some(address) if address % TABLE_LEN != 0 => Err(Unfit::Unaligned),
        Some(address) => Ok(address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_have_the_layout_of_the_manual() {
        let gate = Gate::interrupt(0xffff_8000_1234_5678, 0x10, 3);
        assert_eq!(gate.0, [0x1234_ee00_0010_5678, 0xffff_8000]);
        assert!(gate.is_present() && gate.is_gate());
        assert_eq!(
            (gate.privilege(), Gate::interrupt(0, 8, 0).privilege()),
            (3, 0)
        );
        assert_eq!(gate.hidden().0, [0x1234_6e00_0010_5678, 0xffff_8000]);
    }

    #[test]
    fn bug_4_a_hidden_gate_has_a_gates_type() {
        // An empty gate has type 0, with which the processor raises #GP before it looks whether it
        // is present.
        assert_eq!(Gate::default().hidden().0, [0x0e00 << 32, 0]);
        assert!(Gate::default().hidden().is_gate());
        // A call gate, or a segment descriptor: type 0xc, system bit set.
        assert!(Gate([0xc << 40, 0]).hidden().is_gate());
        assert!(Gate([0xe << 40 | 1 << 44, 0]).hidden().is_gate());
        // A trap gate stays one.
        assert_eq!(Gate([0xf << 40 | PRESENT, 7]).hidden().0, [0xf << 40, 7]);
    }

    #[test]
    fn limits_cut_whole_gates() {
        assert!(is_within(FULL_LIMIT, 255) && !is_within(FULL_LIMIT - 1, 255));
        assert!(is_within(0xf0 * 16 - 1, 0xef) && !is_within(0xf0 * 16 - 1, 0xf0));
    }

    #[test]
    fn only_a_table_of_one_page_is_shadowed_in_place() {
        let assigned: VectorSet = [0x41].into_iter().collect();
        assert_eq!(placement(true, 0xfff, Some(0x5000), assigned), Ok(0x5000));
        assert_eq!(
            placement(false, 0xfff, Some(0x5000), assigned),
            Err(Unfit::Early)
        );
        assert_eq!(
            placement(true, 0x1ff, Some(0x5000), assigned),
            Err(Unfit::Early)
        );
        assert_eq!(
            placement(true, 0xfff, Some(0x5010), assigned),
            Err(Unfit::Unaligned)
        );
        assert_eq!(placement(true, 0xfff, None, assigned), Err(Unfit::Unmapped));
        let none = VectorSet::EMPTY;
        assert_eq!(
            placement(true, 0xfff, Some(0x5000), none),
            Err(Unfit::NothingAssigned)
        );
    }
}
