//! Entry point of `vhost-net`: see `vhost-net help`.
#![forbid(unsafe_code)]

mod bench;
mod cli;

use anyhow::Result;

fn main() -> Result<()> {
    cli::run()
}
