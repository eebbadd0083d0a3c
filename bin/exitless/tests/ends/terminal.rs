//! A terminal whose user is the test.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::Command;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, tcgetattr};

/// A terminal: our end and the machine's.
pub struct Terminal {
    /// The end at which the user types and reads.
    pub ours: File,
    /// The machine's end.
    pub theirs: OwnedFd,
}

impl Terminal {
    /// In the modes a new one has.
    pub fn open() -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap();
        let theirs = File::options()
            .read(true)
            .write(true)
            .open(name.to_str().unwrap())
            .unwrap();
        Self {
            ours: ours.into(),
            theirs: theirs.into(),
        }
    }

    /// As they are now.
    pub fn settings(&self) -> Termios {
        tcgetattr(&self.theirs).unwrap()
    }

    /// To `command`, as its standard input and output.
    pub fn give(&self, command: &mut Command) {
        command
            .stdin(self.theirs.try_clone().unwrap())
            .stdout(self.theirs.try_clone().unwrap());
    }

    /// Nothing is done to what is typed.
    pub fn is_raw(&self) -> bool {
        let settings = self.settings();
        !settings
            .local_modes
            .contains(rustix::termios::LocalModes::ICANON)
    }
}

/// Returns the modes of a terminal, of which a program must leave none changed.
pub fn modes(settings: &Termios) -> impl PartialEq + std::fmt::Debug {
    (
        settings.input_modes,
        settings.output_modes,
        settings.control_modes,
        settings.local_modes,
    )
}
