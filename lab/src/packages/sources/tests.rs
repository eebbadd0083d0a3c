use super::*;

fn source(name: &str, text: &str) -> Source {
    Source {
        name: name.into(),
        text: text.into(),
    }
}

fn texts(machine: &[Source]) -> Vec<(String, Vec<String>)> {
    let text = |sources: Vec<Source>| sources.into_iter().map(|s| s.text).collect();
    later(machine)
        .into_iter()
        .map(|(suite, sources)| (suite, text(sources)))
        .collect()
}

#[test]
fn stanzas_keep_mirror_components_and_key() {
    let machine = source(
        "debian.sources",
        "Types: deb deb-src\n# a word\nURIs: http://mirror.example/debian\n\
         Suites: bookworm bookworm-updates\n\
             Components: main contrib\nSigned-By: /usr/share/keyrings/k.gpg\n\n\
             Types: deb\nURIs: http://mirror.example/security\nSuites: bookworm-security\n\
             Components: main\n\n\
             Enabled: no\nTypes: deb\nURIs: http://other.example\nSuites: bookworm\n\
             Components: main\n",
    );
    let suites = texts(&[machine]);
    let names: Vec<&str> = suites.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        ["bookworm-backports", "trixie", "forky", "duke", "sid"]
    );
    let first = "Types: deb deb-src\n# a word\nURIs: http://mirror.example/debian\n\
         Suites: bookworm-backports\n\
                     Components: main contrib\nSigned-By: /usr/share/keyrings/k.gpg\n";
    assert_eq!(suites[0].1, [first]);
}

#[test]
fn lines_keep_options_and_what_follows() {
    let machine = source(
        "sources.list",
        "# deb http://mirror.example/old trixie main\n\
             deb [arch=amd64 signed-by=/k.gpg]  https://mirror.example/debian trixie main contrib \
             # yes\n\
             deb-src http://mirror.example/debian trixie main\n\
             deb http://mirror.example/security trixie-security main\n",
    );
    let suites = texts(&[machine]);
    assert_eq!(suites[0].0, "trixie-backports");
    assert_eq!(suites[1].0, "forky");
    let line = "deb [arch=amd64 signed-by=/k.gpg]  https://mirror.example/debian forky main \
         contrib # yes\n";
    assert_eq!(suites[1].1, [line]);
}

#[test]
fn a_machine_without_a_known_release_has_no_later_one() {
    let machine = source("x.list", "deb http://mirror.example/d jammy main\ndeb\n");
    assert!(later(&[machine]).is_empty());
}

#[test]
fn only_files_that_apt_reads_count() {
    let dir = tempfile::tempdir().expect("a directory");
    let parts = dir.path().join("sources.list.d");
    fs::create_dir(&parts).expect("a directory");
    for name in ["a.sources", "b.list", "c.list.disabled", "d.sources~"] {
        fs::write(parts.join(name), "").expect("a file");
    }
    let names: Vec<String> = of_machine(dir.path()).into_iter().map(|s| s.name).collect();
    assert_eq!(names, ["a.sources", "b.list"]);
}

#[test]
fn a_releases_own_entries_are_told_from_what_was_added() {
    let debian = source(
        "debian.sources",
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates trixie\n\
         Components: main\n\n\
         Types: deb\nURIs: http://mirror.example/security\nSuites: bookworm-security\n\
         Components: main\n",
    );
    let added = source(
        "added.list",
        "deb http://other.example nodistro main\ndeb http://other.example bookworm-tools main\n",
    );
    let machine = [added, debian];
    assert_eq!(release(&machine), Some("bookworm"));
    let own = of_release(&machine, "bookworm");
    let texts: Vec<&str> = own.iter().map(|source| source.text.as_str()).collect();
    let entry = |place: &str, suite: &str| {
        format!(
            "Types: deb\nURIs: http://mirror.example/{place}\nSuites: {suite}\nComponents: main\n"
        )
    };
    let wanted = [
        entry("debian", "bookworm"),
        entry("debian", "bookworm-updates"),
        entry("security", "bookworm-security"),
    ];
    assert_eq!(texts, wanted);
    assert_eq!(
        release(&[source("a.list", "deb http://x.example nodistro main")]),
        None
    );
}
