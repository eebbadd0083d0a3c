//! A page that a vCPU is about to overwrite, over real memory: it is not read, or read and counted
//! where a control asks for that.
//!
//! The vCPU is simulated: registers at a `REP STOSQ`, code and page tables in guest memory. A
//! thread stores to the page in its place.

mod support;

use std::sync::mpsc::channel;
use std::time::Duration;

use guest_mem::GuestRam;
use support::{Files, IN_KERNEL, Machine, Shape, Stops, Vcpu};
use swap::frames::PAGE;
use swap::overwrite::Registers;
use swap::pager::Report;
use vio_faults::LatencyDisk;

const PAGES: usize = 320;
const LIMIT: usize = 112;
const PATIENCE: Duration = Duration::from_secs(60);

/// The first page of the upper half: entry 256 of the first table, 0 of the others.
const CODE: u64 = 0xffff_8000_0000_0000;
/// The page behind it.
const TARGET: u64 = CODE + 0x1000;
/// Pages of target, code and tables. The target has long left memory when the others are written.
const TARGET_PAGE: usize = 5;
const CODE_PAGE: usize = 300;
/// Four levels, from the highest on.
const TABLES: [usize; 4] = [301, 302, 303, 304];
/// Present, writable, accessed, dirty.
const KERNEL: u64 = 0x063;
/// Value that it stores.
const FILL: u64 = 0x1122_3344_5566_7788;

/// Registers when it is about to overwrite the target.
const REGISTERS: Registers = Registers {
    rip: CODE + 0x100,
    rax: FILL,
    rcx: (PAGE / 8) as u64,
    rdi: TARGET,
    cr3: (TABLES[0] * PAGE) as u64,
    ..IN_KERNEL
};

/// Makes a vCPU overwrite an absent page. Returns the registers that it is to continue with, the
/// page's last word after that, and the pager's state; `None`, with a message, where the test
/// cannot run.
fn overwrite(is_only_counted: bool) -> Option<(Option<Registers>, u64, Report)> {
    let (stops, answers) = channel();
    let vcpu = Vcpu {
        is_only_counted,
        stops: Stops::AtOnce(REGISTERS, stops),
    };
    let shape = Shape {
        pages: PAGES as u32,
        limit: LIMIT,
    };
    let files = |_: &GuestRam| {
        // Pages leave later than others come, as with any real store.
        let store = LatencyDisk::new(support::store(PAGES as u32)?, Duration::from_millis(20))?;
        Ok(Files {
            store: Box::new(store),
            slots: PAGES,
            trims: false,
            disks: Vec::new(),
        })
    };
    let machine = match Machine::with_vcpu(&shape, files, Some(vcpu)) {
        Ok(machine) => machine,
        Err(error) => {
            eprintln!("skipped: {error}");
            return None;
        }
    };
    for page in 0..PAGES {
        for index in [0, PAGE / 8 - 1] {
            machine.store(page, index, 1 + page as u64);
        }
    }
    let put = |page, index, word: u64| machine.store(page, index, word);
    for (level, table) in TABLES.into_iter().enumerate() {
        let below = TABLES.get(level + 1).copied().unwrap_or(CODE_PAGE);
        let index = if level == 0 { 256 } else { 0 };
        put(table, index, (below * PAGE) as u64 | KERNEL);
    }
    put(TABLES[3], 1, (TARGET_PAGE * PAGE) as u64 | KERNEL);
    // REP STOSQ.
    put(CODE_PAGE, 0x100 / 8, 0xab48f3);
    // Pages that came meanwhile have made others leave. Without room for one more page the target
    // would be read all the same.
    while machine.report().present > LIMIT {
        std::thread::yield_now();
    }
    // Drop the answers for pages that this thread has waited for so far.
    while answers.try_recv().is_ok() {}
    // The vCPU's first store, as it makes it once it continues by itself.
    machine.store(TARGET_PAGE, 0, FILL);
    let answer = answers.recv_timeout(PATIENCE).expect("it is stopped");
    let after = answer.wait(PATIENCE);
    let last = machine.load(TARGET_PAGE, PAGE / 8 - 1);
    Some((after, last, machine.stop()))
}

#[test]
fn page_that_a_vcpu_is_about_to_overwrite_is_not_read() {
    let Some((after, last, report)) = overwrite(false) else {
        return;
    };
    let after = after.expect("it goes on behind the page");
    assert_eq!((after.rcx, after.rdi), (0, TARGET + PAGE as u64));
    assert_eq!(last, FILL);
    assert_eq!((report.prevented, report.false_reads), (1, 0), "{report:?}");
}

#[test]
fn a_control_reads_it_and_counts_that() {
    let Some((after, last, report)) = overwrite(true) else {
        return;
    };
    assert_eq!(after, None);
    assert_eq!(last, 1 + TARGET_PAGE as u64);
    assert_eq!((report.prevented, report.false_reads), (0, 1), "{report:?}");
}
