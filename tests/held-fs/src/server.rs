//! The FUSE server: answers the kernel's requests, and stores the files.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::process::{getgid, getuid};

use crate::gate::{Gate, Kind};

/// Validity of names and attributes in the kernel's caches: files change only by calls of the
/// kernel that serves them.
const LONG: Duration = Duration::from_secs(3600);
/// Asynchronous operations that the kernel sends at a time: more than any test holds.
const MAX_BACKGROUND: u16 = 4096;

/// One file.
#[derive(Debug)]
pub(crate) struct Node {
    name: OsString,
    perm: u16,
    is_unlinked: bool,
    pub(crate) gate: Gate,
}

/// The files. An inode number is the index here plus 2; indices are not reused.
#[derive(Debug, Default)]
pub(crate) struct Files(Mutex<Vec<Node>>);

/// Result of a look-up of a file.
pub(crate) struct Found {
    ino: INodeNo,
    perm: u16,
    pub(crate) gate: Gate,
}

impl Files {
    fn nodes(&self) -> MutexGuard<'_, Vec<Node>> {
        self.0.lock().expect("nobody panics holding the files")
    }

    pub(crate) fn create(&self, name: &OsStr, perm: u16) -> io::Result<Found> {
        let mut nodes = self.nodes();
        if nodes
            .iter()
            .any(|node| !node.is_unlinked && node.name == name)
        {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let contents = memfd_create("held-fs", MemfdFlags::CLOEXEC)?;
        nodes.push(Node {
            name: name.to_owned(),
            perm,
            is_unlinked: false,
            gate: Gate::new(File::from(contents)),
        });
        Ok(found(nodes.len() - 1, &nodes))
    }

    pub(crate) fn find(&self, name: &OsStr) -> Option<Found> {
        let nodes = self.nodes();
        let at = nodes
            .iter()
            .position(|node| !node.is_unlinked && node.name == name)?;
        Some(found(at, &nodes))
    }

    fn get(&self, ino: INodeNo) -> io::Result<Found> {
        let nodes = self.nodes();
        let at = usize::try_from(ino.0)
            .ok()
            .and_then(|ino| ino.checked_sub(2));
        match at {
            Some(at) if at < nodes.len() => Ok(found(at, &nodes)),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    pub(crate) fn open_for_ever(&self) {
        let gates: Vec<Gate> = self.nodes().iter().map(|node| node.gate.clone()).collect();
        for gate in gates {
            gate.open_for_ever();
        }
    }
}

fn found(at: usize, nodes: &[Node]) -> Found {
    Found {
        ino: INodeNo(at as u64 + 2),
        perm: nodes[at].perm,
        gate: nodes[at].gate.clone(),
    }
}

impl Found {
    fn attr(&self) -> io::Result<FileAttr> {
        let about = self.gate.contents().metadata()?;
        let modified = about.modified()?;
        Ok(FileAttr {
            size: about.size(),
            blocks: about.blocks(),
            mtime: modified,
            ctime: modified,
            kind: FileType::RegularFile,
            perm: self.perm,
            ..attr(self.ino)
        })
    }
}

/// Returns the attributes of the directory, which are also the defaults of files.
fn attr(ino: INodeNo) -> FileAttr {
    FileAttr {
        ino,
        size: 0,
        blocks: 0,
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind: FileType::Directory,
        perm: 0o755,
        nlink: 1,
        uid: getuid().as_raw(),
        gid: getgid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn errno(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::AlreadyExists => Errno::EEXIST,
        io::ErrorKind::NotFound => Errno::ENOENT,
        _ => Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

/// Runs an operation, or returns the error that the test has chosen for it.
fn unless_failed<T>(failure: Option<i32>, run: impl FnOnce() -> io::Result<T>) -> Result<T, Errno> {
    match failure {
        Some(code) => Err(Errno::from_i32(code)),
        None => run().map_err(|error| errno(&error)),
    }
}

/// Reads `size` bytes at an offset; fewer at the end of the file.
fn read_at(file: &File, offset: u64, size: u32) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; size as usize];
    let mut len = 0;
    while len < bytes.len() {
        match file.read_at(&mut bytes[len..], offset + len as u64)? {
            0 => break,
            more => len += more,
        }
    }
    bytes.truncate(len);
    Ok(bytes)
}

/// Manner in which the kernel makes operations with O_DIRECT.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direct {
    /// In flight without a thread that waits; cannot be cancelled.
    Asynchronous,
    /// A thread makes the operation and waits for it.
    Waiting,
}

pub(crate) struct Server {
    pub(crate) files: Arc<Files>,
    pub(crate) direct: Direct,
}

impl Filesystem for Server {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        if self.direct == Direct::Asynchronous {
            let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        }
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.files.find(name).map(|found| found.attr()) {
            Some(Ok(attr)) => reply.entry(&LONG, &attr, Generation(0)),
            Some(Err(error)) => reply.error(errno(&error)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        if ino == INodeNo::ROOT {
            return reply.attr(&LONG, &attr(ino));
        }
        match self.files.get(ino).and_then(|found| found.attr()) {
            Ok(attr) => reply.attr(&LONG, &attr),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Sets the length only; owner, mode and times are not changed.
    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changed = self.files.get(ino).and_then(|found| {
            if let Some(size) = size {
                found.gate.contents().set_len(size)?;
            }
            found.attr()
        });
        match changed {
            Ok(attr) => reply.attr(&LONG, &attr),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn create(
        &self,
        _req: &Request,
        _parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let perm = (mode & !umask & 0o777) as u16;
        match self.files.create(name, perm).and_then(|found| found.attr()) {
            Ok(attr) => {
                let flags = FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
                reply.created(&LONG, &attr, Generation(0), FileHandle(0), flags);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn unlink(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut nodes = self.files.nodes();
        let node = nodes
            .iter_mut()
            .find(|node| !node.is_unlinked && node.name == name);
        match node {
            Some(node) => {
                node.is_unlinked = true;
                drop(nodes);
                reply.ok();
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let gate = match self.files.get(ino) {
            Ok(found) => found.gate,
            Err(error) => return reply.error(errno(&error)),
        };
        let own = gate.clone();
        gate.admit(
            Kind::Read,
            Box::new(move |failure| {
                match unless_failed(failure, || read_at(own.contents(), offset, size)) {
                    Ok(bytes) => reply.data(&bytes),
                    Err(error) => reply.error(error),
                }
            }),
        );
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let gate = match self.files.get(ino) {
            Ok(found) => found.gate,
            Err(error) => return reply.error(errno(&error)),
        };
        let own = gate.clone();
        let data = data.to_vec();
        gate.admit(
            Kind::Write,
            Box::new(move |failure| {
                match unless_failed(failure, || own.contents().write_all_at(&data, offset)) {
                    Ok(()) => reply.written(data.len() as u32),
                    Err(error) => reply.error(error),
                }
            }),
        );
    }

    /// `close`: nothing to do.
    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let gate = match self.files.get(ino) {
            Ok(found) => found.gate,
            Err(error) => return reply.error(errno(&error)),
        };
        gate.admit(
            Kind::Sync,
            Box::new(move |failure| match unless_failed(failure, || Ok(())) {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error),
            }),
        );
    }

    fn fallocate(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let gate = match self.files.get(ino) {
            Ok(found) => found.gate,
            Err(error) => return reply.error(errno(&error)),
        };
        let own = gate.clone();
        gate.admit(
            Kind::Allocate,
            Box::new(move |failure| {
                // A memfd cannot zero a range, only punch a hole: EOPNOTSUPP, as on many file
                // systems.
                let mode = FallocateFlags::from_bits_retain(mode as u32);
                let run = || Ok(fallocate(own.contents(), mode, offset, length)?);
                match unless_failed(failure, run) {
                    Ok(()) => reply.ok(),
                    Err(error) => reply.error(error),
                }
            }),
        );
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let nodes = self.files.nodes();
        let files = (2..).zip(&*nodes).filter(|(_, node)| !node.is_unlinked);
        let files = files.map(|(ino, node)| (ino, FileType::RegularFile, node.name.as_os_str()));
        let dots = [".", ".."].map(|name| (1, FileType::Directory, OsStr::new(name)));
        let all = (1..).zip(dots.into_iter().chain(files));
        for (next, (ino, kind, name)) in all.skip(offset as usize) {
            if reply.add(INodeNo(ino), next, kind, name) {
                break;
            }
        }
        drop(nodes);
        reply.ok();
    }
}
