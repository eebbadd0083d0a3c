//! Opening an image and the files behind it.
//!
//! The library would follow the names in an image by itself, and guess the format of a file that
//! none is given for. So it is not asked to: every file is opened, locked and looked at here, the
//! last of the chain first, and given to the library open.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use imago::FormatAccess;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use vio::blk::SECTOR;

use crate::check;
use crate::extensions::{self, BackingName};
use crate::file_io::FileIo;
use crate::header::{self, Layout};
use crate::lock::{self, Access, Locking};
use crate::options::{Backing, ImageError, ImageErrorKind, ImageFormat, ImageOptions};
use crate::order::WriteOrder;
use crate::storage::{Content, ImageFile, Shared};
use crate::trial::{self, FileUse, Overlay};
use crate::vet::Tables;

/// Most files behind each other. Each has its own caches and costs a look-up per read.
pub(crate) const MAX_CHAIN: usize = 32;

/// An opened image: the library's access to it, and its files.
pub(crate) struct Opened {
    pub access: FormatAccess<ImageFile>,
    pub files: Files,
    /// Of a qcow2 image.
    pub layout: Option<Layout>,
}

/// The files of a chain, open and locked.
pub(crate) struct Files {
    /// The image's own.
    own: OpenFile,
    /// Its backing file, the backing file's own, and so on.
    behind: Vec<OpenFile>,
}

struct OpenFile {
    file: Arc<Shared>,
    format: ImageFormat,
    is_writable: bool,
}

impl Files {
    /// The file of the image itself.
    pub(crate) fn own(&self) -> &Arc<Shared> {
        &self.own.file
    }

    pub(crate) fn has_backing(&self) -> bool {
        !self.behind.is_empty()
    }

    /// The file of the image itself at depth 0, and so on.
    pub(crate) fn at(&self, depth: usize) -> Option<&Arc<Shared>> {
        match depth.checked_sub(1) {
            None => Some(&self.own.file),
            Some(behind) => self.behind.get(behind).map(|open| &open.file),
        }
    }

    /// Some data of the chain are known to be compressed.
    pub(crate) fn has_packed(&self) -> bool {
        self.own.file.has_packed() || self.behind.iter().any(|open| open.file.has_packed())
    }

    /// Opens them with the library anew: no state but the files' contents is kept.
    pub(crate) fn load(&self) -> io::Result<FormatAccess<ImageFile>> {
        let mut behind = None;
        for file in self.behind.iter().rev() {
            behind = Some(file.load(behind)?);
        }
        self.own.load(behind)
    }
}

impl OpenFile {
    fn load(&self, behind: Option<FormatAccess<ImageFile>>) -> io::Result<FormatAccess<ImageFile>> {
        let storage = ImageFile::of(Arc::clone(&self.file));
        if self.format == ImageFormat::Raw {
            return Ok(FormatAccess::new(Raw::open_image(
                storage,
                self.is_writable,
            )?));
        }
        // The header was checked before, and has not changed since.
        let mut image = Qcow2::<ImageFile>::open_image(storage, self.is_writable)?;
        image.set_data_file(None);
        image.set_backing(behind);
        Ok(FormatAccess::new(image))
    }
}

/// Opens the image at `path` and its backing files.
pub(crate) fn open(path: &Path, options: &ImageOptions) -> Result<Opened, ImageError> {
    open_through(path, options, &|file| Box::new(file))
}

/// Likewise. `through`: what stands before each opened file, the image's own first.
pub(crate) fn open_through(
    path: &Path,
    options: &ImageOptions,
    through: &dyn Fn(File) -> Box<dyn FileIo>,
) -> Result<Opened, ImageError> {
    let mut chain = Chain::new(options, through);
    chain.open(path, options.format, options.read_only)
}

/// Likewise in trial: nothing is locked or changed. Which files would be in use.
pub(crate) fn open_in_trial(
    path: &Path,
    options: &ImageOptions,
) -> Result<(Opened, Vec<FileUse>), ImageError> {
    let mut chain = Chain {
        is_trial: true,
        ..Chain::new(options, &|file| Box::new(Overlay::new(file)))
    };
    let opened = chain.open(path, options.format, options.read_only)?;
    Ok((opened, chain.seen))
}

struct Chain<'a> {
    backing: Backing,
    locking: Locking,
    barriers: bool,
    /// The files opened so far.
    seen: Vec<FileUse>,
    /// Nothing is locked, and files are opened for reading, whatever they are to be used for.
    is_trial: bool,
    through: &'a dyn Fn(File) -> Box<dyn FileIo>,
}

impl<'a> Chain<'a> {
    fn new(options: &ImageOptions, through: &'a dyn Fn(File) -> Box<dyn FileIo>) -> Self {
        Self {
            backing: options.backing,
            locking: options.locking,
            barriers: options.barriers,
            seen: Vec::new(),
            is_trial: false,
            through,
        }
    }
}

impl Chain<'_> {
    fn open(
        &mut self,
        path: &Path,
        format: ImageFormat,
        read_only: bool,
    ) -> Result<Opened, ImageError> {
        let at = |kind| ImageError {
            path: path.to_owned(),
            kind,
        };
        let io = |error| at(ImageErrorKind::Io(error));
        // Reference counts matter to a writer alone.
        let checks_counts = !read_only;
        let own = |file| OpenFile {
            file,
            format,
            is_writable: !read_only,
        };
        let (file, len) = self.open_file(path, read_only).map_err(at)?;
        let file = (self.through)(file);
        if format == ImageFormat::Raw {
            if self.seen.len() == 1 && (len == 0 || !len.is_multiple_of(SECTOR)) {
                return Err(at(ImageErrorKind::Size(len)));
            }
            let storage = ImageFile::new(file, path.to_owned(), len, Content::Raw);
            let file = storage.shared();
            let raw = Raw::open_image(storage, !read_only).map_err(io)?;
            return Ok(Opened {
                access: FormatAccess::new(raw),
                files: Files {
                    own: own(file),
                    behind: Vec::new(),
                },
                layout: None,
            });
        }

        let header = header::read(&*file, len).map_err(io)?;
        let layout = Layout::parse(&header, len).map_err(at)?;
        if checks_counts {
            layout.check_counts(&header, len).map_err(at)?;
        }
        let behind = extensions::read(&*file, &header, &layout, len, checks_counts).map_err(at)?;
        let mut has_packed = false;
        if checks_counts {
            let checked = check::check(&*file, &layout, len).map_err(at)?;
            has_packed = checked.has_packed;
            if checked.low != 0 && !self.is_trial {
                tracing::warn!(
                    "{}: {} clusters in use were counted too low, mended (a power cut leaves it \
                     so)",
                    path.display(),
                    checked.low
                );
            }
        }
        let content = if read_only {
            Content::Read(layout, Tables::read(&*file, &layout, len).map_err(at)?)
        } else {
            let order = match self.barriers {
                true => Some(WriteOrder::new(&*file, &layout, len).map_err(io)?),
                false => None,
            };
            Content::Written {
                layout,
                order,
                has_packed,
            }
        };
        let storage = ImageFile::new(file, path.to_owned(), len, content);
        let file = storage.shared();
        let mut image = Qcow2::<ImageFile>::open_image(storage, !read_only)
            .map_err(|error| at(kind_of(error)))?;
        file.settle().map_err(io)?;
        image.set_data_file(None);
        let behind = match behind {
            None => None,
            Some(BackingName { name, format }) => {
                let (name, format) = self.behind(&name, format.as_deref()).map_err(at)?;
                Some((resolve(path, &name), format))
            }
        };
        let mut files = Files {
            own: own(file),
            behind: Vec::new(),
        };
        if let Some((path, format)) = behind {
            let behind = self.open(&path, format, true)?;
            files.behind = behind.files.behind;
            files.behind.insert(0, behind.files.own);
            image.set_backing(Some(behind.access));
        }
        Ok(Opened {
            access: FormatAccess::new(image),
            files,
            layout: Some(layout),
        })
    }

    /// Opens, identifies and locks a file.
    fn open_file(&mut self, path: &Path, read_only: bool) -> Result<(File, u64), ImageErrorKind> {
        if self.seen.len() == MAX_CHAIN {
            return Err(ImageErrorKind::Chain(MAX_CHAIN));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(!read_only && !self.is_trial)
            // A FIFO is to be refused, not waited for. Regular files and disks take no notice.
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(ImageErrorKind::Io)?;
        let metadata = file.metadata().map_err(ImageErrorKind::Io)?;
        let kind = metadata.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(ImageErrorKind::Kind);
        }
        let identity = (metadata.dev(), metadata.ino());
        if self.seen.iter().any(|file| file.identity == identity) {
            return Err(ImageErrorKind::Chain(MAX_CHAIN));
        }
        let access = Access::of_disk(read_only);
        self.seen.push(FileUse {
            path: path.to_owned(),
            identity,
            access,
        });
        let mut file = match self.is_trial {
            true => {
                if access == Access::Write {
                    trial::may_write(path).map_err(ImageErrorKind::Io)?;
                }
                lock::probe(&file, access, &self.locking)?;
                file
            }
            false => lock::lock(file, path, access, &self.locking)?,
        };
        // After the lock: no other process changes it now. (A block device's metadata say 0; its
        // end does not.)
        let len = file.seek(SeekFrom::End(0)).map_err(ImageErrorKind::Io)?;
        Ok((file, len))
    }

    /// Whether a backing file of this name and format may be opened.
    fn behind(
        &self,
        name: &str,
        format: Option<&str>,
    ) -> Result<(PathBuf, ImageFormat), ImageErrorKind> {
        if self.backing == Backing::Refuse {
            return Err(ImageErrorKind::BackingRefused(name.to_owned()));
        }
        let format = match format {
            Some("qcow2") => ImageFormat::Qcow2,
            Some("raw" | "file") => ImageFormat::Raw,
            Some(other) => {
                return Err(ImageErrorKind::Unsupported(format!(
                    "a backing file of format {other:?} is"
                )));
            }
            None => return Err(ImageErrorKind::BackingFormat(name.to_owned())),
        };
        // QEMU reads "protocol:…" and "json:…" as no path; only "file:" is one.
        let path = match name.split_once(':') {
            Some(("file", path)) => path,
            Some((head, _)) if !head.contains('/') => {
                return Err(ImageErrorKind::Unsupported(format!(
                    "a backing file that is no path ({name:?}) is"
                )));
            }
            _ => name,
        };
        if path.is_empty() || path.contains('\0') {
            return Err(ImageErrorKind::Corrupt(format!(
                "its backing file is {name:?}"
            )));
        }
        Ok((PathBuf::from(path), format))
    }
}

/// A name in the image at `image`: relative ones are to the image's folder.
fn resolve(image: &Path, name: &Path) -> PathBuf {
    match image.parent() {
        // An absolute name replaces the folder.
        Some(folder) => folder.join(name),
        None => name.to_owned(),
    }
}

/// Classifies the library's error on opening an image.
fn kind_of(error: io::Error) -> ImageErrorKind {
    match error.raw_os_error() {
        Some(_) => ImageErrorKind::Io(error),
        None => ImageErrorKind::Corrupt(error.to_string()),
    }
}
