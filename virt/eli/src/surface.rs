//! The surface of a guest that has real interrupt hardware: everything that it can use, what it could take by it, what contains it,
//! and the test that says so. docs/eli.md shows the same table; a test compares the two.
//!
//! A row without a test is not contained, and a hypervisor counts those rows at its start. A test is the name of a payload of
//! `eli-attacks`, which is run without the defence, where it must succeed, with it, and calm.

use crate::defence::Defence;

/// Part of the surface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Control registers and flags.
    Control,
    /// Model-specific registers.
    Msrs,
    /// Descriptors, stacks and page tables, which the delivery of an event reads and writes.
    Delivery,
    /// Events that recur while they are delivered.
    Recurring,
    /// Instructions.
    Instructions,
    /// Interrupts, by source, trigger, delivery, destination, class and rate.
    Interrupts,
    /// Ports.
    Ports,
    /// Configuration space.
    Config,
    /// Devices' own accesses to memory.
    Dma,
}

impl Part {
    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Control => "control registers, flags",
            Self::Msrs => "model-specific registers",
            Self::Delivery => "descriptors, stacks, page tables",
            Self::Recurring => "recurring events",
            Self::Instructions => "instructions",
            Self::Interrupts => "interrupts",
            Self::Ports => "ports",
            Self::Config => "configuration space",
            Self::Dma => "DMA",
        }
    }
}

/// What contains a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contained {
    /// These defences, any of which left out lets the tests' attacks succeed.
    By(&'static [Defence]),
    /// The architecture: the guest's own state alone, or virtual.
    Virtual,
    /// Nothing; why.
    Not(&'static str),
}

/// A row.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Which part.
    pub part: Part,
    /// What the guest uses.
    pub uses: &'static str,
    /// What it could take by it.
    pub takes: &'static str,
    /// What contains it.
    pub contained: Contained,
    /// Payloads that show it.
    pub tests: &'static [&'static str],
}

impl Row {
    /// Whether a test shows it.
    #[must_use]
    pub const fn is_tested(&self) -> bool {
        !self.tests.is_empty()
    }
}

/// The table.
pub const ROWS: &[Row] = &[];
