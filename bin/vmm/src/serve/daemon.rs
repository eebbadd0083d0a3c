//! Sockets, exports and cores, from the start to a signal.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sidecore::{
    Answer, ControlConfig, Fleet, FleetBuilder, Handle, Monitor, Reply, StallCause, ToChild,
};
use vhost_export::{Export, ExportConfig, ExportMessage, ExportStats};
use vio::{Device, DeviceClass};

use super::config::{Config, Cores};
use super::counters::{self, Counted};
use super::net::Behind;
use super::of_device;
use super::poller::{Served, ServedMessage};
use super::prepare;
use super::purpose::Purpose;
use super::sockets::Sockets;
use super::switch::SwitchStats;
use crate::composition::Composition;
use crate::ending::signals::{self, SignalRequest, Signals};
use crate::ending::storage::{self, Dropping, Names};
use crate::ending::{self, STATUS_STUCK};
use crate::messages::{self, say};
use crate::notify;

/// Time without a sign of life of a core after which a message says so.
const SILENCE: Duration = Duration::from_secs(2);
/// Time in which all devices together must give their counters.
const STATS_LIMIT: Duration = Duration::from_secs(1);

/// Serves until a signal asks for the end. Returns the exit status.
pub fn run(config: Config, composition: &dyn Composition) -> Result<u8> {
    prepare::begin(&config, composition)?;
    let signals = Signals::block(&[libc::SIGUSR1]).context("blocking signals")?;
    messages::start().context("standard error")?;
    let (tell, asked) = channel();
    signals
        .listen(Duration::ZERO, move |what| {
            // No thread listens any more when the end is under way.
            let _ = tell.send(what);
        })
        .context("the thread for signals")?;
    raise_descriptor_limit(&config);
    check_calls();
    // All devices before the first socket: until every one can be served, none is.
    let disks = match prepare::disks(&config, Purpose::Start, composition) {
        // For any error: perhaps an image stayed in use for too long to wait.
        Err(_) if signals::is_end_asked() => return Ok(0),
        opened => opened?,
    };
    let mut sockets = Sockets::default();
    let (nets, switches) = prepare::nets(&config, Purpose::Start)?;
    let listeners = prepare::listen(&config, Purpose::Start, &mut sockets)?;
    let mut listeners = listeners.into_iter();
    let (cores, mut exports) = (&config.cores, Vec::new());
    // In the order of their listeners.
    for ((block, blk), listener) in config.blocks.iter().zip(disks).zip(listeners.by_ref()) {
        let export = export(&block.id, block.weight, blk, listener, cores);
        exports.push(Served::Block(Box::new(
            export.with_context(|| of_device(&block.id))?,
        )));
    }
    let mut of_switches = BTreeMap::<String, Vec<_>>::new();
    for ((net, device), listener) in config.nets.iter().zip(nets).zip(listeners) {
        let export = export(&net.id, net.weight, device, listener, cores);
        let export = export.with_context(|| of_device(&net.id))?;
        match &net.behind {
            Behind::Switch(name, _) => of_switches.entry(name.clone()).or_default().push(export),
            _ => exports.push(Served::Net(Box::new(export))),
        }
    }
    let switches = switches.with_devices(of_switches).into_iter();
    exports.extend(switches.map(|switch| Served::Switch(Box::new(switch))));
    let mut fleet = start(&config.cores, composition)?;
    let mut handles = Vec::new();
    for served in exports {
        let (key, devices) = (served.key(), served.stats());
        let switch = served.switch_stats().map(|(id, _)| id);
        let handle = fleet.add(served).with_context(|| of_device(&key))?;
        handles.push(PollerHandle {
            handle,
            devices: devices.into_iter().map(|(id, _)| id).collect(),
            switch,
        });
    }
    let serving = format!("serving {}", config.extent());
    say!("ready: {serving}");
    notify::ready(&serving);
    while asked.recv() == Ok(SignalRequest::Stats) {
        let devices = handles.iter().flat_map(PollerHandle::ask_devices).collect();
        let switches = handles
            .iter()
            .filter_map(PollerHandle::ask_switch)
            .collect();
        let counted = Counted {
            cores: fleet.stats(),
            devices: counters::gather(devices, STATS_LIMIT, signals::is_end_asked),
            switches: counters::gather(switches, STATS_LIMIT, signals::is_end_asked),
        };
        counters::report(config.stats.as_deref(), counted);
    }
    notify::stopping();
    let cores = fleet.stats();
    // Before the listeners are closed, so that a successor finds either a socket that is served or
    // none.
    drop(sockets);
    let mut counted = wind_down(&mut fleet, &config);
    counted.cores = cores;
    counters::report(config.stats.as_deref(), counted);
    drop(fleet.stop());
    Ok(0)
}

/// The way to one poller.
struct PollerHandle {
    handle: Handle<ServedMessage>,
    /// Its devices.
    devices: Vec<String>,
    /// The switch that it is.
    switch: Option<String>,
}

impl PollerHandle {
    /// Asks each device for its counters. One whose core has gone has none.
    fn ask_devices(&self) -> impl Iterator<Item = (String, Answer<ExportStats>)> {
        let devices = self.devices.iter().enumerate();
        devices.filter_map(|(child, id)| {
            let (reply, answer) = Reply::pair();
            let message = ExportMessage::Stats(reply);
            let message = ServedMessage::Device(ToChild { child, message });
            self.handle.send(message).ok()?;
            Some((id.clone(), answer))
        })
    }

    /// Asks the switch for its own.
    fn ask_switch(&self) -> Option<(String, Answer<SwitchStats>)> {
        let id = self.switch.clone()?;
        let (reply, answer) = Reply::pair();
        self.handle.send(ServedMessage::Switch(reply)).ok()?;
        Some((id, answer))
    }
}

/// Says what is lacking for calls that no front end can make wait.
fn check_calls() {
    // On a thread that ends: the first core takes over what it got from the kernel.
    let never_waits = std::thread::spawn(sidecore::never_waits).join();
    // Here, before any thread is pinned: its thread runs where this one may.
    let is_watched = sidecore::writes_are_watched();
    match (never_waits.unwrap_or(false), is_watched) {
        (true, true) => {}
        (true, false) => tracing::warn!(
            "writes cannot be watched here (a seccomp filter without membarrier or tgkill): each \
             call of a front end takes \
             half a microsecond more"
        ),
        (false, true) => tracing::warn!(
            "the kernel gives no AIO context, or no preadv2 (CONFIG_AIO, fs.aio-max-nr, a seccomp \
             filter): a front end that \
             fills the eventfd it is called by, and makes it a blocking one, holds its core for \
             milliseconds and is called no \
             more (without preadv2 one that empties its kicks can hold it)"
        ),
        (false, false) => tracing::warn!(
            "the kernel gives no AIO context, or no preadv2 (CONFIG_AIO, fs.aio-max-nr, a seccomp \
             filter), and writes cannot \
             be watched (membarrier, tgkill): a front end that fills or empties the eventfds it \
             shares, and makes them \
             blocking ones, can hold its core"
        ),
    }
}

/// Takes the devices off their cores, all at the same time: each finishes there what is in flight,
/// and takes nothing more. Then closes their images. Their last counters.
fn wind_down(fleet: &mut Fleet<Served>, config: &Config) -> Counted {
    let name = |id: &str, what: &dyn Display| (id.to_owned(), format!("device {id} ({what})"));
    let blocks = config.blocks.iter();
    let blocks = blocks.map(|block| name(&block.id, &block.source));
    let nets = config.nets.iter();
    let names: Names<String> = blocks
        .chain(nets.map(|net| match &net.behind {
            // All devices of a switch at once.
            Behind::Switch(switch, _) => {
                let key = format!("switch {switch}");
                (key.clone(), key)
            }
            behind => name(&net.id, behind),
        }))
        .collect();
    let mut counted = Counted::default();
    let mut closing = Dropping::default();
    let take = |served: Served| {
        let key = served.key();
        let devices = served.stats().into_iter();
        counted
            .devices
            .extend(devices.map(|(id, stats)| (id, Some(stats))));
        let switch = served.switch_stats().into_iter();
        counted
            .switches
            .extend(switch.map(|(id, stats)| (id, Some(stats))));
        closing.begin(names[&key].clone(), served.into_devices());
        key
    };
    let left = fleet.release();
    storage::wait(names.clone(), &left, take, || {});
    closing.wait();
    counted
}

/// Starts the cores, without devices.
fn start(cores: &Cores, composition: &dyn Composition) -> Result<Fleet<Served>> {
    let monitor = Monitor::spawn(SILENCE, |stuck| {
        tracing::error!("a core has stopped answering: {stuck:?}");
        if stuck.cause == StallCause::Panicked {
            // Its devices are gone, and their front ends would wait for ever. A successor resumes
            // from their inflight regions.
            say!("a core has panicked: ending at once, with status {STATUS_STUCK}");
            ending::leave(STATUS_STUCK);
        }
    })
    .context("starting the monitor")?;
    let builder = FleetBuilder::new("core")
        .cpus(cores.cpus.clone())
        .idle(cores.idle)
        .control(ControlConfig {
            max_cores: cores.count,
            ..ControlConfig::default()
        })
        .monitor(monitor);
    composition
        .fleet(builder)
        .spawn()
        .context("starting a core")
}

fn export<C: DeviceClass>(
    id: &str,
    weight: u32,
    device: Device<C>,
    listener: UnixListener,
    cores: &Cores,
) -> Result<Export<C>> {
    let config = ExportConfig {
        weight,
        call_delay_ns: cores.call_delay_ns,
        ..ExportConfig::new(id)
    };
    Export::new(config, device, listener).context("its socket")
}

/// Raises the limit of descriptors as far as the system lets us, since each device keeps several
/// open. Says so if that is not enough for all.
fn raise_descriptor_limit(config: &Config) {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let current = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let needed = descriptors(config);
    if let Some(current) = current.filter(|&current| current < needed) {
        tracing::warn!(
            "all devices in use need about {needed} descriptors, and the limit is {current}: front \
             ends beyond that are turned \
             away (raise it: ulimit -Hn, LimitNOFILE= of systemd)"
        );
    }
}

/// Returns about how many descriptors are open when every device has a front end.
fn descriptors(config: &Config) -> u64 {
    /// Standard streams, signals, the monitor; and what connections hold for a moment while they
    /// come or go.
    const PROCESS: u64 = 64;
    /// An epoll, its notifier, an io_uring and its eventfd, an AIO context's.
    const CORE: u64 = 8;
    /// Its listener, its image, how its image wakes the core, its connection, the inflight region,
    /// the channel, and four regions of memory.
    const DEVICE: u64 = 10;
    /// Kick, call, error, and the ring by which a call that is made often is signalled.
    const QUEUE: u64 = 4;
    let devices = config.blocks.iter();
    let devices: u64 = devices
        .map(|block| DEVICE + QUEUE * u64::from(block.queues))
        .sum();
    let nets = config.nets.iter();
    let nets: u64 = nets
        .map(|net| DEVICE + QUEUE * (2 * u64::from(net.pairs) + 1))
        .sum();
    PROCESS + CORE * config.cores.count as u64 + devices + nets
}
