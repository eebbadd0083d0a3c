//! Manual pages (roff with the macros of man(7)), of commands as clap knows them.
//!
//! Lines are filled without hyphenation, which would break names of options; verbatim blocks are
//! not filled.

use std::fmt::Write;

use anyhow::{Context, Result};
use clap::{Arg, ArgAction, Command};

use super::page::{self, Block, HEADINGS, Section};

/// Sections of every page that its command does not write itself, in the plain form. Files are
/// those of the program.
const COMMON: &str = "\
Exit status:
  0  The command has done what it was asked for.
  1  It failed under way, or a check that it makes did not hold.
  2  It could not start; one line on standard error says why.

Signals:
  SIGINT, SIGTERM  The command ends at once.

Environment:
  RUST_LOG  What the log has, where --log is not given: a level (off, error, warn, info, debug, trace), or a list of levels by module such as `warn,machine=debug`.
  NO_COLOR  If it is set and not empty, nothing is coloured.";

/// Returns the page of the program, or of one of its subcommands.
///
/// # Errors
/// There is no such subcommand.
pub fn page(program: &Command, subcommand: Option<&str>) -> Result<String> {
    let mut program = program.clone();
    // So that each subcommand knows its whole name and the options of all.
    program.build();
    let command = match subcommand {
        Some(name) => program.find_subcommand(name).with_context(|| {
            let own = program.get_name();
            format!("there is no subcommand {name:?}; see `{own} help`")
        })?,
        None => &program,
    };
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut text, &program, command);
    Ok(text)
}

fn write(out: &mut String, program: &Command, command: &Command) -> std::fmt::Result {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let version = program.get_version().unwrap_or_default();
    writeln!(
        out,
        ".TH {name} 1 \"\" \"{}\" \"User Commands\"",
        line(&format!("{} {version}", program.get_name()))
    )?;
    // Flush left, and no word is broken.
    out.push_str(".nh\n.ad l\n");
    out.push_str(".SH NAME\n");
    let about = command.get_about().map(ToString::to_string);
    let about = about.unwrap_or_default();
    writeln!(
        out,
        "{} \\- {}",
        line(name),
        line(about.trim_end_matches('.'))
    )?;
    out.push_str(".SH SYNOPSIS\n");
    synopsis(out, command)?;
    out.push_str(".SH DESCRIPTION\n");
    let long = command.get_long_about().map(ToString::to_string);
    prose(out, &long.unwrap_or(about))?;
    let after = command.get_after_long_help().or(command.get_after_help());
    let after = after.map(ToString::to_string).unwrap_or_default();
    let own = page::sections(&after);
    for section in own.iter().filter(|section| section.heading.is_empty()) {
        blocks(out, &section.blocks)?;
    }
    options(out, command)?;
    if command.has_subcommands() {
        out.push_str(".SH COMMANDS\n");
        for subcommand in shown(command) {
            let about = subcommand.get_about().map(ToString::to_string);
            let name = subcommand.get_display_name().unwrap_or_default();
            writeln!(
                out,
                ".TP\n\\fB{}\\fR(1)\n{}",
                line(name),
                filled(&about.unwrap_or_default())
            )?;
        }
    }
    let of_program = program.get_after_long_help().map(ToString::to_string);
    let mut common = page::sections(&of_program.unwrap_or_default());
    common.retain(|section| section.heading == "Files");
    common.extend(page::sections(COMMON));
    for heading in HEADINGS {
        let of = |sections: &[Section]| sections.iter().find(|it| it.heading == heading).cloned();
        if let Some(section) = of(&own).or_else(|| of(&common)) {
            writeln!(out, ".SH {}", heading.to_uppercase())?;
            blocks(out, &section.blocks)?;
        }
    }
    out.push_str(".SH SEE ALSO\n");
    let own_name = command.get_display_name();
    let mut others: Vec<String> = vec![program.get_name().to_owned()];
    others.extend(shown(program).filter_map(|it| it.get_display_name().map(str::to_owned)));
    others.retain(|other| Some(other.as_str()) != own_name.or(Some(program.get_name())));
    let others: Vec<_> = others
        .iter()
        .map(|it| format!("\\fB{}\\fR(1)", line(it)))
        .collect();
    writeln!(out, "{}", others.join(",\n"))
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    let subcommands = command.get_subcommands();
    subcommands.filter(|it| !it.is_hide_set() && it.get_name() != "help")
}

/// Options before arguments, those that are required first.
fn shown_args(command: &Command) -> Vec<&Arg> {
    let mut args: Vec<&Arg> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set())
        .collect();
    args.sort_by_key(|arg| (arg.is_positional(), !arg.is_required_set()));
    args
}

/// Returns the names of an option's value.
fn value(arg: &Arg) -> Option<String> {
    let takes = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let names = arg.get_value_names().filter(|_| takes)?;
    let names: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
    Some(names.join(" "))
}

fn flags(arg: &Arg, between: &str) -> String {
    let short = arg.get_short().map(|short| format!("-{short}"));
    let long = arg.get_long().map(|long| format!("--{long}"));
    let flags = short.into_iter().chain(long);
    let flags: Vec<String> = flags.map(|it| bold(&it)).collect();
    flags.join(between)
}

fn bold(text: &str) -> String {
    format!("\\fB{}\\fR", line(text))
}

fn synopsis(out: &mut String, command: &Command) -> std::fmt::Result {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    write!(out, "\\fB{}\\fR", line(name))?;
    for arg in shown_args(command) {
        let value = value(arg).map(|value| format!("\\fI{}\\fR", line(&value)));
        let text = match (arg.is_positional(), value) {
            (true, value) if arg.is_last_set() => format!("\\-\\- {}", value.unwrap_or_default()),
            (true, value) => value.unwrap_or_default(),
            // One of its names will do.
            (false, Some(value)) => format!("{} {value}", flags(arg, "|")),
            (false, None) => flags(arg, "|"),
        };
        let repeats = matches!(arg.get_action(), ArgAction::Append);
        let dots = if repeats { "\\|.\\|.\\|." } else { "" };
        match arg.is_required_set() {
            true => write!(out, "\n{text}{dots}")?,
            false => write!(out, "\n[{text}]{dots}")?,
        }
    }
    if command.has_subcommands() {
        write!(out, "\n\\fICOMMAND\\fR .\\|.\\|.")?;
    }
    out.push('\n');
    Ok(())
}

fn options(out: &mut String, command: &Command) -> std::fmt::Result {
    let args = shown_args(command);
    if args.is_empty() {
        return Ok(());
    }
    out.push_str(".SH OPTIONS\n");
    for arg in args {
        let value = value(arg).map(|value| format!("\\fI{}\\fR", line(&value)));
        let others = arg.get_visible_aliases().unwrap_or_default();
        let others = others.into_iter().map(|long| bold(&format!("--{long}")));
        let names: Vec<String> = [flags(arg, ", ")].into_iter().chain(others).collect();
        let names = names.join(", ");
        let both = [Some(names).filter(|names| !names.is_empty()), value];
        let both: Vec<String> = both.into_iter().flatten().collect();
        writeln!(out, ".TP\n{}", both.join(" "))?;
        let help = arg.get_long_help().or(arg.get_help());
        let mut help = help.map(ToString::to_string).unwrap_or_default();
        let defaults = arg.get_default_values().iter();
        let defaults: Vec<_> = defaults.map(|it| it.to_string_lossy()).collect();
        let takes = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
        if takes && !defaults.is_empty() && !arg.is_hide_default_value_set() {
            help.push_str(&format!(" [default: {}]", defaults.join(",")));
        }
        indented(out, &help)?;
        let values = arg.get_possible_values();
        let values = values.iter().filter(|it| !it.is_hide_set() && takes);
        for (index, value) in values.enumerate() {
            if index == 0 {
                out.push_str(".RS\n");
            }
            let help = value.get_help().map(ToString::to_string);
            writeln!(
                out,
                ".TP\n\\fB{}\\fR\n{}",
                line(value.get_name()),
                filled(&help.unwrap_or_default())
            )?;
        }
        let has_values = arg
            .get_possible_values()
            .iter()
            .any(|it| !it.is_hide_set() && takes);
        if has_values {
            out.push_str(".RE\n");
        }
    }
    Ok(())
}

/// Writes the text below a tag: its first paragraph is there, others are indented like it.
fn indented(out: &mut String, text: &str) -> std::fmt::Result {
    let sections = page::sections(text);
    let all = sections.iter().flat_map(|section| &section.blocks);
    for (index, block) in all.enumerate() {
        match block {
            Block::Verbatim(lines) => verbatim(out, lines)?,
            Block::Paragraph(text) | Block::Entry(_, text) => {
                if index > 0 {
                    out.push_str(".IP\n");
                }
                writeln!(out, "{}", filled(text))?;
            }
        }
    }
    Ok(())
}

fn prose(out: &mut String, text: &str) -> std::fmt::Result {
    page::sections(text)
        .iter()
        .try_for_each(|section| blocks(out, &section.blocks))
}

fn blocks(out: &mut String, blocks: &[Block]) -> std::fmt::Result {
    for block in blocks {
        match block {
            Block::Paragraph(text) => writeln!(out, ".PP\n{}", filled(text))?,
            Block::Entry(tag, text) => {
                writeln!(out, ".TP\n\\fB{}\\fR\n{}", line(tag), filled(text))?
            }
            Block::Verbatim(lines) => verbatim(out, lines)?,
        }
    }
    Ok(())
}

fn verbatim(out: &mut String, lines: &[String]) -> std::fmt::Result {
    out.push_str(".RS 4\n.nf\n");
    for text in lines {
        writeln!(out, "{}", line(text))?;
    }
    out.push_str(".fi\n.RE\n");
    Ok(())
}

/// Returns a paragraph, in which a long word (a path, a list of names) may be broken behind its
/// separators.
fn filled(text: &str) -> String {
    /// Letters of a word that fits any terminal.
    const SHORT: usize = 30;
    let words = text.split(' ').map(|word| match word.chars().count() {
        0..=SHORT => line(word),
        _ => word
            .split_inclusive(['/', ',', '|'])
            .map(line)
            .collect::<Vec<_>>()
            .join("\\:"),
    });
    let text = words.collect::<Vec<_>>().join(" ");
    // Of words, only the first may pass for a request.
    text.replace(" \\&", " ")
}

/// Returns one line of text, in which nothing is a request or an escape, and quotes and dashes are
/// those of a keyboard.
fn line(text: &str) -> String {
    let mut out = String::new();
    if text.starts_with(['.', '\'']) {
        out.push_str("\\&");
    }
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\(rs"),
            '-' => out.push_str("\\-"),
            '\'' => out.push_str("\\(aq"),
            '`' => out.push_str("\\(ga"),
            '^' => out.push_str("\\(ha"),
            '~' => out.push_str("\\(ti"),
            '"' => out.push_str("\\(dq"),
            '\n' => out.push(' '),
            c if c.is_ascii() => out.push(c),
            // Any writer of roff knows a character by its number.
            c => {
                let _ = write!(out, "\\[u{:04X}]", u32::from(c));
            }
        }
    }
    out
}
