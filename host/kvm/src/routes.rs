//! KVM's table of GSI routes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry};
use platform::interrupt::Message;
use platform::ioapic::{PINS, RouteSink, Routes};

use crate::Vm;

/// KVM's table of GSI routes. The I/O APIC's level-triggered pins have the first GSIs; by their
/// routes KVM knows for which vectors it must report the EOI. The GSIs behind them are irqfds'.
pub struct KvmRoutes {
    vm: Arc<Vm>,
    table: Mutex<RouteTable>,
}

/// Copy of the table that KVM has. Setting it costs a grace period (SRCU) of the host's kernel, so
/// an unchanged table is not set again.
struct RouteTable {
    pins: Routes,
    /// Routes of GSI [`PINS`] and higher.
    others: Vec<Option<Message>>,
}

impl KvmRoutes {
    /// Creates an empty table.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self {
            vm,
            table: Mutex::new(RouteTable {
                pins: [None; PINS],
                others: Vec::new(),
            }),
        }
    }

    /// Allocates a GSI, without a route. KVM has 4096; machines have few devices.
    pub fn new_gsi(&self) -> u32 {
        let mut table = self.table();
        table.others.push(None);
        (PINS + table.others.len() - 1) as u32
    }

    /// Routes each GSI, one of [`new_gsi`](Self::new_gsi), to its message, by one update of the
    /// table. Returns false if KVM refuses; then nothing has changed.
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
        // If KVM refuses (out of memory), EOIs of a level-triggered pin may be missed, and with
        // them its next interrupts.
        if !self.send(&table) {
            table.pins = old;
        }
    }
}
