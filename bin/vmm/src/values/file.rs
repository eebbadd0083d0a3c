//! Files of settings, read whole: the largest size, and the excerpt that is shown of one that is
//! wrong.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;

use super::nearest::hint;

/// Most bytes of a file of settings: all the devices that can be served, several times over.
const MOST: u64 = 4 << 20;
/// Columns of a line that are shown on either side of a mistake.
const SIDE: usize = 36;
/// Most characters of a parser's message, which may repeat text of the file.
const MOST_SAID: usize = 1000;

/// Reads a regular file of text.
///
/// # Errors
/// Names the file: it cannot be read, is of another kind (a device, a FIFO), too large, or no text.
pub fn read(path: &Path) -> Result<String> {
    let at = || path.display().to_string();
    // Non-blocking: opening a FIFO must not wait for its other end.
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .with_context(|| format!("{} cannot be read", at()))?;
    if !file.metadata().with_context(at)?.is_file() {
        bail!("{} is no regular file", at());
    }
    let mut bytes = Vec::new();
    file.take(MOST + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("{} cannot be read", at()))?;
    if bytes.len() as u64 > MOST {
        bail!(
            "{} has more than {} MiB, and is taken for something else than settings (a disk \
             image?)",
            at(),
            MOST >> 20
        );
    }
    String::from_utf8(bytes).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        anyhow!("{} is no text: byte {place} is not UTF-8", at())
    })
}

/// Reads a TOML file.
///
/// # Errors
/// As [`read()`]; or the line and column of a mistake, with as much of the line as fits a terminal.
pub fn toml<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = read(path)?;
    toml::from_str(&text).map_err(|error| {
        let said = said(error.message());
        let place = match error.span() {
            Some(span) => excerpt(&text, span),
            None => Excerpt::default(),
        };
        anyhow!("{}: {}{said}{}", path.display(), place.at, place.lines)
    })
}

/// Returns the parser's message, with the nearest name to one that is unknown.
fn said(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let hint = match (message.starts_with("unknown field"), quoted.next()) {
        (true, Some(name)) => hint(name, &quoted.collect::<Vec<_>>()),
        _ => String::new(),
    };
    let (message, is_cut) = cut(message, MOST_SAID);
    let dots = if is_cut { " …" } else { "" };
    format!("{message}{dots}{hint}")
}

/// Returns at most so many characters, each of which is printable, and whether there are more.
fn cut(text: &str, most: usize) -> (String, bool) {
    let shown = text.chars().take(most).map(printable).collect();
    (shown, text.chars().nth(most).is_some())
}

fn printable(c: char) -> char {
    if c.is_control() { '\u{fffd}' } else { c }
}

/// Place of a mistake.
#[derive(Debug, Default, PartialEq, Eq)]
struct Excerpt {
    /// `line 3, column 1: `
    at: String,
    /// The line with a mark below its mistake, each behind a line feed.
    lines: String,
}

/// Returns the line of `text` in which `span` begins, cut to a terminal's width on both sides of
/// it.
fn excerpt(text: &str, span: Range<usize>) -> Excerpt {
    // A parser's span may end between two bytes of a character.
    let start = char_boundary(text, span.start);
    let before = &text[..start];
    let begin = before.rfind('\n').map_or(0, |at| at + 1);
    let line = text[begin..].split('\n').next().unwrap_or_default();
    let number = before.bytes().filter(|&byte| byte == b'\n').count() + 1;
    let column = text[begin..start].chars().count();
    let end = char_boundary(text, span.end.min(begin + line.len())).max(start);
    let marked = text[start..end].chars().count().clamp(1, SIDE);
    let first = column.saturating_sub(SIDE);
    let mut shown: String = line
        .chars()
        .skip(first)
        .take(column - first + SIDE)
        .map(printable)
        .collect();
    if line.chars().nth(column + SIDE).is_some() {
        shown.push('…');
    }
    let (lead, shift) = if first > 0 { ("…", 1) } else { ("", 0) };
    let gutter = number.to_string();
    let (blank, marks) = (" ".repeat(gutter.len()), "^".repeat(marked));
    let indent = " ".repeat(column - first + shift);
    Excerpt {
        at: format!("line {number}, column {}: ", column + 1),
        lines: format!("\n{gutter} | {lead}{shown}\n{blank} | {indent}{marks}"),
    }
}

/// Returns the last boundary of a character up to byte `at`.
fn char_boundary(text: &str, at: usize) -> usize {
    let candidates = (0..=at.min(text.len())).rev();
    // One of four bytes is one.
    candidates
        .take(4)
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Settings {
        #[expect(dead_code, reason = "only its name matters")]
        colour: Option<u64>,
    }

    /// Returns the message about a file with this content.
    fn refused(content: &[u8]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("settings.toml");
        fs::write(&path, content).unwrap();
        let error = toml::<Settings>(&path).unwrap_err().to_string();
        let folder = folder.path().display().to_string();
        error.replace(&folder, "")
    }

    #[test]
    fn a_mistake_is_shown_with_its_column_and_the_nearest_name() {
        assert_eq!(
            refused(b"# none\ncolor = 1\n"),
            "/settings.toml: line 2, column 1: unknown field `color`, expected `colour`; did you \
             mean \"colour\"?\n\
             2 | color = 1\n  | ^^^^^"
        );
    }

    #[test]
    fn no_content_makes_a_message_long() {
        let long = "x".repeat(1 << 20);
        for (content, says) in [
            (format!("colour = \"{long}\""), "line 1, column 10: "),
            (format!("{long} = 1"), "unknown field"),
            (format!("colour = 1 {long}"), "line 1, column 10: "),
            (format!("{} = 1 = {long}", "é".repeat(5000)), "line 1, "),
            ("\0".repeat(1 << 20), "line 1, column "),
            (format!("\n\n# {long}\n[[["), "line 4, column "),
            ("x".repeat(5 << 20), "has more than 4 MiB"),
        ] {
            let said = refused(content.as_bytes());
            assert!(said.contains(says), "{said:.300}");
            assert!(said.chars().count() < 1500, "{}: {said:.300}", said.len());
            let is_plain = |c: char| c == '\n' || !c.is_control();
            assert!(said.chars().all(is_plain), "{said:.300}");
            let wide = said.lines().skip(1).map(|line| line.chars().count());
            assert!(wide.max().unwrap_or(0) <= 90, "{said:.300}");
        }
        assert!(refused(b"\xff").ends_with("is no text: byte 0 is not UTF-8"));
    }

    #[test]
    fn an_excerpt_keeps_the_place_wherever_it_is() {
        let text = format!("a\n{}\u{1f980}BAD{}", "-".repeat(500), "+".repeat(500));
        let start = text.find("BAD").unwrap();
        let found = excerpt(&text, start..start + 3);
        assert_eq!(found.at, "line 2, column 502: ");
        let lines: Vec<Vec<char>> = found.lines.lines().map(|l| l.chars().collect()).collect();
        let at = lines[2].iter().position(|&c| c == '^').unwrap();
        assert_eq!(lines[1][at..at + 3], ['B', 'A', 'D']);
        // Any span that a parser may give, also one beyond the end.
        for start in 0..=text.len() + 1 {
            for len in [0, 1, 2, 700] {
                assert!(excerpt(&text, start..start + len).lines.len() < 400);
            }
        }
    }

    #[test]
    fn other_than_regular_files_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for path in [Path::new("/dev/zero"), folder.path(), &fifo] {
            let error = read(path).unwrap_err().to_string();
            assert!(error.ends_with("is no regular file"), "{error}");
        }
        let error = format!("{:#}", read(Path::new("/proc/self/mem")).unwrap_err());
        assert!(error.contains("cannot be read"), "{error}");
    }
}
