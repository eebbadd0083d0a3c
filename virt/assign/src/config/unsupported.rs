//! Parts of a device that a guest does not see, and devices that it cannot have: the reasons.

use super::list::Broken;
use super::seen::Space;

/// Part of a device that a guest does not see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// A capability that the table hides.
    #[error("capability {id:#x} at {at:#x} is hidden: {reason}")]
    Hidden {
        /// Its list.
        space: Space,
        /// Its id.
        id: u16,
        /// Its offset.
        at: u16,
        /// Reason.
        reason: &'static str,
    },
    /// A capability that the table shows, whose content is wrong.
    #[error("capability {id:#x} at {at:#x} is not used: {fault}")]
    Malformed {
        /// Its list.
        space: Space,
        /// Its id.
        id: u16,
        /// Its offset.
        at: u16,
        /// Fault.
        fault: Fault,
    },
    /// A list of capabilities that does not end as it should.
    #[error("the list of {space:?} capabilities {broken}")]
    List {
        /// The list.
        space: Space,
        /// Fault.
        broken: Broken,
    },
    /// A BAR that is hidden.
    #[error("BAR {bar} is hidden: {reason}")]
    Bar {
        /// Its index.
        bar: u8,
        /// Reason.
        reason: BarReason,
    },
    /// An expansion ROM.
    #[error("the expansion ROM is hidden")]
    ExpansionRom,
}

/// Fault of a capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It runs into the next capability, or out of the space.
    #[error("its {len} bytes do not fit before {end:#x}")]
    Cut {
        /// Bytes it should have.
        len: usize,
        /// End of the bytes it may have.
        end: usize,
    },
    /// A version that is not known.
    #[error("version {0} is not known")]
    Version(u16),
    /// A length that cannot be.
    #[error("its length of {0} bytes is too short")]
    Short(u8),
    /// The second of its kind.
    #[error("there is one before it")]
    Second,
    /// A MSI-X table or pending-bit array that is not inside a memory BAR, or one that lies over
    /// the other.
    #[error("table and pending bits are not beside each other inside memory BARs")]
    Place,
}

/// Reason why a BAR is hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BarReason {
    /// I/O ports.
    #[error("it is an I/O BAR")]
    Io,
    /// Type bits of no memory BAR, or a 64-bit one without a register for the upper half.
    #[error("its type bits are wrong")]
    Type,
    /// A size that no BAR of its type has, or that the bus has no room for.
    #[error("no BAR of its type has {0:#x} bytes here")]
    Size(u64),
}

/// Reason why a device cannot be assigned at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The image has a length that no configuration space has.
    #[error("a configuration space of {0} bytes is none; 256 or 4096 are")]
    Length(usize),
    /// All ones: the device does not answer.
    #[error("the device does not answer: its vendor id reads as ones")]
    Absent,
    /// A bridge.
    #[error("header type {0} is no endpoint's; bridges cannot be assigned")]
    HeaderType(u8),
    /// It interrupts by its legacy pin alone.
    #[error("the device has a legacy interrupt pin, and neither MSI nor MSI-X that can be \
         used{}", because(.0))]
    PinOnly(Vec<Unsupported>),
}

/// The malformed ones among `reasons`, for a message.
fn because(reasons: &[Unsupported]) -> String {
    let faults = reasons.iter().filter(|reason| {
        matches!(
            reason,
            Unsupported::Malformed { .. } | Unsupported::List { .. }
        )
    });
    faults.map(|reason| format!("; {reason}")).collect()
}
