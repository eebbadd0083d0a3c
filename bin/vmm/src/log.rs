//! The log: messages and events on standard error, and their form.
//!
//! Messages of this program (`say!`) and events of guests and devices have one form. The events are
//! chosen by `--log`, else by the variable `RUST_LOG`, else they are warnings and errors. As text
//! each is a line `exitless: …`, events with their level, without a time: collectors of lines
//! (journald, syslog) stamp them. As JSON each is one object in a line.

use std::fmt::Debug;

use anyhow::{Result, anyhow};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::log_line::{Format, Line};
use crate::{log_limit, messages};

/// The options of every command.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Log")]
pub struct LogArgs {
    /// Levels of the log on standard error: off, error, warn, info, debug or trace, or a list of
    /// levels by module such as `warn,machine=debug` [default: $RUST_LOG, else warn]
    #[arg(long = "log", value_name = "LEVEL", global = true, value_parser = targets)]
    log: Option<Targets>,

    /// Form of the log.
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

/// Parses a level, or a list of levels by module.
fn targets(text: &str) -> Result<Targets> {
    let refused = || {
        anyhow!(
            "a level (off, error, warn, info, debug, trace), or a list such as warn,machine=debug"
        )
    };
    let parsed: Targets = text.parse().map_err(|_| refused())?;
    // A word that is no level is taken for a module by the library, and nothing else would be
    // logged.
    let is_level =
        |part: &str| part.contains('=') || !part.is_empty() && part.parse::<LevelFilter>().is_ok();
    match text.split(',').all(|part| is_level(part.trim())) {
        true => Ok(parsed),
        false => Err(refused()),
    }
}

impl LogArgs {
    /// Starts the log. Warnings and errors have the budgets that are answered.
    pub fn start(&self) -> log_limit::Budgets {
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
        let budgets = log_limit::Budgets::new(|text| messages::say!("{text}"));
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

/// Fields of an event.
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

#[cfg(test)]
mod tests {
    use super::*;

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
