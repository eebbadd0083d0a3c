//! Disks that another process serves: descriptors made, the back end connected to, the function put under the owner.

use std::sync::Arc;

use anyhow::{Context, Result};
use guest_mem::PhysMem;
use vhost_import::{Import, ImportConfig, ImportError};

use super::attach::Parts;
use super::composed::Functions;
use super::eventfds::clones;
use super::plugs::Plugs;
use super::remote_disk::RemoteDiskConfig;
use crate::lacks;
use kvm::doorbells::{KvmDoorbells, Places};
use kvm::lines::KvmLines;
use virtio_pci::VirtioFunction;
use virtio_pci::function::NOTIFY_STRIDE;

/// Connects to the back end of `disk` and adds it. Answers its number, and where its doorbells will be.
///
/// # Errors
/// What the back end lacks, and what to do about it.
pub fn add<F: Functions, M: PhysMem>(
    plugs: &mut Plugs<'_, F, M>,
    disk: RemoteDiskConfig,
    parts: &Parts<'_>,
) -> Result<(usize, Arc<Places>)> {
    let RemoteDiskConfig {
        socket,
        queues,
        queue_size,
        id,
    } = disk;
    let source = parts.bus.reserve()?;
    let doorbells =
        KvmDoorbells::for_others(parts.vm.clone(), queues, NOTIFY_STRIDE).context("doorbells")?;
    let calls =
        KvmLines::new(parts.vm.clone(), parts.routes.clone(), queues).context("interrupt lines")?;
    let tried = calls.try_connect();
    lacks::advise(
        tried.context("KVM refuses to take interrupts from another process (KVM_IRQFD)"),
        "a seccomp profile has to allow all requests of KVM; a disk that this process serves, --disk path=…, needs none",
    )?;
    let kick = clones(doorbells.eventfds()).context("doorbells")?;
    let call = clones(calls.fds()).context("interrupt lines")?;
    let config = ImportConfig {
        queues,
        queue_size,
        ..ImportConfig::new(id, socket.clone())
    };
    let import = Import::connect(config, parts.ram.clone(), kick, call).map_err(|error| {
        let hint = hint(&error);
        anyhow::Error::new(error).context(format!("--disk socket={}{hint}", socket.display()))
    })?;
    let places = doorbells.places().context("doorbells for others")?;
    let function =
        VirtioFunction::new(source, vio::Remote::new(import)).with_lines(Box::new(calls));
    let number = plugs.add(function, doorbells);
    Ok((number, places))
}

/// What to do about it.
fn hint(error: &ImportError) -> &'static str {
    match error {
        ImportError::Connect { .. } => {
            " (start its server first: exitless serve --block id=…,path=…,socket=…)"
        }
        ImportError::Queues { .. } => " (ask for fewer queues, or start its server with more)",
        ImportError::QueueSize { .. } => " (ask for less with queue-size=…)",
        ImportError::Call(_) => " (does something else use it? it serves one machine at a time)",
        _ => "",
    }
}
