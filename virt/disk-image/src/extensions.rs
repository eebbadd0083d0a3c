//! The part behind the header: its extensions, and the name of a backing file (§ "Header
//! extensions", "Header").
//!
//! Both versions have extensions, behind 72 bytes in version 2 and behind the header's own length
//! in version 3. They end with the type 0, where the backing file's name begins, or with the first
//! cluster. An extension of an unknown type is skipped: what must not be skipped is an incompatible
//! feature.
//!
//! Bound: the first cluster, of at most 2 MiB, which is read once.

use crate::file_io::{FileIo, read_known};
use crate::header::{HEADER_BYTES, Layout, be32, be64};
use crate::options::ImageErrorKind;

/// Types of extensions that say something to us.
const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const ENCRYPTION: u32 = 0x0537_be77;
/// Bytes of an entry of the feature name table.
const FEATURE_NAME_BYTES: usize = 48;
/// Longest name of a backing file.
const MAX_NAME_BYTES: u64 = 1023;

/// The file behind an image, as the image names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BackingName {
    pub name: String,
    /// Its format, in QEMU's words, if the image says so.
    pub format: Option<String>,
}

fn corrupt<T>(what: String) -> Result<T, ImageErrorKind> {
    Err(ImageErrorKind::Corrupt(what))
}

/// Reads what follows the header of the image in `file`, which has `len` bytes: the backing file it
/// names.
pub(crate) fn read(
    file: &dyn FileIo,
    header: &[u8; HEADER_BYTES],
    layout: &Layout,
    len: u64,
    is_writable: bool,
) -> Result<Option<BackingName>, ImageErrorKind> {
    let mut bytes = vec![0; layout.cluster_bytes().min(len) as usize];
    read_known(file, &mut bytes, 0, len).map_err(ImageErrorKind::Io)?;
    let (name_offset, name_bytes) = (be64(header, 8), u64::from(be32(header, 16)));
    let name = match name_offset {
        0 => None,
        _ => Some(backing_name(layout, &bytes, name_offset, name_bytes)?),
    };
    // § "Compression type": the byte behind the header of 104 bytes, which a feature bit announces.
    let first = layout.header_bytes as usize;
    if first > HEADER_BYTES
        && let Some(kind @ 1..) = bytes.get(HEADER_BYTES)
    {
        return corrupt(format!(
            "it names compression {kind} and lacks the feature bit of another compression than zlib"
        ));
    }
    let end = match name_offset {
        0 => bytes.len(),
        _ => name_offset as usize,
    };
    let format = backing_format(bytes.get(first..end).unwrap_or_default(), is_writable)?;
    Ok(name.map(|name| BackingName { name, format }))
}

fn backing_name(
    layout: &Layout,
    bytes: &[u8],
    offset: u64,
    len: u64,
) -> Result<String, ImageErrorKind> {
    if len > MAX_NAME_BYTES {
        return corrupt(format!("the name of its backing file has {len} bytes"));
    }
    let end = offset.checked_add(len);
    let is_inside =
        offset >= layout.header_bytes && end.is_some_and(|end| end <= bytes.len() as u64);
    if !is_inside {
        return corrupt(format!(
            "the name of its backing file ({len} bytes at {offset:#x}) is outside the first \
             cluster, or in the header"
        ));
    }
    let name = &bytes[offset as usize..(offset + len) as usize];
    match std::str::from_utf8(name) {
        Ok(name) => Ok(name.to_owned()),
        Err(_) => Err(ImageErrorKind::Unsupported(format!(
            "the name of its backing file, {:?}, is no UTF-8 and that is",
            String::from_utf8_lossy(name)
        ))),
    }
}

/// The backing file's format that the extensions in `area` say.
fn backing_format(mut area: &[u8], is_writable: bool) -> Result<Option<String>, ImageErrorKind> {
    let mut format: Option<&[u8]> = None;
    while area.len() >= 8 {
        let (kind, len) = (be32(area, 0), be32(area, 4) as usize);
        if kind == END {
            break;
        }
        let Some(data) = area[8..].get(..len) else {
            return corrupt(format!(
                "its header extension {kind:#010x} of {len} bytes does not fit in front of what \
                 follows"
            ));
        };
        match kind {
            BACKING_FORMAT if format.is_some_and(|format| format != data) => {
                return corrupt("it says two formats of its backing file".into());
            }
            BACKING_FORMAT => format = Some(data),
            ENCRYPTION => {
                return corrupt(
                    "it has the parameters of an encryption, and says that there is none".into(),
                );
            }
            // The library reads the names before it writes the header, and does not expect half of
            // one.
            FEATURE_NAMES if is_writable && !len.is_multiple_of(FEATURE_NAME_BYTES) => {
                return corrupt(format!("its feature name table has {len} bytes"));
            }
            _ => {}
        }
        area = area[8..].get(len.next_multiple_of(8)..).unwrap_or_default();
    }
    let Some(format) = format else {
        return Ok(None);
    };
    match std::str::from_utf8(format) {
        Ok(format) => Ok(Some(format.to_owned())),
        Err(_) => corrupt("the format of its backing file is no text".into()),
    }
}
