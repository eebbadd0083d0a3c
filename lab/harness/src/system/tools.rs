//! Tools of this machine that make images and look at them: `mke2fs`, `qemu-img` and their like.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A path as an argument.
pub fn text(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Runs a tool of this machine, and answers what it writes; those of file systems are where a
/// user's PATH need not lead.
pub fn tool(name: &str, args: &[&str]) -> Result<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    let ran = Command::new("/bin/sh")
        .args(["-c", "exec \"$@\"", "sh", name])
        .args(args)
        .env("PATH", format!("{path}:/usr/sbin:/sbin"))
        .output()
        .with_context(|| format!("starting {name}"))?;
    let said = String::from_utf8_lossy(&ran.stdout);
    let errors = String::from_utf8_lossy(&ran.stderr);
    ensure!(
        ran.status.success(),
        "{name} {}: {said}{errors}",
        args.join(" ")
    );
    Ok(said.into_owned())
}
