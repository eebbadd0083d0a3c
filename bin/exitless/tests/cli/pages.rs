//! Output to a terminal, a file, or a program that reads only its beginning.

use std::process::Stdio;

use rustix::pipe::{PipeFlags, pipe_with};
use spawned::short::end;

use crate::program::exitless;

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    for args in [
        &["completions", "bash"] as &[&str],
        &["man"],
        &["man", "run"],
    ] {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        drop(reader);
        let mut command = exitless(folder.path(), args);
        let command = command.stdout(writer).stderr(Stdio::piped());
        let ended = end(command.spawn().unwrap());
        assert_eq!(ended.status, Some(0), "{args:?}: {ended:?}");
        assert_eq!(ended.error, "", "{args:?}");
    }
}
