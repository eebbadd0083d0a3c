//! KVM's table of interrupt routes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry};
use platform::interrupt::Message;
use platform::ioapic::{PINS, RouteSink, Routes};

use crate::Vm;

/// KVM's table of GSI routes. The I/O APIC's level-triggered pins have theirs, from which KVM knows
/// which vectors' ends to report; behind them come those of eventfds that are interrupts.
pub struct KvmRoutes {
    vm: Arc<Vm>,
    table: Mutex<RouteTable>,
}

/// Copy of the table that KVM has. A change costs a grace period of the host's kernel, so equal
/// tables are not sent again.
struct RouteTable {
    pins: Routes,
    /// Of GSI [`PINS`] and on.
    others: Vec<Option<Message>>,
}

impl KvmRoutes {
    /// Creates a table with nothing routed.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self {
            vm,
            table: Mutex::new(RouteTable {
                pins: [None; PINS],
                others: Vec::new(),
            }),
        }
    }

    /// Allocates a GSI, without a route. There are few devices, and KVM has 4096.
    pub fn new_gsi(&self) -> u32 {
        let mut table = self.table();
        table.others.push(None);
        (PINS + table.others.len() - 1) as u32
    }

    /// Routes each GSI, one of [`new_gsi`](Self::new_gsi), to its message, all in one table. False:
    /// KVM refused, and nothing has changed.
    pub fn route(&self, routes: &[(u32, Message)]) -> bool {
        let mut table = self.table();
        let old = table.others.clone();
        for (gsi, message) in routes {
            table.others[*gsi as usize - PINS] = Some(*message);
        }
        if table.others == old {
            return true;
        }
        let taken = self.send(&table);
        if !taken {
            table.others = old;
        }
        taken
    }

    fn table(&self) -> MutexGuard<'_, RouteTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, table: &RouteTable) -> bool {
        let routes = (0..).zip(table.pins.iter().chain(&table.others));
        let entries: Vec<_> = routes
            .filter_map(|(gsi, route)| route.map(|message| route_entry(gsi, message)))
            .collect();
        KvmIrqRouting::from_entries(&entries)
            .is_ok_and(|entries| self.vm.fd().set_gsi_routing(&entries).is_ok())
    }
}

fn route_entry(gsi: u32, message: Message) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        ..Default::default()
    };
    entry.u.msi.address_lo = message.address as u32;
    entry.u.msi.address_hi = (message.address >> 32) as u32;
    entry.u.msi.data = message.data;
    entry
}

impl RouteSink for KvmRoutes {
    fn update(&self, routes: &Routes) {
        let mut table = self.table();
        if table.pins == *routes {
            return;
        }
        let old = std::mem::replace(&mut table.pins, *routes);
        // A refusal (out of memory) costs a level-triggered pin its next interrupts.
        if !self.send(&table) {
            table.pins = old;
        }
    }
}
