//! `exitless-lab doctor` of a user with fewer permissions than the one who built it.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use spawned::files;
use tempfile::TempDir;

#[test]
fn a_user_who_cannot_keep_the_labs_files_is_not_sent_there() {
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        return println!("skipped: only root can start a program as somebody else");
    }
    let cache = TempDir::new().unwrap();
    fs::set_permissions(cache.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // Other users may not read the directory where programs are built. An open program can be
    // started.
    let program = fs::File::open(env!("CARGO_BIN_EXE_exitless-lab")).unwrap();
    let mut command = Command::new(files::inheritable(&program));
    command.args(["doctor", "--json"]).current_dir("/");
    command.env("EXITLESS_LAB_DIR", cache.path().join("lab"));
    command.uid(files::NOBODY).gid(files::NOBODY);
    let output = match command.output() {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            return println!("skipped: temporary files are root's alone");
        }
        output => output.unwrap(),
    };
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let lab = &report["findings"]["lab"];
    assert_eq!(lab["state"], "missing", "{lab}");
    let value = lab["value"].as_str().unwrap();
    let dir = cache.path().to_str().unwrap();
    for word in ["nothing can be kept in", dir, "EXITLESS_LAB_DIR"] {
        assert!(value.contains(word), "no {word:?} in: {value}");
    }
    assert_ne!(report["verdict"], "lab");
}
