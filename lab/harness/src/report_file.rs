//! Files of figures.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// Writes `figures` as one JSON object; creates the directory if need be.
///
/// # Errors
/// The directory or the file cannot be written, by name.
pub fn write(path: &Path, figures: &impl Serialize) -> Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    }
    let text = serde_json::to_string_pretty(figures).expect("plain numbers and strings");
    fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
}
