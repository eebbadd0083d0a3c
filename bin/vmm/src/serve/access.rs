//! Access to a device's socket: its mode and its group.
//!
//! To connect takes permission to write. A socket is made with permissions for its owner alone,
//! then gets its group and its mode, and listens only after that. Before it listens no process can
//! connect, so at no time may more connect than was asked for. A file that another process puts at
//! the path meanwhile is not touched.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::{Context, Result, bail};
use nix::unistd::Group;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, chmod, chownat, fchmod, fstat, open};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// The mode where only the group is given, which would be of no use without a permission.
const MODE_OF_GROUP: u32 = 0o660;
/// Connections that wait: as many as the host allows.
const BACKLOG: i32 = -1;

/// Mode and group, as far as they are given; those that are not are as the process's umask and
/// group have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Permissions, 0 to 0o777, of which one at least is to write.
    pub mode: Option<u32>,
    /// A group's number.
    pub group: Option<u32>,
}

impl Access {
    /// Parses the values of `mode` and `group`: an octal number, and a name or a number.
    ///
    /// # Errors
    /// A mode that is none, or allows no process to connect; a group that is not there.
    pub fn parse(mode: Option<&str>, group: Option<&str>) -> Result<Self> {
        let group = group.map(number_of).transpose()?;
        let mode = match (mode, group) {
            (Some(text), _) => Some(permissions(text)?),
            (None, Some(_)) => Some(MODE_OF_GROUP),
            (None, None) => None,
        };
        Ok(Self { mode, group })
    }

    /// Binds a socket at `path` that does not listen yet. With a mode, its owner alone has
    /// permissions.
    pub fn bind(self, path: &Path) -> io::Result<OwnedFd> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        if let Some(mode) = self.mode {
            // Linux makes the file with the permissions of the socket, less the umask. A kernel
            // that does not gives the file too many, for as long as the socket does not listen.
            let _ = fchmod(&socket, Mode::from_raw_mode(mode & 0o700));
        }
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    }

    /// Gives what was bound at `path` its group and its mode.
    ///
    /// # Errors
    /// Something else is at the path now, or this process may not give the socket that group.
    pub fn apply(self, path: &Path) -> Result<()> {
        if self == Self::default() {
            return Ok(());
        }
        let at = || format!("the socket {}", path.display());
        // Names one file from here on, and follows no link.
        let file = open(
            path,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .with_context(at)?;
        let about = fstat(&file).with_context(at)?;
        let is_ours = FileType::from_raw_mode(about.st_mode) == FileType::Socket
            && about.st_nlink == 1
            && about.st_uid == rustix::process::geteuid().as_raw();
        if !is_ours {
            bail!("{}: something else has been put in its place", at());
        }
        if let Some(group) = self.group {
            chownat(
                &file,
                "",
                None,
                Some(Gid::from_raw(group)),
                AtFlags::EMPTY_PATH,
            )
            .with_context(|| {
                format!(
                    "{} cannot be given to group {group} (whoever is not root has only its own \
                     groups to give to)",
                    at()
                )
            })?;
        }
        if let Some(mode) = self.mode {
            // By its descriptor, which fchmod does not take.
            let same = format!("/proc/self/fd/{}", file.as_raw_fd());
            chmod(same, Mode::from_raw_mode(mode))
                .with_context(|| format!("{} cannot be given mode {mode:04o}", at()))?;
        }
        Ok(())
    }
}

/// Lets clients connect.
pub fn listen(socket: OwnedFd) -> io::Result<UnixListener> {
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn permissions(text: &str) -> Result<u32> {
    let is_octal = (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    let mode = u32::from_str_radix(text, 8).ok().filter(|_| is_octal);
    let Some(mode) = mode.filter(|&mode| mode <= 0o777) else {
        bail!("mode is an octal number to 0777, such as 0660, not {text:?}");
    };
    if mode & 0o222 == 0 {
        bail!("mode {text} lets nobody connect: that takes permission to write (0600, 0660, 0666)");
    }
    Ok(mode)
}

/// Returns the number of the group that is named so, or has that number.
fn number_of(name: &str) -> Result<u32> {
    let named = Group::from_name(name).with_context(|| format!("group {name:?}"))?;
    if let Some(group) = named {
        return Ok(group.gid.as_raw());
    }
    let is_number = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    let number = name.parse().ok().filter(|_| is_number);
    // The last one says «no group» to system calls.
    match number.filter(|&number| number != u32::MAX) {
        Some(number) => Ok(number),
        None => bail!("there is no group {name:?} here"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    /// Returns a group that this process may give files to.
    fn some_group() -> u32 {
        match rustix::process::geteuid().is_root() {
            true => 12_345,
            false => rustix::process::getegid().as_raw(),
        }
    }

    #[test]
    fn a_socket_is_never_more_open_than_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        for mode in [0o600, 0o660, 0o666, 0o622] {
            let path = folder.path().join(format!("{mode:o}"));
            let access = Access {
                mode: Some(mode),
                group: Some(some_group()),
            };
            let socket = access.bind(&path).unwrap();
            assert_eq!(mode_of(&path) & !(mode & 0o700), 0, "made open");
            assert!(UnixStream::connect(&path).is_err(), "it listens too early");
            access.apply(&path).unwrap();
            let about = fs::symlink_metadata(&path).unwrap();
            assert_eq!((mode_of(&path), about.gid()), (mode, some_group()));
            assert!(UnixStream::connect(&path).is_err(), "it listens too early");
            let listener = listen(socket).unwrap();
            UnixStream::connect(&path).unwrap();
            listener.accept().unwrap();
        }
    }

    #[test]
    fn other_file_in_place_of_the_socket_is_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let victim = folder.path().join("victim");
        fs::write(&victim, "").unwrap();
        let before = mode_of(&victim);
        let access = Access {
            mode: Some(0o666),
            group: Some(some_group()),
        };
        let in_its_place: [fn(&Path, &Path); 3] = [
            |victim, path| symlink(victim, path).unwrap(),
            |victim, path| fs::hard_link(victim, path).unwrap(),
            |victim, path| fs::rename(victim, path).unwrap(),
        ];
        for put in in_its_place {
            let _socket = access.bind(&path).unwrap();
            fs::remove_file(&path).unwrap();
            put(&victim, &path);
            let error = access.apply(&path).unwrap_err();
            assert!(error.to_string().contains("something else"), "{error:#}");
            let meant = match victim.exists() {
                true => &victim,
                false => &path,
            };
            let about = fs::metadata(meant).unwrap();
            assert_eq!(
                (mode_of(meant), about.gid()),
                (before, rustix::process::getegid().as_raw())
            );
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn a_mode_that_is_none_and_a_group_that_is_not_there_are_named() {
        for (mode, group, says) in [
            (Some("rw"), None, "mode is an octal number"),
            (Some("0888"), None, "mode is an octal number"),
            (Some("+660"), None, "mode is an octal number"),
            (Some("1777"), None, "mode is an octal number"),
            (Some(""), None, "mode is an octal number"),
            (Some("00660"), None, "mode is an octal number"),
            (Some("0440"), None, "mode 0440 lets nobody connect"),
            (None, Some("no-such-group"), "no group \"no-such-group\""),
            (None, Some(""), "no group \"\""),
            (None, Some("-1"), "no group \"-1\""),
            (None, Some("4294967295"), "no group \"4294967295\""),
        ] {
            let error = Access::parse(mode, group).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_group_that_is_named_may_connect() {
        let parse = |mode, group| Access::parse(mode, group).unwrap();
        assert_eq!(parse(None, None), Access::default());
        let said = |mode, group| Access { mode, group };
        assert_eq!(parse(Some("0600"), None), said(Some(0o600), None));
        assert_eq!(parse(Some("666"), Some("7")), said(Some(0o666), Some(7)));
        assert_eq!(parse(None, Some("root")), said(Some(0o660), Some(0)));
    }
}
