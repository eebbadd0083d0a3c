//! One flat JSON object per run: units in the names of its keys, machine and commit beside the
//! figures.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::{Host, Measured};

/// The figures of one run.
#[derive(Clone, Debug, Default)]
pub struct Object {
    keys: Map<String, Value>,
}

impl Object {
    /// With the machine as its first keys, and how it was measured (`mode`).
    pub fn new(host: &Host, mode: &str) -> Self {
        let mut object = Self::default();
        for (key, value) in [
            ("machine", host.to_string()),
            ("kernel", host.kernel.clone()),
            ("mode", mode.to_owned()),
            ("commit", host.commit.clone()),
        ] {
            object.value(key, value);
        }
        object.number("load_average", host.load_average);
        object
    }

    /// An object that was written before.
    ///
    /// # Errors
    /// The file cannot be read, or holds no object.
    pub fn read(path: &Path) -> io::Result<Self> {
        match serde_json::from_str(&fs::read_to_string(path)?)? {
            Value::Object(keys) => Ok(Self { keys }),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not a JSON object",
            )),
        }
    }

    /// Sets a key to any value.
    pub fn value(&mut self, key: &str, value: impl Into<Value>) {
        self.keys.insert(key.to_owned(), value.into());
    }

    /// Sets a key to a number; one that is none (0 / 0) becomes null.
    pub fn number(&mut self, key: &str, value: f64) {
        self.value(key, json!(value));
    }

    /// Sets a key to a median rounded to `digits` decimals, and `KEY_spread` to the distance of the
    /// extremes.
    pub fn measured(&mut self, key: &str, measured: &Measured, digits: i32) {
        self.number(key, round(measured.median, digits));
        self.number(&format!("{key}_spread"), round(measured.spread(), digits));
    }

    /// Sets all of `rows`, to one decimal; a table of them, whose first cell is `heading`.
    pub fn measured_rows(&mut self, heading: &str, rows: &[(&str, Measured)]) -> String {
        let mut table = format!("{heading:<24}{:>12}{:>12}{:>12}\n", "median", "min", "max");
        for (key, measured) in rows {
            let Measured { median, min, max } = measured;
            table += &format!("{key:<24}{median:>12.1}{min:>12.1}{max:>12.1}\n");
            self.measured(key, measured, 1);
        }
        table
    }

    /// Says that something was not measured, unless it was.
    pub fn missing(&mut self, key: &str) {
        self.keys.entry(key).or_insert(Value::Null);
    }

    /// A key's number, if it was measured.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.keys.get(key)?.as_f64()
    }

    /// A key's text; empty where there is none.
    pub fn text(&self, key: &str) -> &str {
        self.keys.get(key).and_then(Value::as_str).unwrap_or("")
    }

    /// All keys.
    pub fn keys(&self) -> &Map<String, Value> {
        &self.keys
    }

    /// Writes the object, and makes the directory it lies in.
    ///
    /// # Errors
    /// The file or the directory cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(path, serde_json::to_string_pretty(&self.keys)? + "\n")
    }
}

/// `value` with `digits` decimals.
pub fn round(value: f64, digits: i32) -> f64 {
    let unit = 10_f64.powi(digits);
    (value * unit).round() / unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_object_reads_back_with_null_for_no_number() {
        let mut object = Object::default();
        object.number("none", f64::NAN);
        object.number("a_ns", 1.5);
        object.missing("a_ns");
        object.missing("b_ns");
        let measured = Measured::of([1.04, 2.06, 3.0]).expect("three runs");
        object.measured("c_ns", &measured, 1);
        let path = std::env::temp_dir().join(format!("report-{}/r.json", std::process::id()));
        object.write(&path).expect("written");
        let read = Object::read(&path).expect("read");
        fs::remove_dir_all(path.parent().expect("a directory")).expect("removed");
        assert_eq!(read.keys(), object.keys());
        assert_eq!(read.get("a_ns"), Some(1.5));
        assert_eq!(read.keys()["none"], Value::Null);
        assert_eq!(read.keys()["b_ns"], Value::Null);
        assert_eq!(
            (read.get("c_ns"), read.get("c_ns_spread")),
            (Some(2.1), Some(2.0))
        );
    }
}
