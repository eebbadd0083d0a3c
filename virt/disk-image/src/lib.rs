//! Disk images, qcow2 above all, as a [`vio::blk::BlockIo`].
//!
//! Follows QEMU's `docs/interop/qcow2.txt` ("§" in comments means its headings). The format itself
//! is the work of the library `imago`; this crate makes a block device of it that can be trusted
//! with a guest:
//!
//! ```text
//! device's thread ─▶ disk (BlockIo) ─▶ queue ─▶ worker × n ─▶ image (the gate) ─▶ imago ─▶ storage
//!                     ◀── completions, eventfd ──┘                    file ◀─ order, vet ◀──┘
//! open: chain ──▶ lock, header, extensions, check, imago; a backing file likewise
//! ```
//! Reading order: [`ImageOptions`]; `chain` (opening), with [`lock`], `header`, `extensions`,
//! `entry` and `check`; `storage`, `vet` (L2 tables as they are read) and `order` (what is on the
//! disk before what); `image` (the operations and the gate); `queue`, `worker`, `disk` (the back
//! end).
//!
//! **Served:** qcow2 versions 2 and 3 with clusters of 512 bytes to 2 MiB, compressed clusters
//! (deflate), internal snapshots (which stay as they are), backing files, and raw files. Discards
//! and zeroes with `unmap` give clusters up, and their space back to the host.
//!
//! **Not served, refused by name:** encryption, external data files, extended L2 entries, zstd,
//! images that QEMU marked corrupt, for writing those it marked dirty, backing files that are no
//! paths. Persistent bitmaps are invalidated by writing, as the format has it. There is no
//! O_DIRECT: data go through the page cache.
//!
//! **What spoils reading** is refused when an image is opened, or fails with EIO for the cluster
//! alone, for every file of a chain and however it is opened. A mapping never reads as zeroes
//! because a file is short:
//!
//! - The header, the L1 table and the L2 tables it refers to must be in the file, whole, apart from
//!   each other and from refcounts; otherwise the image is refused. For writing everything else
//!   that is mapped must be sound as well.
//! - In an image that is only read an entry of an L2 table at fault (outside the file or in a
//!   table, not aligned, reserved bits, a flag that the version does not have) fails reads of its
//!   cluster, and so do compressed data that do not say a whole cluster. A line of the log names
//!   file and fault, within a budget.
//! - Of a cluster that the file ends in every byte must be there that is a part of the disk. (QEMU
//!   reads zeroes for what is missing of the last cluster. Neither the format nor QEMU's tools make
//!   such files: they write clusters whole.) Of compressed data the last sector may be cut, for
//!   QEMU writes them so, but not what is used of it.
//! - A file that becomes shorter while it is open, raw ones included, fails where it was cut.
//!
//! Not noticed, for nothing in the files shows it: data changed in place, a mapping to another
//! cluster's data, a raw backing file that had been longer. *Damage that spoils only writing*
//! (reference counts, the mark "dirty", two owners of a cluster, snapshots) prevents only writing.
//!
//! **One writer.** Images and backing files are locked as QEMU locks them ([`lock`], which serves
//! users of a raw file by other means as well). Opening waits for a predecessor, also for one that
//! was killed and whose last requests the kernel still has.
//!
//! **What survives.** An operation that was reported done survives the death of the process at any
//! moment, flushed or not, and whatever write of the file failed before or after it (a full disk,
//! say); `qemu-img check` finds nothing worse than leaked clusters afterwards. What was flushed
//! survives a power cut, and so does the image, unless [`ImageOptions::barriers`] is off; in the
//! place of what was written after the last flush, each sector (512 bytes) has its old contents or
//! new ones. A flush that fails is the last that may succeed until the image is opened again.
//! Counts that a power cut leaves too low without barriers are mended when the image is opened.
//!
//! **Trust.** An image is believed nothing that is not checked: header and tables before the first
//! write or read; a backing file only if the options allow it and the image says its format. The
//! library may panic without harm to more than its own disk. A guest's data never pass for
//! metadata.
//!
//! **Memory**, at most: buffers of 16 MiB in use and 64 KiB a slot kept; the L1 and refcount tables
//! (32 and 8 MiB); the library's caches of 128 L2 tables and 32 refcount blocks, a cluster each (10
//! MiB at 64 KiB, 320 MiB at 2 MiB); about 24 bytes for each L2 table and refcount block (16 of an
//! image that is only read); per worker copies of a few clusters.
#![deny(unsafe_code)]

mod chain;
mod check;
mod disk;
mod entry;
mod extensions;
mod file_io;
mod header;
mod image;
pub mod lock;
mod options;
mod order;
mod queue;
#[expect(
    unsafe_code,
    reason = "the library's trait has unsafe methods; see the module"
)]
mod storage;
#[cfg(test)]
mod tests;
mod trial;
mod vet;
mod worker;

pub use disk::ImageDisk;
pub use options::{Backing, ImageError, ImageErrorKind, ImageFormat, ImageOptions};
pub use trial::FileUse;
