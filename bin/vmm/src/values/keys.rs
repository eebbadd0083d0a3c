//! Lists of `key=value` after `--disk`, `--net` and their like.

use anyhow::{Context, bail};

use super::nearest::hint;
use super::size;

/// The pairs of one option, each key at most once.
pub struct Keys<'a> {
    option: &'a str,
    pairs: Vec<(&'a str, &'a str)>,
    /// Every key that was asked for: what the option knows.
    known: Vec<String>,
}

impl<'a> Keys<'a> {
    /// Splits `text` at commas; `option` is named in messages. Blanks before a key do not count.
    ///
    /// # Errors
    /// A key that is given twice, or is missing, or has a blank behind it.
    pub fn parse(option: &'a str, text: &'a str) -> anyhow::Result<Self> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for part in text.split(',') {
            let part = part.trim_start();
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            if key.is_empty() && !text.is_empty() {
                bail!("{option}: a key is missing in {text:?}, before `=` or at a comma too many");
            }
            if key.ends_with(char::is_whitespace) {
                bail!("{option}: {key:?} ends with a blank: write key=value without blanks");
            }
            if pairs.iter().any(|(other, _)| *other == key) {
                bail!("{option}: {key:?} is given twice");
            }
            pairs.push((key, value));
        }
        Ok(Self {
            option,
            pairs,
            known: Vec::new(),
        })
    }

    /// Takes a key's value out; `None` if the key is absent.
    pub fn take(&mut self, key: &str) -> Option<&'a str> {
        if !self.known.iter().any(|known| known == key) {
            self.known.push(key.to_owned());
        }
        let at = self.pairs.iter().position(|(other, _)| *other == key)?;
        Some(self.pairs.remove(at).1)
    }

    /// Returns the value of a key, if it is given.
    pub fn peek(&self, key: &str) -> Option<&'a str> {
        let given = self.pairs.iter().find(|(given, _)| *given == key);
        given.map(|(_, value)| *value)
    }

    /// Refuses keys that the option does not have and others do; `whose` says of one whose it is.
    ///
    /// # Errors
    /// One of them is given.
    pub fn refuse(
        &self,
        foreign: impl IntoIterator<Item = &'static str>,
        whose: impl Fn(&str) -> String,
    ) -> anyhow::Result<()> {
        for key in foreign {
            if self.peek(key).is_some() {
                bail!("{}: {key} is {}", self.option, whose(key));
            }
        }
        Ok(())
    }

    /// Takes a key that has no value; whether it is there.
    pub fn take_word(&mut self, key: &str) -> anyhow::Result<bool> {
        match self.take(key) {
            None => Ok(false),
            Some("") => Ok(true),
            Some(value) => bail!("{}: {key} takes no value ({value:?})", self.option),
        }
    }

    /// Takes an `on|off` key; `default` if it is absent.
    pub fn take_switch(&mut self, key: &str, default: bool) -> anyhow::Result<bool> {
        Ok(self.take_optional_switch(key)?.unwrap_or(default))
    }

    /// Takes an `on|off` key that may be absent.
    pub fn take_optional_switch(&mut self, key: &str) -> anyhow::Result<Option<bool>> {
        match self.take(key) {
            None => Ok(None),
            Some("on") => Ok(Some(true)),
            Some("off") => Ok(Some(false)),
            Some(other) => bail!("{}: {key} is on or off, not {other:?}", self.option),
        }
    }

    /// Takes a number that may be absent; units are those of sizes.
    pub fn take_optional_number(&mut self, key: &str) -> anyhow::Result<Option<u64>> {
        let option = self.option;
        let number = |text| size::number(text).with_context(|| format!("{option}: {key}"));
        self.take(key).map(number).transpose()
    }

    /// Returns those of the keys that a command accepts.
    pub fn part<'k>(&'k mut self, accepted: &'k [&'k str]) -> Part<'k, 'a> {
        Part {
            keys: self,
            accepted,
        }
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    /// Names the first unknown key, the nearest known one, and all that are known.
    pub fn finish(self) -> anyhow::Result<()> {
        let Some((key, _)) = self.pairs.first() else {
            return Ok(());
        };
        let known: Vec<&str> = self.known.iter().map(String::as_str).collect();
        bail!(
            "{}: unknown key {key:?}{} (it takes {})",
            self.option,
            hint(key, &known),
            known.join(", ")
        )
    }
}

/// Keys of a grammar that several commands have, each a part of it: what a command does not accept
/// is absent to it, and stays among the keys.
pub struct Part<'k, 'a> {
    keys: &'k mut Keys<'a>,
    accepted: &'k [&'k str],
}

impl Part<'_, '_> {
    fn accepts(&self, key: &str) -> bool {
        self.accepted.contains(&key)
    }

    /// Returns a key's value.
    pub fn text(&mut self, key: &str) -> Option<String> {
        let value = self.accepts(key).then(|| self.keys.take(key));
        value.flatten().map(str::to_owned)
    }

    /// Returns whether a key is there, which has no value.
    ///
    /// # Errors
    /// It has one.
    pub fn word(&mut self, key: &str) -> anyhow::Result<bool> {
        match self.accepts(key) {
            true => self.keys.take_word(key),
            false => Ok(false),
        }
    }

    /// Returns the value of an `on|off` key.
    ///
    /// # Errors
    /// Another value.
    pub fn switch(&mut self, key: &str) -> anyhow::Result<Option<bool>> {
        match self.accepts(key) {
            true => self.keys.take_optional_switch(key),
            false => Ok(None),
        }
    }

    /// Returns a number; units are those of sizes.
    ///
    /// # Errors
    /// Another value.
    pub fn number(&mut self, key: &str) -> anyhow::Result<Option<u64>> {
        match self.accepts(key) {
            true => self.keys.take_optional_number(key),
            false => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_names_the_nearest_and_all_others() {
        for (text, says) in [
            (
                "pth=a",
                "--net: unknown key \"pth\"; did you mean \"path\"? (it takes path, on)",
            ),
            (
                "colour=a",
                "--net: unknown key \"colour\" (it takes path, on)",
            ),
        ] {
            let mut keys = Keys::parse("--net", text).unwrap();
            keys.take("path");
            keys.take_switch("on", false).unwrap();
            assert_eq!(keys.finish().unwrap_err().to_string(), says);
        }
    }

    #[test]
    fn blanks_before_a_key_do_not_count_and_others_are_named() {
        let mut keys = Keys::parse("--net", "path=a b, on=on,\tmac=x").unwrap();
        assert_eq!(keys.take("path"), Some("a b"));
        assert_eq!(keys.take_optional_switch("on").unwrap(), Some(true));
        assert_eq!(keys.take("mac"), Some("x"));
        keys.finish().unwrap();
        for (text, says) in [
            ("path = a", "\"path \" ends with a blank"),
            ("path=a,", "a comma too many"),
            ("path=a,,on=on", "a comma too many"),
            ("=a", "a key is missing"),
            ("path=a, path=b", "\"path\" is given twice"),
        ] {
            let Err(error) = Keys::parse("--net", text) else {
                panic!("{text} was taken");
            };
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
