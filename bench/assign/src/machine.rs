//! A machine with one remapping unit and one function, on a sidecore.

use std::convert::Infallible;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use assign::areas::Areas;
use assign::calls::{CallThread, Caller};
use assign::config::{Device, GuestConfig};
use assign::function::{Assigned, Parts};
use assign::policy::HostPolicy;
use assign::reach::Reach;
use assign::shadow::{Counts, Limits, Shadow};
use guest_mem::{
    GuestRam, Iommu, KeepAlive, PAGE_SIZE, PhysMem, RegisterPage, SlotMapping, SourceId,
};
use machine::{
    DataPath, Effects, Function, FunctionContext, FunctionLines, FunctionShape, Progress, Request,
    functions, units,
};
use pci::bars::{BARS, BarKind};
use sidecore::{IdlePolicy, Sidecore, SidecoreBuilder};
use vtd::{AddressWidth, Config, Unit};
use vtd_port::VtdPort;

use crate::guest::{DEVICE, Guest, RAM};
use crate::parts::{InPlace, NoHardware, NoLines, table};

units! {
    /// The remapping unit.
    pub enum Units: Infallible {
        Vtd(VtdPort),
    }
}

functions! {
    /// The function behind the unit.
    pub enum Functions: Infallible {
        /// An assigned function as in the product: a thread makes the kernel's calls.
        Threaded(Assigned<NoHardware, CallThread>),
        /// An assigned function whose calls are made by the sidecore's thread.
        InPlace(Assigned<NoHardware, InPlace>),
        /// An emulated function, which does not follow invalidations.
        Emulated(Idle),
    }
}

type Owner = machine::Owner<Units, Functions, GuestRam>;

/// Choice of the function behind the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// [`Functions::Threaded`].
    Threaded,
    /// [`Functions::InPlace`].
    InPlace,
    /// [`Functions::Emulated`].
    Emulated,
}

/// An emulated device that does nothing.
pub struct Idle;

impl<C> Function<C> for Idle {
    fn source(&self) -> SourceId {
        DEVICE
    }

    fn shape(&self) -> FunctionShape {
        FunctionShape::new([BarKind::Absent; BARS])
    }

    fn config_read(&mut self, _: u16, _: u8) -> u32 {
        u32::MAX
    }

    fn config_write(&mut self, _: u16, _: u8, _: u32, _: &KeepAlive, _: &mut Effects<C>) {}

    fn bar_read(&mut self, _: u8, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn bar_write(&mut self, _: u8, _: u64, _: &[u8], _: &KeepAlive, _: &mut Effects<C>) {}
}

impl<C> DataPath<C> for Idle {
    fn poll<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, C>) -> Progress {
        Progress::Idle
    }

    fn has_work<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, C>) -> bool {
        false
    }
}

/// A running machine.
pub struct Machine {
    /// Its sidecore, which runs the owner.
    pub core: Sidecore<Owner>,
}

impl Machine {
    /// Starts a machine whose sidecore runs on `cpu`, and a guest that has turned translation on.
    pub fn start(behind: Behind, cpu: usize, idle: IdlePolicy) -> Result<(Self, Guest)> {
        let page = RegisterPage::new().context("a register page")?;
        let mapping = SlotMapping::of_page(page.memfd()).context("its mapping")?;
        let mapping = Arc::new(mapping);
        let unit = Unit::new(Config {
            width: AddressWidth::Bits39,
            caching_mode: true,
            ..Config::default()
        });
        let port = VtdPort::shared(unit, page.clone(), mapping.clone());
        if !matches!(idle, IdlePolicy::Poll)
            && let Some(why) = port.keeps_awake()
        {
            anyhow::bail!("a sidecore cannot sleep here: {why}");
        }
        let mut guest = Guest::new(page, mapping)?;
        let mut owner = Owner::new("bench", guest.ram.clone(), Arc::new(NoLines));
        let at = owner.add_unit(Units::Vtd(port));
        owner.add(at, function(behind)?, FunctionLines::default());
        let core = SidecoreBuilder::new("sidecore")
            .cpu(Some(cpu))
            .idle(idle)
            .spawn(vec![owner])
            .context("a sidecore")?;
        guest.boot();
        Ok((Self { core }, guest))
    }

    /// Returns the shadow's counts; all 0 for a device without a shadow.
    pub fn counts(&self) -> Result<Counts> {
        let of = |owner: &mut Owner| match owner.function(0) {
            Some(Functions::Threaded(assigned)) => assigned.shadow().counts(),
            Some(Functions::InPlace(assigned)) => assigned.shadow().counts(),
            _ => Counts::default(),
        };
        let counts = self.core.handle(0).call(|reply| Request::ask(reply, of));
        counts.map_err(|error| anyhow::anyhow!("the sidecore does not answer: {error:?}"))
    }

    /// Ends the machine. If there is a shadow, it must have made `calls` maps and unmaps since
    /// `before`, each of `pages` pages.
    pub fn end(self, before: Counts, calls: u64, pages: u64) -> Result<()> {
        let after = self.counts()?;
        let made = (
            after.maps - before.maps,
            after.mapped_pages - before.mapped_pages,
            after.unmaps - before.unmaps,
        );
        ensure!(
            made == (calls, calls * pages, calls),
            "maps, pages and unmaps are {made:?}, of {calls} submissions of {pages} pages"
        );
        drop(self.core.stop());
        Ok(())
    }
}

fn function(behind: Behind) -> Result<Functions> {
    Ok(match behind {
        Behind::Threaded => {
            let calls = CallThread::start("calls", table()).context("a thread")?;
            Functions::Threaded(assigned(calls)?)
        }
        Behind::InPlace => Functions::InPlace(assigned(InPlace::new())?),
        Behind::Emulated => Functions::Emulated(Idle),
    })
}

fn assigned<C: Caller>(caller: C) -> Result<Assigned<NoHardware, C>> {
    // A device with one BAR and without interrupts.
    let mut image = [0; 256];
    for (at, value) in [
        (0_usize, 0x0010_1b36_u32),
        (8, 0x0108_0202),
        (0x10, 0xfebf_0000),
    ] {
        image[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    let bar_sizes = [0x4000, 0, 0, 0, 0, 0];
    let config = GuestConfig::new(&Device {
        image: &image,
        bar_sizes,
        can_reset: false,
    })
    .context("its configuration space")?;
    let areas = Areas::new(bar_sizes, config.msix(), &Default::default());
    let limits = Limits {
        ram: vec![(0, RAM / PAGE_SIZE)],
        allowed: vec![(0, 1 << 27)],
        allows_pass_through: false,
        maps_while_off: false,
    };
    let reach = Reach::default();
    let mut shadow = Shadow::new(DEVICE, limits, HostPolicy::Strict, reach.clone(), caller);
    shadow.look();
    Ok(Assigned::new(Parts {
        source: DEVICE,
        hardware: NoHardware,
        config,
        areas,
        lines: Box::new(NoLines),
        shadow,
        reach,
    }))
}
