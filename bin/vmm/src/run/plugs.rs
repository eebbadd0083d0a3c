//! Functions on their way under an owner that does not run yet.

use std::sync::Arc;

use guest_mem::{NoIommu, PhysMem, SourceId};
use kvm::doorbells::{IoEvents, KvmDoorbells};
use machine::{FunctionShape, Wires};

use super::composed::{Functions, MAX_LEASES, Owner, Units};

/// What the port of a function needs.
pub struct Plug {
    pub source: SourceId,
    pub number: usize,
    pub shape: FunctionShape,
    pub doorbells: Arc<IoEvents>,
}

/// Functions on their way to an owner that does not run yet, and what their doors need once it does.
pub struct Plugs<'a, F, M> {
    owner: &'a mut Owner<F, M>,
    unit: usize,
    plugged: Vec<Plug>,
}

impl<'a, F: Functions, M: PhysMem> Plugs<'a, F, M> {
    /// Under the unit of this number, if nothing else is said.
    pub fn new(owner: &'a mut Owner<F, M>, unit: usize) -> Self {
        Self {
            owner,
            unit,
            plugged: Vec::new(),
        }
    }

    /// Adds `function`; its number.
    pub fn add(&mut self, function: impl Into<F>, doorbells: KvmDoorbells) -> usize {
        self.add_under(self.unit, function.into(), doorbells)
    }

    /// Adds `function`, which no IOMMU stands before; its number.
    pub fn add_beside(&mut self, function: impl Into<F>, doorbells: KvmDoorbells) -> usize {
        let unit = self.owner.add_unit(Units::None(NoIommu::new(MAX_LEASES)));
        self.add_under(unit, function.into(), doorbells)
    }

    /// Returns what the ports of all added functions need.
    pub fn into_plugged(self) -> Vec<Plug> {
        self.plugged
    }

    fn add_under(&mut self, unit: usize, function: F, doorbells: KvmDoorbells) -> usize {
        let (source, shape) = (function.get().source(), function.get().shape());
        let events = doorbells.events();
        let wires = Wires {
            doorbells: Some(Box::new(doorbells)),
            pin: None,
        };
        let number = self.owner.add(unit, function, wires);
        self.plugged.push(Plug {
            source,
            number,
            shape,
            doorbells: events,
        });
        number
    }
}
