//! Switches of a machine: `--net switch=NAME`, one for each name.

use std::collections::HashMap;

use anyhow::{Context, Result};
use net_ports::{Fabric, SwitchPort};
use net_switch::{PortConfig, SwitchConfig};

/// Switches by name. Each is made with its first port, and all ports are on the machine's one core.
#[derive(Default)]
pub struct Switches(HashMap<String, Fabric>);

impl Switches {
    /// Opens another port of the switch of that name, for packets of at most `mtu` bytes.
    ///
    /// # Errors
    /// No memory, or too many ports.
    pub fn port(&mut self, name: &str, mtu: u16) -> Result<SwitchPort> {
        let context = || format!("switch {name}");
        let fabric = match self.0.get(name) {
            Some(fabric) => fabric.clone(),
            None => {
                let fabric = Fabric::new(SwitchConfig::default()).with_context(context)?;
                self.0.insert(name.to_owned(), fabric.clone());
                fabric
            }
        };
        let port = fabric.port(PortConfig::default(), mtu);
        port.with_context(context)
    }
}
