//! The place where a program chooses the memory of its machines, and their set of functions.

use std::sync::Arc;

use anyhow::Result;

use super::attach::{Attached, Parts};
use super::composed::Functions;
use super::config::Config;
use super::devices::{self, MakeFunctions};
use super::memory::{Memory, Pieces, Plain};
use super::swapped::Swapped;
use crate::composition::Composition;

/// Composition of a program's machines: its wrappers, and a closed set of functions.
pub trait MachineComposition: Composition {
    /// Builds the devices of a machine over its memory, as a closed set of functions
    /// ([`functions!`](crate::functions)): the only place where that set is named, so that the code
    /// of an owner exists once for each memory.
    ///
    /// # Errors
    /// Names what the host lacks or refuses.
    fn attach(&self, assembly: Assembly<'_>) -> Result<Attached>;
}

/// A machine whose devices are to be built, for the program to say over which memory and as which
/// set of functions.
pub struct Assembly<'a> {
    composition: Arc<dyn Composition>,
    config: &'a mut Config,
    parts: &'a Parts<'a>,
}

impl<'a> Assembly<'a> {
    /// Creates the assembly that `config` asks for. Files are taken out of it.
    pub(super) fn new(
        composition: Arc<dyn Composition>,
        config: &'a mut Config,
        parts: &'a Parts<'a>,
    ) -> Self {
        Self {
            composition,
            config,
            parts,
        }
    }

    /// Returns the pieces of which memory is made.
    pub fn pieces(&self) -> Pieces {
        Pieces {
            ram: self.parts.ram.clone(),
            slots: self.parts.slots.to_vec(),
            control: self.parts.control.clone(),
        }
    }

    /// Builds everything over the memory that is asked for, and starts the sidecore.
    ///
    /// # Errors
    /// Names what the host lacks or refuses.
    pub fn build<F: Functions>(self, make: &dyn MakeFunctions<F>) -> Result<Attached> {
        let pieces = self.pieces();
        match self.config.swap.take() {
            Some(swap) => {
                let memory = Swapped::new(swap, pieces, self.composition.clone());
                self.build_over(memory, make)
            }
            None => {
                let memory = Plain::new(pieces.ram, self.config.hints);
                self.build_over(memory, make)
            }
        }
    }

    /// Builds the same over this memory.
    ///
    /// # Errors
    /// Names what the host lacks or refuses.
    pub fn build_over<F: Functions, M: Memory<F>>(
        self,
        memory: M,
        make: &dyn MakeFunctions<F>,
    ) -> Result<Attached> {
        let composition = self.composition.as_ref();
        devices::attach(memory, self.config, self.parts, composition, make)
    }
}
