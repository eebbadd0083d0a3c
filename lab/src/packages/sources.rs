//! The machine's APT sources, and the suites that follow theirs.
//!
//! A suite of Debian is one line of work of the archive: `bookworm`, `bookworm-backports`,
//! `trixie`. All are on the same mirror under the same keys, so that a source for a later suite is
//! the machine's own with another name in it; no host, key or component is known here.
//!
//! Formats: sources.list(5), one line each (`deb [options] uri suite component…`), and deb822
//! stanzas.

use std::fs;
use std::path::{Path, PathBuf};

/// Releases in their order; each has `-backports`, packages of the next one built for it.
const RELEASES: [&str; 6] = ["bullseye", "bookworm", "trixie", "forky", "duke", "sid"];

/// One of the machine's files of sources.
#[derive(Clone)]
pub(super) struct Source {
    /// Name of the file; its suffix gives the format.
    name: String,
    text: String,
}

/// Returns the files of sources below `etc` (`/etc/apt`) that APT would read.
pub(super) fn of_machine(etc: &Path) -> Vec<Source> {
    let parts = fs::read_dir(etc.join("sources.list.d"))
        .into_iter()
        .flatten()
        .flatten();
    let mut paths: Vec<PathBuf> = parts.map(|entry| entry.path()).collect();
    paths.push(etc.join("sources.list"));
    paths.sort();
    let read = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        let is_source = name.ends_with(".list") || name.ends_with(".sources");
        let text = is_source.then(|| fs::read_to_string(path).ok()).flatten()?;
        Some(Source { name, text })
    };
    paths.into_iter().filter_map(read).collect()
}

impl Source {
    fn is_stanzas(&self) -> bool {
        self.name.ends_with(".sources")
    }

    /// Writes it into `dir`.
    pub(super) fn put(&self, dir: &Path) -> std::io::Result<()> {
        fs::write(dir.join(&self.name), &self.text)
    }

    /// Returns the suites in it that are releases, as positions in [`RELEASES`].
    fn releases(&self) -> Vec<usize> {
        let words = self.text.lines().flat_map(|line| {
            let suites = if self.is_stanzas() {
                field(line, "suites").unwrap_or_default()
            } else {
                entry(line).map_or("", |(_, suite, _)| suite)
            };
            suites.split_whitespace()
        });
        words
            .filter_map(|word| RELEASES.iter().position(|name| *name == word))
            .collect()
    }

    /// Returns the same source for `suite`, from the entries of the release `base`.
    fn derived(&self, base: &str, suite: &str) -> Option<Self> {
        let text = if self.is_stanzas() {
            let stanzas = self.text.split("\n\n");
            let stanzas: Vec<String> = stanzas.filter_map(|s| stanza(s, base, suite)).collect();
            stanzas.join("\n\n")
        } else {
            let lines = self.text.lines().filter_map(|line| {
                let (before, named, after) = entry(line)?;
                (named == base).then(|| format!("{before}{suite}{after}\n"))
            });
            lines.collect()
        };
        let name = format!("later-{suite}-{}", self.name);
        (!text.is_empty()).then_some(Self { name, text })
    }
}

/// Returns the machine's release; the oldest if there are several, since a machine that lists a
/// newer one too gets additional packages from that.
pub(super) fn release(machine: &[Source]) -> Option<&'static str> {
    let named = machine.iter().flat_map(Source::releases);
    named.min().map(|release| RELEASES[release])
}

/// Returns the entries of the machine's sources for `release` and its updates: the distribution,
/// without additions.
pub(super) fn of_release(machine: &[Source], release: &str) -> Vec<Source> {
    ["", "-updates", "-security"]
        .iter()
        .map(|part| format!("{release}{part}"))
        .flat_map(|suite| {
            let entries = machine.iter();
            entries.filter_map(move |source| source.derived(&suite, &suite))
        })
        .collect()
}

/// Returns sources for the suites that follow, the nearest first: backports of the machine's
/// release, then each newer one.
pub(super) fn later(machine: &[Source]) -> Vec<(String, Vec<Source>)> {
    let named = machine.iter().flat_map(Source::releases);
    let Some(base) = named.min() else {
        return Vec::new();
    };
    let backports = format!("{}-backports", RELEASES[base]);
    let newer = RELEASES[base + 1..].iter().map(|name| (*name).to_owned());
    let derive = |suite: String| {
        let derived = machine
            .iter()
            .filter_map(|source| source.derived(RELEASES[base], &suite));
        let derived: Vec<Source> = derived.collect();
        (suite, derived)
    };
    std::iter::once(backports)
        .chain(newer)
        .map(derive)
        .collect()
}

/// Returns the value of a deb822 field on this line.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (key, value) = line.split_once(':')?;
    key.eq_ignore_ascii_case(name).then(|| value.trim())
}

/// Returns a stanza for `suite` made from one for `base`; `None` if that is disabled, or has no
/// packages.
fn stanza(text: &str, base: &str, suite: &str) -> Option<String> {
    let value = |name: &str| text.lines().find_map(|line| field(line, name));
    let has = |name: &str, word: &str| {
        value(name).is_some_and(|value| value.split_whitespace().any(|found| found == word))
    };
    let is_off = value("enabled").is_some_and(|value| value.eq_ignore_ascii_case("no"));
    if is_off || !has("types", "deb") || !has("suites", base) {
        return None;
    }
    let lines = text.lines().map(|line| match field(line, "suites") {
        Some(_) => format!("Suites: {suite}\n"),
        None => format!("{line}\n"),
    });
    Some(lines.collect())
}

/// Parses a line of packages in the old format: the text before its suite, the suite, the text
/// after it.
fn entry(line: &str) -> Option<(&str, &str, &str)> {
    let rest = line.trim_start().strip_prefix("deb")?;
    let mut rest = rest.strip_prefix([' ', '\t'])?.trim_start();
    if rest.starts_with('[') {
        rest = rest.split_once(']')?.1.trim_start();
    }
    let uri = rest.split_whitespace().next()?;
    let suite = rest[uri.len()..].split_whitespace().next()?;
    // Both are parts of one line: the difference of their addresses is the position.
    let at = suite.as_ptr() as usize - line.as_ptr() as usize;
    Some((&line[..at], suite, &line[at + suite.len()..]))
}

#[cfg(test)]
mod tests;
