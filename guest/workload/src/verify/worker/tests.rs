//! Each kind of operation by itself, and the errors that comparisons detect.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::child::SHARE;
use super::*;
use crate::child::{Child, ChildExit};

/// More pages than a chunk of memory has, so that a chunk's boundary lies inside.
const PAGES: usize = 600;
const BLOCKS: usize = 96;
/// Blocks of the image before those of the worker.
const SKIP: u32 = 4;

struct Image(PathBuf);

impl Drop for Image {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Runs `test` with a worker that has an image of its own, and with the image's file, by which the
/// test changes the image without the worker's knowledge.
fn with_worker(name: &str, test: impl FnOnce(&mut Worker<'_>, &File)) {
    let name = format!("verify-{name}-{}", std::process::id());
    let image = Image(std::env::temp_dir().join(name));
    let mut options = File::options();
    options.create_new(true).read(true).write(true);
    let file = options.open(&image.0).unwrap();
    file.set_len((u64::from(SKIP) + BLOCKS as u64) * BLOCK as u64)
        .unwrap();
    let shared = Shared::open(&image.0, 77).unwrap();
    let part = Part {
        thread: 0,
        first_page: 10_000,
        pages: PAGES,
        first_block: SKIP,
        blocks: BLOCKS,
    };
    let mut worker = Worker::new(&shared, part).unwrap();
    worker.phase = Phase::Fragment;
    worker.operation = 1;
    test(&mut worker, &file);
}

/// Checks that the error begins with `begin` and contains each of `parts`.
#[track_caller]
fn assert_complains(outcome: Result<(), String>, begin: &str, parts: &[&str]) {
    let text = outcome.unwrap_err();
    assert!(text.starts_with(begin), "{text}");
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn each_kind_alone_keeps_to_the_model() {
    with_worker("kinds", |worker, _| {
        for kind in Kind::ALL {
            for phase in Phase::ALL {
                worker.phase = phase;
                for _ in 0..20 {
                    worker.operate(kind).unwrap();
                }
            }
            worker.check_all().unwrap();
            let can = worker.counts().of(kind).operations > 0;
            // A file cannot be discarded, and its run drops no caches.
            let is_devices = matches!(kind, Kind::Discard | Kind::DropCaches);
            let may_lack = matches!(kind, Kind::WriteDirect | Kind::ReadDirect | Kind::ZeroOut);
            assert!(can != is_devices || may_lack, "{kind:?}");
        }
    });
}

#[test]
fn a_run_stays_in_its_part() {
    with_worker("part", |worker, file| {
        let before = vec![0xa5; SKIP as usize * BLOCK];
        file.write_all_at(&before, 0).unwrap();
        worker.begin().unwrap();
        for phase in Phase::ALL {
            worker.work(phase, &|| false).unwrap();
        }
        let mut after = vec![0; before.len()];
        file.read_exact_at(&mut after, 0).unwrap();
        assert_eq!(before, after);
        let len = file.metadata().unwrap().len();
        assert_eq!(len, (u64::from(SKIP) + BLOCKS as u64) * BLOCK as u64);
    });
}

#[test]
fn a_flipped_byte_of_a_block_is_found_either_way() {
    with_worker("flipped", |worker, file| {
        worker.renew(0..8, IoPath::Cached).unwrap();
        let at = (u64::from(SKIP) + 5) * BLOCK as u64 + 99;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        for (way, seen) in [
            (IoPath::Cached, "page cache"),
            (IoPath::Direct, "direct I/O"),
        ] {
            let wrong = format!(
                "byte 0x63: wanted {:#04x}, found {:#04x}",
                byte[0],
                byte[0] ^ 4
            );
            assert_complains(
                worker.check_blocks(0..8, way),
                "block 9, ",
                &[seen, &wrong, "(1 bytes differ", "right in part", "seed 77"],
            );
        }
    });
}

#[test]
fn a_lost_write_and_a_misplaced_one_are_told_apart() {
    with_worker("lost", |worker, file| {
        let mut old = vec![0; 8 * BLOCK];
        worker.renew(0..8, IoPath::Cached).unwrap();
        file.read_exact_at(&mut old, u64::from(SKIP) * BLOCK as u64)
            .unwrap();
        worker.renew(0..8, IoPath::Direct).unwrap();
        let put = |to: u64, from: usize| {
            let block = &old[from * BLOCK..][..BLOCK];
            file.write_all_at(block, (u64::from(SKIP) + to) * BLOCK as u64)
                .unwrap();
        };
        put(2, 2);
        assert_complains(
            worker.check_blocks(0..8, IoPath::Cached),
            "block 6, ",
            &["block 6 in generation 1 (stale: what it held 1 changes ago)"],
        );
        put(2, 3);
        assert_complains(
            worker.check_blocks(0..8, IoPath::Direct),
            "block 6, ",
            &[
                "wanted block 6 in generation 2",
                "found block 7 in generation 1 (foreign)",
            ],
        );
    });
}

#[test]
fn the_last_pass_comes_by_the_last_of_all() {
    with_worker("last", |worker, file| {
        let byte = |worker: &mut Worker<'_>, value| {
            worker.memory.bytes_mut(PAGES - 1..PAGES)[PAGE - 1] = value;
        };
        worker.renew(BLOCKS - 1..BLOCKS, IoPath::Cached).unwrap();
        worker.check_all().unwrap();
        byte(worker, 1);
        assert_complains(worker.check_all(), "memory page 10599", &["byte 0xfff"]);
        byte(worker, 0);
        let last = (u64::from(SKIP) + BLOCKS as u64) * BLOCK as u64 - 1;
        let mut sum = [0];
        file.read_exact_at(&mut sum, last).unwrap();
        file.write_all_at(&[!sum[0]], last).unwrap();
        assert_complains(worker.check_all(), "block 99", &["byte 0xfff"]);
    });
}

#[test]
fn wrong_memory_is_found_and_named() {
    with_worker("memory", |worker, _| {
        (0..4).for_each(|page| worker.fill_page(page));
        worker.check_pages(0..4).unwrap();
        worker.fill_page(2);
        // The page has reverted to its earlier content.
        let stale = Content::whole(Base::Sealed(super::super::content::Stamp {
            origin: Place::page(10_002),
            generation: 1,
        }));
        stale.render(77, worker.memory.bytes_mut(2..3));
        assert_complains(
            worker.check_pages(0..4),
            "memory page 10002, in memory: byte 0x10: wanted 0x02, found 0x01",
            &[
                "stale",
                "fill in operation 1, fill in operation 1, last seen right",
            ],
        );
        worker.memory.copy(1..2, 2, Means::Library);
        assert_complains(worker.check_page(2), "memory page 10002", &["foreign"]);
        worker.memory.give_back(2..3).unwrap();
        assert_complains(worker.check_page(2), "memory page 10002", &["found zeros"]);
        worker.memory.bytes_mut(400..401)[PAGE - 1] = 1;
        assert_complains(worker.check_page(400), "memory page 10400", &["byte 0xfff"]);
    });
}

#[test]
fn a_child_that_sees_a_wrong_page_says_which() {
    with_worker("child", |worker, _| {
        (0..8).for_each(|page| worker.fill_page(page));
        let share: Vec<_> = (0..8)
            .map(|page| (page, worker.pages[page].content()))
            .collect();
        worker.memory.bytes_mut(3..4)[200] ^= 0xff;
        let child = Child::start(|say| worker.look_as_child(&share, say)).unwrap();
        let (ended, said) = child.wait().unwrap();
        assert_eq!(ended, ChildExit::Status(1));
        let text = worker.complain_of_child(&share, &said);
        assert!(
            text.starts_with("memory page 10003, in a child process: byte 0xc8: "),
            "{text}"
        );
        let mut own = (SHARE as u32 + 5).to_le_bytes().to_vec();
        own.resize(4 + PAGE, 0);
        let text = worker.complain_of_child(&share, &own);
        assert!(
            text.starts_with("memory page 10005, in a child") && text.contains("itself"),
            "{text}"
        );
        worker.memory.bytes_mut(3..4)[200] ^= 0xff;
        let child = Child::start(|say| worker.look_as_child(&share, say)).unwrap();
        assert_eq!(child.wait().unwrap().0, ChildExit::Status(0));
        worker.check_pages(0..8).unwrap();
    });
}

#[test]
fn without_direct_io_all_goes_through_the_page_cache() {
    with_worker("cached", |worker, _| {
        let shared = worker.shared.without_direct();
        let mut worker = Worker::new(&shared, worker.part).unwrap();
        worker.begin().unwrap();
        worker.work(Phase::Fragment, &|| false).unwrap();
        worker.check_all().unwrap();
        assert_eq!(worker.counts().of(Kind::WriteDirect).operations, 0);
        assert!(worker.counts().of(Kind::Relay).operations > 0);
    });
}
