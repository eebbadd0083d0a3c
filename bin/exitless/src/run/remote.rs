//! Disks that another process serves: descriptors made, the back end connected to, the function put under the owner.
//!
//! UNSAFETY: eventfds are borrowed to be cloned, for want of a safe way in their crate.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, Result};
use vhost_import::{Import, ImportConfig, ImportError};
use vmm_sys_util::eventfd::EventFd;

use super::attach::Parts;
use super::devices::next_source;
use super::remote_disk::RemoteDiskConfig;
use crate::irq::calls::KvmCalls;
use crate::pci::virtio::function::VirtioFunction;
use crate::vm::doorbells::{Doorbells, Places};
use crate::vm::owner::Owner;

/// Connects to the back end of `disk` and adds it. Answers where its doorbells will be.
///
/// # Errors
/// What the back end lacks, and what to do about it.
pub fn add(owner: &mut Owner, disk: RemoteDiskConfig, parts: &Parts<'_>) -> Result<Arc<Places>> {
    let RemoteDiskConfig {
        socket,
        queues,
        queue_size,
        id,
    } = disk;
    let source = next_source(owner)?;
    let doorbells = Doorbells::for_others(parts.vm.clone(), queues).context("doorbells")?;
    let calls =
        KvmCalls::new(parts.vm.clone(), parts.routes.clone(), queues).context("interrupt lines")?;
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
    let device = vio::Remote::new(import);
    let function = VirtioFunction::new(source, device.into()).with_calls(Box::new(calls));
    owner.add(function, Some(doorbells));
    Ok(places)
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

fn clones<'a>(fds: impl IntoIterator<Item = &'a EventFd>) -> io::Result<Vec<OwnedFd>> {
    fds.into_iter()
        .map(|fd| {
            // SAFETY: the descriptor belongs to `fd`, which outlives this call.
            unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }.try_clone_to_owned()
        })
        .collect()
}
