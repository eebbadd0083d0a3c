//! Present places of subcommands, options and keys that moved from `exitless` to `exitless-lab`.
//!
//! Each is refused with one line that names its place. A command line that is understood stays as
//! it is.

use anyhow::{Result, bail};
use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::values::keys::Keys;
use crate::values::size;

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
/// Name of `exitless-lab`.
const LAB: &str = "exitless-lab";
/// An option in whose place there is a fault.
struct Moved {
    option: &'static str,
    /// The value that has moved, if the option is still there.
    value: Option<&'static str>,
    /// Commands that had it.
    of: &'static [&'static str],
    fault: &'static str,
}

const fn moved(option: &'static str, of: &'static [&'static str], fault: &'static str) -> Moved {
    Moved {
        option,
        value: None,
        of,
        fault,
    }
}

const OPTIONS: [Moved; 5] = [
    moved("--as-resident", &["run"], "memory:as-resident"),
    moved("--force-panic", &["serve"], "diskN:panic"),
    moved("--force-sleep", &["run", "serve"], "sidecores:sleep=N"),
    moved("--punch", &["run"], "memory:punch"),
    Moved {
        value: Some("stale"),
        ..moved("--mapper", &["run"], "mapper:stale")
    },
];

/// Returns a message with the new place of the subcommand `name` of `program`; `None`: it has not
/// moved.
pub fn subcommand(program: &Command, name: &str) -> Option<String> {
    let own = program.get_name();
    let is_elsewhere = own != LAB && SUBCOMMANDS.contains(&name);
    is_elsewhere.then(|| format!("{own} {name} is now {LAB} {name}"))
}

/// Returns a message with the new place of the subcommand or option that `error` is about. `args`
/// are behind the program's name.
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
    let called = args.iter().find_map(|word| program.find_subcommand(word));
    let called = called?.get_name();
    let value = text(ContextKind::InvalidValue);
    let moved = OPTIONS.iter().find(|moved| {
        let is_value = moved.value.is_none() || moved.value == value;
        moved.option == option && moved.of.contains(&called) && is_value
    })?;
    let value = moved.value.map(|value| format!(" {value}"));
    Some(format!(
        "{option}{} is now {LAB} {called} --fault {}",
        value.unwrap_or_default(),
        moved.fault
    ))
}

/// Refuses the key `latency` in a list of `run` or `serve` (`command`), of a disk that is named so
/// in faults.
///
/// # Errors
/// It is given.
pub fn refuse_latency(keys: &Keys<'_>, command: &str, disk: &str) -> Result<()> {
    let Some(value) = keys.peek("latency") else {
        return Ok(());
    };
    // It took 0, and 20K, where the fault takes microseconds.
    let microseconds = match size::bytes(value) {
        Ok(value) if value > 0 => value.to_string(),
        _ => "US".to_string(),
    };
    bail!("latency= is now {LAB} {command} --fault {disk}:latency={microseconds}")
}

/// Refuses the key `misbehave` in a list of `run`, of a part that is named so in faults.
///
/// # Errors
/// It is given.
pub fn refuse_misbehave(keys: &Keys<'_>, part: &str) -> Result<()> {
    match keys.peek("misbehave") {
        Some(value) => bail!("misbehave= is now {LAB} run --fault {part}:{value}"),
        None => Ok(()),
    }
}
