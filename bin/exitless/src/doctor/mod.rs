//! `exitless doctor`: what this host offers to virtual machines.

/// Arguments of `exitless doctor`.
#[derive(clap::Args)]
pub struct DoctorArgs {
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// Runs `exitless doctor`; the status is 0 when virtual machines can run here.
pub fn main(args: &DoctorArgs) -> anyhow::Result<u8> {
    anyhow::bail!("no probe yet (json: {})", args.json)
}
