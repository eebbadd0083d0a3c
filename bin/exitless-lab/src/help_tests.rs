//! Checks of examples: each is taken out of the help, the manual page or the document as a user
//! would copy it, read as a shell reads it, and given to the command line's own parser.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};

use clap::{Command, CommandFactory, Parser};
use vmm::help::page::{self, Block, HEADINGS};
use vmm::help::{manual, printable, tips, unbroken, write_manuals};
use vmm::run::RunArgs;
use vmm::serve::ServeArgs;

use crate::faults::{Faults, Program};
use crate::{Cli, Command as OfLab};

/// Returns the programs' command lines.
fn programs() -> [Command; 2] {
    [exitless::Cli::command(), Cli::command()]
}

/// Programs beside ours that examples begin with.
const OTHERS: [&str; 15] = [
    "cargo",
    "cd",
    "cloud-hypervisor",
    "cp",
    "echo",
    "git",
    "make",
    "man",
    "mkdir",
    "mount",
    "qemu-img",
    "qemu-system-x86_64",
    "scripts/setup.sh",
    "vhost-blk",
    "vhost-net",
];

/// Returns the commands of a text, each as the words that a shell makes of it: without redirections
/// and comments.
fn shell(text: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut is_redirected = false;
    let mut chars = text.chars().peekable();
    let end_word =
        |word: &mut Option<String>, commands: &mut Vec<Vec<String>>, redirected: &mut bool| {
            if let Some(word) = word.take()
                && !std::mem::take(redirected)
            {
                commands.last_mut().unwrap().push(word);
            }
        };
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('\n') | None => {}
                Some(c) => word.get_or_insert_default().push(c),
            },
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next().expect("a quote is closed") {
                        '\'' => break,
                        c => word.push(c),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next().expect("a quote is closed") {
                        '"' => break,
                        '\\' if chars.peek().is_some_and(|c| "\"\\$`\n".contains(*c)) => {
                            word.extend(chars.next().filter(|c| *c != '\n'));
                        }
                        c => word.push(c),
                    }
                }
            }
            '#' if word.is_none() => while chars.next_if(|c| *c != '\n').is_some() {},
            '\n' | ';' | '&' | '|' => {
                end_word(&mut word, &mut commands, &mut is_redirected);
                assert!(!is_redirected, "a redirection to nothing: {text}");
                commands.push(Vec::new());
            }
            '>' | '<' => {
                // A number before it is a descriptor's.
                word = word.filter(|word| !word.bytes().all(|byte| byte.is_ascii_digit()));
                end_word(&mut word, &mut commands, &mut is_redirected);
                is_redirected = true;
            }
            c if c.is_whitespace() => end_word(&mut word, &mut commands, &mut is_redirected),
            c => word.get_or_insert_default().push(c),
        }
    }
    end_word(&mut word, &mut commands, &mut is_redirected);
    commands.retain(|words| !words.is_empty());
    commands
}

#[test]
fn a_shell_makes_these_words() {
    let text = "a 'b c' \"d \\\" e\" \\\n  f\\ g # h\n\ni &\nj 2>/dev/null >k l | m; # n";
    let expected: [&[&str]; 4] = [&["a", "b c", "d \" e", "f g"], &["i"], &["j", "l"], &["m"]];
    assert_eq!(shell(text), expected);
}

/// Understands commands that a shell would start; `place` is for messages. How many were ours.
fn understand(text: &str, place: &str) -> usize {
    assert!(!text.contains('…'), "{place}: left something out: {text}");
    let mut count = 0;
    for words in shell(text) {
        let is_assignment = |word: &&String| word.contains('=') && !word.starts_with('-');
        let start = words.iter().take_while(is_assignment).count();
        let words = &words[start..];
        let Some(program) = words.first() else {
            continue;
        };
        if ["exitless", "exitless-lab"].contains(&program.as_str()) {
            understand_ours(words, place);
            count += 1;
        } else {
            assert!(
                OTHERS.contains(&program.as_str()),
                "{place}: what is {program:?} in {text}?"
            );
            if program == "make" {
                let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
                let targets = words[1..].iter().filter(|word| !word.contains('='));
                for target in targets {
                    let rule = format!("\n{target}:");
                    assert!(
                        makefile.contains(&rule),
                        "{place}: there is no make {target}"
                    );
                }
            }
        }
    }
    count
}

fn understand_ours(words: &[String], place: &str) {
    let at = |error: &dyn std::fmt::Display| format!("{place}: {words:?}: {error}");
    if words[0] == "exitless" {
        let cli = exitless::Cli::try_parse_from(words);
        let cli = cli.unwrap_or_else(|error| panic!("{}", at(&error)));
        match cli.command {
            exitless::Command::Serve(args) => understand_serve(&args, &at),
            exitless::Command::Run(args) => understand_run(&args, &at),
            _ => {}
        }
        return;
    }
    let cli = Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{}", at(&error)));
    match cli.command {
        OfLab::Serve(args) => {
            understand_serve(&args.serve, &at);
            understand_faults(Program::Daemon, &args.fault, &at);
        }
        OfLab::Run(args) => {
            understand_run(&args.run, &at);
            understand_faults(Program::Machine, &args.fault, &at);
        }
        OfLab::Lab(args) => {
            if let Some(inside) = args.inside().filter(|inside| !inside.is_empty()) {
                let inside: Vec<String> = std::iter::once("exitless".to_owned())
                    .chain(inside.iter().cloned())
                    .collect();
                understand_ours(&inside, place);
            }
        }
        _ => {}
    }
}

/// All but a file that has to be there is right.
fn understand_serve(args: &ServeArgs, at: &dyn Fn(&dyn std::fmt::Display) -> String) {
    let mut args = args.clone();
    // Of an example for files, the file is an example of its own.
    if args.config.take().is_some() && args.block.is_empty() {
        return;
    }
    if let Err(error) = vmm::serve::understand(&args) {
        panic!("{}", at(&format!("{error:#}")));
    }
}

fn understand_run(args: &RunArgs, at: &dyn Fn(&dyn std::fmt::Display) -> String) {
    let misunderstood = vmm::run::misunderstood(args);
    assert!(
        misunderstood.is_empty(),
        "{}",
        at(&misunderstood.join("; "))
    );
}

fn understand_faults(
    program: Program,
    faults: &[String],
    at: &dyn Fn(&dyn std::fmt::Display) -> String,
) {
    if let Err(error) = Faults::parse(program, faults) {
        panic!("{}", at(&format!("{error:#}")));
    }
}

/// Runs of verbatim lines among the examples of a text.
fn examples(text: &str) -> Vec<String> {
    let sections = page::sections(text);
    let of = sections
        .iter()
        .filter(|section| section.heading == "Examples");
    let blocks = of.flat_map(|section| &section.blocks);
    blocks
        .filter_map(|block| match block {
            Block::Verbatim(lines) => Some(lines.join("\n")),
            _ => None,
        })
        .collect()
}

/// Each command of each program: the program, the command's name, `None` for the program itself.
fn commands() -> Vec<(Command, Option<String>, Command)> {
    let of = |program: Command| {
        let subcommands = program.get_subcommands();
        let named = subcommands.map(|it| (Some(it.get_name().to_owned()), it.clone()));
        let all: Vec<_> = [(None, program.clone())].into_iter().chain(named).collect();
        let all = all.into_iter();
        all.map(move |(name, command)| (program.clone(), name, command))
    };
    programs().into_iter().flat_map(of).collect()
}

/// Returns the text behind a command's options.
fn after(command: &Command) -> String {
    let after = command.get_after_long_help();
    after.map(ToString::to_string).unwrap_or_default()
}

/// Returns the long help at a terminal's width, as it is printed.
fn help_at(program: &Command, name: Option<&str>, width: usize) -> String {
    let program = unbroken(program.clone());
    let mut program = program
        .mut_subcommands(|it| it.term_width(width))
        .term_width(width);
    program.build();
    let rendered = match name {
        Some(name) => program
            .find_subcommand_mut(name)
            .unwrap()
            .render_long_help(),
        None => program.render_long_help(),
    };
    printable(&rendered.to_string())
}

/// Returns the part of a printed help behind the options.
fn printed_after(help: &str) -> String {
    let is_heading = |line: &&str| HEADINGS.iter().any(|name| *line == format!("{name}:"));
    let lines: Vec<&str> = help.lines().collect();
    let first = lines.iter().position(is_heading);
    first.map_or_else(String::new, |first| lines[first..].join("\n"))
}

#[test]
fn the_examples_of_each_help_are_understood_as_they_are_copied_at_any_width() {
    let mut ours = 0;
    for (program, name, command) in commands() {
        let expected = examples(&after(&command));
        if !command.is_hide_set() {
            assert!(!expected.is_empty(), "{name:?} has no example");
        }
        for width in [1, 10, 20, 40, 60, 79, 80, 100, 132, 1000] {
            let help = help_at(&program, name.as_deref(), width);
            let copied = examples(&printed_after(&help));
            assert_eq!(copied, expected, "{name:?} at {width}");
        }
        for example in expected {
            let place = format!("help of {} {name:?}", program.get_name());
            // A part of a file, which has a test of its own.
            if !example.starts_with('[') {
                ours += understand(&example, &place);
            }
        }
    }
    assert!(ours >= 30, "{ours}");
}

/// A file of settings, whole.
fn understand_toml(text: &str, place: &str) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    let path = file.path().to_str().unwrap();
    let cli = exitless::Cli::try_parse_from(["exitless", "serve", "--config", path]).unwrap();
    let exitless::Command::Serve(args) = cli.command else {
        panic!("not serve");
    };
    if let Err(error) = vmm::serve::understand(&args) {
        panic!("{place}: {error:#}\n{text}");
    }
}

#[test]
fn the_file_of_serves_help_is_one() {
    let help = after(exitless::Cli::command().find_subcommand("serve").unwrap());
    let blocks = examples(&help);
    // Tables are separated by empty lines.
    let tables: Vec<&str> = blocks
        .iter()
        .filter(|it| it.starts_with('['))
        .map(String::as_str)
        .collect();
    assert_eq!(tables.len(), 3, "{tables:?}");
    understand_toml(&tables.join("\n"), "serve's file");
}

/// Lines of options' helps that are kept, too.
#[test]
fn the_lists_of_keys_are_kept_at_any_width() {
    for (name, option) in [
        ("run", "disk"),
        ("run", "net"),
        ("run", "swap"),
        ("run", "balloon"),
        ("run", "device"),
        ("run", "iommu-hints"),
        ("serve", "block"),
    ] {
        let program = exitless::Cli::command();
        let command = program.find_subcommand(name).unwrap();
        let arg = command
            .get_arguments()
            .find(|arg| arg.get_long() == Some(option))
            .unwrap();
        let help = arg.get_long_help().unwrap().to_string();
        let kept: Vec<&str> = help
            .lines()
            .filter(|line| page::is_verbatim(line))
            .collect();
        assert!(kept.len() >= 3, "{option}");
        for width in [20, 80, 1000] {
            let printed = help_at(&program, Some(name), width);
            for line in &kept {
                assert!(printed.contains(line.trim()), "{option} at {width}: {line}");
            }
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// Returns the documents of the project.
fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if path.extension().is_some_and(|it| it == "md") {
                found.push(path);
            }
        }
    }
    found
}

/// Parts of a document that are meant for pasting: fenced blocks of a shell or of settings, and
/// indented lines with our commands.
fn pasted(text: &str) -> Vec<(&'static str, String)> {
    let mut blocks: Vec<(&'static str, String)> = Vec::new();
    let mut fence: Option<&'static str> = None;
    let mut is_open = false;
    for line in text.lines() {
        if let Some(language) = line.strip_prefix("```") {
            fence = match (fence, language) {
                (Some(_), _) => None,
                (None, "sh" | "bash" | "console") => Some("sh"),
                (None, "toml") => Some("toml"),
                (None, _) => Some(""),
            };
            if let Some(language) = fence {
                blocks.push((language, String::new()));
            }
        } else if fence.is_some() {
            let (_, block) = blocks.last_mut().unwrap();
            block.push_str(line);
            block.push('\n');
        } else if let Some(line) = line.strip_prefix("    ") {
            if !is_open {
                blocks.push(("indented", String::new()));
            }
            is_open = true;
            let (_, block) = blocks.last_mut().unwrap();
            block.push_str(line);
            block.push('\n');
            continue;
        }
        is_open = false;
    }
    blocks.retain(|(kind, text)| match *kind {
        "indented" => text.starts_with("exitless ") || text.starts_with("exitless-lab "),
        kind => !kind.is_empty(),
    });
    blocks
}

#[test]
fn the_examples_of_each_document_are_understood_as_they_are_copied() {
    let mut ours = 0;
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        let place = path.strip_prefix(root()).unwrap().display().to_string();
        for (kind, block) in pasted(&text) {
            match kind {
                "toml" => understand_toml(&block, &place),
                _ => ours += understand(&block, &place),
            }
        }
    }
    assert!(ours >= 15, "{ours}");
}

/// Targets of a text's links, without anchors; those that lead out of the project are left out.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    let targets = targets.filter_map(|target| target.split('#').next());
    targets.filter(|target| !target.is_empty() && !target.contains([':', ' ']))
}

#[test]
fn links_of_documents_lead_to_files() {
    assert_eq!(
        Vec::from_iter(links("[a](b/c.md#d), [e](#f), [`g`](h) and [i](https://j)")),
        ["b/c.md", "h"]
    );
    let mut count = 0;
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        for target in links(&text) {
            let file = path.parent().unwrap().join(target);
            assert!(file.exists(), "{}: no {target}", path.display());
            count += 1;
        }
    }
    assert!(count >= 40, "{count}");
}

#[test]
fn a_manual_page_has_its_sections_and_the_values_of_its_options() {
    for (program, name, command) in commands() {
        let page = manual(&program, name.as_deref()).unwrap();
        let own = program.get_name();
        let full = name
            .as_ref()
            .map_or(own.to_owned(), |name| format!("{own}-{name}"));
        assert!(page.starts_with(&format!(".TH {full} 1 ")), "{page:.200}");
        let mut sections = vec![
            "NAME",
            "SYNOPSIS",
            "DESCRIPTION",
            "EXIT STATUS",
            "SIGNALS",
            "ENVIRONMENT",
            "FILES",
            "SEE ALSO",
        ];
        if !command.is_hide_set() {
            sections.push("EXAMPLES");
        }
        for section in sections {
            assert!(
                page.contains(&format!("\n.SH {section}\n")),
                "{full} has no {section}"
            );
        }
        let synopsis = page.split(".SH DESCRIPTION").next().unwrap();
        let visible = command.get_arguments().filter(|arg| !arg.is_hide_set());
        for arg in visible.filter(|arg| arg.get_long().is_some()) {
            let takes = matches!(
                arg.get_action(),
                clap::ArgAction::Set | clap::ArgAction::Append
            );
            let flag = format!(
                "\\fB\\-\\-{}\\fR",
                arg.get_long().unwrap().replace('-', "\\-")
            );
            let expected = match takes {
                true => format!("{flag} \\fI"),
                false => flag,
            };
            assert!(
                synopsis.contains(&expected),
                "{full}: {expected}: {synopsis}"
            );
        }
    }
    let [product, lab] = programs();
    let see = manual(&product, Some("run")).unwrap();
    assert!(see.contains("\\fBexitless\\-serve\\fR(1)"));
    let see = manual(&lab, Some("run")).unwrap();
    assert!(see.contains("\\fBexitless\\-lab\\-serve\\fR(1)") && !see.contains("swap\\-lab"));
    for program in [product, lab] {
        assert!(manual(&program, Some("rnu")).is_err());
    }
}

/// Returns the page as a terminal of this width shows it, and what the formatter complains of.
fn formatted(page: &str, width: usize) -> Option<(String, String)> {
    let mut groff = Process::new("groff");
    groff.args([
        "-man",
        "-Tutf8",
        "-ww",
        "-P-c",
        "-P-b",
        "-P-u",
        "-P-o",
        &format!("-rLL={width}n"),
    ]);
    groff
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut groff = match groff.spawn() {
        Ok(groff) => groff,
        Err(error) => {
            println!("skipped: groff: {error}");
            return None;
        }
    };
    groff
        .stdin
        .take()
        .unwrap()
        .write_all(page.as_bytes())
        .unwrap();
    let output = groff.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Some((text(output.stdout), text(output.stderr)))
}

#[test]
fn a_manual_page_is_formatted_without_complaint_and_keeps_its_examples() {
    for (program, name, command) in commands() {
        let page = manual(&program, name.as_deref()).unwrap();
        for width in [60, 78, 200] {
            let Some((text, complaints)) = formatted(&page, width) else {
                return;
            };
            assert_eq!(complaints, "", "{name:?} at {width}");
            assert!(
                !text.contains('\u{2010}'),
                "{name:?}: a word was hyphenated"
            );
            let lines: Vec<&str> = text.lines().map(str::trim).collect();
            for example in examples(&after(&command)) {
                for line in example.lines() {
                    assert!(lines.contains(&line.trim()), "{name:?} at {width}: {line}");
                }
            }
        }
    }
}

#[test]
fn all_pages_are_written_but_those_of_hidden_commands() {
    let own = [
        "completions",
        "device-worker",
        "doctor",
        "man",
        "run",
        "serve",
    ];
    let lab = [
        "completions",
        "demo",
        "doctor",
        "eli",
        "lab",
        "man",
        "run",
        "selftest",
        "serve",
    ];
    let [product, of_lab] = programs();
    for (program, subcommands) in [(product, &own[..]), (of_lab, &lab)] {
        let folder = tempfile::tempdir().unwrap();
        write_manuals(&program, &folder.path().join("man1")).unwrap();
        let found: BTreeSet<String> = fs::read_dir(folder.path().join("man1"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let own = program.get_name();
        let pages = subcommands.iter().map(|name| format!("{own}-{name}.1"));
        let pages: BTreeSet<String> = pages.chain([format!("{own}.1")]).collect();
        assert_eq!(found, pages);
    }
}

/// Returns the message about wrong arguments.
fn said(program: &Command, args: &[&str]) -> String {
    let mut command = program.clone();
    let name = program.get_name();
    let words = std::iter::once(&name).chain(args).copied();
    let words: Vec<String> = words.map(str::to_owned).collect();
    let mut error = command.try_get_matches_from_mut(&words).unwrap_err();
    tips::mend(&mut error, &command, &words[1..]);
    error.render().to_string()
}

#[test]
fn tips_name_nothing_that_is_hidden() {
    for (program, name, command) in commands() {
        for arg in command.get_arguments().filter(|arg| arg.is_hide_set()) {
            let (Some(name), Some(long)) = (&name, arg.get_long()) else {
                continue;
            };
            let said = said(&program, &[name, &format!("--x{long}")]);
            assert!(!said.contains(&format!("'--{long}'")), "{said}");
        }
        if let Some(name) = name.filter(|_| command.is_hide_set()) {
            let said = said(&program, &[&format!("x{name}")]);
            assert!(!said.contains(&format!("'{name}'")), "{said}");
        }
    }
    for program in programs() {
        let slip = said(&program, &["srve"]);
        assert!(
            slip.contains("'serve'") && !slip.contains("serve-lab"),
            "{slip}"
        );
        let slip = said(&program, &["run", "--krnel", "x"]);
        assert!(slip.contains("'--kernel'"), "{slip}");
    }
}

#[test]
fn the_lab_says_where_its_separator_is_missing() {
    let program = Cli::command();
    for (args, line) in [
        (&["lab", "doctor"] as &[&str], "exitless-lab lab -- doctor"),
        (
            &["lab", "--verbose", "run", "--cmdline", "a b"],
            "exitless-lab lab --verbose -- run --cmdline 'a b'",
        ),
    ] {
        let said = said(&program, args);
        assert!(said.contains(line), "{said}");
    }
    assert!(!said(&program, &["lab", "--nonsense"]).contains("stands behind"));
    assert!(!said(&program, &["serve", "doctor"]).contains("stands behind"));
    let without_lab = exitless::Cli::command();
    let slip = said(&without_lab, &["--bogus", "lab", "doctor"]);
    assert!(!slip.contains("stands behind"), "{slip}");
}

#[test]
fn the_version_names_the_commit() {
    let commit = option_env!("EXITLESS_COMMIT").unwrap_or("unknown");
    let version = env!("CARGO_PKG_VERSION");
    for program in programs() {
        let name = program.get_name();
        let text = program.render_version();
        assert_eq!(text, format!("{name} {version} (commit {commit})\n"));
    }
}
