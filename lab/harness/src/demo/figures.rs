//! The figures of a demo: one flat map, which is written to the report, and its claims.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use crate::system::guest::Outcome;
use crate::system::host::Host;

/// All figures of a demo.
#[derive(Default)]
pub struct Figures {
    values: BTreeMap<String, Value>,
    failed: Vec<String>,
}

impl Figures {
    /// Creates the figures, with nothing but the conditions.
    pub fn new(host: &Host) -> Result<Self> {
        let mut this = Self::default();
        this.set("host", host.label());
        this.set("host_is_emulated", matches!(host, Host::Lab(_)));
        this.set("machine", exit_ledger::conditions::cpu_model());
        this.set("kernel", host.kernel_release()?);
        this.set(
            "commit",
            option_env!("EXITLESS_COMMIT").unwrap_or("unknown"),
        );
        Ok(this)
    }

    /// Sets one figure.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        self.values.insert(key.into(), value.into());
    }

    /// Returns one figure.
    pub fn get(&self, key: &str) -> &Value {
        self.values.get(key).unwrap_or(&Value::Null)
    }

    /// Returns one figure that is a text.
    pub fn text(&self, key: &str) -> &str {
        self.get(key).as_str().unwrap_or("?")
    }

    /// Returns one figure that is a number.
    pub fn number(&self, key: &str) -> f64 {
        self.get(key).as_f64().unwrap_or(f64::NAN)
    }

    /// Sets a claim. The demo fails if one does not hold.
    pub fn claim(&mut self, key: &str, holds: bool, otherwise: impl FnOnce() -> String) {
        self.set(key, holds);
        if !holds {
            self.failed.push(format!("{key}: {}", otherwise()));
        }
    }

    /// Sets a claim that holds if its check succeeded.
    pub fn claim_ok(&mut self, key: &str, check: Result<()>) {
        self.claim(key, check.is_ok(), || {
            check.err().map_or_else(String::new, |e| format!("{e:#}"))
        });
    }

    /// Returns whether all claims held.
    pub fn holds(&self) -> bool {
        self.failed.is_empty()
    }

    /// Returns the claims that did not hold, each with the value found.
    pub fn failed(&self) -> &[String] {
        &self.failed
    }

    /// Sets the choices that the program made for the guest with default options.
    pub fn set_defaults(&mut self, outcome: &Outcome) {
        for (key, of) in [("default_iommu_mode", "mode"), ("default_idle", "idle")] {
            self.set(key, outcome.ledger[of].clone());
        }
    }

    /// Returns all figures as one flat object.
    pub fn json(&self) -> Value {
        json!(self.values)
    }
}
