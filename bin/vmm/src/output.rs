//! Files that are written for others to read: counters, ledgers, reports.
//!
//! They are checked before anything starts. A new file takes the place of the old one in one step,
//! so that a reader finds the one or the other, whole; and a link that another user has put there
//! is replaced, and not followed.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use tempfile::NamedTempFile;

/// Checks that [`write()`] can write there, and leaves nothing behind.
///
/// # Errors
/// Names `option` and the path.
pub fn check(option: &str, path: &Path) -> Result<()> {
    if path.file_name().is_none() {
        bail!("{option} {path:?} names no file");
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() => bail!(
            "{option} {} is there already, and no regular file (a link is not followed)",
            path.display()
        ),
        // Its name may be too long, for one.
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error)
                .with_context(|| format!("{option} {} cannot be written", path.display()));
        }
        _ => {}
    }
    beside(path)
        .map(drop)
        .with_context(|| format!("{option} {} cannot be written", path.display()))
}

/// Checks that a report can be written there; its folder is made.
///
/// # Errors
/// Names `option` and the path.
pub fn check_report(option: &str, path: &Path) -> Result<()> {
    if path.exists() {
        return File::options()
            .write(true)
            .open(path)
            .map(drop)
            .with_context(|| format!("{option} {} cannot be written", path.display()));
    }
    fs::create_dir_all(folder(path))
        .with_context(|| format!("{option} {}: its folder cannot be made", path.display()))?;
    check(option, path)
}

/// Writes the whole of a file. One that is there keeps its permissions.
pub fn write(path: &Path, content: &str) -> io::Result<()> {
    let mut file = beside(path)?;
    if let Ok(old) = fs::symlink_metadata(path)
        && old.is_file()
    {
        file.as_file().set_permissions(old.permissions())?;
    }
    file.write_all(content.as_bytes())?;
    file.persist(path)?;
    Ok(())
}

/// Creates a file in the folder of `path`, of a name that no other file has, gone with the value.
fn beside(path: &Path) -> io::Result<NamedTempFile> {
    tempfile::Builder::new()
        .prefix(".exitless-")
        // As any new file's: the process's mask says what is taken off.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder(path))
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_its_place_is_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (victim, path) = (folder.path().join("victim"), folder.path().join("stats"));
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        write(&path, "new").unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }

    #[test]
    fn a_reader_keeps_what_it_has_opened_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stats");
        write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let reader = File::open(&path).unwrap();
        write(&path, "new").unwrap();
        assert_eq!(io::read_to_string(reader).unwrap(), "old");
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_check_names_what_cannot_be_written_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        check("--stats", &folder.path().join("stats")).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let long = "x".repeat(300);
        for path in ["/dev/null", "/dev/null/x", "/", "", "..", "/tmp", &long] {
            let error = check("--stats", Path::new(path)).unwrap_err().to_string();
            assert!(error.starts_with("--stats "), "{path}: {error}");
        }
    }

    #[test]
    fn a_report_may_be_in_a_folder_that_is_not_there_but_not_below_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/report.json");
        check_report("--report", &path).unwrap();
        assert!(!path.exists());
        fs::write(&path, "old").unwrap();
        check_report("--report", &path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        let error = check_report("--report", &path.join("x")).unwrap_err();
        assert!(error.to_string().starts_with("--report "), "{error}");
    }
}
