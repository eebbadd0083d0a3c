//! Files that control a running machine: read at the start, and whenever they have been written.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::inotify;

use crate::lacks;
use crate::messages::say;

/// Gives `set` the text of `file` now, if it is there, and whenever it has been written. A text
/// that `set` refuses is reported, and changes nothing. `option` names the file in messages.
pub fn follow(
    option: &'static str,
    file: PathBuf,
    set: impl Fn(&str) -> Result<()> + Send + 'static,
) -> Result<()> {
    let name = file
        .file_name()
        .with_context(|| format!("{option} {} names no file", file.display()))?
        .to_owned();
    let dir = match file.parent() {
        Some(dir) if dir != Path::new("") => dir.to_owned(),
        _ => PathBuf::from("."),
    };
    let watch = || -> io::Result<_> {
        let fd = inotify::init(inotify::CreateFlags::CLOEXEC)?;
        let ends = inotify::WatchFlags::CLOSE_WRITE | inotify::WatchFlags::MOVED_TO;
        inotify::add_watch(&fd, &dir, ends)?;
        Ok(fd)
    };
    let fd = watch().with_context(|| format!("{option} {} cannot be watched", file.display()));
    let fd = lacks::advise(fd, "without it what was given at the start stays")?;
    let apply = move || {
        let outcome = read(&file).and_then(|text| text.map_or(Ok(()), |text| set(&text)));
        if let Err(error) = outcome {
            say!("{}: {error:#}; nothing changes", file.display());
        }
    };
    apply();
    let builder = std::thread::Builder::new().name("follows-file".into());
    let run = move || {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&fd, &mut buffer);
        while let Ok(event) = events.next() {
            let is_ours = event
                .file_name()
                .is_some_and(|it| it.to_bytes() == name.as_encoded_bytes());
            if is_ours {
                apply();
            }
        }
    };
    builder.spawn(run).context("a thread")?;
    Ok(())
}

/// Returns the text in the file; `None` if there is none, or nothing in it.
fn read(file: &Path) -> Result<Option<String>> {
    /// Most bytes that are read: more than any size takes.
    const MOST: u64 = 64;
    // A FIFO must not hold us up.
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(file);
    let opened = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut text = String::new();
    opened.take(MOST).read_to_string(&mut text)?;
    let text = text.trim();
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::values::size;

    #[test]
    fn a_file_says_something_or_nothing_or_why_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("limit");
        let read = || {
            let text = read(&file)?;
            text.map(|text| size::bytes(&text)).transpose()
        };
        assert_eq!(read().expect("none"), None);
        for (text, limit) in [("", None), (" \n", None), ("100M\n", Some(100 << 20))] {
            fs::write(&file, text).expect("written");
            assert_eq!(read().expect(text), limit, "{text:?}");
        }
        for text in ["a lot", "100M and more", &"9".repeat(100)] {
            fs::write(&file, text).expect("written");
            read().expect_err(text);
        }
    }

    #[test]
    fn a_fifo_and_a_file_without_end_hold_nobody_up() {
        let dir = tempfile::tempdir().expect("a directory");
        let fifo = dir.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0)
            .expect("a FIFO");
        assert_eq!(read(&fifo).expect("nobody writes"), None);
        let zeroes = read(Path::new("/dev/zero")).expect("some of them");
        size::bytes(&zeroes.expect("they are no spaces")).expect_err("zeroes are no number");
    }

    #[test]
    fn a_follower_receives_the_first_content_and_each_change() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("target");
        fs::write(&file, "one").expect("written");
        let (tell, told) = channel();
        let set = move |text: &str| Ok(tell.send(text.to_owned())?);
        follow("--test", file.clone(), set).expect("a directory is there");
        let next = || told.recv_timeout(Duration::from_secs(20)).expect("told");
        assert_eq!(next(), "one");
        fs::write(dir.path().join("other"), "nobody's").expect("written");
        fs::write(&file, "two\n").expect("written");
        assert_eq!(next(), "two");
    }
}
