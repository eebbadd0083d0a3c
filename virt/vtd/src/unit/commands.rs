//! Commands in registers (GCMD, CCMD, IOTLB) and the wait for stale leases that they share with the
//! queue.
//!
//! SRTP and QIE act in the write itself. A switch of translation and the two register-based
//! invalidations go through three phases: asked for; caches dropped and leases rechecked (may
//! pend); drained, which is when the guest sees it done. New translations follow a switch of TE at
//! once.

use guest_mem::{Budget, DrainTimer, Gpa, PhysMem};

use super::leases::{AskedBy, Scope};
use super::{Event, Halt, Sink, Unit};
use crate::spec::invalidate::Granularity;
use crate::spec::registers::InvalidateAddress;

/// A command in a register: from the guest's write until its completion shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Phase {
    #[default]
    None,
    /// Caches and leases still to be gone through.
    Invalidate,
    /// Done but for stale leases.
    Drain,
}

/// State of each command. CCMD and IOTLB have their request in ICC and IVT.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Commands {
    te: Phase,
    ccmd: Phase,
    iotlb: Phase,
}

impl Unit {
    /// GCMD.SRTP. The caches are dropped as well, which ESRTPS=0 allows and does not promise;
    /// leases are rechecked when the guest invalidates, as it must.
    pub(super) fn latch_root_table(&mut self) {
        self.root = Gpa::new(self.registers.rtaddr);
        self.registers.gsts.set_rtps(true);
        self.drop_caches();
    }

    /// GCMD.TE changed.
    pub(super) fn switch_translation(&mut self, on: bool) {
        self.te = on;
        self.commands.te = Phase::Invalidate;
        self.drop_caches();
    }

    fn drop_caches(&mut self) {
        self.checking = None;
        self.contexts.flush_all();
        self.generation += 1;
    }

    /// Whether a command can move on.
    pub(super) fn commands_have_work(&self) -> bool {
        let Commands { te, ccmd, iotlb } = self.commands;
        let asked = self.registers.ccmd.icc() && ccmd == Phase::None
            || self.registers.iotlb.ivt() && iotlb == Phase::None;
        let moves = |phase| match phase {
            Phase::None => false,
            Phase::Invalidate => true,
            Phase::Drain => self.is_drained(),
        };
        asked || moves(te) || moves(ccmd) || moves(iotlb)
    }

    pub(super) fn run_commands<M: PhysMem>(
        &mut self,
        mem: &M,
        budget: &mut Budget,
        sink: &mut impl Sink,
    ) -> Result<(), Halt> {
        if !self.commands_have_work() {
            return Ok(());
        }
        self.run_te(mem, budget, sink)?;
        self.run_ccmd(mem, budget, sink)?;
        self.run_iotlb(mem, budget, sink)
    }

    fn run_te<M: PhysMem>(
        &mut self,
        mem: &M,
        budget: &mut Budget,
        sink: &mut impl Sink,
    ) -> Result<(), Halt> {
        if self.commands.te == Phase::Invalidate {
            let scope = Scope::ContextGlobal;
            self.invalidate(mem, AskedBy::TranslationEnable, scope, budget, sink)?;
            self.commands.te = Phase::Drain;
        }
        if self.commands.te == Phase::Drain && self.is_drained() {
            self.commands.te = Phase::None;
            self.registers.gsts.set_tes(self.te);
            self.end_drain();
        }
        Ok(())
    }

    /// A request with a reserved granularity is refused: ICC clears and CAIG is 0.
    fn run_ccmd<M: PhysMem>(
        &mut self,
        mem: &M,
        budget: &mut Budget,
        sink: &mut impl Sink,
    ) -> Result<(), Halt> {
        let ccmd = self.registers.ccmd;
        if !ccmd.icc() {
            return Ok(());
        }
        let mut performed = ccmd.cirg();
        if self.commands.ccmd != Phase::Drain {
            let granularity = Granularity::from_bits(ccmd.cirg());
            match Scope::of_context(granularity, ccmd.did(), ccmd.sid(), ccmd.fm()) {
                Some(scope) => {
                    self.invalidate(mem, AskedBy::ContextCommand, scope, budget, sink)?;
                    self.stats.count(scope);
                }
                None => performed = Granularity::RESERVED.into_bits(),
            }
            self.commands.ccmd = Phase::Drain;
        }
        if self.is_drained() {
            self.commands.ccmd = Phase::None;
            self.registers.ccmd = ccmd.with_icc(false).with_caig(performed);
            self.end_drain();
        }
        Ok(())
    }

    fn run_iotlb<M: PhysMem>(
        &mut self,
        mem: &M,
        budget: &mut Budget,
        sink: &mut impl Sink,
    ) -> Result<(), Halt> {
        let iotlb = self.registers.iotlb;
        if !iotlb.ivt() {
            return Ok(());
        }
        let granularity = Granularity::from_bits(iotlb.iirg());
        let iva = InvalidateAddress::from_bits(self.registers.iva);
        let scope = Scope::of_iotlb(granularity, iotlb.did(), iva.addr(), iva.am());
        if self.commands.iotlb != Phase::Drain {
            if let Some(scope) = scope {
                self.invalidate(mem, AskedBy::IotlbInvalidate, scope, budget, sink)?;
                self.stats.count(scope);
            }
            self.commands.iotlb = Phase::Drain;
        }
        if self.is_drained() {
            let performed = scope.map_or(Granularity::RESERVED, |_| granularity);
            self.commands.iotlb = Phase::None;
            self.registers.iotlb = iotlb.with_ivt(false).with_iaig(performed.into_bits());
            self.end_drain();
        }
        Ok(())
    }

    /// Whether a command or a wait descriptor is held back by stale leases.
    pub(super) fn is_draining(&self) -> bool {
        let Commands { te, ccmd, iotlb } = self.commands;
        let waits = [te, ccmd, iotlb].contains(&Phase::Drain) || self.parked_wait.is_some();
        waits && !self.is_drained()
    }

    /// Something that waited for leases has completed: the next wait is timed from its own start.
    pub(super) fn end_drain(&mut self) {
        self.drain = DrainTimer::default();
        self.changes += 1;
    }

    pub(super) fn watch_drain(&mut self, is_draining: bool, now_ns: u64, sink: &mut impl Sink) {
        if !is_draining {
            self.drain = DrainTimer::default();
            return;
        }
        if self.leases.stale() > 0 && self.drain.is_due(now_ns, self.config.drain_limit_ns) {
            self.stats.drain_limits += 1;
            let sources = self.leases.stale_sources();
            sink.event(Event::DrainLimit { sources });
        }
    }
}
