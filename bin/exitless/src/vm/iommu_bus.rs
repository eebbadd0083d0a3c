//! The IOMMU's register page on a vCPU's exit path: every access becomes a message to the owner.
//!
//! In `trap` mode all accesses come here. In `logged` mode only writes that found the log full or armed, and
//! in `shared` mode none.
//!
//! `RUST_LOG=exitless::vm::iommu_bus=trace` with `--iommu-mode trap` records a driver's script, one access a line:
//! `R` or `W` with its width in bytes, offset and value in hexadecimal. `virt/vtd/tests/data` holds one.

use sidecore::Handle;
use vtd::AccessLen;

use super::bus::BusDevice;
use super::exits::ExitCause;
use super::owner::Request;

/// The register page as a bus device.
pub struct IommuRegisters {
    owner: Handle<Request>,
}

impl IommuRegisters {
    /// A door to the IOMMU of the owner behind `owner`.
    pub fn new(owner: Handle<Request>) -> Self {
        Self { owner }
    }
}

impl BusDevice for IommuRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) -> ExitCause {
        data.fill(0);
        if let (Some(len), Ok(offset)) = (AccessLen::from_bytes(data.len()), u16::try_from(offset))
            && let Ok(value) = self
                .owner
                .call(|reply| Request::IommuRead { offset, len, reply })
        {
            data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
            tracing::trace!("R{} {offset:03x} {value:x}", len.bytes());
        }
        ExitCause::IommuRegister
    }

    fn write(&self, offset: u64, data: &[u8]) -> ExitCause {
        let value = match *data {
            [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            // Other widths are no register access (§11.2): ignored.
            _ => return ExitCause::IommuRegister,
        };
        if let (Some(len), Ok(offset)) = (AccessLen::from_bytes(data.len()), u16::try_from(offset))
        {
            tracing::trace!("W{} {offset:03x} {value:x}", len.bytes());
            let _ = self.owner.call(|reply| Request::IommuWrite {
                offset,
                len,
                value,
                reply,
            });
        }
        ExitCause::IommuRegister
    }
}
