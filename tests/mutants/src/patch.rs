//! A unified diff, and its application by content.
//!
//! A hunk is found by its lines, not by its line numbers: what it expects must stand at exactly one
//! place of the file. So it survives whatever moves it, and is never applied to a look-alike.

use std::fmt;

/// Changes to some files.
#[derive(Debug, PartialEq, Eq)]
pub struct Patch {
    /// One entry per file.
    pub files: Vec<FilePatch>,
}

/// Changes to one file.
#[derive(Debug, PartialEq, Eq)]
pub struct FilePatch {
    /// From the root of the tree.
    pub path: String,
    hunks: Vec<Hunk>,
}

/// Lines that stand next to each other, and what they become.
#[derive(Debug, PartialEq, Eq)]
struct Hunk {
    before: Vec<String>,
    after: Vec<String>,
    /// The first line that differs, for messages.
    what: String,
}

/// An error in the text of a diff.
#[derive(Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Counted from 1, from the first line of the diff.
    pub line: usize,
    /// The error, in words.
    pub what: &'static str,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} of the diff: {}", self.line, self.what)
    }
}

impl std::error::Error for ParseError {}

/// A hunk that does not fit its file.
#[derive(Debug, PartialEq, Eq)]
pub struct Misfit {
    /// From the root of the tree.
    pub path: String,
    /// Counted from 1.
    pub hunk: usize,
    /// Number of places at which its lines stand.
    pub places: usize,
    what: String,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            hunk,
            places,
            what,
        } = self;
        let why = match places {
            0 => "its lines stand nowhere".to_string(),
            1 => "it comes before the hunk above it".to_string(),
            _ => format!("its lines stand at {places} places: it needs more context"),
        };
        write!(f, "{path}, hunk {hunk} (at «{}»): {why}", what.trim())
    }
}

impl std::error::Error for Misfit {}

impl Patch {
    /// Reads a diff as `git diff` prints it. Files cannot be made or removed, and end with a
    /// newline.
    ///
    /// # Errors
    /// It is none, or has no change.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let mut lines = Lines {
            all: text.lines().collect(),
            at: 0,
        };
        let mut files: Vec<FilePatch> = Vec::new();
        while let Some(line) = lines.next() {
            if line.starts_with("@@") {
                let (before, after) = counts(line).ok_or_else(|| lines.error("no hunk's head"))?;
                let hunk = lines.hunk(before, after)?;
                let Some(file) = files.last_mut() else {
                    return Err(lines.error("a hunk without a file"));
                };
                file.hunks.push(hunk);
            } else if let Some(old) = line.strip_prefix("--- ") {
                files.push(lines.file(old)?);
            } else if !(line.is_empty()
                || line.starts_with("diff --git ")
                || line.starts_with("index "))
            {
                return Err(lines.error("neither a file nor a hunk"));
            }
        }
        lines.at += 1;
        match files.iter().all(|file| !file.hunks.is_empty()) && !files.is_empty() {
            true => Ok(Self { files }),
            false => Err(lines.error("it ends without a hunk")),
        }
    }
}

impl FilePatch {
    /// The file's text with the changes.
    ///
    /// # Errors
    /// The lines of a hunk stand nowhere, or at several places, or the hunks are out of order.
    pub fn apply(&self, text: &str) -> Result<String, Misfit> {
        let lines: Vec<&str> = text.lines().collect();
        let mut made: Vec<&str> = Vec::new();
        let mut done = 0;
        for (index, hunk) in self.hunks.iter().enumerate() {
            let mut windows = lines.windows(hunk.before.len()).enumerate();
            let places: Vec<usize> = windows
                .by_ref()
                .filter_map(|(at, window)| (window == hunk.before).then_some(at))
                .collect();
            let [at] = places[..] else {
                return Err(self.misfit(index, places.len()));
            };
            if at < done {
                return Err(self.misfit(index, 1));
            }
            made.extend(&lines[done..at]);
            made.extend(hunk.after.iter().map(String::as_str));
            done = at + hunk.before.len();
        }
        made.extend(&lines[done..]);
        Ok(made.join("\n") + "\n")
    }

    fn misfit(&self, hunk: usize, places: usize) -> Misfit {
        Misfit {
            path: self.path.clone(),
            hunk: hunk + 1,
            places,
            what: self.hunks[hunk].what.clone(),
        }
    }
}

/// The lines that a hunk's head says there are, before and after.
fn counts(head: &str) -> Option<(usize, usize)> {
    let (ranges, _) = head.strip_prefix("@@ -")?.split_once(" @@")?;
    let (before, after) = ranges.split_once(" +")?;
    let count = |range: &str| match range.split_once(',') {
        Some((_, count)) => count.parse().ok(),
        None => range.parse::<usize>().ok().map(|_| 1),
    };
    Some((count(before)?, count(after)?))
}

struct Lines<'t> {
    all: Vec<&'t str>,
    at: usize,
}

impl<'t> Lines<'t> {
    fn next(&mut self) -> Option<&'t str> {
        let line = self.all.get(self.at).copied();
        self.at += usize::from(line.is_some());
        line
    }

    fn error(&self, what: &'static str) -> ParseError {
        ParseError {
            line: self.at,
            what,
        }
    }

    /// Reads the rest of a file's head, after `--- old`.
    fn file(&mut self, old: &str) -> Result<FilePatch, ParseError> {
        let new = self.next().and_then(|line| line.strip_prefix("+++ "));
        let paths = old
            .strip_prefix("a/")
            .zip(new.and_then(|new| new.strip_prefix("b/")));
        let Some((old, new)) = paths else {
            return Err(self.error("no «--- a/PATH» and «+++ b/PATH»: a file made or removed?"));
        };
        if old != new {
            return Err(self.error("a file renamed"));
        }
        let is_inside = old.split('/').all(|part| !matches!(part, "" | "." | ".."));
        if !is_inside {
            return Err(self.error("a path that leaves the tree"));
        }
        Ok(FilePatch {
            path: old.to_string(),
            hunks: Vec::new(),
        })
    }

    /// Reads the lines of a hunk whose head has these counts.
    fn hunk(&mut self, before: usize, after: usize) -> Result<Hunk, ParseError> {
        let mut hunk = Hunk {
            before: Vec::new(),
            after: Vec::new(),
            what: String::new(),
        };
        while hunk.before.len() < before || hunk.after.len() < after {
            let Some(line) = self.next() else {
                return Err(self.error("the hunk has fewer lines than its head says"));
            };
            // An empty line of context may have lost its space.
            let (sign, rest) = line.split_at_checked(1).unwrap_or((" ", ""));
            if sign != " " && hunk.what.is_empty() {
                hunk.what = rest.to_string();
            }
            match sign {
                " " => {
                    hunk.before.push(rest.to_string());
                    hunk.after.push(rest.to_string());
                }
                "-" => hunk.before.push(rest.to_string()),
                "+" => hunk.after.push(rest.to_string()),
                _ => return Err(self.error("no line of a hunk")),
            }
        }
        if hunk.before.len() > before || hunk.after.len() > after {
            return Err(self.error("the hunk has other lines than its head says"));
        }
        if hunk.before.is_empty() {
            return Err(self.error("a hunk without context: it could go anywhere"));
        }
        if hunk.before == hunk.after {
            return Err(self.error("a hunk that changes nothing"));
        }
        Ok(hunk)
    }
}

#[cfg(test)]
mod tests;
