//! `exitless serve`: block devices for any VMM, over vhost-user, all served by a few cores.
//!
//! `args` flags → `config` a checked configuration (from flags or a TOML file, one check for both) → `disk` the back
//! end of each device → `daemon` sockets, exports, sidecores, until a signal ends it.
//!
//! What happens to requests is none of this module's affair: see the crates `vhost-export`, `vio` and `sidecore`.

mod args;
mod config;
mod daemon;
mod disk;
#[cfg(test)]
mod tests;

use anyhow::Result;

pub use args::ServeArgs;

/// Runs the daemon; the exit status.
pub fn main(args: &ServeArgs) -> Result<u8> {
    let config = config::Config::load(args)?;
    if args.check {
        println!(
            "{} devices, {} cores: the configuration is good",
            config.blocks.len(),
            config.cores.count
        );
        return Ok(0);
    }
    daemon::run(config)
}
