//! `vhost-blk`: see `vhost-blk help`.
#![forbid(unsafe_code)]

mod bench;
mod cli;

use anyhow::Result;

fn main() -> Result<()> {
    cli::run()
}
