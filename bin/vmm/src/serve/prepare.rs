//! Preparation of devices from a checked configuration until they can be reached, the same for a
//! start and for `--check`.
//!
//! A check goes through the same steps in the same order, so that it refuses whatever a start
//! refuses. It differs where a step would have an effect on others: images are opened in trial,
//! without a lock; a core's CPU is tried by a thread that ends; a socket is made under a name that
//! no client knows, and removed.

use std::collections::HashSet;
use std::io;
use std::os::unix::net::UnixListener;

use anyhow::{Context, Result, bail};
use vio::blk::Blk;
use vio::net::Net;

use super::config::{Config, Cores};
use super::disk::{self, ImagesInUse};
use super::net;
use super::of_device;
use super::purpose::Purpose;
use super::sockets::{self, Sockets};
use super::switch::Switches;
use crate::composition::Composition;
use crate::{lacks, output};

/// Checks all that can be checked before images are waited for.
///
/// # Errors
/// Names the option, or the device.
pub fn begin(config: &Config, composition: &dyn Composition) -> Result<()> {
    lacks::look_for_given()?;
    lacks::look_for_front_ends()?;
    if let Some(path) = &config.stats {
        output::check("--stats", path)?;
    }
    composition.check_daemon(config.blocks.len() + config.nets.len())?;
    lacks::say_if_nothing_is_kept();
    let mut places = HashSet::new();
    for (id, socket, _) in config.sockets() {
        let place = sockets::check(socket).with_context(|| of_device(id))?;
        if !places.insert(place) {
            let socket = socket.display();
            bail!("two devices have the socket {socket}, which one of them names by another path");
        }
    }
    try_cpus(&config.cores)
}

/// Opens the image of every device.
///
/// # Errors
/// Names the device, the file and what is wrong with it.
pub fn disks(config: &Config, purpose: Purpose, composition: &dyn Composition) -> Result<Vec<Blk>> {
    let mut images = ImagesInUse::default();
    let blocks = config.blocks.iter().enumerate();
    blocks
        .map(|(number, block)| {
            let wrap = |io| composition.disk(number, io);
            disk::open(block, wrap, purpose, &mut images).with_context(|| of_device(&block.id))
        })
        .collect()
}

/// Opens what is behind every network device; and the switches that some of them are on.
///
/// # Errors
/// Names the device, and what the host lacks.
pub fn nets(config: &Config, purpose: Purpose) -> Result<(Vec<Net>, Switches)> {
    let names: Vec<&str> = config.switched().map(|(switch, _, _)| switch).collect();
    let mut switches = Switches::new(&config.switches, &names)?;
    let mut nets = Vec::new();
    for net in &config.nets {
        let device = net::open(net, purpose, &mut switches);
        nets.push(device.with_context(|| of_device(&net.id))?);
    }
    Ok((nets, switches))
}

/// Makes the socket of every device, disks first.
///
/// # Errors
/// Names the device and its socket.
pub fn listen(
    config: &Config,
    purpose: Purpose,
    sockets: &mut Sockets,
) -> Result<Vec<UnixListener>> {
    config
        .sockets()
        .map(|(id, socket, access)| {
            let listener = sockets.listen(socket, access, purpose);
            listener.with_context(|| of_device(id))
        })
        .collect()
}

/// Checks that all could be served now; nothing is left of the attempt.
///
/// # Errors
/// Fails as a start would.
pub fn check(config: &Config, composition: &dyn Composition) -> Result<()> {
    begin(config, composition)?;
    disks(config, Purpose::Check, composition)?;
    nets(config, Purpose::Check)?;
    listen(config, Purpose::Check, &mut Sockets::default()).map(drop)
}

/// Pins a short-lived thread to each CPU, which is the only sure test: isolated CPUs are in no
/// mask, and yet a thread may move there. A core beyond the first is started by load, when it is
/// too late to say so.
fn try_cpus(cores: &Cores) -> Result<()> {
    for &cpu in &cores.cpus {
        let trial = std::thread::Builder::new()
            .spawn(move || sidecore::pin_this_thread(cpu))
            .and_then(|trial| {
                let ended = trial.join();
                ended.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
            });
        let pinned = trial.with_context(|| {
            format!(
                "cannot pin a core to cpu {cpu} (this process may run on {})",
                allowed()
            )
        });
        lacks::advise(
            pinned,
            "without --cpu and cpus= cores run wherever the host lets them",
        )?;
    }
    Ok(())
}

/// Returns the CPUs that this process may run on, as the kernel writes them.
fn allowed() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.map_or("others", str::trim).to_owned()
}
