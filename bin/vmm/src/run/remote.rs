//! Devices that another process serves: descriptors made, the back end connected to, the function put under the owner.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use guest_mem::PhysMem;
use vhost_import::{Class, Import, ImportConfig, ImportError};

use super::attach::Parts;
use super::composed::Functions;
use super::eventfds::clones;
use super::plugs::Plugs;
use crate::lacks;
use kvm::doorbells::{KvmDoorbells, Places};
use kvm::lines::KvmLines;
use virtio_pci::VirtioFunction;
use virtio_pci::function::NOTIFY_STRIDE;

/// A device to be served by another process.
pub struct RemoteConfig {
    /// The back end's socket.
    pub socket: PathBuf,
    /// What it serves.
    pub class: Class,
    /// Queues.
    pub queues: u16,
    /// Entries of each.
    pub queue_size: u16,
    /// Its name in the log.
    pub id: String,
    /// The guest's IOMMU is before it.
    pub has_iommu: bool,
}

impl RemoteConfig {
    /// The option that asked for it.
    pub fn option(&self) -> String {
        let option = match self.class {
            Class::Block => "--disk",
            Class::Net(_) => "--net",
        };
        format!("{option} socket={}", self.socket.display())
    }
}

/// Connects to the back end of `device` and adds it. Answers its number, and where its doorbells will be.
///
/// # Errors
/// What the back end lacks, and what to do about it.
pub fn add<F: Functions, M: PhysMem>(
    plugs: &mut Plugs<'_, F, M>,
    device: RemoteConfig,
    parts: &Parts<'_>,
) -> Result<(usize, Arc<Places>)> {
    let option = device.option();
    let RemoteConfig {
        socket,
        class,
        queues,
        queue_size,
        id,
        has_iommu,
    } = device;
    let other = match class {
        Class::Block => {
            "a seccomp profile has to allow all requests of KVM; a disk that this process serves, --disk path=…, needs none"
        }
        Class::Net(_) => {
            "a seccomp profile has to allow all requests of KVM; an interface that this process serves, --net tap=…, needs none"
        }
    };
    let start = match class {
        Class::Block => " (start its server first: exitless serve --block id=…,path=…,socket=…)",
        Class::Net(_) => " (start its server first)",
    };
    let source = parts.bus.reserve()?;
    let doorbells =
        KvmDoorbells::for_others(parts.vm.clone(), queues, NOTIFY_STRIDE).context("doorbells")?;
    let calls =
        KvmLines::new(parts.vm.clone(), parts.routes.clone(), queues).context("interrupt lines")?;
    let tried = calls.try_connect();
    lacks::advise(
        tried.context("KVM refuses to take interrupts from another process (KVM_IRQFD)"),
        other,
    )?;
    let kick = clones(doorbells.eventfds()).context("doorbells")?;
    let call = clones(calls.fds()).context("interrupt lines")?;
    let config = ImportConfig {
        class,
        queues,
        queue_size,
        has_iommu,
        ..ImportConfig::new(id, socket)
    };
    let import = Import::connect(config, parts.ram.clone(), kick, call).map_err(|error| {
        let hint = match error {
            ImportError::Connect { .. } => start,
            _ => hint(&error),
        };
        anyhow::Error::new(error).context(format!("{option}{hint}"))
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
        ImportError::Queues { .. } => " (ask for fewer queues, or start its server with more)",
        ImportError::QueueSize { .. } => " (ask for less with queue-size=…)",
        ImportError::NotOffered { what } if what.contains("IOMMU") || what.contains("IOVA") => {
            " (behind the emulated IOMMU its server has to translate, as exitless serve does; others need --iommu none)"
        }
        ImportError::Call(_) => " (does something else use it? it serves one machine at a time)",
        _ => "",
    }
}
