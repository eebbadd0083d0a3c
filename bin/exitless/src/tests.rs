use super::*;

/// The lines of an example, in the words a shell would make of them.
fn examples() -> Vec<Vec<String>> {
    let text = lab_cmd::EXAMPLES.replace("\\\n", " ");
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| line.starts_with("exitless lab"));
    lines.map(words).collect()
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
    assert!(examples.len() >= 8, "{examples:?}");
    for example in examples {
        let cli = Cli::try_parse_from(&example).unwrap_or_else(|e| panic!("{example:?}: {e}"));
        let Command::Lab(args) = cli.command else {
            panic!("{example:?}")
        };
        // What it would run inside is understood there.
        if let Some(args) = args.inside() {
            let inside = std::iter::once("exitless").chain(args.iter().map(String::as_str));
            Cli::try_parse_from(inside).unwrap_or_else(|e| panic!("{example:?}: {e}"));
        }
    }
}
