//! Throughput of more cores: the discrete-event **model** of `dma-model`, fed with the constants of
//! this run.
//!
//! One and two cores are measured; where the model is off by more than 20 % at either, its values
//! for more are neither printed nor kept. It is never a measurement, and is called «model» wherever
//! it is printed.

use dma_model::{Constants, System, run, validate};

use report::Measured;

use crate::measure::Turns;
use crate::record::Record;

/// Cores that are played.
pub const CORES: [usize; 5] = [1, 2, 4, 8, 16];

/// Systems that are played: name in keys, name for people, the row whose throughput is measured.
pub const SYSTEMS: [(&str, &str, &str); 5] = [
    (
        "strict_lock",
        "strict behind a lock, 500 ns",
        "d_strict_lock_f500",
    ),
    (
        "strict_combining",
        "strict, combined, 500 ns",
        "d_strict_combining_f500",
    ),
    ("deferred", "deferred, 500 ns a flush", "d_deferred_f500"),
    ("tree", "a-1, tree behind a lock", "a1_tree"),
    ("chunk", "a-1, chunk per core", "a1_chunk"),
];

fn system(record: &Record, name: &str) -> Option<System> {
    let ns = |row: &str| record.get(&format!("{row}_1thr_ns"));
    Some(match name {
        "strict_lock" => System::StrictLock {
            own_ns: ns("d_strict_lock_f0")?,
        },
        "strict_combining" => System::StrictCombining {
            own_ns: ns("d_strict_combining_f0")?,
            gather_ns: dma_model::GATHER_NS,
        },
        "deferred" => System::Deferred {
            own_ns: ns("d_deferred_f0")?,
            entries: 256,
        },
        "tree" => {
            // The whole pair runs under the lock.
            System::TreeLock {
                own_ns: 0.0,
                critical_ns: ns("a1_tree")?,
                lines: dma_model::TREE_LINES,
            }
        }
        _ => System::Private {
            own_ns: ns("a1_chunk")?,
            lines: 0.0,
        },
    })
}

/// The round trip beside the measured rows that the model is compared with.
fn round_trip(record: &Record) -> Option<f64> {
    let rows = SYSTEMS
        .iter()
        .filter_map(|(.., row)| record.get(&format!("{row}_2thr_rtt_ns")));
    Measured::of(rows).map(|rtt| rtt.median)
}

/// Plays the systems whose rows were measured.
pub fn measure(_: &Turns, record: &mut Record) {
    let (Some(rtt), Some(lock_ns)) = (round_trip(record), record.get("lock_ns")) else {
        println!("\nmodel: not played: no round trip was measured");
        return;
    };
    let constants = Constants {
        line_ns: rtt / 2.0,
        lock_ns,
        ..Constants::default()
    };
    println!(
        "\nmodel (not measured): {:.0} ns per line, {lock_ns:.1} ns per lock; millions of \
         operations per second, all cores",
        constants.line_ns
    );
    println!(
        "{:32} {:>9} {:>9} | {:>9} {:>9} {:>9} {:>9} {:>9}",
        "cores", "1 meas.", "2 meas.", "1 model", "2", "4", "8", "16"
    );
    for (name, title, row) in SYSTEMS {
        let Some(system) = system(record, name) else {
            println!("{title:32} not played: its rows were not measured");
            continue;
        };
        let measured: Vec<_> = [1, 2]
            .into_iter()
            .filter_map(|cores| Some((cores, record.get(&format!("{row}_{cores}thr_mps"))?)))
            .collect();
        let checks = validate(system, constants, &measured);
        for check in &checks {
            let key = format!("model_{name}_{}cores_off", check.cores);
            record.number(&key, check.deviation(), 3);
        }
        if let Some(check) = checks.iter().find(|check| !check.holds()) {
            println!("{title:32} does not hold: {check}");
            continue;
        }
        let played = CORES.map(|cores| run(system, constants, cores).mps);
        for (cores, mps) in CORES.iter().zip(played) {
            record.number(&format!("model_{name}_{cores}cores_mps"), mps, 3);
        }
        let text: Vec<_> = played.iter().map(|mps| format!("{mps:>9.2}")).collect();
        let of = |cores| {
            let found = measured.iter().find(|(of, _)| *of == cores);
            found.map_or_else(|| "-".to_owned(), |(_, mps)| format!("{mps:.2}"))
        };
        println!("{title:32} {:>9} {:>9} | {}", of(1), of(2), text.join(" "));
    }
}
