//! A vCPU's way to a virtio function that a sidecore owns: each access is a message and an answer.

use sidecore::Handle;

use super::config;
use super::function::{BAR_SIZE, MSIX_TABLE, NOTIFY};
use crate::pci::bars::{BARS, BarKind};
use crate::pci::port::FunctionPort;
use crate::vm::exits::ExitCause;
use crate::vm::owner::Request;

/// Door to function number `function` of the owner behind `owner`.
pub struct OwnedFunction {
    owner: Handle<Request>,
    function: usize,
}

impl OwnedFunction {
    /// A door to that function.
    pub fn new(owner: Handle<Request>, function: usize) -> Self {
        Self { owner, function }
    }
}

impl FunctionPort for OwnedFunction {
    fn bar_kinds(&self) -> [BarKind; BARS] {
        config::bar_kinds()
    }

    fn config_read(&self, reg: u16, len: u8) -> u32 {
        let function = self.function;
        // An owner that has ended (the machine is stopping) reads as a function that is gone.
        self.owner
            .call(|reply| Request::ConfigRead {
                function,
                reg,
                len,
                reply,
            })
            .unwrap_or(u32::MAX)
    }

    fn config_write(&self, reg: u16, len: u8, value: u32) {
        let function = self.function;
        let _ = self.owner.call(|reply| Request::ConfigWrite {
            function,
            reg,
            len,
            value,
            reply,
        });
    }

    fn bar_read(&self, _bar: u8, offset: u64, data: &mut [u8]) {
        let (function, len) = (self.function, data.len());
        if let Ok(bytes) = self.owner.call(|reply| Request::BarRead {
            function,
            offset,
            len,
            reply,
        }) {
            for (to, from) in data.iter_mut().zip(bytes) {
                *to = from;
            }
        }
    }

    fn bar_write(&self, _bar: u8, offset: u64, data: &[u8]) {
        let (function, len) = (self.function, data.len().min(8));
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(&data[..len]);
        let _ = self.owner.call(|reply| Request::BarWrite {
            function,
            offset,
            data: bytes,
            len,
            reply,
        });
    }

    fn bar_cause(&self, _bar: u8, offset: u64) -> ExitCause {
        debug_assert!(offset < BAR_SIZE);
        if (NOTIFY..MSIX_TABLE).contains(&offset) {
            ExitCause::Doorbell
        } else {
            ExitCause::OtherDevice
        }
    }
}
