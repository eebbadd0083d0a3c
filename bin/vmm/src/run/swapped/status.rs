//! Messages to the user: the pager's state, its work, the reason of a pause of the guest, and what
//! to do.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use guest_mem::PAGE_SIZE;
use swap::pager::Report;
use swap::residency::{Backing, Errno, PauseReason};

/// State of a pager, in part of a line on standard error. Printed when its user has changed
/// something, and when the guest is paused and goes on.
#[derive(Debug, Default)]
pub struct Status {
    /// Faults of vCPUs at the last line. Relaxed: it orders nothing; two threads that print at once
    /// may share the faults between them.
    faults: AtomicU64,
}

impl Status {
    /// Returns the pages in memory and in the store, and the faults since the last line.
    pub fn stands(&self, report: &Report) -> String {
        let faults = self.faults.swap(report.faults, Ordering::Relaxed);
        format!(
            "{} of {} MiB in memory, {} of {} MiB of the store used, {} faults since this was last \
             said",
            mib(report.present),
            mib(report.limit),
            mib(report.slots - report.free_slots),
            mib(report.slots),
            report.faults.saturating_sub(faults)
        )
    }

    /// Returns a line about the change from `before` to `after`, if there is one.
    pub fn changed(&self, before: &Report, after: &Report) -> Option<String> {
        let limit = ("limit", before.limit, after.limit);
        let store = ("store", before.slots, after.slots);
        let (what, was, is) = [limit, store].into_iter().find(|(_, was, is)| was != is)?;
        let stands = self.stands(after);
        let (is, was) = (mib(is), mib(was));
        Some(format!("swap: {what} {is} MiB now (was {was}): {stands}"))
    }
}

/// Returns the whole MiB of so many pages.
fn mib(pages: usize) -> u64 {
    (pages as u64 * PAGE_SIZE) >> 20
}

/// Returns a report of its work, in a few lines.
pub fn said(report: &Report, cpu: Duration) -> String {
    let Report {
        limit,
        present,
        slots: _,
        tracked: _,
        free_slots: _,
        counts,
        traffic,
        faults,
        prevented,
        undecided,
        false_reads,
        tickets,
        pauses,
        last_pause: _,
        is_paused: _,
    } = report;
    format!(
        "swap: {present} of {limit} pages in memory; {faults} faults of vCPUs, {tickets} waits of \
         devices, \
         {pauses} pauses; pager's CPU {} ms\n  \
         left memory: {} unwritten to a disk that holds the same, {} as zeroes, {} written ({} \
         requests), {} given up by the guest\n  \
         came back: {} from disks ({} requests), {} from the store ({} requests), {} rescued, {} \
         not read since overwritten, \
         {} read before their block changed\n  \
         {prevented} not read since a vCPU was about to overwrite them, {undecided} looked at in \
         vain, {false_reads} read all the same; \
         {} written although a disk held the same; {} pages of the store discarded ({} requests)",
        cpu.as_millis(),
        counts.dropped_to_disk,
        counts.dropped_as_zeroes,
        counts.saved,
        traffic.store_writes.requests,
        counts.discarded,
        counts.fetched_from_disk,
        traffic.image_reads.requests,
        counts.fetched_from_store,
        traffic.store_reads.requests,
        counts.rescued,
        counts.not_fetched,
        counts.fetched_before_a_write,
        counts.silent_writes,
        traffic.store_trims.pages,
        traffic.store_trims.requests,
    )
}

/// Names of the files that hold a machine's pages, as its user knows them.
#[derive(Clone, Debug)]
pub struct Names {
    pub store: PathBuf,
    /// Where a new limit is read from.
    pub limit: Option<PathBuf>,
    /// Where a larger size of the store is read from.
    pub size: Option<PathBuf>,
    /// By their numbers.
    pub disks: Vec<PathBuf>,
}

impl Names {
    /// Returns the reason of a pause, and what to do.
    pub fn say(&self, reason: PauseReason) -> String {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.0);
        let store = self.store.display();
        match reason {
            PauseReason::StoreFull => format!("the swap store {store} is full: {}", self.remedy()),
            PauseReason::CannotSave(slot, errno) => format!(
                "slot {} of the swap store {store} cannot be written: {}; {RETRIED}",
                slot.0,
                error(errno)
            ),
            PauseReason::CannotFetch(backing, errno) => {
                let backing = self.backing(backing);
                format!("{backing} cannot be read: {}; {RETRIED}", error(errno))
            }
            PauseReason::Changed(backing) => format!(
                "{} does not hold what was there: somebody else has written to it, or its storage \
                 lies; {RETRIED}",
                self.backing(backing)
            ),
        }
    }

    fn backing(&self, backing: Backing) -> String {
        match backing {
            Backing::Nowhere => "a page of zeroes".into(),
            Backing::Slot(slot) => {
                format!("slot {} of the swap store {}", slot.0, self.store.display())
            }
            Backing::Block(block) => match self.disks.get(usize::from(block.disk)) {
                Some(disk) => format!("block {} of disk {}", block.number, disk.display()),
                None => format!("block {} of disk {}", block.number, block.disk),
            },
        }
    }

    fn remedy(&self) -> String {
        let write = |what: &str, file: &Option<PathBuf>| {
            let file = file.as_ref()?;
            Some(format!("write {what} into {}", file.display()))
        };
        let ways = [
            write("a higher limit", &self.limit),
            write("a larger size", &self.size),
        ];
        let ways: Vec<String> = ways.into_iter().flatten().collect();
        match ways.is_empty() {
            true => {
                "start it with --resident-file, or with file= in --swap, to raise its limit or \
                 enlarge its store while \
                     it runs"
                    .into()
            }
            false => ways.join(", or "),
        }
    }
}

/// Advice about storage that has failed.
const RETRIED: &str = "see to its storage: it is tried again each second";

#[cfg(test)]
mod tests {
    use swap::residency::{Block, Slot};

    use super::*;

    #[test]
    fn a_pause_says_what_failed_why_and_what_to_do() {
        let names = Names {
            store: "/var/swap0".into(),
            limit: Some("/run/limit0".into()),
            size: Some("/run/size0".into()),
            disks: vec!["a.raw".into(), "b.raw".into()],
        };
        let slot = Slot(3);
        let block = Block { disk: 1, number: 7 };
        for (reason, words) in [
            (
                PauseReason::StoreFull,
                ["store /var/swap0 is full", "limit into /run/limit0"],
            ),
            (
                PauseReason::CannotSave(slot, Errno(libc::ENOSPC)),
                ["slot 3 of the swap store /var/swap0", "No space left"],
            ),
            (
                PauseReason::CannotFetch(Backing::Slot(slot), Errno(libc::EIO)),
                ["/var/swap0 cannot be read: Input/output", "tried again"],
            ),
            (
                PauseReason::Changed(Backing::Block(block)),
                ["block 7 of disk b.raw does not hold", "tried again"],
            ),
        ] {
            let said = names.say(reason);
            for word in words {
                assert!(said.contains(word), "no {word:?} in: {said}");
            }
        }
    }

    #[test]
    fn a_change_says_how_things_stand_and_the_faults_since_it_last_did() {
        let status = Status::default();
        let before = Report {
            limit: 200 << 8,
            present: 190 << 8,
            slots: 1024 << 8,
            free_slots: 1012 << 8,
            faults: 3000,
            ..Report::default()
        };
        assert_eq!(status.changed(&before, &before), None);
        let lower = Report {
            limit: 100 << 8,
            present: 55 << 8,
            faults: 3211,
            ..before
        };
        assert_eq!(
            status.changed(&before, &lower).expect("another limit"),
            "swap: limit 100 MiB now (was 200): 55 of 100 MiB in memory, 12 of 1024 MiB of the \
             store used, \
             3211 faults since this was last said"
        );
        let larger = Report {
            slots: 2048 << 8,
            free_slots: 2036 << 8,
            faults: 3215,
            ..lower
        };
        let said = status.changed(&lower, &larger).expect("another size");
        assert!(
            said.starts_with("swap: store 2048 MiB now (was 1024): "),
            "{said}"
        );
        assert!(
            said.ends_with("12 of 2048 MiB of the store used, 4 faults since this was last said"),
            "{said}"
        );
    }

    #[test]
    fn a_full_store_names_the_ways_that_there_are() {
        let names = |limit: Option<&str>, size: Option<&str>| Names {
            store: "/var/swap0".into(),
            limit: limit.map(PathBuf::from),
            size: size.map(PathBuf::from),
            disks: Vec::new(),
        };
        let both = names(Some("/run/limit0"), Some("/run/size0")).say(PauseReason::StoreFull);
        let wanted =
            "write a higher limit into /run/limit0, or write a larger size into /run/size0";
        assert!(both.ends_with(wanted), "{both}");
        let one = names(None, Some("/run/size0")).say(PauseReason::StoreFull);
        assert!(
            one.ends_with("full: write a larger size into /run/size0"),
            "{one}"
        );
        let none = names(None, None).say(PauseReason::StoreFull);
        assert!(
            none.contains("--resident-file, or with file= in --swap"),
            "{none}"
        );
    }
}
