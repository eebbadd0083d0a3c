//! Help texts and manual pages, from one text for each command.
//!
//! The text behind a command's options (clap's `after_long_help`) is written once, in a plain
//! form that [`page`] reads: headings, paragraphs, entries, and verbatim blocks, which are what a
//! line indented by four or more is. From it come
//! - the help: clap wraps paragraphs to the terminal. It would wrap examples, too, which a shell
//!   could not read then; so their blanks are handed to clap as ones that it does not break at
//!   ([`unbroken`]), and put back when the text is printed;
//! - the manual page (`roff`), where verbatim blocks are neither filled nor hyphenated.

pub mod page;
mod roff;
pub mod tips;

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Command;
use clap::builder::StyledStr;

pub use roff::page as manual;

/// Stands for a blank of a verbatim block until the text is printed. Nothing else in a help has
/// one.
const UNBROKEN: char = '\u{a0}';

/// Returns the command with verbatim blocks that are not wrapped, here and in all subcommands. For
/// [`print()`].
pub fn unbroken(command: Command) -> Command {
    let kept = |text: &StyledStr| keep_blanks(&text.to_string());
    let after = command.get_after_long_help().map(kept);
    let mut command = match after {
        Some(text) => command.after_long_help(text),
        None => command,
    };
    command = command.mut_args(|arg| match arg.get_long_help().map(kept) {
        Some(text) => arg.long_help(text),
        None => arg,
    });
    command.mut_subcommands(unbroken)
}

fn keep_blanks(text: &str) -> String {
    let lines = text.lines().map(|line| match page::is_verbatim(line) {
        true => line.replace(' ', &UNBROKEN.to_string()),
        false => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns a rendered help or message as it is to be printed.
pub fn printable(text: &str) -> String {
    text.replace(UNBROKEN, " ")
}

/// Prints what clap has to say, help or an error about `args`, and ends with its status.
pub fn print(mut error: clap::Error, command: &Command, args: &[String]) -> ExitCode {
    tips::mend(&mut error, command, args);
    let to_error = error.use_stderr();
    let is_terminal = match to_error {
        true => std::io::stderr().is_terminal(),
        false => std::io::stdout().is_terminal(),
    };
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let text = error.render();
    let text = match is_terminal && !is_set("NO_COLOR") {
        true => printable(&text.ansi().to_string()),
        false => printable(&text.to_string()),
    };
    // A reader that went away has seen enough.
    let _ = match to_error {
        true => std::io::stderr().write_all(text.as_bytes()),
        false => std::io::stdout().write_all(text.as_bytes()),
    };
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Writes the manual page of the program and of each subcommand into a folder.
///
/// # Errors
/// Names the file.
pub fn write_manuals(command: &Command, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let subcommands = command.get_subcommands().filter(|it| !it.is_hide_set());
    let names = subcommands.map(|it| Some(it.get_name()));
    for name in [None].into_iter().chain(names) {
        let program = command.get_name();
        let file = folder.join(match name {
            Some(name) => format!("{program}-{name}.1"),
            None => format!("{program}.1"),
        });
        let text = manual(command, name)?;
        std::fs::write(&file, text).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Args;

    use crate::run::RunArgs;
    use crate::serve::ServeArgs;
    use crate::values::size;

    use super::*;

    #[test]
    fn the_helps_units_of_size_are_those_that_are_understood() {
        assert_eq!(size::number("3T").unwrap(), 3 << 40);
        let commands = [
            RunArgs::augment_args(Command::new("run")),
            ServeArgs::augment_args(Command::new("serve")),
        ];
        let mut found = 0;
        for mut command in commands {
            let help = format!("{} {}", command.render_help(), command.render_long_help());
            let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
            for (at, _) in help.match_indices("with K,") {
                let units = &help[at + "with ".len()..];
                assert!(units.starts_with(size::UNITS), "{units:.60}");
                found += 1;
            }
        }
        assert!(found >= 2, "{found}");
    }
}
