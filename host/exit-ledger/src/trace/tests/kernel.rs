//! Model of the kernel's histogram triggers, as far as the joins use them: filters, variables kept
//! under the thread, `onmatch` and `trace`. An expression that names a variable unsets it. A
//! variable that is not set ends the trigger that names it.

use std::collections::BTreeMap;

use super::super::triggers::Trigger;

/// An event: its directory, and its fields.
#[derive(Clone, Debug)]
pub struct Event {
    pub event: String,
    pub fields: BTreeMap<String, u64>,
}

/// All triggers, and what they have counted.
pub struct Kernel {
    triggers: Vec<Trigger>,
    /// By name and thread.
    variables: BTreeMap<(String, u64), u64>,
    /// By event and keys.
    counts: BTreeMap<(String, Vec<u64>), u64>,
    /// Fields of synthetic events.
    synthetic: BTreeMap<String, Vec<String>>,
}

impl Kernel {
    /// With synthetic events as they are defined, and triggers.
    pub fn new(definitions: &[String], triggers: &[Trigger]) -> Self {
        let synthetic = definitions.iter().map(|definition| {
            let (name, fields) = definition.split_once(' ').expect("a name and fields");
            let field = |text: &str| text.rsplit(' ').next().expect("a name").to_owned();
            (name.to_owned(), fields.split("; ").map(field).collect())
        });
        Self {
            synthetic: synthetic.collect(),
            triggers: triggers.to_vec(),
            variables: BTreeMap::new(),
            counts: BTreeMap::new(),
        }
    }

    /// Returns the rows of `event`'s histograms.
    pub fn rows(&self, event: &str) -> Vec<(Vec<u64>, u64)> {
        let of_event = self.counts.iter().filter(|((of, _), _)| of == event);
        of_event
            .map(|((_, keys), count)| (keys.clone(), *count))
            .collect()
    }

    /// An event happens.
    pub fn happen(&mut self, event: &Event) {
        for trigger in self.triggers.clone() {
            if trigger.event == event.event && holds(&trigger.filter, &event.fields) {
                self.run(&trigger.text, event);
            }
        }
    }

    fn run(&mut self, text: &str, event: &Event) {
        let mut parts = text.split(':').skip(1);
        let keys = parts.next().expect("keys").strip_prefix("keys=");
        let keys = keys.expect("keys").split(',').map(|key| event.fields[key]);
        *self
            .counts
            .entry((event.event.clone(), keys.collect()))
            .or_default() += 1;
        let thread = event.fields["common_pid"];
        let mut found: BTreeMap<String, u64> = event.fields.clone();
        for part in parts {
            if let Some((_, traced)) = part.split_once("trace(") {
                self.trace(traced.trim_end_matches(')'), &found);
            } else if !part.starts_with("size=") {
                let assignments: Vec<_> =
                    part.split(',').filter_map(|a| a.split_once('=')).collect();
                // All are read before one is unset.
                let values: Option<Vec<_>> = assignments
                    .iter()
                    .map(|(name, value)| Some((*name, self.value(value, thread, event)?)))
                    .collect();
                let Some(values) = values else { return };
                for (name, value) in values {
                    found.insert(format!("${name}"), value);
                    self.variables.insert((name.to_owned(), thread), value);
                }
                for (_, value) in assignments {
                    if let Some((operand, _)) = value.split_once('+') {
                        let spent = operand.trim_start_matches('$').to_owned();
                        self.variables.remove(&(spent, thread));
                    }
                }
            }
        }
    }

    fn value(&self, text: &str, thread: u64, event: &Event) -> Option<u64> {
        let operands = text
            .split('+')
            .map(|operand| match operand.strip_prefix('$') {
                Some(variable) => self.variables.get(&(variable.to_owned(), thread)).copied(),
                None => event.fields.get(operand).copied(),
            });
        operands.sum()
    }

    fn trace(&mut self, call: &str, found: &BTreeMap<String, u64>) {
        let mut words = call.split(',');
        let name = words.next().expect("a synthetic event").to_owned();
        let values = words.map(|word| found[word]);
        let mut fields: BTreeMap<_, _> =
            self.synthetic[&name].iter().cloned().zip(values).collect();
        fields.insert("common_pid".into(), found["common_pid"]);
        let event = format!("events/synthetic/{name}");
        self.happen(&Event { event, fields });
    }
}

/// Returns whether the filter, in C's syntax without precedence of its own (`||` below `&&`),
/// holds.
fn holds(filter: &str, fields: &BTreeMap<String, u64>) -> bool {
    if filter.is_empty() {
        return true;
    }
    for operator in ["||", "&&"] {
        let parts = split_outside(filter, operator);
        if parts.len() > 1 {
            let mut each = parts.iter().map(|part| holds(part, fields));
            return if operator == "||" {
                each.any(|holds| holds)
            } else {
                each.all(|holds| holds)
            };
        }
    }
    if let Some(negated) = filter.strip_prefix('!') {
        return !holds(negated, fields);
    }
    if let Some(inside) = filter.strip_prefix('(') {
        return holds(inside.strip_suffix(')').expect("a closing one"), fields);
    }
    type Comparison = fn(u64, u64) -> bool;
    let compare: [(&str, Comparison); 5] = [
        ("==", |a, b| a == b),
        (">=", |a, b| a >= b),
        ("<", |a, b| a < b),
        ("&", |a, b| a & b != 0),
        (">", |a, b| a > b),
    ];
    let (name, operator, value) = compare
        .iter()
        .find_map(|(text, operator)| {
            let (name, value) = filter.split_once(text)?;
            Some((name, operator, value))
        })
        .expect("a comparison");
    operator(fields[name], value.parse().expect("a number"))
}

/// At each `operator` that no parenthesis encloses.
fn split_outside<'a>(text: &'a str, operator: &str) -> Vec<&'a str> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ if depth == 0 && text[at..].starts_with(operator) => {
                parts.push(&text[start..at]);
                start = at + operator.len();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}
