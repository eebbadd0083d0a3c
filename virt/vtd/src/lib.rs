//! Intel VT-d: the remapping unit of a virtual machine, without the virtual machine.
//!
//! An emulated DMA remapping unit for unmodified guests, after *Intel Virtualization Technology for
//! Directed I/O, Architecture Specification*, revision 4.1, legacy mode. Memory is a trait, devices
//! are callers, interrupts go to a trait; the unit has no clock and no thread, and there is no
//! `unsafe`.
//!
//! Advertised: 39- and 48-bit guest addresses, 4 KiB / 2 MiB / 1 GiB pages, pass-through contexts,
//! queued and register-based invalidation by page, domain and globally, draining of reads and
//! writes, snoop control, fault recording. [`Config`] turns off the features that an IOMMU of the
//! host cannot repeat for an assigned device. Not implemented and not advertised: interrupt
//! remapping (its place is a module `remap` beside [`mod@unit`]), scalable mode, device TLBs,
//! posted interrupts, advanced fault logging, protected memory regions.
//!
//! Modules in reading order:
//! * [`spec`]: layouts only, a crate of its own.
//! * [`mod@unit`]: the engine. [`Unit::read`], [`Unit::write`] and [`Unit::step`] are the `trap`
//!   front end.
//! * [`front`]: the same engine behind a register page that the guest reads (`logged`) or owns
//!   (`shared`).
//! * [`dmar`]: the ACPI table that announces a unit.
//! * [`saved_state`]: the state that is kept when a machine is paused.
//!
//! ```
//! use guest_mem::{Gpa, GuestRam, Iommu, Iova, Perm, PhysMem, SourceId};
//! use vtd::{AccessLen, Config, Event, Sink, Unit, spec::registers};
//!
//! struct Interrupts;
//! impl Sink for Interrupts {
//!     fn msi(&mut self, address: u64, data: u32) {}
//!     fn event(&mut self, event: Event) {}
//! }
//!
//! // The guest's tables: root at 0x1000, contexts at 0x2000; 00:01.0 passes through.
//! let mem = GuestRam::new(&[(Gpa::new(0), 0x10000)]).expect("64 KiB");
//! let put = |gpa, word: u64| mem.write(Gpa::new(gpa), &word.to_le_bytes());
//! put(0x1000, 0x2001)?;
//! put(0x2000 + 8 * 16, 0x9)?;
//! put(0x2000 + 8 * 16 + 8, 0x2)?;
//!
//! let mut unit = Unit::new(Config::default());
//! unit.write(registers::RTADDR, AccessLen::B8, 0x1000);
//! unit.write(registers::GCMD, AccessLen::B4, 0x4000_0000); // SRTP
//! unit.write(registers::GCMD, AccessLen::B4, 0x8000_0000); // TE
//! unit.step(&mem, 0, &mut Interrupts);
//! assert_eq!(unit.read(registers::GSTS, AccessLen::B4), 0xc000_0000);
//!
//! let disk = SourceId::new(0, 1, 0);
//! let run = unit.translate(&mem, disk, Iova::new(0x5678), Perm::Read)?;
//! assert_eq!((run.gpa, run.len), (Gpa::new(0x5678), 0x988));
//! // Another function has no context: refused, and recorded.
//! assert!(unit.translate(&mem, SourceId::new(0, 2, 0), Iova::new(0x5678), Perm::Read).is_err());
//! assert_eq!(unit.read(registers::FSTS, AccessLen::B4), 0x2); // PPF
//! # Ok::<(), guest_mem::Stop>(())
//! ```

#![forbid(unsafe_code)]

mod config;
pub mod dmar;
pub mod front;
pub mod saved_state;
pub mod unit;

/// Layouts of the specification.
pub use vtd_spec as spec;

pub use config::{AddressWidth, Config, LargePages};
pub use unit::{
    AccessLen, Event, HOST_ADDRESS_WIDTH, Invalidation, Parked, Progress, Sink, Stats, Unit,
};
