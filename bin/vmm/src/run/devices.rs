//! IOMMU, disks and network cards of a machine, put under their owner and its sidecore.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use assign::reach::Reach;
use guest_mem::{PhysMem, SourceId};
use kvm::doorbells::{KvmDoorbells, Places};
use machine::port::{OwnedFunction, UnitRegisters};
use net_ports::TapPort;
use platform::interrupt::InterruptSink;
use platform::layout;
use platform::power::MarkerSink;
use pv_iommu::populate::Populator;
use pv_iommu::{Hints, IommuFunction};
use sidecore::{Monitor, Sidecore, SidecoreBuilder, StallReport};
use vio::blk::{Blk, BlockIo, RawDisk, RawDiskOptions, Transfer};
use vio::net::{Net, Responder};
use vio::rng::{HOST_LIMITS, HostEntropy, Rng};
use virtio_pci::VirtioFunction;
use virtio_pci::function::NOTIFY_STRIDE;

use super::args::DmaArg;
use super::assigned;
use super::attach::{Attached, Parts, Running};
use super::balloon::{BalloonTask, BalloonWatch};
use super::composed::{Functions, Owner, Request};
use super::config::{Config, Remapping, RingMode};
use super::disk::DiskConfig;
use super::disks::Disk;
use super::ejection;
use super::hints;
use super::ledger::{LedgerSource, MarkerLedger, Reporter};
use super::memory::{Memory, Paging};
use super::net::{NetBackend, NetConfig};
use super::pending_functions::{PendingFunctions, Plugged};
use super::remote;
use super::switches::Switches;
use super::units::{self, UnitOptions};
use super::worker;
use crate::composition::Composition;
use crate::ending::storage::{self, Dropping, Names};
use crate::{lacks, messages, ports};
use kvm::control::{Control, End};
use platform::bus::BusDevice;

/// Requests in flight of one disk.
const DISK_DEPTH: u32 = 256;
/// Station address of the built-in responder: locally administered.
const RESPONDER_MAC: [u8; 6] = [0x52, 0x54, 0, 0x65, 0x78, 0xfe];

/// Time that an invalidation waits until the server of a device behind the emulated IOMMU has
/// dropped the mapping. Longer than a server takes that waits for its own requests (exitless serve:
/// a second, and the device then needs a reset).
const REMOTE_HOLD_LIMIT: Duration = Duration::from_secs(3);

/// Maker of the functions that a program may have of its own, as functions of its set.
pub trait MakeFunctions<F: Functions> {
    /// Makes a function of the disk of this number.
    fn disk(&self, number: usize, source: SourceId, disk: Blk) -> F;

    /// Makes one of the paravirtual IOMMU.
    fn iommu(&self, iommu: IommuFunction) -> F {
        iommu.into()
    }
}

/// Builds everything that `config` asks for over `memory`, and starts the sidecore. Takes files out
/// of the configuration.
///
/// # Errors
/// Names what the host lacks or refuses.
pub fn attach<F: Functions, M: Memory<F>>(
    mut memory: M,
    config: &mut Config,
    parts: &Parts<'_>,
    composition: &dyn Composition,
    make: &dyn MakeFunctions<F>,
) -> Result<Attached> {
    let messages: Arc<dyn InterruptSink> = parts.msi.clone();
    let mut owner = Owner::new("vm", memory.ram(), messages).with_drain_limit(config.drain_limit);
    if has_remote_behind_iommu(config) {
        owner = owner.with_hold_limit(REMOTE_HOLD_LIMIT);
    }
    let options = UnitOptions::of(config);
    let windows = memory.windows();
    let hints = Hints::new(config.hints.gathers, windows.clone());
    let unit = owner.add_unit(units::iommu(&options, hints, parts)?);
    let mut pending = PendingFunctions::new(&mut owner, unit);
    // The first: the others translate by what it is asked for.
    let iommu = match options.remapping {
        Remapping::Virtio(RingMode::Polled) => {
            let function = IommuFunction::new(parts.bus.reserve()?, Vec::new());
            let doorbells = doorbells(parts, function.queues())?;
            Some(pending.add(make.iommu(function), doorbells))
        }
        Remapping::Virtio(RingMode::Trap) => {
            let function = IommuFunction::new(parts.bus.reserve()?, Vec::new()).trapped();
            Some(pending.add_unheard(make.iommu(function)))
        }
        Remapping::None | Remapping::Vtd(_) => None,
    };
    let (mut names, mut forwarded) =
        add_disks(&mut pending, &mut memory, config, parts, composition, make)?;
    let mut switches = Switches::default();
    for net in std::mem::take(&mut config.nets) {
        let net = match net.into_remote(config.iommu.is_there()) {
            Ok(remote) => {
                let name = remote.option();
                let (number, places) = remote::add(&mut pending, remote, parts)?;
                names.insert(number, name);
                forwarded.push(places);
                continue;
            }
            Err(net) => *net,
        };
        let device = network(net, &mut switches, config.is_check)?;
        let function = VirtioFunction::new(parts.bus.reserve()?, device);
        let queues = function.queues();
        pending.add(function, doorbells(parts, queues)?);
    }
    if config.rng {
        let source = lacks::given("getrandom", HostEntropy::open())?;
        let device = Rng::new(Box::new(source), HOST_LIMITS);
        let function = VirtioFunction::new(parts.bus.reserve()?, device);
        let queues = function.queues();
        pending.add(function, doorbells(parts, queues)?);
    }
    let reach = Reach::default();
    let given = std::mem::take(&mut config.devices);
    let devices = assigned::add_all(
        &mut pending,
        given,
        &options,
        parts,
        &reach,
        config.restarts,
    )?;
    let balloon = match config.balloon.take() {
        Some(spec) => {
            let device = spec.device(parts.ram, memory.balloon(&reach)?)?;
            let function = VirtioFunction::new(parts.bus.reserve()?, device);
            let doorbells = doorbells(parts, function.queues())?;
            let number = pending.add_beside(function, doorbells);
            Some((spec, BalloonWatch::new(number)))
        }
        None => None,
    };
    let Plugged {
        ports: plugged,
        beside,
        assigned: second,
    } = pending.into_plugged();
    let viot = iommu.map(|number| units::describe_endpoints(&mut owner, unit, number, &beside));
    let populator = windows.map(|windows| hints::populate(&windows, parts.ram));
    let populator = populator.transpose();
    let populator = populator.context("the thread that populates memory")?;
    let core = start(config, owner, composition)?;
    let handle = core.handle(0);
    assigned::follow_policies(&devices, &handle)?;
    let watched = balloon.as_ref().map(|(_, watched)| watched.clone());
    let paging = memory.start(handle.clone())?;
    let balloon = balloon.map(|(spec, watched)| {
        let pager = paging.as_ref().and_then(|paging| paging.reporter());
        spec.start(handle.clone(), &watched, pager)
    });
    let balloon = balloon.transpose()?;
    let monitor = monitor(&core, parts.control, config.watchdog)?;
    let pager = paging.as_ref().and_then(|paging| paging.reporter());
    let source = LedgerSource::new(parts, handle.clone(), core.watch(), forwarded, pager)?
        .with_balloon(watched)
        .with_devices(devices.addresses())
        .with_register_pages(units::register_pages(second.as_ref()));
    let ledger = Arc::new(MarkerLedger::new(source));
    let reporter = (!config.is_check)
        .then(|| Reporter::new(ledger.clone(), config).with_findings(composition.findings()));
    let ejectable = ejection::ejectable(&plugged, &handle, parts.bus);
    for plug in plugged {
        let mut port = OwnedFunction::new(handle.clone(), plug.number, plug.shape);
        if let Some(doorbells) = plug.doorbells {
            port = port.with_doorbells(doorbells);
        }
        if let Some(memory) = plug.memory {
            port = port.with_memory(memory);
        }
        parts.bus.plug(plug.source, Arc::new(port));
    }
    Ok(Attached {
        iommu_pages: options.remapping.vtd().map_or_else(Vec::new, |_| {
            let page = |(at, unit)| {
                let registers = UnitRegisters::new(handle.clone(), unit);
                (at, Arc::new(registers) as Arc<dyn BusDevice>)
            };
            let second = second.as_ref().map(|of| (layout::VTD_ASSIGNED, of.unit));
            let all = std::iter::once((layout::VTD, unit)).chain(second);
            all.map(page).collect()
        }),
        tables: {
            let dmar = options.remapping.vtd();
            let dmar = dmar.map(|_| units::dmar_table(second.as_ref()));
            dmar.into_iter().chain(viot).collect()
        },
        // A mark sets up tracepoints that cost the whole host: the guest's to make only if the user
        // wants its windows.
        marker: config
            .ledger
            .is_some()
            .then_some(ledger as Arc<dyn MarkerSink>),
        ejectable,
        running: Some(Box::new(Devices {
            core,
            _monitor: monitor,
            _populator: populator,
            reporter,
            names,
            ended: None,
            paging,
            balloon,
        })),
    })
}

/// Adds all disks. Their names by number of function, and the doorbells that others read.
fn add_disks<F: Functions, M: Memory<F>>(
    pending: &mut PendingFunctions<'_, F, M::Ram>,
    memory: &mut M,
    config: &mut Config,
    parts: &Parts<'_>,
    composition: &dyn Composition,
    make: &dyn MakeFunctions<F>,
) -> Result<(Names<usize>, Vec<Arc<Places>>)> {
    let mut forwarded = Vec::new();
    let mut names = Names::new();
    for (index, disk) in std::mem::take(&mut config.disks).into_iter().enumerate() {
        match disk {
            Disk::File(disk) => {
                let name = format!("disk {}", disk.path.display());
                let queues = disk.queues;
                if let Some(worker) = disk.worker {
                    let path = disk.path.display().to_string();
                    let device = worker::start(path, disk.into(), worker);
                    let device = device.with_context(|| name.clone())?;
                    let function = VirtioFunction::new(parts.bus.reserve()?, device);
                    names.insert(pending.add(function, doorbells(parts, queues)?), name);
                    continue;
                }
                let wrap = |io| composition.disk(index, io);
                let device = block(disk, config.dma, memory, wrap);
                let device = device.with_context(|| name.clone())?;
                let function = make.disk(index, parts.bus.reserve()?, device);
                let number = pending.add(function, doorbells(parts, queues)?);
                names.insert(number, name);
            }
            Disk::Remote(disk) => {
                let name = format!("disk socket={}", disk.socket.display());
                let remote = disk.into_remote(config.iommu.is_there());
                let (number, places) = remote::add(pending, remote, parts)?;
                names.insert(number, name);
                forwarded.push(places);
            }
        }
    }
    Ok((names, forwarded))
}

/// Returns whether another process serves a device behind the emulated IOMMU.
fn has_remote_behind_iommu(config: &Config) -> bool {
    let is_remote = |disk: &Disk| matches!(disk, Disk::Remote(_));
    let has_remote =
        config.disks.iter().any(is_remote) || config.nets.iter().any(|net| net.remote().is_some());
    config.iommu.is_there() && has_remote
}

fn doorbells(parts: &Parts<'_>, queues: u16) -> Result<KvmDoorbells> {
    KvmDoorbells::new(parts.vm.clone(), queues, NOTIFY_STRIDE).context("doorbells")
}

fn block<F>(
    disk: DiskConfig,
    dma: DmaArg,
    memory: &mut impl Memory<F>,
    wrap: impl FnOnce(Box<dyn BlockIo>) -> Result<Box<dyn BlockIo>>,
) -> Result<Blk> {
    let options = RawDiskOptions {
        read_only: disk.read_only,
        o_direct: disk.direct,
        transfer: match dma {
            DmaArg::Direct => Transfer::Direct,
            DmaArg::Bounce => Transfer::Bounce,
        },
        depth: DISK_DEPTH,
    };
    let config = disk.device();
    let io: Box<dyn BlockIo> = match disk.open_image(DISK_DEPTH)? {
        Some(image) => Box::new(image),
        None => {
            let file = disk.file.try_clone().context("a second descriptor")?;
            let disk = RawDisk::from_file(file, options)?;
            lacks::say_how_served(&disk);
            Box::new(disk)
        }
    };
    let io = memory.disk(wrap(io)?, &disk)?;
    Blk::new(config, io).with_context(|| format!("disk {}", disk.path.display()))
}

fn network(net: NetConfig, switches: &mut Switches, is_check: bool) -> Result<Net> {
    let capture = net.capture.as_ref();
    let port = match net.backend {
        NetBackend::Responder(ip) => {
            let responder = Responder::new(RESPONDER_MAC, ip);
            ports::port(responder, capture, is_check)
        }
        NetBackend::Tap { queues, .. } => ports::port(TapPort::new(queues), capture, is_check),
        NetBackend::Switch { name, mtu } => {
            ports::port(switches.port(&name, mtu)?, capture, is_check)
        }
        NetBackend::Socket { .. } | NetBackend::Vhost { .. } => unreachable!("others serve it"),
    };
    let device = Net::new(net.mac, net.queue_size, port.context("--net")?)?;
    Ok(device.with_pairs(net.pairs)?)
}

fn start<F, M>(
    config: &Config,
    owner: Owner<F, M>,
    composition: &dyn Composition,
) -> Result<Sidecore<Owner<F, M>>>
where
    F: Functions,
    M: PhysMem + Send + 'static,
{
    let host_cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let builder = SidecoreBuilder::new("sidecore0")
        .cpu(config.pin.sidecore(0))
        .idle(config.idle.policy())
        .shares_cpu(host_cpus <= usize::from(config.cpus));
    composition
        .sidecore(builder)
        .spawn(vec![owner])
        .context("starting the sidecore")
}

/// Starts the sidecore's monitor. A sidecore that stops answering ends the machine before its guest
/// spins into a panic (10 s in Linux).
fn monitor<F: Functions, M: PhysMem + Send>(
    core: &Sidecore<Owner<F, M>>,
    control: &Arc<Control>,
    limit: Duration,
) -> Result<Monitor> {
    /// Time that vCPUs have to stop where they are.
    const PATIENCE: Duration = Duration::from_millis(500);
    let control = control.clone();
    let monitor = Monitor::spawn(limit, move |stuck: &StallReport| {
        control.pause(PATIENCE);
        control.end(End::Watchdog(format!("{stuck:?}")));
    })
    .context("starting the monitor")?;
    monitor.watch(core.watch());
    Ok(monitor)
}

/// Threads and state that run beside the vCPUs.
struct Devices<F: Functions, M: PhysMem + Send + 'static> {
    core: Sidecore<Owner<F, M>>,
    _monitor: Monitor,
    /// Populates memory ahead of devices.
    _populator: Option<Populator>,
    /// Printer of the lines about a guest that has run.
    reporter: Option<Reporter>,
    /// The disks, by the numbers of their functions.
    names: Names<usize>,
    /// Numbers of functions that have ended, once the machine has.
    ended: Option<Receiver<usize>>,
    /// Moves pages of memory.
    paging: Option<Box<dyn Paging>>,
    /// Asks the guest for its statistics.
    balloon: Option<BalloonTask>,
}

impl<F: Functions, M: PhysMem + Send + 'static> Running for Devices<F, M> {
    fn begin(&mut self) -> Result<()> {
        match &mut self.paging {
            Some(paging) => paging.begin(),
            None => Ok(()),
        }
    }

    fn end(&mut self) {
        if let Some(paging) = &self.paging {
            paging.end();
        }
        let (tell, ended) = channel();
        // A sidecore that has ended releases all by that.
        let _ = self.core.handle(0).send(Request::End(tell));
        self.ended = Some(ended);
    }

    fn stop(self: Box<Self>, look: &dyn Fn()) -> Result<()> {
        if let Some(ended) = &self.ended {
            storage::wait(self.names.clone(), ended, |number| number, look);
        }
        // The ledger asks the owner for its counters, so it is closed before the sidecore is
        // stopped.
        let reported = self.reporter.as_ref().map_or(Ok(()), Reporter::report);
        if let Some(balloon) = self.balloon {
            balloon.stop();
        }
        let owners = self.core.stop();
        if let Some(paging) = self.paging {
            let done = paging.stop();
            if self.reporter.is_some() {
                messages::say!("{done}");
            }
        }
        // The last close of a file may wait for its server.
        let mut dropping = Dropping::default();
        let mut names: Vec<_> = self.names.into_values().collect();
        if names.is_empty() {
            names.push("devices".into());
        }
        dropping.begin(names.join(", "), owners);
        dropping.wait();
        reported
    }
}
