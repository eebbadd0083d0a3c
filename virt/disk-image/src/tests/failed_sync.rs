//! A sync that fails is the last: the kernel reports an error once, and says nothing of it
//! afterwards.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use imago::FormatCreateBuilder;
use imago::qcow2::Qcow2;
use nix::fcntl::FallocateFlags;
use vio::blk::{BlockIo, Op, Outcome};

use crate::chain;
use crate::disk::ImageDisk;
use crate::file_io::FileIo;
use crate::image::Image;
use crate::options::{ImageFormat, ImageOptions};
use crate::storage::{Content, ImageFile};

const CLUSTER: usize = 4096;

/// A file whose syncs are counted; one of them fails, as the kernel lets one fail.
#[derive(Default)]
struct Syncs {
    count: AtomicUsize,
    /// The number of the one that fails, from 1.
    failing: AtomicUsize,
}

struct Failing {
    file: File,
    syncs: Arc<Syncs>,
}

impl FileIo for Failing {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileIo::read_at(&self.file, buffer, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileIo::write_all_at(&self.file, bytes, offset)
    }

    fn grow(&self, len: u64) -> io::Result<()> {
        self.file.grow(len)
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        self.file.fallocate(mode, offset, len)
    }

    fn sync_data(&self) -> io::Result<()> {
        let number = self.syncs.count.fetch_add(1, Ordering::Relaxed) + 1;
        if number == self.syncs.failing.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }
}

impl Syncs {
    /// The next one fails.
    fn fail_next(&self) {
        let next = self.count.load(Ordering::Relaxed) + 1;
        self.failing.store(next, Ordering::Relaxed);
    }
}

fn open(path: &std::path::Path, format: ImageFormat) -> (Image, Arc<Syncs>) {
    let syncs = Arc::new(Syncs::default());
    let options = ImageOptions {
        format,
        ..ImageOptions::default()
    };
    let opened = chain::open_through(path, &options, &|file| {
        let syncs = Arc::clone(&syncs);
        Box::new(Failing { file, syncs })
    });
    (Image::new(opened.expect("it opens")), syncs)
}

fn folder() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk");
    (folder, path)
}

fn qcow2() -> (tempfile::TempDir, std::path::PathBuf) {
    let (folder, path) = folder();
    create(&path, 1 << 20, CLUSTER);
    (folder, path)
}

/// A qcow2 image in a new file.
pub(super) fn create(path: &std::path::Path, size: u64, cluster: usize) {
    let file = File::create_new(path).expect("a new file");
    let storage = ImageFile::new(Box::new(file), path.to_owned(), 0, Content::Raw);
    Qcow2::<ImageFile>::create_builder(storage)
        .cluster_size(cluster)
        .size(size)
        .create()
        .expect("an image");
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

#[test]
fn flush_that_failed_stays_failed_and_reads_and_writes_go_on() {
    let (raw_folder, raw) = folder();
    std::fs::write(&raw, vec![0; 1 << 20]).expect("written");
    let (qcow2_folder, qcow2) = qcow2();
    for (path, format) in [(&raw, ImageFormat::Raw), (&qcow2, ImageFormat::Qcow2)] {
        let (image, syncs) = open(path, format);
        let mut group = image.group().expect("the image");
        group.write(0, &[1; CLUSTER]).expect("written");
        group.flush().expect("flushed");
        drop(group);
        image.flush().expect("nothing has failed yet");
        assert!(image.overwrite(0, &[2; 512]).expect("written"));
        syncs.fail_next();
        assert_eq!(errno(image.flush()), Some(libc::EIO));
        // The kernel would say that all is well.
        for _ in 0..3 {
            assert_eq!(errno(image.flush()), Some(libc::EIO), "{format:?}");
        }
        assert!(image.overwrite(0, &[3; 512]).expect("writes go on"));
        let mut data = [0; 1024];
        image.read(0, &mut data).expect("reads go on");
        assert!(data[..512] == [3; 512] && data[512..] == [1; 512]);
        drop(image);
        // A file opened anew is a new beginning.
        let (image, _) = open(path, format);
        image.flush().expect("flushed");
    }
    drop((raw_folder, qcow2_folder));
}

/// Writes that cannot be kept in order are not done; those that need no order are. And no caller is
/// notified that something is written which the file does not say.
#[test]
fn clusters_whose_barrier_failed_are_not_written_to_as_if_they_were_there() {
    let (_folder, path) = qcow2();
    let (image, syncs) = open(&path, ImageFormat::Qcow2);
    let mut group = image.group().expect("the image");
    group.write(0, &[1; CLUSTER]).expect("written");
    group.flush().expect("flushed");
    drop(group);
    image.flush().expect("flushed");

    syncs.fail_next();
    let mut group = image.group().expect("the image");
    group.write(CLUSTER as u64, &[2; 512]).expect("in memory");
    assert!(
        group.flush().is_err(),
        "the sync before the L2 table failed"
    );
    drop(group);
    // The library has the cluster now, the file has not.
    let begun = image.overwrite(CLUSTER as u64 + 1024, &[3; 512]);
    assert!(!begun.expect("to be tried alone"));
    let mut group = image.group().expect("the image");
    group
        .write(CLUSTER as u64 + 1024, &[3; 512])
        .expect("in memory");
    assert!(group.flush().is_err());
    drop(group);
    assert!(image.overwrite(512, &[4; 512]).expect("writes go on"));
    assert!(image.flush().is_err());
    drop(image);

    let (image, _) = open(&path, ImageFormat::Qcow2);
    let mut data = vec![9; 2 * CLUSTER];
    image.read(0, &mut data).expect("read");
    assert!(data[..512] == [1; 512] && data[512..1024] == [4; 512]);
    assert!(data[CLUSTER..] == [0; CLUSTER]);
}

/// Through the back end, where a reset of the device is between the two flushes.
#[test]
fn failed_flush_outlives_a_reset_of_the_device() {
    let (_folder, path) = qcow2();
    let (image, syncs) = open(&path, ImageFormat::Qcow2);
    let mut disk = ImageDisk::of(image, ImageOptions::default()).expect("threads");
    let flush = |disk: &mut ImageDisk| {
        disk.submit(0, Op::Flush, &[]);
        disk.flush();
        let mut done = Vec::new();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while done.is_empty() {
            disk.poll(&mut done);
            assert!(std::time::Instant::now() < deadline, "no completion");
            std::thread::yield_now();
        }
        disk.unreserve(0);
        done[0].outcome
    };
    disk.attach(Arc::new(0_u8));
    assert_eq!(flush(&mut disk), Outcome::Done);
    syncs.fail_next();
    assert_eq!(flush(&mut disk), Outcome::Failed(libc::EIO));
    disk.detach();
    disk.attach(Arc::new(0_u8));
    assert_eq!(flush(&mut disk), Outcome::Failed(libc::EIO));
}
