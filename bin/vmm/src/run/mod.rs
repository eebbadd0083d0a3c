//! `exitless run`: one virtual machine on this host's KVM.
//!
//! 1. `args`: the command line as clap sees it.
//! 2. `config`: checked. Every file is open and every value in range before anything starts; the
//!    first thing wrong is one line on stderr and exit status 2.
//! 3. `machine`: built step by step, run, wound down.
//! 4. `restart`: the same again, if its guest asked for a reset.
//!
//! With `--check` the machine is built and taken down again, and the guest does not run
//! (`check`).
//!
//! Exit status: see the module `ending`.

mod args;
mod assembly;
mod assigned;
mod attach;
mod balloon;
mod bars;
mod check;
mod composed;
mod config;
mod device;
mod devices;
mod disk;
mod disks;
mod ejection;
mod eventfds;
mod file_watch;
mod hints;
mod hole_punch;
mod host_faults;
mod ledger;
mod machine;
mod memory;
mod net;
mod pending_functions;
mod ram;
mod remote;
mod remote_disk;
mod restart;
mod stopped;
mod swapped;
mod switches;
mod units;
pub mod worker;

pub use args::RunArgs;
pub use assembly::{Assembly, MachineComposition};
pub use assign::reach::Reach;
pub use attach::{Attached, Parts, Running};
pub use composed::{AssignedDevice, Functions, Owner, Request, Units};
pub use devices::MakeFunctions;
pub use memory::{AskPager, Memory, OwnerHandle, PagerStatus, Paging, Pieces, Plain};

use std::sync::Arc;

use crate::ending::{self, STATUS_NOT_RESTARTED, signals};
use crate::messages::say;
use machine::After;

/// Runs `run`, by a program of this composition; the exit status.
///
/// # Errors
/// Nothing was started.
pub fn main(args: &RunArgs, composition: &Arc<dyn MachineComposition>) -> anyhow::Result<u8> {
    let restarts = restart::count();
    if restarts > 0 {
        restart::take_name_back();
    }
    let config = config::Config::check(args, restarts, composition.as_ref());
    if args.check {
        return config
            .and_then(|config| check::check(config, composition))
            .map(|()| 0);
    }
    let error = match config.and_then(|config| machine::run(config, composition)) {
        Ok(After::Exit(status)) => return Ok(status),
        Ok(After::Restart) => restart::again(restarts),
        Err(error) => {
            // It may be why something could not be waited for.
            if let Some(signal) = signals::end_asked_by() {
                say!("ended by signal {signal} before the machine was there");
                return Ok(ending::status_of_signal(signal));
            }
            if restarts == 0 {
                return Err(error);
            }
            error
        }
    };
    say!(
        "the guest asked for a reset, but its machine cannot be started again: {error:#} \
         (--on-reboot exit ends with status 3 instead)"
    );
    Ok(STATUS_NOT_RESTARTED)
}

/// Errors in the lists of keys, whether or not the files exist that they name: for tests of
/// examples.
pub fn misunderstood(args: &RunArgs) -> Vec<String> {
    let disks = args.disk.iter().filter(|text| !text.starts_with("socket="));
    let disks = disks.map(|text| disk::DiskConfig::check(text, 0).map(drop));
    let nets = args.net.iter().filter(|text| !text.starts_with("tap="));
    let nets = nets.map(|text| net::NetConfig::check(text, 0).map(drop));
    let memory = std::iter::once(ram::RamConfig::check(&args.memory).map(drop));
    let devices = args.device.iter();
    let devices = devices.map(|text| device::DeviceConfig::check(text, args.iommu).map(drop));
    disks
        .chain(nets)
        .chain(devices)
        .chain(memory)
        .filter_map(Result::err)
        .map(|error| format!("{error:#}"))
        // Files of the reader's, and how much memory there is.
        .filter(|text| !text.contains("cannot be opened") && !text.contains("more than this host"))
        .collect()
}
