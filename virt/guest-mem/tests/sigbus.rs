//! The other process truncates its file under our mapping: its guest is lost, and no other.
//!
//! Cases that must kill a process run in a child: this program again, with the name of one ignored
//! test.

#![cfg(not(miri))] // no memory files there

mod support;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::Arc;

use guest_mem::{
    DirectMap, Dma, FileError, ForeignErrorKind, ForeignRam, Gpa, Iova, Perm, PhysMem, SharedFile,
    SourceId, View,
};
use rustix::fs::ftruncate;
use support::{memfd, put, region};

const PAGE: u64 = 4096;
const SIGBUS: i32 = 7;

/// Set in the children: run by hand, the ignored tests do nothing.
const IN_CHILD: &str = "GUEST_MEM_SIGBUS_CHILD";

/// Runs an ignored test of this program in a child.
fn child(name: &str) -> ExitStatus {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", name, "--ignored", "--test-threads=1"]);
    command.env(IN_CHILD, "1");
    let output = command.output().expect("the child runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("running 1 test"), "{name}: {text}");
    output.status
}

#[test]
fn truncated_file_reads_as_zeroes_is_lost_and_harms_no_other() {
    let (truncated, healthy) = (memfd(16 * PAGE), memfd(PAGE));
    put(&truncated, 5 * PAGE, b"before");
    put(&healthy, 0, b"healthy");
    let lost = ForeignRam::empty()
        .with_regions(&[
            region(0, 8 * PAGE, &truncated, 0),
            region(1 << 32, PAGE, &healthy, 0),
        ])
        .unwrap();
    let other = ForeignRam::empty()
        .with_regions(&[region(0, PAGE, &healthy, 0)])
        .unwrap();
    let (clone, mut buf) = (lost.clone(), [0; 6]);
    lost.read(Gpa::new(5 * PAGE), &mut buf).unwrap();
    assert_eq!(&buf, b"before");
    assert!(!lost.is_lost() && !clone.is_lost());

    ftruncate(&truncated, 0).unwrap();
    lost.read(Gpa::new(5 * PAGE), &mut buf).unwrap();
    assert_eq!(buf, [0; 6]);
    assert!(lost.is_lost() && clone.is_lost() && !other.is_lost());
    // It is memory still, though private.
    lost.write(Gpa::new(7 * PAGE - 3), b"across").unwrap();
    lost.read(Gpa::new(7 * PAGE - 3), &mut buf).unwrap();
    assert_eq!(&buf, b"across");
    assert_eq!(lost.read_u64(Gpa::new(0)), Ok(0));

    let mut seen = [0; 7];
    other.read(Gpa::new(0), &mut seen).unwrap();
    assert_eq!(&seen, b"healthy");
    lost.read(Gpa::new(1 << 32), &mut seen).unwrap();
    assert_eq!(&seen, b"healthy");

    // The old table does not map the grown file; a new table does, and is not lost.
    ftruncate(&truncated, 16 * PAGE).unwrap();
    put(&truncated, 0, b"second");
    let again = lost
        .with_regions(&[region(0, 8 * PAGE, &truncated, 0)])
        .unwrap();
    again.read(Gpa::new(0), &mut buf).unwrap();
    assert_eq!(&buf, b"second");
    assert!(!again.is_lost() && lost.is_lost());
}

#[test]
fn each_kind_of_access_survives() {
    type Access = fn(&ForeignRam);
    let accesses: [Access; 6] = [
        |ram| ram.read(Gpa::new(8), &mut [0; 3000]).unwrap(),
        |ram| ram.write(Gpa::new(8), &[1; 3000]).unwrap(),
        |ram| ram.read(Gpa::new(8), &mut [0; 30]).unwrap(),
        |ram| ram.write(Gpa::new(8), &[1; 30]).unwrap(),
        |ram| assert_eq!(ram.read_u64(Gpa::new(8)), Ok(0)),
        |ram| ram.store_u32_release(Gpa::new(8), 1).unwrap(),
    ];
    for access in accesses {
        let file = memfd(PAGE);
        let ram = ForeignRam::empty()
            .with_regions(&[region(0, PAGE, &file, 0)])
            .unwrap();
        ftruncate(&file, 0).unwrap();
        assert!(!ram.is_lost());
        access(&ram);
        assert!(ram.is_lost());
    }
}

#[test]
fn windows_watches_and_shared_files_survive() {
    let file = memfd(PAGE);
    put(&file, 0, &[9; 64]);
    let ram = ForeignRam::empty()
        .with_regions(&[region(0, PAGE, &file, 0)])
        .unwrap();
    let mut direct = DirectMap::new();
    let window = View::new(&mut direct, &ram, SourceId(0))
        .window(Iova::new(0), 64, Perm::Read)
        .unwrap();
    let watch = window.watch_u16(0);
    let shared = SharedFile::open(file.try_clone().unwrap(), 0, PAGE).unwrap();
    ftruncate(&file, 0).unwrap();
    assert_eq!(watch.load_relaxed(), 0);
    assert_eq!(window.load_u64(8), 0);
    assert!(ram.is_lost() && !shared.is_lost());
    shared.store_u8(7, 1);
    assert_eq!((shared.load_u8(7), shared.load_u64(8)), (1, 0));
    assert!(shared.is_lost());
}

/// A file of huge pages, of which the host most likely has none: then the first access is the loss.
#[test]
fn huge_page_file_at_any_page_is_usable_or_lost() {
    use rustix::fs::{MemfdFlags, memfd_create};
    const HUGE: u64 = 2 << 20;
    let Ok(file) = memfd_create(c"huge", MemfdFlags::HUGETLB) else {
        println!("skipped: this kernel has no huge pages");
        return;
    };
    ftruncate(&file, 4 * HUGE).unwrap();
    let file = Arc::new(file);
    // Not aligned as the file's pages are, across several of them, and not their multiple.
    let ram = ForeignRam::empty()
        .with_regions(&[region(0, 2 * HUGE + 100, &file, PAGE)])
        .unwrap();
    let end = Gpa::new(2 * HUGE + 90);
    ram.write(end, b"0123456789").unwrap();
    let mut seen = [0; 10];
    ram.read(end, &mut seen).unwrap();
    assert_eq!(&seen, b"0123456789");
    if ram.is_lost() {
        return;
    }
    let whole = ForeignRam::empty()
        .with_regions(&[region(0, 4 * HUGE, &file, 0)])
        .unwrap();
    let mut seen = [0; 10];
    whole
        .read(Gpa::new(PAGE + 2 * HUGE + 90), &mut seen)
        .unwrap();
    assert!(&seen == b"0123456789" || whole.is_lost());
}

#[test]
fn slots_are_used_again_and_forget() {
    for round in 0..100 {
        let file = memfd(PAGE);
        let ram = ForeignRam::empty()
            .with_regions(&[region(0, PAGE, &file, 0)])
            .unwrap();
        assert!(!ram.is_lost(), "round {round}");
        ftruncate(&file, 0).unwrap();
        ram.read(Gpa::new(0), &mut [0]).unwrap();
        assert!(ram.is_lost(), "round {round}");
    }
}

#[test]
fn threads_that_lose_memory_at_once_all_survive() {
    let file = memfd(64 * PAGE);
    let ram = ForeignRam::empty()
        .with_regions(&[region(0, 64 * PAGE, &file, 0)])
        .unwrap();
    let threads: Vec<_> = (0..4u64)
        .map(|number| {
            let (ram, file) = (ram.clone(), Arc::clone(&file));
            std::thread::spawn(move || {
                for round in 0..200 {
                    // Mappings of others come and go under the handler's scan.
                    let own = ForeignRam::empty()
                        .with_regions(&[region(0, PAGE, &memfd(PAGE), 0)])
                        .unwrap();
                    own.write(Gpa::new(0), &[1]).unwrap();
                    if (number, round) == (0, 50) {
                        ftruncate(&file, 0).unwrap();
                    }
                    let page = (number * 16 + round % 16) * PAGE;
                    ram.write(Gpa::new(page), &[2; 500]).unwrap();
                    assert!(!own.is_lost());
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(ram.is_lost());
}

/// Raises a fault in a truncated mapping that is not registered.
fn fault_elsewhere() -> ! {
    let file = memfd(PAGE);
    // SAFETY: a new mapping; nothing else is there.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE as usize,
            libc::PROT_READ,
            libc::MAP_SHARED,
            std::os::fd::AsRawFd::as_raw_fd(&*file),
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    ftruncate(&file, 0).expect("the file is ours");
    // SAFETY: mapped above; that the read faults is the point.
    let byte = unsafe { page.cast::<u8>().read_volatile() };
    panic!("read {byte} beyond the end of a file");
}

/// Makes the handler be there, and used.
fn lose_something() -> ForeignRam {
    let file = memfd(PAGE);
    let ram = ForeignRam::empty()
        .with_regions(&[region(0, PAGE, &file, 0)])
        .expect("a good table");
    ftruncate(&file, 0).expect("the file is ours");
    ram.read(Gpa::new(0), &mut [0]).expect("inside RAM");
    assert!(ram.is_lost());
    ram
}

fn is_child() -> bool {
    std::env::var_os(IN_CHILD).is_some()
}

fn set_disposition(handler: usize) {
    // SAFETY: zero bits are a `sigaction`; the handlers given are the two constants or `exit_3`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
}

extern "C" fn exit_3(_signal: i32) {
    // SAFETY: async-signal-safe.
    unsafe { libc::_exit(3) }
}

#[test]
fn fault_elsewhere_still_kills() {
    for name in [
        "child_fault_after_the_runtime",
        "child_fault_after_default",
        "child_fault_after_ignore",
        "child_raise_after_default",
    ] {
        assert_eq!(child(name).signal(), Some(SIGBUS), "{name}");
    }
}

#[test]
fn previous_handler_is_called_and_ignored_stays_ignored() {
    assert_eq!(child("child_fault_after_handler").code(), Some(3));
    assert_eq!(child("child_raise_after_ignore").code(), Some(0));
}

/// Runs in a child, because other tests need mappings meanwhile.
#[test]
fn full_registry_is_an_error_and_empties() {
    assert_eq!(child("child_fills_the_registry").code(), Some(0));
}

#[test]
#[ignore = "run in a child by the test above"]
fn child_fills_the_registry() {
    if !is_child() {
        return;
    }
    const MAX: u64 = 16384;
    let file = memfd(MAX * PAGE);
    let table = |count| {
        let regions = (0..count).map(|number| region(number * PAGE, PAGE, &file, number * PAGE));
        ForeignRam::empty().with_regions(&regions.collect::<Vec<_>>())
    };
    let one = table(1).unwrap();
    let error = table(MAX).unwrap_err();
    assert_eq!(error.region as u64, MAX - 1);
    let kind = ForeignErrorKind::File(FileError::TooManyMappings);
    assert_eq!(format!("{:?}", error.kind), format!("{kind:?}"));
    // All that was refused is free again.
    let rest = table(MAX - 1).unwrap();
    assert!(table(1).is_err());
    ftruncate(&file, (MAX - 2) * PAGE).unwrap();
    // The slot that the scan reaches last.
    rest.write(Gpa::new((MAX - 2) * PAGE), &[1]).unwrap();
    assert!(rest.is_lost() && !one.is_lost());
}

#[test]
#[ignore = "run in a child by the test above"]
fn child_fault_after_the_runtime() {
    if is_child() {
        let _ram = lose_something();
        fault_elsewhere()
    }
}

#[test]
#[ignore = "run in a child by the test above"]
fn child_fault_after_default() {
    if is_child() {
        set_disposition(libc::SIG_DFL);
        let _ram = lose_something();
        fault_elsewhere()
    }
}

#[test]
#[ignore = "run in a child by the test above"]
fn child_fault_after_ignore() {
    if is_child() {
        set_disposition(libc::SIG_IGN);
        let _ram = lose_something();
        fault_elsewhere()
    }
}

#[test]
#[ignore = "run in a child by the test above"]
fn child_fault_after_handler() {
    if is_child() {
        let handler: extern "C" fn(i32) = exit_3;
        set_disposition(handler as usize);
        let _ram = lose_something();
        fault_elsewhere()
    }
}

#[test]
#[ignore = "run in a child by the test above"]
fn child_raise_after_default() {
    if !is_child() {
        return;
    }
    set_disposition(libc::SIG_DFL);
    let _ram = lose_something();
    // SAFETY: sends a signal to this thread.
    unsafe { libc::raise(libc::SIGBUS) };
}

#[test]
#[ignore = "run in a child by the test above"]
fn child_raise_after_ignore() {
    if !is_child() {
        return;
    }
    set_disposition(libc::SIG_IGN);
    let ram = lose_something();
    // SAFETY: sends a signal to this thread.
    unsafe { libc::raise(libc::SIGBUS) };
    assert!(ram.is_lost());
    drop(ram);
    let _again = lose_something();
}
