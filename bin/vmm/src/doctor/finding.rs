//! A line of the report: a property of the host that was checked, and its quality.

/// Quality of a property that was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing to wish for.
    Good,
    /// Works, with a restriction.
    Limited,
    /// Not there.
    Missing,
}

/// A property that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Name in JSON; does not change.
    pub key: &'static str,
    /// Name for people.
    pub name: &'static str,
    /// Its quality.
    pub state: State,
    /// Its value, for people.
    pub value: String,
    /// Its use.
    pub why: &'static str,
    /// Advice; may be empty.
    pub next: &'static str,
}
