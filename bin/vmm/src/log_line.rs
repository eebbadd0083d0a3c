//! One line of the log, as text or as JSON.

use std::fmt::{self, Write};

use clap::ValueEnum;
use tracing::Level;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Lines that begin with the program's name.
    Text,
    /// An object a line: time, level, target, message and fields.
    Json,
}

/// One line of the log.
pub struct Line<'a> {
    /// An event's; what the program says has none.
    pub level: Option<Level>,
    /// Where it comes from.
    pub target: &'a str,
    /// Its text.
    pub message: &'a str,
    /// An event's other fields.
    pub fields: &'a [(&'static str, serde_json::Value)],
}

impl Line<'_> {
    /// Returns the line as `program` writes it, with its end of line.
    pub fn written(&self, program: &str, format: Format) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = match format {
            Format::Text => self.text(program, &mut text),
            Format::Json => self.json(&mut text),
        };
        text.push('\n');
        text
    }

    fn text(&self, program: &str, out: &mut String) -> fmt::Result {
        let Some(level) = self.level else {
            // The program's own words may have several lines: a table.
            return write!(out, "{program}: {}", self.message);
        };
        let level = match level {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        write!(out, "{program}: {level}: {}", OneLine(self.message))?;
        for (name, value) in self.fields {
            match value.as_str() {
                Some(text) if text.contains(' ') || text.is_empty() => {
                    write!(out, " {name}={text:?}")?;
                }
                Some(text) => write!(out, " {name}={}", OneLine(text))?,
                None => write!(out, " {name}={value}")?,
            }
        }
        write!(out, " ({})", self.target)
    }

    fn json(&self, out: &mut String) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let level = self.level.unwrap_or(Level::INFO).as_str().to_lowercase();
        let mut object = serde_json::json!({
            "time": time,
            "level": level,
            "target": self.target,
            "message": self.message,
        });
        if !self.fields.is_empty() {
            let fields = self.fields.iter();
            let fields = fields.map(|(name, value)| ((*name).to_owned(), value.clone()));
            object["fields"] = fields.collect::<serde_json::Map<_, _>>().into();
        }
        write!(out, "{object}")
    }
}

/// Text of which others may have chosen a part, without ends of lines and other control characters.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .chars()
            .try_for_each(|c| f.write_char(if c.is_control() { '\u{fffd}' } else { c }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_one_form_as_text_and_one_as_json() {
        let fields = [
            ("export", serde_json::json!("d0")),
            ("reason", serde_json::json!("no such\nrequest")),
            ("requests", serde_json::json!(3)),
        ];
        let event = Line {
            level: Some(Level::WARN),
            target: "vhost_export::peer",
            message: "given\nup",
            fields: &fields,
        };
        assert_eq!(
            event.written("exitless", Format::Text),
            "exitless: warning: given\u{fffd}up export=d0 reason=\"no such\\nrequest\" requests=3 \
             (vhost_export::peer)\n"
        );
        let said = Line {
            level: None,
            target: "exitless",
            message: "ready: serving",
            fields: &[],
        };
        assert_eq!(
            said.written("exitless", Format::Text),
            "exitless: ready: serving\n"
        );
        for (line, level) in [(&event, "warn"), (&said, "info")] {
            let text = line.written("exitless", Format::Json);
            assert_eq!(text.lines().count(), 1);
            let object: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(object["level"], level);
            assert_eq!(object["message"], line.message);
            assert_eq!(object["target"], line.target);
            assert!(object["time"].as_str().unwrap().ends_with('Z'), "{text}");
        }
        let object: serde_json::Value =
            serde_json::from_str(&event.written("exitless", Format::Json)).unwrap();
        assert_eq!(object["fields"]["requests"], 3);
    }
}
