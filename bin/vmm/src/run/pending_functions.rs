//! Functions that are added to an owner before it runs.

use std::sync::Arc;

use anyhow::Result;
use guest_mem::{NoIommu, PhysMem, SourceId};
use kvm::doorbells::{IoEvents, KvmDoorbells};
use machine::{FunctionLines, FunctionShape};
use platform::doorbell::Doorbells;
use platform::memory::PlaceMemory;

use super::composed::{Functions, MAX_LEASES, Owner, Units};

/// Parts from which the port of a function is built.
pub struct Plug {
    pub source: SourceId,
    pub number: usize,
    pub shape: FunctionShape,
    pub doorbells: Option<Arc<IoEvents>>,
    /// Memory of an assigned function's BARs.
    pub memory: Option<Arc<dyn PlaceMemory>>,
}

/// The unit of assigned functions, and these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// Number of the unit, at the owner.
    pub unit: usize,
    /// Requesters of the functions.
    pub functions: Vec<SourceId>,
}

/// Functions that are given to an owner before it runs, and the parts from which their ports are
/// built once it does.
pub struct PendingFunctions<'a, F, M> {
    owner: &'a mut Owner<F, M>,
    unit: usize,
    plugged: Vec<Plug>,
    /// Those that are before no IOMMU.
    beside: Vec<SourceId>,
    assigned: Option<Assigned>,
}

/// Functions that were added.
pub struct Plugged {
    /// The parts of their ports.
    pub ports: Vec<Plug>,
    /// Those that are before no IOMMU.
    pub beside: Vec<SourceId>,
    /// Those that are assigned, if any.
    pub assigned: Option<Assigned>,
}

impl<'a, F: Functions, M: PhysMem> PendingFunctions<'a, F, M> {
    /// Creates an empty list, under the unit of this number unless another is named.
    pub fn new(owner: &'a mut Owner<F, M>, unit: usize) -> Self {
        Self {
            owner,
            unit,
            plugged: Vec::new(),
            beside: Vec::new(),
            assigned: None,
        }
    }

    /// Adds `function`; its number.
    pub fn add(&mut self, function: impl Into<F>, doorbells: KvmDoorbells) -> usize {
        self.add_under(self.unit, function.into(), doorbells)
    }

    /// Adds `function`, whose doorbells exit to the vCPU's loop; its number.
    pub fn add_unheard(&mut self, function: impl Into<F>) -> usize {
        self.add_to(self.unit, function.into(), None, None)
    }

    /// Adds `function`, which is before no IOMMU. Returns its number.
    pub fn add_beside(&mut self, function: impl Into<F>, doorbells: KvmDoorbells) -> usize {
        let unit = self.owner.add_unit(Units::None(NoIommu::new(MAX_LEASES)));
        let function = function.into();
        self.beside.push(function.get().source());
        self.add_under(unit, function, doorbells)
    }

    /// Adds `function`, a device of the host whose BARs are shown by `memory`, under the unit of
    /// such functions, which `make_unit` makes for the first of them; its number.
    ///
    /// # Errors
    /// The unit's; nothing has been added.
    pub fn add_assigned(
        &mut self,
        function: impl Into<F>,
        memory: Arc<dyn PlaceMemory>,
        make_unit: impl FnOnce() -> Result<Units>,
    ) -> Result<usize> {
        let function = function.into();
        let source = function.get().source();
        let unit = match &mut self.assigned {
            Some(assigned) => {
                assigned.functions.push(source);
                assigned.unit
            }
            none => {
                let unit = self.owner.add_unit(make_unit()?);
                let functions = vec![source];
                *none = Some(Assigned { unit, functions });
                unit
            }
        };
        Ok(self.add_to(unit, function, None, Some(memory)))
    }

    /// Returns what was added.
    pub fn into_plugged(self) -> Plugged {
        Plugged {
            ports: self.plugged,
            beside: self.beside,
            assigned: self.assigned,
        }
    }

    fn add_under(&mut self, unit: usize, function: F, doorbells: KvmDoorbells) -> usize {
        self.add_to(unit, function, Some(doorbells), None)
    }

    fn add_to(
        &mut self,
        unit: usize,
        function: F,
        doorbells: Option<KvmDoorbells>,
        memory: Option<Arc<dyn PlaceMemory>>,
    ) -> usize {
        let (source, shape) = (function.get().source(), function.get().shape());
        let events = doorbells.as_ref().map(KvmDoorbells::events);
        let function_lines = FunctionLines {
            doorbells: doorbells.map(|doorbells| Box::new(doorbells) as Box<dyn Doorbells>),
            pin: None,
        };
        let number = self.owner.add(unit, function, function_lines);
        self.plugged.push(Plug {
            source,
            number,
            shape,
            doorbells: events,
            memory,
        });
        number
    }
}
