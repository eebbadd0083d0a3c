//! A disk whose device model is a process of its own (`--disk …,worker=on`): values of its keys,
//! and what is said of that process. The rest is in the crate `disk-worker`.

use std::io;

use anyhow::{Error, Result, anyhow, bail};
use disk_worker::{Confined, Report, StartError};
pub use disk_worker::{WorkerConfig, WorkerDisk};
use vio::caged::Caged;

use crate::messages::say;

/// Reads the values of `worker` and `on-death`; `None`: the disk has none.
///
/// # Errors
/// Names the key and what it may be.
pub fn check(worker: Option<&str>, on_death: Option<&str>) -> Result<Option<WorkerConfig>> {
    let is_unconfined = match worker {
        None | Some("off") if on_death.is_some() => bail!("on-death is for worker=on"),
        None | Some("off") => return Ok(None),
        Some("on") => false,
        Some("unconfined") => true,
        Some(other) => bail!("worker is on, off or unconfined, not {other:?}"),
    };
    let restarts = match on_death {
        None | Some("restart") => true,
        Some("fail") => false,
        Some(other) => bail!("on-death is restart or fail, not {other:?}"),
    };
    Ok(Some(WorkerConfig {
        is_unconfined,
        restarts,
    }))
}

/// Starts the worker of `disk`, and makes the device of it. Messages name the disk `name`.
///
/// # Errors
/// The worker cannot start, or its disk is none.
pub fn start(name: String, disk: WorkerDisk, config: WorkerConfig) -> Result<Caged> {
    let running = disk_worker::start(disk, config, move |report| tell(&name, report));
    Ok(running.map_err(with_remedy)?.into_device()?)
}

/// Remedy for a worker that does not start.
fn with_remedy(error: StartError) -> Error {
    match error {
        StartError::Reported(_) => anyhow!(
            "{error} (worker=unconfined goes without a filter of system calls, worker=off without \
             a worker)"
        ),
        error => error.into(),
    }
}

/// Says what has become of a worker.
fn tell(name: &str, report: Report) {
    match report {
        Report::Started { confined, .. } => say_how_confined(name, &confined),
        Report::Replaced { how, .. } => {
            tracing::warn!("disk {name}: its worker has ended ({how}); another one goes on");
        }
        Report::Gone { how } => {
            say!("disk {name}: its worker has ended ({how}), and the disk needs a reset for ever");
        }
        Report::OtherDisk { how } => {
            say!("disk {name}: its worker has ended ({how}), and the next one shows another disk");
        }
        Report::NoOther { how, error } => {
            let error = with_remedy(error);
            say!("disk {name}: its worker has ended ({how}), and no other starts: {error:#}");
        }
    }
}

/// Says which part of its confinement a worker goes without.
fn say_how_confined(name: &str, confined: &Confined) {
    if confined.namespaces != 0 {
        let errno = i32::try_from(confined.namespaces).unwrap_or(libc::EIO);
        let error = io::Error::from_raw_os_error(errno);
        say!("disk {name}: its worker is in the host's namespaces: {error}");
    }
    if confined.calls == 0 {
        say!("disk {name}: its worker may make any system call");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_of_worker_and_on_death_is_read() {
        let check = |worker, on_death| check(worker, on_death).map_err(|error| error.to_string());
        let on = |is_unconfined, restarts| {
            Ok(Some(WorkerConfig {
                is_unconfined,
                restarts,
            }))
        };
        assert_eq!(check(None, None), Ok(None));
        assert_eq!(check(Some("off"), None), Ok(None));
        assert_eq!(check(Some("on"), None), on(false, true));
        assert_eq!(check(Some("on"), Some("restart")), on(false, true));
        assert_eq!(check(Some("unconfined"), Some("fail")), on(true, false));
        assert_eq!(
            check(None, Some("fail")),
            Err("on-death is for worker=on".into())
        );
        assert!(
            check(Some("yes"), None)
                .unwrap_err()
                .contains("on, off or unconfined")
        );
        assert!(
            check(Some("on"), Some("ignore"))
                .unwrap_err()
                .contains("restart or fail")
        );
    }
}
