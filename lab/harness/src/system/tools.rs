//! Tools of this machine that create and check images: `mke2fs`, `qemu-img` and others.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Returns a path as text, for an argument of a command.
pub fn text(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Runs a tool of this machine and returns its standard output. The search path includes the
/// directories of system tools, which a user's PATH may lack.
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
