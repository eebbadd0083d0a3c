//! Removal of the trace instance, triggers and synthetic events of processes that ended without
//! dropping their histograms.

use std::fs;
use std::path::Path;

use super::triggers::{self, Names};
use super::{ROOT, append, instance_of};

/// Returns, in ascending order, the ids of processes that are not alive and whose trace instances
/// or synthetic events are among `names`.
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

/// Removes the leftovers of dead processes, and those under the id `own`, which an earlier process
/// may have had. An entry that cannot be removed stays.
///
/// A live process in another PID namespace that shares this tracefs is taken for dead and loses its
/// histograms: its ledger becomes coarser.
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
        // In reverse: a join is removed before the trigger whose variable it uses.
        let set = triggers::triggers(&[], &names);
        let set = set.iter().rev().map(|trigger| trigger.event.as_str());
        for event in set.chain([triggers::PAGE_FAULTS]).chain(triggers::WRITES) {
            // The owner of the instance has ended, so all of its triggers may go: opening the file
            // for truncation removes them.
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
            // Names of other programs.
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
