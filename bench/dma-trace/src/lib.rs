//! The page sequence of a stock kernel's DMA mapping: the pages that its network driver maps and
//! unmaps, in order.
//!
//! **What.** [`Trace`] is the recorded sequence. [`Trace::parse`] reads the text files of
//! `bench/dma/traces` (the README there describes the format), [`Trace::to_text`] writes them.
//! [`ftrace`] converts the kernel's `trace` file to events; [`calls`] does so for a guest whose
//! calls of the DMA API were traced, under any IOMMU. [`reuse`] counts how often a mapping recurs,
//! on which every policy that keeps mappings depends.
//!
//! **How work flows.** `cargo run --release -p dma-trace` boots Debian's kernel in the lab with an
//! emulated IOMMU and a network card behind it, sends traffic both ways and writes such a file.
//! `bench/dma` replays it.
//!
//! **Left out.** Times: the clock of an emulated machine has no meaning. Addresses inside a page:
//! the kernel's events have whole pages. IOVAs: the replay uses the allocator under test.
#![forbid(unsafe_code)]

pub mod calls;
pub mod ftrace;
pub mod reuse;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::str::FromStr;

/// First line of a file: format and version.
pub const MAGIC: &str = "# exitless dma trace 1";

/// Most pages of one event (1 GiB): a larger number is a damaged file.
pub const PAGES_MAX: u32 = 1 << 18;

/// Highest page-frame number: 52-bit physical addresses of 4 KiB pages.
pub const PFN_MAX: u64 = (1 << 40) - 1;

/// Access of the device to the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Access {
    /// The device reads (transmit buffers).
    Read,
    /// The device writes (receive buffers).
    Write,
    /// Both (rings).
    Both,
}

/// Whether pages are mapped or unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// The mapping begins.
    Map,
    /// A mapping of the same pages and access ends.
    Unmap,
}

/// Begin or end of one mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Event {
    /// Begin or end.
    pub action: Action,
    /// Access of the device.
    pub access: Access,
    /// First page-frame number, 4 KiB pages, at most [`PFN_MAX`].
    pub pfn: u64,
    /// Number of pages, 1 to [`PAGES_MAX`].
    pub pages: u32,
}

/// A recorded sequence.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trace {
    /// `key: value` lines of the file's head, in order.
    pub head: Vec<(String, String)>,
    /// The events, in the kernel's order. The map of every unmap comes before it.
    pub events: Vec<Event>,
}

/// Error in a trace's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    /// Line number, from 1.
    pub line: usize,
    /// Reason.
    pub reason: &'static str,
}

impl std::fmt::Display for ParseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for ParseError {}

impl Event {
    fn letter(self) -> char {
        let letter = match self.access {
            Access::Read => 'r',
            Access::Write => 'w',
            Access::Both => 'b',
        };
        match self.action {
            Action::Map => letter,
            Action::Unmap => letter.to_ascii_uppercase(),
        }
    }
}

impl FromStr for Event {
    type Err = &'static str;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let mut chars = line.chars();
        let (action, access) = match chars.next() {
            Some('r') => (Action::Map, Access::Read),
            Some('w') => (Action::Map, Access::Write),
            Some('b') => (Action::Map, Access::Both),
            Some('R') => (Action::Unmap, Access::Read),
            Some('W') => (Action::Unmap, Access::Write),
            Some('B') => (Action::Unmap, Access::Both),
            _ => return Err("an event begins with one of r w b R W B"),
        };
        let (pfn, pages) = match chars.as_str().split_once('+') {
            Some((pfn, pages)) => (pfn, pages.parse().map_err(|_| "not a number of pages")?),
            None => (chars.as_str(), 1),
        };
        // Rust's parser would accept a sign.
        if !pfn.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err("not a page-frame number");
        }
        let pfn = u64::from_str_radix(pfn, 16).map_err(|_| "not a page-frame number")?;
        if pfn > PFN_MAX {
            return Err("page-frame number above 52-bit addresses");
        }
        if !(1..=PAGES_MAX).contains(&pages) {
            return Err("number of pages outside 1 to 262144");
        }
        Ok(Self {
            action,
            access,
            pfn,
            pages,
        })
    }
}

impl Trace {
    /// Parses a trace, and checks that every unmap ends a mapping that is live.
    ///
    /// # Errors
    /// The first line that is no event, or that unmaps a page which is not mapped.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let mut trace = Self::default();
        let mut live: HashMap<(Access, u64, u32), u32> = HashMap::new();
        for (line, content) in (1..).zip(text.lines()) {
            let wrong = |reason| ParseError { line, reason };
            if line == 1 {
                if content != MAGIC {
                    return Err(wrong("not a trace of version 1"));
                }
            } else if let Some(head) = content.strip_prefix("# ") {
                let (key, value) = head
                    .split_once(": ")
                    .ok_or_else(|| wrong("no `key: value`"))?;
                trace.head.push((key.to_owned(), value.to_owned()));
            } else {
                let event: Event = content.parse().map_err(wrong)?;
                let count = live
                    .entry((event.access, event.pfn, event.pages))
                    .or_default();
                match event.action {
                    Action::Map => *count += 1,
                    Action::Unmap => {
                        *count = count
                            .checked_sub(1)
                            .ok_or_else(|| wrong("unmaps what is not mapped"))?;
                    }
                }
                trace.events.push(event);
            }
        }
        if text.is_empty() {
            return Err(ParseError {
                line: 1,
                reason: "not a trace of version 1",
            });
        }
        Ok(trace)
    }

    /// Returns the value of a line of the head.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&str> {
        let mut lines = self.head.iter();
        lines
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    /// Returns the text that [`Trace::parse`] reads.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!("{MAGIC}\n");
        for (key, value) in &self.head {
            text.push_str(&format!("# {key}: {value}\n"));
        }
        for event in &self.events {
            // Writing to a string cannot fail.
            let _ = write!(text, "{}{:x}", event.letter(), event.pfn);
            if event.pages != 1 {
                let _ = write!(text, "+{}", event.pages);
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# exitless dma trace 1\n# kernel: 6.1\nb1000+16\nw1a2b\nr7\nW1a2b\nR7\n";

    #[test]
    fn text_goes_both_ways() {
        let trace = Trace::parse(TEXT).unwrap();
        assert_eq!(trace.value("kernel"), Some("6.1"));
        assert_eq!(
            trace.events[0],
            Event {
                action: Action::Map,
                access: Access::Both,
                pfn: 0x1000,
                pages: 16
            }
        );
        assert_eq!(
            trace.events[3],
            Event {
                action: Action::Unmap,
                access: Access::Write,
                pfn: 0x1a2b,
                pages: 1
            }
        );
        assert_eq!(trace.to_text(), TEXT);
    }

    #[test]
    fn damaged_text_is_refused_with_its_line() {
        let reason = |tail: &str| Trace::parse(&format!("{MAGIC}\n{tail}\n")).unwrap_err();
        assert_eq!(
            reason("w1\nR1"),
            ParseError {
                line: 3,
                reason: "unmaps what is not mapped"
            }
        );
        assert_eq!(reason("x1").line, 2);
        for bad in [
            "w",
            "w+1",
            "w-1",
            "w1+0",
            "w1+262145",
            "w10000000000",
            "w1+x",
            "",
            "#x",
            "# x",
        ] {
            assert!(
                Trace::parse(&format!("{MAGIC}\n{bad}\n")).is_err(),
                "{bad:?}"
            );
        }
        assert!(Trace::parse("").is_err());
        assert!(Trace::parse("w1\n").is_err());
        // One page mapped twice may be unmapped twice, not three times.
        assert!(Trace::parse(&format!("{MAGIC}\nw1\nw1\nW1\nW1\n")).is_ok());
        assert!(Trace::parse(&format!("{MAGIC}\nw1\nw1\nW1\nW1\nW1\n")).is_err());
    }

    #[test]
    fn the_recorded_traces_are_whole_and_say_where_they_come_from() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../dma/traces");
        let mut seen = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "txt") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.len() <= 300 << 10, "{}", path.display());
            let trace = Trace::parse(&text).unwrap();
            for key in ["kernel", "device", "load", "command", "events", "reuse"] {
                assert!(trace.value(key).is_some(), "{} {key}", path.display());
            }
            let events = trace.events.len().to_string();
            assert_eq!(trace.value("events"), Some(&*events));
            assert_eq!(trace.value("reuse"), Some(&*reuse::of(&trace).to_string()));
            seen += 1;
        }
        assert!(seen > 0);
    }
}
