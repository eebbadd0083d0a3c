//! State of a unit that is kept while its machine is paused.
//!
//! [`SavedUnit`] is plain, versioned and complete: registers as the guest wrote them, the values
//! that commands latched from them, and the state that no register shows (the pending bits and the
//! place of the next fault).
//!
//! Derived, and therefore absent:
//! * IOTLB and context cache: empty after a restore.
//! * A parked wait descriptor: IQH still points to it, so it is fetched again.
//! * Leases and awaited tickets: the machine is paused with its devices quiesced, so there are
//!   none.
//! * Statistics and the generation: of this process; windows are made anew.
//!
//! [`Unit::restore`](crate::Unit::restore) checks the state in full, since it comes from a file.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::config::Config;

/// Version that [`Unit::save`](crate::Unit::save) writes.
pub const VERSION: u32 = 2;

/// One message register set: FECTL to FEUADDR, or IECTL to IEUADDR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedEvent {
    /// Masked.
    pub im: bool,
    /// A message is pending.
    pub ip: bool,
    /// Message data.
    pub data: u32,
    /// Message address.
    pub address: u32,
    /// Upper message address.
    pub upper_address: u32,
}

/// A unit at rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedUnit {
    /// Layout of this structure: [`VERSION`].
    pub version: u32,
    /// Widest guest address, in bits: 39 or 48. Part of the value that the guest read in CAP.
    pub width: u8,
    /// CAP.CM.
    pub caching_mode: bool,
    /// CAP.SLLPS.
    pub large_pages: u8,
    /// ECAP.SC.
    pub snoop_control: bool,
    /// Status bits of GSTS; TES as seen by the guest.
    pub gsts: u32,
    /// GCMD.TE as last written; differs from TES while old accesses drain.
    pub te: bool,
    /// RTADDR as written.
    pub rtaddr: u64,
    /// Root table latched by SRTP.
    pub root: u64,
    /// CCMD, ICC set while in progress.
    pub ccmd: u64,
    /// IVA as written.
    pub iva: u64,
    /// IOTLB, IVT set while in progress.
    pub iotlb: u64,
    /// IQH, in bytes.
    pub iqh: u32,
    /// IQT, in bytes.
    pub iqt: u32,
    /// IQA.
    pub iqa: u64,
    /// IRTA as written.
    pub irta: u64,
    /// ICS.IWC.
    pub iwc: bool,
    /// FSTS.PFO.
    pub pfo: bool,
    /// FSTS.IQE.
    pub iqe: bool,
    /// Recording register of the next fault.
    pub next_record: u16,
    /// Recording registers, low half and high half.
    pub records: Vec<[u64; 2]>,
    /// Fault event.
    pub fault_event: SavedEvent,
    /// Invalidation completion event.
    pub completion_event: SavedEvent,
}

/// Reason why a saved state was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RestoreError {
    /// Written by another version.
    #[error("saved unit has version {version}, this program reads {VERSION}")]
    Version {
        /// Version found.
        version: u32,
    },
    /// The guest has read other capabilities than this configuration gives.
    #[error("saved unit has other capabilities than the configured one")]
    Capabilities,
    /// A value that no unit can have.
    #[error("saved unit has an impossible {field}")]
    Value {
        /// Which field.
        field: &'static str,
    },
}

/// Refuses a state that `Unit` could not have saved under `config`.
pub(crate) fn check(config: &Config, saved: &SavedUnit) -> Result<(), RestoreError> {
    if saved.version != VERSION {
        return Err(RestoreError::Version {
            version: saved.version,
        });
    }
    let same_width = saved.width == config.width.bits();
    if !same_width
        || saved.caching_mode != config.caching_mode
        || saved.large_pages != config.large_pages.sllps()
        || saved.snoop_control != config.snoop_control
        || saved.records.len() != config.fault_records
    {
        return Err(RestoreError::Capabilities);
    }
    let queue_len = 4096u32 << (saved.iqa & 7);
    let wrong = [
        (
            "iqh",
            !saved.iqh.is_multiple_of(16) || saved.iqh >= queue_len,
        ),
        ("iqt", saved.iqt & !0x7_fff0 != 0),
        ("iqa", saved.iqa & 0xff8 != 0),
        ("root", saved.root & 0xfff != 0),
        ("rtaddr", saved.rtaddr & 0xfff != 0),
        (
            "next_record",
            usize::from(saved.next_record) >= saved.records.len(),
        ),
    ];
    match wrong.iter().find(|(_, is_wrong)| *is_wrong) {
        Some((field, _)) => Err(RestoreError::Value { field }),
        None => Ok(()),
    }
}
