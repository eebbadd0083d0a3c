//! The rows: one workload on one subject, for every number of cores.

use std::fmt;

use anyhow::{Context, Result};
use report::Object;
use report::object::round;

use crate::PerOp;

/// One workload on one subject.
struct Row {
    workload: &'static str,
    subject: &'static str,
    goal: Option<f64>,
    counted: Vec<PerOp>,
}

/// All rows, for the same numbers of cores.
pub struct Table {
    cores: Vec<usize>,
    rows: Vec<Row>,
}

impl Table {
    /// No rows yet.
    pub fn new(cores: Vec<usize>) -> Self {
        Self {
            cores,
            rows: Vec::new(),
        }
    }

    /// Counts a row; `goal` is the most transfers per operation that it should have.
    ///
    /// # Errors
    /// The error of `count`, with workload, subject and cores as context.
    pub fn row(
        &mut self,
        workload: &'static str,
        subject: &'static str,
        goal: Option<f64>,
        count: impl Fn(usize) -> Result<PerOp>,
    ) -> Result<()> {
        let counted = self.cores.iter().map(|&cores| {
            count(cores).with_context(|| format!("{workload} on {subject} with {cores} cores"))
        });
        let counted = counted.collect::<Result<_>>()?;
        self.rows.push(Row {
            workload,
            subject,
            goal,
            counted,
        });
        Ok(())
    }

    /// `WORKLOAD_SUBJECT_CORES_transfers`, `_fetches` and `_locks` per operation, and
    /// `WORKLOAD_SUBJECT_goal_transfers`.
    pub fn keys(&self, object: &mut Object) {
        for row in &self.rows {
            let name = format!("{}_{}", row.workload, row.subject.replace('-', "_"));
            for (cores, counted) in self.cores.iter().zip(&row.counted) {
                object.number(
                    &format!("{name}_{cores}_transfers"),
                    round(counted.transfers, 4),
                );
                for (what, count) in [("fetches", counted.fetches), ("locks", counted.locks)] {
                    object.number(&format!("{name}_{cores}_{what}"), round(count, 4));
                }
            }
            if let Some(goal) = row.goal {
                object.number(&format!("{name}_goal_transfers"), round(goal, 4));
            }
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "model: remote line transfers / locks per operation, counted for simulated cores"
        )?;
        write!(f, "{:<24}{:>8}", "", "goal")?;
        for cores in &self.cores {
            write!(f, "{:>15}", format!("N={cores}"))?;
        }
        writeln!(f)?;
        for row in &self.rows {
            let name = format!("{} {}", row.workload, row.subject);
            let goal = row.goal.map_or(String::from("-"), short);
            write!(f, "{name:<24}{goal:>8}")?;
            for counted in &row.counted {
                let miss = row.goal.is_some_and(|goal| counted.transfers > goal + 1e-9);
                let mark = if miss { "*" } else { "" };
                let cell = format!(
                    "{}{mark} / {}",
                    short(counted.transfers),
                    short(counted.locks)
                );
                write!(f, "{cell:>15}")?;
            }
            writeln!(f)?;
        }
        writeln!(f, "* above the goal")
    }
}

fn short(value: f64) -> String {
    let text = match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.3}"),
    };
    match text.trim_end_matches('0').trim_end_matches('.') {
        "" => "0".into(),
        short if text.contains('.') => short.into(),
        _ => text,
    }
}
