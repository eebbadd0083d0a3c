//! Ejection: a guest gives an assigned function back while it runs.
//!
//! The guest's `_EJ0` writes a slot's number to the machine's port ([`EjectSink`]). The function
//! leaves the bus at once, with its memory slots, and its owner as soon as nothing of it is in the
//! device's reach.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use guest_mem::{PhysMem, SourceId};
use machine::Request;
use pci::bus::PciBus;
use platform::power::EjectSink;

use super::attach::Ejectable;
use super::composed::{Functions, Owner};
use super::memory::OwnerHandle;
use super::pending_functions::Plug;

/// Returns the assigned ones among `plugged`, which the guest may eject.
pub fn ejectable<F: Functions, M: PhysMem + Send + 'static>(
    plugged: &[Plug],
    owner: &OwnerHandle<F, M>,
    bus: &Arc<PciBus>,
) -> Option<Ejectable> {
    let assigned = plugged.iter().filter(|plug| plug.memory.is_some());
    let by_slot = |plug: &Plug| (plug.source.devfn() >> 3, (plug.source, plug.number));
    let functions: BTreeMap<_, _> = assigned.map(by_slot).collect();
    if functions.is_empty() {
        return None;
    }
    let slots = functions.keys().copied().collect();
    let sink = Arc::new(Ejector {
        owner: owner.clone(),
        bus: bus.clone(),
        functions: Mutex::new(functions),
    });
    Some(Ejectable { slots, sink })
}

/// Removes functions that the guest ejects: from the bus at once, from their owner as soon as
/// nothing of them is in flight.
struct Ejector<F, M> {
    owner: OwnerHandle<F, M>,
    bus: Arc<PciBus>,
    /// Those that are still there, by slots: requester, and number at the owner.
    functions: Mutex<BTreeMap<u8, (SourceId, usize)>>,
}

impl<F: Functions, M: PhysMem + Send + 'static> EjectSink for Ejector<F, M> {
    fn eject(&self, slot: u8) {
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Each once: the owner may give the number to another function.
        let Some((source, number)) = functions.remove(&slot) else {
            return;
        };
        drop(functions);
        // First, so that no access is on its way to a function that is being removed.
        self.bus.unplug(source);
        let remove = move |owner: &mut Owner<F, M>| {
            // No thread waits for the end of it: the device is closed when the owner drops its
            // function.
            let (tell, _) = mpsc::channel();
            owner.remove(number, tell);
        };
        // An owner that has ended has removed everything.
        let _ = self.owner.send(Request::Inspect(Box::new(remove)));
        tracing::info!(slot, "the guest has ejected an assigned function");
    }
}
