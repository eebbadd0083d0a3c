//! Tips behind an error of the command line: they name what help and manual know, and nothing that
//! these hide.

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Takes hidden names out of the tips of `error`, which is about `args` (behind the program's
/// name), and adds the one of the separator that `lab` needs.
pub fn mend(error: &mut clap::Error, command: &Command, args: &[String]) {
    drop_hidden(error, command, args);
    if error.kind() == ErrorKind::UnknownArgument
        && let Some(tip) = separator(command, args)
    {
        let mut tips = match error.remove(ContextKind::Suggested) {
            Some(ContextValue::StyledStrs(tips)) => tips,
            _ => Vec::new(),
        };
        tips.insert(0, tip.into());
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
}

fn drop_hidden(error: &mut clap::Error, command: &Command, args: &[String]) {
    let hidden = hidden_names(command, args);
    for kind in [
        ContextKind::SuggestedSubcommand,
        ContextKind::SuggestedArg,
        ContextKind::SuggestedValue,
    ] {
        let is_shown = |name: &str| !hidden.contains(name.trim_start_matches('-'));
        let left = match error.remove(kind) {
            Some(ContextValue::String(name)) if is_shown(&name) => ContextValue::String(name),
            Some(ContextValue::Strings(mut names)) => {
                names.retain(|name| is_shown(name));
                ContextValue::Strings(names)
            }
            _ => continue,
        };
        if !matches!(&left, ContextValue::Strings(names) if names.is_empty()) {
            error.insert(kind, left);
        }
    }
}

/// Returns the names of hidden subcommands, and of hidden options of the subcommand that `args`
/// call.
fn hidden_names(command: &Command, args: &[String]) -> std::collections::HashSet<String> {
    let called = args.iter().find_map(|word| command.find_subcommand(word));
    let options = called.unwrap_or(command).get_arguments();
    let options = options.filter(|arg| arg.is_hide_set());
    let options = options.filter_map(|arg| arg.get_long());
    let subcommands = command.get_subcommands().filter(|it| it.is_hide_set());
    let subcommands = subcommands.map(Command::get_name);
    options.chain(subcommands).map(str::to_owned).collect()
}

/// Returns the right form of a command such as `exitless-lab lab doctor`.
fn separator(command: &Command, args: &[String]) -> Option<String> {
    command.find_subcommand("lab")?;
    let at = args.iter().position(|word| word == "lab")?;
    let behind = &args[at + 1..];
    if behind.iter().any(|word| word == "--") {
        return None;
    }
    // Options of the lab that take a value come before the first word that is none.
    let first = behind.iter().position(|word| !word.starts_with('-'))?;
    let quoted = |words: &[String]| words.iter().map(|word| quoted(word)).collect::<Vec<_>>();
    let (options, inside) = behind.split_at(first);
    let words = [
        vec![format!("{} lab", command.get_name())],
        quoted(options),
        vec!["--".to_owned()],
        quoted(inside),
    ];
    let line = words.concat().join(" ");
    Some(format!(
        "what runs inside the lab stands behind `--`: {line}"
    ))
}

/// Returns a word, quoted as a shell takes it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%=,".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}
