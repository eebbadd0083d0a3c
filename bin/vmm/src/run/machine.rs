//! The machine put together, one step per subsystem, run, and wound down.
//!
//! Everything up to the first vCPU thread may fail with "nothing started"; from then on every end
//! is an [`End`]. Winding down: every wait of a vCPU is ended, the vCPUs return, the terminal is
//! given back, the console's output is written, storage finishes what is in flight, the sidecore is
//! joined. Each of these waits is bounded, or ended by a signal ([`crate::ending`]); a sidecore
//! that stops answering ends all of them.

use std::cell::OnceCell;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use console::sink::Sink;
use console::uart::Uart;
use kvm::control::{Control, End};
use kvm::exits::{ExitCause, ExitLedger};
use kvm::msi::KvmMsi;
use kvm::routes::KvmRoutes;
use kvm::vcpu::{self, Machine};
use kvm::{Kvm, Vcpu, Vm, cpuid, kick, start_state};
use pci::bus::{BarWindows, ConfigPorts, Ecam, PciBus, PciWindow};
use pci::host_bridge::HostBridge;
use platform::acpi::{self, AcpiConfig, PciResources};
use platform::boot::{self, Payload};
use platform::bus::{Bus, BusDevice};
use platform::ioapic::Ioapic;
use platform::layout;
use platform::power::{Eject, KeyboardReset, Marker, PanicNotice, Power};

use super::args::RebootArg;
use super::assembly::{Assembly, MachineComposition};
use super::attach::{Attached, Parts};
use super::bars::place_bars;
use super::config::{Config, ConsoleConfig};
use crate::ending::signals::{Listener, SignalRequest, Signals};
use crate::ending::{self, LOOK, STATUS_STUCK};
use crate::lacks;
use crate::messages::{self, say};
use crate::notify;
use crate::terminal::input::{self, Keyboard};
use crate::terminal::raw::RawMode;

/// Action of the process after the machine's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It ends with this status.
    Exit(u8),
    /// It starts the machine again.
    Restart,
}

/// A machine that is ready to begin.
struct Built {
    vcpus: Vec<Vcpu>,
    attached: Attached,
    machine: Machine,
    exits: ExitLedger,
    msi: Arc<KvmMsi>,
    uart: Arc<Uart>,
    output: Sink,
    is_on_stdio: bool,
    listener: Listener,
    /// The power button for a signal, once there is a guest to receive it.
    button: Arc<OnceLock<Arc<Ioapic>>>,
}

/// Builds the machine and takes it down again, without having run the guest: what a start would
/// refuse is refused.
pub fn check(mut config: Config, composition: &Arc<dyn MachineComposition>) -> anyhow::Result<()> {
    let Built {
        vcpus,
        mut attached,
        output,
        listener,
        ..
    } = build(&mut config, composition)?;
    let begun = match &mut attached.running {
        Some(running) => running.begin(),
        None => Ok(()),
    };
    output.let_go();
    let stopped = match attached.running {
        Some(mut running) => {
            running.end();
            running.stop(&|| {})
        }
        None => Ok(()),
    };
    drop(vcpus);
    listener.stop();
    begun.and(stopped)
}

/// Runs the machine to its end.
pub fn run(mut config: Config, composition: &Arc<dyn MachineComposition>) -> anyhow::Result<After> {
    let Built {
        vcpus,
        mut attached,
        machine,
        exits,
        msi,
        uart,
        output,
        is_on_stdio,
        listener,
        button,
    } = build(&mut config, composition)?;
    let control = machine.control.clone();
    let raw = match is_on_stdio {
        true => console_input(uart, control.clone())?,
        false => None,
    };

    if let Some(running) = &mut attached.running {
        running.begin()?;
    }
    // From now on there is a guest to receive it.
    let _ = button.set(machine.ioapic.clone());
    let threads = start_vcpus(vcpus, &config, &machine);
    notify::ready("the guest runs");
    let end = control.wait_for_end();
    notify::stopping();
    let look = || {
        if let Some(what) = control.stuck() {
            abandon(&End::Watchdog(what), &control, &exits, &msi);
        }
    };
    look();
    // Ends every wait of a vCPU: for the reader of the console, and for the devices.
    output.let_go();
    if let Some(running) = &mut attached.running {
        running.end();
    }
    while !control.wait_for_vcpus(LOOK) {
        look();
    }
    for thread in threads {
        // A panic has been printed by its hook and is the end's reason.
        let _ = thread.join();
    }
    // Before anything is waited for: from now on Ctrl-C is a signal.
    drop(raw);
    finish_console(&output, &control, &look);
    let stopped = match attached.running {
        Some(running) => running.stop(&look),
        None => Ok(()),
    };
    // From here on a signal is for the code that comes next.
    listener.stop();
    let after = after(&end, control.asked(), config.on_reboot);
    let why = match after {
        After::Exit(_) => why(&end, control.asked()),
        After::Restart => format!(
            "the guest asked for a reset: starting its machine again (restart {})",
            config.restarts.saturating_add(1)
        ),
    };
    summary(&why, &exits, &msi);
    if let Err(error) = stopped {
        say!("the devices did not stop in order: {error:#}");
        return Ok(After::Exit(ending::STATUS_FAILED));
    }
    Ok(after)
}

/// Makes everything that the guest needs, up to what it enters with.
fn build(config: &mut Config, composition: &Arc<dyn MachineComposition>) -> anyhow::Result<Built> {
    let kvm = match config.any_kvm {
        true => kvm::vm::open_for_programs()?,
        false => kvm::vm::open()?,
    };
    lacks::look_for_given()?;
    lacks::look_for_memory_files()?;
    // Before any thread, so that all inherit the mask.
    let signals = Signals::block(&[]).context("signals cannot be set up")?;
    messages::start().context("standard error")?;
    kick::install().context("the vCPU signal cannot be set up")?;
    warn_about_cpus(config);
    if let Some(swap) = &config.swap {
        swap.warn();
    }

    let ram = config.ram.make(config.pages_move)?;
    let vm = Arc::new(Vm::new(&kvm)?);
    let slots = vm.map_ram(&ram)?;
    let control = Arc::new(Control::new().context("an eventfd")?);
    let button = Arc::new(OnceLock::new());
    let stop = config.stop_timeout;
    let listener = listen_to_signals(signals, stop, control.clone(), button.clone())?;
    let exits = ExitLedger::new(usize::from(config.cpus));
    let msi = Arc::new(KvmMsi::new(vm.clone()));
    let routes = Arc::new(KvmRoutes::new(vm.clone()));
    let ioapic = Arc::new(Ioapic::new(
        layout::IOAPIC_SOURCE,
        msi.clone(),
        routes.clone(),
    ));
    let (vcpus, address_bits) = create_vcpus(&kvm, &vm, config)?;
    vm.try_interrupts()?;
    lacks::say_if_doorbells_exit(&vm);
    let bus = Arc::new(PciBus::new(Arc::new(HostBridge::default())));

    let attached = {
        let descriptors: Vec<_> = vcpus.iter().map(Vcpu::as_fd).collect();
        let parts = Parts {
            vm: &vm,
            vcpus: &descriptors,
            ram: &ram,
            slots: &slots,
            msi: &msi,
            routes: &routes,
            control: &control,
            exits: &exits,
            bus: &bus,
            ring: OnceCell::new(),
        };
        composition.attach(Assembly::new(composition.clone(), config, &parts))?
    };
    let ram_end = layout::ram_regions(config.ram.bytes)
        .iter()
        .map(|(start, len)| start + len)
        .max();
    let windows = place_bars(&bus, address_bits, ram_end.unwrap_or(0))?;
    let ejectable = attached.ejectable.as_ref();
    let acpi = acpi::build(&AcpiConfig {
        cpus: config.cpus,
        tables: attached.tables.clone(),
        pci: PciResources {
            high: windows.high.clone(),
            ejectable: ejectable.map_or_else(Vec::new, |ejectable| ejectable.slots.clone()),
            ..PciResources::default()
        },
    })?;
    let entry = boot::load(
        &ram,
        &Payload {
            kernel: (&config.kernel.0, config.kernel.1),
            initrd: config.initrd.as_ref(),
            cmdline: &config.cmdline,
            memory: config.ram.bytes,
            acpi: &acpi,
        },
    )?;
    start_state::enter(vcpus[0].fd(), entry)?;

    let (output, is_on_stdio) = console_output(config)?;
    let uart = Uart::new(ioapic.clone(), layout::COM1_PIN, output.clone()).context("an eventfd")?;
    let uart = Arc::new(uart);
    let (memory, ports) = buses(&attached, bus, &windows, &ioapic, &uart, &control)?;
    let machine = Machine {
        memory: Arc::new(memory),
        ports: Arc::new(ports),
        ioapic: ioapic.clone(),
        exits: exits.clone(),
        control: control.clone(),
        say: messages::own,
    };
    Ok(Built {
        vcpus,
        attached,
        machine,
        exits,
        msi,
        uart,
        output,
        is_on_stdio,
        listener,
        button,
    })
}

/// Waits until the guest's output has been written. That of a guest that ended by itself is written
/// to its end, however late it is read, as with any program that writes into a pipe; a signal,
/// before or now, puts a limit to that.
fn finish_console(output: &Sink, control: &Control, look: &dyn Fn()) {
    while control.asked().is_none() {
        if output.flush(LOOK) {
            return;
        }
        look();
    }
    output.flush(ending::WRITE_LIMIT);
}

/// Ends the process without joining anything: a sidecore that does not answer may hold vCPU threads
/// for ever. Those that are free show their registers first.
fn abandon(end: &End, control: &Control, exits: &ExitLedger, msi: &KvmMsi) -> ! {
    const PATIENCE: Duration = Duration::from_secs(1);
    let all_left = control.wait_for_vcpus(PATIENCE);
    summary(&why(end, None), exits, msi);
    if !all_left {
        say!("a vCPU still waits for the sidecore");
    }
    ending::leave(status(end))
}

/// Creates the vCPUs. Returns them, and the bits of the physical addresses that they have.
fn create_vcpus(kvm: &Kvm, vm: &Arc<Vm>, config: &Config) -> anyhow::Result<(Vec<Vcpu>, u8)> {
    let cpus = config.cpus;
    let mut supported = cpuid::supported(kvm)?;
    if config.hides_paravirtual_features {
        cpuid::hide_what_moving_pages_disturb(&mut supported);
    }
    let mut vcpus = Vec::new();
    for index in 0..cpus {
        let vcpu = Vcpu::new(vm, index)?;
        vcpu.fd()
            .set_cpuid2(&cpuid::for_vcpu(&supported, index, cpus))
            .map_err(kvm::vm::refused("the guest's CPUID"))?;
        start_state::set_msrs(vcpu.fd())?;
        vcpus.push(vcpu);
    }
    Ok((vcpus, cpuid::physical_address_bits(&supported)))
}

/// Has a signal press the power button from now on, once there is a guest to receive it, or end the
/// machine.
fn listen_to_signals(
    signals: Signals,
    grace: Duration,
    control: Arc<Control>,
    button: Arc<OnceLock<Arc<Ioapic>>>,
) -> anyhow::Result<Listener> {
    let on = move |asked| match (asked, button.get()) {
        (SignalRequest::Press(signal), Some(ioapic)) if !control.is_over() => {
            // First, since the guest may be quick.
            control.ask(End::Signal(signal));
            let is_heard = ioapic.pulse(layout::POWER_BUTTON_PIN);
            say_pressed(signal, grace, is_heard);
        }
        (SignalRequest::Press(signal) | SignalRequest::End(signal), _) => {
            control.end(End::Signal(signal))
        }
        (SignalRequest::Stats, _) => {}
    };
    signals.listen(grace, on).context("the thread for signals")
}

fn say_pressed(signal: i32, grace: Duration, is_heard: bool) {
    let unheard = match is_heard {
        true => "",
        false => ", which no driver in the guest listens to",
    };
    say!(
        "signal {signal}: pressed the guest's power button{unheard}; unless it powers off, the \
         machine ends within {} s, or by \
         another signal",
        grace.as_secs()
    );
}

/// Passes what is typed to the guest. A terminal is in raw mode until the guard is dropped.
fn console_input(uart: Arc<Uart>, control: Arc<Control>) -> anyhow::Result<Option<RawMode>> {
    let raw = RawMode::enter().context("the terminal cannot be put into raw mode")?;
    let escapes = raw.is_some();
    input::spawn(Keyboard { uart, escapes }, control).context("the console thread")?;
    Ok(raw)
}

/// Returns the sink of console bytes, and whether typing comes from standard input.
fn console_output(config: &mut Config) -> anyhow::Result<(Sink, bool)> {
    let console = std::mem::replace(&mut config.console, ConsoleConfig::None);
    let on_stdio = matches!(console, ConsoleConfig::Stdio);
    let file = match console {
        // A descriptor of its own: the standard library's would keep bytes until a line ends.
        ConsoleConfig::Stdio => {
            let fd = io::stdout().as_fd().try_clone_to_owned();
            File::from(fd.context("standard output")?)
        }
        ConsoleConfig::None => return Ok((Sink::nowhere(), false)),
        ConsoleConfig::File(file) => file,
    };
    let sink = Sink::start("console-out", file).context("the console's thread")?;
    Ok((sink, on_stdio))
}

/// Builds the buses: the devices that decode each guest-physical address and each port.
fn buses(
    attached: &Attached,
    pci: Arc<PciBus>,
    windows: &BarWindows,
    ioapic: &Arc<Ioapic>,
    uart: &Arc<Uart>,
    control: &Arc<Control>,
) -> anyhow::Result<(Bus, Bus)> {
    let mut memory = Bus::new();
    let windows = [&windows.low, &windows.high];
    for window in windows.into_iter().filter(|window| !window.is_empty()) {
        let (bus, base) = (pci.clone(), window.start);
        let len = window.end - window.start;
        memory.add(base, len, Arc::new(PciWindow { bus, base }))?;
    }
    memory.add(layout::ECAM, layout::ECAM_SIZE, Arc::new(Ecam(pci.clone())))?;
    memory.add(layout::IOAPIC, layout::IOAPIC_SIZE, ioapic.clone())?;
    for (at, page) in &attached.iommu_pages {
        memory.add(*at, layout::VTD_SIZE, page.clone())?;
    }

    let mut ports = Bus::new();
    let mut port = |first: u16, len: u16, device: Arc<dyn BusDevice>| {
        ports.add(u64::from(first), u64::from(len), device)
    };
    port(layout::COM1, layout::COM1_PORTS, uart.clone())?;
    port(
        ConfigPorts::BASE,
        ConfigPorts::LEN,
        Arc::new(ConfigPorts::new(pci)),
    )?;
    port(
        layout::SLEEP_CONTROL,
        Power::PORTS,
        Arc::new(Power(control.clone())),
    )?;
    port(
        layout::I8042_COMMAND,
        1,
        Arc::new(KeyboardReset(control.clone())),
    )?;
    port(
        layout::PANIC_NOTICE,
        1,
        Arc::new(PanicNotice(control.clone())),
    )?;
    if let Some(ejectable) = &attached.ejectable {
        port(layout::EJECT, 1, Arc::new(Eject(ejectable.sink.clone())))?;
    }
    if let Some(sink) = &attached.marker {
        port(layout::MARKER, 1, Arc::new(Marker(sink.clone())))?;
    }
    Ok((memory, ports))
}

/// Starts every vCPU thread; if one does not start, the machine ends before it has begun.
fn start_vcpus(vcpus: Vec<Vcpu>, config: &Config, machine: &Machine) -> Vec<JoinHandle<()>> {
    let mut threads = Vec::new();
    for (index, fd) in vcpus.into_iter().enumerate() {
        match vcpu::spawn(fd, index, config.pin.vcpu(index), machine.clone()) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                let what = format!("the thread of vCPU {index} cannot be started: {error}");
                machine.control.end(End::Host(what));
                break;
            }
        }
    }
    threads
}

/// Warns about CPUs. A sidecore and a vCPU on one host CPU work, but steal each other's time; a
/// second sidecore has nothing to do: say so.
fn warn_about_cpus(config: &Config) {
    if config.sidecores > 1 {
        say!(
            "warning: one VM's devices have one owner: of {} sidecores only the first is started",
            config.sidecores
        );
    }
    let threads = config.sidecores + usize::from(config.cpus);
    // Not `available_parallelism`: CPUs kept free for a sidecore are outside our mask.
    // SAFETY: no pointers; -1 on error.
    let host = usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1);
    if threads > host {
        say!(
            "warning: {} vCPUs and {} sidecores share {host} host CPUs; exits and times will \
             suffer",
            config.cpus,
            config.sidecores
        );
    }
    for sidecore in 0..config.sidecores {
        let shared = (0..usize::from(config.cpus)).find(|vcpu| {
            config.pin.vcpu(*vcpu).is_some()
                && config.pin.vcpu(*vcpu) == config.pin.sidecore(sidecore)
        });
        if let Some(vcpu) = shared {
            say!("warning: sidecore {sidecore} and vCPU {vcpu} are pinned to one host CPU");
        }
    }
}

/// Returns the action after the end. A guest that resets gets its machine back, unless the end was
/// asked for: then that is why it ends.
fn after(end: &End, asked: Option<End>, on_reboot: RebootArg) -> After {
    match (end, on_reboot, asked) {
        (End::Reset, RebootArg::Restart, None) => After::Restart,
        (End::Reset, RebootArg::Restart, Some(asked)) => After::Exit(status(&asked)),
        _ => After::Exit(status(end)),
    }
}

fn status(end: &End) -> u8 {
    match end {
        End::PowerOff | End::Quit => 0,
        End::Crash(_) | End::Host(_) => ending::STATUS_FAILED,
        End::Reset => 3,
        End::Panicked => ending::STATUS_PANICKED,
        End::Watchdog(_) => STATUS_STUCK,
        End::Signal(signal) => ending::status_of_signal(*signal),
    }
}

/// Returns the reason why the machine ended, and whether the user had asked for that.
fn why(end: &End, asked: Option<End>) -> String {
    let asked = match asked {
        Some(End::Signal(signal)) => format!(", and signal {signal} had asked for the end"),
        Some(End::Quit) => ", and the escape key had asked for the end".to_owned(),
        _ => String::new(),
    };
    match end {
        End::PowerOff => format!("the guest powered off{asked}"),
        End::Reset => format!("the guest asked for a reset{asked}; `run` ends here"),
        End::Panicked => format!("the guest's kernel has panicked{asked}"),
        End::Quit => "ended by the escape key".to_owned(),
        End::Signal(signal) => format!("ended by signal {signal}"),
        End::Crash(what) | End::Host(what) | End::Watchdog(what) => what.clone(),
    }
}

/// Prints the reason of the end, and the number of the vCPUs' exits to user space.
fn summary(why: &str, exits: &ExitLedger, msi: &KvmMsi) {
    let snapshot = exits.snapshot();
    let counts: Vec<_> = ExitCause::ALL
        .into_iter()
        .filter(|cause| snapshot.get(*cause) > 0)
        .map(|cause| format!("{} {}", cause.name(), snapshot.get(cause)))
        .collect();
    messages::end_line();
    say!("{why}");
    say!(
        "{} exits to user space ({}), {} interrupts sent, {} refused",
        snapshot.total(),
        counts.join(", "),
        msi.sent(),
        msi.refused()
    );
}
