//! Interface of a remapping unit to its owner, and of its reports.

use std::io;
use std::os::fd::RawFd;

use guest_mem::{Access, Iommu, Iova, NoIommu, Perm, PhysMem, SourceId, Ticket};
use platform::interrupt::Message;

use crate::request::{Op, TicketResult};

/// Names a command of a function to its unit. The upper half is the function's number, so that the
/// answer finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId(pub u64);

/// A change of its unit's mappings that a function has asked for: a paravirtual IOMMU's requests,
/// for instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command<C> {
    /// Its name.
    pub id: CommandId,
    /// The function's requester.
    pub source: SourceId,
    /// The change.
    pub what: C,
}

/// Result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandResult {
    /// Carried out, and no access that it revoked is under way any more.
    Done,
    /// The unit does not carry it out, and has changed nothing. The reason is a number of the
    /// interface that defines the commands (a paravirtual IOMMU's statuses); 0 of a unit that takes
    /// no commands.
    Refused(u8),
}

/// Names one function's hold of one invalidation. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HoldId(pub u64);

/// An invalidation. It is reported after the unit's caches have dropped the mappings, and before it
/// completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidation {
    /// Mappings that may have changed.
    pub scope: Scope,
}

/// Part of a unit's mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Everything.
    All,
    /// A domain, by the unit's own number.
    Domain(u32),
    /// The domain that a requester is attached to; the mask has the function bits that do not
    /// matter.
    Source(SourceId, u16),
    /// Pages of a domain: `len` bytes from `iova`.
    Range {
        /// The unit's own number.
        domain: u32,
        /// First address.
        iova: Iova,
        /// Bytes.
        len: u64,
    },
    /// Interrupt remapping: resolved routes must be resolved again.
    Interrupts,
}

/// A subscriber's answer to an invalidation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub enum Hold {
    /// It may complete.
    #[default]
    No,
    /// It does not complete before the subscriber releases it
    /// ([`Effects::release`](crate::Effects::release)). After a limit the subscriber is notified
    /// ([`Function::hold_overdue`](crate::Function::hold_overdue)).
    Yes,
}

/// Event on which the owner acts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitEvent {
    /// An invalidation has waited for leases of these devices for the drain limit: their requests
    /// must be cancelled.
    DrainLimit {
        /// The devices.
        sources: Vec<SourceId>,
    },
}

/// An access that a unit has refused, for the function that reports it to the guest
/// ([`Function::access_refused`](crate::Function::access_refused)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedAccess {
    /// Requester of the access.
    pub source: SourceId,
    /// Address of the access.
    pub iova: Iova,
    /// Kind of access: read or write.
    pub perm: Perm,
    /// Reason, as a number of the unit's own.
    pub reason: u8,
}

/// Receiver of a unit's reports while it works.
pub trait UnitSink {
    /// Sends an interrupt of the unit's own, which is not remapped.
    fn interrupt(&mut self, message: Message);
    /// Reports an event on which the owner acts.
    fn event(&mut self, event: UnitEvent);
    /// Reports that mappings have changed. Returns the number of subscribers that hold the
    /// invalidation's completion until they release it ([`UnitControl::release`]).
    fn invalidated(&mut self, what: &Invalidation) -> u32;
    /// Reports that a command has ended.
    fn command_done(&mut self, id: CommandId, result: CommandResult);
    /// Reports a refused access. For units whose faults a function reports to the guest; other
    /// units have registers for that.
    fn access_refused(&mut self, access: RefusedAccess);
}

/// Control interface of a unit, independent of memory and commands: waking, sleeping, waiting.
pub trait UnitControl {
    /// Makes the next register write wake the owner. The default suits registers whose every write
    /// is a request.
    ///
    /// # Errors
    /// The host has no way to do that: the owner does not sleep.
    fn arm(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Reverts [`arm`](Self::arm).
    ///
    /// # Errors
    /// The host refuses; the unit stays armed.
    fn disarm(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Returns the cost of arming and disarming, in ns.
    fn arm_cost(&self) -> u64 {
        0
    }

    /// Returns a descriptor that is readable when an armed register was written.
    fn wake_fd(&self) -> Option<RawFd> {
        None
    }

    /// Returns whether anything has arrived since it was armed.
    fn has_work(&mut self) -> bool;

    /// Returns the time, in ns, at which the unit must be polled again.
    fn deadline(&self) -> Option<u64> {
        None
    }

    /// Reports that the wait for `ticket` has ended: the memory is there, or never will be. The
    /// default suits a unit that retries at every poll.
    fn ticket_done(&mut self, ticket: Ticket, result: TicketResult) {
        let _ = (ticket, result);
    }

    /// Reports that subscribers have released `holds` of their holds.
    fn release(&mut self, holds: u32) {
        let _ = holds;
    }
}

/// A remapping unit and its registers, polled by the owner. `C`: the commands it takes from
/// functions; most take none and are units for any `C`.
///
/// All calls come from the owner's thread. None blocks: an operation that has to wait (for memory
/// that is absent, for leases that are held) is a state with which a later poll continues.
pub trait RemappingUnit<C>: UnitControl {
    /// Translation of functions' accesses.
    type Iommu: Iommu;

    /// Returns the translation of functions' accesses.
    fn iommu(&mut self) -> &mut Self::Iommu;

    /// Takes register writes and does a bounded batch of the work that they ask for.
    fn poll<M: PhysMem>(&mut self, mem: &M, now: u64, sink: &mut impl UnitSink) -> UnitPoll;

    /// Performs a register access that exited; returns the value read. The owner polls after a
    /// write. Default: no registers.
    fn access<M: PhysMem>(&mut self, op: Op, mem: &M, now: u64, sink: &mut impl UnitSink) -> u64 {
        let _ = (op, mem, now, sink);
        u64::MAX
    }

    /// Applies a function's command. Its end is reported by [`UnitSink::command_done`], at once or
    /// by a later poll. Units that take no commands refuse.
    fn command<M: PhysMem>(
        &mut self,
        command: Command<C>,
        mem: &M,
        now: u64,
        sink: &mut impl UnitSink,
    ) {
        let _ = (mem, now);
        sink.command_done(command.id, CommandResult::Refused(0));
    }

    /// Returns the message that an interrupt message of `source` is remapped to. A fault means that
    /// it is blocked, which the unit has recorded.
    fn remap<M: PhysMem>(
        &mut self,
        mem: &M,
        source: SourceId,
        message: Message,
    ) -> Access<Message> {
        let _ = (mem, source);
        Ok(message)
    }
}

/// Result of a unit's poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct UnitPoll {
    /// Something was done, or is left to do at once.
    pub is_busy: bool,
    /// Cost of the poll, in the units of `sidecore::PollContext::charge`.
    pub cost: u64,
}

impl UnitControl for NoIommu {
    fn has_work(&mut self) -> bool {
        false
    }
}

impl<C> RemappingUnit<C> for NoIommu {
    type Iommu = Self;

    #[inline]
    fn iommu(&mut self) -> &mut Self {
        self
    }

    #[inline]
    fn poll<M: PhysMem>(&mut self, _: &M, _: u64, _: &mut impl UnitSink) -> UnitPoll {
        UnitPoll::default()
    }
}

/// Code that is generic over the concrete unit.
pub trait UnitVisitor<C> {
    /// Result of the visit.
    type Out;
    /// Runs with the unit.
    fn visit<U: RemappingUnit<C>>(self, unit: &mut U) -> Self::Out;
}

/// A closed set of units, of which one is resolved once per poll. [`units!`](crate::units) makes
/// one.
pub trait ResolveUnit: Send {
    /// Commands that functions may send to the units.
    type Command;
    /// Runs `visitor` with the concrete unit.
    fn with<V: UnitVisitor<Self::Command>>(&mut self, visitor: V) -> V::Out;
    /// Returns the unit's control.
    fn control(&self) -> &dyn UnitControl;
    /// Returns the unit's control, to be changed.
    fn control_mut(&mut self) -> &mut dyn UnitControl;
}

/// Makes a closed set of remapping units: an enum that resolves to the concrete one.
///
/// ```
/// machine::units! {
///     /// The units of a program, which take no commands.
///     pub enum Units: () {
///         /// Devices see guest-physical addresses.
///         None(guest_mem::NoIommu),
///     }
/// }
/// # fn is_set(_: &mut impl machine::ResolveUnit<Command = ()>) {}
/// is_set(&mut Units::None(guest_mem::NoIommu::new(16)));
/// ```
#[macro_export]
macro_rules! units {
    ($(#[$meta:meta])* $vis:vis enum $name:ident: $command:ty {
        $($(#[$variant_meta:meta])* $variant:ident($unit:ty)),+ $(,)?
    }) => {
        $(#[$meta])*
        $vis enum $name {
            $($(#[$variant_meta])* $variant($unit)),+
        }

        impl $crate::ResolveUnit for $name {
            type Command = $command;

            #[inline]
            fn with<V: $crate::UnitVisitor<$command>>(&mut self, visitor: V) -> V::Out {
                match self {
                    $(Self::$variant(unit) => visitor.visit(unit)),+
                }
            }

            fn control(&self) -> &dyn $crate::UnitControl {
                match self {
                    $(Self::$variant(unit) => unit),+
                }
            }

            fn control_mut(&mut self) -> &mut dyn $crate::UnitControl {
                match self {
                    $(Self::$variant(unit) => unit),+
                }
            }
        }
    };
}
