//! All runs, and their figures: a JSON object, tables, plots.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use report::svg::{Series, bars, lines};
use serde_json::{Value, json};

use super::phased::{GUESTS, Phased, ROUNDS, TOTAL};
use super::works::{LIMITS, Work};
use super::{PHASED_WAYS, WAYS};
use crate::demo::median;
use crate::swap_lab::experiment::Run;
use crate::swap_lab::figures::moved;
use crate::swap_lab::memory_config::{LIMIT, MEMORY, MemoryConfig};
use crate::swap_lab::watch::Disks;
use crate::system::host::Host;

/// Results measured so far.
#[derive(Default)]
pub struct Figures {
    conditions: BTreeMap<String, Value>,
    runs: BTreeMap<(Work, MemoryConfig), Vec<Run>>,
    phased: BTreeMap<MemoryConfig, Vec<Phased>>,
    failed: Vec<String>,
}

/// Returns a count of a run's disks.
type Count = fn(&Disks) -> u64;
/// Pages from memory to the swap area or store, and back.
const STORE: Count = |disks| disks.store.pages();
/// The same, and pages of the image, both ways.
const ALL: Count = |disks| disks.store.pages() + disks.image.pages();

/// The workloads beside the sweep.
const PROGRAMS: [Work; 3] = [Work::Compile, Work::Compress, Work::Collect];
/// Workloads that read a disk.
const READERS: [Work; 2] = [Work::Compile, Work::Compress];

impl Figures {
    /// Sets the conditions of the measurement.
    pub fn conditions(&mut self, host: &Host) -> Result<()> {
        let commit = option_env!("EXITLESS_COMMIT").unwrap_or("unknown");
        let conditions = [
            ("host", json!(host.label())),
            ("kernel", json!(host.kernel_release()?)),
            ("commit", json!(commit)),
            ("memory_mib", json!(MEMORY)),
            ("limit_mib", json!(LIMIT)),
            ("phased_limit_mib", json!(TOTAL)),
        ];
        let conditions = conditions.map(|(key, value)| (key.to_owned(), value));
        self.conditions.extend(conditions);
        Ok(())
    }

    /// # Errors
    /// Another run of the same work found another checksum.
    pub fn add(&mut self, work: Work, way: MemoryConfig, run: Run) -> Result<()> {
        if let Some(done) = &run.done {
            let same = self.runs.iter().filter(|((other, _), _)| *other == work);
            let mut others = same
                .flat_map(|(_, runs)| runs)
                .filter_map(|it| it.done.as_ref());
            ensure!(
                others.all(|other| other == done),
                "another checksum: {done}"
            );
        }
        self.runs.entry((work, way)).or_default().push(run);
        Ok(())
    }

    pub fn add_phased(&mut self, way: MemoryConfig, run: Phased) {
        self.phased.entry(way).or_default().push(run);
    }

    /// Notes that a run failed.
    pub fn failed(&mut self, way: MemoryConfig, error: &anyhow::Error) {
        self.failed.push(format!("{}: {error:#}", way.name()));
    }

    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Returns the median over rounds of a sum over phases; `None` if it did not run.
    fn pages(&self, work: Work, way: MemoryConfig, count: Count) -> Option<f64> {
        let runs = self.runs.get(&(work, way))?;
        let sum = |run: &Run| run.phases.iter().map(count).sum::<u64>() as f64;
        Some(median(runs.iter().map(sum).collect()))
    }

    fn is_killed(&self, work: Work, way: MemoryConfig) -> bool {
        let runs = self.runs.get(&(work, way));
        runs.is_some_and(|runs| runs.iter().any(|run| run.is_killed))
    }

    /// Returns the median over runs of a count of the disks in one round of four guests.
    fn in_round(&self, way: MemoryConfig, round: usize, count: Count) -> Option<f64> {
        let runs = self.phased.get(&way)?;
        let of = |run: &Phased| run.rounds.get(round).map_or(0, count) as f64;
        Some(median(runs.iter().map(of).collect()))
    }

    /// Writes the object and the plots; creates their directories if need be.
    pub fn write(&self, path: &Path, wall: Duration) -> Result<()> {
        let plots = path.parent().unwrap_or(Path::new("")).join("swap");
        fs::create_dir_all(&plots).with_context(|| format!("making {}", plots.display()))?;
        let mut values = self.conditions.clone();
        values.insert("failed".into(), json!(self.failed));
        values.insert("wall_s".into(), json!(wall.as_secs()));
        for ((work, way), runs) in &self.runs {
            let key = key(&format!("{} {}", work.name(), way.name()));
            let runs: Vec<Value> = runs.iter().map(one).collect();
            values.insert(key, json!(runs));
        }
        for (way, runs) in &self.phased {
            let runs: Vec<Value> = runs.iter().map(four).collect();
            values.insert(key(&format!("phased {}", way.name())), json!(runs));
        }
        let text = serde_json::to_string_pretty(&values).expect("plain numbers and strings");
        let write = |path: &Path, text: &str| {
            fs::write(path, text).with_context(|| format!("writing {}", path.display()))
        };
        write(path, &(text + "\n"))?;
        for (file, svg) in self.plots() {
            write(&plots.join(file), &svg)?;
        }
        Ok(())
    }

    /// Returns files and plots; a plot without any value is not drawn.
    fn plots(&self) -> Vec<(String, String)> {
        let mut plots = Vec::new();
        let mut draw = |file: String, series: Vec<Series>, plot: &dyn Fn(&[Series]) -> String| {
            let has_any = series
                .iter()
                .any(|it| it.points.iter().any(Option::is_some));
            if has_any {
                plots.push((file, plot(&series)));
            }
        };
        let series =
            |ways: &[MemoryConfig], of: &dyn Fn(MemoryConfig) -> Vec<Option<f64>>| -> Vec<Series> {
                ways.iter()
                    .map(|way| Series::new(way.name(), of(*way)))
                    .collect()
            };
        let limits = LIMITS.map(|limit| format!("{limit} MiB"));
        let limits: Vec<&str> = limits.iter().map(String::as_str).collect();
        for (file, title, count) in [
            (
                "sweep-store",
                "Disk read twice: pages to and from swap",
                STORE,
            ),
            ("sweep-all", "Disk read twice: pages of swap and image", ALL),
        ] {
            let points = |way| {
                let point = |limit| self.pages(Work::Read(limit), way, count);
                LIMITS.map(point).to_vec()
            };
            draw(format!("{file}.svg"), series(&WAYS, &points), &|series| {
                lines(title, "", &limits, series)
            });
        }
        let names = PROGRAMS.map(Work::name);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for (file, title, count) in [
            ("programs-store", "Programs: pages to and from swap", STORE),
            ("programs-all", "Programs: pages of swap and image", ALL),
        ] {
            let points = |way| {
                // The count of a run that was killed is not comparable.
                let point = |work| {
                    self.pages(work, way, count)
                        .filter(|_| !self.is_killed(work, way))
                };
                PROGRAMS.map(point).to_vec()
            };
            draw(format!("{file}.svg"), series(&WAYS, &points), &|series| {
                bars(title, "", &names, series)
            });
        }
        for work in READERS {
            let samples = self.tracked(work);
            let labels: Vec<String> = (1..=samples.len()).map(|it| it.to_string()).collect();
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            let point =
                |of: fn(&Sample) -> u64| samples.iter().map(|it| Some(of(it) as f64)).collect();
            let both = vec![
                Series::new("stand for blocks", point(|it| it.tracked)),
                Series::new("guest's page cache", point(|it| it.cached)),
                Series::new("of it written", point(|it| it.clean)),
            ];
            let title = format!("{}: pages behind each phase", work.name());
            draw(format!("tracked-{}.svg", work.name()), both, &|series| {
                lines(&title, "", &labels, series)
            });
        }
        let rounds: Vec<String> = (1..=ROUNDS).map(|it| it.to_string()).collect();
        let rounds: Vec<&str> = rounds.iter().map(String::as_str).collect();
        let points = |way| {
            (0..ROUNDS)
                .map(|round| self.in_round(way, round, STORE))
                .collect()
        };
        draw(
            "phased.svg".into(),
            series(&PHASED_WAYS, &points),
            &|series| {
                let title = format!("{GUESTS} guests: pages to and from swap, by round");
                lines(&title, "", &rounds, series)
            },
        );
        plots
    }

    /// Returns the pages that the pager knew to be backed by blocks, and the guest's page cache,
    /// behind each phase of the first run with a pager.
    fn tracked(&self, work: Work) -> Vec<Sample> {
        let runs = self.runs.get(&(work, MemoryConfig::Both));
        let Some((run, windows)) =
            runs.and_then(|runs| Some((&runs[0], runs[0].windows.as_ref()?)))
        else {
            return Vec::new();
        };
        let Some((first, caches)) = run.caches.split_first() else {
            return Vec::new();
        };
        let samples = windows.iter().zip(caches).map(|(window, cache)| {
            // Pages that were there before belong to no disk: the guest's first files are in memory
            // alone.
            let cached = cache.pages.saturating_sub(first.pages);
            Sample {
                tracked: window["tracked"].as_u64().unwrap_or(0),
                cached,
                clean: cached.saturating_sub(cache.unwritten),
            }
        });
        samples.collect()
    }

    /// Renders the tables for a reader.
    pub fn tables(&self) -> String {
        let mut text = String::new();
        let host = self.conditions.get("host").and_then(Value::as_str);
        let _ = writeln!(
            text,
            "pages to and from the swap device / and pages of the image ({})",
            host.unwrap_or("no run")
        );
        let cell = |store: Option<f64>, all: Option<f64>| match (store, all) {
            (Some(store), Some(all)) => format!("{store:.0}/{:.0}", all - store),
            _ => "-".into(),
        };
        let row = |text: &mut String, name: &str, cells: Vec<String>| {
            let _ = write!(text, "  {name:<18}");
            for cell in cells {
                let _ = write!(text, "{cell:>18}");
            }
            text.push('\n');
        };
        let names = |ways: &[MemoryConfig]| ways.iter().map(|way| way.name().to_owned()).collect();
        let ran: std::collections::BTreeSet<Work> = self.runs.keys().map(|it| it.0).collect();
        if !ran.is_empty() {
            row(&mut text, "", names(&WAYS));
        }
        for work in ran {
            let cells = WAYS.map(|way| {
                let cell = cell(self.pages(work, way, STORE), self.pages(work, way, ALL));
                let killed = if self.is_killed(work, way) {
                    " killed"
                } else {
                    ""
                };
                cell + killed
            });
            row(&mut text, &work.name(), cells.to_vec());
        }
        for work in READERS {
            let samples = self.tracked(work);
            if samples.is_empty() {
                continue;
            }
            let name = format!("\n  {}, pages behind each phase", work.name());
            let _ = writeln!(text, "{name}");
            type Of = fn(&Sample) -> u64;
            let rows: [(&str, Of); 3] = [
                ("stand for blocks", |it| it.tracked),
                ("page cache", |it| it.cached),
                ("of it written", |it| it.clean),
            ];
            for (name, of) in rows {
                let cells = samples.iter().map(|it| format!(" {:>7}", of(it)));
                let _ = writeln!(text, "  {name:<18}{}", cells.collect::<String>());
            }
        }
        if !self.phased.is_empty() {
            let _ = writeln!(text, "\n  {GUESTS} guests, {TOTAL} MiB for all");
            row(&mut text, "", names(&PHASED_WAYS));
            for round in 0..ROUNDS {
                let of = |way, count| self.in_round(way, round, count);
                let cells = PHASED_WAYS.map(|way| cell(of(way, STORE), of(way, ALL)));
                row(&mut text, &format!("round {}", round + 1), cells.to_vec());
            }
            let total = |way, count: Count| {
                let rounds = (0..ROUNDS).map(|round| self.in_round(way, round, count));
                rounds.sum::<Option<f64>>()
            };
            let cells = PHASED_WAYS.map(|way| cell(total(way, STORE), total(way, ALL)));
            row(&mut text, "all", cells.to_vec());
            let killed = PHASED_WAYS.map(|way| {
                let runs = self.phased.get(&way);
                runs.map_or("-".into(), |runs| {
                    runs.iter().map(|run| run.killed).sum::<usize>().to_string()
                })
            });
            row(&mut text, "processes killed", killed.to_vec());
        }
        for failed in &self.failed {
            let first = failed.lines().next().unwrap_or_default();
            let _ = writeln!(text, "  failed: {first}");
        }
        text
    }
}

/// Sample behind a phase, in pages.
struct Sample {
    /// Backed by blocks, as the pager knows.
    tracked: u64,
    /// In the guest's page cache, beyond its size at first.
    cached: u64,
    /// Of those, written to the disk.
    clean: u64,
}

fn key(name: &str) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric());
    words
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join("_")
}

/// Renders a run of one guest.
fn one(run: &Run) -> Value {
    let mut value = moved(run);
    let caches = |of: fn(&crate::swap_lab::plan::Cache) -> u64| {
        run.caches.iter().map(of).collect::<Vec<_>>()
    };
    value["cached"] = json!(caches(|it| it.pages));
    value["unwritten"] = json!(caches(|it| it.unwritten));
    value["done"] = json!(run.done);
    value
}

/// Renders a run of four guests.
fn four(run: &Phased) -> Value {
    let of = |count: Count| run.rounds.iter().map(count).collect::<Vec<_>>();
    json!({
        "out": of(|disks| disks.store.pages_written),
        "in": of(|disks| disks.store.pages_read),
        "image_pages": of(|disks| disks.image.pages()),
        "most_mib": run.most.all >> 20,
        "killed": run.killed,
        "ballooned": run.ballooned,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_words() {
        assert_eq!(
            key("read, 40 MiB mapper+preventer"),
            "read_40_MiB_mapper_preventer"
        );
    }

    #[test]
    fn without_a_run_there_is_no_plot_and_no_row() {
        let figures = Figures::default();
        assert!(figures.plots().is_empty());
        assert_eq!(figures.tables().lines().count(), 1);
    }

    #[test]
    fn four_guests_are_drawn_by_round_and_summed() {
        let mut figures = Figures::default();
        let mut round = Disks::default();
        round.store.pages_read = 5;
        round.image.pages_read = 2;
        let run = Phased {
            rounds: vec![round; ROUNDS],
            most: crate::system::group::Most::default(),
            killed: 1,
            ballooned: 0,
        };
        figures.add_phased(MemoryConfig::Both, run);
        let plots = figures.plots();
        assert_eq!(plots.len(), 1);
        assert!(plots[0].1.contains("<polyline"));
        let tables = figures.tables();
        assert!(tables.contains("35/14"), "{tables}");
    }
}
