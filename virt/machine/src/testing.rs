//! Resources of a call into a function, created without an owner, for unit tests of functions.

use guest_mem::{NoIommu, SourceId};

use crate::{Effects, FunctionContext, HoldId};

/// Creates an empty list of effects for function number `number`, whose requester id is `source`.
#[must_use]
pub fn effects<C>(number: usize, source: SourceId) -> Effects<C> {
    Effects::new(number, source)
}

/// Returns the resources of a call, with `unit`, `bypass` and `mem` at `now` (ns of a monotonic
/// clock), to the function whose effects these are.
pub fn function_context<'a, I, M, C>(
    unit: &'a mut I,
    bypass: &'a mut NoIommu,
    mem: &'a M,
    now: u64,
    effects: &'a mut Effects<C>,
) -> FunctionContext<'a, I, M, C> {
    FunctionContext::new(unit, bypass, mem, now, effects)
}

/// Takes the held invalidations that a function has released, in the order of their release.
pub fn take_released<C>(effects: &mut Effects<C>) -> Vec<HoldId> {
    std::mem::take(&mut effects.released)
}
