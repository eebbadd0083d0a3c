//! [`Unit::save`] and [`Unit::restore`].

use guest_mem::Gpa;

use super::Unit;
use super::faults::Faults;
use super::registers::Registers;
use crate::config::Config;
use crate::saved_state::{RestoreError, SavedUnit, VERSION, check};
use crate::spec::fault::FaultRecording;
use crate::spec::registers::{ContextCommand, GlobalStatus, IotlbInvalidate};

impl Unit {
    /// Returns the unit's state; see [`saved_state`](crate::saved_state) for the parts that are
    /// left out, and the reasons.
    pub fn save(&self) -> SavedUnit {
        // In full, so that a new field does not compile until it is handled here.
        let Self {
            config,
            registers,
            faults,
            completion,
            te,
            root,
            commands: _,
            parked_wait: _,
            awaited: _,
            checking: _,
            cost: _,
            drain: _,
            holds: _,
            contexts: _,
            iotlb: _,
            leases: _,
            generation: _,
            changes: _,
            stats: _,
        } = self;
        let Registers {
            gsts,
            rtaddr,
            irta,
            ccmd,
            iva,
            iotlb,
            iqh,
            iqt,
            iqa,
            iwc,
        } = registers;
        let Faults {
            records,
            next,
            pfo,
            iqe,
            event,
        } = faults;
        let halves = |record: &FaultRecording| {
            let bits = record.into_bits();
            [bits as u64, (bits >> 64) as u64]
        };
        SavedUnit {
            version: VERSION,
            width: config.width.bits(),
            caching_mode: config.caching_mode,
            large_pages: config.large_pages.sllps(),
            snoop_control: config.snoop_control,
            gsts: gsts.into_bits(),
            te: *te,
            rtaddr: *rtaddr,
            root: root.raw(),
            ccmd: ccmd.into_bits(),
            iva: *iva,
            iotlb: iotlb.into_bits(),
            iqh: *iqh,
            iqt: *iqt,
            iqa: *iqa,
            irta: *irta,
            iwc: *iwc,
            pfo: *pfo,
            iqe: *iqe,
            // At most 222.
            next_record: *next as u16,
            records: records.iter().map(halves).collect(),
            fault_event: *event,
            completion_event: *completion,
        }
    }

    /// A unit with this state. Commands that were in progress begin again.
    ///
    /// # Errors
    /// If `saved` is of another version, of a unit with other capabilities, or impossible.
    ///
    /// # Panics
    /// As [`Unit::new`], for `config`.
    pub fn restore(config: Config, saved: &SavedUnit) -> Result<Self, RestoreError> {
        let mut unit = Self::new(config);
        check(&unit.config, saved)?;
        // Only bits that this unit can set.
        let old = GlobalStatus::from_bits(saved.gsts);
        let gsts = GlobalStatus::new()
            .with_tes(old.tes())
            .with_rtps(old.rtps())
            .with_qies(old.qies());
        let record = |[low, high]: &[u64; 2]| {
            FaultRecording::from_bits(u128::from(*high) << 64 | u128::from(*low))
        };
        unit.registers = Registers {
            gsts,
            rtaddr: saved.rtaddr,
            irta: saved.irta,
            ccmd: ContextCommand::from_bits(saved.ccmd),
            iva: saved.iva,
            iotlb: IotlbInvalidate::from_bits(saved.iotlb),
            iqh: saved.iqh,
            iqt: saved.iqt,
            iqa: saved.iqa,
            iwc: saved.iwc,
        };
        unit.faults = Faults {
            records: saved.records.iter().map(record).collect(),
            next: usize::from(saved.next_record),
            pfo: saved.pfo,
            iqe: saved.iqe,
            event: saved.fault_event,
        };
        unit.completion = saved.completion_event;
        unit.root = Gpa::new(saved.root);
        if saved.te != gsts.tes() {
            unit.switch_translation(saved.te);
        }
        unit.te = saved.te;
        Ok(unit)
    }
}
