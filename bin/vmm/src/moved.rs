//! Where subcommands, options and keys are now that `exitless` had before there was `exitless-lab`.
//!
//! Each is refused with one line that names its place. Nothing here is taken out of a command line
//! that is understood.

use anyhow::{Result, bail};
use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::values::keys::Keys;

/// Subcommands that are another program's.
const SUBCOMMANDS: [&str; 8] = [
    "demo",
    "eli",
    "lab",
    "payload",
    "selftest",
    "serve-lab",
    "swap-figures",
    "swap-lab",
];
/// That program.
const LAB: &str = "exitless-lab";
/// Options of `run` and `serve`, the value that has moved if not all have, and the fault in their
/// place.
const OPTIONS: [(&str, Option<&str>, &str); 5] = [
    ("--as-resident", None, "memory:as-resident"),
    ("--force-panic", None, "diskN:panic"),
    ("--force-sleep", None, "sidecores:sleep=N"),
    ("--mapper", Some("stale"), "mapper:stale"),
    ("--punch", None, "memory:punch"),
];

/// Where the subcommand `name` of `program` is now; `None`: not elsewhere.
pub fn subcommand(program: &Command, name: &str) -> Option<String> {
    let own = program.get_name();
    let is_elsewhere = own != LAB && SUBCOMMANDS.contains(&name);
    is_elsewhere.then(|| format!("{own} {name} is now {LAB} {name}"))
}

/// Where that is now which `error` is about, of `args` behind the program's name.
pub fn of_error(error: &clap::Error, program: &Command, args: &[String]) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    if error.kind() == ErrorKind::InvalidSubcommand {
        return subcommand(program, text(ContextKind::InvalidSubcommand)?);
    }
    // It may have its value behind it, or the value's name.
    let option = text(ContextKind::InvalidArg)?.split(['=', ' ']).next()?;
    let called = args
        .iter()
        .find(|word| program.find_subcommand(word).is_some());
    let called = called.filter(|name| ["run", "serve"].contains(&name.as_str()))?;
    let value = text(ContextKind::InvalidValue);
    let is_moved = |(name, only, _): &&(&str, Option<&str>, &str)| {
        *name == option && (only.is_none() || *only == value)
    };
    let (name, only, fault) = OPTIONS.iter().find(is_moved)?;
    let only = only.map(|value| format!(" {value}")).unwrap_or_default();
    Some(format!(
        "{name}{only} is now {LAB} {called} --fault {fault}"
    ))
}

/// Refuses the keys `latency` and `misbehave` in a list of `run` or `serve` (`command`), of a part that
/// is named so in faults.
///
/// # Errors
/// One of them is given.
pub fn refuse_keys(keys: &Keys<'_>, command: &str, part: &str) -> Result<()> {
    let now = |fault: &str| format!("is now {LAB} {command} --fault {part}:{fault}");
    if let Some(value) = keys.peek("latency") {
        bail!("latency= {}", now(&format!("latency={value}")));
    }
    if let Some(value) = keys.peek("misbehave") {
        bail!("misbehave= {}", now(value));
    }
    Ok(())
}
