//! The virtual machine of the soak: built, run under [`Watchdog`](super::watch), stopped.
//!
//! 2 MiB of RAM, one vCPU without a local APIC, the VT-d unit with its queue on, and its owner
//! under a sidecore that goes to sleep at every idle sweep.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use guest_mem::{Gpa, GuestRam, RegisterPage, SlotMapping};
use kvm::control::{Control, End};
use kvm::exits::{ExitCause, ExitLedger};
use kvm::msi::KvmMsi;
use kvm::routes::KvmRoutes;
use kvm::vcpu::{self, Machine};
use kvm::vm::refused;
use kvm::zones::ZonedRing;
use kvm::{Kvm, KvmError, Vcpu, Vm, cpuid, kick, register_page};
use kvm_ioctls::Cap;
use machine::port::UnitRegisters;
use platform::bus::{AccessCause, Bus, BusDevice};
use platform::ioapic::Ioapic;
use platform::layout;
use sidecore::{IdlePolicy, Poller, Sidecore, SidecoreBuilder, Stats};
use uffd::WriteGate;
use vtd::spec::registers::{GCMD, GSTS, GlobalCommand, GlobalStatus, IQA};
use vtd::{AccessLen, Event, Sink, Unit};
use vtd_port::VtdPort;

use super::RegisterMode;
use super::unit::{Owner, Request, SoakUnit};
use super::watch::{Outcome, watch};
use super::{PayloadReport, Unsupported, program};

/// Counts of the unit and its register page.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub waits: u64,
    pub faults: u64,
    pub gate_faults: u64,
    pub logged_writes: u64,
}

/// Returns the counts; must be called on the owner.
pub fn counts(owner: &mut Owner) -> Counts {
    let Some(SoakUnit::Vtd(port)) = owner.unit(0) else {
        return Counts::default();
    };
    let stats = port.stats();
    Counts {
        waits: stats.waits,
        faults: stats.faults_recorded + stats.faults_collapsed + stats.faults_dropped,
        gate_faults: port.gate_faults(),
        logged_writes: port.logged_writes(),
    }
}

/// See [`super::supported`].
pub fn supported(mode: RegisterMode) -> Result<(), Unsupported> {
    open(mode)?;
    if mode == RegisterMode::Shared {
        let gate = RegisterPage::new()
            .map_err(std::io::Error::other)
            .and_then(|page| SlotMapping::of_page(page.memfd()))
            .and_then(|mapping| WriteGate::new(Arc::new(mapping)));
        gate.map_err(Unsupported::Userfaultfd)?;
    }
    Ok(())
}

fn open(mode: RegisterMode) -> Result<Kvm, KvmError> {
    let kvm = kvm::vm::open_any()?;
    let mut needed = vec![(Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT")];
    if mode == RegisterMode::Logged {
        needed.push((Cap::ReadonlyMem, "KVM_CAP_READONLY_MEM"));
        needed.push((Cap::CoalescedMmio, "KVM_CAP_COALESCED_MMIO"));
    }
    for (cap, name) in needed {
        if !kvm.check_extension(cap) {
            return Err(KvmError::Capability(name));
        }
    }
    Ok(kvm)
}

/// The machine, before its vCPU runs.
struct Built<P: Poller<Message = Request>> {
    ram: GuestRam,
    vcpu: Vcpu,
    machine: Machine,
    core: Sidecore<P>,
}

/// Runs the soak. `wrap` makes the sidecore's poller from the owner: tests insert a defect there.
pub fn soak<P>(
    mode: RegisterMode,
    sleeps: u64,
    patience: Duration,
    wrap: impl FnOnce(Owner) -> P,
) -> Result<PayloadReport>
where
    P: Poller<Message = Request> + 'static,
{
    supported(mode)?;
    kick::install().context("the vCPU signal cannot be set up")?;
    let Built {
        ram,
        vcpu,
        machine,
        core,
    } = build(mode, wrap)?;
    let started = Instant::now();
    let control = machine.control.clone();
    let exits = machine.exits.clone();
    let thread = vcpu::spawn(vcpu, 0, None, machine).context("the vCPU's thread")?;
    let outcome = watch(&core, &ram, &control, sleeps, patience);
    let seconds = started.elapsed().as_secs_f64();
    let end = wind_down(core, &control, thread, outcome)?;
    let iterations = u64::from(program::counter(&ram)?);
    let lost = u64::from(end.dump.is_some());
    if lost == 0 {
        ensure!(
            end.counts.waits == iterations && end.counts.faults == 0,
            "{iterations} submissions, but the unit carried out {} with {} faults",
            end.counts.waits,
            end.counts.faults,
        );
    }
    let core = &end.stats.core;
    Ok(PayloadReport {
        mode: name(mode),
        iterations,
        sleeps: core.sleeps,
        sleeps_refused: core.sleeps_refused,
        arming_us: core.arming_ns as f64 / 1e3 / (core.sleeps + core.sleeps_refused).max(1) as f64,
        wakes_fd: core.wakes_fd,
        wakes_mailbox: core.wakes_mailbox,
        gate_faults: end.counts.gate_faults,
        logged: end.counts.logged_writes,
        traps: exits.snapshot().get(ExitCause::IommuRegister),
        lost,
        seconds,
        iterations_per_s: iterations as f64 / seconds,
        is_software_kvm: kvm::vm::is_software_kvm(),
        dump: end.dump,
    })
}

fn name(mode: RegisterMode) -> String {
    mode.to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

fn build<P>(mode: RegisterMode, wrap: impl FnOnce(Owner) -> P) -> Result<Built<P>>
where
    P: Poller<Message = Request> + 'static,
{
    let kvm = open(mode)?;
    let ram = GuestRam::new(&[(Gpa::new(0), program::RAM_SIZE)]).context("guest RAM")?;
    program::load(&ram)?;
    // Without an interrupt controller: the program takes no interrupt.
    let vm = Arc::new(Vm::bare(&kvm)?);
    vm.map_ram(&ram)?;
    let vcpu = create_vcpu(&kvm, &vm)?;
    let unit = unit(&ram)?;
    let port = match mode {
        RegisterMode::Trap => VtdPort::trap(unit),
        RegisterMode::Logged => {
            let ring = ZonedRing::map(vcpu.as_fd()).context("KVM's coalesced MMIO ring")?;
            register_page::logged(unit, layout::VTD, &vm, &ring)?
        }
        RegisterMode::Shared => register_page::shared(unit, layout::VTD, &vm)?,
    };
    // The unit's interrupts are masked and stay so; the I/O APIC has no pin.
    let sink = Arc::new(KvmMsi::new(vm.clone()));
    let mut owner = Owner::new("soak", ram.clone(), sink.clone());
    let unit = owner.add_unit(SoakUnit::Vtd(port));
    let core = SidecoreBuilder::new("soak")
        .idle(IdlePolicy::Poll)
        .force_sleep_every(Some(std::num::NonZeroU32::MIN))
        .spawn(vec![wrap(owner)])
        .context("starting the sidecore")?;
    let control = Arc::new(Control::new().context("an eventfd")?);
    let mut memory = Bus::new();
    let registers = Arc::new(UnitRegisters::new(core.handle(0), unit));
    memory.add(layout::VTD, layout::VTD_SIZE, registers)?;
    memory.add(program::DONE, 0x1000, Arc::new(Done(control.clone())))?;
    let routes = Arc::new(KvmRoutes::new(vm));
    let machine = Machine {
        memory: Arc::new(memory),
        ports: Arc::new(Bus::new()),
        ioapic: Arc::new(Ioapic::new(layout::IOAPIC_SOURCE, sink, routes)),
        exits: ExitLedger::new(1),
        control,
        say: |text| eprint!("{text}"),
    };
    Ok(Built {
        ram,
        vcpu,
        machine,
        core,
    })
}

fn create_vcpu(kvm: &Kvm, vm: &Arc<Vm>) -> Result<Vcpu> {
    let vcpu = Vcpu::new(vm, 0)?;
    let fd = vcpu.fd();
    fd.set_cpuid2(&cpuid::for_vcpu(&cpuid::supported(kvm)?, 0, 1))
        .map_err(refused("the guest's CPUID"))?;
    let mut sregs = fd
        .get_sregs()
        .map_err(refused("to tell special registers"))?;
    program::special(&mut sregs);
    fd.set_sregs(&sregs)
        .map_err(refused("special registers of user mode"))?;
    fd.set_regs(&program::registers())
        .map_err(refused("general registers"))?;
    Ok(vcpu)
}

/// Creates a unit whose queue is on, as Linux leaves it; translation stays off.
fn unit(ram: &GuestRam) -> Result<Unit> {
    struct Nowhere;
    impl Sink for Nowhere {
        fn msi(&mut self, _: u64, _: u32) {}
        fn event(&mut self, _: Event) {}
    }
    let mut unit = Unit::new(vtd::Config::default());
    // QS 0: one page of 256 descriptors.
    unit.write(IQA, AccessLen::B8, program::QUEUE);
    let enable = GlobalCommand::new().with_qie(true).into_bits();
    unit.write(GCMD, AccessLen::B4, u64::from(enable));
    unit.step(ram, 0, &mut Nowhere);
    let gsts = GlobalStatus::from_bits(unit.read(GSTS, AccessLen::B4) as u32);
    ensure!(gsts.qies(), "the unit did not turn its queue on");
    Ok(unit)
}

/// Device at the address where the program stores when it is done.
struct Done(Arc<Control>);

impl BusDevice for Done {
    fn read(&self, _: u64, _: &mut [u8]) -> AccessCause {
        AccessCause::Register
    }

    fn write(&self, _: u64, _: &[u8]) -> AccessCause {
        self.0.end(End::PowerOff);
        AccessCause::Register
    }
}

/// Counts after everything has stopped.
struct FinalCounts {
    counts: Counts,
    stats: Stats,
    dump: Option<String>,
}

fn wind_down<P: Poller<Message = Request>>(
    core: Sidecore<P>,
    control: &Control,
    thread: JoinHandle<()>,
    outcome: Result<Outcome>,
) -> Result<FinalCounts> {
    if let Ok(Outcome::Hung(dump)) = outcome {
        // Its sidecore does not answer, so it cannot be joined, and its owner's mappings must stay
        // for the vCPU.
        control.end(End::Host(dump.clone()));
        let stats = core.stats();
        std::mem::forget(core);
        return Ok(FinalCounts {
            counts: Counts::default(),
            stats,
            dump: Some(dump),
        });
    }
    let stats = core.stats();
    let counts = core.handle(0).call(|reply| Request::ask(reply, counts));
    // Has no effect if it has ended; an unfinished guest leaves its loop.
    control.end(End::Quit);
    // The sidecore first, since a vCPU may wait for its answer; its owner is kept until the vCPU
    // has stopped.
    let owners = core.stop();
    let joined = thread.join();
    drop(owners);
    ensure!(joined.is_ok(), "the vCPU's thread panicked");
    let dump = match outcome? {
        Outcome::Lost(dump) => Some(dump),
        _ => match control.wait_for_end() {
            End::PowerOff => None,
            other => bail!("the guest ended early: {other:?}"),
        },
    };
    Ok(FinalCounts {
        counts: counts.context("the sidecore ended early")?,
        stats,
        dump,
    })
}
