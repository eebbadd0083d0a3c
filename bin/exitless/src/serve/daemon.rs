//! Sockets, exports and cores, from the start to a signal.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sidecore::{ControlConfig, Fleet, FleetBuilder, Monitor, Stats, StuckCause};
use vhost_export::{Export, ExportConfig, ExportMessage, ExportStats};
use vio::blk::Blk;

use super::config::{BlockConfig, Config, Cores};
use super::disk;
use crate::ending::signals::{self, Asked, Signals};
use crate::ending::storage::{self, Dropping, Names};
use crate::ending::{self, STATUS_STUCK};
use crate::messages::{self, say};

/// How long a core may be silent before that is said.
const SILENCE: Duration = Duration::from_secs(2);

/// Serves until a signal asks for the end; the exit status.
pub fn run(config: Config) -> Result<u8> {
    let signals = Signals::block(&[libc::SIGUSR1]).context("blocking signals")?;
    messages::start().context("standard error")?;
    let (tell, asked) = channel();
    signals
        .listen(Duration::ZERO, move |what| {
            // Nobody listens any more when the end is under way.
            let _ = tell.send(what);
        })
        .context("the thread for signals")?;
    raise_descriptor_limit();
    // On a thread that ends: the first core takes over what it got from the kernel.
    let never_waits = std::thread::spawn(sidecore::never_waits).join();
    if !never_waits.unwrap_or(false) {
        tracing::warn!(
            "the kernel gives no AIO context (CONFIG_AIO, a seccomp filter, fs.aio-max-nr): a front end that fills the \
             eventfd it is called by, and makes it a blocking one, can hold its core"
        );
    }
    let mut sockets = Sockets::default();
    let opened = config
        .blocks
        .iter()
        .map(|block| {
            export(block, &config.cores, &mut sockets)
                .with_context(|| format!("device {}", block.id))
        })
        .collect::<Result<Vec<_>>>();
    let exports = match opened {
        // Whatever the trouble was: perhaps that an image stayed in use for too long to wait.
        Err(_) if signals::is_end_asked() => return Ok(0),
        opened => opened?,
    };
    let mut fleet = start(&config.cores)?;
    let mut handles = Vec::new();
    for export in exports {
        let id = export.id().to_owned();
        let handle = fleet.add(export).with_context(|| format!("device {id}"))?;
        handles.push((id, handle));
    }
    tracing::info!(devices = config.blocks.len(), "serving");
    while asked.recv() == Ok(Asked::Stats) {
        let stats = handles.iter().filter_map(|(id, handle)| {
            let stats = handle.call(ExportMessage::Stats).ok()?;
            Some((id.clone(), stats))
        });
        report(config.stats.as_deref(), &fleet.stats(), stats);
    }
    let cores = fleet.stats();
    // Before the listeners are closed, so that a successor finds either a socket that is served or none.
    drop(sockets);
    let stats = wind_down(&mut fleet, &config);
    report(config.stats.as_deref(), &cores, stats.into_iter());
    drop(fleet.stop());
    Ok(0)
}

/// Takes the devices off their cores, all at the same time: each finishes there what is in flight, and takes nothing more. Then
/// closes their images. Their last counters.
fn wind_down(fleet: &mut Fleet<Export<Blk>>, config: &Config) -> Vec<(String, ExportStats)> {
    let name = |block: &BlockConfig| format!("device {} ({})", block.id, block.source);
    let blocks = config.blocks.iter();
    let names: Names<String> = blocks
        .map(|block| (block.id.clone(), name(block)))
        .collect();
    let mut stats = Vec::new();
    let mut closing = Dropping::default();
    let take = |export: Export<Blk>| {
        let id = export.id().to_owned();
        stats.push((id.clone(), export.stats()));
        closing.begin(names[&id].clone(), export.into_device());
        id
    };
    let left = fleet.release();
    storage::wait(names.clone(), &left, take, || {});
    closing.wait();
    stats
}

/// The cores, without devices.
fn start(cores: &Cores) -> Result<Fleet<Export<Blk>>> {
    let monitor = Monitor::spawn(SILENCE, |stuck| {
        tracing::error!("a core has stopped answering: {stuck:?}");
        if stuck.cause == StuckCause::Panicked {
            // Its devices are gone, and their front ends would wait for ever. A successor resumes from their inflight regions.
            say!("a core has panicked: ending at once, with status {STATUS_STUCK}");
            ending::leave(STATUS_STUCK);
        }
    })
    .context("starting the monitor")?;
    FleetBuilder::new("core")
        .cpus(cores.cpus.clone())
        .idle(cores.idle)
        .force_sleep_every(cores.force_sleep)
        .control(ControlConfig {
            max_cores: cores.count,
            ..ControlConfig::default()
        })
        .monitor(monitor)
        .spawn()
        .context("starting a core")
}

fn export(block: &BlockConfig, cores: &Cores, sockets: &mut Sockets) -> Result<Export<Blk>> {
    let blk = disk::open(block)?;
    let listener = sockets.listen(&block.socket)?;
    let config = ExportConfig {
        weight: block.weight,
        call_delay_ns: cores.call_delay_ns,
        ..ExportConfig::new(block.id.clone())
    };
    Export::new(config, blk, listener).context("its socket")
}

/// The sockets that were made, removed with this. Device and inode number tell ours from one that somebody else has made in
/// its place.
#[derive(Default)]
struct Sockets(Vec<(PathBuf, (u64, u64))>);

fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

impl Sockets {
    /// Listens at `path`. A socket that nobody serves any more (its daemon was killed) is replaced.
    fn listen(&mut self, path: &Path) -> Result<UnixListener> {
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                bail!("{} exists and is no socket", path.display());
            }
            Ok(_) if UnixStream::connect(path).is_ok() => {
                bail!("{} is served by another process", path.display());
            }
            Ok(_) => std::fs::remove_file(path).with_context(|| {
                format!("the stale socket {} cannot be removed", path.display())
            })?,
            Err(_) => {}
        }
        let listener = UnixListener::bind(path)
            .with_context(|| format!("the socket {} cannot be made", path.display()))?;
        // One that has gone already is not ours to remove.
        self.0
            .extend(identity(path).map(|own| (path.to_owned(), own)));
        Ok(listener)
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for (path, own) in &self.0 {
            if identity(path) == Some(*own) {
                // Somebody else may have removed it.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Each device keeps several descriptors open: as many as the system lets us have.
fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid resource and a structure that outlives both calls.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// Writes all counters.
fn report(
    path: Option<&Path>,
    cores: &[(usize, Stats)],
    stats: impl Iterator<Item = (String, ExportStats)>,
) {
    let Some(path) = path else { return };
    let cores: Vec<serde_json::Value> = cores
        .iter()
        .map(|(number, stats)| {
            let core = &stats.core;
            serde_json::json!({
                "core": number,
                "busy_ns": core.busy_ns,
                "idle_ns": core.idle_ns,
                "asleep_ns": core.asleep_ns,
                "arming_ns": core.arming_ns,
                "cost": core.cost,
                "sweeps_busy": core.sweeps_busy,
                "sweeps_idle": core.sweeps_idle,
                "sleeps": core.sleeps,
                "sleeps_forced": core.sleeps_forced,
                "sleeps_refused": core.sleeps_refused,
                "wakes_spurious": core.wakes_spurious,
                "mutes": core.mutes,
            })
        })
        .collect();
    let devices: serde_json::Map<String, serde_json::Value> = stats
        .map(|(id, stats)| {
            let device = stats.device;
            let value = serde_json::json!({
                "connections": stats.connections,
                "turned_away": stats.turned_away,
                "kicks": stats.kicks,
                "calls": stats.calls,
                "requests": device.requests,
                "errors": device.errors,
                "read_bytes": device.read_bytes,
                "written_bytes": device.written_bytes,
                "backpressure": device.backpressure,
                "throttled": device.throttled,
                "violations": device.violations,
                "ring_faults": device.ring_faults,
                "cancelled": stats.cancelled + device.cancelled,
            });
            (id, value)
        })
        .collect();
    let text = serde_json::json!({ "cores": cores, "devices": devices }).to_string();
    if let Err(error) = std::fs::write(path, text) {
        tracing::warn!(path = %path.display(), %error, "the counters cannot be written");
    }
}
