//! Function 00:00.0: the host bridge. It decodes nothing; it is there because a bus without one
//! looks empty.

use std::sync::{Mutex, PoisonError};

use crate::bars::{BARS, BarKind};
use crate::config::{ConfigSpace, Identity};
use crate::port::FunctionPort;

/// The host bridge. Guards itself; any vCPU thread may call.
pub struct HostBridge(Mutex<ConfigSpace>);

impl Default for HostBridge {
    /// Red Hat's generic PCI Express host bridge id: known to every guest, with no quirk attached.
    fn default() -> Self {
        let identity = Identity {
            vendor: 0x1b36,
            device: 0x0008,
            class: 0x06_00_00,
            revision: 0,
            subsystem_vendor: 0x1af4,
            subsystem: 0x1100,
        };
        Self(Mutex::new(ConfigSpace::new(
            &identity,
            [BarKind::Absent; BARS],
        )))
    }
}

impl FunctionPort for HostBridge {
    fn bar_kinds(&self) -> [BarKind; BARS] {
        [BarKind::Absent; BARS]
    }

    fn config_read(&self, reg: u16, len: u8) -> u32 {
        let config = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        config.read(reg, len)
    }

    fn config_write(&self, reg: u16, len: u8, value: u32) {
        let mut config = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        config.write(reg, len, value);
    }

    fn bar_read(&self, _bar: u8, _offset: u64, _data: &mut [u8]) {}

    fn bar_write(&self, _bar: u8, _offset: u64, _data: &[u8]) {}
}
