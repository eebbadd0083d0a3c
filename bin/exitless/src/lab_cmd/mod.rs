//! `exitless lab`: runs a command inside the emulated host of the `lab` crate.

/// Arguments of `exitless lab`.
#[derive(clap::Args)]
pub struct LabArgs {
    /// The exitless command line to run inside.
    #[arg(last = true)]
    args: Vec<String>,
}

/// Runs `exitless lab`; the status is that of the command inside.
pub fn main(args: &LabArgs) -> anyhow::Result<u8> {
    anyhow::bail!(
        "the lab cannot start yet ({} arguments given)",
        args.args.len()
    )
}
