//! `exitless serve`: block devices for any VMM, over vhost-user, all served by a few cores.
//!
//! `args` flags → `config` a checked configuration (from flags or a TOML file, one check for both) → `disk` the back
//! end of each device → `daemon` `sockets` (`access`: for whom), exports, sidecores, until a signal ends it; `counters` what they have done.
//!
//! What happens to requests is none of this module's affair: see the crates `vhost-export`, `vio` and `sidecore`.

mod access;
mod args;
mod config;
mod counters;
mod daemon;
mod disk;
mod sockets;
#[cfg(test)]
mod tests;

use anyhow::{Context, Result};

pub use args::ServeArgs;

use crate::output;
use config::BlockConfig;

/// Says which device an error is of.
fn of_device(block: &BlockConfig) -> String {
    format!("device {}", block.id)
}

/// Runs the daemon; the exit status.
pub fn main(args: &ServeArgs) -> Result<u8> {
    let config = config::Config::load(args)?;
    if let Some(path) = &config.stats {
        output::check("--stats", path)?;
    }
    for block in &config.blocks {
        sockets::check(&block.socket).with_context(|| of_device(block))?;
    }
    if args.check {
        for block in &config.blocks {
            disk::check(block).with_context(|| of_device(block))?;
        }
        println!("{}: the configuration is good", config.extent());
        return Ok(0);
    }
    daemon::run(config)
}
