//! A guest with less memory than it uses, up to the moment at which its machine is paused: its
//! store fails, or is full.

use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::time::Instant;

use serde_json::Value;
use tempfile::TempDir;

use crate::guest::Steps;
use crate::program::{Program, has_kvm, run_of, until};

/// 24 MiB of the guest's memory, of which 17 may be there.
const PAGES: std::ops::Range<u32> = 0x400..0x1c00;

/// Returns the byte that fills a page: never zero.
fn byte(page: u32) -> u8 {
    (page * 151 % 255) as u8 + 1
}

/// A machine that is paused.
pub struct Machine {
    /// Directory of its files: `limit`, from which a higher one is read, `size` of the store,
    /// `ledger`.
    pub dir: TempDir,
    /// The program.
    pub program: Program,
}

impl Machine {
    /// Runs one of `program` up to its pause, with these keys of its store and these arguments.
    /// `None`, said, where there is no such machine.
    pub fn paused(program: &str, store: &str, more: &[&str]) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let mut steps = Steps::default();
        for page in PAGES {
            steps = steps.store(page << 12, byte(page).into());
        }
        for page in PAGES {
            steps = steps.wait_for_byte(page << 12, byte(page));
        }
        let dir = TempDir::new().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut kernel = fs::File::create(path("kernel")).unwrap();
        kernel.write_all(&steps.power_off().kernel()).unwrap();
        let mut command = run_of(program, &path("kernel"));
        let (swap, size) = (path("swap"), path("size"));
        let mut swap = format!("path={},file={}", swap.display(), size.display());
        if !store.is_empty() {
            swap = format!("{swap},{store}");
        }
        command.args(["--resident", "17M", "--swap", &swap]);
        command.arg("--resident-file").arg(path("limit"));
        command.arg("--ledger").arg(path("ledger"));
        command.args(more);
        // A guest that is paused answers no power button.
        command.args(["--stop-timeout", "0"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut program = Program::start(command, true);
        until("a pause", || {
            program.said().contains("paused: ") || !program.is_alive()
        });
        if !program.is_alive() {
            let ended = program.end(Instant::now());
            let is_refused = ended.said.contains("--resident: ");
            assert!(is_refused, "{:?}: {}", ended.status, ended.said);
            println!("skipped: {}", ended.said);
            return None;
        }
        Some(Self { dir, program })
    }

    /// Returns the pager's counts from the ledger.
    pub fn swap(dir: &TempDir) -> Value {
        let ledger = fs::read(dir.path().join("ledger")).unwrap();
        let ledger: Value = serde_json::from_slice(&ledger).unwrap();
        ledger["whole"]["swap"].clone()
    }
}
