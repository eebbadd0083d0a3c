use super::*;

#[test]
fn the_helps_units_of_size_are_those_that_are_understood() {
    assert_eq!(values::size::number("3T").unwrap(), 3 << 40);
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
