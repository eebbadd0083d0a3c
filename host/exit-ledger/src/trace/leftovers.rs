//! Removal of what a process left in tracefs when it ended without dropping its histograms: an
//! instance with triggers, and synthetic events.

use std::fs;
use std::path::Path;

use super::triggers::{self, Names};
use super::{ROOT, append, instance_of};

/// Returns the processes, in order, of which instances or synthetic events stand among `names` and
/// that are not alive.
pub fn leftovers<'a>(
    names: impl IntoIterator<Item = &'a str>,
    is_alive: impl Fn(u32) -> bool,
) -> Vec<u32> {
    let pids = names.into_iter().filter_map(|name| {
        let pid: u32 = name.rsplit(['-', '_']).next()?.parse().ok()?;
        let is_ours =
            name == format!("exitless-{pid}") || Names::of_process(pid).all().contains(&name);
        is_ours.then_some(pid)
    });
    let mut dead: Vec<u32> = pids.filter(|pid| !is_alive(*pid)).collect();
    dead.sort_unstable();
    dead.dedup();
    dead
}

/// Removes them, those of `own` included, whose number may have been another's before. What cannot
/// be removed stays.
///
/// A process of another PID namespace that shares this tracefs counts as dead: its ledger becomes
/// coarser.
pub fn remove(own: u32) {
    let entries = fs::read_dir(Path::new(ROOT).join("instances"));
    let entries = entries.into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let defined = fs::read_to_string(Path::new(ROOT).join("synthetic_events")).unwrap_or_default();
    let defined = defined
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    names.extend(defined.map(str::to_owned));
    let is_alive = |pid: u32| pid != own && Path::new("/proc").join(pid.to_string()).exists();
    for pid in leftovers(names.iter().map(String::as_str), is_alive) {
        let (instance, names) = (instance_of(pid), Names::of_process(pid));
        // In reverse: a join before the trigger whose variable it uses.
        let set = triggers::triggers(&[], &names);
        let set = set.iter().rev().map(|trigger| trigger.event.as_str());
        for event in set.chain([triggers::PAGE_FAULTS]).chain(triggers::WRITES) {
            // The instance's process has ended, so all of its triggers go: opening for truncation
            // removes them.
            let trigger = instance.join(event).join("trigger");
            let _ = fs::File::options().write(true).truncate(true).open(trigger);
        }
        let _ = fs::remove_dir(&instance);
        for name in names.all() {
            let _ = append(
                &Path::new(ROOT).join("synthetic_events"),
                &format!("!{name}"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_of_killed_processes_are_leftovers() {
        let names = [
            "exitless-8",
            "exitless_7",
            "exitless-12",
            "exitless_tick_12",
            "exitless_irq_13",
            "exitless-7",
            // Of other programs.
            "exitless",
            "exitless-",
            "exitless-self",
            "exitless-5x",
            "exitless-4294967296",
            "exitless7",
            "exitless_tock_9",
            "other-7",
        ];
        assert_eq!(leftovers(names, |pid| pid == 8), [7, 12, 13]);
        assert!(leftovers(names, |_| true).is_empty());
    }
}
