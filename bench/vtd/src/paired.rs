//! Comparison of this build with an old one, in turns. A ratio is of two figures of one round, so
//! that disturbances by other programs affect both.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use report::Measured;

/// Number of rounds of each case.
const ROUNDS: usize = 31;

/// Arguments of both programs (case, other leases in flight), and the key of the ratio.
const CASES: [(&str, u32, &str); 8] = [
    ("hit", 0, "translate_hit_vs_5898c32"),
    ("hit", 8192, "translate_hit_8192_leases_vs_5898c32"),
    ("hit_64k", 0, "translate_hit_64k_vs_5898c32"),
    ("hit_64k", 8192, "translate_hit_64k_8192_leases_vs_5898c32"),
    ("scattered_64k", 0, "translate_scattered_64k_vs_5898c32"),
    (
        "scattered_64k",
        8192,
        "translate_scattered_64k_8192_leases_vs_5898c32",
    ),
    ("drain_256", 0, "drain_256_vs_5898c32"),
    ("drain_256", 8192, "drain_256_8192_leases_vs_5898c32"),
];

/// Result of one case, for both builds.
pub struct Pair {
    /// Key under which the ratio is reported.
    pub key: &'static str,
    /// New ÷ old.
    pub ratio: Measured,
    /// Nanoseconds of this build.
    pub new: Measured,
    /// Nanoseconds of the old one.
    pub old: Measured,
}

fn measure(program: &Path, case: &str, leases: u32) -> Result<f64> {
    let mut command = Command::new(program);
    let output = command.arg(case).arg(leases.to_string()).output();
    let output = output.with_context(|| format!("starting {}", program.display()))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {error}", program.display());
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim()
        .parse()
        .with_context(|| format!("{} answered {text:?}", program.display()))
}

/// Measures every case by the old build's program and by this one's.
pub fn run(old: &Path) -> Result<Vec<Pair>> {
    let new = std::env::current_exe()?.with_file_name("vtd-case");
    let mut pairs = Vec::new();
    for (case, leases, key) in CASES {
        let (mut olds, mut news, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            // The two builds begin alternately.
            let (first, second) = if round % 2 == 0 {
                (old, &*new)
            } else {
                (&*new, old)
            };
            let first = measure(first, case, leases)?;
            let second = measure(second, case, leases)?;
            let (old_ns, new_ns) = if round % 2 == 0 {
                (first, second)
            } else {
                (second, first)
            };
            ratios.push(new_ns / old_ns);
            olds.push(old_ns);
            news.push(new_ns);
        }
        let of = |runs: Vec<f64>| Measured::of(runs).expect("there are rounds");
        pairs.push(Pair {
            key,
            ratio: of(ratios),
            new: of(news),
            old: of(olds),
        });
    }
    Ok(pairs)
}
