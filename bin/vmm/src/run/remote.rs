//! Devices that another process serves, or the host's kernel: descriptors made, the back end
//! connected to, the function put under the owner.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use guest_mem::PhysMem;
use net_ports::TapQueues;
use vhost_import::{Class, Import, ImportConfig, ImportError, KernelConfig, NetIdentity};
use vhost_kernel::{VhostNet, VhostNetError};

use super::attach::Parts;
use super::composed::Functions;
use super::eventfds::clones;
use super::pending_functions::PendingFunctions;
use crate::lacks;
use kvm::doorbells::{KvmDoorbells, Places};
use kvm::lines::KvmLines;
use virtio_pci::VirtioFunction;
use virtio_pci::function::NOTIFY_STRIDE;

/// Server of a device.
pub enum Server {
    /// Another process, behind this socket.
    Socket {
        /// Its path.
        socket: PathBuf,
        /// Class of the device.
        class: Class,
    },
    /// The host's kernel: a network device over a TAP interface.
    Kernel {
        /// The interface.
        name: String,
        /// Its queue.
        tap: TapQueues,
        /// Identity of the device that the guest reads.
        identity: NetIdentity,
    },
}

/// A device to be served by another process, or by the host's kernel.
pub struct RemoteConfig {
    /// Its server.
    pub server: Server,
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
    /// Returns the option that asked for it.
    pub fn option(&self) -> String {
        match &self.server {
            Server::Socket { socket, class } => {
                let option = match class {
                    Class::Block => "--disk",
                    Class::Net(_) => "--net",
                };
                format!("{option} socket={}", socket.display())
            }
            Server::Kernel { name, .. } => format!("--net tap={name},vhost=on"),
        }
    }
}

/// Connects to the back end of `device` and adds it. Returns its number, and the place of its
/// doorbells.
///
/// # Errors
/// A feature that the back end lacks, and what to do about it.
pub fn add<F: Functions, M: PhysMem>(
    pending: &mut PendingFunctions<'_, F, M>,
    device: RemoteConfig,
    parts: &Parts<'_>,
) -> Result<(usize, Arc<Places>)> {
    let option = device.option();
    let RemoteConfig {
        server,
        queues,
        queue_size,
        id,
        has_iommu,
    } = device;
    let is_disk = matches!(
        server,
        Server::Socket {
            class: Class::Block,
            ..
        }
    );
    let other = match is_disk {
        true => {
            "a seccomp profile has to allow all requests of KVM; a disk that this process serves, \
             --disk path=…, needs none"
        }
        false => {
            "a seccomp profile has to allow all requests of KVM; an interface that this process \
             serves, --net tap=…, needs none"
        }
    };
    let all = match &server {
        Server::Socket { class, .. } => class.device_queues(queues),
        Server::Kernel { .. } => queues,
    };
    let source = parts.bus.reserve()?;
    let doorbells =
        KvmDoorbells::for_others(parts.vm.clone(), all, NOTIFY_STRIDE).context("doorbells")?;
    let calls =
        KvmLines::new(parts.vm.clone(), parts.routes.clone(), all).context("interrupt lines")?;
    let tried = calls.try_connect();
    lacks::advise(
        tried.context("KVM refuses to take interrupts from others (KVM_IRQFD)"),
        other,
    )?;
    let kick = clones(doorbells.eventfds()).context("doorbells")?;
    let call = clones(calls.fds()).context("interrupt lines")?;
    let ram = parts.ram.clone();
    let import = match server {
        Server::Socket { socket, class } => {
            let start = match is_disk {
                true => " (start its server first: exitless serve --block id=…,path=…,socket=…)",
                false => " (start its server first)",
            };
            let config = ImportConfig {
                class,
                queues,
                queue_size,
                has_iommu,
                ..ImportConfig::new(id, socket)
            };
            Import::connect(config, ram, kick, call).map_err(|error| {
                let hint = match error {
                    ImportError::Connect { .. } => start,
                    _ => hint(&error),
                };
                anyhow::Error::new(error).context(format!("{option}{hint}"))
            })?
        }
        Server::Kernel { tap, identity, .. } => {
            let back_end = VhostNet::open(tap, ram.clone(), has_iommu).map_err(|error| {
                let hint = kernel_hint(&error);
                anyhow::Error::new(error).context(format!("{option}{hint}"))
            })?;
            let config = KernelConfig {
                name: id,
                identity,
                queue_size,
                has_iommu,
            };
            Import::attach(config, back_end, ram, kick, call).with_context(|| option.clone())?
        }
    };
    let places = doorbells.places().context("doorbells for others")?;
    let function =
        VirtioFunction::new(source, vio::Remote::new(import)).with_lines(Box::new(calls));
    let number = pending.add(function, doorbells);
    Ok((number, places))
}

/// Returns the advice about an error of another process.
fn hint(error: &ImportError) -> &'static str {
    match error {
        ImportError::Queues { .. } => " (ask for fewer queues, or start its server with more)",
        ImportError::QueueSize { .. } => " (ask for less with queue-size=…)",
        ImportError::NotOffered { what } if what.contains("IOMMU") || what.contains("IOVA") => {
            " (behind the emulated IOMMU its server has to translate, as exitless serve does; \
             others need --iommu none)"
        }
        ImportError::Call(_) => " (does something else use it? it serves one machine at a time)",
        _ => "",
    }
}

/// Returns the advice about an error of the kernel.
fn kernel_hint(error: &VhostNetError) -> &'static str {
    match error {
        VhostNetError::Open(_) => {
            " (modprobe vhost_net brings it, a container has to be given it; --net tap=… without \
             vhost=on needs none)"
        }
        VhostNetError::NotOffered { .. } => {
            " (behind the emulated IOMMU the host needs a kernel from 4.20 on; others need --iommu \
             none)"
        }
        _ => "",
    }
}
