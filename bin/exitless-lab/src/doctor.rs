//! `exitless-lab doctor`: what this host offers, and whether the lab can be started on it.

use std::path::Path;

use anyhow::Result;
use vmm::doctor::{self, DoctorArgs, Finding, OtherHost, State};

/// Memory the lab takes, MiB: its emulated host's 2048 and QEMU itself.
const LAB_MIB: u64 = 2600;

/// Runs `doctor`.
pub fn main(args: &DoctorArgs) -> Result<u8> {
    doctor::main(args, |available_mib| {
        let is_inside = Path::new("/etc/exitless-lab").exists();
        Some(lab(
            &harness::lab_cmd::obstacles(),
            is_inside,
            available_mib,
        ))
    })
}

/// Returns the lab as a host for guests, by what keeps it from starting here, but for memory.
fn lab(obstacles: &[String], is_inside: bool, available_mib: u64) -> OtherHost {
    let (state, value) = if is_inside {
        (State::Limited, "this is the lab already".to_owned())
    } else if !obstacles.is_empty() {
        (State::Missing, obstacles.join("; "))
    } else if available_mib < LAB_MIB {
        (
            State::Missing,
            format!("{available_mib} MiB of memory available, {LAB_MIB} wanted"),
        )
    } else {
        (State::Good, "can be started (exitless-lab lab)".into())
    };
    OtherHost {
        finding: Finding {
            key: "lab",
            name: "the lab",
            state,
            value,
            why: "an emulated host with complete KVM, for counting rather than timing",
            next: "it takes Debian 12 or a derivative, x86-64, the source tree that this was built \
                 from, a cache \
                   directory, and network on the first start",
        },
        is_this: is_inside.then_some("This is the lab"),
        remedy: "Use the lab, an emulated host: `exitless-lab lab -- run …` (`exitless-lab lab \
             --help`).",
        no_remedy: "The lab cannot run here either; see above what it lacks.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_obstacle_of_the_lab_is_named() {
        let found = |obstacles: &[&str], is_inside, mib| {
            let obstacles: Vec<_> = obstacles.iter().map(|it| (*it).to_owned()).collect();
            let lab = lab(&obstacles, is_inside, mib);
            (lab.finding.state, lab.finding.value, lab.is_this.is_some())
        };
        let said = |state, value: &str, is_inside| (state, value.to_owned(), is_inside);
        assert_eq!(
            found(&[], false, 8000),
            said(State::Good, "can be started (exitless-lab lab)", false)
        );
        assert_eq!(
            found(&["no apt-get", "no room"], false, 8000),
            said(State::Missing, "no apt-get; no room", false)
        );
        assert_eq!(
            found(&[], false, 1000),
            said(
                State::Missing,
                "1000 MiB of memory available, 2600 wanted",
                false
            )
        );
        assert_eq!(
            found(&[], true, 8000),
            said(State::Limited, "this is the lab already", true)
        );
    }
}
