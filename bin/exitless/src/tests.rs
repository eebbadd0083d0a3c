use super::*;

/// The examples that stand behind the options of each command's help, in the words a shell would make of them.
fn examples() -> Vec<Vec<String>> {
    let cli = Cli::command();
    let mut found = Vec::new();
    for command in cli.get_subcommands() {
        let behind = [command.get_after_help(), command.get_after_long_help()];
        for text in behind.into_iter().flatten() {
            // What stands apart on its line says what the example does.
            let text = text.to_string();
            let lines = text.lines().map(|line| line.trim().split("  ").next());
            let text = lines.map(Option::unwrap_or_default);
            let text = text.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
            let lines = text.lines().filter(|line| line.starts_with("exitless "));
            found.extend(lines.map(words));
        }
    }
    found
}

fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for c in line.chars() {
        match (c, words.last_mut()) {
            ('\'', _) => is_quoted = !is_quoted,
            (' ', Some(word)) if !is_quoted => {
                if !word.is_empty() {
                    words.push(String::new());
                }
            }
            (c, Some(word)) => word.push(c),
            (_, None) => {}
        }
    }
    words
}

#[test]
fn the_helps_examples_are_understood() {
    let examples = examples();
    for (command, count) in [("lab", 8), ("run", 5), ("serve", 3)] {
        let of = examples.iter().filter(|words| words[1] == command);
        assert!(of.count() >= count, "{command}: {examples:?}");
    }
    for example in examples {
        let cli = Cli::try_parse_from(&example).unwrap_or_else(|e| panic!("{example:?}: {e}"));
        let Command::Lab(args) = cli.command else {
            continue;
        };
        // What it would run inside is understood there.
        if let Some(args) = args.inside() {
            let inside = std::iter::once("exitless").chain(args.iter().map(String::as_str));
            Cli::try_parse_from(inside).unwrap_or_else(|e| panic!("{example:?}: {e}"));
        }
    }
}

#[test]
fn each_manual_page_has_the_programs_name() {
    let page = |subcommand: Option<&str>| {
        let mut page = Vec::new();
        manual(subcommand).unwrap().render(&mut page).unwrap();
        String::from_utf8(page).unwrap().replace("\\-", "-")
    };
    let title = |page: &str| {
        page.lines()
            .find(|line| line.starts_with(".TH"))
            .map(str::to_owned)
    };
    let whole = page(None);
    assert!(
        title(&whole).unwrap().starts_with(".TH exitless 1"),
        "{whole}"
    );
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        let page = page(Some(name));
        let expected = format!(".TH exitless-{name} 1");
        assert!(title(&page).unwrap().starts_with(&expected), "{page}");
        let synopsis = format!("\\fBexitless {name}\\fR");
        assert!(page.contains(&synopsis), "{page}");
    }
    assert!(manual(Some("rnu")).is_err());
}

#[test]
fn the_helps_units_of_size_are_those_that_are_understood() {
    assert_eq!(values::size::bytes("3T").unwrap(), 3 << 40);
    let mut found = 0;
    for command in Cli::command().get_subcommands_mut() {
        let help = format!("{} {}", command.render_help(), command.render_long_help());
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for (at, _) in help.match_indices("with K,") {
            let units = &help[at + "with ".len()..];
            assert!(units.starts_with(values::size::UNITS), "{units:.60}");
            found += 1;
        }
    }
    assert!(found >= 2, "{found}");
}

#[test]
fn the_version_names_the_commit() {
    let commit = option_env!("EXITLESS_COMMIT").unwrap_or("unknown");
    let version = env!("CARGO_PKG_VERSION");
    let text = Cli::command().render_version();
    assert_eq!(text, format!("exitless {version} (commit {commit})\n"));
}
