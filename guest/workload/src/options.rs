//! The command line: `COMMAND SUBJECT --name value --flag`, without a library.

use std::collections::BTreeMap;

/// Options that take no value.
const FLAGS: &[&str] = &[
    "bus-master",
    "flush",
    "in-place",
    "marker",
    "no-markers",
    "pieces",
    "power-off",
    "read",
    "receive",
    "remap",
    "reset",
    "step",
    "trace",
    "trim",
    "udp",
    "write",
];

/// Options that take a number, of any command.
const NUMBERS: &[&str] = &[
    "alloc-mib",
    "buffers",
    "bytes",
    "collections",
    "connections",
    "count",
    "depth",
    "iterations",
    "limit-ms",
    "mask-bits",
    "mib",
    "nic",
    "pause-ms",
    "pause-us",
    "phases",
    "progress-ms",
    "random",
    "rounds",
    "run",
    "seconds",
    "seed",
    "skip",
    "skip-blocks",
    "stall-ms",
    "step-ms",
    "threads",
    "units",
    "wait-ms",
    "warmup",
    "window-mib",
    "windows",
];

/// Malformed command line, described.
#[derive(Debug, PartialEq, Eq)]
pub struct Wrong(pub String);

/// A parsed command line.
#[derive(Debug, Default)]
pub struct Options {
    /// First word.
    pub command: String,
    subject: Option<String>,
    values: BTreeMap<String, String>,
}

impl Options {
    /// Parses the words. An option that no command knows, or that is given twice, is refused.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut words = words.into_iter();
        let command = words
            .next()
            .ok_or("no command; `workload help` lists them")?;
        let mut options = Self {
            command,
            ..Self::default()
        };
        while let Some(word) = words.next() {
            let Some(name) = word.strip_prefix("--") else {
                if let Some(first) = options.subject.replace(word.clone()) {
                    return Err(format!("two subjects, {first:?} and {word:?}"));
                }
                continue;
            };
            let value = if FLAGS.contains(&name) {
                String::new()
            } else if NUMBERS.contains(&name) {
                words
                    .next()
                    .ok_or_else(|| format!("--{name} needs a value"))?
            } else {
                return Err(format!("no option --{name}"));
            };
            if options.values.insert(name.to_owned(), value).is_some() {
                return Err(format!("--{name} twice"));
            }
        }
        Ok(options)
    }

    /// Returns the number of an option, or its default; an error if it is missing and has no
    /// default.
    pub fn number(&mut self, name: &str, default: Option<u64>) -> Result<u64, Wrong> {
        let number = self.maybe_number(name)?.or(default);
        number.ok_or_else(|| Wrong(format!("{} needs --{name}", self.command)))
    }

    /// Returns the number of an option, if it is given.
    pub fn maybe_number(&mut self, name: &str) -> Result<Option<u64>, Wrong> {
        let Some(text) = self.values.remove(name) else {
            return Ok(None);
        };
        text.parse()
            .map(Some)
            .map_err(|_| Wrong(format!("--{name} {text:?} is no number")))
    }

    /// Returns whether a flag is given.
    pub fn flag(&mut self, name: &str) -> bool {
        self.values.remove(name).is_some()
    }

    /// Returns the command's operand.
    pub fn subject(&mut self, what: &str) -> Result<String, Wrong> {
        self.subject
            .take()
            .ok_or_else(|| Wrong(format!("{} needs {what}", self.command)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_of_the_help_is_known() {
        let words = crate::HELP.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        let names: Vec<&str> = words.filter_map(|word| word.strip_prefix("--")).collect();
        assert!(names.len() > 20, "{names:?}");
        for name in names {
            let is_known = FLAGS.contains(&name) || NUMBERS.contains(&name);
            assert!(is_known, "--{name}");
        }
    }

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn words_find_their_places() {
        let mut options = parse("reads --count 5 /dev/vda --no-markers").unwrap();
        assert_eq!(options.command, "reads");
        assert_eq!(options.number("count", Some(1)), Ok(5));
        assert_eq!(options.number("warmup", Some(120)), Ok(120));
        assert_eq!(options.subject("DEV").unwrap(), "/dev/vda");
        assert!(options.flag("no-markers") && !options.flag("no-markers"));
    }

    #[test]
    fn nonsense_is_named() {
        assert!(parse("").unwrap_err().contains("no command"));
        assert!(parse("reads a b").unwrap_err().contains("two subjects"));
        assert!(
            parse("reads --count")
                .unwrap_err()
                .contains("--count needs a value")
        );
        assert!(
            parse("reads --seed 1 --seed 2")
                .unwrap_err()
                .contains("twice")
        );
        assert!(
            parse("reads --cuont 1")
                .unwrap_err()
                .contains("no option --cuont")
        );
        let mut options = parse("mixed --seed x").unwrap();
        assert!(
            options
                .number("seed", None)
                .unwrap_err()
                .0
                .contains("\"x\"")
        );
        assert!(
            options
                .number("seconds", None)
                .unwrap_err()
                .0
                .contains("needs --seconds")
        );
        assert!(options.subject("DEV").unwrap_err().0.contains("needs DEV"));
    }
}
