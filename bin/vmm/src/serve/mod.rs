//! `exitless serve`: block and network devices for any VMM, over vhost-user, all served by a few
//! cores.
//!
//! `args` flags → `config` a checked configuration (from flags or a TOML file, one check for both)
//! → `prepare` the way to devices that can be reached, of a start and of `--check`: `disk` the back
//! end of each disk, `net` each network device, `switch` switches between those, `sockets`
//! (`access`: for whom) → `daemon` exports (`poller`), sidecores, until a signal ends it;
//! `counters` what they have done.
//!
//! Requests are not handled here: see the crates `vhost-export`, `vio` and `sidecore`.

mod access;
mod args;
mod config;
mod counters;
mod daemon;
mod disk;
mod fields;
mod forward;
mod net;
mod poller;
mod prepare;
mod purpose;
mod sockets;
mod switch;
#[cfg(test)]
mod tests;
mod uplink;

use anyhow::Result;

pub use args::ServeArgs;

use crate::composition::Composition;

/// Says which device an error is of.
fn of_device(id: &str) -> String {
    format!("device {id}")
}

/// Runs the daemon of a program of this composition; the exit status.
///
/// # Errors
/// Nothing was started, or a failure under way.
pub fn main(args: &ServeArgs, composition: &dyn Composition) -> Result<u8> {
    let config = config::Config::load(args)?;
    if args.check {
        prepare::check(&config, composition)?;
        println!("{}: the configuration is good", config.extent());
        return Ok(0);
    }
    daemon::run(config, composition)
}

/// Checks that flags and file say what can be served, if it is there: for tests of examples.
///
/// # Errors
/// Names the file, the device and the field.
pub fn understand(args: &ServeArgs) -> Result<()> {
    config::Config::load(args).map(drop)
}
