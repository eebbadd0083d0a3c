//! Lists of `key=value` after `--disk` and `--net`.

use anyhow::{Context, bail};

/// The pairs of one option, each key at most once.
pub struct Keys<'a> {
    option: &'a str,
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Keys<'a> {
    /// Splits `text` at commas; `option` is named in messages.
    pub fn parse(option: &'a str, text: &'a str) -> anyhow::Result<Self> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            if pairs.iter().any(|(other, _)| *other == key) {
                bail!("{option}: {key:?} is given twice");
            }
            pairs.push((key, value));
        }
        Ok(Self { option, pairs })
    }

    /// Takes a key's value out; `None` if the key is absent.
    pub fn take(&mut self, key: &str) -> Option<&'a str> {
        let at = self.pairs.iter().position(|(other, _)| *other == key)?;
        Some(self.pairs.remove(at).1)
    }

    /// Takes an `on|off` key; `default` if it is absent.
    pub fn take_switch(&mut self, key: &str, default: bool) -> anyhow::Result<bool> {
        match self.take(key) {
            None => Ok(default),
            Some("on") => Ok(true),
            Some("off") => Ok(false),
            Some(other) => bail!("{}: {key} is on or off, not {other:?}", self.option),
        }
    }

    /// Takes an `on|off` key that may be absent.
    pub fn take_optional_switch(&mut self, key: &str) -> anyhow::Result<Option<bool>> {
        match self.pairs.iter().any(|(other, _)| *other == key) {
            true => self.take_switch(key, false).map(Some),
            false => Ok(None),
        }
    }

    /// Takes a number that may be absent.
    pub fn take_optional_number(&mut self, key: &str) -> anyhow::Result<Option<u64>> {
        match self.pairs.iter().any(|(other, _)| *other == key) {
            true => self.take_number(key, 0, 0..=u64::MAX).map(Some),
            false => Ok(None),
        }
    }

    /// Takes a number in `range`; `default` if it is absent.
    pub fn take_number(
        &mut self,
        key: &str,
        default: u64,
        range: std::ops::RangeInclusive<u64>,
    ) -> anyhow::Result<u64> {
        let Some(text) = self.take(key) else {
            return Ok(default);
        };
        let number = text
            .parse()
            .with_context(|| format!("{}: {key}={text:?} is no number", self.option))?;
        if !range.contains(&number) {
            let (low, high) = (range.start(), range.end());
            bail!("{}: {key} is {low} to {high}, not {number}", self.option);
        }
        Ok(number)
    }

    /// Nothing may be left.
    pub fn finish(self) -> anyhow::Result<()> {
        match self.pairs.first() {
            None => Ok(()),
            Some((key, _)) => bail!("{}: unknown key {key:?}", self.option),
        }
    }
}
