//! The log: what goes to standard error, and how it is written.
//!
//! All of it has one form: what this program says ([`say!`](crate::messages::say)), and events of guests and devices. Which
//! events there are is chosen by `--log`, else by the variable `RUST_LOG`: warnings and errors, unless something is said.
//! As text each is a line `exitless: …`, events with their level, without a time: who collects lines (journald, syslog) stamps them.
//! As JSON each is one object in a line.

use std::fmt::{self, Debug, Write};

use anyhow::{Result, anyhow};
use clap::ValueEnum;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::{flood, messages};

/// The options of every command.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Log")]
pub struct LogArgs {
    /// What the log on standard error has: off, error, warn, info, debug or trace, or a list of levels by module such as
    /// `warn,machine=debug` [default: $RUST_LOG, else warn]
    #[arg(long = "log", value_name = "LEVEL", global = true, value_parser = targets)]
    log: Option<Targets>,

    /// How it is written.
    #[arg(
        long,
        value_enum,
        value_name = "text|json",
        default_value_t = Format::Text,
        global = true,
        hide_possible_values = true
    )]
    log_format: Format,
}

/// `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Lines that begin with `exitless:`.
    Text,
    /// An object a line: time, level, target, message and fields.
    Json,
}

/// A level, or a list of levels by module.
fn targets(text: &str) -> Result<Targets> {
    let refused = || {
        anyhow!(
            "a level (off, error, warn, info, debug, trace), or a list such as warn,machine=debug"
        )
    };
    let parsed: Targets = text.parse().map_err(|_| refused())?;
    // A word that is no level is taken for a module by the library, and nothing else would be heard.
    let is_level =
        |part: &str| part.contains('=') || !part.is_empty() && part.parse::<LevelFilter>().is_ok();
    match text.split(',').all(|part| is_level(part.trim())) {
        true => Ok(parsed),
        false => Err(refused()),
    }
}

impl LogArgs {
    /// Starts the log. Warnings and errors have the budgets that are answered.
    pub fn start(&self) -> flood::Budgets {
        messages::set_format(self.log_format);
        let quiet = Targets::new().with_default(LevelFilter::WARN);
        let chosen = match (&self.log, std::env::var("RUST_LOG")) {
            (Some(targets), _) => targets.clone(),
            (None, Ok(text)) => text.parse().unwrap_or_else(|error| {
                messages::say!("RUST_LOG={text:?} is not understood ({error}); taking `warn`");
                quiet
            }),
            (None, Err(_)) => quiet,
        };
        let budgets = flood::Budgets::new(|text| messages::say!("{text}"));
        tracing_subscriber::registry()
            .with(Events)
            .with(budgets.clone())
            .with(chosen)
            .init();
        budgets
    }
}

/// Writes events.
struct Events;

impl<S: Subscriber> Layer<S> for Events {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut fields = Fields::default();
        event.record(&mut fields);
        messages::write(&Line {
            level: Some(*metadata.level()),
            target: metadata.target(),
            message: &fields.message,
            fields: &fields.others,
        });
    }
}

/// What an event says, by its fields' names.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, serde_json::Value)>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        match field.name() {
            "message" => self.message = text,
            name => self.others.push((name, text.into())),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.others.push((field.name(), value.into()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.others.push((field.name(), value.into()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.others.push((field.name(), value.into()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.others.push((field.name(), value.into()));
    }
}

/// One line of the log.
pub struct Line<'a> {
    /// An event's; what the program says has none.
    pub level: Option<Level>,
    /// Where it comes from.
    pub target: &'a str,
    /// What it says.
    pub message: &'a str,
    /// An event's other fields.
    pub fields: &'a [(&'static str, serde_json::Value)],
}

impl Line<'_> {
    /// As it is written, with its end of line.
    pub fn written(&self, format: Format) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = match format {
            Format::Text => self.text(&mut text),
            Format::Json => self.json(&mut text),
        };
        text.push('\n');
        text
    }

    fn text(&self, out: &mut String) -> fmt::Result {
        let Some(level) = self.level else {
            // The program's own words may have several lines: a table.
            return write!(out, "exitless: {}", self.message);
        };
        let level = match level {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        write!(out, "exitless: {level}: {}", OneLine(self.message))?;
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
            event.written(Format::Text),
            "exitless: warning: given\u{fffd}up export=d0 reason=\"no such\\nrequest\" requests=3 (vhost_export::peer)\n"
        );
        let said = Line {
            level: None,
            target: "exitless",
            message: "ready: serving",
            fields: &[],
        };
        assert_eq!(said.written(Format::Text), "exitless: ready: serving\n");
        for (line, level) in [(&event, "warn"), (&said, "info")] {
            let text = line.written(Format::Json);
            assert_eq!(text.lines().count(), 1);
            let object: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(object["level"], level);
            assert_eq!(object["message"], line.message);
            assert_eq!(object["target"], line.target);
            assert!(object["time"].as_str().unwrap().ends_with('Z'), "{text}");
        }
        let object: serde_json::Value = serde_json::from_str(&event.written(Format::Json)).unwrap();
        assert_eq!(object["fields"]["requests"], 3);
    }

    #[test]
    fn a_word_that_is_no_level_is_refused_and_not_taken_for_a_module() {
        for text in [
            "off",
            "error",
            "warn",
            "INFO",
            "debug",
            "trace",
            "warn,machine=debug",
            "machine=debug",
        ] {
            targets(text).unwrap();
        }
        for text in ["", "loud", "warn,", "warn,loud", "machine=loud", "verbose"] {
            assert!(targets(text).is_err(), "{text}");
        }
    }
}
