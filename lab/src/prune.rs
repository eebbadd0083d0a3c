//! Removal of folders from the cache that no start needs any more.
//!
//! - The lab's own programs, `programs-HASH`, are built once for each source tree (about 130 MB);
//!   those of a tree that was deleted or moved stay. After a build all but the [`KEPT`] that were
//!   used last are removed; [`prune`] removes all but this tree's.
//! - Modules for guests, `module-HASH`, one for each kernel and state of their sources: after a
//!   build all but the [`KEPT`] that were used last are removed; [`prune`] removes all, since each
//!   is built again in seconds.
//! - Headers of a kernel that is not in the cache any more, `headers-RELEASE_VERSION` (90 MB).
//! - A Debian root, `debian-RELEASE-HASH` (2 GB), of other scripts than the present ones.
//!
//! Folders that another process may be using stay: those that were used or made within the last
//! hour (`RECENT`). A folder is renamed before it is removed, so that an interrupted removal leaves
//! no folder that seems complete; the next one continues it.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::LabError;
use crate::packages::{cache_dir, is_old_debian, is_old_headers, unique};

/// Number of other trees whose programs are kept beside this one's, and of modules beside one that
/// was just built.
pub const KEPT: usize = 3;
/// Time after its last use for which a folder may still be in use: longer than any build.
const RECENT: Duration = Duration::from_secs(3600);
/// File in a folder of programs, whose time is that of the last use.
const STAMP: &str = "last-used";

/// Result of [`prune`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Folders that were removed, or would be, and their sizes in bytes.
    pub gone: Vec<(PathBuf, u64)>,
    /// Folders that may be in use.
    pub kept: Vec<PathBuf>,
}

impl Pruned {
    /// Returns the bytes that are free again, or would be.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.gone.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Removes the folders that no start needs whose own programs are in `own`, or only lists them.
///
/// # Errors
/// [`LabError::Host`]: a folder that cannot be read or removed.
pub fn prune(own: &Path, dry_run: bool) -> Result<Pruned, LabError> {
    let mut found = Pruned::default();
    for folder in old_folders(&cache_dir(), own)? {
        if folder.is_recent {
            found.kept.push(folder.path);
            continue;
        }
        let bytes = size(&folder.path);
        if !dry_run {
            remove(&folder.path)?;
        }
        found.gone.push((folder.path, bytes));
    }
    Ok(found)
}

/// Notes that a folder of programs or of a module is used.
pub(crate) fn note_use(programs: &Path) {
    // Without the file they count as used when they were built.
    let _ = fs::create_dir_all(programs).and_then(|()| fs::write(programs.join(STAMP), ""));
}

/// Removes programs of other trees beyond [`KEPT`]: those that were used longest ago.
pub(crate) fn keep_few(cache: &Path, own: &Path) {
    keep_few_of(Kind::Programs, cache, own);
}

/// Removes modules likewise; `own` is one of them.
pub(crate) fn keep_few_modules(cache: &Path, own: &Path) {
    keep_few_of(Kind::Module, cache, own);
}

fn keep_few_of(kind: Kind, cache: &Path, own: &Path) {
    let folders = old_folders(cache, own).unwrap_or_default();
    let folders = folders.into_iter().filter(|it| it.kind == kind);
    for folder in folders.skip(KEPT).filter(|it| !it.is_recent) {
        // A failure does no harm; the next build tries again.
        let _ = remove(&folder.path);
    }
}

/// A folder that this tree does not need.
struct Folder {
    path: PathBuf,
    kind: Kind,
    is_recent: bool,
    used: SystemTime,
}

/// Content of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Programs,
    Module,
    Headers,
    Debian,
}

impl Kind {
    /// Returns the content of the folder of this name, if no start may need it.
    fn of_old(cache: &Path, name: &str) -> Option<Self> {
        if name.starts_with("programs-") {
            Some(Self::Programs)
        } else if name.starts_with("module-") {
            Some(Self::Module)
        } else if is_old_headers(cache, name) {
            Some(Self::Headers)
        } else {
            is_old_debian(name).then_some(Self::Debian)
        }
    }
}

/// Returns these folders of `cache`, the one that was used last first. Links are not followed.
fn old_folders(cache: &Path, own: &Path) -> Result<Vec<Folder>, LabError> {
    let entries = match fs::read_dir(cache) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(LabError::host("read", cache)(error)),
    };
    let now = SystemTime::now();
    let mut found: Vec<Folder> = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| {
            let path = entry.path();
            let name = entry.file_name().into_string().ok()?;
            let kind = Kind::of_old(cache, &name).filter(|_| path != own)?;
            let used = last_used(&path);
            let is_recent = now.duration_since(used).is_ok_and(|since| since < RECENT);
            Some(Folder {
                path,
                kind,
                is_recent,
                used,
            })
        })
        .collect();
    found.sort_by(|one, other| other.used.cmp(&one.used).then(one.path.cmp(&other.path)));
    Ok(found)
}

/// Returns the time of the folder's last use, by its file, or that of its creation. A time in the
/// future counts as in use.
fn last_used(folder: &Path) -> SystemTime {
    let modified = |path: &Path| fs::symlink_metadata(path)?.modified();
    let stamp = modified(&folder.join(STAMP));
    let used = stamp.or_else(|_| modified(folder));
    used.unwrap_or_else(|_| SystemTime::now())
}

fn remove(folder: &Path) -> Result<(), LabError> {
    let doomed = folder.with_extension(unique());
    let removed = fs::rename(folder, &doomed).and_then(|()| fs::remove_dir_all(&doomed));
    removed.map_err(LabError::host("remove", folder))
}

/// Returns the bytes on the disk below `folder`; a file with several names there counts once.
fn size(folder: &Path) -> u64 {
    let mut seen = HashSet::new();
    let mut folders = vec![folder.to_owned()];
    let mut bytes = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(about) = fs::symlink_metadata(entry.path()) else {
                continue;
            };
            if about.is_dir() {
                folders.push(entry.path());
            }
            if seen.insert((about.dev(), about.ino())) {
                bytes += about.blocks() * 512;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    /// Returns a cache with programs that were used so many days ago.
    fn cache(days: &[u32]) -> (tempfile::TempDir, PathBuf) {
        let cache = tempfile::tempdir().expect("a folder");
        for number in days {
            let folder = cache.path().join(format!("programs-{number}"));
            note_use(&folder);
            fs::write(folder.join("program"), vec![1; 10_000]).expect("a file");
            fs::hard_link(folder.join("program"), folder.join("again")).expect("a link");
            let used = SystemTime::now() - *number * DAY;
            let stamp = File::options()
                .write(true)
                .open(folder.join(STAMP))
                .expect("a stamp");
            stamp.set_modified(used).expect("its time");
        }
        let own = cache.path().join("programs-own");
        fs::create_dir(&own).expect("a folder");
        for other in ["qemu-10.0", "linux-own", "apt", "busybox"] {
            fs::create_dir(cache.path().join(other)).expect("a folder");
        }
        (cache, own)
    }

    fn names(cache: &Path) -> Vec<String> {
        let entries = fs::read_dir(cache).expect("it is there").flatten();
        let names = entries.map(|entry| entry.file_name().into_string().expect("a name"));
        let mut names: Vec<_> = names.filter(|name| name.starts_with("programs-")).collect();
        names.sort();
        names
    }

    #[test]
    fn programs_of_other_trees_are_old_and_nothing_else_is() {
        let (cache, own) = cache(&[0, 1, 9]);
        let old = old_folders(cache.path(), &own).expect("read");
        let old: Vec<_> = old
            .iter()
            .map(|it| {
                (
                    it.path.file_name().expect("one").to_str().expect("one"),
                    it.is_recent,
                )
            })
            .collect();
        assert_eq!(
            old,
            [
                ("programs-0", true),
                ("programs-1", false),
                ("programs-9", false)
            ]
        );
        let none = old_folders(&cache.path().join("absent"), &own);
        assert!(none.expect("no cache").is_empty());
    }

    #[test]
    fn a_build_leaves_the_programs_of_a_few_trees() {
        let (cache, own) = cache(&[1, 2, 3, 4, 5]);
        keep_few(cache.path(), &own);
        assert_eq!(
            names(cache.path()),
            ["programs-1", "programs-2", "programs-3", "programs-own"]
        );
    }

    #[test]
    fn modules_and_programs_do_not_crowd_each_other_out() {
        let (cache, own) = cache(&[1, 2, 3, 4, 5]);
        for number in 1..=5 {
            let module = cache.path().join(format!("module-{number}"));
            fs::rename(cache.path().join(format!("programs-{number}")), &module).expect("renamed");
        }
        keep_few(cache.path(), &own);
        let modules = || {
            let folders = old_folders(cache.path(), &own).expect("read");
            folders.iter().filter(|it| it.kind == Kind::Module).count()
        };
        assert_eq!(modules(), 5);
        let built = cache.path().join("module-4");
        keep_few_modules(cache.path(), &built);
        assert_eq!(modules(), 1 + KEPT);
        assert!(built.exists() && !cache.path().join("module-5").exists());
    }

    #[test]
    fn headers_go_with_their_kernel() {
        let (cache, own) = cache(&[]);
        let headers = cache.path().join("headers-6.1.0-1-cloud-amd64_6.1.1-1");
        fs::create_dir(&headers).expect("a folder");
        let old = old_folders(cache.path(), &own).expect("read");
        let old: Vec<_> = old.iter().map(|it| (&it.path, it.kind)).collect();
        assert_eq!(old, [(&headers, Kind::Headers)]);
    }

    #[test]
    fn folders_in_use_stay_and_links_are_not_followed() {
        let (cache, own) = cache(&[0]);
        let elsewhere = tempfile::tempdir().expect("a folder");
        fs::write(elsewhere.path().join("precious"), "x").expect("a file");
        std::os::unix::fs::symlink(elsewhere.path(), cache.path().join("programs-link"))
            .expect("a link");
        let old = old_folders(cache.path(), &own).expect("read");
        assert!(old.iter().all(|it| it.is_recent));
        // A link inside a folder is removed, and its target stays.
        let folder = cache.path().join("programs-0");
        std::os::unix::fs::symlink(elsewhere.path(), folder.join("link")).expect("a link");
        remove(&folder).expect("removed");
        assert!(elsewhere.path().join("precious").exists());
        assert_eq!(names(cache.path()), ["programs-link", "programs-own"]);
    }

    #[test]
    fn a_file_with_two_names_counts_once() {
        let (cache, _) = cache(&[1]);
        let bytes = size(&cache.path().join("programs-1"));
        assert!((10_000..20_000).contains(&bytes), "{bytes}");
    }
}
