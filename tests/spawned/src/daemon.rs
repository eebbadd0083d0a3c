//! A daemon as a child: where its sockets, images and counters are, and a load for it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use vhost_blk::client::Options;
use vhost_blk::load::{Mix, Mode, VmSpec};
use vhost_blk::{Client, Run, RunError, drive};

use crate::program::{Program, command, until};

const BLOCK: u32 = 4096;
const IMAGE: u64 = 16 << 20;

/// Place of a daemon's sockets and counters.
pub struct DaemonDir {
    program: &'static str,
    folder: TempDir,
}

impl DaemonDir {
    /// A place for `program` in the folder `below`: on a disk, not in memory.
    pub fn new(program: &'static str, below: &str) -> Self {
        let folder = TempDir::new_in(below).unwrap();
        Self { program, folder }
    }

    /// Path of a file there.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes an image of 16 MiB.
    pub fn image(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        let file = File::create(&path).unwrap();
        // Written, so that a write to it is a write and nothing else.
        let mebibyte = vec![0x5a; 1 << 20];
        (0..IMAGE >> 20).for_each(|at| file.write_all_at(&mebibyte, at << 20).unwrap());
        file.sync_all().unwrap();
        path
    }

    /// A daemon for these disks; device `dN` at socket `dN`.
    pub fn command(&self, disks: &[String]) -> Command {
        let mut command = command(self.program, &["serve", "--idle", "sleep"]);
        command.arg("--stats").arg(self.path("stats"));
        for (number, disk) in disks.iter().enumerate() {
            let socket = self.path(&format!("d{number}"));
            let block = format!("id=d{number},socket={},{disk}", socket.display());
            command.args(["--block", &block]);
        }
        command
    }

    /// Starts a daemon for these disks, and waits until it serves.
    pub fn serve(&self, disks: &[String]) -> Program {
        let program = Program::start(self.command(disks), true);
        for number in 0..disks.len() {
            self.wait_for_socket(number);
        }
        program
    }

    /// Waits until device `dN` can be connected to.
    pub fn wait_for_socket(&self, number: usize) {
        let socket = self.path(&format!("d{number}"));
        until("its socket", || UnixStream::connect(&socket).is_ok());
    }

    /// Connects to device `dN`, for so many requests at a time.
    pub fn connect(&self, disk: usize, depth: u16) -> Client {
        let socket = self.path(&format!("d{disk}"));
        Client::connect(&socket, Options::new(depth, BLOCK)).unwrap()
    }

    /// Checks that nothing is left of the daemon but its counters, which are returned.
    #[track_caller]
    pub fn check(&self, disks: usize) -> serde_json::Value {
        for number in 0..disks {
            assert!(
                !self.path(&format!("d{number}")).exists(),
                "socket {number} is left"
            );
        }
        serde_json::from_slice(&std::fs::read(self.path("stats")).unwrap()).unwrap()
    }
}

/// Makes requests of disk 0 until it is hung up on.
pub fn load(socket: &Path) -> Result<(), RunError> {
    let options = Options::new(32, BLOCK);
    drive(&Run {
        vms: vec![VmSpec::closed(socket.to_owned(), 32, BLOCK)],
        options,
        mix: Mix {
            read: 10,
            flush: 5,
            is_sequential: false,
        },
        sectors: None,
        mode: Mode::Event,
        warm_up: Duration::ZERO,
        measure: Duration::from_secs(60),
        seed: 7,
        server: None,
    })
    .map(drop)
}
